"""The durable record of a live session as it is now, its lease included, and when the database hears of it.

Belongs to the session's actor, which alone changes it. A state change is written at once; a lease that every command
renews only now and then, since a restart loses at most a little of it.
"""

from __future__ import annotations

import logging
import math
from datetime import UTC, datetime, timedelta
from typing import Any

import attrs
import trio

from sandkasten.actors import store as store_actor
from sandkasten.actors.actor import Ref
from sandkasten.actors.directory import SessionDirectory
from sandkasten.actors.lease import Lease
from sandkasten.errors import SandkastenError
from sandkasten.model import Session
from sandkasten.store.sessions import SessionRecord

log = logging.getLogger(__name__)

_PERSIST_EVERY_S = 10.0
"""A renewed lease reaches the database at most this often."""


class LiveRecord:
    """See the module's docstring."""

    def __init__(self, record: SessionRecord, lease: Lease, *, store: Ref, directory: SessionDirectory) -> None:
        self._record = record
        self._lease = lease
        self._store = store
        self._directory = directory
        self._renewed: tuple[datetime, datetime] | None = None
        self._persisted_at = -math.inf

    @property
    def facts(self) -> Session:
        """The session, cheaply: its times may be those of a while ago."""
        return self._record.session

    @property
    def session(self) -> Session:
        """The session as it is now."""
        session = self.record.session
        if session.pause is not None and session.pause.stop_lease:
            moment = datetime.now(UTC)
            remaining_s = min(session.ttl_s, self._lifetime_left_s(moment) or math.inf)
            return attrs.evolve(session, expires_at=moment + timedelta(seconds=remaining_s))
        return session

    @property
    def record(self) -> SessionRecord:
        """The record as it is now, made when it is asked for: each command renews the lease."""
        if self._renewed is not None:
            last_activity, expires_at = self._renewed
            session = attrs.evolve(self._record.session, last_activity=last_activity, expires_at=expires_at)
            self._record = attrs.evolve(self._record, session=session)
            self._renewed = None
        return self._record

    def note(self, **changes: Any) -> None:  # fields of SessionRecord
        """Change what only the daemon needs to know."""
        self._record = attrs.evolve(self.record, **changes)

    def change(self, **changes: Any) -> None:  # fields of Session
        """Change the session; another status begins another epoch."""
        session = self.session
        if "status" in changes and changes["status"] is not session.status:
            changes["epoch"] = session.epoch + 1
        self._record = attrs.evolve(self._record, session=attrs.evolve(session, **changes))

    # Lease ------------------------------------------------------------------------------------------------------

    def renew(self) -> None:
        """Something was done with the session: its time to live begins anew."""
        moment = datetime.now(UTC)
        lifetime_left_s = self._lifetime_left_s(moment)
        remaining_s = self._lease.renew(ttl_s=self.facts.ttl_s, lifetime_left_s=lifetime_left_s)
        self._renewed = (moment, moment + timedelta(seconds=remaining_s))

    def restore_lease(self) -> None:
        """The lease goes on as recorded: a restart neither renews nor shortens it."""
        moment = datetime.now(UTC)
        remaining_s = (self.facts.expires_at - moment).total_seconds()
        self._lease.restore(remaining_s=remaining_s, lifetime_left_s=self._lifetime_left_s(moment))

    def _lifetime_left_s(self, moment: datetime) -> float | None:
        if self._record.max_lifetime_s is None:
            return None
        return self._record.max_lifetime_s - (moment - self.facts.created_at).total_seconds()

    # Database ---------------------------------------------------------------------------------------------------

    async def put(self) -> None:
        """Write it. Raises `StoreFailed`."""
        self._persisted_at = trio.current_time()
        await self._store.ask_again(store_actor.Put(self.record))

    async def put_or_keep(self) -> None:
        """Write it, or have it written when the database takes writes again."""
        self._persisted_at = trio.current_time()
        await store_actor.put_or_keep(self._store, self._directory.unwritten, self.record)

    def put_lease(self) -> None:
        """Have a renewed lease written, unless one was a moment ago; waits for nothing."""
        if trio.current_time() - self._persisted_at > _PERSIST_EVERY_S:
            self.put_soon()

    def put_soon(self) -> None:
        """Have it written; waits for nothing, and what is refused is written with the next change."""
        self._persisted_at = trio.current_time()
        try:
            self._store.tell(store_actor.Put(self.record))
        except SandkastenError as error:
            log.warning("lease_not_persisted", extra={"session_id": self.facts.id, "error": str(error)})
