"""Lifetimes of sessions: the longest that may be asked for, and the setting that bounds it."""

from __future__ import annotations

import math

import pytest

from sandkasten.admission.plan import check_spans, resolve
from sandkasten.config import Config, Maximum
from sandkasten.errors import InvalidRequest
from sandkasten.model import FOREVER_S, MAX_SPAN_S, SessionSpec

BOTH = ("idle_timeout_seconds", "max_lifetime_seconds")


def test_what_is_not_asked_for_is_the_configured_default() -> None:
    """An idle end always, a hard end if the operator bounds the life of sessions."""
    resolved = resolve(SessionSpec(), Config(session_ttl_seconds=7))
    assert (resolved.ttl_s, resolved.max_lifetime_s) == (7.0, FOREVER_S)
    resolved = resolve(SessionSpec(), Config(maximum=Maximum(max_lifetime_seconds=9)))
    assert (resolved.ttl_s, resolved.max_lifetime_s) == (1800.0, 9.0)


def test_without_a_maximum_a_session_may_have_no_end() -> None:
    """A session has no end only if both its ttl and its lifetime were asked to have none."""
    resolved = resolve(SessionSpec(ttl_s=FOREVER_S, max_lifetime_s=FOREVER_S), Config())
    assert (resolved.ttl_s, resolved.max_lifetime_s) == (FOREVER_S, FOREVER_S)


@pytest.mark.parametrize("span_s", [0.0, -1.0, math.nan, MAX_SPAN_S + 1, -math.inf])
def test_what_is_no_time_is_refused(span_s: float) -> None:
    """Each of the two by its name."""
    with pytest.raises(InvalidRequest) as refused:
        check_spans(Maximum(), ttl_s=span_s, max_lifetime_s=span_s)
    assert tuple(refused.value.details) == BOTH


@pytest.mark.parametrize(("span_s", "is_fine"), [(1.0, True), (3600.0, True), (3600.5, False), (FOREVER_S, False)])
def test_no_session_may_have_more_than_the_operator_allows(*, span_s: float, is_fine: bool) -> None:
    """Where there is a maximum, no end at all is more than it."""
    maximum = Maximum(idle_timeout_seconds=3600, max_lifetime_seconds=3600)
    if is_fine:
        check_spans(maximum, ttl_s=span_s, max_lifetime_s=span_s)
        return
    with pytest.raises(InvalidRequest) as refused:
        check_spans(maximum, ttl_s=span_s, max_lifetime_s=span_s)
    assert tuple(refused.value.details) == BOTH


def test_a_default_above_the_maximum_stops_the_start() -> None:
    """The operator contradicts themself."""
    with pytest.raises(ValueError, match="idle_timeout_seconds is 60, less than session_ttl_seconds"):
        Config(maximum=Maximum(idle_timeout_seconds=60))
