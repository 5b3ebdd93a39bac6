"""A database that fails: SQLite's own errors, each with what becomes of the store."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio

from sandkasten.actors.core import MAILBOX_MESSAGES, Ref, Reply
from sandkasten.actors.services.store import Store, StoreBroken, do
from sandkasten.errors import ActorGone, StoreFailed, StoreFull
from sandkasten.store.database import open_database, ping
from sandkasten.store.sessions import SessionRecord, live_sessions, put_session
from tests.strategies import make_record
from tests.waiting import patience


def readonly(path: Path) -> sqlite3.Connection:
    """Open a database that takes no write, as on a disk that the kernel made read-only after an error."""
    database = open_database(path)
    database.execute("PRAGMA query_only=ON")
    return database


def full(path: Path) -> sqlite3.Connection:
    """Open a database that may not grow."""
    database = open_database(path)
    pages = database.execute("PRAGMA page_count").fetchone()[0]
    database.execute(f"PRAGMA max_page_count={pages}")
    return database


async def test_a_database_that_cannot_be_written_gives_up(tmp_path: Path) -> None:
    """Each asker is answered, and the end gives the reason."""
    with pytest.RaisesGroup(pytest.RaisesExc(StoreBroken, match="readonly database"), flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            store: Ref = await nursery.start(Store(Ref("store"), tmp_path / "test.db", open_connection=readonly).run)
            with pytest.raises(StoreFailed):
                await store.ask(do(put_session, make_record("a" * 24)))
    with pytest.raises(ActorGone):
        await store.ask(do(ping))


async def test_everybody_who_waits_hears_that_it_has_given_up(tmp_path: Path) -> None:
    """However many there are: nobody is left to wait for an answer that will not come."""
    answers: list[str] = []

    async def put(store: Ref, number: int) -> None:
        try:
            await store.ask(do(put_session, make_record(f"{number:024x}")))
        except (StoreFailed, ActorGone) as error:
            answers.append(type(error).__name__)

    with trio.fail_after(patience()):
        async with trio.open_nursery() as askers:
            with pytest.RaisesGroup(StoreBroken, flatten_subgroups=True):
                async with trio.open_nursery() as nursery:
                    ref = Ref("store")
                    store: Ref = await nursery.start(Store(ref, tmp_path / "test.db", open_connection=readonly).run)
                    for number in range(MAILBOX_MESSAGES):
                        askers.start_soon(put, store, number)
    assert len(answers) == MAILBOX_MESSAGES


async def test_a_damaged_database_gives_up(tmp_path: Path) -> None:
    """As soon as SQLite notices; here because somebody else changed what the tables are."""
    path = tmp_path / "test.db"
    with pytest.RaisesGroup(pytest.RaisesExc(StoreBroken, match="malformed"), flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            store: Ref = await nursery.start(Store(Ref("store"), path).run)
            await store.ask(do(put_session, make_record("a" * 24)))
            damage(path)
            with pytest.raises(StoreFailed):
                await store.ask(do(live_sessions))


def damage(path: Path) -> None:
    """Let a table begin where there is nothing, and have everybody read that anew."""
    database = sqlite3.connect(path, isolation_level=None)
    version = database.execute("PRAGMA schema_version").fetchone()[0]
    database.execute("PRAGMA writable_schema=ON")
    database.execute("UPDATE sqlite_schema SET rootpage=999999 WHERE name='sessions'")
    database.execute(f"PRAGMA schema_version={version + 1}")
    database.close()


async def test_a_full_disk_refuses_writes_and_nothing_else(tmp_path: Path, nursery: trio.Nursery) -> None:
    """Reading goes on, and so does writing once there is room."""
    store: Ref = await nursery.start(Store(Ref("store"), tmp_path / "test.db", open_connection=full).run)
    large = {f"label-{number}": "x" * 200 for number in range(500)}
    with pytest.raises(StoreFailed) as caught:
        await store.ask(do(put_session, make_record("a" * 24, labels=large)))
    assert isinstance(caught.value.__cause__, sqlite3.OperationalError)
    assert caught.value.__cause__.sqlite_errorcode == sqlite3.SQLITE_FULL
    assert await store.ask(do(live_sessions)) == []
    assert store.incarnation == 1
    await store.ask(do(ping))


async def test_who_reads_beside_a_write_without_room_is_answered(tmp_path: Path, nursery: trio.Nursery) -> None:
    """The reads and the write share a transaction, and SQLite undoes all of it."""
    store: Ref = await nursery.start(Store(Ref("store"), tmp_path / "test.db", open_connection=full).run)
    large = {f"label-{number}": "x" * 200 for number in range(500)}
    refused, found = Reply[None](), [Reply[Sequence[SessionRecord]]() for _ in range(10)]
    for each in found[:5]:
        store.post(do(live_sessions), each)
    store.post(do(put_session, make_record("a" * 24, labels=large)), refused)
    for each in found[5:]:
        store.post(do(live_sessions), each)
    with pytest.raises(StoreFull):
        await refused.wait()
    assert [await each.wait() for each in found] == [[]] * 10
