"""Mounts in parts of the data directory that nobody should mount anything in: found, and undone while we are root.

Sessions are mounted in namespaces of their own, so a mount that shows on the machine below `sessions/`, `run/`, or
`trash/` was made by hand. One on such a place itself may be a disk for it, and is left alone. Nothing here, or
anywhere, deletes through it: in a namespace that has it, its point can't be removed; in one that has not, what is
behind it isn't there, and the kernel lets go of it when the point is removed.
Sources: proc_pid_mountinfo(5); umount2(2) MNT_DETACH; rmdir(2), unlink(2) (a mount point in another mount namespace).
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger(__name__)

_PLACES = ("disk", "run", "sessions", "spool", "stage", "trash")
_MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8
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


def undo_mounts(data_dir: Path) -> None:
    """Detach what is mounted below those places, the innermost first; needs root. Who works in one goes on, and nothing
    that is behind it is touched. What can't be detached is in the log, and is told of like any leftover."""
    libc = ctypes.CDLL(None, use_errno=True)
    places = {f"{os.path.realpath(data_dir)}/{name}" for name in _PLACES}
    for point in reversed(mounts_now(data_dir)):
        if point in places:
            continue
        if libc.umount2(os.fsencode(point), _MNT_DETACH | _UMOUNT_NOFOLLOW) == 0:
            log.warning("mount_undone", extra={"path": point})
        else:
            log.error("mount_not_undone", extra={"path": point, "error": os.strerror(ctypes.get_errno())})


def _character(match: re.Match[str]) -> str:
    return chr(int(match[1], 8))
