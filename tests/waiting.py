"""Waiting for what the outside world gives no event for."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

import trio

SLOWNESS = float(os.environ.get("SANDKASTEN_TEST_SLOWNESS", "1"))
"""How much longer than usual everything may take: more than 1 on an emulated processor."""

PATIENCE_S = 10.0 * SLOWNESS
_PAUSE_S = 0.01


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Look again and again until `condition` holds; fails after `PATIENCE_S` seconds of real time."""
    with trio.fail_after(PATIENCE_S):
        while not await condition():  # noqa: ASYNC110 - a process or a database elsewhere changes it
            await trio.sleep(_PAUSE_S)
