"""Ended runs of an earlier daemon whose output PID 1 still has: nothing of it is lost, whatever PID 1 answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from runner.wire import protocol
from runner.wire.protocol import Kind
from sandkasten.actors.core import Ref
from sandkasten.actors.runs.adoption import RunAdoption
from sandkasten.actors.runs.persistence import LOAN_BYTES, LOAN_RUNS, Keep, facts_of, restored, state_of
from sandkasten.actors.runs.run import Run, RunRequest
from sandkasten.actors.runs.runs import Runs
from sandkasten.counters.cgroup import CgroupStats
from sandkasten.counters.metrics import Metrics
from sandkasten.errors import RunnerLost, RunnerProtocolError, SandkastenError, ShuttingDown
from sandkasten.journal.egress import EgressLogs, SessionDenials
from sandkasten.model import Cause, ExecSpec, Stream
from sandkasten.model.run import make_exec_id
from sandkasten.output.disk import Written
from sandkasten.output.records import RunFacts, RunState, Seal, facts_to_json
from sandkasten.output.store import OutputStore, SessionOutput
from tests.actors.test_record_cost import end_one
from tests.fakes.runner import answer
from tests.stores import MB, disk_bytes, file_size_limit
from tests.unit.test_output_disk import END, FACTS, SESSION
from tests.waiting import patience, until

SEAL = Seal(b"k" * 32, SESSION)
REPLY = protocol.ExecReply("a", 0, None, "exited", "/", 1, shell_restarted=False, cpu_us=1)


def facts_for(exec_id: str, *, shell: str | None = None) -> RunFacts:
    return attrs.evolve(FACTS, exec_id=exec_id, shell=shell, input="none", size=None)


def state_with(size_bytes: int, *, age_s: float = 0.0) -> RunState:
    ended_at = datetime.now(UTC) - timedelta(seconds=age_s)
    return RunState(ended_at, 7, END, ended_at, last_sequence=1, stdout_bytes=size_bytes)


class Connection:
    """One that answers AttachRun as told: with output and an end, a refusal, or not at all."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._frames: list[tuple[Kind, bytes]] = []

    async def send_request(self, request: protocol.AttachRun) -> None:
        await trio.lowlevel.checkpoint()
        self._request = request
        self._daemon.asked.append(request)
        self._told = self._daemon.told[request.exec_id]
        if isinstance(self._told, bytes):
            self._frames = [(Kind.STDOUT, self._told[request.stdout_offset :])]
        elif isinstance(self._told, list):
            self._frames = [(Kind.STDOUT, piece) for piece in self._told]

    async def receive_answer(self, *, deadline: float) -> Any:
        await trio.lowlevel.checkpoint()
        if self._told is None:
            raise RunnerLost("the sandbox's init did not answer in time")
        if isinstance(self._told, protocol.Error):
            return self._told
        return protocol.Attached(self._request.exec_id, self._request.stdout_offset, 0, 1)

    def spend_if_sending(self) -> None: ...

    async def receive(self, *, deadline: float) -> tuple[Kind, bytes]:
        await trio.lowlevel.checkpoint()
        if self._frames:
            return self._frames.pop(0)
        decoder = protocol.FrameDecoder(protocol.FROM_RUNNER, max_body_bytes=protocol.MAX_REQUEST_BYTES)
        decoder.feed(answer(REPLY))
        return next(decoder)


class Daemon:
    """A daemon's view of one session: its runs, its files, and PID 1, which has some ended runs."""

    def __init__(self, root: Path, output: SessionOutput, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self.output = output
        self.told: dict[str, bytes | list[bytes] | protocol.Error | None] = {}
        self.asked: list[object] = []
        self.shell: str | None = None
        """Shell of the runs that PID 1 shows tickets of."""
        self.session_id, self.cwd, self.link = SESSION, "/", self
        keep = Keep(SEAL, 900.0, 100)
        self.runs = Runs(
            self,  # type: ignore[arg-type]
            nsinit=Ref("nsinit"),
            stats=CgroupStats({"unified": str(root)}, SESSION),
            output=output,
            queue_length=1,
            metrics=Metrics(),
            keep=keep,
            denials=SessionDenials(EgressLogs(), SESSION),
        )
        self.adoption = RunAdoption(self, self.runs, keep, output, on_terminal=self._no_terminal)  # type: ignore[arg-type]

    def start_task(self, work: Callable[..., Awaitable[object]], *args: object) -> None:
        self._nursery.start_soon(work, *args)

    async def wake(self) -> None:
        raise AssertionError("nothing is cancelled")

    def emit(self, event: object, **data: object) -> None: ...

    def begin_activity(self) -> None: ...

    def end_activity(self) -> None: ...

    async def translate(self, error: SandkastenError) -> SandkastenError:
        return error

    has_died = trio.Event()
    cause_of_stop = Cause.DAEMON_RESTARTED

    async def find_victim(self, *_: object) -> None: ...

    async def ask_runner(self, request: object, kind: type, *, fd: int | None = None) -> object:
        await trio.lowlevel.checkpoint()
        self.asked.append(request)
        if isinstance(request, protocol.ForgetRuns):
            return protocol.Done()
        tickets = [(exec_id, SEAL.ticket(facts_to_json(facts_for(exec_id, shell=self.shell)))) for exec_id in self.told]
        entries = [protocol.RunEntry(n, *each, True, True, True) for n, each in enumerate(tickets, 1)]
        return protocol.RunList(tuple(entries), more=False)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        await trio.lowlevel.checkpoint()
        yield Connection(self)

    @property
    def forgotten(self) -> Sequence[str]:
        """The ids that PID 1 was told to forget."""
        return [each for request in self.asked if isinstance(request, protocol.ForgetRuns) for each in request.exec_ids]

    async def _no_terminal(self, run: Run) -> None:
        raise AssertionError("no terminal")


@asynccontextmanager
async def open_daemon(root: Path) -> AsyncIterator[Daemon]:
    store = OutputStore(root)
    await store.open({SESSION})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.run)
        yield Daemon(root, store.session(SESSION), nursery)
        await trio.sleep(0.3)  # the background write
        nursery.cancel_scope.cancel()
    store.close()


async def leave_records(root: Path, *exec_ids: str, state: RunState) -> None:
    """An earlier daemon wrote the records of ended runs, and no output."""
    store = OutputStore(root)
    await store.open({SESSION})
    output = store.session(SESSION)
    output.describe_with(lambda exec_id: (facts_for(exec_id), state))
    for exec_id in exec_ids:
        output.open(exec_id)
        output.note_changed(exec_id)
    await output.write(())
    store.close()


async def read_next(root: Path) -> Written:
    store = OutputStore(root)
    await store.open({SESSION})
    return await store.session(SESSION).read()


async def test_a_write_before_pid_1_answers_says_no_less_than_was_written(tmp_path: Path) -> None:
    """A daemon that is killed before it has fetched the output leaves the next one able to."""
    await leave_records(tmp_path, "a", state=state_with(100))
    async with open_daemon(tmp_path) as daemon:
        await daemon.adoption.recover()
        daemon.output.note_changed("a")
        await daemon.output.write(None)
    assert (await read_next(tmp_path)).runs["a"].state.stdout_bytes == 100
    async with open_daemon(tmp_path) as daemon:
        await daemon.adoption.recover()
        daemon.told = {"a": b"x" * 100}
        await daemon.adoption.resume()
        log = daemon.output.get("a")
        assert log is not None
        assert (await log.read(Stream.STDOUT, 0, 1000)).data == b"x" * 100
        await daemon.output.write(())
    assert (await read_next(tmp_path)).runs["a"].state.stdout_bytes == 100
    assert daemon.forgotten == []


@pytest.mark.parametrize("age_s", [0.0, 3600.0])
async def test_a_run_that_is_written_as_ended_never_begins_again(tmp_path: Path, age_s: float) -> None:
    """Also when its time is over, and its id is one that the server made: PID 1 is told to forget it."""
    exec_id = make_exec_id()
    await leave_records(tmp_path, exec_id, "chosen", state=state_with(0, age_s=age_s))
    async with open_daemon(tmp_path) as daemon:
        await daemon.adoption.recover()
        daemon.told = {exec_id: b"", "chosen": b""}
        await daemon.adoption.resume()
        assert daemon.runs.active == []
    assert sorted(daemon.forgotten) == sorted([exec_id, "chosen"])


async def test_runs_that_are_over_are_in_nobody_s_way(tmp_path: Path) -> None:
    """Of a session without records PID 1 shows the tickets of many ended commands: they are known again, with output
    and end, and by the first request none of them counts as a run that goes on or waits for the shell.
    """
    async with open_daemon(tmp_path) as daemon:
        await daemon.adoption.recover()
        daemon.shell = "default"
        daemon.told = {f"chosen-{number}": b"x" * 10 for number in range(50)}
        await daemon.adoption.resume()
        assert daemon.runs.active == []
        assert daemon.runs.shells.get("default").runs == []
        assert {run.info.stdout_bytes for run in map(daemon.runs.find, daemon.told)} == {10}


@pytest.mark.parametrize("code", ["NOT_RUNNING", "BAD_REQUEST", "TOO_MANY", "IO_ERROR"])
async def test_a_refusal_of_pid_1_costs_output_and_not_the_session(tmp_path: Path, code: Any) -> None:
    """The run keeps its end; the others get their output."""
    await leave_records(tmp_path, "a", "b", state=state_with(100))
    async with open_daemon(tmp_path) as daemon:
        await daemon.adoption.recover()
        daemon.told = {"a": protocol.Error(code, "no"), "b": b"x" * 100}
        await daemon.adoption.resume()
        assert daemon.runs.find("a").info.stdout_bytes == 100
        assert [daemon.output.get(each).first_sequence for each in ("a", "b")] == [2, 1]  # type: ignore[union-attr]
    assert daemon.forgotten == ["a"]


async def test_more_pieces_than_pid_1_keeps_cost_their_output(tmp_path: Path) -> None:
    """Three million of a byte each would be within the bytes of a run, and take a quarter of a gigabyte here."""
    pieces = protocol.KEPT_RUN_BYTES // protocol.KEPT_PIECE_BYTES + 2
    await leave_records(tmp_path, "a", state=state_with(pieces))
    async with open_daemon(tmp_path) as daemon:
        await daemon.adoption.recover()
        daemon.told = {"a": [b"x"] * pieces}
        await daemon.adoption.resume()
        log = daemon.output.get("a")
        assert log is not None
        assert (log.stdout_bytes, log.first_sequence > log.last_sequence) == (pieces, True)
        await until(lambda: has_forgotten(daemon, 1))


async def test_output_that_comes_too_late_is_the_next_daemon_s(tmp_path: Path) -> None:
    """PID 1 is not waited for a second time, keeps its runs, and the records say as much as before."""
    await leave_records(tmp_path, "a", "b", state=state_with(100))
    async with open_daemon(tmp_path) as daemon:
        await daemon.adoption.recover()
        daemon.told = {"a": None, "b": b"x" * 100}
        await daemon.adoption.resume()
        assert sum(isinstance(request, protocol.AttachRun) for request in daemon.asked) == 1
        assert all(log is not None and log.is_closed for log in map(daemon.output.get, ("a", "b")))
        await daemon.runs.persistence.leave()
    assert daemon.forgotten == []
    async with open_daemon(tmp_path) as daemon:
        await daemon.adoption.recover()
        daemon.told = {"a": b"y" * 100, "b": b"x" * 100}
        await daemon.adoption.resume()
        log = daemon.output.get("b")
        assert log is not None
        assert (await log.read(Stream.STDOUT, 0, 1000)).data == b"x" * 100


async def test_a_daemon_that_stops_writes_all_output(tmp_path: Path) -> None:
    """However much of it there is: a paused session's PID 1 may have to give it up."""
    await leave_records(tmp_path, "a", state=state_with(0))
    async with open_daemon(tmp_path) as daemon:
        await daemon.adoption.recover()
        log = daemon.output.open("b")
        for _ in range(160):
            await log.append(Stream.STDOUT, bytes(64 * 1024))
        daemon.runs.persistence.note_pause(is_paused=True)
        await daemon.runs.persistence.leave()
    assert disk_bytes(tmp_path) > 160 * 64 * 1024


async def test_pid_1_is_not_told_of_each_run_without_output(tmp_path: Path) -> None:
    """PID 1 hears of many at once, since a message wakes it as much as the run did; of a run with output, soon."""
    async with open_daemon(tmp_path) as daemon:
        persistence = daemon.runs.persistence
        ended = [end_one(daemon.output, number, ":") for number in range(17)]
        for run in ended[:16]:
            persistence.ended(run)
        await trio.sleep(0.3)
        assert daemon.forgotten == []
        persistence.ended(ended[16])
        await until(lambda: has_forgotten(daemon, 17))
        run = Run(RunRequest(ExecSpec(":", exec_id="with-output"), timeout_ms=1000))
        run.join(daemon.output.open(run.exec_id), cancel=lambda run, now: None, wake=trio.lowlevel.checkpoint)
        run.begin(1)
        await run.put(Stream.STDOUT, b"x")
        await daemon.output.write([run.exec_id])
        run.finish(attrs.evolve(END, exec_id=run.exec_id))
        persistence.ended(run)
        await until(lambda: has_forgotten(daemon, 18))


async def test_many_tiny_pieces_are_not_left_with_pid_1(tmp_path: Path) -> None:
    """PID 1 keeps less of them than of others, and so would give them up."""
    async with open_daemon(tmp_path) as daemon:
        for number in range(6):
            run = Run(RunRequest(ExecSpec(":", exec_id=f"tiny{number}"), timeout_ms=1000))
            daemon.runs._take(run)
            run.begin(1)
            for _ in range(LOAN_BYTES // protocol.KEPT_PIECE_BYTES // 6):
                await run.put(Stream.STDOUT, b"x")
            run.finish(attrs.evolve(END, exec_id=run.exec_id))
            daemon.runs._retire(run)
        await until(lambda: has_forgotten(daemon, 6))


async def test_no_more_ended_runs_are_left_with_pid_1_than_it_keeps(tmp_path: Path) -> None:
    """PID 1 may give up the oldest of 256, however little they wrote."""
    async with open_daemon(tmp_path) as daemon:
        for number in range(LOAN_RUNS + 1):
            run = Run(RunRequest(ExecSpec(":", exec_id=f"short{number}"), timeout_ms=1000))
            daemon.runs._take(run)
            run.begin(1)
            await run.put(Stream.STDOUT, b"x")
            run.finish(attrs.evolve(END, exec_id=run.exec_id))
            daemon.runs._retire(run)
        await until(lambda: has_forgotten(daemon, LOAN_RUNS + 1))


async def test_a_run_that_writes_faster_than_the_disk_is_held_up(tmp_path: Path) -> None:
    """Output that a daemon has and no file is never more than PID 1 keeps."""
    async with open_daemon(tmp_path) as daemon:
        run = Run(RunRequest(ExecSpec(":", exec_id="fast"), timeout_ms=1000))
        daemon.runs._take(run)
        run.begin(1)
        await daemon.output._writing.acquire()  # as a write that takes long
        with trio.move_on_after(0.5):
            for _ in range(100):
                await run.put(Stream.STDOUT, bytes(64 * 1024))
        assert MB <= run.output_bytes < protocol.KEPT_RUN_BYTES
        daemon.output._writing.release()
        with trio.fail_after(patience(10)):
            for _ in range(80):
                await run.put(Stream.STDOUT, bytes(64 * 1024))


async def test_a_disk_that_stays_full_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each write fails; the log may lie on the same disk."""
    async with open_daemon(tmp_path) as daemon:
        with file_size_limit(1):
            for number in range(20):
                daemon.runs.persistence.ended(end_one(daemon.output, number, ":"))
                assert not await daemon.runs.persistence.write()
        assert [record.message for record in caplog.records] == ["runs_not_written"]
        await daemon.runs.persistence.write()
        with file_size_limit(1):
            daemon.output.note_gone("gone")
            await daemon.runs.persistence.write()
        assert [record.message for record in caplog.records] == ["runs_not_written"] * 2


async def has_forgotten(daemon: Daemon, count: int) -> bool:
    return len(daemon.forgotten) == count


async def test_a_hostile_answer_ends_the_session(tmp_path: Path) -> None:
    """More output than PID 1 may keep is no refusal."""
    await leave_records(tmp_path, "a", state=state_with(100))
    async with open_daemon(tmp_path) as daemon:
        await daemon.adoption.recover()
        daemon.told = {"a": b"x" * (protocol.KEPT_RUN_BYTES + 1)}
        with pytest.raises(RunnerProtocolError):
            await daemon.adoption.resume()


async def test_the_facts_of_a_run_stay_and_a_run_without_an_end_has_no_time_of_it() -> None:
    """The input of a run is dropped at the end; a run that is left to the next daemon has not ended."""
    run = Run(RunRequest(ExecSpec("x", stdin=b"y" * 5000), timeout_ms=None))
    run.begin(1)
    before = facts_of(run, ())
    run.fail(ShuttingDown("the daemon stops"))
    assert run.request.spec.stdin is None
    assert facts_of(run, ()) == before
    assert (before.input, state_of(run).ended_at) == ("given", None)
    assert facts_of(restored(before, state_of(run)), ()).input == "given"
