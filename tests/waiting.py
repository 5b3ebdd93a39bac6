"""Waiting for what the outside world gives no event for, by deadlines that grow with the slowness of the machine.

A deadline that only guards against a hang, or bounds a time that is claimed, is written for an idle machine and
multiplied with the slowness of the moment: `fail_after(patience(5))`. The slowness is measured and never less than
what the environment declares, which an emulated processor does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable

import trio

SLOWNESS = float(os.environ.get("SANDKASTEN_TEST_SLOWNESS", "1"))
"""Declared slowness: how much longer than usual everything takes; more than 1 on an emulated processor."""

PATIENCE_S = 10.0
_PAUSE_S = 0.01
REFERENCE_S = 0.008
"""Time that `_sample` takes on an idle machine with a processor of 2020."""
_MEASURED_FOR_S = 2.0
MAX_SLOWNESS = 12.0
"""A hang must show some time."""


def slowness() -> float:
    """Return how many times longer than on an idle machine things take now; at least the declared slowness.

    Measured are processor and process creation, once in `_MEASURED_FOR_S` seconds, and the slower of the last two
    measurements counts. Where more processes are runnable than there are processors, their number counts too: a short
    measurement may have been lucky.
    """
    if time.monotonic() > _measured.until:
        _measured.last, _measured.before = _sample() / REFERENCE_S, _measured.last
        _measured.until = time.monotonic() + _MEASURED_FOR_S
    crowd = os.getloadavg()[0] / (os.cpu_count() or 1)
    return max(SLOWNESS, min(max(_measured.last, _measured.before, crowd, 1.0), MAX_SLOWNESS))


def patience(seconds: float = PATIENCE_S) -> float:
    """Return how long to wait now for what takes less than `seconds` on an idle machine."""
    return seconds * slowness()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Look again and again until `condition` holds; fails after `patience()` seconds of real time."""
    with trio.fail_after(patience()):
        while not await condition():  # noqa: ASYNC110 - a process or a database elsewhere changes it
            await trio.sleep(_PAUSE_S)


class Measured:
    last = before = 1.0
    until = 0.0


_measured = Measured()


def _sample() -> float:
    """Return how many seconds some forks and some computing take."""
    begin = time.perf_counter()
    for _ in range(3):
        pid = os.posix_spawn("/bin/true", ["true"], {})
        os.waitpid(pid, 0)
        sum(range(100_000))
    return time.perf_counter() - begin
