"""The durable record of a live session as it is now, its lease included, and its writing to the database.

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

from sandkasten.actors.core import Ref, Reply
from sandkasten.actors.services import store as store_actor
from sandkasten.actors.services.directory import SessionDirectory
from sandkasten.actors.services.store import do
from sandkasten.actors.session.lease import Lease
from sandkasten.errors import ActorGone, SandkastenError
from sandkasten.model import FOREVER_S, Session
from sandkasten.model.lifecycle import Trigger, next_status
from sandkasten.store.sessions import Clocked, SessionRecord, delete_session, put_session

log = logging.getLogger(__name__)

_PERSIST_EVERY_S = 10.0
_BRIEF_S = 0.25
_PERSISTS_PER_TTL = 4
"""Writes of a renewed lease in each time to live, at most: the recorded end is never near while the session is in use.
"""


class LiveRecord:
    """The record of a live session in memory. Commands renew the lease here; the store gets it at intervals."""

    def __init__(self, record: SessionRecord, lease: Lease, *, store: Ref, directory: SessionDirectory) -> None:
        self._record = record
        self._lease = lease
        self._store = store
        self._directory = directory
        self._renewed: tuple[datetime, datetime | None] | None = None
        self._persisted_at = -math.inf
        self._is_persisted_busy = False
        now = trio.current_time()
        self._used_at, self._born_at = now - _idle_s(record), now - age_s(record)
        """In `trio.current_time()` seconds: a lease does not change when the time of day is set."""

    @property
    def facts(self) -> Session:
        """The session, read cheaply: its times may be out of date."""
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
        """The record as it is now, made on demand, since each command renews the lease."""
        if self._renewed is not None:
            last_activity, expires_at = self._renewed
            session = attrs.evolve(self._record.session, last_activity=last_activity, expires_at=expires_at)
            self._record = attrs.evolve(self._record, session=session)
            self._renewed = None
        return self._record

    def note(self, **changes: Any) -> None:  # fields of SessionRecord
        """Change fields of the record that are no part of the session."""
        self._record = attrs.evolve(self.record, **changes)

    def change(self, **changes: Any) -> None:  # fields of Session
        """Change the session; another status begins another epoch."""
        session = self.session
        if "status" in changes and changes["status"] is not session.status:
            changes["epoch"] = session.epoch + 1
        self._record = attrs.evolve(self._record, session=attrs.evolve(session, **changes))

    def begin_life(self, *, spec_digest: str, idempotency_key: str | None, **changes: Any) -> None:
        """Make the record of a pool's member that of a client's session, which is born and used at this moment."""
        self._born_at = trio.current_time()
        self.change(status=next_status(self.facts.status, Trigger.CLAIM), created_at=datetime.now(UTC), **changes)
        self.note(spec_digest=spec_digest, idempotency_key=idempotency_key)
        self.renew()

    def undo(self, record: SessionRecord) -> None:
        """Put an earlier record in place of the present one."""
        self._record, self._renewed = record, None

    # Lease ------------------------------------------------------------------------------------------------------

    def renew(self) -> None:
        """Start the time to live anew: the session was used."""
        self._used_at = trio.current_time()
        self._begin_lease(idle_s=0.0)

    def restore_lease(self) -> None:
        """Go on with the recorded lease, which a restart neither renews nor shortens. A session that was busy when its
        last daemon ended is taken to have been busy until now."""
        if self._record.is_busy:
            self.renew()
        else:
            self._begin_lease(idle_s=trio.current_time() - self._used_at)
        self._lease.announce_anew(ttl_s=self._record.session.ttl_s, max_lifetime_s=self._record.session.max_lifetime_s)

    def _begin_lease(self, *, idle_s: float) -> None:
        """Start a lease of which `idle_s` seconds have passed since the last use."""
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
        """Write the record. Raises `StoreFailed`."""
        self._persisted_at = trio.current_time()
        await self._store.ask_again(do(put_session, self._written()))

    def post(self, written: Reply[None]) -> None:
        """Have the record written and `written` answered, with `ActorGone` if the store is being restarted."""
        self._persisted_at = trio.current_time()
        try:
            self._store.post(do(put_session, self._written()), written)
        except ActorGone as error:
            written.fail(error)

    async def delete(self) -> None:
        """Delete the record of a pool's member. Raises `StoreFailed`."""
        await self._store.ask_again(do(delete_session, self.facts.id))

    async def put_or_keep(self) -> None:
        """Write the record, or have it written when the database takes writes again."""
        self._persisted_at = trio.current_time()
        await store_actor.put_or_keep(self._store, self._directory.unwritten, self._written())

    def put_lease(self) -> None:
        """Have a renewed lease written, unless that was done recently. Does not wait."""
        if trio.current_time() >= self._late_at or (self._is_persisted_busy and not self._lease.is_busy):
            self.put_soon()

    async def put_while_busy(self) -> None:
        """Have the lease written now and then, as long as an activity holds the idle end off, and behind the last one.
        Activities that are over soon are written with their end, if at all."""
        await trio.sleep(min(_BRIEF_S, self._persist_every_s))
        while self._lease.active or self._used_at > self._persisted_at:
            self.put_lease()
            await trio.sleep_until(max(self._late_at, trio.current_time() + _BRIEF_S))

    def put_soon(self) -> None:
        """Have the record written; a refused write is made up for by the next change. Does not wait."""
        self._persisted_at = trio.current_time()
        try:
            self._store.tell(do(put_session, self._written()))
        except SandkastenError as error:
            log.warning("lease_not_persisted", extra={"session_id": self.facts.id, "error": str(error)})

    @property
    def _late_at(self) -> float:
        return self._persisted_at + self._persist_every_s

    @property
    def _persist_every_s(self) -> float:
        return min(_PERSIST_EVERY_S, self._record.session.ttl_s / _PERSISTS_PER_TTL)

    def _written(self) -> SessionRecord:
        """Return the record for the database: the session as it is at this moment."""
        self._is_persisted_busy = self._lease.is_busy
        now = trio.current_time()
        idle_s = 0.0 if self._lease.is_busy else now - self._used_at
        clocked = Clocked(time.monotonic(), idle_s, now - self._born_at)
        return attrs.evolve(self.record, session=self.session, is_busy=self._lease.is_busy, clocked=clocked)


def _idle_s(record: SessionRecord) -> float:
    """Return the seconds since a session was used last. The time of day, which may have been set, counts only for a
    record without a clock reading."""
    if record.clocked is None:
        return max((datetime.now(UTC) - record.session.last_activity).total_seconds(), 0.0)
    return record.clocked.idle_s + _since_s(record.clocked)


def age_s(record: SessionRecord) -> float:
    """Return the seconds since a session was made."""
    if record.clocked is None:
        return max((datetime.now(UTC) - record.session.created_at).total_seconds(), 0.0)
    return record.clocked.age_s + _since_s(record.clocked)


def _since_s(clocked: Clocked) -> float:
    return max(time.monotonic() - clocked.clock_s, 0.0)


def expiry(moment: datetime, span_s: float) -> datetime | None:
    """Return the end of a lease that begins at `moment`; None if it has no end."""
    return None if span_s == FOREVER_S else moment + timedelta(seconds=span_s)
