"""The output store over its files: each byte is written once, and the next daemon has what was written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import attrs
import pytest
import trio

from sandkasten.errors import ExecGone
from sandkasten.model import Output, Stream
from sandkasten.output.blocks import PART_OVERHEAD_BYTES
from sandkasten.output.disk import FILE_BYTES, Written
from sandkasten.output.log import OutputLog
from sandkasten.output.records import RunFacts, RunState
from sandkasten.output.store import OutputStore, SessionOutput
from tests.stores import MB, PIECE, disk_bytes, ended, file_size_limit, files, fill, numbered_piece, open_output
from tests.stores import wait_memory_below as wait_memory
from tests.unit.test_output_disk import ENDED, FACTS, SESSION
from tests.waiting import until

R = TypeVar("R")
OUT, ERR = Stream.STDOUT, Stream.STDERR


def describe(exec_id: str) -> tuple[RunFacts, RunState]:
    return attrs.evolve(FACTS, exec_id=exec_id), ENDED


def described(store: OutputStore, session_id: str = SESSION) -> SessionOutput:
    output = store.session(session_id)
    output.describe_with(describe)
    return output


async def open_next(root: Path) -> tuple[SessionOutput, Written]:
    """The session's output as the next daemon finds it."""
    store = OutputStore(root)
    await store.open({SESSION})
    output = described(store)
    return output, await output.read()


async def recovered(output: SessionOutput, written: Written, exec_id: str) -> OutputLog:
    """The log of the last run that was to be recovered."""
    log = output.open(exec_id)
    await log.recover(written.runs[exec_id].parts, "")
    output.recovered_all()
    return log


async def test_nothing_is_written_while_runs_are_recovered(tmp_path: Path) -> None:
    """A statement at that moment would drop the runs that have no log yet."""
    async with open_output(tmp_path) as store:
        output = described(store)
        for exec_id in ("run/a", "run/b"):
            await ended(output, exec_id, pieces=1)
            output.note_changed(exec_id)
        await output.write(None)
    before = files(tmp_path)
    output, written = await open_next(tmp_path)
    output.open("run/a")
    output.note_changed("run/a")
    with pytest.raises(OSError, match="not taken over"):
        await output.write(None)
    assert files(tmp_path) == before
    await recovered(output, written, "run/b")
    await output.write(None)
    _, written = await open_next(tmp_path)
    assert list(written.runs) == ["run/a", "run/b"]


class CountingStore(OutputStore):
    """A store that counts what it does in threads."""

    jobs = 0

    async def in_thread(self, work: Callable[..., R], *args: Any) -> R:  # type: ignore[override]  # the same calls
        self.jobs += 1
        return await super().in_thread(work, *args)


async def has_all(settled: Sequence[object], names: Sequence[object]) -> bool:
    return len(settled) == len(names)


async def test_the_records_of_many_sessions_share_a_thread(tmp_path: Path) -> None:
    """All that are due in a round are written by a call for each 64 of them. A session that can't write fails alone,
    and has its records for the next round."""
    store = CountingStore(tmp_path)
    names = [f"{number:024x}" for number in range(100)]
    await store.open()
    outputs = [described(store, name) for name in names]
    settled: list[OSError | None] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.run)
        for output in outputs:
            output.open("a")
            output.note_changed("a")
            output.write_soon(partial(output.take_records, settled.append))
        store.jobs = 0
        in_its_place = tmp_path / f"{names[70]}.00000001.runs"
        in_its_place.mkdir()
        await until(lambda: has_all(settled, names))
        assert store.jobs == 2
        assert [type(error) for error in settled if error] == [FileExistsError]
        in_its_place.rmdir()
        await outputs[70].write()
        nursery.cancel_scope.cancel()
    store.close()
    again = OutputStore(tmp_path)
    await again.open(names)
    for name in names:
        assert list((await described(again, name).read()).runs) == ["a"]


async def test_the_records_of_many_sessions_leave_others_their_turns(tmp_path: Path) -> None:
    """After a restart the first record of each session comes with those of all its runs."""
    async with open_output(tmp_path) as store:
        settled: list[OSError | None] = []
        turn = 0
        seen: list[int] = []

        def describe_now(exec_id: str) -> tuple[RunFacts, RunState]:
            seen.append(turn)
            return describe(exec_id)

        for number in range(20):
            output = store.session(f"{number:024x}")
            output.describe_with(describe_now)
            for run in range(100):
                output.open(f"run/{run}")
            output.write_soon(partial(output.take_records, settled.append))
        while len(settled) < 20:
            turn += 1
            await trio.lowlevel.checkpoint()
        assert (len(seen), settled) == (2000, [None] * 20)
        assert max(Counter(seen).values()) <= 400  # two steps may follow each other


async def test_a_session_that_fails_in_its_turn_costs_no_other_its_records(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A failure before the records are written, or after, is told and goes no further."""
    store = OutputStore(tmp_path)
    await store.open()
    outputs = [described(store, f"{number:024x}") for number in range(3)]
    settled: list[OSError | None] = []

    def fail(*_: object) -> None:
        raise RuntimeError("its actor has ended")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.run)
        for turn in range(2):
            for output, on_settled in zip(outputs, (settled.append, fail, settled.append), strict=True):
                if not turn:
                    output.open("a")
                output.note_changed("a")
                output.write_soon(fail if turn and on_settled is fail else partial(output.take_records, on_settled))
            await until(lambda: has_all(settled, range(2 * turn + 2)))  # noqa: B023 - called at once
        nursery.cancel_scope.cancel()
    assert settled == [None] * 4
    assert len([each for each in caplog.records if each.exc_info]) == 2
    store.close()


async def test_output_is_written_once(tmp_path: Path) -> None:
    """Whether for the next daemon or for want of memory, bit by bit or in blocks; and it is read back in one piece."""
    async with open_output(tmp_path, memory_bytes=MB) as store:
        output = described(store)
        log = output.open("a")
        output.note_changed("a")
        expected = []
        for number in range(3000):
            expected.append(await log.append((OUT, ERR)[number % 2], b"%d;" % number * 300))
            if number % 7 == 0:
                await output.write(["a"])
        await wait_memory(store, MB)
        await output.write(["a"])
        log.close()
        size = sum(len(piece.data) for piece in expected)
        assert log.is_written
        assert size < disk_bytes(tmp_path) < 1.05 * size
        assert store.memory_bytes_used <= MB
        assert [piece async for piece in log.reader()] == expected
        assert store.lost_bytes == 0


async def test_each_part_in_a_file_counts_when_tiny_pieces_are_packed(tmp_path: Path) -> None:
    """A command that says a character in each round has a place in the file for each."""
    async with open_output(tmp_path) as store:
        output = described(store)
        log = output.open("run/slow")
        for _ in range(200):
            await log.append(OUT, b".")
            await output.write(["run/slow"])
        output.retire("run/slow")
        (block,) = log.kept.blocks
        assert (block.pieces, len(block.parts)) == (None, 200)
        assert store.memory_bytes_used > 200 * PART_OVERHEAD_BYTES
        assert output.bytes_used > 200 * PART_OVERHEAD_BYTES


async def test_the_next_daemon_has_what_was_written_without_reading_it(tmp_path: Path) -> None:
    """Output stays where it is, with its numbers and its offsets, and goes on behind its end."""
    async with open_output(tmp_path) as store:
        output = described(store)
        log = output.open("a")
        output.note_changed("a")
        await fill(log, 40)
        await log.append(ERR, b"last line")
        await output.write(["a"])
    before = disk_bytes(tmp_path)
    output, written = await open_next(tmp_path)
    again = await recovered(output, written, "a")
    assert (again.first_sequence, again.last_sequence, again.stderr_bytes) == (1, 41, 9)
    assert (again.last_line, again.kept.memory_bytes, again.is_written) == ("last line", 0, True)
    assert 40 * len(PIECE) < output.bytes_used < 41 * len(PIECE)
    assert (await again.append(OUT, b"more")) == Output(OUT, b"more", 42)
    again.close()
    assert b"".join([piece.data async for piece in again.reader(after=39)]) == PIECE + b"last linemore"
    assert disk_bytes(tmp_path) == before
    await output.write(["a"])
    assert len(files(tmp_path)) > 1
    _, written = await open_next(tmp_path)
    assert written.runs["a"].parts[-1][0].next_sequence == 43


async def test_a_run_that_is_dropped_leaves_its_id(tmp_path: Path) -> None:
    """The output goes from the disk; an id that a client chose is never forgotten, and costs one record."""
    async with open_output(tmp_path, session_bytes=4 * MB) as store:
        output = described(store)
        for number in range(20):
            exec_id = f"chosen-{number}"
            log = await ended(output, exec_id, pieces=12)
            output.note_changed(exec_id)
            await output.write([exec_id])
            assert log.is_written
            assert disk_bytes(tmp_path) <= 4 * MB + 2 * FILE_BYTES
        assert "chosen-0" in output.used
    _, written = await open_next(tmp_path)
    ids = [f"chosen-{number}" for number in range(20)]
    assert all((exec_id in written.used) != (exec_id in written.runs) for exec_id in ids)
    assert ids[0] in written.used
    assert ids[-1] in written.runs


async def test_a_quiet_run_pins_no_disk(tmp_path: Path) -> None:
    """Files that hold a little of what is needed go with the oldest of it, once all together take too much."""
    async with open_output(tmp_path, session_bytes=2 * MB) as store:
        output = described(store)
        quiet = output.open("quiet")
        for number in range(40):
            await quiet.append(OUT, b"%d\n" % number)
            await ended(output, str(number), pieces=16)
            await output.write(["quiet", str(number)])
        assert disk_bytes(tmp_path) < 6 * MB
        assert quiet.last_sequence == 40
        with pytest.raises(ExecGone):
            quiet.reader()


async def test_a_write_that_failed_is_made_up_for(tmp_path: Path) -> None:
    """The next one brings all records and all output; nothing is lost meanwhile."""
    async with open_output(tmp_path) as store:
        output = described(store)
        log = output.open("run/a")
        output.note_changed("run/a")
        output.note_gone("chosen")
        await fill(log, 4)
        with file_size_limit(1000), pytest.raises(OSError, match="File too large"):
            await output.write(["run/a"])
        assert (files(tmp_path), log.is_written, store.disk_bytes_used) == ([], False, 0)
        await output.write(["run/a"])
        assert (log.is_written, store.lost_bytes) == (True, 0)
        assert store.disk_bytes_used == disk_bytes(tmp_path)
    _, written = await open_next(tmp_path)
    assert (list(written.runs), "chosen" in written.used) == (["run/a"], True)
    assert written.runs["run/a"].parts[-1][0].next_sequence == 5


async def test_an_id_that_is_dropped_while_a_statement_is_made_stays_known(tmp_path: Path) -> None:
    """The statement names it among the used ids: a kill right behind the statement lets no command run twice."""
    async with open_output(tmp_path) as store:
        output = described(store)
        for number in range(300):
            await ended(output, f"chosen-{number}", pieces=0)

        def drop_last(exec_id: str) -> tuple[RunFacts, RunState] | None:
            if exec_id == "chosen-200":
                output.note_gone("chosen-299")
            return None if exec_id == "chosen-299" else describe(exec_id)

        output.describe_with(drop_last)
        await output.write()
    _, written = await open_next(tmp_path)
    assert "chosen-299" not in written.runs
    assert "chosen-299" in written.used


async def test_a_disk_that_stays_full_makes_no_list_of_what_is_gone_endless(tmp_path: Path) -> None:
    """The newest are told when the disk takes them; PID 1 can show no older ones again."""
    async with open_output(tmp_path, retention_s=0) as store:
        output = described(store)
        with file_size_limit(1):
            for number in range(6000):
                output.open(f"run/{number}")
                output.note_gone(f"gone/{number}")
                output.discard(f"run/{number}")
                if number % 1000 == 999:
                    with pytest.raises(OSError, match="File too large"):
                        await output.write()
        assert (len(output._gone), len(output._refused)) == (4096, 4096)
        assert output._gone[-1] == "gone/5999"


async def test_records_take_no_room_from_output(tmp_path: Path) -> None:
    """A session with many records and no output stands in nobody's way, neither while they are kept nor afterwards."""
    async with open_output(tmp_path, disk_bytes=4 * MB, session_bytes=64 * MB) as store:
        many, other = described(store), described(store, "b" * 24)
        while store.disk_bytes_used < 3.5 * MB:
            for number in range(1000):
                exec_id = f"{store.disk_bytes_used}-{number}"
                await ended(many, exec_id, pieces=0)
                many.note_changed(exec_id)
            await many.write()
        log = await ended(other, "run/a", pieces=20)
        await other.write(["run/a"])
        assert log.is_written
        assert store.lost_bytes == 0


async def test_records_are_written_when_output_passes_the_limit(tmp_path: Path) -> None:
    """A full share of the disk costs output, and no run its record."""
    async with open_output(tmp_path, disk_bytes=MB) as store:
        output = described(store)
        log = output.open("run/a")
        output.note_changed("run/a")
        await fill(log, 20)
        with pytest.raises(OSError, match="limit of output on disk"):
            await output.write(["run/a"])
        assert (log.first_sequence, log.is_written) == (1, False)
    _, written = await open_next(tmp_path)
    assert (list(written.runs), written.runs["run/a"].parts) == (["run/a"], [])


async def test_a_session_that_is_closed_and_opened_again_has_its_files(tmp_path: Path) -> None:
    """A session's actor that is started anew in the same daemon finds them as the next daemon would."""
    async with open_output(tmp_path) as store:
        output = described(store)
        log = await ended(output, "run/a", pieces=3)
        output.note_changed("run/a")
        await output.write(["run/a"])
        assert log.is_written
        output.close()
        again = described(store)
        log = await recovered(again, await again.read(), "run/a")
        log.close()
        assert [piece.data async for piece in log.reader()] == [numbered_piece(number) for number in range(3)]
        await again.destroy()
        assert files(tmp_path) == []
        assert not store.uses(f"{SESSION}.00000001.runs")


async def test_a_running_log_gives_way_where_dropping_ended_runs_would_free_no_file(tmp_path: Path) -> None:
    """A running log has parts in every file: ended runs are kept as far as there is room, and no write fails."""
    async with open_output(tmp_path, disk_bytes=4 * MB) as store:
        output = described(store)
        gone: list[str] = []
        output.when_gone(gone.append)
        running = output.open("running")
        for number in range(60):
            await fill(running, 1)
            await ended(output, str(number), pieces=1)
            output.note_changed(str(number))
            await output.write([str(number), "running"])
            assert store.disk_bytes_used <= 4 * MB
        for _ in range(40):
            await fill(running, 1)
            await output.write(["running"])
            assert store.disk_bytes_used <= 4 * MB
        assert gone == []
        assert running.is_written
        assert running.last_sequence - running.first_sequence > 20
        assert store.lost_bytes == 0
    _, written = await open_next(tmp_path)
    assert len(written.runs) == 61


async def test_after_a_restart_files_give_way_too(tmp_path: Path) -> None:
    """Also when their session has written nothing since; no other session loses anything."""
    sizes = (20, 4, 4)
    async with open_output(tmp_path, session_bytes=8 * MB) as store:  # files of 1 MiB
        for session_id, pieces in zip("abc", sizes, strict=True):
            output = described(store, session_id * 24)
            for exec_id in ("first", "second"):
                log = await ended(output, exec_id, pieces=pieces)
                output.note_changed(exec_id)
                await output.write([exec_id])
                assert log.is_written
    async with open_output(tmp_path, session_bytes=8 * MB, disk_bytes=disk_bytes(tmp_path) + MB // 4) as store:
        await store.open({session_id * 24 for session_id in "abc"})
        logs: dict[tuple[str, str], OutputLog] = {}
        for session_id in "abc":
            output = described(store, session_id * 24)
            written = await output.read()
            for exec_id in written.runs:
                logs[session_id, exec_id] = await recovered(output, written, exec_id)
                output.retire(exec_id)
        log = output.open("more")
        await fill(log, 8)
        await output.write(["more"])
        assert log.is_written
        assert [key for key, log in logs.items() if log.first_sequence > 1] == [("a", "first")]
        assert store.disk_bytes_used <= store.disk_limit_bytes
