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
sleep = time.sleep


class Turns:
    """Turns of threads at one thing that each of them may need to do: one does it, and the others wait for news."""

    def __init__(self) -> None:
        self.news = 0
        """Number of the last news."""
        self._is_taken = False
        self._condition = threading.Condition()

    def take(self, news: int) -> bool:
        """Return True with the turn, which the caller gives back; or False, once there is news later than `news`."""
        with self._condition:
            if news != self.news:
                return False
            if not self._is_taken:
                self._is_taken = True
                return True
            self._condition.wait()
            return False

    def give(self) -> None:
        """Give the turn back; one of those that wait takes it."""
        with self._condition:
            self._is_taken = False
            self._tell()

    def tell(self) -> None:
        """Wake all that wait."""
        with self._condition:
            self._tell()

    def _tell(self) -> None:
        self.news += 1
        self._condition.notify_all()


def shield(seconds: float) -> AbstractContextManager[None]:
    """Return a context that does nothing: a thread is not cancelled, and each call within has a time of its own."""
    return nullcontext()


def in_thread(function: Callable[..., T], *arguments: object, undo: Callable[[T], object] | None = None) -> T:
    """Return what the function returns; there is nothing to undo, as a thread is not cancelled."""
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
