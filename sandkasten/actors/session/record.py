"""The durable record of a live session as it is now, its lease included, and when the database hears of it.

Belongs to the session's actor, which alone changes it. A state change is written at once; a lease that every command
renews only now and then, since a restart loses at most a little of it.
"""

from __future__ import annotations

import logging
import math
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import attrs
import trio

from sandkasten.actors.core import Ref
from sandkasten.actors.services import store as store_actor
from sandkasten.actors.services.directory import SessionDirectory
from sandkasten.actors.services.store import do
from sandkasten.actors.session.lease import Lease
from sandkasten.model import FOREVER_S, Session
from sandkasten.model.errors import SandkastenError
from sandkasten.store.sessions import Clocked, SessionRecord, put_session

log = logging.getLogger(__name__)

_PERSIST_EVERY_S = 10.0
_PERSISTS_PER_TTL = 4
"""A renewed lease reaches the database at most so often: what is recorded is never near its end while the session is in
use."""


class LiveRecord:
    """See the module's docstring."""

    def __init__(self, record: SessionRecord, lease: Lease, *, store: Ref, directory: SessionDirectory) -> None:
        self._record = record
        self._lease = lease
        self._store = store
        self._directory = directory
        self._renewed: tuple[datetime, datetime | None] | None = None
        self._persisted_at = -math.inf
        self._is_persisted_busy = False
        now = trio.current_time()
        self._used_at, self._born_at = now - _idle_s(record), now - _age_s(record)
        """On the clock that nobody sets: a lease does not change with the time of day."""

    @property
    def facts(self) -> Session:
        """The session, cheaply: its times may be those of a while ago."""
        return self._record.session

    @property
    def session(self) -> Session:
        """The session as it is now."""
        session = self.record.session
        if not self._lease.is_held:
            return session
        moment = datetime.now(UTC)
        last_activity = moment if self._lease.is_busy else session.last_activity
        return attrs.evolve(session, expires_at=expiry(moment, self._span_left_s), last_activity=last_activity)

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
        self._used_at = trio.current_time()
        self._begin_lease(idle_s=0.0)

    def restore_lease(self) -> None:
        """The lease goes on as recorded: a restart neither renews nor shortens it. Only a session that was busy when
        its last daemon left has been so until now, as far as anybody knows."""
        if self._record.is_busy:
            self.renew()
        else:
            self._begin_lease(idle_s=trio.current_time() - self._used_at)
        self._lease.announce_anew(ttl_s=self._record.session.ttl_s, max_lifetime_s=self._record.session.max_lifetime_s)

    def _begin_lease(self, *, idle_s: float) -> None:
        """`idle_s`: how long ago it was used last."""
        moment = datetime.now(UTC)
        remaining_s = self._lease.renew(ttl_s=self._record.session.ttl_s - idle_s, hard_end=self._hard_end)
        self._renewed = (moment - timedelta(seconds=idle_s), expiry(moment, remaining_s))

    @property
    def _span_left_s(self) -> float:
        return min(self._record.session.ttl_s, self._hard_end - trio.current_time())

    @property
    def _hard_end(self) -> float:
        return self._born_at + self._record.session.max_lifetime_s

    # Database ---------------------------------------------------------------------------------------------------

    async def put(self) -> None:
        """Write it. Raises `StoreFailed`."""
        self._persisted_at = trio.current_time()
        await self._store.ask_again(do(put_session, self._written()))

    async def put_or_keep(self) -> None:
        """Write it, or have it written when the database takes writes again."""
        self._persisted_at = trio.current_time()
        await store_actor.put_or_keep(self._store, self._directory.unwritten, self._written())

    def put_lease(self) -> None:
        """Have a renewed lease written, unless one was a moment ago; waits for nothing."""
        is_late = trio.current_time() - self._persisted_at >= self._persist_every_s
        if is_late or (self._is_persisted_busy and not self._lease.is_busy):
            self.put_soon()

    async def put_while_busy(self) -> None:
        """Have the lease written now and then for as long as something holds its idle end off."""
        while self._lease.active:
            await trio.sleep(self._persist_every_s)
            self.put_lease()

    def put_soon(self) -> None:
        """Have it written; waits for nothing, and what is refused is written with the next change."""
        self._persisted_at = trio.current_time()
        try:
            self._store.tell(do(put_session, self._written()))
        except SandkastenError as error:
            log.warning("lease_not_persisted", extra={"session_id": self.facts.id, "error": str(error)})

    @property
    def _persist_every_s(self) -> float:
        return min(_PERSIST_EVERY_S, self._record.session.ttl_s / _PERSISTS_PER_TTL)

    def _written(self) -> SessionRecord:
        """Return what the database is to hold: the session as it is at this moment."""
        self._is_persisted_busy = self._lease.is_busy
        now = trio.current_time()
        idle_s = 0.0 if self._lease.is_busy else now - self._used_at
        clocked = Clocked(time.monotonic(), idle_s, now - self._born_at)
        return attrs.evolve(self.record, session=self.session, is_busy=self._lease.is_busy, clocked=clocked)


def _idle_s(record: SessionRecord) -> float:
    """Return how long ago a session was used last. The time of day, which may have been set, is asked only about what
    an older version has written."""
    if record.clocked is None:
        return max((datetime.now(UTC) - record.session.last_activity).total_seconds(), 0.0)
    return record.clocked.idle_s + _since_s(record.clocked)


def _age_s(record: SessionRecord) -> float:
    """Return how long ago it was made."""
    if record.clocked is None:
        return max((datetime.now(UTC) - record.session.created_at).total_seconds(), 0.0)
    return record.clocked.age_s + _since_s(record.clocked)


def _since_s(clocked: Clocked) -> float:
    return max(time.monotonic() - clocked.clock_s, 0.0)


def expiry(moment: datetime, span_s: float) -> datetime | None:
    """Return when a lease of that span ends; None if it does not."""
    return None if span_s == FOREVER_S else moment + timedelta(seconds=span_s)
