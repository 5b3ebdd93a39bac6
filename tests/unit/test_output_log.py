"""One log: pieces are numbered and come in order, slow readers hold the writer as their mode says."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing

from sandkasten.errors import ExecGone
from sandkasten.model import Output, Stream
from sandkasten.output.log import CATCH_UP_S, WINDOW_BYTES, OutputLog, ReaderMode
from sandkasten.output.store import OutputStore
from tests.stores import KB, PIECE, drain, fill, take

OUT, ERR = Stream.STDOUT, Stream.STDERR
PIECES_HELD = WINDOW_BYTES // (64 * KB)
"""After so many pieces of 64 KiB that a reader did not take, the writer waits."""


@pytest.fixture
def log(tmp_path: Path) -> OutputLog:
    """A log in memory: nothing is ever written to disk."""
    return OutputStore(tmp_path / "spool").session("session").open("exec")


async def test_pieces_are_numbered_over_both_streams(log: OutputLog) -> None:
    """The numbers count from 1, the bytes count per stream."""
    assert Output(OUT, b"abc", 1) == await log.append(OUT, b"abc")
    assert Output(ERR, b"de", 2) == await log.append(ERR, b"de")
    assert (log.first_sequence, log.last_sequence, log.stdout_bytes, log.stderr_bytes) == (1, 2, 3, 2)
    log.close()
    assert log.is_closed
    assert await drain(log.reader()) == b"abcde"


async def test_appending_with_room_gives_the_loop_no_turn(log: OutputLog) -> None:
    """The writer of a short command is not slowed down."""
    with trio.testing.assert_no_checkpoints():
        await fill(log, 100)


async def test_reading_what_is_there_gives_the_loop_a_turn_for_many_pieces_alone(log: OutputLog) -> None:
    """A reader of a long output is not slowed down either."""
    await fill(log, 15, data=b"x")
    reader = log.reader()
    with trio.testing.assert_no_checkpoints():
        await take(reader, 15)
    reader.close()


async def test_readers_follow_each_from_where_it_joined(log: OutputLog, nursery: trio.Nursery) -> None:
    """Several readers at once get everything behind the piece they named, live."""
    got: dict[int, bytes] = {}

    async def follow(after: int) -> None:
        got[after] = await drain(log.reader(after=after))

    await log.append(OUT, b"a")
    await log.append(ERR, b"b")
    for after in (0, 1, 2):
        nursery.start_soon(follow, after)
    await trio.testing.wait_all_tasks_blocked()
    await log.append(OUT, b"c")
    await trio.testing.wait_all_tasks_blocked()
    assert got == {}
    log.close()
    await trio.testing.wait_all_tasks_blocked()
    assert got == {0: b"abc", 1: b"bc", 2: b"c"}


async def test_a_number_that_is_not_given_yet_means_the_next_piece(log: OutputLog) -> None:
    """A reader with a number of another run waits for what comes instead of for ever."""
    await log.append(OUT, b"a")
    reader = log.reader(after=1000)
    assert reader.sequence == 1
    await log.append(OUT, b"b")
    assert [Output(OUT, b"b", 2)] == await take(reader, 1)
    reader.close()


async def test_a_log_of_an_earlier_daemon_catches_up(
    log: OutputLog, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """A client that has a piece that was not written waits for the piece; one that asks for too much, not for long."""
    caught_up = trio.Event()

    async def wait() -> None:
        await log.catch_up(2)
        caught_up.set()

    await log.append(OUT, b"a")
    await log.catch_up(2)  # a log of this daemon has all that was sent
    log.note_earlier()
    nursery.start_soon(wait)
    await trio.testing.wait_all_tasks_blocked()
    assert not caught_up.is_set()
    await log.append(OUT, b"b")
    await caught_up.wait()
    began = trio.current_time()
    await log.catch_up(9)
    assert trio.current_time() - began == CATCH_UP_S
    log.close()
    await log.catch_up(9)


async def test_a_slow_reader_holds_the_writer_until_it_reads(log: OutputLog, nursery: trio.Nursery) -> None:
    """The writer goes on piece by piece as the reader does."""
    reader = log.reader()
    nursery.start_soon(fill, log, 100)
    await trio.testing.wait_all_tasks_blocked()
    assert log.last_sequence == PIECES_HELD
    await take(reader, 3)
    await trio.testing.wait_all_tasks_blocked()
    assert log.last_sequence == PIECES_HELD + 3
    await take(reader, 97)
    assert log.last_sequence == 100
    reader.close()


async def test_closing_the_reader_frees_the_writer(log: OutputLog, nursery: trio.Nursery) -> None:
    """A reader that leaves holds nothing."""
    reader = log.reader()
    nursery.start_soon(fill, log, 100)
    await trio.testing.wait_all_tasks_blocked()
    assert log.last_sequence == PIECES_HELD
    reader.close()
    reader.close()
    await trio.testing.wait_all_tasks_blocked()
    assert log.last_sequence == 100


async def test_the_slowest_of_the_holding_readers_counts(log: OutputLog, nursery: trio.Nursery) -> None:
    """One that keeps up does not help one that doesn't."""
    slow, quick = log.reader(), log.reader()
    nursery.start_soon(fill, log, 100)
    await take(quick, PIECES_HELD)
    await trio.testing.wait_all_tasks_blocked()
    assert log.last_sequence == PIECES_HELD
    slow.close()
    await take(quick, 100 - PIECES_HELD)
    quick.close()


async def test_tiny_pieces_count_for_what_they_cost(log: OutputLog, nursery: trio.Nursery) -> None:
    """A flood of single bytes holds the writer long before a mebibyte of them is in memory."""
    reader = log.reader()
    nursery.start_soon(lambda: fill(log, 20_000, data=b"x"))
    await trio.testing.wait_all_tasks_blocked()
    assert 5_000 < log.last_sequence < 10_000
    reader.close()


async def test_a_terminal_runs_at_the_speed_of_its_fastest_viewer(log: OutputLog, nursery: trio.Nursery) -> None:
    """The writer waits for the first of them, and not for the others."""
    slow, quick = (log.reader(mode=ReaderMode.FASTEST) for _ in range(2))
    nursery.start_soon(fill, log, 100)
    await trio.testing.wait_all_tasks_blocked()
    assert log.last_sequence == PIECES_HELD
    await take(quick, 100)
    assert log.last_sequence == 100
    quick.close()
    slow.close()


async def test_a_terminal_without_a_viewer_runs_freely(log: OutputLog, nursery: trio.Nursery) -> None:
    """When the last one that lags leaves, the writer goes on."""
    viewer = log.reader(mode=ReaderMode.FASTEST)
    nursery.start_soon(fill, log, 100)
    await trio.testing.wait_all_tasks_blocked()
    viewer.close()
    await trio.testing.wait_all_tasks_blocked()
    assert log.last_sequence == 100


async def test_a_cancelled_step_loses_nothing(log: OutputLog) -> None:
    """A reader that was cancelled while it waited, or while there was much to take, goes on where it was."""
    reader = log.reader()
    with trio.move_on_after(0) as scope:
        await anext(reader)
    assert scope.cancelled_caught
    await fill(log, 50, data=b"xy")
    log.close()
    got: list[int] = []
    cancellations = 0
    while not got or got[-1] < 50:
        with trio.CancelScope() as scope:
            scope.cancel()
            async for piece in reader:
                got.append(piece.sequence)
        cancellations += scope.cancelled_caught
        got += [piece.sequence for piece in await take(reader, min(1, 50 - reader.sequence))]
    assert list(range(1, 51)) == got
    assert cancellations > 0
    reader.close()


async def test_a_reader_with_much_to_take_lets_others_run(log: OutputLog) -> None:
    """Iterating over what is in memory gives the loop its turn."""
    await fill(log, 100)
    log.close()
    with trio.testing.assert_checkpoints():
        await drain(log.reader())


async def test_closing_a_reader_ends_its_waiting(log: OutputLog, nursery: trio.Nursery) -> None:
    """The reader tells that it was closed, and so does every later use."""
    reader = log.reader()

    async def wait() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await anext(reader)

    nursery.start_soon(wait)
    await trio.testing.wait_all_tasks_blocked()
    reader.close()
    await trio.testing.wait_all_tasks_blocked()
    assert not nursery.child_tasks
    with pytest.raises(trio.ClosedResourceError):
        await anext(reader)


async def test_output_is_read_by_offset(log: OutputLog) -> None:
    """Of one stream or of both, whatever pieces it came in; past the end there is nothing, and no waiting."""
    for stream, data in ((OUT, b"abc"), (ERR, b"12"), (OUT, b"def"), (ERR, b"345")):
        await log.append(stream, data)
    both = await log.read(None, 2, 5)
    assert (
        both.data,
        both.offset,
        both.next_offset,
        both.first_offset,
        both.total_bytes,
        both.is_final,
    ) == (b"c12de", 2, 7, 0, 11, False)
    assert (await log.read(OUT, 2, 3)).data == b"cde"
    assert (await log.read(ERR, 1, 100)).data == b"2345"
    past = await log.read(OUT, 50, 10)
    assert (past.data, past.offset, past.next_offset, past.total_bytes, past.is_final) == (b"", 50, 50, 6, False)
    log.close()
    assert not (await log.read(OUT, 0, 5)).is_final
    assert (await log.read(OUT, 0, 6)).is_final
    assert (await log.read(OUT, 6, 6)).is_final


@pytest.mark.parametrize(
    ("pieces", "line"),
    [
        ([], ""),
        ([(OUT, b"one\ntwo\n")], "two"),
        ([(OUT, b"one\ntw"), (OUT, b"o")], "two"),
        ([(OUT, b"two"), (OUT, b"\r\n")], "two"),
        ([(OUT, b"10%\r20%\r")], "20%"),
        ([(OUT, b"out"), (ERR, b"err")], "err"),
        ([(OUT, b"\xff\xc3"), (OUT, b"\xbc")], "\N{REPLACEMENT CHARACTER}ü"),
        ([(OUT, b"x" * 5000)], "x" * 200),
        ([(OUT, "ü".encode() * 5000)], "ü" * 200),
    ],
)
async def test_the_last_line_is_that_of_what_came_last(
    log: OutputLog, pieces: list[tuple[Stream, bytes]], line: str
) -> None:
    """Cut in pieces or not, at most 200 characters of it, and never an error about bytes."""
    for stream, data in pieces:
        await log.append(stream, data)
    assert line == log.last_line


async def test_what_is_dropped_is_said_to_be_gone(tmp_path: Path) -> None:
    """Readers and slices behind the first piece that is kept are told where it is; a viewer begins there."""
    log = OutputStore(tmp_path, session_bytes=256 * KB).session("session").open("exec")
    await fill(log, 100)
    first = log.first_sequence
    assert 90 < first < 101
    with pytest.raises(ExecGone) as gone:
        log.reader(after=first - 2)
    assert {"first_sequence": first} == gone.value.details
    with pytest.raises(ExecGone) as gone:
        await log.read(None, (first - 1) * len(PIECE) - 1, 10)
    assert {"first_offset": (first - 1) * len(PIECE)} == gone.value.details
    assert (await log.read(None, (first - 1) * len(PIECE), 2)).data == b"01"
    log.close()
    kept = PIECE * (100 - first + 1)
    assert kept == await drain(log.reader(after=first - 1))
    viewer = log.reader(mode=ReaderMode.FASTEST)
    assert kept == await drain(viewer)
    assert viewer.skipped_bytes == 0


async def test_a_viewer_that_falls_behind_skips_and_says_how_much(tmp_path: Path) -> None:
    """The viewer goes on with the first piece that is kept."""
    log = OutputStore(tmp_path, session_bytes=256 * KB).session("session").open("exec")
    slow, quick = (log.reader(mode=ReaderMode.FASTEST) for _ in range(2))
    await fill(log, 1)
    await take(slow, 1)
    for _ in range(99):
        await fill(log, 1)
        await take(quick, 1)
    first = log.first_sequence
    assert first > 90
    (piece,) = await take(slow, 1)
    assert (first, (first - 2) * len(PIECE)) == (piece.sequence, slow.skipped_bytes)
    log.close()
    await drain(slow)
    assert (first - 2) * len(PIECE) == slow.skipped_bytes
    quick.close()
