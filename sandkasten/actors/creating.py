"""Creating sessions: what is asked for is filled in, admitted, and made into a session actor.

Owns what is under way and whether new sessions are refused. Starts no task of its own: `start` runs the actor, and
`went_quiet` is called when nothing is being built any more.
"""

from __future__ import annotations

import resource
import secrets
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import attrs
import trio

from sandkasten.actors import images as images_actor
from sandkasten.actors.actor import Ref
from sandkasten.actors.directory import SessionDirectory
from sandkasten.actors.session import SessionActor
from sandkasten.actors.session_setup import Creation
from sandkasten.actors.vessels import Vessels
from sandkasten.config import Config
from sandkasten.errors import Capacity, ShuttingDown
from sandkasten.model import Session, SessionSpec, Status
from sandkasten.runtime import reserve
from sandkasten.runtime.plan import Resolved, resolve
from sandkasten.store.sessions import SessionRecord

WORKSPACE_DIR = "/workspace"

_CONCURRENT_BUILDS = 32
_FDS_PER_SESSION = 16
_FDS_RESERVED = 200


@attrs.frozen
class Node:
    """Who this daemon is: the id that is part of every session id, which start this is, and of which boot."""

    id: str
    incarnation: int
    boot_id: str

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
        directory: SessionDirectory,
        vessels: Vessels,
        start: Callable[[SessionRecord, Creation], SessionActor],
        went_quiet: Callable[[], None],
    ) -> None:
        self._config, self._node, self._images = config, node, images
        self._directory, self._vessels = directory, vessels
        self._start, self._went_quiet = start, went_quiet
        self._builds = trio.CapacityLimiter(_CONCURRENT_BUILDS)
        self._building = 0
        self.max_sessions = min(config.server.max_sessions, _sessions_for_descriptors())
        self.waiting = 0
        """How many were admitted and are in the directory not yet, or not any more."""
        self.is_draining = False

    def is_quiet(self) -> bool:
        """Whether nothing is being built, and something may be."""
        return not self._building and not self.is_draining

    async def create(self, spec: SessionSpec, digest: str) -> Session:
        """Make a session and return it running."""
        began = trio.current_time()
        self._refuse_when_draining()
        resolved = resolve(spec, self._config)
        reserve.check(self._config.data_dir, self._config.disk)
        image = await self._images.ask(images_actor.Resolve(resolved.image))
        if len(self._directory) + self.waiting >= self.max_sessions:
            raise Capacity("this node has all the sessions it may have", max_sessions=self.max_sessions)
        self.waiting += 1
        try:
            async with self._builds:
                self._refuse_when_draining()
                waited_ms = (trio.current_time() - began) * 1000
                record = self._new_record(spec, resolved, digest)
                creation = Creation(resolved, image.name, image.kind, spec.env)
                actor = self._start(record, creation)
                self.waiting -= 1  # the directory counts it from here
                self._building += 1
                try:
                    session = await actor.ready.wait()
                finally:
                    self._building -= 1
                    self.waiting += 1
        finally:
            self.waiting -= 1
            if not self._building:
                self._went_quiet()
        return attrs.evolve(session, timings_ms={"queue": round(waited_ms, 3), **session.timings_ms})

    def _refuse_when_draining(self) -> None:
        if self.is_draining:
            raise ShuttingDown("the daemon is stopping", retry_after_s=5)

    def _new_record(self, spec: SessionSpec, resolved: Resolved, digest: str) -> SessionRecord:
        now = datetime.now(UTC)
        vessel = self._vessels.take()
        session = Session(
            id=vessel or self._node.new_session_id(),
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
            acquire_detail="vessel" if vessel else None,
            options=resolved.options,
        )
        return SessionRecord(
            session=session,
            incarnation=self._node.incarnation,
            spec_digest=digest,
            idempotency_key=spec.idempotency_key,
            max_lifetime_s=resolved.max_lifetime_s,
        )


def _sessions_for_descriptors() -> int:
    """Return how many sessions this process has file descriptors for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max((soft - _FDS_RESERVED) // _FDS_PER_SESSION, 1)
