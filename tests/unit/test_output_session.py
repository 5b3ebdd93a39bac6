"""The logs of a session: ended runs give way first, running ones lose their oldest part, readers keep their tail."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing

from sandkasten.errors import ExecGone
from sandkasten.model import Stream
from sandkasten.output.log import WINDOW_BYTES, OutputLog
from sandkasten.output.store import RECORD_BYTES, OutputStore, SessionOutput
from tests.stores import MB, PIECE, drain, fill, take

OUT = Stream.STDOUT


@pytest.fixture
def logs(tmp_path: Path) -> SessionOutput:
    """Logs with a budget of 4 MiB, in memory: nothing is ever written to disk."""
    return OutputStore(tmp_path / "spool", session_bytes=4 * MB).session("session")


async def ended(logs: SessionOutput, exec_id: str, *, pieces: int) -> OutputLog:
    """A log of a run that wrote some pieces of 64 KiB and ended."""
    log = logs.open(exec_id)
    await fill(log, pieces)
    logs.retire(exec_id)
    return log


def sequences(log: OutputLog) -> tuple[int, int]:
    return log.first_sequence, log.last_sequence


async def test_an_ended_run_is_found_and_read(logs: SessionOutput) -> None:
    """The end of a run closes its log and changes nothing else."""
    log = await ended(logs, "a", pieces=2)
    assert log.is_closed
    assert logs.get("a") is log
    assert logs.get("b") is None
    assert (await log.read(None, 0, MB)).data == 2 * PIECE
    logs.retire("a")
    logs.retire("b")
    assert logs.get("a") is log


async def test_a_run_that_never_began_leaves_no_log(logs: SessionOutput) -> None:
    """The id is free at once, the log costs nothing, and nobody is told that it's gone."""
    gone: list[str] = []
    logs.when_gone(gone.append)
    log = logs.open("a")
    reader = log.reader()
    await log.append(OUT, b"x")
    logs.discard("a")
    logs.discard("a")
    logs.discard("unknown")
    assert logs.get("a") is None
    assert logs.bytes_used == 0
    assert await drain(reader) == b"x"
    assert logs.open("a") is not log
    assert gone == []


async def test_ended_runs_give_way_oldest_first(logs: SessionOutput) -> None:
    """Output that the budget has no room for is dropped, oldest first, and the owner of a dropped log is told."""
    gone: list[str] = []
    logs.when_gone(gone.append)
    for number in range(10):
        await ended(logs, str(number), pieces=16)
        assert logs.bytes_used <= 4 * MB
    assert [str(number) for number in range(6)] == gone
    assert [logs.get(exec_id) for exec_id in gone] == [None] * 6
    firsts = [log.first_sequence for number in range(6, 10) if (log := logs.get(str(number))) is not None]
    assert firsts[0] > 1
    assert firsts[1:] == [1, 1, 1]


async def test_an_id_is_free_again_once_its_log_is_gone(logs: SessionOutput) -> None:
    """A dropped log and its successor of the same name don't meet."""
    first = await ended(logs, "a", pieces=1)
    await ended(logs, "b", pieces=63)
    await ended(logs, "c", pieces=1)
    assert logs.get("a") is None
    second = logs.open("a")
    assert logs.get("a") is second is not first
    logs.retire("a")
    assert logs.get("a") is second


async def test_a_running_log_loses_its_oldest_part_after_the_ended_ones(logs: SessionOutput) -> None:
    """A long stream keeps its newest output, within the budget."""
    await ended(logs, "ended", pieces=4)
    log = logs.open("running")
    for _ in range(200):
        await fill(log, 1)
        assert logs.bytes_used <= 4 * MB
    first, last = sequences(log)
    assert logs.get("ended") is None
    assert last == 200
    assert 3 * MB < (last - first + 1) * len(PIECE) <= 4 * MB


async def test_tiny_pieces_are_packed(logs: SessionOutput) -> None:
    """A hundred thousand lines take little more than their bytes, and each keeps its number and its place."""
    log = logs.open("chatty")
    for number in range(100_000):
        await log.append(OUT, b"%06d\n" % number)
    assert log.first_sequence == 1
    assert logs.bytes_used < 1.5 * MB
    assert log.last_line == "099999"
    assert (await log.read(OUT, 7 * 65_432, 14)).data == b"065432\n065433\n"
    reader = log.reader(after=50_000)
    assert [piece.data for piece in await take(reader, 3000)] == [b"%06d\n" % n for n in range(50_000, 53_000)]
    reader.close()
    logs.retire("chatty")
    assert logs.bytes_used < 1.3 * MB
    assert log.last_line == "099999"


async def test_the_largest_running_log_is_cut_first(logs: SessionOutput) -> None:
    """A flood costs the flood's own past, not that of a quiet neighbour."""
    quiet, flood = logs.open("quiet"), logs.open("flood")
    await fill(quiet, 10)
    await fill(flood, 500)
    assert sequences(quiet) == (1, 10)
    assert flood.first_sequence > 400
    assert logs.bytes_used <= 4 * MB


async def test_what_a_holding_reader_needs_is_not_dropped(logs: SessionOutput, nursery: trio.Nursery) -> None:
    """A reader that joined late gets all from where it joined; its neighbour goes on meanwhile."""
    log, neighbour = logs.open("read"), logs.open("neighbour")
    await fill(log, 40)
    reader = log.reader()
    nursery.start_soon(fill, log, 60)
    await trio.testing.wait_all_tasks_blocked()
    await fill(neighbour, 100)
    assert sequences(log) == (1, 40)
    assert [piece.sequence for piece in await take(reader, 100)] == list(range(1, 101))
    assert logs.bytes_used <= 4 * MB
    reader.close()


async def test_a_log_that_is_held_takes_not_all_room_from_its_neighbours(logs: SessionOutput) -> None:
    """Every running log keeps its fair part; what exceeds the budget goes as soon as it can."""
    held, neighbour = logs.open("held"), logs.open("neighbour")
    await fill(held, 60)
    reader = held.reader()
    await fill(neighbour, 100)
    assert sequences(held) == (1, 60)
    assert 0.7 * MB < neighbour.kept.cost_bytes <= 1.1 * MB
    assert 4 * MB < logs.bytes_used < 5 * MB
    logs.retire("held")
    assert logs.get("held") is None
    assert logs.bytes_used <= 4 * MB
    reader.close()


async def test_a_reader_close_behind_still_gets_the_tail_of_a_dropped_log(logs: SessionOutput) -> None:
    """A reader that followed a run reads it to its end, whatever has become of it; nobody else finds it."""
    log = logs.open("a")
    early = log.reader()
    await fill(log, 10)
    logs.retire("a")
    await ended(logs, "b", pieces=63)
    assert logs.get("a") is None
    assert logs.bytes_used <= 4 * MB
    assert await drain(early) == 10 * PIECE


async def test_a_reader_that_held_the_run_is_close_behind(logs: SessionOutput, nursery: trio.Nursery) -> None:
    """The last piece that came before the run was held is of the largest size."""
    log = logs.open("a")
    reader = log.reader()
    await fill(log, 15)
    await log.append(OUT, 4 * PIECE)
    nursery.start_soon(fill, log, 1)
    await trio.testing.wait_all_tasks_blocked()
    assert log.last_sequence == 16
    logs.close()
    assert await drain(reader) == 19 * PIECE


async def test_a_reader_far_behind_loses_a_dropped_log(logs: SessionOutput) -> None:
    """The reader came when all was over and holds no room that running commands need."""
    log = await ended(logs, "a", pieces=40)
    late = log.reader()
    await take(late, 1)
    await ended(logs, "b", pieces=40)
    with pytest.raises(ExecGone):
        await drain(late)


async def test_memory_of_a_dropped_log_is_given_back_when_its_readers_leave(tmp_path: Path) -> None:
    """A tail that is kept for readers is counted, and gone with the last of them."""
    store = OutputStore(tmp_path, session_bytes=4 * MB)
    logs = store.session("session")
    log = logs.open("a")
    readers = [log.reader(), log.reader()]
    await fill(log, 10)
    logs.close()
    assert logs.bytes_used == 0
    assert 10 * len(PIECE) < store.memory_bytes_used
    assert await drain(readers[0]) == 10 * PIECE
    assert 10 * len(PIECE) < store.memory_bytes_used
    await take(readers[1], 6)
    assert store.memory_bytes_used < 8 * len(PIECE)
    readers[1].close()
    assert store.memory_bytes_used == 0


async def test_the_end_of_a_session_frees_its_writers_and_finishes_its_readers(
    logs: SessionOutput, nursery: trio.Nursery
) -> None:
    """A writer that is held goes on into the void; what comes now is counted and kept by nobody."""
    log = logs.open("a")
    reader, waiting = log.reader(), log.reader()
    await fill(log, WINDOW_BYTES // len(PIECE))
    await take(waiting, log.last_sequence)
    nursery.start_soon(fill, log, 10)
    nursery.start_soon(drain, waiting)
    await trio.testing.wait_all_tasks_blocked()
    written = log.last_sequence
    logs.close()
    logs.close()
    await trio.testing.wait_all_tasks_blocked()
    assert not nursery.child_tasks
    assert log.is_closed
    assert logs.get("a") is None
    assert written + 11 == (await log.append(OUT, b"x")).sequence
    assert written * PIECE == await drain(reader)
    log.close()
    logs.retire("a")


async def test_the_end_of_a_session_frees_a_writer_whose_reader_stands_still(
    logs: SessionOutput, nursery: trio.Nursery
) -> None:
    """Nothing that the reader does is needed for it."""
    log = logs.open("a")
    reader = log.reader()
    nursery.start_soon(fill, log, 100)
    await trio.testing.wait_all_tasks_blocked()
    assert nursery.child_tasks
    logs.close()
    await trio.testing.wait_all_tasks_blocked()
    assert not nursery.child_tasks
    reader.close()


async def test_logs_of_an_ended_session_keep_nothing(logs: SessionOutput) -> None:
    """A run that begins while its session ends writes into the void."""
    logs.close()
    log = logs.open("late")
    assert (await log.append(OUT, b"x")).sequence == 1
    assert (await log.append(OUT, b"x")).sequence == 2
    assert logs.get("late") is None
    assert logs.bytes_used == 0


async def test_a_session_is_new_after_its_end(tmp_path: Path) -> None:
    """The same logs are given until they are closed."""
    store = OutputStore(tmp_path)
    first = store.session("a")
    assert store.session("a") is first
    first.close()
    assert store.session("a") is not first


async def test_an_ended_run_costs_its_record_too(logs: SessionOutput) -> None:
    """Runs without any output are bounded by the same number of bytes; one with long texts costs as much more."""
    gone: list[str] = []
    logs.when_gone(gone.append)
    fitting = 4 * MB // RECORD_BYTES
    for number in range(fitting):
        logs.open(str(number))
        logs.retire(str(number))
    assert (gone, logs.bytes_used) == ([], fitting * RECORD_BYTES)
    logs.open("long")
    logs.retire("long", text_bytes=2 * RECORD_BYTES)
    assert gone == ["0", "1", "2"]
    assert 4 * MB - RECORD_BYTES < logs.bytes_used <= 4 * MB


async def test_the_end_of_a_session_with_very_many_runs_is_spread(tmp_path: Path, nursery: trio.Nursery) -> None:
    """Nobody finds them at once; what they take is given back while others run."""
    store = OutputStore(tmp_path)
    nursery.start_soon(store.run)
    logs = store.session("session")
    for number in range(3000):
        await ended(logs, str(number), pieces=0)
        await logs.open(f"{number}+").append(OUT, b"x")
        logs.retire(f"{number}+")
    gone: list[str] = []
    logs.when_gone(gone.append)
    await trio.testing.wait_all_tasks_blocked()
    logs.close()
    assert logs.get("2999+") is None
    assert logs.bytes_used > 0
    await trio.testing.wait_all_tasks_blocked()
    assert (logs.bytes_used, store.memory_bytes_used, gone) == (0, 0, [])
    nursery.cancel_scope.cancel()


async def test_records_of_all_sessions_have_a_bound_and_the_largest_gives_way(tmp_path: Path) -> None:
    """A session that has no more than its equal part loses nothing, however many the others end and however old."""
    store = OutputStore(tmp_path, records_bytes=100 * RECORD_BYTES)
    gone: list[tuple[str, str]] = []
    for session_id, runs in (("quiet", 30), ("busy", 500), ("late", 30)):
        logs = store.session(session_id)
        logs.when_gone(lambda exec_id, session_id=session_id: gone.append((session_id, exec_id)))  # type: ignore[misc]
        for number in range(runs):
            logs.open(str(number))
            logs.retire(str(number))
    assert gone == [("busy", str(number)) for number in range(30 + 500 + 30 - 100)]


async def test_an_ended_session_frees_the_room_of_its_records(tmp_path: Path, nursery: trio.Nursery) -> None:
    """Nobody gives way for what is not kept any more."""
    store = OutputStore(tmp_path, records_bytes=100 * RECORD_BYTES)
    nursery.start_soon(store.run)
    gone: list[str] = []
    for session_id in "abc":
        logs = store.session(session_id)
        logs.when_gone(gone.append)
        for number in range(100):
            logs.open(str(number))
            logs.retire(str(number))
        assert (gone, logs.bytes_used) == ([], 100 * RECORD_BYTES)
        logs.close()
        await trio.testing.wait_all_tasks_blocked()
    nursery.cancel_scope.cancel()
