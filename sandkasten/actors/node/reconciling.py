"""Reconciliation of sessions with what the kernel shows: adopts what runs as recorded, finishes and reaps the rest.

Belongs to the sessions actor and runs in its nursery. Decides nothing itself: `reconcile.py` does, over what the
`Inventory` finds. Ends sessions that have no actor (any more); those that have one end in it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Protocol, TypeVarTuple

import attrs
import trio

from sandkasten.actors.node.inventory import Inventory, Removal
from sandkasten.actors.node.reconcile import SESSION, Action, Decision, Leftover
from sandkasten.actors.services import store as store_actor
from sandkasten.actors.services.nsinit import ask_patiently, teardown
from sandkasten.actors.services.shared import Shared
from sandkasten.actors.services.store import do
from sandkasten.actors.session.actor import SessionActor
from sandkasten.actors.session.ending import ENDINGS
from sandkasten.actors.workspaces.actor import release_soon
from sandkasten.model import EndReason, Session, Status
from sandkasten.model.errors import SandkastenError, SessionNotFound
from sandkasten.model.lifecycle import END_REASONS, ENDED, LIVE, Event, next_status
from sandkasten.store.sessions import SessionRecord, get_session

Ts = TypeVarTuple("Ts")

log = logging.getLogger(__name__)

_CONCURRENT_ENDS = 16


class Host(Protocol):
    """The sessions actor as its reconciliation sees it."""

    def start_task(self, work: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> None: ...

    def adopt(self, record: SessionRecord) -> SessionActor: ...


class Reconciling:
    """See the module's docstring. `ends`: how many teardowns may be under way at once."""

    def __init__(self, host: Host, shared: Shared, *, inventory: Inventory, removal: Removal) -> None:
        self._host = host
        self._store, self._zygote, self._workspaces = shared.store, shared.zygote, shared.workspaces
        self._directory, self._journal, self._archive = shared.directory, shared.journal, shared.archive
        self._inventory, self._removal = inventory, removal
        self.ends = trio.CapacityLimiter(_CONCURRENT_ENDS)

    async def reconcile(self) -> None:
        """Adopt what runs as recorded, end the rest; answers come from the first request on, ends take their time."""
        plan = await self._inventory.look(is_start=True)
        adopted = [self._host.adopt(each.record) for each in plan.of(Action.ADOPT) if each.record]
        for each in plan.of(Action.FINISH, Action.CLEAN):
            self._directory.reserved.add(each.session_id)
            self._host.start_task(self._end, each)
        await self._removal.remove(plan.remove)
        for actor in adopted:
            try:
                await actor.ready.wait()
            except SandkastenError as error:
                log.warning("adoption_failed", extra={"session_id": actor.session.id, "error": str(error)})
        ending = len(plan.of(Action.FINISH, Action.CLEAN))
        log.info("reconciled", extra={"adopted": len(adopted), "ending": ending, "leftovers": len(plan.news)})

    async def settle(self, decision: Decision) -> None:
        """Do what was decided about a session, unless it is out of date: somebody works on it now, or did."""
        record = await self._store.ask_again(do(get_session, decision.session_id))
        before, now = decision.record, None if record is None or record.session.status not in LIVE else record
        is_as_seen = now is before is None or (
            now is not None and before is not None and now.session.epoch == before.session.epoch
        )
        if not is_as_seen or decision.session_id in self._directory:
            return
        if decision.action is Action.ADOPT and now is not None:
            log.warning("unowned_session_adopted", extra={"session_id": decision.session_id})
            await self._host.adopt(now).ready.wait()
        elif decision.action in (Action.FINISH, Action.CLEAN):
            self._directory.reserved.add(decision.session_id)
            await self._end(decision)

    async def _end(self, decision: Decision) -> None:
        """Finish a session, or remove what there is of an id that is nobody's. The id is reserved."""
        if decision.action is Action.CLEAN:
            if await self.reap(decision.session_id):
                self._inventory.note_removed(Leftover(SESSION, decision.session_id))
            return
        record = decision.record
        assert record is not None
        assert decision.event is not None
        try:
            if record.session.status is not Status.DESTROYING and decision.event is not Event.NOT_FOUND:
                record = _begin_end(record, decision.event, decision.reason, decision.end_reason)
            await self._finish(record, decision.event, reason=decision.reason, end_reason=decision.end_reason)
        finally:
            self._directory.reserved.discard(decision.session_id)

    async def crash(self, record: SessionRecord) -> None:
        """End a session whose actor died of a bug; an end that was all but written is written."""
        if record.session.status in ENDED:
            self._directory.unwritten[record.session.id] = record
            return
        event = Event.BUILD_FAILED if record.session.status is Status.CREATING else Event.DIED
        if record.session.status is not Status.DESTROYING:
            record = _begin_end(record, event, "internal error", EndReason.ERROR)
        await self._finish(record, event)

    async def _finish(
        self, record: SessionRecord, event: Event, *, reason: str | None = None, end_reason: EndReason | None = None
    ) -> Session:
        """Tear down what is left of a session without an actor and write its final state. Why it ended is what its
        record says already, or what is given, or what the event usually means."""
        try:
            async with self.ends:
                await ask_patiently(self._zygote, teardown(record.session.id))
                if event is Event.NOT_FOUND:
                    status = next_status(record.session.status, event)
                else:
                    status = next_status(record.session.status, Event.TORN_DOWN, cause=event)
                before = record.session
                session = attrs.evolve(
                    before,
                    status=status,
                    reason=reason or before.reason,
                    end_reason=before.end_reason or end_reason or END_REASONS[event],
                    epoch=before.epoch + 1,
                )
                key = None if event is Event.BUILD_FAILED else record.idempotency_key  # a retry may try again
                ended = attrs.evolve(
                    record, session=session, ending=event, ended_at=datetime.now(UTC), idempotency_key=key
                )
                await store_actor.put_or_keep(self._store, self._directory.unwritten, ended)
                await trio.to_thread.run_sync(self._archive.session(session.id).discard)
                release_soon(self._workspaces, session.workspace_id)
                why = {"reason": session.reason, "end_reason": session.end_reason}
                self._journal.emit(ENDINGS[session.status], session.id, **why)
                log.info("session_ended", extra={"session_id": session.id, "status": status, **why})
                return session
        except SandkastenError as error:  # the reaper tries again
            log.error("finish_deferred", extra={"session_id": record.session.id, "error": str(error)})
            return record.session

    async def reap(self, session_id: str) -> bool:
        """Remove what there is of an id that is nobody's; False if that must be tried again."""
        try:
            async with self.ends:
                torn_down = await ask_patiently(self._zygote, teardown(session_id))
                return not torn_down.leftovers
        except SandkastenError as error:
            log.error("reap_deferred", extra={"session_id": session_id, "error": str(error)})
            return False
        finally:
            self._directory.reserved.discard(session_id)

    async def forget(self, session_id: str) -> Session:
        """End a session that has no actor though its record says it lives."""
        record = await self._store.ask_again(do(get_session, session_id))
        if record is None:
            raise SessionNotFound("no such session", session_id=session_id)
        if record.session.status not in LIVE or self._directory.owns(session_id):
            return record.session
        if record.session.status is Status.DESTROYING:
            return await self._finish(record, record.ending or Event.DESTROY)
        return await self._finish(record, Event.NOT_FOUND, reason="nothing answered for it any more")


def _begin_end(
    record: SessionRecord, event: Event, reason: str | None, end_reason: EndReason | None = None
) -> SessionRecord:
    session = attrs.evolve(
        record.session,
        status=next_status(record.session.status, event),
        reason=reason,
        end_reason=end_reason or END_REASONS[event],
        epoch=record.session.epoch + 1,
    )
    return attrs.evolve(record, session=session, ending=event)
