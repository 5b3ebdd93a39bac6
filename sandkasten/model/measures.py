"""Counters and distributions as plain values: what is counted, and a family as somebody who reads them gets it.

Knows no text format, no library and no lock: an instrument is written to and read by the event loop alone, which costs
a microsecond at most. Every instrument is bounded: label values come from closed sets, and should a caller be wrong
about that, what comes on top of `MAX_SERIES` is counted together.

Sources: Prometheus, "Metric types" and "Metric and label naming".
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import attrs

MAX_SERIES = 500
OVERFLOW = "other"

Kind = Literal["counter", "gauge", "histogram"]

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
"""Upper bounds for what takes from half a millisecond to two minutes."""

SHORT_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
"""The same for what should be over in a few milliseconds."""


@attrs.frozen
class Sample:
    """One number, by the values of its labels."""

    labels: tuple[str, ...]
    value: float


@attrs.frozen
class Distribution:
    """How many observations were at most each bound (the last count is that of all), and their sum."""

    labels: tuple[str, ...]
    cumulative: tuple[int, ...]
    total: float


@attrs.frozen
class Family:
    """All numbers of one name. `name` is without `_total`, which counters get where they are written."""

    name: str
    kind: Kind
    help: str
    label_names: tuple[str, ...] = ()
    samples: Sequence[Sample] = ()
    bounds: tuple[float, ...] = ()
    distributions: Sequence[Distribution] = ()


class Counter:
    """Counts up."""

    def __init__(self, name: str, help: str, *label_names: str) -> None:
        self._name, self._help, self._label_names = name, help, label_names
        self._values: dict[tuple[str, ...], float] = {} if label_names else {(): 0.0}

    def add(self, *labels: str, by: float = 1.0) -> None:
        """Count `by` more; `labels` in the order of their names."""
        values = self._values
        if labels not in values:
            labels = _within_bounds(values, labels, self._label_names)
        values[labels] = values.get(labels, 0.0) + by

    def read(self) -> Family:
        """Return what was counted so far."""
        samples = [Sample(labels, value) for labels, value in self._values.items()]
        return Family(self._name, "counter", self._help, self._label_names, samples)


class _Buckets:
    __slots__ = ("counts", "total")

    def __init__(self, size: int) -> None:
        self.counts = [0] * size
        self.total = 0.0


class Histogram:
    """Counts observations by size."""

    def __init__(self, name: str, help: str, *label_names: str, bounds: Sequence[float] = SECONDS) -> None:
        self._name, self._help, self._label_names, self._bounds = name, help, label_names, tuple(bounds)
        self._series: dict[tuple[str, ...], _Buckets] = {} if label_names else {(): self._empty()}

    def observe(self, value: float, *labels: str) -> None:
        """Count one observation; `labels` in the order of their names."""
        buckets = self._series.get(labels)
        if buckets is None:
            buckets = self._series.setdefault(_within_bounds(self._series, labels, self._label_names), self._empty())
        buckets.counts[bisect_left(self._bounds, value)] += 1
        buckets.total += value

    def read(self) -> Family:
        """Return what was observed so far."""
        found = [
            Distribution(labels, _cumulated(buckets.counts), buckets.total) for labels, buckets in self._series.items()
        ]
        name, names = self._name, self._label_names
        return Family(name, "histogram", self._help, names, bounds=self._bounds, distributions=found)

    def _empty(self) -> _Buckets:
        return _Buckets(len(self._bounds) + 1)


def gauge(name: str, help: str, values: Mapping[str, float | None], label: str) -> Family:
    """Return numbers as they are now, by the value of their one label; what is not known is left out."""
    samples = [Sample((key,), value) for key, value in values.items() if value is not None]
    return Family(name, "gauge", help, (label,), samples)


def single(name: str, help: str, value: float | None, *, kind: Kind = "gauge") -> Family:
    """Return one number without labels; without a sample when it is not known."""
    return Family(name, kind, help, (), () if value is None else (Sample((), value),))


def _within_bounds(
    known: Mapping[tuple[str, ...], object], labels: tuple[str, ...], names: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the labels to count under. Raises `ValueError` when their number is wrong."""
    if len(labels) != len(names):
        raise ValueError(f"{labels} are no values for {names}")
    return labels if len(known) < MAX_SERIES else (OVERFLOW,) * len(names)


def _cumulated(counts: Iterable[int]) -> tuple[int, ...]:
    running, sums = 0, []
    for count in counts:
        running += count
        sums.append(running)
    return tuple(sums)
