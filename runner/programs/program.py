"""One program beside the shells: its process, its streams, its end, and its result.

`Program` performs the actions of `runner.shell.lifecycle.PROGRAM`. A program ends when its own process has ended;
processes it left running live on, unless it was cancelled or timed out. A terminal goes with its program: processes
that still have it open are hung up on.

The peak memory that wait4(2) counts begins before execve(2), so a program smaller than PID 1 shows PID 1's size.

Sources: wait4(2), getrusage(2) (RSS in KiB, blocks of 512 bytes), kill(2), setsid(2), pts(4).
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from runner.loop.context import Context, Sink
from runner.loop.identity import UserAccount, UserIdentity
from runner.process import process_set
from runner.process.process_set import ProcessSet, ProgramSet, RunCgroupSet
from runner.process.spawn import Membership, set_oom_score_soon, spawn
from runner.shell.ending import Ladder
from runner.shell.lifecycle import PROGRAM, Action, Notice, RunOutcome, State
from runner.shell.run import SIGNAL_BASE, Run
from runner.streams.flow import AbandonedPipes
from runner.streams.streams import ProgramStreams
from runner.wire.protocol import RunProgram

_BLOCK_BYTES = 512
_KIB = 1024


@dataclass(frozen=True, slots=True)
class ProgramPlan:
    """Everything that was looked up for a request to run a program. `cwd` is a real path."""

    file: str
    argv: list[str]
    env: Mapping[str, str]
    cwd: bytes
    account: UserAccount
    identity: UserIdentity
    membership: Membership | None


class Program(Run):
    """One program, from the start of its process to the answer. `on_over` is called once, just before the answer."""

    def __init__(
        self,
        context: Context,
        request: RunProgram,
        sink: Sink,
        leftovers: AbandonedPipes,
        *,
        on_over: Callable[[Program], None],
    ) -> None:
        super().__init__(context, request, sink, leftovers, PROGRAM)
        self.request = request
        self.pid: int | None = None
        self._on_over = on_over
        self._processes: ProcessSet | None = None
        self._cwd = b""
        self._usage: resource.struct_rusage | None = None

    def begin(self, plan: ProgramPlan) -> None:
        """Start the process.

        Raises:
            OSError: the process could not be started, and nothing is left of the program.
        """
        request, context = self.request, self._context
        processes: ProcessSet
        if plan.membership is not None and request.group is not None:
            processes = RunCgroupSet(request.group.name)
        else:
            processes = ProgramSet(lambda: self.pid, lambda: context.reaper.watched)
        streams = ProgramStreams(
            context, plan.identity, self, terminal=request.terminal, stdin=request.stdin, merged=request.merged
        )
        try:
            self._room.look(context)
            streams.resume()  # before there is a writer: the stream that is written to first is read first
            self.pid = self._spawn(plan, streams)
        except BaseException:
            streams.close(None)  # nobody writes to them: they would push a background job's pipe out of the leftovers
            raise
        finally:
            streams.close_child_side()
        self._streams, self._processes = streams, processes
        self._cwd = plan.cwd
        self._take(Notice.BEGIN)
        set_oom_score_soon(context, plan.identity, lambda: self.pid)

    def _spawn(self, plan: ProgramPlan, streams: ProgramStreams) -> int:
        return spawn(
            self._context.kernel,
            plan.argv,
            file=plan.file,
            env=plan.env,
            cwds=(plan.cwd,),
            must_enter=True,
            stdio=streams.child_fds,
            account=plan.account,
            membership=plan.membership,
            controlling_terminal=streams.is_terminal,
            rules_fd=self._context.settings.rules_fd,
            subreaper=plan.membership is None,  # it may never wait, and what it adopts would stay zombies
        )

    def _perform(self, action: Action) -> None:
        match action:
            case Action.START:
                self._watch()
            case Action.FORCE:
                self._climb()
            case Action.HURRY:
                self._hurry()
            case Action.END:
                self._context.registry.remove(self._id, self)
                self._finish_streams()
            case Action.ANSWER:
                self._answer()

    # News of the process and of other connections -------------------------------------------------------------------

    def _on_end(self, status: int, usage: resource.struct_rusage) -> None:
        self.pid = None
        self._usage = usage
        code = os.waitstatus_to_exitcode(status)
        outcome = RunOutcome(code, None, "exited") if code >= 0 else RunOutcome(SIGNAL_BASE - code, -code, "signalled")
        self._perform(self._life.done(outcome))

    def signal(self, number: int) -> bool:
        """Send a signal to the foreground of the terminal, or else to the process group; SIGKILL to all processes."""
        if self.pid is None or self._processes is None:
            return False
        if number == signal.SIGKILL:
            self._processes.kill()
            return True
        try:
            os.killpg(self._streams.foreground_group() or self.pid, number)
        except ProcessLookupError:  # not a group's leader yet
            process_set.send_signal(self.pid, number)
        return True

    # Actions --------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        assert self.pid is not None
        self._context.reaper.watch_usage(self.pid, self._on_end)
        self._context.registry.add(self._id, self)
        self._announce(self.pid)
        self._limit_time()

    def _climb(self) -> None:
        """Begin to end the program and all it has started."""
        assert self._processes is not None
        if self.pid is not None and self._streams.is_terminal:
            process_set.send_signal(self.pid, signal.SIGHUP)  # as a terminal that goes away: an interactive shell obeys
        self._ladder = Ladder(
            *(self._context, self._processes),
            on_clear=lambda: self._take(Notice.CLEAR),
            on_error=self._on_clear_error,
            now=self._in_hurry,
        )
        self._ladder.climb()

    def _answer(self) -> None:
        usage = self._usage
        assert usage is not None
        self._processes = None  # it refers back
        self._on_over(self)
        self._answer_with(
            lambda: self._reply(
                cwd=self._cwd,
                cpu_us=int((usage.ru_utime + usage.ru_stime) * 1_000_000),
                peak_bytes=usage.ru_maxrss * _KIB,
                written_bytes=usage.ru_oublock * _BLOCK_BYTES,
            )
        )

    def _on_clear_error(self, _error: Exception) -> None:
        """The last output could not be read: give it up and answer."""
        if self._life.state is State.DRAINING:
            self._take(Notice.DRAINED)

    def _on_error(self, _error: Exception) -> None:
        """The time limit could not be acted on: end the program by the shortest way."""
        if self._processes is not None and self._usage is None:
            self._processes.kill()
