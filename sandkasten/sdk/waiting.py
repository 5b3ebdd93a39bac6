"""The primitives that differ between the asynchronous and the blocking client. This file has its twin written by hand.

anyio runs on asyncio and on trio. It is imported here alone, and is there wherever httpx2 is.
"""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import anyio
import anyio.from_thread
import anyio.to_thread

T = TypeVar("T")

Lock = anyio.Lock
Condition = anyio.Condition
sleep = anyio.sleep


def shield(seconds: float) -> anyio.CancelScope:
    """Return a scope in which the caller's cancellation does not reach, for at most so long."""
    return anyio.move_on_after(seconds, shield=True)


async def in_thread(function: Callable[..., T], *arguments: object) -> T:
    """Return what a function that reads or writes local files returns, without holding up the event loop."""
    return await anyio.to_thread.run_sync(function, *arguments)


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
