"""Mounts in parts of the data directory that nobody should mount anything in. Pure but for reading mountinfo.

Sessions are mounted in namespaces of their own, so a mount that shows on the machine below `sessions/`, `run/`, or
`trash/` was made by hand. A start as root undoes it (`cli/privilege.py`). Nothing here, or anywhere, deletes through
it: in a namespace that has it, its point can't be removed; in one that has not, what is behind it isn't there, and the
kernel lets go of it when the point is removed.
Sources: proc_pid_mountinfo(5); rmdir(2), unlink(2) (a mount point in another mount namespace).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

_PLACES = ("disk", "run", "sessions", "spool", "stage", "trash")
_ESCAPE = re.compile(r"\\([0-7]{3})")


def find_mounts(data_dir: Path, mountinfo: str) -> Sequence[str]:
    """Return the mount points in those places, outermost first."""
    places = [f"{data_dir}/{name}" for name in _PLACES]
    points = [_ESCAPE.sub(_character, line.split(" ", 5)[4]) for line in mountinfo.splitlines()]
    return sorted({point for point in points if any(point == each or point.startswith(f"{each}/") for each in places)})


def mounts_now(data_dir: Path) -> Sequence[str]:
    """Return those of this process's mount namespace."""
    with open("/proc/self/mountinfo", "rb") as file:
        return find_mounts(Path(os.path.realpath(data_dir)), os.fsdecode(file.read()))


def mounts_to_undo(data_dir: Path) -> Sequence[str]:
    """Return those of this process's mount namespace that are below those places, the innermost first. A mount on such
    a place itself may be a disk for it."""
    places = {f"{os.path.realpath(data_dir)}/{name}" for name in _PLACES}
    return [point for point in reversed(mounts_now(data_dir)) if point not in places]


def _character(match: re.Match[str]) -> str:
    return chr(int(match[1], 8))
