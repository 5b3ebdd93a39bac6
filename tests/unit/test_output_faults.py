"""A disk that is full, broken or slow costs old output at most: runs go on, readers are told what is gone."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import trio
import trio.testing

from sandkasten.errors import ExecGone
from sandkasten.model import Stream
from sandkasten.output.log import ReaderMode
from tests.stores import (
    KB,
    MB,
    PIECE,
    disk_bytes,
    drain,
    ended,
    file_size_limit,
    files,
    fill,
    numbered_piece,
    open_output,
    take,
    wait_memory_below,
)
from tests.waiting import until

OUT = Stream.STDOUT


async def test_a_disk_that_takes_nothing_costs_output_and_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run goes on, readers are told what is gone, the failure is logged once, and all is well again after it."""
    caplog.set_level(logging.ERROR)
    async with open_output(tmp_path, memory_bytes=MB) as store:
        logs = store.session("session")
        log = logs.open("a")
        with file_size_limit(1000):
            await fill(log, 100)
            await wait_memory_below(store, MB)
        assert [record.message for record in caplog.records] == ["output_not_written"]
        assert log.last_sequence == 100
        assert 0 < store.lost_bytes == (log.first_sequence - 1) * len(PIECE)
        assert files(tmp_path) == []
        with pytest.raises(ExecGone):
            log.reader()
        after = log.first_sequence - 1
        await fill(log, 40)
        log.close()
        await wait_memory_below(store, MB)
        assert disk_bytes(tmp_path) > 0
        assert (140 - after) * PIECE == await drain(log.reader(after=after))


async def test_a_full_disk_costs_output_of_the_session_that_fills_the_memory(tmp_path: Path) -> None:
    """Others that take less keep theirs, though ended runs leave memory first."""
    async with open_output(tmp_path, memory_bytes=2 * MB) as store:
        with file_size_limit(1000):
            small = [await ended(store.session(f"small{number}"), "a", pieces=2) for number in range(4)]
            await fill(store.session("large").open("running"), 100)
            await wait_memory_below(store, 2 * MB)
            for number in range(40):
                await ended(store.session("large"), str(number), pieces=2)
            await wait_memory_below(store, 2 * MB)
        assert store.lost_bytes > 0
        assert [log.first_sequence for log in small] == [1] * 4


async def test_a_full_disk_costs_nothing_that_was_written_before(tmp_path: Path) -> None:
    """Output that lies in files leaves memory in place of what the disk does not take."""
    async with open_output(tmp_path, memory_bytes=2 * MB) as store:
        large = store.session("large")
        log = large.open("running")
        await fill(log, 30)
        await large.write(["running"])
        with file_size_limit(1000):
            small = await ended(store.session("small"), "a", pieces=8)
            await wait_memory_below(store, 2 * MB)
        assert (log.first_sequence, small.first_sequence, store.lost_bytes) == (1, 1, 0)
        log.close()
        assert await drain(log.reader()) == 30 * PIECE


async def test_a_viewer_that_lost_everything_holds_nobody(tmp_path: Path, nursery: trio.Nursery) -> None:
    """The viewer skips to the end of what there is, and the writer that was held goes on."""
    async with open_output(tmp_path, memory_bytes=KB) as store:
        log = store.session("session").open("a")
        viewer = log.reader(mode=ReaderMode.FASTEST)
        with file_size_limit(1000):
            nursery.start_soon(fill, log, 100)

            async def is_held() -> bool:
                return log.last_sequence == 16 and store.memory_bytes_used == 0

            await until(is_held)
            (piece,) = await take(viewer, 1)
        assert piece.sequence > 16
        assert viewer.skipped_bytes == (piece.sequence - 1) * len(PIECE)
        viewer.close()


async def test_files_that_were_damaged_are_gone(tmp_path: Path) -> None:
    """Damaged output is handed to nobody; the output behind it still is."""
    async with open_output(tmp_path, memory_bytes=MB) as store:
        log = await ended(store.session("session"), "a", pieces=60)
        await wait_memory_below(store, MB)
        viewer, reader = log.reader(mode=ReaderMode.FASTEST), log.reader()
        on_disk = len([block for block in log.kept.blocks if block.pieces is None])
        assert on_disk > 4
        for path in files(tmp_path):
            path.write_bytes(path.read_bytes()[:-1])
        rest = await drain(viewer)
        first = log.first_sequence
        assert first > 1
        assert viewer.skipped_bytes + len(rest) >= 60 * len(PIECE)
        assert rest.endswith(b"".join(numbered_piece(number) for number in range(first - 1, 60)))
        assert store.lost_bytes > 0
        with pytest.raises(ExecGone):
            await drain(reader)
        with pytest.raises(ExecGone):
            await log.read(OUT, 0, 10)


async def test_a_slice_ends_where_the_disk_fails(tmp_path: Path) -> None:
    """Output up to the failure is given; the next slice is told that it's gone."""
    async with open_output(tmp_path, memory_bytes=MB, session_bytes=16 * MB) as store:
        log = await ended(store.session("session"), "a", pieces=60)
        await wait_memory_below(store, MB)
        first_file = log.kept.blocks[0].parts[0].file
        second = next(block for block in log.kept.blocks if block.parts[0].file is not first_file)
        second.parts[0].file.path.unlink()
        part = await log.read(None, 0, 4 * MB)
        assert second.offset == len(part.data) == part.next_offset
        with pytest.raises(ExecGone):
            await log.read(None, part.next_offset, MB)


async def test_a_file_that_goes_before_it_is_read_is_no_failure(
    tmp_path: Path, nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    """The reader is told that it's gone; nothing is lost to the disk."""
    caplog.set_level(logging.ERROR)
    async with open_output(tmp_path, memory_bytes=MB) as store:
        logs = store.session("session")
        log = await ended(logs, "a", pieces=60)
        await wait_memory_below(store, MB)

        async def read() -> None:
            with pytest.raises(ExecGone):
                await drain(log.reader())

        reading = store._ledger.reading
        reading.total_tokens = 1
        async with reading:  # the thread that reads can't begin
            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            assert reading.statistics().tasks_waiting == 1
            await logs.destroy()

            async def is_removed() -> bool:
                return files(tmp_path) == []

            await until(is_removed)

        async def has_ended() -> bool:
            return not nursery.child_tasks

        await until(has_ended)
        assert (caplog.records, store.lost_bytes) == ([], 0)


async def test_a_cancelled_read_from_disk_loses_nothing(tmp_path: Path) -> None:
    """The reader goes on where it was, and nobody waits for the disk."""
    async with open_output(tmp_path, memory_bytes=MB) as store:
        log = await ended(store.session("session"), "a", pieces=40)
        await wait_memory_below(store, MB)
        reader = log.reader()
        got: list[bytes] = []
        while len(got) < 40:
            with trio.CancelScope() as scope:
                scope.cancel()
                while len(got) < 40:
                    got.append((await anext(reader)).data)
            if scope.cancelled_caught:
                got.append((await anext(reader)).data)
        assert [numbered_piece(number) for number in range(40)] == got
        reader.close()
