"""Events on disk: written in groups, bounded, there again after a restart or a kill, and a database that refuses."""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trio

from sandkasten.actors.core import Ref
from sandkasten.actors.services import events as events_actor
from sandkasten.actors.services.events import Events, Flush, open_reader
from sandkasten.actors.services.store import Store
from sandkasten.errors import CursorGone, StoreFailed
from sandkasten.journal.ring import OLDEST, Journal
from sandkasten.model import Event, EventType
from sandkasten.store.database import open_database
from sandkasten.store.events import append_events, open_journal, purge_events, read_events
from tests.actors.event_node import A, B, ports, running_node, take
from tests.waiting import until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "test.db"


async def test_an_event_is_the_same_from_memory_and_from_the_database(path: Path) -> None:
    """To the millisecond and to the type of every value."""
    async with running_node(path) as node, node.reader() as reader:
        node.journal.emit(EventType.OOM, A, victim="pythön\udcff\u2028", oom_kills=1)
        node.journal.emit(EventType.PROCESS_STARTED, B, exec_id="y", keep_alive=True)
        fresh = await take(reader, 2)
    async with running_node(path) as node, node.reader(after=OLDEST) as reader:
        assert await take(reader, 2) == fresh


async def test_events_are_written_by_themselves_and_in_groups(path: Path) -> None:
    """A burst is one write, not one per event."""
    async with running_node(path) as node:
        await node.flush()
        node.store.asked.clear()
        node.emit(*range(400))

        async def are_written() -> bool:
            return node.rows() == 400

        await until(are_written)
        assert node.store.asked.count(append_events) == 1


async def test_a_restart_goes_on_where_the_reader_was(path: Path) -> None:
    """Also with what was told in the last moment before the stop, and what comes after it."""
    async with running_node(path) as node, node.reader() as reader:
        node.emit(1, 2, 3, 4)
        cursor = (await take(reader, 2))[-1].cursor
    async with running_node(path) as node, node.reader(after=cursor) as reader:
        node.emit(5)
        events = await take(reader, 3)
        assert ports(events) == [3, 4, 5]
        assert sorted(event.cursor for event in events) == [event.cursor for event in events]


_KILLED = """
import os, signal, sys, trio
from pathlib import Path
from tests.actors.event_node import running_node, take

async def main():
    async with running_node(Path(sys.argv[1])) as node, node.reader() as reader:
        node.emit(1, 2)
        await node.flush()
        node.emit(3)
        for event in await take(reader, 3):
            print(event.cursor)
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)

trio.run(main)
"""


@pytest.mark.slow
async def test_after_a_kill_the_journal_goes_on_and_no_cursor_comes_again(path: Path) -> None:
    """Cursors that were handed out but never written stay places to read on from, and are given to no other event."""
    given: list[str] = []
    for _ in range(3):
        done = await trio.run_process(
            [sys.executable, "-c", _KILLED, str(path)], check=False, capture_stdout=True, cwd=ROOT
        )
        assert done.returncode == -signal.SIGKILL
        given += done.stdout.decode().split()
    assert len(given) == 9
    assert sorted(set(given)) == given
    async with running_node(path) as node:
        async with node.reader(after=OLDEST) as reader:
            written = [event.cursor for event in await take(reader, 6)]
        node.emit(9)
        for cursor in given:
            async with node.reader(after=cursor) as reader:
                rest = [each for each in written if each > cursor]
                events = await take(reader, len(rest) + 1)
                assert [event.cursor for event in events[:-1]] == rest
                assert ports(events[-1:]) == [9]
        assert events[-1].cursor > given[-1]


def test_epochs_rise_whatever_the_clock_does(path: Path) -> None:
    """Set back, it can't bring a cursor back."""
    with closing(open_database(path)) as database:
        epochs = [open_journal(database, now_ms=now_ms).epoch for now_ms in (1000, 1000, 5000, 20, 5001, 9000)]
    assert epochs == [1000, 1001, 5000, 5001, 5002, 9000]


def test_writing_a_batch_again_changes_nothing_and_the_floor_never_falls(path: Path) -> None:
    """An answer that was lost, or two that changed places, do no harm."""
    events = [Event(f"{number}", datetime.fromtimestamp(0, UTC), EventType.OOM, A, {}) for number in range(3)]
    with closing(open_database(path)) as database:
        added = [append_events(database, events[:2], floor="5"), append_events(database, events, floor="3")]
        page = read_events(database, after="", upto="9", session_id=None, limit=10)
    assert (added, page.events, page.floor) == ([2, 1], events, "5")


async def test_a_lost_database_is_not_taken_for_a_silent_time(path: Path) -> None:
    """A cursor of the old one is behind the new one's floor."""
    async with running_node(path) as node, node.reader() as reader:
        node.emit(1, 2)
        cursor = (await take(reader, 1))[0].cursor
    await trio.Path(path).unlink()
    for _ in range(2):
        async with running_node(path) as node:
            with pytest.raises(CursorGone):
                await node.reader(after=cursor).__aenter__()


async def test_only_so_many_events_stay_on_disk(path: Path) -> None:
    """The oldest go, in batches; who reads on from among them is told where the journal begins now."""
    async with running_node(path, memory_events=16, kept=100) as node:
        async with node.reader() as reader:
            node.emit(1)
            first = (await take(reader, 1))[0].cursor
        for start in range(2, 1002, 8):
            node.emit(*range(start, start + 8))
            await node.flush()
            assert node.journal.rows <= 110
        assert node.rows() == node.journal.rows >= 100
        with pytest.raises(CursorGone) as gone:
            await node.reader(after=first).__aenter__()
        async with node.reader(after=gone.value.details["oldest_cursor"]) as reader:
            kept = ports(await take(reader, node.rows()))
        assert kept == list(range(1002 - len(kept), 1002))
    async with running_node(path, kept=10) as node:
        async with node.reader(after=OLDEST) as reader:
            assert ports(await take(reader, len(kept))) == kept
        node.emit(0)
        await node.flush()
        assert node.rows() == 10


async def test_a_refusing_database_holds_up_nobody(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory serves on, the trouble is logged once, the gap is known, and afterwards writing goes on."""
    monkeypatch.setattr(events_actor, "_RETRY_S", 0.0)
    async with running_node(path, memory_events=16) as node, node.reader() as quick:
        node.emit(1)
        await node.flush()
        before = (await take(quick, 1))[0].cursor
        node.rename("events", "away")
        for number in range(2, 42):
            node.emit(number)
            assert ports(await take(quick, 1)) == [number]
        with pytest.raises(StoreFailed):
            await node.flush()
        with pytest.raises(CursorGone) as gone:
            await node.reader(after=before).__aenter__()
        async with node.reader(after=gone.value.details["oldest_cursor"]) as late:
            assert ports(await take(late, 16)) == list(range(26, 42))
        tries = node.store.asked.count(append_events)

        async def was_tried_again() -> bool:
            return node.store.asked.count(append_events) > tries + 3

        await until(was_tried_again)
        node.rename("away", "events")
        await node.flush()
        assert node.rows() == 17
    assert [record.message for record in caplog.records if record.name == events_actor.__name__].count(
        "events_not_written"
    ) == 1
    async with running_node(path) as node:
        with pytest.raises(CursorGone):
            await node.reader(after=before).__aenter__()
        async with node.reader(after=OLDEST) as reader:
            assert ports(await take(reader, 16)) == list(range(26, 42))


async def test_an_actor_that_comes_back_goes_on_with_the_same_journal(path: Path) -> None:
    """Numbers go on, waiting readers stay, what was not written is."""
    journal, ref, store = Journal(), Ref("events"), Ref("store")
    async with trio.open_nursery() as nursery:
        await nursery.start(Store(store, path).run)
        async with open_nursery_with(Events(ref, journal, store=store)):
            start = journal.head
        async with open_reader(journal, store) as reader:
            journal.emit(EventType.SHELL_OPENED, A, shell="x")
            async with open_nursery_with(Events(ref, journal, store=store)):
                (event,) = await take(reader, 1)
                assert start < event.cursor == journal.head
                assert event.cursor.partition("-")[0] == start.partition("-")[0]
                await ref.ask(Flush())
                assert journal.rows == 1
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_nursery_with(actor: Events) -> AsyncIterator[None]:
    """Run an actor for as long as the context is open."""
    async with trio.open_nursery() as nursery:
        await nursery.start(actor.run)
        yield
        nursery.cancel_scope.cancel()


async def test_purging_does_not_hold_up_the_store(path: Path) -> None:
    """A much smaller bound than before is reached in many small steps."""
    async with running_node(path) as node:
        node.emit(*range(5000))
    async with running_node(path, kept=500) as node:
        node.emit(1)
        await node.flush()
        assert node.rows() == 500
        assert node.store.asked.count(purge_events) == 5
