"""One program beside the shells: its process, its streams, its time limit and its result.

It must not decide who may run what (`programs`) nor know how frames reach the client (`Sink`). It ends when the program
itself has ended; what that left running lives on, unless the program was cancelled or timed out. A terminal goes with
its program: what still has it open is hung up on.

What wait4 counts as peak memory begins before execve(2), so a program smaller than PID 1 shows PID 1's size.

Sources: wait4(2), getrusage(2) (RSS in KiB, blocks of 512 bytes), kill(2), setsid(2), pts(4).
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from runner.loop.config import STDIN_BUFFER_BYTES
from runner.loop.context import Context
from runner.loop.identity import Account, UserIdentity
from runner.loop.loop import Timer
from runner.process import oom_score, process_set, storage
from runner.process.process_set import CommandScope, GroupScope, Process, Scope, TreeScope
from runner.process.spawn import Membership, spawn
from runner.shell.execution import EXIT_CANCELLED, EXIT_TIMED_OUT, Sink
from runner.shell.ladder import Ladder
from runner.streams.pipes import Leftovers
from runner.streams.stdio import Stdio
from runner.wire.protocol import Cause, ExecReply, Kind, RunProgram, Started, TerminalSize

_SIGNAL_BASE = 128
_BLOCK_BYTES = 512
_KIB = 1024


@dataclass(frozen=True, slots=True)
class Plan:
    """How a program is started: everything that was looked up for its request. `cwd` is a real path."""

    file: str
    argv: list[str]
    env: Mapping[str, str]
    cwd: bytes
    account: Account
    identity: UserIdentity
    membership: Membership | None


class ProgramScope:
    """A program without a group, all below it, and orphans that began after it and are no other's."""

    def __init__(self, pid: Callable[[], int | None], leaders: Callable[[], frozenset[int]]) -> None:
        self._tree = TreeScope(pid)
        self._orphans = CommandScope(process_set.now(), pid, leaders=leaders)

    def find(self) -> list[Process]:
        return list(dict.fromkeys([*self._tree.find(), *self._orphans.find()]))

    def kill(self) -> None:
        process_set.kill_all(self.find)


class Program:
    """From the start of the process to the reply. `on_over` is called once, when nothing of it is left here."""

    def __init__(
        self,
        context: Context,
        request: RunProgram,
        sink: Sink,
        leftovers: Leftovers,
        *,
        on_over: Callable[[Program], None],
    ) -> None:
        self.request = request
        self.pid: int | None = None
        self._context = context
        self._sink: Sink | None = sink
        self._leftovers = leftovers
        self._on_over = on_over
        self._stdio: Stdio | None = None
        self._scope: Scope | None = None
        self._cwd = b""
        self._timer: Timer | None = None
        self._ladder: Ladder | None = None
        self._is_cleared = True
        self._forced: Cause | None = None
        self._end: tuple[int, resource.struct_rusage] | None = None
        self._started_s = 0.0
        self._duration_us = 0
        self._room = storage.RoomGauge()

    def begin(self, plan: Plan) -> None:
        """Start the process.

        Raises:
            OSError: it could not be started, and nothing is left.
        """
        request, group = self.request, self.request.group
        self._scope = ProgramScope(lambda: self.pid, lambda: self._context.reaper.watched)
        if plan.membership is not None and group is not None:
            self._scope = GroupScope(group.name)
        self._stdio = Stdio(
            *(self._context, plan.identity),
            terminal=request.terminal,
            stdin=request.stdin,
            on_output=self._on_output,
            on_done=self._reply_if_drained,
            on_room=self._on_room,
        )
        try:
            self._room.look(self._context)
            self.pid = self._spawn(plan, self._stdio)
        except BaseException:
            self._stdio.close_child_side()
            self._stdio.close(self._leftovers)
            raise
        self._stdio.close_child_side()
        self._cwd = plan.cwd
        self._watch(self.pid)
        oom_score.offer_soon(self._context, plan.identity, lambda: self.pid)

    def _spawn(self, plan: Plan, stdio: Stdio) -> int:
        return spawn(
            self._context.kernel,
            plan.argv,
            file=plan.file,
            env=plan.env,
            cwds=(plan.cwd,),
            must_enter=True,
            stdio=stdio.child_fds,
            account=plan.account,
            membership=plan.membership,
            controlling_terminal=stdio.is_terminal,
            rules_fd=self._context.settings.rules_fd,
            subreaper=plan.membership is None,  # what it does not wait for would stay a zombie of its
        )

    def _watch(self, pid: int) -> None:
        assert self._stdio is not None
        assert self._sink is not None
        self._started_s = time.monotonic()
        self._context.reaper.watch_usage(pid, self._on_end)
        self._context.registry.add(self.request.exec_id, self)
        self._sink.start(Started(self.request.exec_id, pid))
        if self.request.timeout_ms is not None:
            self._timer = self._context.loop.call_later(
                self.request.timeout_ms / 1000, lambda: self._force("timed_out"), self._on_error
            )
        self._stdio.resume()

    # What the client tells -----------------------------------------------------------------------------------------

    def on_data(self, data: bytes) -> None:
        if self._stdio is not None:
            self._stdio.feed(data)

    def on_end(self) -> None:
        if self._stdio is not None:
            self._stdio.end()

    def on_cancel(self) -> None:
        self._force("cancelled")

    def on_close(self) -> None:
        """Nobody waits for the answer any more."""
        self._sink = None
        self.on_drained()
        self._force("cancelled")

    def on_drained(self) -> None:
        """The client has taken enough of what was sent."""
        if self._stdio is not None:
            self._stdio.resume()

    @property
    def wants_input(self) -> bool:
        return self._stdio is None or self._stdio.buffered_bytes < STDIN_BUFFER_BYTES

    # What other connections tell -----------------------------------------------------------------------------------

    def signal(self, number: int) -> bool:
        """Send a signal to the foreground of its terminal, or to its process group; SIGKILL to all that is its own."""
        if self.pid is None or self._stdio is None or self._scope is None:
            return False
        if number == signal.SIGKILL:
            self._scope.kill()
            return True
        try:
            os.killpg(self._stdio.foreground_group() or self.pid, number)
        except ProcessLookupError:  # not a group's leader yet
            process_set.send_signal(self.pid, number)
        return True

    def cancel(self, *, now: bool) -> None:
        self._force("cancelled", now=now)

    def resize(self, size: TerminalSize) -> bool:
        if self._stdio is None or not self._stdio.is_terminal:
            return False
        self._stdio.resize(size)
        return True

    # The end -------------------------------------------------------------------------------------------------------

    def _force(self, cause: Cause, *, now: bool = False) -> None:
        """Begin to end the program and all it started, unless it has ended; a second time only to hurry."""
        if self._ladder is not None and now:
            self._ladder.hurry()
        if self._end is not None or self._forced is not None or self._scope is None:
            return
        self._forced = cause
        self._is_cleared = False
        if self.pid is not None and self._stdio is not None and self._stdio.is_terminal:
            process_set.send_signal(self.pid, signal.SIGHUP)  # as a terminal that goes away: an interactive shell obeys
        self._ladder = Ladder(self._context, self._scope, on_clear=self._on_clear, now=now)
        self._ladder.climb()

    def _on_clear(self) -> None:
        self._is_cleared = True
        self._finish_if_over()

    def _on_end(self, status: int, usage: resource.struct_rusage) -> None:
        self.pid = None
        self._end = (status, usage)
        self._finish_if_over()

    def _finish_if_over(self) -> None:
        if self._end is None or not self._is_cleared or self._stdio is None:
            return
        self._duration_us = int((time.monotonic() - self._started_s) * 1_000_000)
        self._stop_clocks()
        self._context.registry.remove(self.request.exec_id, self)
        self._stdio.stop_input()
        self._stdio.finish(may_read=self._sink is None or not self._sink.is_full)

    def _reply_if_drained(self) -> None:
        if self._end is None or not self._is_cleared or self._stdio is None or not self._stdio.is_done:
            return
        self._stdio.close(self._leftovers)
        self._stdio = self._scope = self._ladder = self._timer = None  # cycles: PID 1 collects none
        sink, self._sink = self._sink, None
        self._on_over(self)
        if sink is not None:
            sink.finish(self._reply(*self._end))

    def _reply(self, status: int, usage: resource.struct_rusage) -> ExecReply:
        code = os.waitstatus_to_exitcode(status)
        exit_code, number = (code, None) if code >= 0 else (_SIGNAL_BASE - code, -code)
        cause: Cause = "exited" if number is None else "signalled"
        if self._forced is not None:
            cause, number = self._forced, None
            exit_code = EXIT_TIMED_OUT if cause == "timed_out" else EXIT_CANCELLED
        is_full, was_filled = self._room.read(self._context, has_failed=exit_code != 0)
        return ExecReply(
            exec_id=self.request.exec_id,
            exit_code=exit_code,
            signal=number,
            cause=cause,
            cwd=os.fsdecode(self._cwd),
            duration_us=self._duration_us,
            shell_restarted=False,
            disk_full=is_full,
            cpu_us=int((usage.ru_utime + usage.ru_stime) * 1_000_000),
            peak_bytes=usage.ru_maxrss * _KIB,
            written_bytes=usage.ru_oublock * _BLOCK_BYTES,
            disk_filled=was_filled,
        )

    def _stop_clocks(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._ladder is not None:
            self._ladder.stop()

    def _on_error(self, _error: Exception) -> None:
        """The time limit could not be acted on: end the program by the shortest way."""
        if self._scope is not None and self._end is None:
            self._scope.kill()

    # Streams -------------------------------------------------------------------------------------------------------

    def _on_output(self, kind: Kind, chunk: bytes) -> None:
        if self._sink is None or self._stdio is None:
            return
        self._sink.send(kind, chunk)
        if self._sink is not None and self._sink.is_full:
            self._stdio.pause()

    def _on_room(self) -> None:
        if self._sink is not None:
            self._sink.refresh_input()
