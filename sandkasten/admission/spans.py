"""Which times to live and lifetimes a session may have; pure."""

from __future__ import annotations

from sandkasten.config import Maximum
from sandkasten.model import FOREVER_S, MAX_SPAN_S
from sandkasten.model.errors import InvalidRequest


def check_spans(maximum: Maximum, *, ttl_s: float | None, max_lifetime_s: float | None) -> None:
    """Refuse a time that no session may have or that the operator does not allow. None is not asked for.

    Raises:
        InvalidRequest: with each bad one in `details`.
    """
    asked = {
        "idle_timeout_seconds": (ttl_s, maximum.idle_timeout_seconds),
        "max_lifetime_seconds": (max_lifetime_s, maximum.max_lifetime_seconds),
    }
    found = {name: _problem(span_s, most_s) for name, (span_s, most_s) in asked.items() if span_s is not None}
    problems = {name: problem for name, problem in found.items() if problem is not None}
    if problems:
        raise InvalidRequest("the session can't live as long as that", **problems)


def _problem(span_s: float, most_s: int | None) -> str | None:
    if span_s == FOREVER_S:
        return None if most_s is None else f"must not be null on this server, and at most {most_s}"
    if not 0 < span_s <= MAX_SPAN_S:  # written so that NaN fails, too
        return f"must be more than 0 and at most {MAX_SPAN_S:.0f}"
    if most_s is not None and span_s > most_s:
        return f"must be at most {most_s} on this server"
    return None
