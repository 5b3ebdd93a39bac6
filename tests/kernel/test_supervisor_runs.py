"""Runs on the real kernel: joined, detached, fed, signalled, cancelled, and read long after."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

import attrs
import pytest
import trio

from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import open_supervisor
from sandkasten.config import Config, RunsSettings
from sandkasten.errors import (
    Conflict,
    ExecEnded,
    ExecGone,
    ExecNotFound,
    InvalidRequest,
    SandkastenError,
    ShellBusy,
)
from sandkasten.model import (
    Cause,
    ExecSpec,
    ExecState,
    Limits,
    OnDisconnect,
    Output,
    ProcessSpec,
    SessionPatch,
    SessionSpec,
    ShellSpec,
    Stream,
    StreamsMode,
    WaitFor,
)
from sandkasten.supervisor import ExecStream
from tests.waiting import patience, until

SIGINT, SIGUSR1 = 2, 10


@pytest.fixture
async def session_id(supervisor: LocalSupervisor) -> str:
    return (await supervisor.create(SessionSpec())).id


async def has_ended(supervisor: LocalSupervisor, session_id: str, exec_id: str) -> bool:
    return (await supervisor.get_exec(session_id, exec_id)).state is ExecState.ENDED


def joined(pieces: Sequence[Output]) -> bytes:
    return b"".join(piece.data for piece in pieces)


async def test_a_repeat_gets_the_result_of_the_first(supervisor: LocalSupervisor, session_id: str) -> None:
    """The same id and command never run twice, and both callers read the same."""
    spec = ExecSpec("echo run >> /tmp/count; echo out; echo err >&2", exec_id="mine")
    first = await supervisor.exec(session_id, spec)
    second = await supervisor.exec(session_id, spec)
    assert (second.output, second.stdout, second.stderr) == (first.output, first.stdout, first.stderr)
    assert second.end == first.end
    assert (await supervisor.exec(session_id, ExecSpec("cat /tmp/count"))).stdout == b"run\n"


async def test_two_at_once_with_one_id_are_one_run(supervisor: LocalSupervisor, session_id: str) -> None:
    """The second joins the first while it is running."""
    spec = ExecSpec("echo run >> /tmp/count; sleep 0.3; echo done", exec_id="mine")
    outputs: list[bytes] = []

    async def run() -> None:
        outputs.append((await supervisor.exec(session_id, spec)).output)

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(run)
    assert outputs == [b"done\n"] * 3
    assert (await supervisor.exec(session_id, ExecSpec("cat /tmp/count"))).stdout == b"run\n"


@pytest.mark.parametrize(
    "other",
    [
        ExecSpec("echo b", exec_id="mine"),
        ExecSpec("echo a", exec_id="mine", env={"A": "1"}),
        ExecSpec(argv=("echo", "a"), exec_id="mine"),
    ],
)
async def test_an_id_in_use_is_refused_to_another_run(
    supervisor: LocalSupervisor, session_id: str, other: ExecSpec
) -> None:
    """Another command with the id of a run is refused, and nothing of it runs."""
    await supervisor.exec(session_id, ExecSpec("echo a", exec_id="mine"))
    with pytest.raises(Conflict) as refused:
        await supervisor.exec(session_id, other)
    assert refused.value.details == {"exec_id": "mine", "status": "ended"}


async def test_a_refused_run_may_be_tried_again(supervisor: LocalSupervisor, session_id: str) -> None:
    """A run that was refused before it began does not use up its id."""
    with pytest.raises(InvalidRequest):
        await supervisor.exec(session_id, ExecSpec("echo a", cwd="nowhere", exec_id="mine"))
    await supervisor.exec(session_id, ExecSpec("mkdir nowhere"))
    assert (await supervisor.exec(session_id, ExecSpec("echo a", cwd="nowhere", exec_id="mine"))).output == b"a\n"


async def test_a_run_ends_with_its_last_caller(supervisor: LocalSupervisor, session_id: str) -> None:
    """A run goes on when one of two callers leaves and is cancelled when the other leaves."""
    spec = ExecSpec("echo begun; sleep 60", exec_id="mine")
    async with supervisor.open_exec(session_id, spec):
        async with supervisor.open_exec(session_id, spec):
            pass
        assert (await supervisor.get_exec(session_id, "mine")).state is ExecState.RUNNING
    await until(lambda: has_ended(supervisor, session_id, "mine"))
    info = await supervisor.get_exec(session_id, "mine")
    assert info.end is not None
    assert info.end.cause is Cause.CANCELLED
    assert (await supervisor.read_output(session_id, "mine")).data == b"begun\n"


async def test_a_detached_run_goes_on_and_is_read_later(supervisor: LocalSupervisor, session_id: str) -> None:
    """A detached run goes on after its caller left; any caller who names its id gets all of its output, from any piece
    on.
    """
    spec = ExecSpec("echo one; sleep 0.2; echo two; echo err >&2", exec_id="mine")
    async with supervisor.open_exec(session_id, spec, on_disconnect=OnDisconnect.DETACH):
        pass
    async with supervisor.attach_exec(session_id, "mine") as stream:
        pieces = [piece async for piece in stream]
        end = await stream.wait_end()
    assert joined(pieces) == b"one\ntwo\nerr\n"
    assert [piece.sequence for piece in pieces] == list(range(1, len(pieces) + 1))
    assert end.exit_code == 0
    async with supervisor.attach_exec(session_id, "mine", after=1) as stream:
        assert joined([piece async for piece in stream]) == b"two\nerr\n"


async def test_output_is_read_by_offset(supervisor: LocalSupervisor, session_id: str) -> None:
    """Output of one stream or of both is read in parts that fit together."""
    await supervisor.exec(session_id, ExecSpec("printf 0123456789; printf abc >&2", exec_id="mine"))
    part = await supervisor.read_output(session_id, "mine", stream=Stream.STDOUT, offset=3, limit=4)
    assert (part.data, part.next_offset, part.total_bytes, part.is_final) == (b"3456", 7, 10, False)
    rest = await supervisor.read_output(session_id, "mine", stream=Stream.STDOUT, offset=7)
    assert (rest.data, rest.is_final) == (b"789", True)
    assert (await supervisor.read_output(session_id, "mine", stream=Stream.STDERR)).data == b"abc"
    assert (await supervisor.read_output(session_id, "mine")).total_bytes == 13


async def test_standard_input_can_be_sent_while_it_runs(supervisor: LocalSupervisor, session_id: str) -> None:
    """Input is sent piece by piece, by any caller, until it is closed."""
    spec = ExecSpec("while read line; do echo got $line; done; echo end", stdin=b"first\n", stdin_open=True)
    async with supervisor.open_exec(session_id, spec) as stream:
        pieces = aiter(stream)
        assert (await anext(pieces)).data == b"got first\n"
        await supervisor.send_stdin(session_id, stream.exec_id, b"second\n")
        assert (await anext(pieces)).data == b"got second\n"
        await stream.close_stdin()
        assert (await anext(pieces)).data == b"end\n"
        with pytest.raises((InvalidRequest, ExecEnded)):
            await stream.send_stdin(b"late")
        await stream.wait_end()
    with pytest.raises(ExecEnded):
        await supervisor.send_stdin(session_id, stream.exec_id, b"later")


async def test_a_run_that_reads_nothing_holds_up_only_its_sender(supervisor: LocalSupervisor, session_id: str) -> None:
    """Much more input than is buffered anywhere; the run is still cancelled at once."""
    async with (
        trio.open_nursery() as nursery,
        supervisor.open_exec(session_id, ExecSpec("sleep 60", stdin_open=True)) as stream,
    ):

        async def send() -> None:
            with pytest.raises(ExecEnded):
                await stream.send_stdin(bytes(16 * 1024 * 1024))

        nursery.start_soon(send)
        other = await supervisor.exec(session_id, ExecSpec(argv=("echo", "fine")))
        assert other.output == b"fine\n"
        with trio.fail_after(patience(5)):
            assert (await supervisor.cancel_exec(session_id, stream.exec_id)).state is ExecState.ENDED


@pytest.mark.parametrize(
    "command", ["sleep 60; echo no", "while :; do :; done", "python3 -c 'import time; time.sleep(60)'"]
)
async def test_an_interrupt_ends_the_command_and_keeps_the_shell(
    supervisor: LocalSupervisor, session_id: str, command: str
) -> None:
    """Like Ctrl-C: the rest of the line is not run, variables are still there."""
    await supervisor.exec(session_id, ExecSpec("kept=yes"))
    async with supervisor.open_exec(session_id, ExecSpec(command)) as stream:
        await supervisor.signal_exec(session_id, stream.exec_id, SIGINT)
        assert [piece for piece in [piece async for piece in stream] if piece.stream is Stream.STDOUT] == []
        end = await stream.wait_end()
    assert (end.cause, end.signal, end.exit_code) == (Cause.SIGNALLED, SIGINT, 130)
    assert not end.shell_restarted
    assert (await supervisor.exec(session_id, ExecSpec("echo $kept"))).output == b"yes\n"


async def test_a_signal_reaches_what_the_command_started(supervisor: LocalSupervisor, session_id: str) -> None:
    """A signal to a command runs the handler of the program that it started."""
    command = "bash -c 'trap \"echo caught; exit 7\" USR1; echo ready; while :; do sleep 0.05; done'"
    async with supervisor.open_exec(session_id, ExecSpec(command)) as stream:
        pieces = aiter(stream)
        assert (await anext(pieces)).data == b"ready\n"
        await supervisor.signal_exec(session_id, stream.exec_id, SIGUSR1)
        assert joined([piece async for piece in pieces]).endswith(b"caught\n")
        assert (await stream.wait_end()).exit_code == 7
    with pytest.raises(ExecEnded):
        await supervisor.signal_exec(session_id, stream.exec_id, SIGUSR1)


async def test_a_queued_run_can_be_cancelled(supervisor: LocalSupervisor, session_id: str) -> None:
    """A cancelled run in the queue ends as cancelled and never begins; the run before it is left alone."""
    async with trio.open_nursery() as nursery, supervisor.open_exec(session_id, ExecSpec("sleep 60")) as first:

        async def wait_turn() -> None:
            result = await supervisor.exec(session_id, ExecSpec("touch ran", exec_id="queued"))
            assert result.end.cause is Cause.CANCELLED

        nursery.start_soon(wait_turn)

        async def is_queued() -> bool:
            (shell,) = await supervisor.shells(session_id)
            return shell.queued == ("queued",)

        await until(is_queued)
        info = await supervisor.cancel_exec(session_id, "queued")
        assert (info.state, info.started_at) == (ExecState.ENDED, None)
        assert first.info.state is ExecState.RUNNING
    assert (await supervisor.exec(session_id, ExecSpec("ls"))).output == b""


async def test_a_full_queue_names_what_runs(supervisor: LocalSupervisor, session_id: str) -> None:
    """The refusal says which run is in the way, for how long, and what it wrote last; programs are not refused."""
    async with supervisor.open_exec(session_id, ExecSpec("echo compiling; sleep 60", exec_id="slow")) as slow:
        await anext(aiter(slow))
        async with trio.open_nursery() as nursery:
            for _ in range(31):
                nursery.start_soon(supervisor.exec, session_id, ExecSpec(":"))

            async def is_full() -> bool:
                return len((await supervisor.shells(session_id))[0].queued) == 31

            await until(is_full)
            with pytest.raises(ShellBusy) as refused:
                await supervisor.exec(session_id, ExecSpec(":"))
            details = dict(refused.value.details)
            assert details.pop("age_ms") >= 0
            assert details == {"exec_id": "slow", "last_line": "compiling", "queue_length": 32}
            beside = await supervisor.exec(session_id, ExecSpec("echo beside", stateless=True))
            assert beside.output == b"beside\n"
            await supervisor.cancel_exec(session_id, "slow")


async def test_a_caller_does_not_wait_longer_for_a_turn_than_for_the_command(
    supervisor: LocalSupervisor, session_id: str
) -> None:
    """A command whose caller waits is refused when it can't begin within its own time limit, or the bound that it asked
    for, and never begins; one that is followed waits. The result says how long the wait was.
    """
    async with supervisor.open_exec(session_id, ExecSpec("echo busy; sleep 60", exec_id="slow")) as slow:
        await anext(aiter(slow))
        for spec in (ExecSpec("touch ran", timeout_ms=100), ExecSpec("touch ran", queue_timeout_ms=100)):
            with pytest.raises(ShellBusy, match="within 100 ms") as refused:
                await supervisor.exec(session_id, attrs.evolve(spec, exec_id="again"))
            assert (refused.value.details["exec_id"], refused.value.details["last_line"]) == ("slow", "busy")
        with pytest.raises(ShellBusy):
            async with supervisor.open_exec(session_id, ExecSpec("touch ran", queue_timeout_ms=100)):
                raise AssertionError("it began")
        async with trio.open_nursery() as nursery:
            results = []

            async def follow() -> None:
                async with supervisor.open_exec(session_id, ExecSpec("ls", timeout_ms=1000)) as stream:
                    results.append((joined([piece async for piece in stream]), await stream.wait_end()))

            nursery.start_soon(follow)
            await trio.sleep(1.2)
            await supervisor.cancel_exec(session_id, "slow")
    ((output, end),) = results
    assert (output, end.queued_ms >= 1200, end.duration_ms < 1000) == (b"", True, True)


async def test_an_unknown_run_and_one_that_is_gone_differ(config: Config) -> None:
    """Runs are kept for a while; then their ids are still known, and still not run again."""
    async with open_supervisor(attrs.evolve(config, runs=RunsSettings(keep_seconds=1))) as supervisor:
        session = await supervisor.create(SessionSpec())
        with pytest.raises(ExecNotFound):
            await supervisor.get_exec(session.id, "mine")
        spec = ExecSpec("echo a", exec_id="mine")
        await supervisor.exec(session.id, spec)

        async def is_gone() -> bool:
            try:
                await supervisor.get_exec(session.id, "mine")
            except ExecGone:
                return True
            return False

        await until(is_gone)
        for wanted in (supervisor.exec(session.id, spec), supervisor.read_output(session.id, "mine")):
            with pytest.raises(ExecGone):
                await wanted
        assert await supervisor.execs(session.id) == []


async def test_output_beyond_the_session_s_share_drops_the_oldest(config: Config) -> None:
    """The newest run is whole, of the oldest the beginning is gone, and a repeat says so instead of running it again.
    Nothing of it is left on disk after the session."""
    small = attrs.evolve(config, runs=RunsSettings(keep_mb=2, spool_memory_mb=1))
    async with open_supervisor(small) as supervisor:
        session = await supervisor.create(SessionSpec())
        specs = {name: ExecSpec("head -c 800000 /dev/zero", exec_id=name) for name in "abc"}
        for spec in specs.values():
            await supervisor.exec(session.id, spec)
        assert (await supervisor.get_exec(session.id, "a")).first_sequence > 1
        with pytest.raises(ExecGone):
            await supervisor.read_output(session.id, "a")
        repeated = await supervisor.exec(session.id, specs["a"])
        assert repeated.bytes_total == 800_000
        assert repeated.bytes_omitted == 800_000 - len(repeated.output) > 0
        newest = await supervisor.read_output(session.id, "c", limit=2_000_000)
        assert newest.data == bytes(800_000)
        assert 1_000_000 < (await supervisor.stats(session.id)).spool_bytes <= 2 * 1024 * 1024
        await supervisor.destroy(session.id)

        async def is_empty() -> bool:
            return not any((config.data_dir / "spool").iterdir())

        await until(is_empty)


async def test_a_run_without_limit_needs_permission(config: Config) -> None:
    """Refused by default; where it is allowed, its end names no limit."""
    async with open_supervisor(config) as supervisor:
        session = await supervisor.create(SessionSpec())
        with pytest.raises(InvalidRequest):
            await supervisor.exec(session.id, ExecSpec(":", unlimited=True))
    async with open_supervisor(attrs.evolve(config, runs=RunsSettings(allow_unlimited=True))) as supervisor:
        session = await supervisor.create(SessionSpec())
        assert (await supervisor.exec(session.id, ExecSpec(":", unlimited=True))).end.timeout_ms is None


async def test_a_slow_reader_stops_its_own_run_only(supervisor: LocalSupervisor, session_id: str) -> None:
    """A stream that nobody reads stays within its window; a run beside it is not held up."""
    async with supervisor.open_exec(session_id, ExecSpec("head -c 50000000 /dev/zero", exec_id="flood")) as flood:
        result = await supervisor.exec(session_id, ExecSpec("head -c 3000000 /dev/zero", stateless=True))
        assert len(result.output) == 3_000_000
        held = await supervisor.get_exec(session_id, "flood")
        assert held.stdout_bytes < 4_000_000
        assert sum([len(piece.data) async for piece in flood]) == 50_000_000


async def test_a_killed_program_names_its_victim(supervisor: LocalSupervisor) -> None:
    """Out of memory: the cause says so and the name is the one the kernel logged; the shell's variables live."""
    session = await supervisor.create(SessionSpec(limits=Limits(memory_mb=64)))
    await supervisor.exec(session.id, ExecSpec("kept=yes"))
    result = await supervisor.exec(session.id, ExecSpec("python3 -c 'x = bytearray(200 << 20)'"))
    assert (result.end.cause, result.end.victim) == (Cause.OOM, "python3")
    assert (await supervisor.exec(session.id, ExecSpec("echo $kept"))).output == b"yes\n"


async def test_a_full_file_system_is_the_cause(supervisor: LocalSupervisor, session_id: str) -> None:
    """A command that fails on one says so; one that fails later for another reason does not, once there is room."""
    full = await supervisor.exec(session_id, ExecSpec("head -c 1000000000 /dev/zero > /tmp/big"))
    assert (full.end.cause, full.end.exit_code) == (Cause.DISK_FULL, 1)
    after = await supervisor.exec(session_id, ExecSpec("rm /tmp/big; false"))
    assert after.end.cause is Cause.EXITED


async def test_written_bytes_are_counted(supervisor: LocalSupervisor, session_id: str) -> None:
    """In a shell and beside it; what goes through pipes alone is not storage."""
    for stateless in (False, True):
        spec = ExecSpec("head -c 1000000 /dev/zero > big", stateless=stateless)
        assert (await supervisor.exec(session_id, spec)).end.usage.written_bytes >= 1_000_000
        spec = ExecSpec("head -c 1000000 /dev/zero | cat", stateless=stateless)
        assert (await supervisor.exec(session_id, spec)).end.usage.written_bytes < 500_000


async def test_variables_can_be_changed_later(supervisor: LocalSupervisor) -> None:
    """In every shell and for what starts afterwards; null removes one."""
    session = await supervisor.create(SessionSpec(env={"A": "1", "B": "2"}))
    await supervisor.exec(session.id, ExecSpec(":"))
    await supervisor.update(session.id, SessionPatch(env={"A": None, "B": "3", "C": "4"}))
    for stateless in (False, True):
        spec = ExecSpec("echo ${A-none} $B $C", stateless=stateless)
        assert (await supervisor.exec(session.id, spec)).output == b"none 3 4\n"


async def test_a_stop_names_what_was_running(config: Config) -> None:
    """A caller that still waits when the supervisor stops gets an end or a typed error, never silence."""
    outcomes: list[object] = []
    async with trio.open_nursery() as nursery, open_supervisor(config) as supervisor:
        session = await supervisor.create(SessionSpec())

        async def run() -> None:
            try:
                outcomes.append((await supervisor.exec(session.id, ExecSpec("sleep 60", exec_id="mine"))).end.cause)
            except SandkastenError as error:
                outcomes.append(error)

        nursery.start_soon(run)

        async def is_running() -> bool:
            runs = await supervisor.execs(session.id)
            return [run.state for run in runs] == [ExecState.RUNNING]

        await until(is_running)
    assert outcomes == [Cause.SANDBOX_DIED]


async def test_a_caller_who_joined_never_ends_the_run(supervisor: LocalSupervisor, session_id: str) -> None:
    """The run's owner leaves first, then the caller who joined: the run goes on to its end."""
    spec = ExecSpec("sleep 0.3; echo whole", exec_id="mine")
    async with AsyncExitStack() as late, supervisor.open_exec(session_id, spec):
        await late.enter_async_context(supervisor.open_exec(session_id, spec))
    assert (await supervisor.exec(session_id, spec)).output == b"whole\n"


async def test_a_cancelled_end_of_input_can_be_sent_again(supervisor: LocalSupervisor, session_id: str) -> None:
    """A caller that was cancelled while it closed the input leaves the input open, to be closed again."""
    async with supervisor.open_exec(session_id, ExecSpec("sleep 0.5; cat | wc -c", stdin_open=True)) as stream:
        with trio.move_on_after(0.1):
            await supervisor.send_stdin(session_id, stream.exec_id, bytes(8 * 1024 * 1024), close=True)
        await stream.close_stdin()
        size = int(joined([piece async for piece in stream]))
        assert 0 < size < 8 * 1024 * 1024


async def test_a_shell_reopened_under_a_slow_reader_is_another_one(
    supervisor: LocalSupervisor, session_id: str
) -> None:
    """A run of the closed shell, read to its end later, does not change the new shell of the same name."""
    await supervisor.open_shell(session_id, ShellSpec("two"))
    spec = ExecSpec("head -c 9000000 /dev/zero", shell="two")
    async with supervisor.open_exec(session_id, spec) as stream:
        await anext(aiter(stream))
        await supervisor.close_shell(session_id, "two")
        await supervisor.open_shell(session_id, ShellSpec("two", cwd="/tmp"))
        async for _ in stream:
            pass
        await stream.wait_end()
    (_, reopened) = await supervisor.shells(session_id)
    assert (reopened.cwd, reopened.running) == ("/tmp", None)


async def test_fifty_streams_at_once_are_bounded_and_none_starves(supervisor: LocalSupervisor) -> None:
    """Fifty unread streams cost one window each and hold up only their own commands; read at once, all come to their
    end.
    """
    sessions = [(await supervisor.create(SessionSpec())).id for _ in range(50)]
    sizes: list[int] = []
    async with AsyncExitStack() as opened, trio.open_nursery() as nursery:
        flood = ExecSpec("head -c 4000000 /dev/zero", exec_id="flood")
        streams = [await opened.enter_async_context(supervisor.open_exec(session_id, flood)) for session_id in sessions]

        async def all_are_held() -> bool:
            held = [(await supervisor.get_exec(session_id, "flood")).stdout_bytes for session_id in sessions]
            return min(held) > 900_000

        await until(all_are_held)
        kept = [(await supervisor.stats(session_id)).spool_bytes for session_id in sessions]
        assert max(kept) < 1_500_000

        async def read(stream: ExecStream) -> None:
            sizes.append(sum([len(piece.data) async for piece in stream]))

        for stream in streams:
            nursery.start_soon(read, stream)
    assert sizes == [4_000_000] * 50


async def test_a_session_says_how_many_pipes_its_runs_have(supervisor: LocalSupervisor) -> None:
    """Runs that say nothing have the session's streams, in a shell, beside it and in the background; a run that says
    `separate` has two, and its `output` begins with the one that was written to first.
    """
    session_id = (await supervisor.create(SessionSpec(streams="merged"))).id
    both = "for i in 1 2 3; do echo e$i >&2; echo o$i; done"
    written = b"e1\no1\ne2\no2\ne3\no3\n"
    for spec in (ExecSpec(both), ExecSpec(both, stateless=True), ExecSpec(argv=("sh", "-c", both))):
        result = await supervisor.exec(session_id, spec)
        assert (result.output, result.stdout, result.stderr) == (written, written, b"")
    process = await supervisor.start_process(session_id, ProcessSpec(both))
    waited = await supervisor.wait_process(session_id, process.exec_id, WaitFor(exit=True), timeout_s=patience(10))
    assert (waited.run.stdout_bytes, waited.run.stderr_bytes) == (len(written), 0)
    result = await supervisor.exec(session_id, ExecSpec(both, streams=StreamsMode.SEPARATE))
    assert (result.stdout, result.stderr) == (b"o1\no2\no3\n", b"e1\ne2\ne3\n")
    result = await supervisor.exec(session_id, ExecSpec("echo e >&2; echo o", streams=StreamsMode.SEPARATE))
    assert result.output == b"e\no\n"
