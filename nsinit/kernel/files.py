"""Small file operations on kernel files and descriptors that every part of nsinit shares."""

from __future__ import annotations

import os

from nsinit.kernel import syscalls


def write_file(path: str, value: str) -> None:
    """Write a kernel file in one `write`, naming the path in the error."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value.encode())
    except OSError as error:
        error.filename = path
        raise
    finally:
        os.close(fd)


def keep_only(fds: set[int]) -> None:
    """Close every descriptor that is not in `fds`."""
    first = 0
    for fd in sorted(fds):
        if fd > first:
            syscalls.close_range(first, fd - 1)
        first = fd + 1
    syscalls.close_range(first)
