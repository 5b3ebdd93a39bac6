"""The end of a live session: its sandbox is torn down, its final state is written, and an event is emitted.

Called by the session's actor, which serves no message any more by then. Sessions without an actor are ended by
`node/recovery.py`, with the same events and reasons.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from contextlib import nullcontext
from datetime import UTC, datetime

import trio

from sandkasten.actors.core import Ref
from sandkasten.actors.runs.session_services import SessionServices
from sandkasten.actors.services.egress import CloseWay
from sandkasten.actors.services.nsinit import ask_patiently, stop_processes, teardown
from sandkasten.actors.services.previews import CloseDoors
from sandkasten.actors.session.birth import Services
from sandkasten.actors.session.record import LiveRecord
from sandkasten.actors.session.watch import SandboxWatch
from sandkasten.actors.workspaces.actor import release_soon
from sandkasten.crash import Point
from sandkasten.errors import SandkastenError
from sandkasten.model import EndReason, EventType, Session, Status
from sandkasten.model.lifecycle import END_REASONS, Trigger, next_status

log = logging.getLogger(__name__)

ENDINGS = {
    Status.DESTROYED: EventType.SESSION_DESTROYED,
    Status.EXPIRED: EventType.SESSION_EXPIRED,
    Status.CRASHED: EventType.SESSION_CRASHED,
    Status.LOST: EventType.SESSION_LOST,
}
"""The event of each end."""

EXPIRIES = {
    EndReason.IDLE: "its time to live ran out",
    EndReason.MAX_LIFETIME: "it reached its maximum lifetime",
}
"""The reason of a session whose lease ran out."""


async def let_stop(nsinit: Ref, session: Session, event: Trigger) -> int:
    """Let the processes of a session that is ended on purpose end by themselves. Return the time that they had for it
    at most, in milliseconds; 0: they were not told."""
    grace_ms = session.options.stop_grace_ms if event in (Trigger.DESTROY, Trigger.EXPIRE) else 0
    if grace_ms:
        try:
            await ask_patiently(nsinit, stop_processes(session.id, grace_ms))
        except SandkastenError as error:
            log.warning("processes_not_told", extra={"session_id": session.id, "error": str(error)})
    return grace_ms


async def _close_way(services: Services, session: Session) -> None:
    """End the way out of a session, also one that its record does not know of (any more): the log of one is there, and
    its sockets would keep the network namespace."""
    if session.network.has_way_out or services.egress_logs.get(session.id) is not None:
        await _or_log(services.egress.ask_again(CloseWay(session.id, forget=True)), session, "way_out_not_closed")


async def _or_log(closing: Awaitable[None], session: Session, event: str) -> None:
    """Wait for something of a session to close, whose end goes on without."""
    try:
        await closing
    except SandkastenError as error:
        log.error(event, extra={"session_id": session.id, "error": str(error)})


async def end_member(
    session_id: str, own: LiveRecord, services: Services, *, event: Trigger, reason: str | None
) -> None:
    """Tear down a member of a pool that no client was told of, and delete its record. No event tells of it.

    The record goes last: with the record a next daemon adopts the sandbox or finishes the teardown."""
    began = trio.current_time()
    await _close_way(services, own.session)
    try:
        await ask_patiently(services.nsinit, teardown(session_id))
        await own.delete()
    except SandkastenError as error:  # left to the next reconciliation
        log.error("teardown_deferred", extra={"session_id": session_id, "error": str(error)})
    services.metrics.teardowns.observe(trio.current_time() - began)
    own.change(status=next_status(own.session.status, event))
    log.info("pool_member_ended", extra={"session_id": session_id, "event": event, "reason": reason})


async def end_session(
    host: SessionServices,
    own: LiveRecord,
    watch: SandboxWatch,
    services: Services,
    *,
    event: Trigger,
    reason: str | None,
    end_reason: EndReason | None = None,
) -> None:
    """Tear the sandbox down and write the session's final state.

    The teardown goes on when the database refuses the record, which is written when the database takes writes again.
    """
    began = trio.current_time()
    own.note(ending=event)
    end_reason = end_reason or END_REASONS[event]
    own.change(status=next_status(own.session.status, event), reason=reason, end_reason=end_reason)
    await own.put_or_keep()
    services.crash.passing(Point.DESTROY_RECORDED)
    has_waited = await let_stop(services.nsinit, own.session, event) > 0
    await _close_way(services, own.session)
    if own.session.previews:
        own.change(previews={})
        # Sockets in stock would keep the network namespace, too.
        await _or_log(services.previews.ask_again(CloseDoors(host.session_id)), own.session, "previews_not_closed")
    try:
        async with services.expiries if has_waited else nullcontext():  # an expiry without a grace period has its turn
            torn_down = await ask_patiently(services.nsinit, teardown(host.session_id))
    except SandkastenError as error:  # left to the next reconciliation
        log.error("teardown_deferred", extra={"session_id": host.session_id, "error": str(error)})
        return
    services.crash.passing(Point.DESTROY_TORN_DOWN)
    if event is Trigger.DIED and await watch.ran_out_of_memory(torn_down.oom_kills):
        reason, end_reason = f"out of memory: {reason}", EndReason.OOM
    own.note(ended_at=datetime.now(UTC))
    status = next_status(own.session.status, Trigger.TORN_DOWN, cause=event)
    own.change(status=status, reason=reason, end_reason=end_reason)
    await own.put_or_keep()
    services.crash.passing(Point.DESTROY_WRITTEN)
    services.metrics.teardowns.observe(trio.current_time() - began)
    release_soon(services.workspaces, own.session.workspace_id)
    host.emit(ENDINGS[status], reason=reason, end_reason=end_reason)
    facts = {"session_id": host.session_id, "status": status, "reason": reason, "end_reason": end_reason}
    log.info("session_ended", extra=facts)
