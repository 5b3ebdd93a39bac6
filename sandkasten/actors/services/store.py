"""The one SQLite writer: writes queue up while a transaction runs and go together into the next one.

Owns the connection. All SQL runs in one worker thread at a time, under a limiter of its own, so the event loop never
waits for the disk and an answer means the transaction is committed. Reads go through the same door and so see every
write that was answered before them.

A full disk refuses writes until there is room, and what can wait waits. A database that is damaged, gone or can't be
written any more gives up (`StoreBroken`): a daemon that forgets what it is told must not go on, and sandboxes can.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, assert_never

import attrs
import trio

from sandkasten.actors.core import DEFERRED, Actor, Ask, Ref, Reply
from sandkasten.actors.services.workspace_rows import WorkspaceMessage, workspace_work_of
from sandkasten.actors.supervision import GiveUp
from sandkasten.counters.metrics import Metrics
from sandkasten.model import Event
from sandkasten.model.errors import SandkastenError, StoreFailed, StoreFull
from sandkasten.model.listing import SessionQuery
from sandkasten.store import events as events_sql
from sandkasten.store import sessions as sql
from sandkasten.store.database import is_broken, lacks_room, open_database
from sandkasten.store.events import EventPage, JournalState, Purged
from sandkasten.store.sessions import Recorded, SessionRecord, find_sessions

log = logging.getLogger(__name__)

_BATCH_JOBS = 256


class StoreBroken(GiveUp):
    """The database is damaged, gone, or can't be written."""


@attrs.frozen
class Put(Ask[None]):
    """Insert or replace a record. Answered when it is durable against a crash of the process."""

    record: SessionRecord


@attrs.frozen
class Get(Ask["SessionRecord | None"]):
    session_id: str


@attrs.frozen
class FindByKey(Ask["SessionRecord | None"]):
    idempotency_key: str


@attrs.frozen
class LiveSessions(Ask[Sequence[SessionRecord]]):
    """Every record that says something of the session may exist."""


@attrs.frozen
class FindSessions(Ask[Recorded]):
    """Read a page of the list of sessions."""

    query: SessionQuery


@attrs.frozen
class ForgetEnded(Ask[int]):
    """Forget up to `limit` sessions that ended before a moment; answers how many."""

    before: datetime
    limit: int


@attrs.frozen
class IsDrained(Ask[bool]):
    """Whether the node takes no new sessions, by the operator's word."""


@attrs.frozen
class SetDrained(Ask[None]):
    drained: bool


@attrs.frozen
class Ping(Ask[None]):
    """Answered when the database answers."""


@attrs.frozen
class OpenJournal(Ask[JournalState]):
    """Begin the next epoch of the journal of events; `now_ms` is the wall clock's time."""

    now_ms: int


@attrs.frozen
class AppendEvents(Ask[int]):
    """Write events and, if given, a higher floor; answers how many were new."""

    events: Sequence[Event]
    floor: str | None


@attrs.frozen
class ReadEvents(Ask[EventPage]):
    """Read the first `limit` events behind `after`, none behind `upto`."""

    after: str
    upto: str
    session_id: str | None
    limit: int


@attrs.frozen
class LastEvents(Ask[Sequence[Event]]):
    """Read the newest events of a session, newest first."""

    session_id: str
    limit: int


@attrs.frozen
class PurgeEvents(Ask[Purged]):
    """Forget the `oldest` events."""

    oldest: int


SessionMessage = Put | Get | FindByKey | LiveSessions | FindSessions | ForgetEnded
EventMessage = OpenJournal | AppendEvents | ReadEvents | LastEvents | PurgeEvents
Message = SessionMessage | EventMessage | WorkspaceMessage | IsDrained | SetDrained | Ping


@attrs.frozen
class _Job:
    work: Callable[[sqlite3.Connection], object]
    reply: Reply[Any]  # the answer type of the message behind it


class Store(Actor):
    """See the module's docstring."""

    def __init__(
        self,
        ref: Ref,
        path: Path,
        *,
        metrics: Metrics | None = None,
        open_connection: Callable[[Path], sqlite3.Connection] = open_database,
    ) -> None:
        super().__init__(ref)
        self._path, self._open = path, open_connection
        self._metrics = metrics or Metrics()
        self._limiter = trio.CapacityLimiter(1)
        self._jobs: list[_Job] = []
        self._wake = trio.Event()

    async def on_start(self) -> None:
        self._database = await trio.to_thread.run_sync(self._open, self._path, limiter=self._limiter)
        self._nursery.start_soon(self._write)

    async def on_stop(self) -> None:
        if not hasattr(self, "_database"):
            return
        try:
            while self._jobs:  # what was accepted before the end is still written
                await self._flush()
        except StoreBroken as error:
            log.error("last_writes_lost", extra={"error": str(error), "count": len(self._jobs)})
        finally:
            for job in self._jobs:
                job.reply.fail(self.gone())
        await trio.to_thread.run_sync(self._database.close, limiter=self._limiter)

    async def handle(self, message: Message) -> Any:
        self._jobs.append(_Job(_work_of(message), self._current or Reply()))
        self._wake.set()
        return DEFERRED

    async def _write(self) -> None:
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            while self._jobs:
                await self._flush()

    async def _flush(self) -> None:
        batch, self._jobs = self._jobs[:_BATCH_JOBS], self._jobs[_BATCH_JOBS:]
        began = trio.current_time()
        try:
            outcomes = await trio.to_thread.run_sync(_transact, self._database, batch, limiter=self._limiter)
        except trio.Cancelled:  # which comes before the thread has begun, or never
            self._jobs[:0] = batch
            raise
        except BaseException:
            for job in batch:
                job.reply.fail(self.gone())
            raise
        failed = sum(isinstance(outcome, SandkastenError) for outcome in outcomes)
        self._metrics.note_commit(trio.current_time() - began, done=len(batch) - failed, failed=failed)
        for job, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, SandkastenError):
                job.reply.fail(outcome)
            else:
                job.reply.set(outcome)
        self._give_up_if_broken(outcomes)

    def _give_up_if_broken(self, outcomes: Sequence[object]) -> None:
        for each in outcomes:
            cause = each.__cause__ if isinstance(each, StoreFailed) else None
            if is_broken(cause, self._path):
                raise StoreBroken(f"the session database can't be used any more: {cause}") from cause


async def put_or_keep(store: Ref, unwritten: dict[str, SessionRecord], record: SessionRecord) -> None:
    """Write what a full disk or a broken database must not hold up: a refused record is kept in `unwritten`, for the
    reaper; one that was written takes the place of whatever was kept of that session."""
    session_id = record.session.id
    try:
        await store.ask_again(Put(record))
        unwritten.pop(session_id, None)
    except SandkastenError as error:
        log.error("record_not_written", extra={"session_id": session_id, "error": str(error)})
        unwritten[session_id] = record


def _work_of(message: Message) -> Callable[[sqlite3.Connection], object]:
    match message:
        case Put(record):
            return lambda database: sql.put_session(database, record)
        case Get(session_id):
            return lambda database: sql.get_session(database, session_id)
        case FindByKey(key):
            return lambda database: sql.find_by_key(database, key)
        case LiveSessions():
            return sql.live_sessions
        case FindSessions(query):
            return lambda database: find_sessions(database, query)
        case ForgetEnded(before, limit):
            return lambda database: sql.forget_ended(database, before=before, limit=limit)
        case IsDrained():
            return sql.read_drained
        case SetDrained(drained):
            return lambda database: sql.write_drained(database, drained)
        case Ping():
            return lambda database: database.execute("SELECT 1 FROM node LIMIT 1").fetchone() and None
        case OpenJournal() | AppendEvents() | ReadEvents() | LastEvents() | PurgeEvents():
            return _event_work_of(message)
        case _:
            return workspace_work_of(message)


def _event_work_of(message: EventMessage) -> Callable[[sqlite3.Connection], object]:
    match message:
        case OpenJournal(now_ms):
            return lambda database: events_sql.open_journal(database, now_ms=now_ms)
        case AppendEvents(events, floor):
            return lambda database: events_sql.append_events(database, events, floor=floor)
        case ReadEvents(after, upto, session_id, limit):
            return lambda database: events_sql.read_events(
                database, after=after, upto=upto, session_id=session_id, limit=limit
            )
        case LastEvents(session_id, limit):
            return lambda database: events_sql.last_events(database, session_id=session_id, limit=limit)
        case PurgeEvents(oldest):
            return lambda database: events_sql.purge_events(database, oldest=oldest)
        case _:
            assert_never(message)


def _transact(database: sqlite3.Connection, batch: Sequence[_Job]) -> Sequence[object]:
    """Run the jobs in one transaction, in a worker thread. A failing job is undone alone and answers `StoreFailed`.
    When all was undone, as it is on a full disk, each has another try on its own: most may only want to read."""
    outcomes: list[object] = []
    try:
        database.execute("BEGIN IMMEDIATE")
        for job in batch:
            database.execute("SAVEPOINT job")
            try:
                outcomes.append(job.work(database))
            except Exception as error:  # noqa: BLE001 - a value SQLite can't hold must not take the others along
                if not database.in_transaction:  # SQLite undid all of it
                    return _one_by_one(database, batch, error)
                database.execute("ROLLBACK TO job")
                outcomes.append(_failed(error))
            database.execute("RELEASE job")
        database.execute("COMMIT")
    except sqlite3.Error as error:
        if database.in_transaction:
            database.execute("ROLLBACK")
        return _one_by_one(database, batch, error)
    return outcomes


def _one_by_one(database: sqlite3.Connection, batch: Sequence[_Job], error: Exception) -> Sequence[object]:
    if len(batch) == 1:
        return [_failed(error)]
    return [outcome for job in batch for outcome in _transact(database, [job])]


def _failed(error: Exception) -> StoreFailed:
    if lacks_room(error):
        failure: StoreFailed = StoreFull("the disk of the session database is full")
    else:
        failure = StoreFailed("the session database refused the operation")
    failure.__cause__ = error
    return failure
