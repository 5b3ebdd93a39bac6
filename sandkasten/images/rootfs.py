"""Judge a root file system without trusting it: every look-up resolves links inside it, never on the machine.

The check gives a clear sentence at import instead of a failed session later. It grants nothing: nsinit opens every
mount point again with openat2(RESOLVE_IN_ROOT | RESOLVE_NO_SYMLINKS).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

MOUNT_POINTS = ("dev", "proc", "sys", "tmp", "run", "workspace", "home")
SHELLS = ("/bin/bash", "/bin/sh")
MAX_LINKS = 40
"""The kernel's bound (path_resolution(7))."""
_OPAQUE = "trusted.overlay.opaque"


def find_problems(*trees: str, usr: str | None = None) -> list[str]:
    """Return the reasons why directories, the topmost layer first, can't be an image together, one sentence each.

    `usr` is the directory of the machine that sessions see as `/usr`, for an image without one.
    """
    if any(not os.path.isdir(tree) or os.path.islink(tree) for tree in trees):
        return ["there is no rootfs directory"]
    if _find(trees, ["manifest.json"]) and not _find(trees, ["etc"]):
        return ["this is an archive of layers, not a root file system; `sandkasten image import FILE` takes such"]
    problems = []
    if usr is None and not _is_directory(trees, "etc"):
        problems.append("/etc is no directory")
    for name in MOUNT_POINTS:
        if _find(trees, [name]) and not _is_directory(trees, name):
            problems.append(f"/{name} is no plain directory, so nothing can be mounted there")
    if not any(is_program(*trees, path=shell, usr=usr) for shell in SHELLS):
        problems.append(f"there is no shell ({' or '.join(SHELLS)})")
    return problems


def is_program(*trees: str, path: str, usr: str | None = None) -> bool:
    """Whether `path`, seen from inside, is a regular file that every user may execute."""
    found = resolve(*trees, path=path, usr=usr)
    if found is None:
        return False
    mode = os.lstat(found).st_mode
    return stat.S_ISREG(mode) and bool(mode & stat.S_IXOTH)


def resolve(*trees: str, path: str, usr: str | None = None) -> str | None:
    """Return where `path`, seen from inside `trees`, lies on the machine; None if it does not exist.

    The trees must be at rest: a walk by name is no defence against a process that changes the tree meanwhile.
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
        here = _find(trees, [*inside, part], usr)
        if here is None:
            return None
        if not os.path.islink(here):
            inside.append(part)
            continue
        links += 1
        if links > MAX_LINKS:
            return None
        target = os.readlink(here)
        inside = [] if target.startswith("/") else inside
        todo += target.split("/")[::-1]
    return _find(trees, inside, usr)


def _find(trees: Sequence[str], parts: list[str], usr: str | None = None) -> str | None:
    """Return the path, in the topmost tree that has it, of what an overlay of the trees shows (overlayfs.rst)."""
    if usr is not None and parts[:1] == ["usr"]:
        trees, parts = (usr,), parts[1:]
    for tree in trees:
        path, hides = tree, False
        for number, part in enumerate(parts, 1):
            path = os.path.join(path, part)
            try:
                found = os.lstat(path)
            except FileNotFoundError:
                break
            if stat.S_ISCHR(found.st_mode) and found.st_rdev == 0:
                return None
            if not stat.S_ISDIR(found.st_mode) and number < len(parts):
                return None
            hides = hides or (len(trees) > 1 and stat.S_ISDIR(found.st_mode) and is_opaque(path))
        else:
            return path
        if hides:
            return None
    return None


def is_opaque(path: str | int) -> bool:
    """Whether a directory, by its path or as a descriptor, hides what layers below have there."""
    try:
        return os.getxattr(path, _OPAQUE) == b"y"
    except OSError:
        return False


def _is_directory(trees: Sequence[str], name: str) -> bool:
    found = _find(trees, [name])
    return found is not None and stat.S_ISDIR(os.lstat(found).st_mode)
