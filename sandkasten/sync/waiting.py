"""The primitives of the blocking client, which threads may share: the twin of `sandkasten/sdk/waiting.py`, by hand."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

T = TypeVar("T")

Lock = threading.Lock
Condition = threading.Condition
sleep = time.sleep


def shield(seconds: float) -> AbstractContextManager[None]:
    """Return a context that does nothing: a thread is not cancelled, and each call within has a time of its own."""
    return nullcontext()


def in_thread(function: Callable[..., T], *arguments: object) -> T:
    """Return what the function returns."""
    return function(*arguments)


class FileOf(io.RawIOBase):
    """File to be read once, whose content is made by an iterator."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""

    def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes, empty at the end."""
        data = self._rest or next(self._pieces, b"")
        self._rest = data[size:] if size >= 0 else b""
        return data[:size] if size >= 0 else data
