"""Runs of PID 1 whose steps fail: each is answered, once, and the queue and the loop go on. No process is started."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nsinit.sandbox.child import RunnerKernel
from runner.loop.config import MAX_LEFTOVER_PIPES, RunnerConfig
from runner.loop.context import Context
from runner.process.process_set import Process
from runner.programs import program as module
from runner.programs.program import Program, ProgramPlan
from runner.shell.command_driver import command_text
from runner.shell.ending import Ladder
from runner.shell.execution import Execution
from runner.shell.link import Link, Reports
from runner.shell.queue import CommandQueue
from runner.shell.shell import Birth
from runner.streams.flow import AbandonedPipes, Outflow
from runner.wire.protocol import MAX_FRAME_BYTES, Error, Exec, ExecReply, Kind, RunProgram

LOST = OSError(errno.ENOMEM, "no memory")
KILLED = 9
NO_PID = 2**22  # one more than there can be


class Answer:
    """A sink that keeps the one final message."""

    piece_bytes = MAX_FRAME_BYTES

    def __init__(self) -> None:
        self.final: Any = None

    def send(self, kind: Kind, body: bytes) -> None: ...

    def start(self, message: object) -> None: ...

    def finish(self, message: object) -> None:
        assert self.final is None
        self.final = message

    def refresh_input(self) -> None: ...

    @property
    def is_full(self) -> bool:
        return False


class Processes:
    """A set of no real process: a ladder that climbs in a test must reach none of the machine's. It is killed, and
    never signalled, for a ladder in a hurry."""

    def __init__(self, *left: Process) -> None:
        self.left = list(left)

    def find(self) -> list[Process]:
        return self.left

    def kill(self) -> None: ...


def fail(*_arguments: object, **_options: object) -> None:
    raise LOST


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    monkeypatch.setattr(Execution, "_processes", lambda _execution: Processes())
    before = signal.set_wakeup_fd(-1)
    config = RunnerConfig(
        str(tmp_path), os.geteuid(), os.getegid(), home=str(tmp_path), workspace=str(tmp_path), interrupt_grace_s=0.0
    )
    context = Context.open(config, RunnerKernel(filters_commands=False))
    yield context
    context.loop.close()
    os.close(context.reaper._wake_up_fd)
    os.close(signal.set_wakeup_fd(before))


@pytest.fixture
def leftovers(context: Context) -> AbandonedPipes:
    return AbandonedPipes(context.loop)


class Shell:
    """A queue whose shell has no process: the test takes its part."""

    def __init__(self, context: Context, leftovers: AbandonedPipes) -> None:
        birth = Birth(["/bin/sh"], {}, b"/", context.as_user)
        self.queue = CommandQueue(context, leftovers, directory=context.file("shell"), birth=birth)
        reports = Reports(lambda: None, lambda: None, lambda _status: None)
        self.link = Link(context.loop, reports, fail, reads_lines=True)
        self.queue.shell._link = self.link
        self.wait()

    def wait(self) -> None:
        """Wait for a command, as a new process does."""
        self.queue.shell.is_ready = True
        self.queue._on_ready()

    def take(self) -> None:
        """Read the order of a command, and not begin it."""
        assert os.read(self.link.child_fd, 4096)

    def run(self, exec_id: str) -> tuple[Execution, Answer]:
        answer = Answer()
        return self.queue.submit(Exec(exec_id, "true"), answer), answer


@pytest.fixture
def shell(context: Context, leftovers: AbandonedPipes) -> Iterator[Shell]:
    shell = Shell(context, leftovers)
    yield shell
    shell.queue.shell.close()


def test_a_ladder_hands_an_error_of_its_last_step_to_the_owner_and_climbs_no_more(context: Context) -> None:
    """Nothing is left to climb for: the step is not taken again."""
    errors: list[Exception] = []
    Ladder(context, Processes(), on_clear=fail, on_error=errors.append).climb()
    assert errors == [LOST]
    assert context.loop.pending_timers == 0


def test_a_ladder_that_can_not_look_looks_again(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of a look is no news that nobody is left, and no end of the climb."""
    processes, cleared = Processes(), list[bool]()
    looks: list[Callable[[], object]] = [list, fail, fail]
    monkeypatch.setattr(processes, "find", lambda: looks.pop()())
    Ladder(context, processes, on_clear=lambda: cleared.append(True), on_error=fail).climb()
    while not cleared:
        context.loop.run_once()
    assert looks == []


def test_a_command_whose_end_fails_is_answered(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ladder found nothing left, and the last output could not be read."""
    run, answer = shell.run("a")
    shell.take()
    run.on_cancel()
    monkeypatch.setattr(run, "_finish_streams", fail)
    shell.queue._on_status(0)
    assert isinstance(answer.final, Error)
    assert answer.final.code == "IO_ERROR"
    assert shell.queue._current is None


def test_a_command_whose_streams_can_not_be_closed_is_answered(
    shell: Shell, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shell is replaced, and the next command gets the new one."""
    run, answer = shell.run("a")
    _, other = shell.run("b")
    shell.take()
    streams = run._streams
    replaced: list[bool] = []
    with monkeypatch.context() as failing:
        failing.setattr(Outflow, "finish", fail)
        failing.setattr(Outflow, "close", fail)
        failing.setattr(shell.queue.shell, "replace", lambda: replaced.append(True))
        context.loop.guard(shell.queue._on_status, 0, shell.queue._on_error)
    assert isinstance(answer.final, Error)
    assert (answer.final.code, replaced) == ("IO_ERROR", [True])
    streams.close(None)
    shell.wait()
    shell.queue._on_status(0)
    shell.wait()
    assert isinstance(other.final, ExecReply)


def test_a_command_that_is_ended_before_it_begins_has_nothing_to_run(shell: Shell, context: Context) -> None:
    """The shell that reads the order late finds an empty text, and its report ends the command."""
    run, answer = shell.run("a")
    assert Path(context.file("shell/cmd")).read_text() == command_text("true", link=shell.queue.shell.link_number)
    run.on_cancel()
    assert Path(context.file("shell/cmd")).read_text() == command_text("", link=shell.queue.shell.link_number)
    run.cancel(now=True)
    shell.queue._on_status(0)
    shell.wait()
    assert isinstance(answer.final, ExecReply)
    assert answer.final.cause == "cancelled"


def test_a_command_that_is_lost_while_its_shell_is_closed_is_answered_once(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another step that failed on the way has answered the command already."""
    run, answer = shell.run("a")
    monkeypatch.setattr(run, "_finish_streams", lambda: run.fail("IO_ERROR", "the command was lost"))
    shell.queue.shell.retire()
    run.on_shell_closed()
    assert isinstance(answer.final, Error)


def test_the_next_command_is_told_of_a_shell_that_died_with_one_it_never_began(shell: Shell) -> None:
    """Nothing of the other command, which was ended before, has met the new shell."""
    first, cancelled = shell.run("a")
    shell.take()
    first.on_cancel()
    shell.queue._on_unstarted()
    shell.queue._on_death(KILLED)
    shell.wait()
    assert (cancelled.final.cause, cancelled.final.shell_restarted) == ("cancelled", False)
    _, answer = shell.run("b")
    shell.queue._on_status(0)
    shell.wait()
    assert (answer.final.cause, answer.final.shell_restarted) == ("exited", True)


def program(context: Context, leftovers: AbandonedPipes) -> tuple[Program, Answer, ProgramPlan]:
    answer = Answer()
    run = Program(context, RunProgram("p", ("x",)), answer, leftovers, on_over=lambda _program: None)
    account = context.as_user.account
    return run, answer, ProgramPlan("/none", ["x"], {}, b"/", account, context.as_user, None)


def test_a_program_whose_end_fails_is_answered(
    context: Context, leftovers: AbandonedPipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last output is given up."""
    run, answer, plan = program(context, leftovers)
    processes = Processes(Process(NO_PID, 1, 0, is_dead=False))
    monkeypatch.setattr(run, "_spawn", lambda _plan, _streams: NO_PID)
    monkeypatch.setattr(module, "ProgramSet", lambda *_arguments: processes)
    run.begin(plan)
    run.cancel(now=True)
    run._on_end(0, resource.getrusage(resource.RUSAGE_SELF))
    monkeypatch.setattr(run, "_finish_streams", fail)
    processes.left.clear()
    assert run._ladder is not None
    run._ladder.climb()
    assert isinstance(answer.final, ExecReply)
    assert answer.final.cause == "cancelled"


def test_a_program_that_can_not_be_started_takes_no_pipe_from_a_background_job(
    context: Context, leftovers: AbandonedPipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program's own pipes have no writer any more, and are not kept."""
    run, _, plan = program(context, leftovers)
    pipes = [os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) for _ in range(MAX_LEFTOVER_PIPES)]
    for read_fd, _ in pipes:
        leftovers.adopt(read_fd)
    monkeypatch.setattr(run, "_spawn", fail)
    with pytest.raises(OSError, match="no memory"):
        run.begin(plan)
    for _, write_fd in pipes:
        os.write(write_fd, b"the job goes on")
        os.close(write_fd)
    for _ in range(2):  # the bytes and the end
        context.loop.run_once()
