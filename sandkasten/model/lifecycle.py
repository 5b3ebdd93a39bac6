"""The session state machine as one table; pure.

`creating → running ⇄ paused → destroying → destroyed | expired | crashed | lost`. Code that changes a session's status
asks `next_status`; no other place knows which changes are legal.
"""

from __future__ import annotations

import enum

from sandkasten.model.errors import SessionExpired
from sandkasten.model.session import EndReason, Session, Status


class Event(enum.StrEnum):
    """Events in the life of a session."""

    BUILT = "built"
    PAUSE = "pause"
    RESUME = "resume"
    DESTROY = "destroy"
    EXPIRE = "expire"
    DIED = "died"
    BUILD_FAILED = "build_failed"
    TORN_DOWN = "torn_down"
    NOT_FOUND = "not_found"


class IllegalTransition(Exception):
    """Raised for an event in a state that has no place for it: a bug in the caller."""


LIVE = frozenset({Status.CREATING, Status.RUNNING, Status.PAUSED, Status.DESTROYING})
"""States in which something of the session may exist in the kernel."""

ENDED = frozenset(Status) - LIVE

WHOLE = frozenset({Status.RUNNING, Status.PAUSED})
"""States in which there is a sandbox whose end has not begun."""

USABLE = frozenset({Status.RUNNING})
"""States in which commands and file requests are served."""

_TABLE: dict[tuple[Status, Event], Status] = {
    (Status.CREATING, Event.BUILT): Status.RUNNING,
    (Status.CREATING, Event.BUILD_FAILED): Status.DESTROYING,
    (Status.CREATING, Event.DIED): Status.DESTROYING,
    (Status.CREATING, Event.DESTROY): Status.DESTROYING,
    (Status.CREATING, Event.NOT_FOUND): Status.LOST,
    (Status.RUNNING, Event.PAUSE): Status.PAUSED,
    (Status.RUNNING, Event.DESTROY): Status.DESTROYING,
    (Status.RUNNING, Event.EXPIRE): Status.DESTROYING,
    (Status.RUNNING, Event.DIED): Status.DESTROYING,
    (Status.RUNNING, Event.NOT_FOUND): Status.LOST,
    (Status.PAUSED, Event.RESUME): Status.RUNNING,
    (Status.PAUSED, Event.DESTROY): Status.DESTROYING,
    (Status.PAUSED, Event.EXPIRE): Status.DESTROYING,
    (Status.PAUSED, Event.DIED): Status.DESTROYING,
    (Status.PAUSED, Event.NOT_FOUND): Status.LOST,
    (Status.DESTROYING, Event.DESTROY): Status.DESTROYING,
    (Status.DESTROYING, Event.EXPIRE): Status.DESTROYING,
    (Status.DESTROYING, Event.DIED): Status.DESTROYING,
}

_ENDINGS: dict[Event, Status] = {
    Event.DESTROY: Status.DESTROYED,
    Event.EXPIRE: Status.EXPIRED,
    Event.DIED: Status.CRASHED,
    Event.BUILD_FAILED: Status.CRASHED,
}

END_REASONS: dict[Event, EndReason] = {
    Event.DESTROY: EndReason.USER,
    Event.EXPIRE: EndReason.IDLE,
    Event.DIED: EndReason.CRASHED,
    Event.BUILD_FAILED: EndReason.ERROR,
    Event.NOT_FOUND: EndReason.CRASHED,
}
"""Default reason of a session's end by the event that began it; the teardown may know a more exact one."""


def next_status(status: Status, event: Event, *, cause: Event | None = None) -> Status:
    """Return the state after `event`.

    `TORN_DOWN` ends `destroying`; `cause` is then the event that began the destruction and picks the final state.

    Raises:
        IllegalTransition: the table has no such move.
    """
    if event is Event.TORN_DOWN and status is Status.DESTROYING and cause in _ENDINGS:
        return _ENDINGS[cause]
    try:
        return _TABLE[status, event]
    except KeyError:
        raise IllegalTransition(f"{event} in {status}") from None


def ended_error(session: Session) -> SessionExpired:
    """Return the error for requests to a session that has ended or is ending."""
    return SessionExpired(
        f"session is {session.status}",
        status=session.status.value,
        reason=session.reason,
        end_reason=None if session.end_reason is None else session.end_reason.value,
    )
