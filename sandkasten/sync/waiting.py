"""The primitives of the blocking client, which threads may share: the twin of `sandkasten/sdk/waiting.py`, by hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
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
