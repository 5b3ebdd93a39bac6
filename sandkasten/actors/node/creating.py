"""Creating sessions: a request is resolved and takes a member of a session pool. If none fits, the request is admitted
and becomes a session actor.

Whether a session fits is decided by the budget. A create that does not fit is refused at once, so that its caller can
turn elsewhere; those that fit wait for one of a few turns to be built. `Creating` starts no task of its own: `start`
runs the session actor, and `went_quiet` is called when no session is being built any more.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import attrs
import trio

from sandkasten.actors.core import Ref
from sandkasten.actors.node.sandbox_pool import MountedImage, SandboxPool
from sandkasten.actors.node.session_pools import POOL, SessionPools
from sandkasten.actors.services import images as images_actor
from sandkasten.actors.services.broker import find_secrets
from sandkasten.actors.session.actor import SessionActor
from sandkasten.actors.session.birth import Creation
from sandkasten.actors.session.record import expiry
from sandkasten.actors.workspaces.actor import Admit
from sandkasten.actors.workspaces.holds import Hold, Holds, Use
from sandkasten.admission import budget as reserve
from sandkasten.admission.budget import Budget
from sandkasten.admission.plan import Resolved, resolve
from sandkasten.config import Config
from sandkasten.errors import Capacity, Draining, SandkastenError, SessionExpired, ShuttingDown
from sandkasten.images.catalog import Image
from sandkasten.model import Session, SessionSpec, Status
from sandkasten.model.workspace import WorkspaceMode
from sandkasten.store.sessions import SessionRecord

WORKSPACE_DIR = "/workspace"

_CONCURRENT_BUILDS = 32
_PROCESSORS = os.cpu_count() or 1
_UNUSED_SHELL_MS = 10_000
"""Milliseconds for which a session has a shell that no command needed. A client that is going to use the shell does so
by then; the process would take 0.7 MiB for as long as the session lives."""
FROM_SANDBOX_POOL = "pool sandbox"
"""`acquire_detail` of a session that is made of a pool sandbox and missed no session pool."""

_DRAINED_RETRY_S = 30
_STOPPING_RETRY_S = 5


@attrs.frozen
class NodeIdentity:
    """The identity of this daemon: the id that is part of every session id, the number of its start, the boot of the
    machine. `run_key` seals the tickets of runs that PID 1 keeps."""

    id: str
    incarnation: int
    boot_id: str
    run_key: bytes = attrs.field(repr=False)

    def new_session_id(self) -> str:
        return secrets.token_hex(8) + self.id


class Creating:
    """The creates under way, and whether new ones are refused."""

    def __init__(
        self,
        config: Config,
        node: NodeIdentity,
        *,
        images: Ref,
        broker: Ref,
        workspaces: Ref,
        holds: Holds,
        budget: Budget,
        pools: SessionPools,
        sandbox_pool: SandboxPool,
        start: Callable[[SessionRecord, Creation], SessionActor],
        went_quiet: Callable[[], None],
    ) -> None:
        self._config, self._node, self._images, self._broker = config, node, images, broker
        self._workspaces, self._holds = workspaces, holds
        self._budget, self._pools, self._sandbox_pool = budget, pools, sandbox_pool
        self._start, self._went_quiet = start, went_quiet
        self._builds = trio.CapacityLimiter(_CONCURRENT_BUILDS)
        self._building = 0
        self.under_way = 0
        """Number of creates that are being claimed or were admitted, and are not answered."""
        self._is_done = trio.Event()
        self._is_drained = False
        self._is_stopping = False

    @property
    def queued(self) -> int:
        """Number of creates that wait for their turn to be built."""
        return self.under_way - self._building

    @property
    def is_draining(self) -> bool:
        """Whether creates are refused, because the node is drained or the daemon stops."""
        return self._is_drained or self._is_stopping

    def set_drained(self, drained: bool) -> None:
        """Refuse creates with `Draining`, or admit them again."""
        self._is_drained = drained

    def refuse(self) -> None:
        """Refuse all further creates: the daemon stops."""
        self._is_stopping = True

    def is_quiet(self) -> bool:
        """Whether no session is being built, and one may be."""
        return not self._building and not self.is_draining

    async def create(self, spec: SessionSpec, digest: str) -> Session:
        """Make a session and return it running."""
        began = trio.current_time()
        self._refuse_when_draining()
        resolved = resolve(spec, self._config)
        resolved = attrs.evolve(resolved, secrets=await find_secrets(self._broker, resolved.network))
        reserve.check(self._config.data_dir, self._config.disk)
        image = await self._images.ask_again(images_actor.Resolve(resolved.image))
        self._refuse_when_draining()
        self.under_way += 1
        try:
            claimed = await self._pools.claim(spec, resolved, image, digest)
            if isinstance(claimed, Session):
                timings_ms = {"pool": round((trio.current_time() - began) * 1000, 3)}
                return attrs.evolve(claimed, timings_ms=timings_ms)
            resolved = resolved.of_image(image.config)
            return await self._create_cold(spec, digest, resolved, image, missed=claimed, began=began)
        finally:
            self.under_way -= 1
            self._pools.ring()
            self._tell_when_done()

    async def _create_cold(
        self, spec: SessionSpec, digest: str, resolved: Resolved, image: Image, *, missed: str | None, began: float
    ) -> Session:
        place = object()
        await self._admit(place, resolved, spec)
        try:
            async with self._holding(spec), self._builds:
                self._refuse_when_draining()
                waited_ms = (trio.current_time() - began) * 1000
                prepared = self._sandbox_pool.take(MountedImage.of(resolved, image))
                record = self._new_record(prepared, spec, resolved, digest, missed)
                self._budget.release(place)  # counted under its id from here
                # A shell that starts in a crowd of creates takes the processor that they wait for.
                shell_ms = _UNUSED_SHELL_MS if self.under_way <= _PROCESSORS else 0
                env = {**resolved.image_env, **resolved.environment(record.session.id, spec)}
                creation = Creation(resolved, image, prepared is not None, shell_ms, env, spec.publish)
                session = await self._built(record, creation)
        finally:
            self._budget.release(place)
            if not self._building:
                self._went_quiet()
        return attrs.evolve(session, timings_ms={"queue": round(waited_ms, 3), **session.timings_ms})

    async def _admit(self, place: object, resolved: Resolved, spec: SessionSpec) -> None:
        """Have the budget admit a create. Idle members of session pools make room, one after the other, unless the
        create would not fit without any of them."""
        while True:
            try:
                return self._budget.admit(place, resolved.limits, under_way=self.under_way - 1, owner=spec.key_id)
            except Capacity as error:
                refusal = error
            may_fit = self._budget.would_fit(refusal, self._pools.idle)
            if not may_fit or not await self._pools.give_up_one():
                raise refusal

    async def _built(self, record: SessionRecord, creation: Creation) -> Session:
        """Have the session built by its actor. Raises the error of the build."""
        actor = self._start(record, creation)
        self._building += 1
        try:
            return await actor.ready.wait()
        except SandkastenError as error:
            self._budget.release(record.session.id)  # before its actor does: a caller may try again at once
            if isinstance(error, SessionExpired):
                self._refuse_when_stopping()
            raise
        finally:
            self._building -= 1

    async def wait_done(self) -> None:
        """Wait until nothing is under way."""
        while self.under_way:
            await self._is_done.wait()

    def _tell_when_done(self) -> None:
        if not self.under_way:
            self._is_done.set()
            self._is_done = trio.Event()

    @asynccontextmanager
    async def _holding(self, spec: SessionSpec) -> AsyncIterator[None]:
        """Hold the session's workspace until the session's record does. Raises `WorkspaceBusy`."""
        if spec.workspace_id is None:
            yield
            return
        use = Use(spec.workspace_mode or WorkspaceMode.SHARED)
        with self._holds.taken(Hold(spec.workspace_id, use, spec.workspace_within)) as hold:
            await self._workspaces.ask_again(Admit(hold))
            yield

    def _refuse_when_stopping(self) -> None:
        if self._is_stopping:
            raise stopping()

    def _refuse_when_draining(self) -> None:
        self._refuse_when_stopping()
        if self._is_drained:
            raise Draining(
                "this node is drained and takes no new sessions until it is told so (sandkasten drain --undo)",
                retry_after_s=_DRAINED_RETRY_S,
            )

    def start_member(self, resolved: Resolved, image: Image, digest: str) -> SessionActor:
        """Start the actor of a new member of a session pool."""
        resolved = resolved.of_image(image.config)
        now = datetime.now(UTC)
        session = Session(
            id=self._node.new_session_id(),
            image=resolved.image,
            status=Status.POOL_IDLE,
            cwd=WORKSPACE_DIR,
            created_at=now,
            expires_at=None,
            last_activity=now,
            ttl_s=resolved.ttl_s,
            max_lifetime_s=resolved.max_lifetime_s,
            limits=resolved.limits,
            acquire_source=POOL,
            options=resolved.options,
        )
        record = SessionRecord(session=session, incarnation=self._node.incarnation, spec_digest=digest)
        return self._start(record, Creation(resolved, image, False, None, resolved.image_env))

    def _new_record(
        self, prepared: str | None, spec: SessionSpec, resolved: Resolved, digest: str, missed: str | None
    ) -> SessionRecord:
        now = datetime.now(UTC)
        session = Session(
            id=prepared or self._node.new_session_id(),
            image=resolved.image,
            status=Status.CREATING,
            cwd=WORKSPACE_DIR,
            created_at=now,
            expires_at=expiry(now, min(resolved.ttl_s, resolved.max_lifetime_s)),
            last_activity=now,
            ttl_s=resolved.ttl_s,
            max_lifetime_s=resolved.max_lifetime_s,
            limits=resolved.limits,
            workspace_id=spec.workspace_id,
            labels=dict(spec.labels),
            key_id=spec.key_id,
            acquire_source="cold",
            acquire_detail=missed or (FROM_SANDBOX_POOL if prepared else None),
            options=resolved.options,
            network=resolved.network,
        )
        return SessionRecord(
            session=session,
            incarnation=self._node.incarnation,
            spec_digest=digest,
            idempotency_key=spec.idempotency_key,
        )


def stopping() -> ShuttingDown:
    """Return the refusal of requests that come while the daemon is stopping."""
    return ShuttingDown("the daemon is stopping", retry_after_s=_STOPPING_RETRY_S)
