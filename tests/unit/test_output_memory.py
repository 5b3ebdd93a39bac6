"""The output store on a real disk: memory and files stay within their bounds, and what was written comes back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import trio
import trio.testing

from sandkasten.errors import ExecGone
from sandkasten.model import Stream
from sandkasten.output.log import OutputLog
from sandkasten.output.store import OutputStore, SessionOutput
from tests.stores import (
    KB,
    MB,
    PIECE,
    contents,
    disk_bytes,
    drain,
    ended,
    files,
    fill,
    numbered_piece,
    open_output,
    take,
    wait_memory_below,
)
from tests.waiting import until

OUT = Stream.STDOUT
SESSION = "a" * 24


async def ended_with(logs: SessionOutput, exec_id: str, data: bytes) -> None:
    await logs.open(exec_id).append(OUT, data)
    logs.retire(exec_id)


async def test_short_runs_touch_no_file(tmp_path: Path) -> None:
    """As long as there is memory, output stays there."""
    async with open_output(tmp_path) as store:
        logs = store.session("session")
        for number in range(100):
            await ended(logs, str(number), pieces=1)
        await trio.testing.wait_all_tasks_blocked()
        assert files(tmp_path) == []
        assert store.disk_bytes_used == 0


async def test_ended_runs_go_to_disk_first_and_are_read_from_there(tmp_path: Path) -> None:
    """Output that memory has no room for is read back exactly, from any number and any offset."""
    async with open_output(tmp_path, memory_bytes=4 * MB) as store:
        logs = store.session(SESSION)
        old = await ended(logs, "../../../../etc/passwd", pieces=40)
        running = logs.open("/dev/null")
        await fill(running, 40)
        await wait_memory_below(store, 4 * MB)
        assert old.kept.memory_bytes < MB
        assert running.kept.memory_bytes > 40 * len(PIECE)
        assert store.disk_bytes_used == disk_bytes(tmp_path) > MB
        assert all(re.fullmatch(r"a{24}\.[0-9a-f]{8}\.(runs|out)", path.name) for path in files(tmp_path))
        assert [numbered_piece(number) for number in range(40)] == [piece.data async for piece in old.reader()]
        assert [numbered_piece(number) for number in range(7, 40)] == [
            piece.data async for piece in old.reader(after=7)
        ]
        joined = old.reader(after=6)
        await take(joined, 1)
        assert joined.offset == 7 * len(PIECE)
        joined.close()
        slice_ = await old.read(OUT, 3 * len(PIECE) - 16, 48)
        assert slice_.data == b"%016d%016d%016d" % (2, 3, 3)
        assert old.last_line[-16:] == "0" * 14 + "39"


async def test_one_file_takes_many_short_runs(tmp_path: Path) -> None:
    """The disk sees few large files, not one for each command."""
    async with open_output(tmp_path, memory_bytes=MB) as store:
        logs = store.session("session")
        ended_logs = []
        for number in range(1000):
            log = logs.open(str(number))
            await log.append(OUT, b"%d" % number * 300)
            logs.retire(str(number))
            ended_logs.append(log)
        await wait_memory_below(store, MB)
        assert 0 < len(files(tmp_path)) <= 3
        for number, log in enumerate(ended_logs):
            assert b"%d" % number * 300 == await drain(log.reader())


@pytest.mark.parametrize("has_reader", [False, True])
async def test_a_long_stream_grows_neither_memory_nor_disk(tmp_path: Path, has_reader: bool) -> None:
    """Far more than all budgets flows through while memory and files stay within theirs."""
    memory, session = 2 * MB, 8 * MB
    got = 0

    async def follow(log: OutputLog) -> None:
        nonlocal got
        async for piece in log.reader():
            got += len(piece.data)

    async with (
        open_output(tmp_path, memory_bytes=memory, session_bytes=session) as store,
        trio.open_nursery() as nursery,
    ):
        logs = store.session("session")
        log = logs.open("stream")
        if has_reader:
            nursery.start_soon(follow, log)
        for _ in range(1000):
            await fill(log, 1)
            assert store.memory_bytes_used <= 1.5 * memory + 2 * len(PIECE)
            assert logs.bytes_used <= session
            assert store.disk_bytes_used <= session + 2 * MB
        log.close()
        logs.retire("stream")
        assert log.first_sequence > 1000 - session // len(PIECE)
    assert got == (1000 * len(PIECE) if has_reader else 0)


async def test_many_streams_at_once_share_the_memory(tmp_path: Path) -> None:
    """Each writer gets on, and together they stay within the bounds."""
    memory, streams = 2 * MB, 10
    async with open_output(tmp_path, memory_bytes=memory) as store, trio.open_nursery() as nursery:
        highest = 0

        async def write(log: OutputLog) -> None:
            nonlocal highest
            for number in range(50):
                await log.append(OUT, numbered_piece(number))
                highest = max(highest, store.memory_bytes_used)
                await trio.lowlevel.checkpoint()
            log.close()

        logs = [store.session(str(number % 4)).open(str(number)) for number in range(streams)]
        for log in logs:
            nursery.start_soon(write, log)
        whole = b"".join(numbered_piece(number) for number in range(50))
        for log in logs:
            assert whole == await drain(log.reader())
        assert highest <= 1.5 * memory + streams * 2 * len(PIECE)


async def test_a_writer_waits_for_the_disk(tmp_path: Path, nursery: trio.Nursery) -> None:
    """When memory is full and nothing is written, a writer stands still instead of filling it."""
    store = OutputStore(tmp_path / "spool", memory_bytes=MB)
    await store.open()
    log = store.session("session").open("a")
    nursery.start_soon(fill, log, 100)
    await trio.testing.wait_all_tasks_blocked()
    assert 1.25 * MB < store.memory_bytes_used < 1.5 * MB
    assert log.last_sequence < 25
    nursery.start_soon(store.run)
    assert b"".join([piece.data for piece in await take(log.reader(), 100)]) == 100 * PIECE
    nursery.cancel_scope.cancel()
    store.close()


async def test_a_small_writer_does_not_wait_for_those_that_fill_the_memory(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    """Each log has its share, whatever the others hold."""
    store = OutputStore(tmp_path / "spool", memory_bytes=MB)
    logs = store.session("session")
    for name in "abc":
        nursery.start_soon(fill, logs.open(name), 100)
    await trio.testing.wait_all_tasks_blocked()
    assert store.memory_bytes_used > 1.25 * MB
    small = logs.open("small")
    with trio.testing.assert_no_checkpoints():
        await fill(small, 1)
    assert small.last_sequence == 1
    nursery.cancel_scope.cancel()


async def test_what_is_dropped_while_it_is_written_leaves_no_file(tmp_path: Path) -> None:
    """A file nobody needs any more when it is there is removed at once."""
    async with open_output(tmp_path, memory_bytes=MB) as store:
        logs = store.session("session")
        store._writing.total_tokens = 1
        async with store._writing:  # the thread that writes can't begin
            await ended(logs, "a", pieces=15)
            await ended(logs, "b", pieces=5)
            await trio.testing.wait_all_tasks_blocked()
            assert store._writing.statistics().tasks_waiting == 1
            logs.close()
        await logs.destroy()
        await trio.testing.wait_all_tasks_blocked()

        async def is_at_rest() -> bool:
            return store._writing.statistics().borrowed_tokens == 0

        await until(is_at_rest)
        assert files(tmp_path) == []
        assert (store.memory_bytes_used, store.disk_bytes_used, store.lost_bytes) == (0, 0, 0)


async def test_sessions_go_to_disk_in_turn(tmp_path: Path) -> None:
    """The oldest of each leaves memory first, not all of one session."""
    async with open_output(tmp_path, memory_bytes=4 * MB) as store:
        logs = [await ended(store.session(name), "a", pieces=38) for name in ("first", "second")]
        await wait_memory_below(store, 3 * MB)
        assert all(log.kept.blocks[0].pieces is None for log in logs)
        assert all(log.kept.blocks[-1].pieces is not None for log in logs)


async def test_sessions_share_no_file(tmp_path: Path) -> None:
    """Output of one session does not stay because of another, however their commands took turns."""
    async with open_output(tmp_path, memory_bytes=MB) as store:
        first, second = store.session("first"), store.session("second")
        for number in range(500):
            await ended_with(first, str(number), b"x" * 3000)
            await ended_with(second, str(number), b"y" * 3000)
        await wait_memory_below(store, MB)
        assert 4 <= len(files(tmp_path)) <= 8
        await second.destroy()

        async def only_the_others_are_left() -> bool:
            return all(path.name.startswith("first.") for path in files(tmp_path))

        await until(only_the_others_are_left)
        assert not any(b"y" * 100 in content for content in contents(tmp_path))
        assert all(first.get(str(number)) for number in range(500))


async def test_files_go_when_what_they_hold_goes(tmp_path: Path) -> None:
    """The end of a session removes its files and no others."""
    async with open_output(tmp_path, memory_bytes=MB) as store:
        first, second = store.session("first"), store.session("second")
        await ended(first, "a", pieces=40)
        await ended(second, "b", pieces=40)
        await wait_memory_below(store, MB)
        both = store.disk_bytes_used
        await first.destroy()

        async def is_removed() -> bool:
            return store.disk_bytes_used == disk_bytes(tmp_path) < both

        await until(is_removed)
        log = second.get("b")
        assert log is not None
        assert 40 * len(PIECE) == len(await drain(log.reader()))
        await second.destroy()

        async def is_empty() -> bool:
            return store.disk_bytes_used == 0 and files(tmp_path) == []

        await until(is_empty)
        assert (store.memory_bytes_used, store.lost_bytes) == (0, 0)


async def test_a_tail_on_disk_is_kept_for_a_reader_close_behind(tmp_path: Path) -> None:
    """A session that ended leaves a reader its rest, wherever it lies, and no file once that was read."""
    async with open_output(tmp_path, memory_bytes=512 * KB) as store:
        logs = store.session("session")
        log = logs.open("a")
        reader = log.reader()
        for number in range(16):
            await log.append(OUT, numbered_piece(number))
        logs.retire("a")
        await wait_memory_below(store, 512 * KB)
        await logs.destroy()
        assert b"".join(numbered_piece(number) for number in range(16)) == await drain(reader)

        async def is_empty() -> bool:
            return store.disk_bytes_used == 0 and files(tmp_path) == []

        await until(is_empty)
        assert store.memory_bytes_used == 0


async def test_the_disk_limit_holds_over_all_sessions(tmp_path: Path) -> None:
    """The session whose files take most gives up the oldest one. A running log that takes more than all others loses
    its own output, costs them nothing below their equal part, and does not have to wait."""
    async with open_output(tmp_path, memory_bytes=MB, disk_bytes=4 * MB) as store:
        small = await ended(store.session("small"), "small", pieces=4)
        await store.session("small").write(None)
        logs = []
        for number in range(5):
            logs.append(await ended(store.session(str(number)), str(number), pieces=28))
            await wait_memory_below(store, MB)
            assert store.disk_bytes_used <= 4 * MB
        assert [log.first_sequence for log in logs] == [29, 29, 29, 1, 1]
        assert store.lost_bytes == 0
        log = store.session("last").open("running")
        await fill(log, 200)
        await wait_memory_below(store, MB)
        assert store.disk_bytes_used <= 4 * MB
        assert log.last_sequence == 200 > log.last_sequence - log.first_sequence > 20
        assert (small.first_sequence, store.lost_bytes) == (1, 0)


async def test_readers_of_dropped_logs_do_not_fill_the_memory(tmp_path: Path) -> None:
    """Dropped logs go after all else, the oldest first, and their readers are told."""
    async with open_output(tmp_path, memory_bytes=4 * MB) as store:
        readers = []
        for number in range(8):
            logs = store.session(str(number))
            log = logs.open("a")
            readers.append(log.reader())
            await fill(log, 14)
            logs.close()
            assert store.memory_bytes_used < 5 * MB
            await trio.testing.wait_all_tasks_blocked()
        assert 2 * MB < store.memory_bytes_used <= 4 * MB
        with pytest.raises(ExecGone):
            await drain(readers[0])
        assert await drain(readers[-1]) == 14 * PIECE
        assert store.lost_bytes == 0


async def test_a_reader_that_stands_still_costs_other_sessions_nothing(tmp_path: Path) -> None:
    """The oldest file of the session that has to give up a file goes, though it is needed, and the reader is told."""
    async with open_output(tmp_path, memory_bytes=MB, disk_bytes=12 * MB) as store:
        large, small = store.session("large"), store.session("small")
        log = await ended(large, "dropped", pieces=40)
        await wait_memory_below(store, MB)
        reader = log.reader(after=30)
        large.drop_oldest()
        for number in range(12):
            await ended(large, str(number), pieces=16)
        kept = [await ended(small, str(number), pieces=16) for number in range(4)]
        await wait_memory_below(store, MB)
        assert [each.first_sequence for each in kept] == [1] * 4
        assert store.disk_bytes_used <= 12 * MB
        with pytest.raises(ExecGone):
            await drain(reader)
        assert store.lost_bytes == 0


async def test_closing_frees_everyone(tmp_path: Path) -> None:
    """At the stop of the daemon nobody waits, and files stay for the next one."""
    root = tmp_path / "spool"
    async with trio.open_nursery() as nursery, open_output(root, memory_bytes=MB) as store:
        log = store.session("session").open("a")
        reader = log.reader()
        nursery.start_soon(fill, log, 100)
        await trio.testing.wait_all_tasks_blocked()
        await wait_memory_below(store, MB)
    assert files(root) != []
    assert log.is_closed
    reader.close()
