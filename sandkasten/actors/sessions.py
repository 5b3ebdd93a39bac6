"""All sessions of the node: starts their actors, turns their exits into states.

Owns the directory's entries, idempotency keys and admission; what outlived the last daemon is `Reconciling`'s. Never
awaits a slow start in its mailbox: creating, adopting and finishing run as child tasks. A session actor that dies of a
bug takes nobody with it: its sandbox is torn down and its record says `crashed`.
"""

from __future__ import annotations

import logging
import resource
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVarTuple, assert_never

import attrs
import trio

from runner.protocol import Graces
from sandkasten.actors import images as images_actor
from sandkasten.actors import store as store_actor
from sandkasten.actors import zygote as zygote_actor
from sandkasten.actors.actor import Actor, Ask, Ref, Reply
from sandkasten.actors.directory import SessionDirectory
from sandkasten.actors.reconciling import Reconciling
from sandkasten.actors.session import SessionActor, ended_error
from sandkasten.actors.session_messages import Destroy
from sandkasten.actors.session_setup import Creation, Services
from sandkasten.actors.unwrap import unwrap
from sandkasten.config import Config
from sandkasten.errors import Capacity, Conflict, SandboxError, SandkastenError, ShuttingDown
from sandkasten.lifecycle import ENDED
from sandkasten.model import Session, SessionSpec, Status
from sandkasten.runtime import reserve
from sandkasten.runtime.journal import Journal
from sandkasten.runtime.paths import DataPaths
from sandkasten.runtime.plan import Resolved, plan_disk, resolve, spec_digest
from sandkasten.runtime.spool import Spool
from sandkasten.store.sessions import SessionRecord

log = logging.getLogger(__name__)

Ts = TypeVarTuple("Ts")

WORKSPACE_DIR = "/workspace"

_CONCURRENT_BUILDS = 32
_DRAIN_PAUSE_S = 0.02
_QUIET_S = 0.02

_FDS_PER_SESSION = 16
_FDS_RESERVED = 200


@attrs.frozen
class Node:
    """Who this daemon is: the id that is part of every session id, and which start this is."""

    id: str
    incarnation: int


@attrs.frozen
class _KeyInUse:
    """An idempotency key whose session is being made."""

    digest: str
    reply: Reply[Session] = attrs.field(factory=Reply)


@attrs.frozen
class Create(Ask[Session]):
    """Make a session; answered when it runs."""

    spec: SessionSpec


@attrs.frozen
class Forget(Ask[Session]):
    """End a session that has no actor though its record says it lives; answers its final state."""

    session_id: str


@attrs.frozen
class Readopt(Ask[None]):
    """Take over a sandbox that runs as recorded and has no actor; its first adoption came at a bad moment."""

    session_id: str


@attrs.frozen
class DestroyAll(Ask[None]):
    """Refuse new sessions and end all there are."""


@attrs.frozen
class Occupancy:
    """How many sessions there may be, how many blank vessels are ready, and whether new sessions are refused."""

    max_sessions: int
    vessels: int
    is_draining: bool


@attrs.frozen
class Occupied(Ask[Occupancy]):
    """What can be taken."""


Message = Create | Forget | Readopt | DestroyAll | Occupied


class Sessions(Actor):
    """See the module's docstring."""

    def __init__(
        self,
        ref: Ref,
        config: Config,
        node: Node,
        *,
        store: Ref,
        zygote: Ref,
        images: Ref,
        directory: SessionDirectory,
        journal: Journal,
        spool: Spool,
        vessels: int,
    ) -> None:
        super().__init__(ref)
        self._config, self._node = config, node
        self._store, self._zygote, self._images = store, zygote, images
        self._directory = directory
        self._journal, self._spool = journal, spool
        self._reconciling = Reconciling(self, store=store, zygote=zygote, directory=directory, journal=journal)
        self._vessels_wanted = vessels
        self._max_sessions = min(config.server.max_sessions, _sessions_for_descriptors())
        self._vessels: deque[tuple[str, int]] = deque()
        self._builds = trio.CapacityLimiter(_CONCURRENT_BUILDS)
        self._keys: dict[str, _KeyInUse] = {}
        self._creating = 0
        self._building = 0
        self._preparing = 0
        self._is_draining = False

    async def on_start(self) -> None:
        self._directory.clear()
        ready = await zygote_actor.ask_patiently(self._zygote, zygote_actor.Node())
        self._services = Services(
            store=self._store,
            zygote=self._zygote,
            directory=self._directory,
            paths=DataPaths(self._config.data_dir),
            cgroup_dirs=ready.cgroup_dirs,
            shell_queue_length=self._config.server.shell_queue_length,
            maximum=self._config.maximum,
            graces=Graces(
                interrupt_ms=self._config.runs.interrupt_grace_ms,
                terminate_ms=self._config.runs.terminate_grace_ms,
                kill_ms=self._config.runs.kill_grace_ms,
            ),
            journal=self._journal,
            spool=self._spool,
            disk=self._config.disk,
        )
        await self._reconciling.reconcile()
        self._nursery.start_soon(self._refill_vessels)

    async def handle(self, message: Message) -> Any:
        match message:
            case Create(spec):
                return self.defer(self._create_once, spec)
            case Forget(session_id):
                return self.defer(self._reconciling.forget, session_id)
            case Readopt(session_id):
                return self.defer(self._reconciling.readopt, session_id)
            case DestroyAll():
                self._is_draining = True
                return self.defer(self._destroy_all)
            case Occupied():
                return Occupancy(self._max_sessions, len(self._vessels), self._is_draining)
            case _:
                assert_never(message)

    # Create -----------------------------------------------------------------------------------------------------

    async def _create_once(self, spec: SessionSpec) -> Session:
        """Create, or answer the session that this idempotency key made before."""
        key, digest = spec.idempotency_key, spec_digest(spec)
        if key is None:
            return await self._create(spec, digest)
        if key in self._keys:
            return await self._join(self._keys[key], digest)
        use = self._keys[key] = _KeyInUse(digest)
        try:
            known = await self._store.ask_again(store_actor.FindByKey(key))
            if known is not None:
                _require_same(known.spec_digest, digest)
                session = self._latest(known)
                if session.status in ENDED:
                    raise ended_error(session)
            else:
                session = await self._create(spec, digest)
            use.reply.set(session)
            return session
        except SandkastenError as error:
            use.reply.fail(error)
            raise
        finally:
            use.reply.fail(SandboxError("the session was not created"))  # no effect when it was answered
            del self._keys[key]

    async def _join(self, use: _KeyInUse, digest: str) -> Session:
        _require_same(use.digest, digest)
        return await use.reply.wait()

    def _latest(self, record: SessionRecord) -> Session:
        entry = self._directory.get(record.session.id)
        return entry.session if entry else record.session

    async def _create(self, spec: SessionSpec, digest: str) -> Session:
        began = trio.current_time()
        if self._is_draining:
            raise ShuttingDown("the daemon is stopping", retry_after_s=5)
        resolved = resolve(spec, self._config)
        reserve.check(self._config.data_dir, self._config.disk)
        image = await self._images.ask(images_actor.Resolve(resolved.image))
        if len(self._directory) + self._creating >= self._max_sessions:
            raise Capacity("this node has all the sessions it may have", max_sessions=self._max_sessions)
        self._creating += 1
        try:
            async with self._builds:
                if self._is_draining:
                    raise ShuttingDown("the daemon is stopping", retry_after_s=5)
                waited_ms = (trio.current_time() - began) * 1000
                record = self._new_record(spec, resolved, digest)
                creation = Creation(resolved, image.name, image.kind, spec.env)
                actor = self._start_actor(record, creation)
                self._creating -= 1  # the directory counts it from here
                self._building += 1
                try:
                    session = await actor.ready.wait()
                finally:
                    self._building -= 1
                    self._creating += 1
        finally:
            self._creating -= 1
            if not self._building:
                self._nursery.start_soon(self._refill_vessels)
        return attrs.evolve(session, timings_ms={"queue": round(waited_ms, 3), **session.timings_ms})

    def _new_record(self, spec: SessionSpec, resolved: Resolved, digest: str) -> SessionRecord:
        now = datetime.now(UTC)
        session_id, source = self._take_id()
        session = Session(
            id=session_id,
            image=resolved.image,
            status=Status.CREATING,
            cwd=WORKSPACE_DIR,
            created_at=now,
            expires_at=now + timedelta(seconds=resolved.ttl_s),
            last_activity=now,
            ttl_s=resolved.ttl_s,
            limits=resolved.limits,
            workspace_id=spec.workspace_id,
            labels=dict(spec.labels),
            acquire_source="cold",
            acquire_detail=source,
            options=resolved.options,
        )
        return SessionRecord(
            session=session,
            incarnation=self._node.incarnation,
            spec_digest=digest,
            idempotency_key=spec.idempotency_key,
            max_lifetime_s=resolved.max_lifetime_s,
        )

    def _take_id(self) -> tuple[str, str | None]:
        """Return an id, that of a blank vessel if one is ready, and what to say of its origin."""
        while self._vessels:
            session_id, incarnation = self._vessels.popleft()
            if incarnation == self._zygote.incarnation:
                return session_id, "vessel"
            self._nursery.start_soon(self._reconciling.reap, session_id)  # it died with the nsinit that made it
        return self._new_id(), None

    def _new_id(self) -> str:
        return secrets.token_hex(8) + self._node.id

    async def _refill_vessels(self) -> None:
        """Have nsinit keep a few blank vessels, made when nobody waits; without them a create is only slower."""
        await trio.sleep(_QUIET_S)
        while self._wants_vessel():
            session_id, incarnation = self._new_id(), self._zygote.incarnation
            self._directory.reserved.add(session_id)
            self._preparing += 1
            try:
                await self._zygote.ask(zygote_actor.Prepare(session_id, plan_disk(self._config.defaults.limits)))
            except SandkastenError as error:
                log.warning("vessel_not_prepared", extra={"error": str(error)})
                self._nursery.start_soon(self._reconciling.reap, session_id)
                return
            finally:
                self._preparing -= 1
            self._vessels.append((session_id, incarnation))

    def _wants_vessel(self) -> bool:
        is_quiet = not self._building and not self._is_draining
        return is_quiet and len(self._vessels) + self._preparing < self._vessels_wanted

    # Actors -----------------------------------------------------------------------------------------------------

    def start_task(self, work: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> None:
        self._nursery.start_soon(work, *args)

    def adopt(self, record: SessionRecord) -> SessionActor:
        return self._start_actor(record, None)

    def _start_actor(self, record: SessionRecord, creation: Creation | None) -> SessionActor:
        ref = Ref(f"session {record.session.id}")
        actor = SessionActor(ref, record, creation, self._services)
        self._directory.add(record.session.id, ref, lambda: actor.session)
        self._directory.reserved.discard(record.session.id)
        self._nursery.start_soon(self._keep, actor)
        return actor

    async def _keep(self, actor: SessionActor) -> None:
        """Run one session actor to its end; a bug in it becomes the session's crash, never ours."""
        session_id = actor.session.id
        try:
            await actor.run()
        except* Exception as bugs:
            log.error("session_actor_failed", extra={"session_id": session_id}, exc_info=unwrap(bugs))
            await self._reconciling.crash(actor.record)
        finally:
            self._directory.remove(session_id)

    async def _destroy_all(self) -> None:
        """End all there are, those included whose creation was under way when the stop came, and what nobody owns."""
        while self._creating or len(self._directory):
            async with trio.open_nursery() as nursery:
                for entry in self._directory:
                    nursery.start_soon(self._destroy, entry.ref)
            await trio.sleep(_DRAIN_PAUSE_S)
        found = await zygote_actor.ask_patiently(self._zygote, zygote_actor.Scan())
        async with trio.open_nursery() as nursery:
            for each in found:
                nursery.start_soon(self._reconciling.reap, each.session_id)

    async def _destroy(self, ref: Ref) -> None:
        async with self._reconciling.ends:
            try:
                await ref.ask(Destroy())
            except SandkastenError as error:  # it ended on its own meanwhile, or the reaper will find it
                log.info("destroy_skipped", extra={"actor": ref.name, "error": str(error)})


def _sessions_for_descriptors() -> int:
    """Return how many sessions this process has file descriptors for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max((soft - _FDS_RESERVED) // _FDS_PER_SESSION, 1)


def _require_same(before: str, digest: str) -> None:
    if before != digest:
        raise Conflict("the idempotency key was used with another request")
