"""Prints the sessions and leftovers there are and changes nothing: `python -I -S -B leftovers.py DATA_DIR NODE_ID`.

Used while no nsinit runs, or beside one. Standard input: a JSON object with the ids that the database has as alive
(`recorded`) and the pid of an nsinit that runs (`nsinit`, 0: none). Standard output: a JSON object with `found` and
`leftovers`, as nsinit would answer `Scan` and `FindLeftovers`; `homes`, for each cgroup directory of the node the two
`cgroup.procs` files of which one takes a process that is to work there; `rivals`, further directories in which
recorded sessions run.

An nsinit makes the node's directory in the cgroup in which it was started, so directories are found by name and owner.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator, Iterator
from dataclasses import asdict
from typing import Any, TypeVar

sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from nsinit.cgroup.session import SessionCgroup
from nsinit.cgroup.tree import (
    LEAF,
    OPTIONAL,
    REQUIRED,
    WITHOUT_V2,
    Located,
    Tree,
    home_of,
    locate_process,
    name_of_node,
    owner_of,
    read_owner,
)
from nsinit.scheduler import Wait
from nsinit.server.leftovers import HostView, Leftovers, directories_named
from nsinit.server.sessions import scan
from nsinit.storage.paths import Layout
from nsinit.wire.validate import check_data_dir, check_node_id, is_session_id

R = TypeVar("R")


def main() -> None:
    """Print one look."""
    data_dir, node_id = sys.argv[1:3]
    check_data_dir(data_dir)
    check_node_id(node_id)
    request = json.load(sys.stdin)
    layout, name = Layout(os.path.realpath(data_dir)), name_of_node(node_id)
    json.dump(look(layout, name, frozenset(request["recorded"]), request["nsinit"]), sys.stdout)


def look(layout: Layout, name: str, recorded: frozenset[str], nsinit: int) -> dict[str, Any]:  # a JSON object
    """Return the object to print. Nothing is found in a data directory in which no nsinit has worked."""
    if not all(map(os.path.isdir, (layout.sessions, layout.run, layout.trash))):
        return {"found": [], "leftovers": [], "homes": [], "rivals": []}
    located = locate_process(nsinit or None)
    homes, rivals = choose_homes(located, layout, name, recorded)
    tree = tree_of(located, name, homes)
    leftovers = Leftovers(tree, layout, located, name, HostView.open())
    try:
        return {
            "found": [asdict(each) for each in scan(tree, layout)[0]],
            "leftovers": [asdict(each) for each in _finished(leftovers.find())],
            "homes": [
                [f"{os.path.dirname(each)}/cgroup.procs", f"{each}/{LEAF}/cgroup.procs"] for each in homes.values()
            ],
            "rivals": rivals,
        }
    finally:
        leftovers.host.close()


def choose_homes(
    located: Located, layout: Layout, name: str, recorded: frozenset[str]
) -> tuple[dict[str, str], list[str]]:
    """Return the node's directory in use in each hierarchy, by mount point, and the other directories in which recorded
    sessions run.

    In use is the directory with most of the recorded sessions, or else the one where an nsinit is or would be, or else
    any with the right name and owner.
    """
    owner, usual = owner_of(layout.data_dir), set(tree_of(located, name, {}).unique)
    homes, rivals = {}, []
    for top in dict.fromkeys((*located.v1_mounts.values(), located.unified_mount)):
        if top is None:
            continue
        owned = [each for each in directories_named(top, name) if read_owner(each) == owner]
        running = {each: recorded.intersection(_running(each)) for each in owned}
        owned.sort(key=lambda each: (-len(running[each]), each not in usual, each))
        if owned:
            homes[top] = owned[0]
            rivals += [each for each in owned[1:] if running[each]]
    return homes, rivals


def tree_of(located: Located, name: str, homes: dict[str, str]) -> Tree:
    """Return the cgroup tree that consists of `homes`. A hierarchy without a home gets the directory that an nsinit
    started by this process would make.
    """
    own = home_of(located, name)
    unified = None if located.unified_mount is None else homes.get(located.unified_mount, f"{own}/{name}")
    has_v1 = any(located.v1_mounts[each] in homes for each in REQUIRED if each in located.v1_mounts)
    if unified is not None and not has_v1 and (homes or not set(REQUIRED) <= located.v1.keys()):
        return Tree("v2", dict.fromkeys((*REQUIRED, "unified"), unified))
    dirs = {
        controller: homes.get(located.v1_mounts[controller], f"{located.v1[controller]}/{name}")
        for controller in (*REQUIRED, *OPTIONAL, *(() if unified else WITHOUT_V2))
        if controller in located.v1
    }
    return Tree("v1", dirs) if unified is None else Tree("hybrid", {**dirs, "unified": unified})


def _running(directory: str) -> Iterator[str]:
    """Yield the sessions that have processes in a node's directory."""
    tree = Tree("v2", {"unified": directory, "memory": directory, "pids": directory})
    for name in os.listdir(directory):
        if is_session_id(name) and SessionCgroup(tree, name).processes():
            yield name


def _finished(work: Generator[Wait, bool, R]) -> R:
    """Run a job to its end; its pauses, which let other jobs have their turn, are skipped."""
    try:
        while True:
            next(work)
    except StopIteration as end:
        result: R = end.value
        return result


if __name__ == "__main__":
    main()
