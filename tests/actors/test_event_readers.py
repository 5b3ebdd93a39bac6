"""Readers of events: everything once and in order, at any pace, from memory and from disk, or an error that says so."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import trio
import trio.testing

from sandkasten.actors.services.events import EventReader
from sandkasten.actors.services.store import do
from sandkasten.errors import Capacity, CursorGone, InvalidRequest, ShuttingDown, StoreFailed
from sandkasten.journal.ring import MAX_READERS, OLDEST
from sandkasten.model import Event
from sandkasten.store.events import purge_events
from tests.actors.event_node import A, B, EventNode, ports, running_node, take
from tests.waiting import patience


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "test.db"


async def nothing_more(reader: EventReader) -> bool:
    """Whether the reader waits, once everything else does."""
    with trio.move_on_after(0) as scope:
        await anext(reader)
    return scope.cancelled_caught


async def test_a_reader_gets_what_comes_from_now_on(path: Path) -> None:
    """In order, the moment it happens, whether it waits or not."""
    async with running_node(path) as node:
        node.emit(1)
        async with node.reader() as reader, trio.open_nursery() as nursery:
            got: list[Event] = []

            async def read() -> None:
                got.extend(await take(reader, 3))

            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            node.emit(2)
            node.emit(3, session_id=B)
            await trio.testing.wait_all_tasks_blocked()
            node.emit(4)
        assert ports(got) == [2, 3, 4]


async def test_a_reader_of_one_session_gets_that_session(path: Path) -> None:
    """From memory and from the database."""
    async with running_node(path, memory_events=4) as node:
        for number in range(1, 13):
            node.emit(number, session_id=(A, B)[number % 2])
            await node.flush()
        async with node.reader(A, after=OLDEST) as reader:
            assert ports(await take(reader, 6)) == [2, 4, 6, 8, 10, 12]
            assert await nothing_more(reader)


async def test_reading_on_from_any_cursor_gives_the_rest(path: Path) -> None:
    """Each event's cursor is a place, before and behind the border between memory and database."""
    async with running_node(path, memory_events=10) as node:
        for number in range(1, 31):
            node.emit(number)
            await node.flush()
        async with node.reader(after=OLDEST) as reader:
            events = await take(reader, 30)
            assert ports(events) == list(range(1, 31))
            assert reader.cursor == events[-1].cursor
        async with node.reader(after=OLDEST) as reader:
            for event in events:
                assert await take(reader, 1) == [event]
                assert reader.cursor == event.cursor
        for index, event in enumerate(events[:-1]):
            async with node.reader(after=event.cursor) as reader:
                assert await take(reader, 29 - index) == events[index + 1 :]


async def test_a_slow_reader_is_served_from_disk_until_that_has_forgotten(path: Path) -> None:
    """A slow reader costs the others nothing, and never gets a part of the events as if it were all of them."""
    async with running_node(path, memory_events=16, kept=200) as node, node.reader() as slow, node.reader() as quick:
        for number in range(1, 101):
            node.emit(number)
            assert ports(await take(quick, 1)) == [number]
            await node.flush()
        assert ports(await take(slow, 50)) == list(range(1, 51))
        for number in range(101, 1000):
            node.emit(number)
            assert ports(await take(quick, 1)) == [number]
            await node.flush()
        seen: list[Event] = []

        async def read_on() -> None:
            while True:
                seen.extend(await take(slow, 1))

        with pytest.raises(CursorGone) as gone:
            await read_on()
        assert ports(seen) == list(range(51, 51 + len(seen)))
        assert slow.cursor < gone.value.details["oldest_cursor"]


async def test_a_purge_in_the_moment_of_reading_is_noticed(path: Path) -> None:
    """The database's floor counts, although the journal in memory has not heard of it yet."""
    async with running_node(path, memory_events=4) as node, node.reader() as reader:
        for number in range(20):
            node.emit(number)
            await node.flush()
        await node.store.ask(do(purge_events, oldest=10))
        assert node.journal.floor <= reader.cursor
        with pytest.raises(CursorGone):
            await take(reader, 1)
        async with node.reader(after=OLDEST) as late:
            assert ports(await take(late, 10)) == list(range(10, 20))


async def test_readers_at_any_pace_see_everything_once(path: Path) -> None:
    """Slow and quick, of one session and of all, while memory is overrun again and again."""
    chance = random.Random(5)
    told: list[tuple[str, int]] = []
    seen: dict[tuple[str | None, int], list[tuple[str, int]]] = {}

    async def read(node: EventNode, session_id: str | None, pause: int) -> None:
        got = seen[session_id, pause] = []
        async with node.reader(session_id, after=OLDEST) as reader:
            async for event in reader:
                got.append((event.session_id, event.data["port"]))
                for _ in range(chance.randrange(pause)):
                    await trio.lowlevel.checkpoint()
                if event.data["port"] == 1500:
                    return

    async with running_node(path, memory_events=32) as node, trio.open_nursery() as nursery:
        for session_id in (None, A, B):
            for pause in (1, 4, 60):
                nursery.start_soon(read, node, session_id, pause)
        while len(told) < 1500:
            for _ in range(chance.randrange(1, 30)):
                told.append((chance.choice((A, B)), len(told) + 1))
                node.emit(told[-1][1], session_id=told[-1][0])
            await node.flush()
        for session_id in (A, B):
            told.append((session_id, 1500))
            node.emit(1500, session_id=session_id)
        nursery.cancel_scope.deadline = trio.current_time() + patience()
    for (session_id, _), got in seen.items():
        wanted = [each for each in told if session_id in (None, each[0])]
        assert got == wanted[: len(got)]
        assert got[-1][1] == 1500


async def test_a_silent_session_is_not_overtaken_by_the_noise_of_others(path: Path) -> None:
    """A reader of the silent session waits through more events than are kept, and its cursor moves along."""
    async with running_node(path, memory_events=16, kept=50) as node, node.reader(B) as reader:
        start, got = reader.cursor, list[Event]()

        async def read() -> None:
            got.extend(await take(reader, 1))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            for number in range(500):
                node.emit(number)
                await node.flush()
            assert start < node.journal.floor < reader.cursor
            node.emit(7, session_id=B)
        assert ports(got) == [7]


async def test_being_cancelled_loses_no_event(path: Path) -> None:
    """A reader under a deadline goes on where it was."""
    async with running_node(path, memory_events=8) as node, node.reader() as reader:
        got: list[Event] = []
        for number in range(200):
            node.emit(number)
            if number % 5 == 0:
                await node.flush()
            with trio.CancelScope() as scope:
                if number % 3:
                    scope.cancel()
                got.append(await anext(reader))
        assert ports(got) == list(range(len(got)))
        got += await take(reader, 200 - len(got))
        assert ports(got) == list(range(200))


async def test_a_reader_that_needs_a_broken_database_is_told(path: Path) -> None:
    """The reader gets the error, not a part of the events."""
    async with running_node(path, memory_events=4) as node:
        for number in range(10):
            node.emit(number)
            await node.flush()
        node.rename("events", "away")
        with pytest.raises(StoreFailed):
            await node.reader(after=OLDEST).__aenter__()
        node.rename("away", "events")
        async with node.reader(after=OLDEST) as reader:
            assert ports(await take(reader, 10)) == list(range(10))


async def test_readers_are_bounded_and_their_places_come_back(path: Path) -> None:
    """A reader that could not begin takes no place."""
    async with running_node(path) as node:
        for wrong in ("nonsense", node.journal.head[:-1] + "9"):
            for _ in range(MAX_READERS):
                with pytest.raises(InvalidRequest):
                    await node.reader(after=wrong).__aenter__()
        readers = [node.reader() for _ in range(MAX_READERS)]
        for reader in readers:
            await reader.__aenter__()
        with pytest.raises(Capacity):
            await node.reader().__aenter__()
        for reader in readers:
            await reader.__aexit__(None, None, None)
        async with node.reader():
            pass


async def test_a_closed_journal_ends_those_who_wait(path: Path) -> None:
    """A program that watches a supervisor that has ended does not hang."""
    async with running_node(path) as node, node.reader() as reader, trio.open_nursery() as nursery:

        async def read() -> None:
            with pytest.raises(ShuttingDown):
                await take(reader, 1)

        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        node.journal.close()
