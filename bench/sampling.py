"""Samples with their failures, bootstrap intervals, random blocks, and the two kinds of load.

A failure is counted and never dropped: a row that failed once is not as good as one that did not.

Sources: Efron, Tibshirani, "An Introduction to the Bootstrap" (percentile intervals); David, Nagaraja, "Order
Statistics" (the k-th of n uniform values has a beta distribution); Schroeder, Wierman, Harchol-Balter, "Open Versus
Closed: A Cautionary Tale" (NSDI 2006).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import trio

RESAMPLES = 1000
_MICRO = 1000
RATE = ", MB/s"
_PAUSE_S = 0.05
"""A client that got an error waits so long, as one that fails at once would send nothing but failures."""
LATE_S = 10.0
"""An answer that comes later than this after its intended time counts as a failure."""


@attrs.define
class Row:
    """Milliseconds in the order they were measured, and the errors of those that failed. A row whose name ends with
    `RATE` has megabytes a second instead."""

    values: list[float] = attrs.field(factory=list)
    errors: list[str] = attrs.field(factory=list)

    @property
    def median(self) -> float:
        return percentile(self.values, 50)

    def as_json(self, name: str) -> Mapping[str, Any]:
        """Return whole microseconds, or kB/s, so that raw samples stay small, and the failures."""
        unit = "kB/s" if name.endswith(RATE) else "us"
        return {unit: [round(value * _MICRO) for value in self.values], "errors": self.errors}


class Table:
    """Rows by name, in the order in which they were first measured."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}

    def row(self, name: str) -> Row:
        return self.rows.setdefault(name, Row())

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the duration of the block to a row. An error of the block is a failure of the row and goes no further."""
        row = self.row(name)
        began = time.perf_counter_ns()
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever failed, it is told in the report
            row.errors.append(f"{type(error).__name__}: {error}"[:200])
            return
        row.values.append((time.perf_counter_ns() - began) / 1e6)


def in_a_row(name: str) -> str:
    """Return the name of a row whose samples come one behind another, and not in turn with those of others."""
    return f"{name}, one behind another"


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile (nearest rank); NaN without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)] if ordered else math.nan


def interval(values: Sequence[float], percent: float = 50, *, seed: int = 1) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of a percentile."""
    return _middle(_resampled(values, percent, random.Random(seed)))


def ratio_interval(values: Sequence[float], base: Sequence[float], *, seed: int = 1) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the ratio of two medians."""
    chance = random.Random(seed)
    pairs = zip(_resampled(values, 50, chance), _resampled(base, 50, chance), strict=True)
    return _middle([each / other for each, other in pairs])


def difference_interval(values: Sequence[float], base: Sequence[float], *, seed: int = 1) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the difference of two medians."""
    chance = random.Random(seed)
    pairs = zip(_resampled(values, 50, chance), _resampled(base, 50, chance), strict=True)
    return _middle([each - other for each, other in pairs])


def _resampled(values: Sequence[float], percent: float, chance: random.Random) -> list[float]:
    """Return the percentile (nearest rank) of each of many resamples, of `values` drawn with replacement.

    The resamples themselves are not drawn: the k-th smallest of n draws stands where the k-th smallest of n uniform
    numbers does, and that number has a beta distribution. A row of thousands costs what one of ten does.
    """
    ordered, count = sorted(values), len(values)
    rank = max(1, math.ceil(percent / 100 * count))
    draws = range(RESAMPLES if values else 0)
    return [ordered[min(count - 1, int(chance.betavariate(rank, count + 1 - rank) * count))] for _ in draws]


def _middle(estimates: Sequence[float]) -> tuple[float, float]:
    return percentile(estimates, 2.5), percentile(estimates, 97.5)


def blocks(names: Sequence[str], rounds: int, chance: random.Random) -> Iterator[str]:
    """Yield all names once in each round, in an order of its own: a drift of the machine falls on all of them."""
    for _ in range(rounds):
        yield from chance.sample(names, len(names))


# Load ---------------------------------------------------------------------------------------------------------------

Request = Callable[[int], Awaitable[None]]
"""One request of the client with that number; raises for a wrong answer."""


async def closed_loop(request: Request, clients: int, seconds: float) -> tuple[Row, float]:
    """Have each client send its next request when the last was answered. Return the latencies and the requests per
    second that succeeded."""
    row, end = Row(), trio.current_time() + seconds

    async def client(number: int) -> None:
        while trio.current_time() < end:
            await _timed(row, request, number, trio.current_time())

    async with trio.open_nursery() as nursery:
        for number in range(clients):
            nursery.start_soon(client, number)
    return row, len(row.values) / seconds


async def open_loop(request: Request, clients: int, rate: float, seconds: float, chance: random.Random) -> Row:
    """Send requests at random times of that mean rate (a Poisson process), whether earlier ones were answered or not.
    A latency counts from the intended time, so a request that had to wait for a free client is slow, not absent."""
    row = Row()
    due, began = 0.0, trio.current_time()
    send, receive = trio.open_memory_channel[float](math.inf)

    async def client(number: int, intended: trio.MemoryReceiveChannel[float]) -> None:
        async for at in intended:
            await _timed(row, request, number, at)

    async with trio.open_nursery() as nursery:
        for number in range(clients):
            nursery.start_soon(client, number, receive)
        with send:
            while (due := due + chance.expovariate(rate)) < seconds:
                await trio.sleep_until(began + due)
                send.send_nowait(began + due)
    return row


async def _timed(row: Row, request: Request, number: int, intended: float) -> None:
    try:
        with trio.fail_at(intended + LATE_S):
            await request(number)
    except Exception as error:  # noqa: BLE001 - as in `Table.timed`
        row.errors.append(f"{type(error).__name__}: {error}"[:200])
        await trio.sleep(_PAUSE_S)
    else:
        row.values.append((trio.current_time() - intended) * 1000)
