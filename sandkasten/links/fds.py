"""File descriptors with an owner: closed exactly once."""

from __future__ import annotations

import os
import select
from types import TracebackType

import trio


class OwnedFd:
    """A descriptor that its holder must close; a second close is harmless."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    def fileno(self) -> int:
        """Return the descriptor number. Raises `ValueError` after `close`."""
        if self._fd is None:
            raise ValueError("descriptor is closed")
        return self._fd

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __enter__(self) -> OwnedFd:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


async def wait_ended(pidfd: OwnedFd) -> None:
    """Wait until the process of a pidfd has ended (pidfd_open(2)).

    The kernel keeps what epoll was asked about a number until nobody has the open file any more, and nsinit has it too
    (epoll(7), question 6). Such an entry outlives `close`, and speaks of the number's next owner. So poll(2) is asked
    whether this process has ended.
    """
    poll = select.poll()
    poll.register(pidfd.fileno(), select.POLLIN)
    while True:
        await trio.lowlevel.wait_readable(pidfd.fileno())
        if poll.poll(0):
            return
