"""Cgroups of the processes beside the daemon, the egress process and the preview gateway: one in each hierarchy.

The starter of a process names them, the process makes and enters them while it is root, and the starter removes them
when the process has ended. They are below the cgroups of the starter, or where root's configuration has the sandboxes:
no message says the path. What a killed starter leaves, or a process that has outlived it, is removed by the next one
in the same place, and by an nsinit there at its start and at its end: the kernel removes no cgroup with a process in
it. Sources: cgroups(7); Documentation/admin-guide/cgroup-v2.rst, "No Internal Process Constraint".
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Iterable

from nsinit.cgroup.tree import BESIDE, LEAF, Located, Tree, locate_process

_CONTROLLERS = ("memory", "cpu")
_TRIES, _PAUSE_S = 20, 0.005
"""The kernel may take a moment to find the cgroup of an ended process empty."""

_numbers = itertools.count(1)


def name_cgroups(role: str, parent: str = "auto") -> list[str]:
    """Return paths for the cgroups of a process that this one is about to start; none if this one is not root.
    `parent`: as in `protocol.Start`."""
    if os.geteuid() != 0:
        return []
    name = f"{BESIDE}{role}-{os.getpid()}-{next(_numbers)}"
    places = _places(locate_process(), parent)
    _sweep(*places)
    return [f"{place}/{name}" for place in places]


def remove_cgroups(paths: Iterable[str]) -> None:
    """Remove the cgroups of a process that has ended. One that stays is found by the next nsinit."""
    for path in paths:
        for _ in range(_TRIES):
            try:
                os.rmdir(path)
            except FileNotFoundError:
                break
            except OSError:
                time.sleep(_PAUSE_S)
            else:
                break


def sweep(located: Located, tree: Tree) -> None:
    """Remove what starters in the same place as this process have left, or in the place of a node's directories."""
    _sweep(*_places(located), *tree.unique, *map(os.path.dirname, tree.unique))


def _sweep(*places: str) -> None:
    for place in dict.fromkeys(places):
        try:
            names = [name for name in os.listdir(place) if name.startswith(BESIDE)]
        except FileNotFoundError:
            continue
        for name in names:
            try:
                os.rmdir(f"{place}/{name}")
            except OSError:
                pass  # a process is in it


def _places(located: Located, parent: str = "auto") -> list[str]:
    """Return the cgroups below which those of a started process are. From the leaf of a v2 tree, which hands no
    controller down, beside the leaf."""
    if parent != "auto":
        tops = (*(located.v1_mounts.get(name) for name in _CONTROLLERS), located.unified_mount)
        named = dict.fromkeys(f"{top.rstrip('/')}/{parent.strip('/')}" for top in tops if top is not None)
        return [each for each in named if os.path.isdir(each)]  # nsinit makes them
    unified = located.unified
    if unified is not None and re.search(rf"/sandkasten-[^/]+/{LEAF}$", unified):
        unified = os.path.dirname(unified)
    found = (*(located.v1.get(name) for name in _CONTROLLERS), unified)
    return list(dict.fromkeys(each for each in found if each is not None))
