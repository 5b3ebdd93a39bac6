"""Recovery: differences between the store, the kernel and the disk are found, planned and settled.

A start and a sweep (every minute) do the same three things: `LeftoverSearch.look` compares, the pure planner of
`reconcile.py` decides, and `Recovery` and `LeftoverSearch` carry the decisions out. A sandbox that runs as recorded is
adopted by a session actor. A session that can't go on is torn down and its final state written. A leftover is told of,
and removed only where it is surely ours. A step that fails is logged, and its cause is found again by the next sweep.

`Recovery` ends sessions that have no actor; a session that has one is ended by its actor, as are leases that ran out.
The reaper also writes final records that the database refused before, and forgets sessions that ended long ago.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol, TypeVarTuple, assert_never

import attrs
import trio

from nsinit.wire import protocol
from sandkasten.actors.core import Actor, Ask, Deferred, Ref, by_turns
from sandkasten.actors.node.reconcile import (
    SESSION,
    SPOOL_FILE,
    Decision,
    Leftover,
    Observed,
    Reconciliation,
    SessionAction,
    Sightings,
    as_leftovers,
    plan_reconciliation,
)
from sandkasten.actors.services import store as store_actor
from sandkasten.actors.services.directory import Shared
from sandkasten.actors.services.nsinit import ask_patiently, ask_store, call, scan, teardown
from sandkasten.actors.services.store import do
from sandkasten.actors.session.actor import SessionActor
from sandkasten.actors.session.ending import ENDINGS, let_stop
from sandkasten.actors.workspaces.actor import release_soon
from sandkasten.errors import SandkastenError, SessionNotFound
from sandkasten.host.paths import DataPaths
from sandkasten.images.layers import LAYER_GRACE_S
from sandkasten.model import EndReason, EventType, Session, Status
from sandkasten.model.lifecycle import END_REASONS, ENDED, IN_KERNEL, LIVE, Trigger, next_status
from sandkasten.output.disk import OutputFile, list_output_files, remove_output_files, session_of
from sandkasten.store.sessions import (
    SessionRecord,
    delete_session,
    forget_ended,
    get_session,
    live_sessions,
    put_session,
)

Ts = TypeVarTuple("Ts")

log = logging.getLogger(__name__)

_CONCURRENT_ENDS = 16

_AT_ONCE = 16
"""Actors that are started before other tasks get a turn."""

BATCH = 500
"""Records that one transaction deletes; some milliseconds, in which nothing else is written."""

_EVERY_S = 60.0


# Leftovers ----------------------------------------------------------------------------------------------------


class LeftoverSearch:
    """The search for leftovers, and their removal. One object for the tree: it keeps the sightings of the last look,
    and counts by kind the leftovers `found` and `removed` since the start."""

    def __init__(self, data_dir: Path, boot_id: str, shared: Shared) -> None:
        self._spool_dir, self._boot_id = DataPaths(data_dir).spool, boot_id
        self._store, self._nsinit, self._directory = shared.store, shared.nsinit, shared.directory
        self._journal, self._output, self._pulls = shared.journal, shared.output, shared.pulls
        self._seen: Sightings = frozenset()
        self.found: Counter[str] = Counter()
        self.removed: Counter[str] = Counter()

    @property
    def in_hand(self) -> int:
        """Number of reserved ids: ends under way without an actor, and pool sandboxes."""
        return len(self._directory.reserved)

    async def look(self, *, is_start: bool = False) -> Reconciliation:
        """Return the plan for this moment, and tell of new leftovers.

        Records are read first and owners last: a session that begins or ends meanwhile has an owner or is only watched.
        Those that have an owner before are left alone, and not read: a thousand take 70 ms.
        """
        owned = self._directory.known()
        records = await self._store.ask_again(do(live_sessions, owned))
        found = await scan(self._nsinit)
        leftovers = await self._leftovers()
        files = await self._unused_files()
        seen = frozenset[str | Leftover]() if is_start else self._seen
        owned |= self._directory.known()
        unowned = [each for each in found if each.session_id not in owned]
        plan = plan_reconciliation(Observed(records, unowned, self._boot_id, leftovers, owned, seen, is_start, files))
        self._seen = plan.seen
        for each in plan.news:
            self._tell(each)
        return plan

    async def collect_layers(self) -> None:
        """Have the layers deleted that no image and no session has. Raises `SandkastenError`."""
        collected = await ask_store(self._nsinit, protocol.CollectLayers(0, LAYER_GRACE_S, self._pulls.kept))
        if collected.layers:
            log.info("layers_collected", extra={"count": collected.layers, "freed_bytes": collected.freed_bytes})

    async def _leftovers(self) -> Sequence[Leftover]:
        """Return nsinit's findings; none when nsinit can't look, which must not hold up the rest."""
        try:
            return as_leftovers((await ask_patiently(self._nsinit, call(protocol.FindLeftovers))).leftovers)
        except SandkastenError as error:
            log.error("leftovers_not_looked_for", extra={"error": str(error)})
            return []

    async def _unused_files(self) -> Sequence[OutputFile]:
        """Return the files that the output store does not use. A session is in the store before it has files."""
        try:
            files = await trio.to_thread.run_sync(list_output_files, self._spool_dir)
        except OSError as error:
            log.error("leftovers_not_looked_for", extra={"error": str(error)})
            return []
        return [each for each in files if not self._output.uses(each.name)]

    def _tell(self, leftover: Leftover) -> None:
        self.found[leftover.kind] += 1
        log.warning("leftover_found", extra={"kind": leftover.kind, "leftover": leftover.name})
        session_id = leftover.name if leftover.kind == SESSION else ""
        self._journal.emit(EventType.LEFTOVER_FOUND, session_id, kind=leftover.kind, name=leftover.name)

    def note_removed(self, leftover: Leftover) -> None:
        """Tell that a leftover is gone."""
        self.removed[leftover.kind] += 1
        log.warning("leftover_removed", extra={"kind": leftover.kind, "leftover": leftover.name})
        session_id = leftover.name if leftover.kind == SESSION else ""
        self._journal.emit(EventType.LEFTOVER_REMOVED, session_id, kind=leftover.kind, name=leftover.name)

    async def remove(self, leftovers: Sequence[Leftover]) -> int:
        """Remove the leftovers of a plan: files in `spool/` here, all else by nsinit. Return how many are gone."""
        files = [each for each in leftovers if each.kind == SPOOL_FILE]
        removed = await self._remove_output_files(files) if files else 0
        for leftover in leftovers:
            if leftover.kind != SPOOL_FILE:
                removed += await self._remove_by_nsinit(leftover)
        return removed

    async def _remove_by_nsinit(self, leftover: Leftover) -> bool:
        named = protocol.Leftover(leftover.kind, leftover.name)  # type: ignore[arg-type]  # a kind that nsinit named
        try:
            await self._nsinit.ask(call(protocol.RemoveLeftover, named))
        except SandkastenError as error:
            self._not_removed(leftover, str(error))
            return False
        self.note_removed(leftover)
        return True

    async def _remove_output_files(self, files: Sequence[Leftover]) -> int:
        due = [each for each in files if session_of(each.name) not in self._directory]
        try:
            refused = await trio.to_thread.run_sync(
                remove_output_files, self._spool_dir, frozenset(each.name for each in due)
            )
        except OSError as error:
            refused = dict.fromkeys((each.name for each in due), str(error))
        for each in due:
            if each.name in refused:
                self._not_removed(each, refused[each.name])
            else:
                self.note_removed(each)
        return len(due) - len(refused)

    def _not_removed(self, leftover: Leftover, reason: str) -> None:
        log.error("leftover_not_removed", extra={"kind": leftover.kind, "leftover": leftover.name, "error": reason})


# Sessions without an actor ------------------------------------------------------------------------------------------


class SessionOwner(Protocol):
    """The sessions actor, as its recovery sees it."""

    def start_task(self, work: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> None: ...

    def adopt(self, record: SessionRecord) -> SessionActor: ...

    async def wanted_members(self, records: Sequence[SessionRecord]) -> Sequence[SessionRecord]: ...


class Recovery:
    """Carries out decisions about sessions, as a part of the sessions actor and in its nursery. `ends` bounds the
    teardowns under way."""

    def __init__(self, owner: SessionOwner, shared: Shared, *, leftovers: LeftoverSearch) -> None:
        self._owner = owner
        self._store, self._nsinit, self._workspaces = shared.store, shared.nsinit, shared.workspaces
        self._directory, self._journal, self._output = shared.directory, shared.journal, shared.output
        self._leftovers = leftovers
        self.ends = trio.CapacityLimiter(_CONCURRENT_ENDS)

    async def reconcile(self) -> bool:
        """Recover at a start. Returns when each session that goes on has its actor, whether there is one; adoptions and
        ends go on behind it.

        A session is adopted when its turn comes or when somebody asks for it (`AdoptionTurns`); until then it is listed
        and counted as it is recorded. The sessions whose leases end first are first.
        """
        plan = await self._leftovers.look(is_start=True)
        await self._leftovers.remove(plan.remove)  # before an id is reserved: its files are left to what reserves it
        whole = [each.record for each in plan.of(SessionAction.ADOPT) if each.record]
        members = [each for each in whole if each.session.status is Status.POOL_IDLE]
        wanted = await self._owner.wanted_members(members)
        left = [each for each in members if each not in wanted]
        going_on = sorted((each for each in whole if each not in left), key=_lease_end)
        adopted = await by_turns(self._owner.adopt, going_on, at_once=_AT_ONCE)
        for record in left:
            self._directory.reserved.add(record.session.id)  # before the sweep looks
            self._owner.start_task(self._end_member, record)
        for each in plan.of(SessionAction.FINISH, SessionAction.CLEAN):
            self._directory.reserved.add(each.session_id)
            self._owner.start_task(self._end, each)
        self._owner.start_task(self._await_adopted, adopted, plan)
        return bool(adopted)

    async def _await_adopted(self, actors: Sequence[SessionActor], plan: Reconciliation) -> None:
        for actor in actors:
            try:
                await actor.ready.wait()
            except SandkastenError as error:
                log.warning("adoption_failed", extra={"session_id": actor.session.id, "error": str(error)})
        ending = len(plan.of(SessionAction.FINISH, SessionAction.CLEAN))
        log.info("reconciled", extra={"adopted": len(actors), "ending": ending, "leftovers": len(plan.news)})

    async def settle(self, decision: Decision) -> None:
        """Carry out a decision about a session, unless the session has changed or got an owner since."""
        record = await self._store.ask_again(do(get_session, decision.session_id))
        before, now = decision.record, None if record is None or record.session.status not in IN_KERNEL else record
        is_as_seen = now is before is None or (
            now is not None and before is not None and now.session.epoch == before.session.epoch
        )
        if not is_as_seen or decision.session_id in self._directory:
            return
        if now is not None and now.session.status is Status.POOL_IDLE:
            await self._end_member(now)
        elif decision.action is SessionAction.ADOPT and now is not None:
            log.warning("unowned_session_adopted", extra={"session_id": decision.session_id})
            await self._owner.adopt(now).ready.wait()
        elif decision.action in (SessionAction.FINISH, SessionAction.CLEAN):
            self._directory.reserved.add(decision.session_id)
            await self._end(decision)

    async def _end(self, decision: Decision) -> None:
        """Finish a session, or remove everything of an unknown id. The id is reserved."""
        if decision.action is SessionAction.CLEAN:
            if await self.reap(decision.session_id):
                self._leftovers.note_removed(Leftover(SESSION, decision.session_id))
            return
        record = decision.record
        assert record is not None
        assert decision.event is not None
        if record.session.status is Status.POOL_IDLE:
            await self._end_member(record)
            return
        try:
            if record.session.status is not Status.DESTROYING and decision.event is not Trigger.NOT_FOUND:
                record = _begin_end(record, decision.event, decision.reason, decision.end_reason)
            await self._finish(record, decision.event, reason=decision.reason, end_reason=decision.end_reason)
        finally:
            self._directory.reserved.discard(decision.session_id)

    async def _end_member(self, record: SessionRecord) -> None:
        """Tear down a member of a pool that nobody wants, and delete its record. Nobody was told of it."""
        session_id = record.session.id
        self._directory.reserved.add(session_id)
        if await self.reap(session_id):
            await self._output.discard(session_id)
            await _failure_of(self._store.ask_again, do(delete_session, session_id))
            log.info("pool_member_ended", extra={"session_id": session_id, "reason": "not wanted"})

    async def crash(self, record: SessionRecord) -> None:
        """End a session whose actor died of a bug. A final record that the actor had not written is kept for the
        reaper."""
        if record.session.status is Status.POOL_IDLE:
            await self._end_member(record)
            return
        if record.session.status in ENDED:
            self._directory.unwritten[record.session.id] = record
            return
        event = Trigger.BUILD_FAILED if record.session.status is Status.CREATING else Trigger.DIED
        if record.session.status is not Status.DESTROYING:
            record = _begin_end(record, event, "internal error", EndReason.ERROR)
        await self._finish(record, event)

    async def _finish(
        self, record: SessionRecord, event: Trigger, *, reason: str | None = None, end_reason: EndReason | None = None
    ) -> Session:
        """Tear down the remains of a session and write its final state. The reason is that of its record, or else
        the one given, or else the usual one of the event."""
        try:
            await let_stop(self._nsinit, record.session, event)
            async with self.ends:
                await ask_patiently(self._nsinit, teardown(record.session.id))
                if event is Trigger.NOT_FOUND:
                    status = next_status(record.session.status, event)
                else:
                    status = next_status(record.session.status, Trigger.TORN_DOWN, cause=event)
                before = record.session
                session = attrs.evolve(
                    before,
                    status=status,
                    reason=reason or before.reason,
                    end_reason=before.end_reason or end_reason or END_REASONS[event],
                    epoch=before.epoch + 1,
                )
                key = None if event is Trigger.BUILD_FAILED else record.idempotency_key  # a retry may try again
                ended = attrs.evolve(
                    record, session=session, ending=event, ended_at=datetime.now(UTC), idempotency_key=key
                )
                await store_actor.put_or_keep(self._store, self._directory.unwritten, ended)
                await self._output.discard(session.id)
                release_soon(self._workspaces, session.workspace_id)
                why = {"reason": session.reason, "end_reason": session.end_reason}
                self._journal.emit(ENDINGS[session.status], session.id, **why)
                log.info("session_ended", extra={"session_id": session.id, "status": status, **why})
                return session
        except SandkastenError as error:  # the reaper tries again
            log.error("finish_deferred", extra={"session_id": record.session.id, "error": str(error)})
            return record.session

    async def reap(self, session_id: str) -> bool:
        """Remove everything of an unknown id; return False if something is left."""
        try:
            async with self.ends:
                torn_down = await ask_patiently(self._nsinit, teardown(session_id))
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
            return await self._finish(record, record.ending or Trigger.DESTROY)
        return await self._finish(record, Trigger.NOT_FOUND, reason="nothing answered for it any more")


def _lease_end(record: SessionRecord) -> datetime:
    return record.session.expires_at or datetime.max.replace(tzinfo=UTC)


def _begin_end(
    record: SessionRecord, event: Trigger, reason: str | None, end_reason: EndReason | None = None
) -> SessionRecord:
    session = attrs.evolve(
        record.session,
        status=next_status(record.session.status, event),
        reason=reason,
        end_reason=end_reason or END_REASONS[event],
        epoch=record.session.epoch + 1,
    )
    return attrs.evolve(record, session=session, ending=event)


# The reaper ----------------------------------------------------------------------------------------------------


@attrs.frozen
class Settle(Ask[None]):
    """Ask the sessions actor to carry out a decision of a sweep; answered when that is done."""

    decision: Decision


@attrs.frozen
class Sweep(Ask[int]):
    """Sweep now; answers how many ids were adopted, finished or removed, and how many leftovers removed."""


Message = Sweep


class Reaper(Actor):
    """Sweeps every minute, and when asked to."""

    def __init__(
        self,
        ref: Ref,
        shared: Shared,
        *,
        sessions: Ref,
        leftovers: LeftoverSearch,
        keep_records_s: float,
    ) -> None:
        super().__init__(ref)
        self._store, self._directory, self._metrics = shared.store, shared.directory, shared.metrics
        self._sessions = sessions
        self._leftovers = leftovers
        self._keep_records_s = keep_records_s
        self._turn = trio.Lock()

    async def on_start(self) -> None:
        self._nursery.start_soon(self._sweep_forever)

    async def handle(self, message: Message) -> Deferred:
        match message:
            case Sweep():
                return self.defer(self._sweep)
            case _:
                assert_never(message)

    async def _sweep_forever(self) -> None:
        while True:
            await trio.sleep(_EVERY_S)
            try:
                await self._sweep()
            except SandkastenError as error:
                self._metrics.sweeps("failed").inc()
                log.warning("sweep_failed", extra={"error": str(error)})

    async def _sweep(self) -> int:
        """Do every part, whichever fails: a database that takes no writes is no reason to leave things on its disk.
        Raises the first failure in the end."""
        async with self._turn:
            failures = [*await _failure_of(self._write_refused)]
            plan = await self._leftovers.look()
            due = plan.of(SessionAction.ADOPT, SessionAction.FINISH, SessionAction.CLEAN)
            for decision in due:
                failures += await _failure_of(self._sessions.ask, Settle(decision))
            removed = await self._leftovers.remove(plan.remove)
            failures += await _failure_of(self._leftovers.collect_layers)
            failures += await _failure_of(self._forget)
            self._metrics.swept.inc(len(due) + removed)
            if failures:
                raise failures[0]
            self._metrics.sweeps("ok").inc()
            return len(due) + removed

    async def _forget(self) -> None:
        await forget_old(self._store, keep_s=self._keep_records_s)

    async def _write_refused(self) -> None:
        """Write the final records that the database refused before."""
        for session_id, record in list(self._directory.unwritten.items()):
            await self._store.ask(do(put_session, record))
            if self._directory.unwritten.get(session_id) is record:
                del self._directory.unwritten[session_id]


async def _failure_of(work: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> Sequence[SandkastenError]:
    """Do something; return the error it failed with, or nothing."""
    try:
        await work(*args)
    except SandkastenError as error:
        return (error,)
    return ()


async def forget_old(store: Ref, *, keep_s: float) -> int:
    """Delete the records of sessions that ended longer ago than that; return how many. Raises `StoreFailed`."""
    before = datetime.now(UTC) - timedelta(seconds=keep_s)
    forgotten = 0
    while True:
        count = await store.ask(do(forget_ended, before=before, limit=BATCH))
        forgotten += count
        if count < BATCH:
            break
    if forgotten:
        log.info("records_forgotten", extra={"count": forgotten})
    return forgotten
