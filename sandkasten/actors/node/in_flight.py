"""What somebody waits for at this moment: commands, and files on their way. A stop lets these end, and begins no more.

A run that was detached, a process, a terminal and whoever merely follows are not among them: those may last for ever,
and go on in the sandbox without the daemon.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio

from sandkasten.model.errors import ShuttingDown

_RETRY_AFTER_S = 5


class Attended:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._count = 0
        self._is_closed = False
        self._is_none = trio.Event()

    def __len__(self) -> int:
        return self._count

    def close(self) -> None:
        """From now on nothing begins."""
        self._is_closed = True
        self._tell_when_none()

    def check_open(self) -> None:
        """Raise `ShuttingDown` if nothing may begin any more."""
        if self._is_closed:
            raise stopping()

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Count what happens inside. Raises `ShuttingDown`."""
        self.check_open()
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            self._tell_when_none()

    async def wait_none(self) -> None:
        """Wait until, after `close`, nothing is left."""
        await self._is_none.wait()

    def _tell_when_none(self) -> None:
        if self._is_closed and not self._count:
            self._is_none.set()


def stopping() -> ShuttingDown:
    """Return what is said to whoever wants to begin something now."""
    return ShuttingDown("the daemon is stopping", retry_after_s=_RETRY_AFTER_S)
