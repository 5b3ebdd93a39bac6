"""Ends a live session: its sandbox is torn down, and its final state is written and told.

For its actor, which serves nothing any more by then. Sessions without an actor are ended by `node/recovery.py`,
and are told of in the same words.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime

import trio

from sandkasten.actors.runs.session_services import SessionServices
from sandkasten.actors.services.nsinit import ask_patiently, teardown
from sandkasten.actors.session.birth import Services
from sandkasten.actors.session.record import LiveRecord
from sandkasten.actors.session.watch import SandboxWatch
from sandkasten.actors.workspaces.actor import release_soon
from sandkasten.crash import Point
from sandkasten.model import EndReason, EventType, Status
from sandkasten.model.errors import SandkastenError
from sandkasten.model.lifecycle import END_REASONS, Event, next_status

log = logging.getLogger(__name__)

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


async def end_session(
    host: SessionServices,
    own: LiveRecord,
    watch: SandboxWatch,
    services: Services,
    *,
    event: Event,
    reason: str | None,
    end_reason: EndReason | None = None,
) -> None:
    """Tear the sandbox down and write the session's final state.

    A refused record does not stop the teardown: what must end ends, and is written when that is possible again.
    """
    began = trio.current_time()
    own.note(ending=event)
    end_reason = end_reason or END_REASONS[event]
    own.change(status=next_status(own.session.status, event), reason=reason, end_reason=end_reason)
    await own.put_or_keep()
    services.crash.passing(Point.DESTROY_RECORDED)
    try:
        torn_down = await ask_patiently(services.nsinit, teardown(host.session_id))
    except SandkastenError as error:  # the reaper finishes it
        log.error("teardown_deferred", extra={"session_id": host.session_id, "error": str(error)})
        return
    services.crash.passing(Point.DESTROY_TORN_DOWN)
    if event is Event.DIED and await watch.ran_out_of_memory(torn_down.oom_kills):
        reason, end_reason = f"out of memory: {reason}", EndReason.OOM
    own.note(ended_at=datetime.now(UTC))
    status = next_status(own.session.status, Event.TORN_DOWN, cause=event)
    own.change(status=status, reason=reason, end_reason=end_reason)
    await own.put_or_keep()
    services.crash.passing(Point.DESTROY_WRITTEN)
    services.metrics.teardowns.observe(trio.current_time() - began)
    release_soon(services.workspaces, own.session.workspace_id)
    host.emit(ENDINGS[status], reason=reason, end_reason=end_reason)
    facts = {"session_id": host.session_id, "status": status, "reason": reason, "end_reason": end_reason}
    log.info("session_ended", extra=facts)
