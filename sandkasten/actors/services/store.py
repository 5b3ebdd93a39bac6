"""The store: owner of the SQLite connection. `Do` carries a function to the connection and brings back its answer.

Writes are committed in groups: functions queue up while a transaction runs and share the next one. SQL runs in one
worker thread at a time, so the event loop never waits for the disk. A function whose answer nobody awaits is carried
out within `UNASKED_S`, with the next one that is awaited or before. An answer means that the transaction is committed,
and a function sees every write that was answered before it was sent.

A full disk refuses writes (`StoreFull`) until there is room. A database that is damaged, gone or read-only ends the
store for good (`StoreBroken`): the daemon must not go on without its records, and sandboxes run on without the daemon.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import attrs
import trio

from sandkasten.actors.core import DEFERRED, Actor, Ask, R, Ref, Reply
from sandkasten.actors.supervision import GiveUp
from sandkasten.counters.metrics import Metrics
from sandkasten.errors import SandkastenError, StoreFailed, StoreFull
from sandkasten.store.database import is_broken, lacks_room, open_database
from sandkasten.store.sessions import SessionRecord, put_session

P = ParamSpec("P")

log = logging.getLogger(__name__)

_BATCH_JOBS = 256
"""Functions that share one transaction at most."""


UNASKED_S = 0.25
"""Time that a function of which nobody awaits the answer waits for others."""


class StoreBroken(GiveUp):
    """The database is damaged, gone, or can't be written."""


@attrs.frozen
class Do(Ask[R]):
    """Call `function(connection, *args, **kwargs)` in the store's thread, within a transaction; answers its result.

    A write is durable against a crash of the process once the answer is there. Raises `StoreFailed` when `function`
    raised: its own writes are undone then, those of the functions beside it are not. Make one with `do`.
    """

    function: Callable[..., R]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = attrs.field(factory=dict)


def do(function: Callable[Concatenate[sqlite3.Connection, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Do[R]:
    """Return the message that has the store call `function` with its connection and these arguments."""
    return Do(function, args, kwargs)


@attrs.frozen
class _Job:
    order: Do[Any]
    reply: Reply[Any]  # of the order's answer type


class Store(Actor):
    """The one SQLite writer."""

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
        self._wakes_soon = False

    async def on_start(self) -> None:
        self._database = await trio.to_thread.run_sync(self._open, self._path, limiter=self._limiter)
        self._nursery.start_soon(self._write)

    async def on_stop(self) -> None:
        if not hasattr(self, "_database"):
            return
        try:
            while self._jobs:  # writes accepted before the end are carried out
                await self._flush()
        except StoreBroken as error:
            log.error("last_writes_lost", extra={"error": str(error), "count": len(self._jobs)})
        finally:
            for job in self._jobs:
                job.reply.fail(self.gone())
        await trio.to_thread.run_sync(self._database.close, limiter=self._limiter)

    def handle_at_once(self, message: Do[Any]) -> Any:
        self._jobs.append(_Job(message, self._current or Reply()))
        if self._current is not None:
            self._wake.set()
        elif not self._wakes_soon:  # nobody waits: sessions that are used in turn share a transaction
            self._wakes_soon = True
            self._nursery.start_soon(self._wake_soon)
        return DEFERRED

    async def _wake_soon(self) -> None:
        await trio.sleep(UNASKED_S)
        self._wakes_soon = False
        self._wake.set()

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
    """Write a record whose session must go on even if the database refuses. A refused record is kept in `unwritten`
    for the reaper; a written one replaces the record kept there."""
    session_id = record.session.id
    try:
        await store.ask_again(do(put_session, record))
        unwritten.pop(session_id, None)
    except SandkastenError as error:
        log.error("record_not_written", extra={"session_id": session_id, "error": str(error)})
        unwritten[session_id] = record


def _transact(database: sqlite3.Connection, batch: Sequence[_Job]) -> Sequence[object]:
    """Run the jobs in one transaction, in a worker thread. A failing job is undone alone and answers `StoreFailed`.
    When SQLite undid everything, as on a full disk, each job is tried again on its own: most may only read."""
    outcomes: list[object] = []
    try:
        database.execute("BEGIN IMMEDIATE")
        for job in batch:
            database.execute("SAVEPOINT job")
            try:
                outcomes.append(job.order.function(database, *job.order.args, **job.order.kwargs))
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
