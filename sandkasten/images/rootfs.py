"""Judge a root file system without trusting it: every look-up resolves links inside it, never on the machine.

The check gives a clear sentence at import instead of a failed session later. It grants nothing: nsinit opens every
mount point again with openat2(RESOLVE_IN_ROOT | RESOLVE_NO_SYMLINKS).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

MOUNT_POINTS = ("dev", "proc", "sys", "tmp", "run", "workspace", "home")
SHELLS = ("/bin/bash", "/bin/sh")
MAX_LINKS = 40
"""The kernel's bound (path_resolution(7))."""


def find_problems(rootfs: str, *, usr: str | None = None) -> list[str]:
    """Return the reasons why `rootfs` can't be an image, one sentence each.

    `usr` is the directory of the machine that sessions see as `/usr`, for an image without one.
    """
    if not os.path.isdir(rootfs) or os.path.islink(rootfs):
        return ["there is no rootfs directory"]
    if os.path.exists(os.path.join(rootfs, "manifest.json")) and not os.path.exists(os.path.join(rootfs, "etc")):
        return ["this is a bundle of layers, not a root file system; `docker export` a container instead"]
    problems = []
    if usr is None and not _is_kind(rootfs, "etc", stat.S_ISDIR):
        problems.append("/etc is no directory")
    for name in MOUNT_POINTS:
        if os.path.lexists(os.path.join(rootfs, name)) and not _is_kind(rootfs, name, stat.S_ISDIR):
            problems.append(f"/{name} is no plain directory, so nothing can be mounted there")
    if not any(is_program(rootfs, shell, usr=usr) for shell in SHELLS):
        problems.append(f"there is no shell ({' or '.join(SHELLS)})")
    return problems


def is_program(rootfs: str, path: str, *, usr: str | None = None) -> bool:
    """Whether `path`, seen from inside, is a regular file that every user may execute."""
    found = resolve(rootfs, path, usr=usr)
    if found is None:
        return False
    mode = os.lstat(found).st_mode
    return stat.S_ISREG(mode) and bool(mode & stat.S_IXOTH)


def resolve(rootfs: str, path: str, *, usr: str | None = None) -> str | None:
    """Return where `path`, seen from inside `rootfs`, lies on the machine; None if it does not exist.

    The tree must be at rest: a walk by name is no defence against a process that changes the tree meanwhile.
    """
    todo = path.split("/")[::-1]
    inside: list[str] = []
    links = 0
    while todo:
        part = todo.pop()
        if part in ("", "."):
            continue
        if part == "..":
            inside = inside[:-1]
            continue
        here = _outside(rootfs, [*inside, part], usr)
        try:
            mode = os.lstat(here).st_mode
        except OSError:
            return None
        if not stat.S_ISLNK(mode):
            inside.append(part)
            continue
        links += 1
        if links > MAX_LINKS:
            return None
        target = os.readlink(here)
        inside = [] if target.startswith("/") else inside
        todo += target.split("/")[::-1]
    return _outside(rootfs, inside, usr)


def _outside(rootfs: str, parts: list[str], usr: str | None) -> str:
    if usr is not None and parts[:1] == ["usr"]:
        return os.path.join(usr, *parts[1:])
    return os.path.join(rootfs, *parts)


def _is_kind(rootfs: str, name: str, kind: Callable[[int], bool]) -> bool:
    try:
        return kind(os.lstat(os.path.join(rootfs, name)).st_mode)
    except FileNotFoundError:
        return False
