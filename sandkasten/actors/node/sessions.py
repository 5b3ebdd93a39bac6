"""The sessions actor: starts the actor of each session, and turns the exit of an actor into the state of its session.

Its mailbox never waits for something slow: creating, adopting and finishing run as child tasks. A session actor that
dies of a bug takes no other along: its sandbox is torn down and its record says `crashed`. Creates are in
`creating.py`, sandboxes that outlived the last daemon in `recovery.py`.

`IdempotentCreates` answers a repeated idempotency key with the session that the key made. `list_sessions` merges the
directory, the truth about live sessions, with the database, the truth about ended ones.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVarTuple, assert_never

import attrs
import trio

from runner.wire.protocol import Graces
from sandkasten.actors.core import Actor, Ask, Ref, Reply, unwrap
from sandkasten.actors.node.creating import Creating, NodeIdentity
from sandkasten.actors.node.recovery import LeftoverSearch, Recovery, Settle
from sandkasten.actors.node.sandbox_pool import SandboxPool
from sandkasten.actors.node.session_pools import PoolServices, SessionPools
from sandkasten.actors.services.directory import Entry, SessionDirectory, Shared
from sandkasten.actors.services.nsinit import Describe, ask_patiently, scan
from sandkasten.actors.services.store import do
from sandkasten.actors.session.actor import SessionActor
from sandkasten.actors.session.birth import AdoptionTurns, Creation, Services
from sandkasten.actors.session.messages import Destroy
from sandkasten.actors.workspaces.holds import Holds
from sandkasten.admission.budget import Budget, MachineResources
from sandkasten.admission.plan import spec_digest
from sandkasten.config import Config
from sandkasten.counters import node as capacity
from sandkasten.errors import ActorGone, Conflict, SandboxError, SandkastenError
from sandkasten.host.paths import DataPaths
from sandkasten.model import Session, SessionSpec, Status, WarmProcess
from sandkasten.model.lifecycle import IN_KERNEL, LIVE, WHOLE, ended_error
from sandkasten.model.listing import SessionPage, SessionQuery, first_of, page_of
from sandkasten.model.node import Amounts, PoolInfo
from sandkasten.store.sessions import Recorded, SessionRecord, find_by_key, find_sessions, read_drained, write_drained

Ts = TypeVarTuple("Ts")

log = logging.getLogger(__name__)


CONCURRENT_EXPIRIES = 8
_DRAIN_PAUSE_S = 0.02

_UNDOING_S = 10.0
"""Time for a create to wait until an unfinished session of an earlier daemon with its key is undone."""

_PAUSE_S = 0.05


@attrs.frozen
class Create(Ask[Session]):
    """Make a session; answered when it runs."""

    spec: SessionSpec


@attrs.frozen
class Forget(Ask[Session]):
    """End a session that is recorded as live and has no actor; answers its final state."""

    session_id: str


@attrs.frozen
class DestroyAll(Ask[None]):
    """Refuse new sessions and end all there are."""


@attrs.frozen
class LeaveAll(Ask[None]):
    """End the actors of all sessions, and leave their sandboxes to the next start."""


@attrs.frozen
class Drain(Ask[None]):
    """Take no new sessions from now on, over restarts; with `drained` false take them again."""

    drained: bool


@attrs.frozen
class Refuse(Ask[None]):
    """Refuse creates because the daemon is stopping; answered when those under way are done."""


@attrs.frozen
class ForgetImage(Ask[None]):
    """Have no sandbox with that image ready, which would keep the image from being deleted."""

    name: str


@attrs.frozen
class Occupancy:
    """The admitted sessions: their limits together, how many there may be, how many creates wait. `pooled` is the
    number of pool sandboxes, `pools` the session pools."""

    max_sessions: int
    committed: Amounts
    pooled: int
    pools: Sequence[PoolInfo]
    queued: int
    is_draining: bool


@attrs.frozen
class Occupied(Ask[Occupancy]):
    """Ask for the admitted sessions."""


Message = Create | Forget | ForgetImage | Settle | Drain | Refuse | DestroyAll | LeaveAll | Occupied


_FIRST_ANSWERS_S = 0.5
"""Time from a start beside live sessions to work that nobody waits for: requests that waited for it come first."""


class Sessions(Actor):
    """The owner of all session actors."""

    def __init__(
        self,
        ref: Ref,
        config: Config,
        node: NodeIdentity,
        shared: Shared,
        *,
        images: Ref,
        holds: Holds,
        leftovers: LeftoverSearch,
        pool_size: int,
        warm: Mapping[str, WarmProcess],
    ) -> None:
        super().__init__(ref)
        self._config, self._node, self._shared = config, node, shared
        self._store, self._nsinit, self._directory = shared.store, shared.nsinit, shared.directory
        self._images, self._holds = images, holds
        self._recovery = Recovery(self, shared, leftovers=leftovers)
        self._pool_size, self._warm = pool_size, warm
        self._drain_turn = trio.Lock()
        self._leaving: set[trio.CancelScope] = set()

    async def on_start(self) -> None:
        self._directory.clear()
        self._shared.shares.clear()
        ready = await ask_patiently(self._nsinit, Describe())
        self._assemble(ready.cgroup_dirs)
        is_drained = await self._store.ask_again(do(read_drained))
        self._creating.set_drained(is_drained)
        if is_drained:
            log.warning("node_drained", extra={"advice": "it takes no new sessions until it is undrained"})
        goes_on = await self._recovery.reconcile()
        self._pools.run()
        self.start_task(self._work_ahead, _FIRST_ANSWERS_S if goes_on else 0.0)

    async def _work_ahead(self, pause_s: float) -> None:
        """Adopt sessions that nobody asks for, and fill pools, after a pause."""
        await trio.sleep(pause_s)
        self._services.adoptions.begin()
        self._refill_pools()

    def _assemble(self, cgroup_dirs: Mapping[str, str]) -> None:
        """Make the parts that need nsinit's cgroup directories."""
        bounds = capacity.session_bounds(self._config.server.max_sessions)
        bound = min(bounds, key=lambda name: bounds[name])
        resources = MachineResources(self._config.data_dir, cgroup_dirs, self._directory.next_end)
        self._budget = Budget(
            self._config.admission,
            bounds[bound],
            resources,
            self._shared.shares,
            usual=self._config.defaults.limits,
            bound=bound,
        )
        self._sandbox_pool = SandboxPool(
            self._nsinit,
            self._directory,
            wanted=self._pool_size,
            limits=self._config.defaults.limits,
            new_id=self._node.new_session_id,
            reap=lambda session_id: self._recovery.reap(session_id),
        )
        services = PoolServices(
            config=self._config,
            shared=self._shared,
            images=self._images,
            budget=self._budget,
            warm=self._warm,
            start=lambda *member: self._creating.start_member(*member),
            start_task=self.start_task,
            is_quiet=lambda: not self._creating.under_way and not self._creating.is_draining,
            is_draining=lambda: self._creating.is_draining,
        )
        self._pools = SessionPools(services)
        self._creating = Creating(
            self._config,
            self._node,
            images=self._images,
            broker=self._shared.broker,
            workspaces=self._shared.workspaces,
            holds=self._holds,
            budget=self._budget,
            pools=self._pools,
            sandbox_pool=self._sandbox_pool,
            start=self._start_actor,
            went_quiet=self._refill_sandbox_pool,
        )
        self._let_look()
        self._creates = IdempotentCreates(self._store, self._directory, self._creating.create)
        self._services = self._services_at(cgroup_dirs)

    def _services_at(self, cgroup_dirs: Mapping[str, str]) -> Services:
        runs = self._config.runs
        return Services(
            **attrs.asdict(self._shared, recurse=False),
            paths=DataPaths(self._config.data_dir),
            boot_id=self._node.boot_id,
            cgroup_dirs=cgroup_dirs,
            shell_queue_length=self._config.server.shell_queue_length,
            max_exec_ids=runs.max_exec_ids,
            maximum=self._config.maximum,
            graces=Graces(
                interrupt_ms=runs.interrupt_grace_ms,
                terminate_ms=runs.terminate_grace_ms,
                kill_ms=runs.kill_grace_ms,
            ),
            run_key=self._node.run_key,
            disk=self._config.disk,
            budget=self._budget,
            expiries=trio.CapacityLimiter(CONCURRENT_EXPIRIES),
            adoptions=AdoptionTurns(),
        )

    def handle_at_once(self, message: Message) -> Any:
        match message:
            case Create(spec):
                return self.defer(self._creates.create, spec)
            case Forget(session_id):
                return self.defer(self._recovery.forget, session_id)
            case ForgetImage(name):
                return self.defer(self._forget_image, name)
            case Settle(decision):
                return self.defer(self._recovery.settle, decision)
            case Drain(drained):
                return self.defer(self._set_drained, drained)
            case Refuse():
                self._creating.refuse()
                return self.defer(self._creating.wait_done)
            case DestroyAll():
                self._creating.refuse()
                return self.defer(self._destroy_all)
            case LeaveAll():
                self._creating.refuse()
                return self.defer(self._leave_all)
            case Occupied():
                return self._occupancy()
            case _:
                assert_never(message)

    async def _forget_image(self, name: str) -> None:
        await self._sandbox_pool.forget(name)
        self._refill_sandbox_pool()

    def _let_look(self) -> None:
        """Give the metrics functions that read the numbers of admission."""
        self._shared.metrics.look_at(
            creates_queued=lambda: self._creating.queued,
            pool_sandboxes=lambda: len(self._sandbox_pool),
            pool_members=lambda: len(self._pools),
            draining=lambda: self._creating.is_draining,
            sessions_max=lambda: self._budget.max_sessions,
            sessions_committed_memory_bytes=lambda: self._budget.committed.memory_bytes or 0,
            sessions_committed_cpu=lambda: self._budget.committed.cpu or 0,
        )

    def _occupancy(self) -> Occupancy:
        return Occupancy(
            max_sessions=self._budget.max_sessions,
            committed=self._budget.committed,
            pooled=len(self._sandbox_pool),
            pools=self._pools.infos,
            queued=self._creating.queued,
            is_draining=self._creating.is_draining,
        )

    async def _set_drained(self, drained: bool) -> None:
        """Drain or undrain the node, in the database first, so that the answer holds after a crash."""
        async with self._drain_turn:
            await self._store.ask_again(do(write_drained, drained))
            self._creating.set_drained(drained)
        log.warning("node_drained" if drained else "node_undrained")
        if not drained:
            self._refill_pools()

    def _refill_pools(self) -> None:
        self._pools.ring()
        self._refill_sandbox_pool()

    def _refill_sandbox_pool(self) -> None:
        self._nursery.start_soon(self._sandbox_pool.refill, self._creating.is_quiet)

    # Actors -----------------------------------------------------------------------------------------------------

    def start_task(self, work: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> None:
        self._nursery.start_soon(work, *args)

    def adopt(self, record: SessionRecord) -> SessionActor:
        actor = self._start_actor(record, None)
        if record.session.status is Status.POOL_IDLE:
            self.start_task(self._pools.receive, actor)
        return actor

    async def wanted_members(self, records: Sequence[SessionRecord]) -> Sequence[SessionRecord]:
        return await self._pools.wanted_members(records)

    def _start_actor(self, record: SessionRecord, creation: Creation | None) -> SessionActor:
        ref = Ref(f"session {record.session.id}")
        actor = SessionActor(ref, record, creation, self._services)
        self._directory.add(record.session.id, ref, lambda: actor.session, actor.inspect, running=lambda: actor.running)
        self._directory.reserved.discard(record.session.id)
        self._budget.hold(record.session.id, record.session.limits, owner=record.session.key_id)
        self._nursery.start_soon(self._keep, actor)
        return actor

    async def _keep(self, actor: SessionActor) -> None:
        """Run one session actor to its end. A bug in it ends its session, and no other."""
        session_id = actor.session.id
        leaving = trio.CancelScope()
        self._leaving.add(leaving)
        try:
            with leaving:
                await actor.run()
        except* Exception as bugs:
            log.error("session_actor_failed", extra={"session_id": session_id}, exc_info=unwrap(bugs))
            await self._recovery.crash(actor.record)
        finally:
            self._leaving.discard(leaving)
            self._budget.release(session_id)
            if session_id in self._directory.members:
                self._pools.forget(session_id)
            self._directory.remove(session_id)

    async def _leave_all(self) -> None:
        for leaving in self._leaving:
            leaving.cancel()
        for entry in self._entries():
            await entry.ended.wait()

    def _entries(self) -> Sequence[Entry]:
        return [*self._directory, *self._directory.members.values()]

    async def _destroy_all(self) -> None:
        """End every session, those whose creation was under way at the stop included, and every sandbox without an
        owner."""
        while self._creating.under_way or self._entries():
            async with trio.open_nursery() as nursery:
                for entry in self._entries():
                    nursery.start_soon(self._destroy, entry)
            await trio.sleep(_DRAIN_PAUSE_S)
        found = await scan(self._nsinit)
        async with trio.open_nursery() as nursery:
            for each in found:
                nursery.start_soon(self._recovery.reap, each.session_id)

    async def _destroy(self, entry: Entry) -> None:
        async with nullcontext() if entry.session.options.stop_grace_ms else self._recovery.ends:
            try:
                await entry.ref.ask(Destroy("the daemon was stopped"))
            except SandkastenError as error:  # it ended on its own meanwhile, or the reaper will find it
                log.info("destroy_skipped", extra={"actor": entry.ref.name, "error": str(error)})


@attrs.frozen
class _KeyInUse:
    """An idempotency key whose session is being made."""

    digest: str
    reply: Reply[Session] = attrs.field(factory=Reply)


class IdempotentCreates:
    """The idempotency keys whose session is being made; keys of finished creates are in their records. `create`
    makes a session of a spec with that digest."""

    def __init__(
        self, store: Ref, directory: SessionDirectory, create: Callable[[SessionSpec, str], Awaitable[Session]]
    ) -> None:
        self._store, self._directory, self._create = store, directory, create
        self._keys: dict[str, _KeyInUse] = {}

    async def create(self, spec: SessionSpec) -> Session:
        """Create, or answer the session that this idempotency key made before."""
        key = spec.idempotency_key
        if key is None:
            return await self._create(spec, "")
        digest = spec_digest(spec)
        if key in self._keys:
            return await self._join(self._keys[key], digest)
        use = self._keys[key] = _KeyInUse(digest)
        try:
            session = await self._made_before(key, digest) or await self._create(spec, digest)
            use.reply.set(session)
            return session
        except SandkastenError as error:
            use.reply.fail(error)
            raise
        finally:
            use.reply.fail(SandboxError("the session was not created"))  # no effect when it was answered
            del self._keys[key]

    async def _made_before(self, key: str, digest: str) -> Session | None:
        """Return the session that the key made, None if it made none.

        A session that an earlier daemon did not finish creating is being undone, which frees the key: no caller was
        told of it. Raises `Conflict`, `SessionExpired`, or `ActorGone` when the undoing takes too long.
        """
        give_up_at = trio.current_time() + _UNDOING_S
        while (known := await self._store.ask_again(do(find_by_key, key))) is not None:
            _require_same(known.spec_digest, digest)
            session = self._latest(known)
            if session.status in WHOLE:
                return session
            if session.status is not Status.CREATING:
                raise ended_error(session)
            if trio.current_time() > give_up_at:
                raise ActorGone("what was begun with this idempotency key is being undone", session_id=session.id)
            await trio.sleep(_PAUSE_S)
        return None

    async def _join(self, use: _KeyInUse, digest: str) -> Session:
        _require_same(use.digest, digest)
        return await use.reply.wait()

    def _latest(self, record: SessionRecord) -> Session:
        entry = self._directory.get(record.session.id)
        latest = self._directory.unwritten.get(record.session.id, record)
        return entry.session if entry else latest.session


def _require_same(before: str, digest: str) -> None:
    if before != digest:
        raise Conflict("the idempotency key was used with another request")


async def list_sessions(query: SessionQuery, *, directory: SessionDirectory, store: Ref) -> SessionPage:
    """Return a page of sessions, newest first. Runs in the caller's task."""
    if query.statuses <= LIVE:
        return first_of(query, await directory.sessions(query.matches))
    recorded = await store.ask(do(find_sessions, query))
    told = {record.session.id for record in recorded.records}
    known = await directory.sessions(lambda session: query.matches(session) or session.id in told)
    return merge(query, recorded, [*(record.session for record in directory.unwritten.values()), *known])


def merge(query: SessionQuery, recorded: Recorded, known: Iterable[Session]) -> SessionPage:
    """Return a page of both. A known session is newer than its record, unless the record says that it ended."""
    found = {record.session.id: record.session for record in recorded.records}
    for session in known:
        before = found.get(session.id)
        if before is None or before.status in IN_KERNEL:
            found[session.id] = session
    return page_of(query, found.values(), seen_to=recorded.seen_to)
