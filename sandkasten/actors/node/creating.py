"""Creating sessions: what is asked for is filled in, admitted, and made into a session actor.

Owns what is under way and whether new sessions are refused; whether one fits is the budget's word. A create that does
not fit is refused at once, not queued: its caller knows what else it could do. Those that fit wait for one of a few
turns to be built. Starts no task of its own: `start` runs the actor, and `went_quiet` is called when nothing is being
built any more.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import attrs
import trio

from sandkasten.actors.core import Ref
from sandkasten.actors.node.in_flight import stopping
from sandkasten.actors.node.pool import Furnishing, Vessels
from sandkasten.actors.services import images as images_actor
from sandkasten.actors.session.actor import SessionActor
from sandkasten.actors.session.birth import FROM_POOL, Creation
from sandkasten.actors.session.record import expiry
from sandkasten.actors.workspaces.holds import Attachments
from sandkasten.actors.workspaces.messages import Admit
from sandkasten.admission import budget as reserve
from sandkasten.admission.budget import Budget
from sandkasten.admission.plan import Resolved, resolve
from sandkasten.config import Config
from sandkasten.images.catalog import Image
from sandkasten.model import Session, SessionSpec, Status
from sandkasten.model.errors import Draining, SandkastenError, SessionExpired
from sandkasten.model.workspace import WorkspaceMode
from sandkasten.store.sessions import SessionRecord

WORKSPACE_DIR = "/workspace"

_CONCURRENT_BUILDS = 32
_DRAINED_RETRY_S = 30


@attrs.frozen
class Node:
    """Who this daemon is: the id that is part of every session id, which start this is, and of which boot.
    `run_key` seals what PID 1 is told of runs."""

    id: str
    incarnation: int
    boot_id: str
    run_key: bytes = attrs.field(repr=False)

    def new_session_id(self) -> str:
        return secrets.token_hex(8) + self.id


class Creating:
    """See the module's docstring."""

    def __init__(
        self,
        config: Config,
        node: Node,
        *,
        images: Ref,
        workspaces: Ref,
        attachments: Attachments,
        budget: Budget,
        vessels: Vessels,
        start: Callable[[SessionRecord, Creation], SessionActor],
        went_quiet: Callable[[], None],
    ) -> None:
        self._config, self._node, self._images = config, node, images
        self._workspaces, self._attachments = workspaces, attachments
        self._budget, self._vessels = budget, vessels
        self._start, self._went_quiet = start, went_quiet
        self._builds = trio.CapacityLimiter(_CONCURRENT_BUILDS)
        self._building = 0
        self.under_way = 0
        """How many were admitted and are not answered yet."""
        self._is_done = trio.Event()
        self.is_drained = False
        self.is_stopping = False

    @property
    def queued(self) -> int:
        """How many wait for their turn to be built."""
        return self.under_way - self._building

    def is_quiet(self) -> bool:
        """Whether nothing is being built, and something may be."""
        return not self._building and not self.is_drained and not self.is_stopping

    async def create(self, spec: SessionSpec, digest: str) -> Session:
        """Make a session and return it running."""
        began = trio.current_time()
        self._refuse_when_draining()
        resolved = resolve(spec, self._config)
        reserve.check(self._config.data_dir, self._config.disk)
        image = await self._images.ask(images_actor.Resolve(resolved.image))
        place = object()
        self._budget.admit(place, resolved.limits, under_way=self.under_way, owner=spec.key_id)
        self.under_way += 1
        try:
            async with self._attached(spec), self._builds:
                self._refuse_when_draining()
                waited_ms = (trio.current_time() - began) * 1000
                record = self._new_record(spec, resolved, digest, image)
                self._budget.release(place)  # counted under its id from here
                session = await self._built(record, Creation(resolved, image.name, image.kind, spec.env))
        finally:
            self._budget.release(place)
            self.under_way -= 1
            self._tell_when_done()
            if not self._building:
                self._went_quiet()
        return attrs.evolve(session, timings_ms={"queue": round(waited_ms, 3), **session.timings_ms})

    async def _built(self, record: SessionRecord, creation: Creation) -> Session:
        """Have the session built by its actor. Raises what it failed with."""
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
    async def _attached(self, spec: SessionSpec) -> AsyncIterator[None]:
        """Have the session's workspace, if it is to be had, until the session's record says so itself."""
        if spec.workspace_id is None:
            yield
            return
        mode = WorkspaceMode(spec.workspace_mode or WorkspaceMode.SHARED)
        attachment = self._attachments.begin(spec.workspace_id, mode, spec.workspace_within)
        try:
            await self._workspaces.ask_again(Admit(attachment))
            yield
        finally:
            self._attachments.end(attachment)

    def _refuse_when_stopping(self) -> None:
        if self.is_stopping:
            raise stopping()

    def _refuse_when_draining(self) -> None:
        self._refuse_when_stopping()
        if self.is_drained:
            raise Draining("this node takes no new sessions for now", retry_after_s=_DRAINED_RETRY_S)

    def _new_record(self, spec: SessionSpec, resolved: Resolved, digest: str, image: Image) -> SessionRecord:
        now = datetime.now(UTC)
        vessel = self._vessels.take(Furnishing.of(resolved, image))
        session = Session(
            id=vessel or self._node.new_session_id(),
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
            acquire_detail=FROM_POOL if vessel else None,
            options=resolved.options,
        )
        return SessionRecord(
            session=session,
            incarnation=self._node.incarnation,
            spec_digest=digest,
            idempotency_key=spec.idempotency_key,
        )
