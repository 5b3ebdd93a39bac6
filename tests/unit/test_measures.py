"""Counters and distributions: what is counted is what is read, and no caller can make it grow without bound."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandkasten.counters.metrics import Metrics
from sandkasten.model import EndReason, EventType
from sandkasten.model.measures import MAX_SERIES, OVERFLOW, SECONDS, SHORT_SECONDS, Counter, Histogram, gauge, single


def test_a_counter_without_labels_begins_at_zero() -> None:
    """So that a rate can be taken from the first event on."""
    counter = Counter("x", "help")
    assert [each.value for each in counter.read().samples] == [0.0]
    counter.add(by=2)
    assert [each.value for each in counter.read().samples] == [2.0]


@given(st.lists(st.floats(min_value=0, max_value=500)))
def test_a_histogram_says_how_many_were_at_most_each_bound(values: list[float]) -> None:
    """Cumulative, the last count being all of them; the sum is theirs."""
    histogram = Histogram("x", "help", bounds=SECONDS)
    for value in values:
        histogram.observe(value)
    found = histogram.read().distributions[0]
    assert found.cumulative == (*(sum(value <= bound for value in values) for bound in SECONDS), len(values))
    assert found.total == pytest.approx(sum(values))


@pytest.mark.parametrize("bounds", [SECONDS, SHORT_SECONDS])
def test_bounds_rise(bounds: tuple[float, ...]) -> None:
    """Or no count would be right."""
    assert all(a < b for a, b in pairwise(bounds))


def test_a_caller_that_makes_up_labels_is_counted_but_bounded() -> None:
    """What comes on top is one series, for both kinds."""
    counter, histogram = Counter("x", "help", "label"), Histogram("x", "help", "label")
    for number in range(2 * MAX_SERIES):
        counter.add(str(number))
        histogram.observe(0.1, str(number))
    counts = {each.labels: each.value for each in counter.read().samples}
    assert (len(counts), counts[OVERFLOW,]) == (MAX_SERIES + 1, MAX_SERIES)
    spread = {each.labels: each.cumulative[-1] for each in histogram.read().distributions}
    assert (len(spread), spread[OVERFLOW,]) == (MAX_SERIES + 1, MAX_SERIES)


def test_the_wrong_number_of_labels_is_a_bug_that_shows() -> None:
    """Instead of a series that nobody can read."""
    with pytest.raises(ValueError):
        Counter("x", "help", "label").add()
    with pytest.raises(ValueError):
        Histogram("x", "help").observe(1.0, "label")


def test_what_is_not_known_has_no_sample() -> None:
    """Unknown is not zero."""
    assert [each.labels for each in gauge("x", "help", {"a": 1.0, "b": None}, "label").samples] == [("a",)]
    assert single("x", "help", None).samples == ()


def test_a_read_family_does_not_change_any_more() -> None:
    """It is written out by another thread while counting goes on."""
    metrics = Metrics()
    before = metrics.runs_ended.read(), metrics.runs.read()
    metrics.note_run("command", "exited", waited_s=0.1, ran_s=0.2, first_output_s=None)
    assert (before[0].samples, before[1].distributions) == ([], [])


def test_every_instrument_is_read_and_no_two_share_a_name() -> None:
    """An instrument that is not read would count for nobody."""
    names = [family.name for family in Metrics().read()]
    assert len(names) == len(set(names))
    assert {"sandkasten_create_seconds", "sandkasten_runs_ended", "sandkasten_event_loop_lag_seconds"} <= set(names)


def test_the_ends_of_sessions_are_counted_as_the_journal_hears_of_them() -> None:
    """One count for each, however the end came."""
    metrics = Metrics()
    for type in EventType:
        metrics.note_event(type, {"acquire_source": "cold", "end_reason": EndReason.OOM})
    ended = {each.labels: each.value for each in metrics.sessions_ended.read().samples}
    assert ended == {(status, EndReason.OOM.value): 1 for status in ("destroyed", "expired", "crashed", "lost")}
    assert [each.value for each in metrics.oom_kills.read().samples] == [1]
    assert {each.labels[0] for each in metrics.events.read().samples} == {type.value for type in EventType}
