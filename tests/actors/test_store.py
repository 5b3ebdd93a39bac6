"""The store: what is answered is written, writes share transactions, bad rows fail alone."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import attrs
import pytest
import trio
import trio.testing

from sandkasten.actors.core import MAILBOX_MESSAGES, Ref
from sandkasten.actors.node.recovery import BATCH, forget_old
from sandkasten.actors.services.store import UNASKED_S, Store, do
from sandkasten.errors import StoreFailed
from sandkasten.host.paths import read_boot_id
from sandkasten.model import EndReason, Status
from sandkasten.model.lifecycle import Trigger
from sandkasten.model.listing import SessionQuery
from sandkasten.store.database import DatabaseTooNew, open_database
from sandkasten.store.sessions import (
    Clocked,
    KernelIdentity,
    SessionRecord,
    find_by_key,
    find_sessions,
    forget_ended,
    get_session,
    live_sessions,
    put_session,
)
from tests.strategies import make_record
from tests.waiting import patience


@pytest.fixture
async def store(tmp_path: Path, nursery: trio.Nursery) -> Ref:
    ref: Ref = await nursery.start(Store(Ref("store"), tmp_path / "test.db").run)
    return ref


async def test_a_record_comes_back_as_it_was_put(store: Ref) -> None:
    """Every field survives."""
    record = make_record(
        "a" * 24,
        status=Status.DESTROYING,
        identity=KernelIdentity(12, 34, 56, read_boot_id()),
        ending=Trigger.EXPIRE,
        ended_at=datetime.now(UTC),
        idempotency_key="key",
        is_busy=True,
        clocked=Clocked(7.5, 0.25, 3.0),
        max_lifetime_s=5.5,
        end_reason=EndReason.MAX_LIFETIME,
        labels={"a": "ü"},
    )
    await store.ask(do(put_session, record))
    assert await store.ask(do(get_session, "a" * 24)) == record
    assert await store.ask(do(find_by_key, "key")) == record
    assert await store.ask(do(get_session, "b" * 24)) is None


async def test_live_and_ended_sessions_are_told_apart(store: Ref) -> None:
    """Sessions that may exist in the kernel are found again after a restart; the rest is history."""
    for index, status in enumerate(Status):
        await store.ask(do(put_session, make_record(f"{index:024x}", status=status)))
    live = {record.session.status for record in await store.ask(do(live_sessions))}
    assert live == {Status.POOL_IDLE, Status.CREATING, Status.RUNNING, Status.PAUSED, Status.DESTROYING}
    found = await store.ask(do(find_sessions, SessionQuery(frozenset(Status))))
    assert {each.session.status for each in found.records} == set(Status)
    lost = await store.ask(do(find_sessions, SessionQuery(frozenset({Status.LOST}))))
    assert [each.session.status for each in lost.records] == [Status.LOST]


async def test_old_ended_records_are_forgotten_and_live_ones_never(store: Ref) -> None:
    """History is bounded; a live session's record is never dropped, however old."""
    past = datetime.now(UTC) - timedelta(days=9)
    await store.ask(do(put_session, make_record("a" * 24, status=Status.EXPIRED, ended_at=past)))
    await store.ask(do(put_session, make_record("b" * 24, status=Status.RUNNING, ended_at=past)))
    assert await store.ask(do(forget_ended, before=datetime.now(UTC) - timedelta(days=7), limit=10)) == 1
    assert await store.ask(do(get_session, "a" * 24)) is None
    assert await store.ask(do(get_session, "b" * 24)) is not None


async def test_old_records_are_forgotten_a_few_at_a_time_and_their_keys_are_free(store: Ref) -> None:
    """The oldest first, all of them in the end, others untouched; a key is then anybody's again."""
    now = datetime.now(UTC)
    count = 2 * BATCH + 10
    for number in range(count):
        old = make_record(
            f"{number:024x}",
            status=Status.EXPIRED,
            ended_at=now - timedelta(days=8, seconds=number),
            idempotency_key=f"key-{number}",
        )
        if number % 100:
            store.tell(do(put_session, old))
        else:
            await store.ask(do(put_session, old))
    young = make_record("a" * 24, status=Status.EXPIRED, ended_at=now, idempotency_key="young")
    await store.ask(do(put_session, young))
    assert await store.ask(do(forget_ended, before=now - timedelta(days=7), limit=3)) == 3
    assert await store.ask(do(find_by_key, f"key-{count - 1}")) is None
    assert await store.ask(do(find_by_key, "key-0")) is not None
    assert await forget_old(store, keep_s=7 * 86_400) == count - 3
    assert await forget_old(store, keep_s=7 * 86_400) == 0
    assert await store.ask(do(find_by_key, "young")) == young
    await store.ask(do(put_session, make_record("b" * 24, idempotency_key="key-0")))


async def test_one_refused_write_does_not_take_its_batch_along(store: Ref) -> None:
    """A duplicate idempotency key fails alone although it shares a transaction with others."""
    outcomes: dict[str, str] = {}

    async def put(record: SessionRecord) -> None:
        try:
            await store.ask(do(put_session, record))
            outcomes[record.session.id] = "written"
        except StoreFailed:
            outcomes[record.session.id] = "refused"

    records = [make_record(f"{index:024x}") for index in range(50)]
    records[20] = attrs.evolve(records[20], idempotency_key="same")
    records[30] = attrs.evolve(records[30], idempotency_key="same")
    async with trio.open_nursery() as nursery:
        for record in records:
            nursery.start_soon(put, record)
    assert sorted(outcomes.values()).count("refused") == 1
    assert len(await store.ask(do(live_sessions))) == 49


async def test_what_was_answered_survives_a_reopening(tmp_path: Path) -> None:
    """The answer means durable: a second incarnation reads what the first was asked to write."""
    path = tmp_path / "test.db"
    for number in range(2):
        async with trio.open_nursery() as nursery:
            ref: Ref = await nursery.start(Store(Ref("store"), path).run)
            assert len(await ref.ask(do(live_sessions))) == number
            await ref.ask(do(put_session, make_record(f"{number:024x}")))
            nursery.cancel_scope.cancel()
    assert path.stat().st_mode & 0o777 == 0o600


async def test_writes_that_nobody_awaits_share_a_transaction(tmp_path: Path, nursery: trio.Nursery) -> None:
    """Such writes come with the next function that is awaited, in order, or else within a bounded time."""
    statements: list[str] = []

    def open_traced(path: Path) -> sqlite3.Connection:
        database = open_database(path)
        database.set_trace_callback(statements.append)
        return database

    ref: Ref = await nursery.start(Store(Ref("store"), tmp_path / "test.db", open_connection=open_traced).run)
    ids = [f"{number:024x}" for number in range(20)]
    for each in ids:
        ref.tell(do(put_session, make_record(each)))
        await trio.testing.wait_all_tasks_blocked()
    assert "COMMIT" not in statements
    found = await ref.ask(do(live_sessions))
    assert {record.session.id for record in found} == set(ids)
    assert statements.count("COMMIT") == 1
    ref.tell(do(put_session, make_record("f" * 24)))
    with trio.fail_after(patience(20 * UNASKED_S)):
        while statements.count("COMMIT") < 2:  # noqa: ASYNC110 - a thread commits
            await trio.sleep(UNASKED_S / 10)


async def test_what_was_told_before_the_end_is_written(tmp_path: Path) -> None:
    """The stop comes while much more waits than goes into one transaction: all of it is there afterwards."""
    path = tmp_path / "test.db"
    async with trio.open_nursery() as nursery:
        ref: Ref = await nursery.start(Store(Ref("store"), path).run)
        for number in range(MAILBOX_MESSAGES):
            ref.tell(do(put_session, make_record(f"{number:024x}")))
        while ref.waiting:
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    with closing(open_database(path)) as database:
        assert len(live_sessions(database)) == MAILBOX_MESSAGES


def test_a_database_from_the_future_is_refused(tmp_path: Path) -> None:
    """A downgrade is said, not guessed at."""
    database = open_database(tmp_path / "test.db")
    database.execute("PRAGMA user_version=9999")
    database.close()
    with pytest.raises(DatabaseTooNew):
        open_database(tmp_path / "test.db")
