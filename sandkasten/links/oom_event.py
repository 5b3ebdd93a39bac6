"""The kernel's out-of-memory notification of a session, in a form that trio can wait for.

v1 gives an eventfd. v2 gives a pollable `memory.events` whose change is POLLPRI, which trio's `wait_readable` can't ask
for; an epoll descriptor that watches for POLLPRI can be waited for instead.

Sources: Documentation/admin-guide/cgroup-v1/memory.rst §9; cgroup-v2.rst "memory.events"; epoll(7).
"""

from __future__ import annotations

import errno
import os
import select

import trio

from nsinit.wire.protocol import EventKind
from sandkasten.links.fds import OwnedFd


class OomEvent:
    """Owner of the descriptor that came with `Built` or `Adopted`; `close` frees it."""

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
