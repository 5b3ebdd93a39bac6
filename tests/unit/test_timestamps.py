"""Moments as clients read them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

from sandkasten.log import rfc3339, rfc3339_or_none


def test_times_are_rfc_3339_in_utc() -> None:
    """Moments of any time zone are written in UTC."""
    east = timezone(timedelta(hours=2))
    assert rfc3339(datetime(2026, 1, 2, 3, 4, 5, 678901, UTC)) == "2026-01-02T03:04:05.678Z"
    assert rfc3339(datetime(2026, 1, 2, 1, 0, 0, 0, east)) == "2026-01-01T23:00:00.000Z"


def test_a_moment_that_there_is_not_has_no_text() -> None:
    """A missing moment is null in JSON."""
    assert rfc3339_or_none(None) is None
    assert rfc3339_or_none(datetime(2026, 1, 2, tzinfo=UTC)) == "2026-01-02T00:00:00.000Z"
