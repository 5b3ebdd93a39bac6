"""Logs of ended runs are kept for a while and then dropped, by the clock of the loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio
import trio.testing

from sandkasten.model import Stream
from sandkasten.output.log import OutputLog
from sandkasten.output.store import OutputStore, SessionOutput


@asynccontextmanager
async def output_in_memory(root: Path, *, retention_s: float) -> AsyncIterator[OutputStore]:
    """A store whose background task runs and never has anything to do with the disk."""
    store = OutputStore(root, retention_s=retention_s)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.run)
        yield store
        nursery.cancel_scope.cancel()


async def ended(logs: SessionOutput, exec_id: str) -> OutputLog:
    log = logs.open(exec_id)
    await log.append(Stream.STDOUT, b"x")
    logs.retire(exec_id)
    return log


async def test_an_ended_run_is_dropped_when_its_time_is_over(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Each at its own time, in order, and its session is told; a running one stays."""
    async with output_in_memory(tmp_path, retention_s=900) as store:
        logs, others = store.session("a"), store.session("b")
        gone: list[tuple[str, float]] = []
        for each in (logs, others):
            each.when_gone(lambda exec_id: gone.append((exec_id, trio.current_time() - start)))
        start = trio.current_time()
        running = logs.open("running")
        await running.append(Stream.STDOUT, b"x")
        await ended(logs, "first")
        await trio.sleep(100)
        await ended(others, "second")
        await trio.sleep(799)
        assert (gone, logs.get("first") is None) == ([], False)
        await trio.sleep(2)
        assert ([("first", 900)], logs.get("first")) == (gone, None)
        await trio.sleep(100)
        await ended(logs, "third")
        await trio.sleep(2000)
        assert gone == [("first", 900), ("second", 1000), ("third", 1901)]
        assert logs.get("running") is running
        assert others.bytes_used == 0 < logs.bytes_used == store.memory_bytes_used


async def test_very_many_runs_whose_time_is_over_leave_others_their_turns(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """After a restart all runs of the earlier daemon have the same time."""
    async with output_in_memory(tmp_path, retention_s=900) as store:
        logs = store.session("a")
        gone: list[str] = []
        has_begun = trio.Event()

        def note(exec_id: str) -> None:
            gone.append(exec_id)
            has_begun.set()

        logs.when_gone(note)
        for number in range(2000):
            logs.open(str(number))
            logs.retire(str(number))
        await has_begun.wait()
        turns = 0
        while len(gone) < 2000:
            turns += 1
            await trio.lowlevel.checkpoint()
        assert turns > 4


async def test_a_session_that_ended_is_forgotten_by_the_clock(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """The logs are gone at once, nobody is told, and nothing happens when their time would be over."""
    async with output_in_memory(tmp_path, retention_s=10) as store:
        logs = store.session("a")
        gone: list[str] = []
        logs.when_gone(gone.append)
        await ended(logs, "first")
        logs.close()
        assert logs.get("first") is None
        await trio.sleep(100)
        assert gone == []
        assert store.memory_bytes_used == 0


async def test_a_dropped_log_stays_with_the_reader_that_followed_it(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """A slow client still gets the end of what it began to read."""
    async with output_in_memory(tmp_path, retention_s=10) as store:
        logs = store.session("a")
        log = logs.open("first")
        reader = log.reader()
        await log.append(Stream.STDOUT, b"x")
        logs.retire("first")
        await trio.sleep(100)
        assert logs.get("first") is None
        assert [piece.data async for piece in reader] == [b"x"]
        reader.close()
        assert store.memory_bytes_used == 0
