"""How a session's beginning and end are put: what the first answer of its PID 1 means, and what events say. Pure."""

from __future__ import annotations

from runner import protocol
from sandkasten.actors.session_setup import refused_start
from sandkasten.errors import RunnerProtocolError, SandboxError
from sandkasten.model import EndReason, EventType, Status

_VERSIONS = range(protocol.OLDEST_VERSION, protocol.PROTOCOL_VERSION + 1)
"""What PID 1 may speak: that of a sandbox is as old as the sandbox."""

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


def accepted(answer: object) -> protocol.HelloReply:
    """Return the answer if it is what it should be.

    Raises:
        SandboxError: it speaks another version, or was never set up: then nobody was told of the session.
        InvalidRequest: it refused what the session's creator asked for.
        RunnerProtocolError: it is no answer to that.
    """
    match answer:
        case protocol.HelloReply(shell="", version=version) if version in _VERSIONS:
            raise SandboxError("the daemon stopped before the session was set up")
        case protocol.HelloReply(version=version) if version in _VERSIONS:
            return answer
        case protocol.HelloReply():
            raise SandboxError(f"the sandbox's init speaks protocol {answer.version}")
        case protocol.Error():
            raise refused_start(answer)
        case _:
            raise RunnerProtocolError(f"{type(answer).__name__} to the first request")
