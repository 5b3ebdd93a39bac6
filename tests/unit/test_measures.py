"""The instruments: every one is read, and no caller can make them grow without bound."""

from __future__ import annotations

from itertools import pairwise

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import Metric

from sandkasten.counters.metrics import (
    MAX_SERIES,
    OVERFLOW,
    SECONDS,
    SHORT_SECONDS,
    Metrics,
    Series,
    collect,
    gauge,
)
from sandkasten.model import EndReason, EventType


def values(found: list[Metric], sample_name: str) -> dict[tuple[str, ...], float]:
    """Return the samples of a name by the values of their labels."""
    samples = [sample for metric in found for sample in metric.samples if sample.name == sample_name]
    return {tuple(each.labels.values()): each.value for each in samples}


@pytest.mark.parametrize("bounds", [SECONDS, SHORT_SECONDS])
def test_bounds_rise(bounds: tuple[float, ...]) -> None:
    """Counts are wrong with bounds in another order."""
    assert all(a < b for a, b in pairwise(bounds))


def test_a_caller_that_makes_up_labels_is_counted_but_bounded() -> None:
    """Labels beyond the bound share one series, for both kinds."""
    registry = CollectorRegistry()
    counter = Series(Counter("x", "help", ["label"], registry=registry))
    histogram = Series(Histogram("y", "help", ["label"], registry=registry))
    for number in range(2 * MAX_SERIES):
        counter(str(number)).inc()
        histogram(str(number)).observe(0.1)
    for name in ("x_total", "y_count"):
        counts = values(collect(registry), name)
        assert (len(counts), counts[OVERFLOW,]) == (MAX_SERIES + 1, MAX_SERIES)


def test_the_wrong_number_of_labels_is_a_bug_that_shows() -> None:
    """Instead of a series that nobody can read."""
    with pytest.raises(ValueError):
        Series(Counter("x", "help", ["label"], registry=None))()


def test_what_is_not_known_has_no_sample() -> None:
    """Unknown is not zero."""
    assert [each.labels for each in gauge("x", "help", {"a": 1.0, "b": None}, "label").samples] == [{"label": "a"}]


def test_a_page_says_nothing_of_when_a_series_began() -> None:
    """The library would add one sample of that kind for each counter and distribution."""
    metrics = Metrics()
    metrics.note_run("command", "exited", waited_s=0.1, ran_s=0.2, first_output_s=None)
    names = {sample.name for metric in metrics.read() for sample in metric.samples}
    assert {"sandkasten_runs_ended_total", "sandkasten_run_seconds_bucket", "sandkasten_oom_kills_total"} <= names
    assert not [name for name in names if name.endswith("_created")]


def test_the_ends_of_sessions_are_counted_as_the_journal_hears_of_them() -> None:
    """One count for each, however the end came."""
    metrics = Metrics()
    for type in EventType:
        metrics.note_event(type, {"acquire_source": "cold", "end_reason": EndReason.OOM})
    found = metrics.read()
    assert values(found, "sandkasten_sessions_ended_total") == {
        (status, EndReason.OOM.value): 1 for status in ("destroyed", "expired", "crashed", "lost")
    }
    assert values(found, "sandkasten_oom_kills_total") == {(): 1}
    assert values(found, "sandkasten_events_total") == {(type.value,): 1 for type in EventType}
