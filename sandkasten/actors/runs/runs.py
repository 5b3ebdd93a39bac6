"""The runs of one session: admits them, queues them per shell, drives them to their end and keeps them for a while.

A repeated id joins the run that has the id, or is refused, and never runs twice. Runs in one shell are served in order,
all other runs at the same time; every number of runs is bounded. Belongs to its session's actor and runs in the actor's
nursery. The life of one run: `admit`, `_serve`, `_settle`, `_retire`. Events about a run hold no command, no output and
no environment.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import islice
from signal import SIGKILL
from typing import Any

import attrs
import trio

from runner.wire import protocol
from sandkasten.actors.core import Ref
from sandkasten.actors.runs.accounting import Accounts, cut_short
from sandkasten.actors.runs.cgroups import RunCgroups
from sandkasten.actors.runs.driver import CONTROL_S, drive, drive_again
from sandkasten.actors.runs.persistence import ExecIds, Keep, RunPersistence, gone, text_bytes
from sandkasten.actors.runs.run import Run, RunClaim, RunObserver
from sandkasten.actors.runs.session_services import SessionServices
from sandkasten.actors.runs.shells import Shells
from sandkasten.counters.cgroup import CgroupStats
from sandkasten.counters.metrics import Metrics
from sandkasten.errors import (
    Capacity,
    Conflict,
    ExecEnded,
    ExecNotFound,
    InvalidRequest,
    SandkastenError,
    ShellBusy,
    ShuttingDown,
)
from sandkasten.journal.egress import SessionDenials
from sandkasten.model import Cause, EventType, ExecEnd, ExecInfo, ExecKind, TerminalSize
from sandkasten.output.store import SessionOutput

MAX_ACTIVE = 80
"""Runs of one session that wait or run; PID 1 takes 128 connections, file transfers and watching included."""

_MAX_PROGRAMS = protocol.MAX_PROGRAMS
_MAX_INPUT_BYTES = 64 * 1024 * 1024
"""Input that came with the requests of all runs together; each run keeps its input until the end."""

_CANCEL_TRIES = 20
_CANCEL_PAUSE_S = 0.05

_BEGINNINGS = {
    ExecKind.COMMAND: EventType.EXEC_STARTED,
    ExecKind.PROCESS: EventType.PROCESS_STARTED,
    ExecKind.TERMINAL: EventType.TERMINAL_OPENED,
}
_ENDINGS = {
    ExecKind.COMMAND: EventType.EXEC_ENDED,
    ExecKind.PROCESS: EventType.PROCESS_EXITED,
    ExecKind.TERMINAL: EventType.TERMINAL_CLOSED,
}


class Runs(RunObserver):
    """The runs of one session. Makes the observers that all of them have: accounting, persistence, and `Runs` itself,
    which emits the events."""

    def __init__(
        self,
        host: SessionServices,
        *,
        nsinit: Ref,
        stats: CgroupStats,
        output: SessionOutput,
        queue_length: int,
        metrics: Metrics,
        keep: Keep,
        denials: SessionDenials,
    ) -> None:
        self._host = host
        self._output = output
        self._queue_length = queue_length
        self._known: OrderedDict[str, Run] = OrderedDict()
        self.ids = ExecIds(output, keep.max_exec_ids)
        self._active: dict[str, Run] = {}
        self.cgroups = RunCgroups(nsinit, host.session_id, stats.groups)
        self.shells = Shells(host, self.cgroups)
        self.persistence = RunPersistence(
            host,
            keep,
            output,
            find=self._known.get,
            active=self._active.values(),
            readings_of=lambda run: self.accounts.readings_of(run),
        )
        self.accounts = Accounts(
            stats,
            self.cgroups,
            active=self._active.values(),
            count_shells=lambda: self.shells.count,
            denials=denials,
        )
        self._observers = (self.accounts, self.persistence, self)
        self._listeners = (self.persistence,)
        output.when_gone(self._forget)
        self._metrics = metrics
        metrics.queues.add(self)

    # Admission --------------------------------------------------------------------------------------------------

    def admit(self, claim: RunClaim) -> None:
        """Begin the claimed run, or give the claim the run that has the same id.

        Raises:
            Conflict: the run with this id is of another request.
            ExecGone: the id was used by a run that is not kept any more.
            ExecIdsExhausted: the session can remember no more used ids.
            ShellNotFound, ShellBusy, Capacity.
        """
        wanted = claim.run
        known = self._known.get(wanted.exec_id)
        if known is None:
            self.ids.check_new(wanted)
            self._start(wanted)
            claim.take(wanted)
        elif known.request.digest == wanted.request.digest:
            claim.take(known)
        else:
            raise Conflict("another run has this exec_id", exec_id=wanted.exec_id, status=known.state.value)

    @property
    def under_way(self) -> Collection[str]:
        """Ids of the runs that run or wait for their turn, as of whenever they are looked at."""
        return self._active.keys()

    def _start(self, run: Run) -> None:
        self._host.check_run()
        if len(self._active) >= MAX_ACTIVE:
            raise Capacity("this session runs all it may at a time", max_active=MAX_ACTIVE)
        name = run.request.shell
        shell = None if name is None else self.shells.get(name)
        queue = self._programs() if shell is None else shell.runs
        if sum(len(each.request.spec.stdin or b"") for each in (*self._active.values(), run)) > _MAX_INPUT_BYTES:
            raise Capacity("too much input waits in this session", max_input_bytes=_MAX_INPUT_BYTES)
        if shell is None and len(queue) >= _MAX_PROGRAMS:
            raise Capacity("this session runs all the programs it may at a time", max_programs=_MAX_PROGRAMS)
        if shell is not None and len(queue) >= self._queue_length:
            raise _busy(f"{len(queue)} commands are waiting for this shell", queue, self._queue_length)
        self._take(run, ahead=() if shell is None else shell.runs)
        run.admit(shell)
        self._host.start_task(self._serve, run)

    def _take(self, run: Run, *, ahead: Sequence[Run] = ()) -> None:
        """Make a run that has not ended a run of this session, behind the runs `ahead`."""
        run.join(
            self._output.open(run.exec_id),
            observers=self._observers,
            listeners=self._listeners,
            ahead=ahead,
            cancel=self._request_cancel,
            wake=self._host.wake,
        )
        self._known[run.exec_id] = self._active[run.exec_id] = run
        if run.request.is_activity:
            self._host.begin_activity()

    def _programs(self) -> list[Run]:
        return [run for run in self._active.values() if run.request.is_program]

    def stop_clocks(self) -> None:
        """Stop all time limits: the session is about to be frozen."""
        self.persistence.note_pause(is_paused=True)
        for run in self._active.values():
            run.stop_clock()

    def start_clocks(self) -> None:
        """Let the time limits go on: the session is thawed."""
        self.persistence.note_pause(is_paused=False)
        for run in self._active.values():
            run.start_clock()

    @property
    def running(self) -> int:
        """The number of runs that have begun and not ended."""
        return sum(run.has_begun for run in self._active.values())

    @property
    def queued(self) -> int:
        """The number of runs that wait for their turn."""
        return len(self._active) - self.running

    # Runs of an earlier daemon ----------------------------------------------------------------------------------

    def recover(self, run: Run, readings: tuple[int, ...]) -> None:
        """Take over a run that an earlier daemon wrote down, with an empty log. A run without an end is resumed or
        given up as soon as PID 1 has listed its runs."""
        if not run.has_ended:
            self._take(run)
            assert run.log is not None
            run.log.note_earlier()
            self.accounts.restore(run, readings)
            return
        run.join(self._output.open(run.exec_id), cancel=self._request_cancel, wake=self._host.wake)
        self._known[run.exec_id] = run
        if run.cgroup is not None:
            self.cgroups.adopt(run.cgroup)

    def recovered(self, run: Run) -> None:
        """Keep the log of an ended run, which has been filled again."""
        self._output.retire(run.exec_id, text_bytes=text_bytes(run))

    def give_up(self, run: Run) -> None:
        """End a run that PID 1 does not have any more."""
        run.finish(cut_short(run, Cause.DAEMON_RESTARTED, self._host.cwd))
        self._retire(run)

    def resume(self, run: Run, *, is_orphan: bool, is_over: bool = False) -> None:
        """Go on with a run that PID 1 has; end it if its shell was closed. A run that is over waits for no shell: only
        its end and the rest of its output are to be fetched."""
        name = run.request.shell
        shell = None if name is None else self.shells.find(name)
        if shell is None and name is not None:
            self.persistence.unwanted((run.exec_id,))
            self.give_up(run)
            return
        if shell is not None and not is_over:
            run.enter(shell)
        self._host.start_task(partial(self._serve_again, run, is_orphan=is_orphan))

    @property
    def is_full(self) -> bool:
        return len(self._active) >= MAX_ACTIVE

    def is_used(self, exec_id: str) -> bool:
        return exec_id in self._known or self.ids.is_remembered(exec_id)

    @property
    def active(self) -> Sequence[Run]:
        """The runs that wait or run."""
        return list(self._active.values())

    # Looking up -------------------------------------------------------------------------------------------------

    def find(self, exec_id: str) -> Run:
        """Return the run with that id. Raises `ExecNotFound`, `ExecGone`."""
        run = self._known.get(exec_id)
        if run is not None:
            return run
        if self.ids.is_used(exec_id):
            raise gone(exec_id)
        raise ExecNotFound("no such run", exec_id=exec_id[:128])

    @property
    def known(self) -> int:
        """The number of runs that are kept, ended ones included."""
        return len(self._known)

    def newest(self, limit: int) -> Sequence[ExecInfo]:
        """Return the newest runs that are kept, oldest first."""
        return [run.info for run in islice(reversed(self._known.values()), limit)][::-1]

    def newest_first(self) -> Iterator[Run]:
        """Yield all runs that are kept."""
        return reversed(self._known.values())

    def infos(self) -> Sequence[ExecInfo]:
        """Return all runs that are kept, oldest first."""
        return [run.info for run in self._known.values()]

    def _forget(self, exec_id: str) -> None:
        """Remember the id alone of a run whose output is not kept any more, so that the id is not run again."""
        if self._known.pop(exec_id, None) is not None:
            self.persistence.forget(exec_id)

    # One run ----------------------------------------------------------------------------------------------------

    async def _serve(self, run: Run) -> None:
        cgroup = None
        try:
            with run.scope:
                if run.shell is None:
                    cgroup = await self.cgroups.make()
                    run.enter_cgroup(cgroup.name)
                reply = await drive(run, self._host.link, cgroup, ticket=self.persistence.ticket(run))
                await self._settle(run, reply)
            if not run.has_ended:
                run.finish(cut_short(run, Cause.CANCELLED, self._host.cwd))
        except SandkastenError as error:
            await self._fail(run, error)
        finally:
            self._leave(run)
            if cgroup is not None:
                self.cgroups.release(cgroup)
                self._host.start_task(self.cgroups.discard, cgroup.name)

    async def _serve_again(self, run: Run, *, is_orphan: bool) -> None:
        """Serve a run that an earlier daemon began and PID 1 has; cancel an orphan, which has no caller any more."""
        try:
            self.accounts.resume(run)
            if is_orphan:
                run.cancel()
            with run.scope:
                reply = await drive_again(run, self._host.link)
                is_ours = is_orphan or not run.has_begun
                cancelled = Cause.DAEMON_RESTARTED if is_ours else Cause.CANCELLED
                await self._settle(run, reply, cancelled=cancelled)
            if not run.has_ended:
                run.finish(cut_short(run, Cause.CANCELLED, self._host.cwd))
        except SandkastenError as error:
            await self._fail(run, error, lost=Cause.DAEMON_RESTARTED)
        finally:
            goes_on = self._leave(run)
            if run.cgroup is not None and not goes_on:
                self.cgroups.adopt(run.cgroup)
                self._host.start_task(self.cgroups.discard, run.cgroup)

    def _leave(self, run: Run) -> bool:
        """Retire a run that has ended or that this daemon has to leave. Return whether the run goes on without it."""
        goes_on = False
        if not run.has_ended:
            cause = self._host.cause_of_stop
            goes_on = cause is Cause.DAEMON_RESTARTED and run.has_begun
            if goes_on:
                run.fail(ShuttingDown("the daemon stops; the run goes on, and the next daemon knows it by its id"))
            else:
                run.finish(cut_short(run, cause, self._host.cwd))
        self._retire(run, goes_on=goes_on)
        return goes_on

    def began(self, run: Run) -> None:
        event, facts = _beginning(run)
        self._host.emit(event, **facts)

    async def _settle(self, run: Run, reply: protocol.ExecReply, *, cancelled: Cause = Cause.CANCELLED) -> None:
        end = await self.accounts.end_of(run, reply, self._host.find_victim)
        if end.cause is Cause.CANCELLED:
            end = attrs.evolve(end, cause=cancelled)
        run.finish(end)
        if run.shell is not None:
            self.shells.note_cwd(run.shell, reply.cwd)

    async def _fail(self, run: Run, error: SandkastenError, *, lost: Cause | None = None) -> None:
        """End a run that failed outside of the shell: the sandbox is dead or hostile, or PID 1 refused the run. `lost`
        is the cause of end of a run that an earlier daemon began and PID 1 does not have any more."""
        if isinstance(error, ShellBusy) and run.is_behind_others and run.shell is not None:
            words = f"the command could not begin within {run.request.queue_timeout_ms} ms"
            error = _busy(words, run.shell.runs, self._queue_length)
        told = await self._host.translate(error)
        if self._host.has_died.is_set() and run.has_begun:
            run.finish(cut_short(run, Cause.SANDBOX_DIED, self._host.cwd))
        elif lost is not None:
            run.finish(cut_short(run, lost, self._host.cwd))
        else:
            run.fail(told)

    def _retire(self, run: Run, *, goes_on: bool = False) -> None:
        del self._active[run.exec_id]
        if run.shell is not None:
            run.shell.remove(run)
        if run.request.is_activity:
            self._host.end_activity()
        if goes_on:
            return
        if run.end is None:  # refused: the caller may try the same id again
            self.accounts.forget(run)
            self.persistence.discard(run.exec_id)
            self._known.pop(run.exec_id, None)
            self._output.discard(run.exec_id)
            return
        self._output.retire(run.exec_id, text_bytes=text_bytes(run))
        self._measure(run, run.end)
        event, facts = _ending(run, run.end)
        self._host.emit(event, **facts)

    def _measure(self, run: Run, end: ExecEnd) -> None:
        clock, now = run.clock, trio.current_time()
        began, output = clock.began_at, clock.first_output_at
        self._metrics.note_run(
            run.request.kind,
            end.cause,
            waited_s=None if began is None else began - clock.asked_at,
            ran_s=None if began is None else now - began,
            first_output_s=None if began is None or output is None else output - began,
        )

    # Reaching a run ---------------------------------------------------------------------------------------------

    async def signal(self, run: Run, number: int) -> None:
        """Send a signal to the processes of the run. Raises `ExecEnded`, `Conflict`."""
        if number == SIGKILL:
            self.accounts.note_kill(run)
        await self._control(run, protocol.Signal(run.exec_id, number))

    async def resize(self, run: Run, size: TerminalSize) -> None:
        """Change the size of the run's terminal. Raises `ExecEnded`, `InvalidRequest`."""
        if run.size is None and not run.has_ended:
            raise InvalidRequest("the run has no terminal", exec_id=run.exec_id)
        await self._control(run, protocol.Resize(run.exec_id, protocol.TerminalSize(size.cols, size.rows)))
        run.resize(size)

    async def _control(self, run: Run, request: protocol.Signal | protocol.Resize) -> None:
        if run.has_ended:
            raise ExecEnded("the run has ended", exec_id=run.exec_id)
        if not run.has_begun:
            raise Conflict("the run has not begun; it can be cancelled", exec_id=run.exec_id, status=run.state.value)
        await self._host.ask_runner(request, protocol.Done)

    async def kill_rest(self, run: Run) -> None:
        """Wait for the end of a program, and kill the processes that it left running."""
        await run.ended.wait_done()
        if run.cgroup is not None:
            await self.cgroups.kill(run.cgroup)

    def _request_cancel(self, run: Run, now: bool) -> None:
        self._host.start_task(self._cancel, run, now)

    async def _cancel(self, run: Run, now: bool) -> None:
        """Ask PID 1 to cancel the run, and again while the run may still be on its way to PID 1. If that fails, cancel
        by closing the connection. The driver waits no longer for the end than `RunClock.answer_by`."""
        with trio.move_on_after(CONTROL_S):
            await run.input.connected.wait()
        for _ in range(_CANCEL_TRIES):
            if run.has_ended:
                return
            try:
                await self._host.ask_runner(protocol.Cancel(run.exec_id, now), protocol.Done)
            except ExecEnded:
                with trio.move_on_after(_CANCEL_PAUSE_S):
                    await run.ended.wait_done()
            except SandkastenError:
                run.scope.cancel()
                return
            else:
                return
        if not run.has_begun:
            run.scope.cancel()


def _busy(message: str, queue: Sequence[Run], limit: int) -> ShellBusy:
    running = queue[0]
    return ShellBusy(
        message,
        exec_id=running.exec_id,
        age_ms=running.clock.age_ms,
        last_line=running.last_line,
        queue_length=limit,
    )


def _beginning(run: Run) -> tuple[EventType, dict[str, Any]]:  # JSON values
    """Return the event of a run that has begun."""
    request = run.request
    facts: dict[str, Any] = {"exec_id": run.exec_id}
    match request.kind:
        case ExecKind.COMMAND:
            facts |= {"shell": request.shell, "timeout_ms": request.timeout_ms}
        case ExecKind.PROCESS:
            facts |= {"pid": run.pid, "keep_alive": request.keep_alive}
        case ExecKind.TERMINAL:
            size = run.size
            facts |= {"shell": request.shell, "cols": size.cols if size else None, "rows": size.rows if size else None}
    return _BEGINNINGS[request.kind], facts


def _ending(run: Run, end: ExecEnd) -> tuple[EventType, dict[str, Any]]:  # JSON values
    """Return type and data of the event that tells of a run's end."""
    facts: dict[str, Any] = {
        "exec_id": run.exec_id,
        "exit_code": end.exit_code,
        "signal": end.signal,
        "cause": end.cause.value,
        "duration_ms": end.duration_ms,
        "victim": end.victim,
    }
    kind = run.request.kind
    if kind is not ExecKind.TERMINAL and run.log is not None:
        facts |= {
            "cpu_ms": end.usage.cpu_ms,
            "peak_memory_bytes": end.usage.peak_memory_bytes,
            "written_bytes": end.usage.written_bytes,
            "stdout_bytes": run.log.stdout_bytes,
            "stderr_bytes": run.log.stderr_bytes,
        }
    if kind is ExecKind.COMMAND:
        facts |= {"shell": run.request.shell, "shell_restarted": end.shell_restarted}
    return _ENDINGS[kind], facts
