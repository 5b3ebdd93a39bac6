"""The primitives that differ between the asynchronous and the blocking client. This file has its twin written by hand.

anyio runs on asyncio and on trio. It is imported here alone, and is there wherever httpx2 is.
"""

from __future__ import annotations

import functools
import io
import threading
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import anyio
import anyio.from_thread
import anyio.to_thread

T = TypeVar("T")

Lock = functools.partial(anyio.Lock, fast_acquire=True)
sleep = anyio.sleep


class Turns:
    """Turns of tasks at one thing that each of them may need to do: one does it, and the others wait for news."""

    def __init__(self) -> None:
        self.news = 0
        """Number of the last news."""
        self._is_taken = False
        self._told: anyio.Event | None = None

    async def take(self, news: int) -> bool:
        """Return True with the turn, which the caller gives back; or False, once there is news later than `news`."""
        if news != self.news:
            return False
        if not self._is_taken:
            self._is_taken = True
            return True
        self._told = told = self._told or anyio.Event()
        await told.wait()
        return False

    def give(self) -> None:
        """Give the turn back; one of those that wait takes it."""
        self._is_taken = False
        self.tell()

    def tell(self) -> None:
        """Wake all that wait."""
        self.news += 1
        if self._told is not None:
            self._told.set()
            self._told = None


def shield(seconds: float) -> anyio.CancelScope:
    """Return a scope in which the caller's cancellation does not reach, for at most so long."""
    return anyio.move_on_after(seconds, shield=True)


async def in_thread(function: Callable[..., T], *arguments: object, undo: Callable[[T], object] | None = None) -> T:
    """Return what a function that reads or writes local files returns, without holding up the event loop.

    A cancelled caller waits for the function, unless asyncio itself cancels it, which passes anyio's shields: then
    `undo` is called with what the function returns, also in the thread.
    """
    lock = threading.Lock()
    results: list[T] = []
    is_left = False

    def work() -> T:
        result = function(*arguments)
        with lock:
            results.append(result)
            if is_left and undo is not None:
                undo(result)
        return result

    try:
        return await anyio.to_thread.run_sync(work)
    except anyio.get_cancelled_exc_class():
        with lock:
            is_left = True
            if results and undo is not None:
                undo(results[0])
        raise


class FileOf(io.RawIOBase):
    """File to be read once, within `in_thread`, whose content is made by tasks of the event loop."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""

    def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes, empty at the end."""
        data = self._rest or anyio.from_thread.run(self._next)
        self._rest = data[size:] if size >= 0 else b""
        return data[:size] if size >= 0 else data

    async def _next(self) -> bytes:
        return await anext(self._pieces, b"")
