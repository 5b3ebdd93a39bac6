"""Use of storage by a run: whether the file systems were filled, and how many bytes were written.

Of a process only the kernel's counters are read.

Sources: statvfs(3), proc_pid_io(5) `write_bytes` (a process's own plus those of the children it has waited for).
"""

from __future__ import annotations

import os

from runner.loop.context import Context
from runner.loop.identity import UserIdentity
from runner.process.process_set import open_proc

_LITTLE_BYTES = 64 * 1024
"""A file system with less room than this counts as full."""
_IO_BYTES = 1024
_FIELD = b"\nwrite_bytes: "


def is_full(context: Context) -> bool:
    """Return whether one of the file systems that a run writes to has no room left, in bytes or inodes."""
    with context.as_user:
        return any(_is_full(path) for path in ("/", context.config.workspace, "/tmp", context.config.home, "/dev/shm"))


def _is_full(path: str) -> bool:
    try:
        status = os.statvfs(path)
    except OSError:
        return False
    if status.f_flag & os.ST_RDONLY or status.f_blocks == 0:
        return False
    has_no_inode = status.f_files > 0 and status.f_favail == 0
    return status.f_bavail * status.f_frsize < _LITTLE_BYTES or has_no_inode


class RoomGauge:
    """Tells whether the file systems were filled during one run. A look takes some 20 us, so a command gets its first
    one when it has run for a moment; a command that ends before is not said to have filled anything."""

    def __init__(self) -> None:
        self._had_room = False

    def look(self, context: Context) -> None:
        """Look for the first time: the run begins, or has just begun."""
        self._had_room = not is_full(context)

    def read(self, context: Context, *, has_failed: bool) -> tuple[bool, bool]:
        """Return whether the run failed and no room is left now, and whether there was some at the first look."""
        now = has_failed and is_full(context)
        return now, now and self._had_room


class WriteMeter:
    """Counts the bytes that one process writes to storage between two calls. Keeps one descriptor: opening the file
    anew for each command would cost more than all else here."""

    def __init__(self) -> None:
        self._fd = -1
        self._last = 0

    def read(self, pid: int, owner: UserIdentity) -> int:
        """Return the bytes written since the last call, -1 the first time or if the kernel does not count. `owner`: of
        the process's files below /proc."""
        try:
            if self._fd < 0:
                with owner:
                    self._fd = open_proc(f"{pid}/io")
                self._last = self._now()
                return -1
            last, self._last = self._last, self._now()
        except (OSError, ValueError):
            return -1
        return max(0, self._last - last)

    def _now(self) -> int:
        return int(os.pread(self._fd, _IO_BYTES, 0).partition(_FIELD)[2].partition(b"\n")[0])

    def close(self, total_bytes: int = 0) -> int:
        """Return what `read` would have returned at the end of a process that had written `total_bytes`; begin anew
        with the next process."""
        if self._fd < 0:
            return -1
        os.close(self._fd)
        self._fd = -1
        return max(0, total_bytes - self._last)
