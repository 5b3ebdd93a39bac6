"""File descriptors with an owner, closed exactly once. A task can wait on two kinds of them: for the end of a process,
and for kills for memory.

Sources: pidfd_open(2); epoll(7); Documentation/admin-guide/cgroup-v1/memory.rst §9; cgroup-v2.rst "memory.events".
"""

from __future__ import annotations

import errno
import os
import select
from types import TracebackType

import trio

from nsinit.wire.protocol import EventKind


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


class OomEvent:
    """The kernel's out-of-memory notification of a session: owns the descriptor that came with `Built` or `Adopted`.

    v1 gives an eventfd. v2 gives a pollable `memory.events` whose change is POLLPRI, which trio's `wait_readable` can't
    ask for; an epoll descriptor that watches for POLLPRI can be waited for instead.
    """

    def __init__(self, kind: EventKind, fd: OwnedFd) -> None:
        self._kind = kind
        self._fd = fd
        self._epoll: select.epoll | None = None
        if kind == "memory_events":
            self._epoll = select.epoll()
            self._epoll.register(fd.fileno(), select.EPOLLPRI)
            os.pread(fd.fileno(), 4096, 0)  # the first read arms the notification

    async def wait(self) -> None:
        """Wait for the next notification and re-arm. Being woken without a kill is possible; read the counter."""
        if self._epoll is not None:
            await trio.lowlevel.wait_readable(self._epoll.fileno())
            try:
                os.pread(self._fd.fileno(), 4096, 0)
            except OSError as error:
                if error.errno != errno.ENODEV:
                    raise
                await trio.sleep_forever()  # the cgroup was removed: no kill will follow
        else:
            await trio.lowlevel.wait_readable(self._fd.fileno())
            os.read(self._fd.fileno(), 8)

    def close(self) -> None:
        if self._epoll is not None:
            self._epoll.close()
        self._fd.close()
