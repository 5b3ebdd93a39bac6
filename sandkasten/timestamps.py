"""How moments are written for others: as RFC 3339 has it, in UTC, with milliseconds. Pure.

Source: RFC 3339 §5.6.
"""

from __future__ import annotations

from datetime import UTC, datetime


def rfc3339(moment: datetime) -> str:
    """Return an aware datetime in UTC with milliseconds and `Z`."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def rfc3339_or_none(moment: datetime | None) -> str | None:
    """Return the same of a moment that there may not be."""
    return None if moment is None else rfc3339(moment)
