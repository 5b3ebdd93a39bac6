"""The session state machine as one table; pure.

`creating → running ⇄ paused → destroying → destroyed | expired | crashed | lost`, or from `pool_idle → running` on: a
member of a session pool is claimed. A member that ends unclaimed was nobody's session, and its record is deleted. Code
that changes a session's status asks `next_status`; no other place knows which changes are legal.
"""

from __future__ import annotations

import enum

from sandkasten.errors import SessionExpired
from sandkasten.model.session import EndReason, Session, Status


class Trigger(enum.StrEnum):
    """Events in the life of a session."""

    BUILT = "built"
    CLAIM = "claim"
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
"""States of clients' sessions in which something of the session may exist in the kernel."""

IN_KERNEL = LIVE | {Status.POOL_IDLE}
"""States in which something of the session may exist in the kernel."""

ENDED = frozenset(Status) - IN_KERNEL

WHOLE = frozenset({Status.RUNNING, Status.PAUSED})
"""States of clients' sessions in which there is a sandbox whose end has not begun."""

STANDING = WHOLE | {Status.POOL_IDLE}
"""States in which there is a sandbox whose end has not begun."""

USABLE = frozenset({Status.RUNNING})
"""States in which commands and file requests are served."""

_TABLE: dict[tuple[Status, Trigger], Status] = {
    (Status.POOL_IDLE, Trigger.BUILT): Status.POOL_IDLE,
    (Status.POOL_IDLE, Trigger.CLAIM): Status.RUNNING,
    (Status.POOL_IDLE, Trigger.DESTROY): Status.DESTROYED,
    (Status.POOL_IDLE, Trigger.DIED): Status.DESTROYED,
    (Status.CREATING, Trigger.BUILT): Status.RUNNING,
    (Status.CREATING, Trigger.BUILD_FAILED): Status.DESTROYING,
    (Status.CREATING, Trigger.DIED): Status.DESTROYING,
    (Status.CREATING, Trigger.DESTROY): Status.DESTROYING,
    (Status.CREATING, Trigger.NOT_FOUND): Status.LOST,
    (Status.RUNNING, Trigger.PAUSE): Status.PAUSED,
    (Status.RUNNING, Trigger.DESTROY): Status.DESTROYING,
    (Status.RUNNING, Trigger.EXPIRE): Status.DESTROYING,
    (Status.RUNNING, Trigger.DIED): Status.DESTROYING,
    (Status.RUNNING, Trigger.NOT_FOUND): Status.LOST,
    (Status.PAUSED, Trigger.RESUME): Status.RUNNING,
    (Status.PAUSED, Trigger.DESTROY): Status.DESTROYING,
    (Status.PAUSED, Trigger.EXPIRE): Status.DESTROYING,
    (Status.PAUSED, Trigger.DIED): Status.DESTROYING,
    (Status.PAUSED, Trigger.NOT_FOUND): Status.LOST,
    (Status.DESTROYING, Trigger.DESTROY): Status.DESTROYING,
    (Status.DESTROYING, Trigger.EXPIRE): Status.DESTROYING,
    (Status.DESTROYING, Trigger.DIED): Status.DESTROYING,
}

_ENDINGS: dict[Trigger, Status] = {
    Trigger.DESTROY: Status.DESTROYED,
    Trigger.EXPIRE: Status.EXPIRED,
    Trigger.DIED: Status.CRASHED,
    Trigger.BUILD_FAILED: Status.CRASHED,
}

END_REASONS: dict[Trigger, EndReason] = {
    Trigger.DESTROY: EndReason.USER,
    Trigger.EXPIRE: EndReason.IDLE,
    Trigger.DIED: EndReason.CRASHED,
    Trigger.BUILD_FAILED: EndReason.ERROR,
    Trigger.NOT_FOUND: EndReason.CRASHED,
}
"""Default reason of a session's end by the event that began it; the teardown may know a more exact one."""


def next_status(status: Status, event: Trigger, *, cause: Trigger | None = None) -> Status:
    """Return the state after `event`.

    `TORN_DOWN` ends `destroying`; `cause` is then the event that began the destruction and picks the final state.

    Raises:
        IllegalTransition: the table has no such move.
    """
    if event is Trigger.TORN_DOWN and status is Status.DESTROYING and cause in _ENDINGS:
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
