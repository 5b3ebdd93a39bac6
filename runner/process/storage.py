"""What a command did to storage: whether it ran out of room, and how much was written.

It must not read anything of a process but the kernel's counters, and those as the sandbox user.

Sources: statvfs(3), proc_pid_io(5) `write_bytes` (a process's own plus those of the children it has waited for).
"""

from __future__ import annotations

import os

from runner.loop.context import Context

_LITTLE_BYTES = 64 * 1024
_IO_BYTES = 1024
_FIELD = b"\nwrite_bytes: "


def is_full(context: Context) -> bool:
    """Return whether one of the file systems a command writes to has no room left, in bytes or inodes."""
    with context.as_user:
        return any(_is_full(path) for path in ("/", *context.config.file_roots, "/dev/shm"))


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
    """Whether the file systems were filled during one command or program. Looking takes some 20 us, so it is put off
    for a command; one that ends before is not said to have filled anything."""

    def __init__(self) -> None:
        self._had_room = False

    def look(self, context: Context) -> None:
        """It begins, or has just begun."""
        self._had_room = not is_full(context)

    def read(self, context: Context, *, has_failed: bool) -> tuple[bool, bool]:
        """Return whether it failed and there is no room left now, and whether there was some when it had just begun."""
        now = has_failed and is_full(context)
        return now, now and self._had_room


class WriteMeter:
    """How much one process has written to storage since it was last asked. Keeps one descriptor: opening it anew for
    each command would cost more than all the rest. Used as the sandbox user."""

    def __init__(self) -> None:
        self._fd = -1
        self._last = 0

    def read(self, pid: int) -> int:
        """Return the bytes written since the last call, -1 the first time or if the kernel does not count."""
        try:
            if self._fd < 0:
                self._fd = os.open(f"/proc/{pid}/io", os.O_RDONLY | os.O_CLOEXEC)
                self._last = self._now()
                return -1
            last, self._last = self._last, self._now()
        except (OSError, ValueError):
            return -1
        return max(0, self._last - last)

    def _now(self) -> int:
        return int(os.pread(self._fd, _IO_BYTES, 0).partition(_FIELD)[2].partition(b"\n")[0])

    def close(self, total_bytes: int = 0) -> int:
        """The process is gone and had written so much; return what `read` would have. It begins with the next."""
        if self._fd < 0:
            return -1
        os.close(self._fd)
        self._fd = -1
        return max(0, total_bytes - self._last)
