"""Mounts that somebody made by hand in the sessions' places of a data directory: how they are known and let go of.

Sessions are mounted in namespaces of their own, so none of their mounts shows in the one that nsinit is started in. A
mount on such a place itself may be a disk for it, and is none of ours to undo. What lies below a place can be a
sandbox's to move about, so a point is opened without following any link, must be the mount that was found, and is let
go of by that descriptor; what is behind it is not touched.

Works in the namespace of its process; `machine_mounts` goes to another one for it.
Sources: proc_pid_mountinfo(5), proc_pid_fdinfo(5); openat2(2); umount2(2) MNT_DETACH.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nsinit.kernel import constants as k
from nsinit.kernel import syscalls
from nsinit.kernel.mountinfo import is_below, parse_points

_PLACES = ("disk", "run", "sessions", "spool", "stage", "trash")
_CHUNK_BYTES = 1 << 16
_NO_LINKS = k.RESOLVE_NO_SYMLINKS | k.RESOLVE_NO_MAGICLINKS


@dataclass(frozen=True, slots=True)
class HandMount:
    """One that was found; `is_place`: on a place itself."""

    mount_id: int
    point: str
    is_place: bool


Find = Callable[[], Sequence[HandMount]]


def find_hand_mounts(data_dir: str, mountinfo: str) -> Sequence[HandMount]:
    """Return those in the places of a data directory (its real path), the last made first: so they come undone."""
    places = [f"{data_dir}/{name}" for name in _PLACES]
    found = [
        HandMount(mount_id, point, point in places)
        for mount_id, point in parse_points(mountinfo)
        if any(is_below(point, place) for place in places)
    ]
    return found[::-1]


def points_below(mounts: Sequence[HandMount]) -> list[str]:
    """Return the points below places, each once."""
    return list(dict.fromkeys(each.point for each in mounts if not each.is_place))


def open_table() -> int:
    """Return a mount table that shows the namespace it was opened in, wherever the reader is by then."""
    return os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)


def finder(data_dir: str, table_fd: int) -> Find:
    """Return what looks into an open table anew each time. Nobody else may read that table at the same time: where
    the next line begins is the kernel's to know, and between pages the table may change."""

    def find() -> Sequence[HandMount]:
        text = b""
        while chunk := os.pread(table_fd, _CHUNK_BYTES, len(text)):
            text += chunk
        return find_hand_mounts(data_dir, os.fsdecode(text))

    return find


def detach_all(data_dir: str) -> Iterator[tuple[str, OSError | None]]:
    """Detach all those below places; yield each point, with the reason if something is left on it. Raises `OSError`."""
    table_fd = open_table()
    try:
        find = finder(os.path.realpath(data_dir), table_fd)
        for point in points_below(find()):
            try:
                detach_at(point, find)
            except OSError as error:
                yield point, error
            else:
                yield point, None
    finally:
        os.close(table_fd)


def detach_at(point: str, find: Find) -> None:
    """Detach what is mounted on a point below a place, one on the other, as long as they get fewer.

    Raises:
        OSError: something is left. ELOOP: a link is on the way; EBUSY: what is there is not what was found.
    """
    before: int | None = None
    while ids := [each.mount_id for each in find() if each.point == point and not each.is_place]:
        if before is not None and len(ids) >= before:
            raise OSError(errno.EBUSY, "it does not go, or is made anew", point)
        before = len(ids)
        detach(point, ids)


def detach(point: str, mount_ids: Sequence[int]) -> None:
    """Detach the topmost mount on a point if it is one of these; who works in it goes on. Raises `OSError`."""
    fd = syscalls.openat2(k.AT_FDCWD, point, os.O_PATH, resolve=_NO_LINKS)
    try:
        if _mount_id(fd) not in mount_ids:
            raise OSError(errno.EBUSY, "another mount is there than was found", point)
        syscalls.umount2(f"/proc/self/fd/{fd}", k.MNT_DETACH)
    finally:
        os.close(fd)


def _mount_id(fd: int) -> int:
    """Return the id of the mount that a descriptor is on, without a question to its file system."""
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line)
    return int(fields["mnt_id"])
