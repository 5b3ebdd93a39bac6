"""The end of a sandbox in E2B's terms: so many seconds from now, whatever goes on, and none while it is paused.

So a session of this API has no idle timeout, and a lifetime of its age and those seconds.
"""

from __future__ import annotations

from datetime import UTC, datetime

from sandkasten.model import Session, SessionPatch
from sandkasten.supervisor import Supervisor

TIMEOUT_S = 300.0
"""Time of a sandbox whose client names none."""

_SHORTEST_S = 0.001


def age_of(session: Session) -> float:
    """Return the seconds since a session was made."""
    return max((datetime.now(UTC) - session.created_at).total_seconds(), 0.0)


async def end_in(supervisor: Supervisor, session: Session, timeout_s: float) -> Session:
    """Have a session end in so many seconds. Raises `InvalidRequest` beyond the operator's longest lifetime."""
    lifetime_s = max(age_of(session) + timeout_s, _SHORTEST_S)
    return await supervisor.update(session.id, SessionPatch(max_lifetime_s=lifetime_s))


async def wake(supervisor: Supervisor, session: Session, timeout_s: float = TIMEOUT_S) -> Session:
    """Resume a paused session, and have it end in so many seconds."""
    await supervisor.resume(session.id)
    return await end_in(supervisor, session, timeout_s)
