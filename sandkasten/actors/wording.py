"""How the end of a session is told."""

from __future__ import annotations

from sandkasten.model import EndReason, EventType, Status

ENDINGS = {
    Status.DESTROYED: EventType.SESSION_DESTROYED,
    Status.EXPIRED: EventType.SESSION_EXPIRED,
    Status.CRASHED: EventType.SESSION_CRASHED,
    Status.LOST: EventType.SESSION_LOST,
}
"""The event that tells of an end."""

EXPIRIES = {
    EndReason.IDLE: "its time to live ran out",
    EndReason.MAX_LIFETIME: "it reached its maximum lifetime",
}
"""What people are told of a lease that ran out."""
