"""The runs of one session: admits them, queues them per shell, drives them to their end and keeps them for a while.

A repeated id joins the run that has it, or is refused, and never runs twice. Runs in one shell are served in order,
all others beside each other; every number of them is bounded. Belongs to its session's actor and runs in its nursery.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar, TypeVarTuple

import attrs
import trio

from runner import protocol
from sandkasten.actors import run_events
from sandkasten.actors.actor import Ref
from sandkasten.actors.exec_account import Account, cut_short
from sandkasten.actors.groups import Groups
from sandkasten.actors.run import Run
from sandkasten.actors.run_driver import CONTROL_S, drive, is_lost
from sandkasten.actors.run_reader import Hold
from sandkasten.actors.shells import Shells
from sandkasten.errors import (
    Capacity,
    Conflict,
    ExecEnded,
    ExecGone,
    ExecNotFound,
    InvalidRequest,
    RunnerLost,
    RunnerProtocolError,
    SandkastenError,
    ShellBusy,
)
from sandkasten.model import Cause, EventType, ExecEnd, ExecInfo, ExecKind, TerminalSize
from sandkasten.runtime.cgroup_stats import CgroupStats
from sandkasten.runtime.metrics import Metrics
from sandkasten.runtime.runner_link import RunnerLink
from sandkasten.runtime.spool import RunLogs

A = TypeVar("A")
Ts = TypeVarTuple("Ts")

MAX_ACTIVE = 80
"""Runs of one session that wait or run; PID 1 takes 128 connections, file transfers and watching included."""

_MAX_PROGRAMS = protocol.MAX_PROGRAMS
_MAX_INPUT_BYTES = 64 * 1024 * 1024
"""Input of runs that came with their requests, and is kept until they end."""

_MAX_GONE = 4096
"""Ids of runs that are not kept any more."""

_DEATH_NEWS_S = 2.0
"""How long after a lost connection the news of PID 1's death may take."""

_CANCEL_TRIES = 20
_CANCEL_PAUSE_S = 0.05


class Host(Protocol):
    """What a session offers to what works in it."""

    @property
    def session_id(self) -> str: ...

    @property
    def cwd(self) -> str: ...

    @property
    def link(self) -> RunnerLink: ...

    @property
    def has_died(self) -> trio.Event: ...

    @property
    def cause_of_stop(self) -> Cause:
        """Why a run that is still there when the session's actor ends has ended."""
        ...

    def start_task(self, work: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> None:
        """Run `work` beside the mailbox, unless the session is ending."""
        ...

    def begin_activity(self) -> None: ...

    def end_activity(self) -> None: ...

    def emit(self, event: EventType, **data: object) -> None: ...

    def distrust(self, error: RunnerProtocolError) -> None:
        """PID 1 broke the contract: the session ends."""
        ...

    async def ask_runner(self, request: object, answer: type[A], *, fd: int | None = None) -> A:
        """Make a request of PID 1 that is answered at once. Raises what it was refused with."""
        ...

    def note_cwd(self, cwd: str) -> None:
        """The default shell is in that directory now."""
        ...

    def gone(self) -> SandkastenError: ...

    async def wake(self) -> None:
        """Make a paused session go on, if it may. Raises `SessionPaused`."""
        ...

    async def find_victim(self) -> str | None:
        """Return the name of the process that was killed for memory last."""
        ...


class Runs:
    """See the module's docstring."""

    def __init__(
        self, host: Host, *, zygote: Ref, stats: CgroupStats, logs: RunLogs, queue_length: int, metrics: Metrics
    ) -> None:
        self._host = host
        self._stats = stats
        self._logs = logs
        self._queue_length = queue_length
        self._known: OrderedDict[str, Run] = OrderedDict()
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._active: dict[str, Run] = {}
        self.groups = Groups(zygote, host.session_id)
        self.shells = Shells(host, self.groups)
        logs.on_gone = self._forget
        self._metrics = metrics
        metrics.queues.add(self)

    # Admission --------------------------------------------------------------------------------------------------

    def admit(self, hold: Hold) -> None:
        """Begin the run of a hold, or let it hold the one that has its id already.

        Raises:
            Conflict: the id is that of another run.
            ExecGone: the id was used, and its run is not kept any more.
            ShellNotFound, ShellBusy, Capacity.
        """
        wish = hold.run
        known = self._known.get(wish.exec_id)
        if known is None:
            if wish.exec_id in self._gone:
                raise _gone(wish.exec_id)
            self._start(wish)
            hold.take(wish)
        elif known.digest == wish.digest:
            hold.take(known)
        else:
            raise Conflict("another run has this exec_id", exec_id=wish.exec_id, status=known.state.value)

    def _start(self, run: Run) -> None:
        if len(self._active) >= MAX_ACTIVE:
            raise Capacity("this session runs all it may at a time", max_active=MAX_ACTIVE)
        run.shell = None if run.is_program else self.shells.get(run.spec.shell)
        queue = self._programs() if run.shell is None else run.shell.runs
        if sum(len(each.spec.stdin or b"") for each in (*self._active.values(), run)) > _MAX_INPUT_BYTES:
            raise Capacity("too much input waits in this session", max_input_bytes=_MAX_INPUT_BYTES)
        if run.is_program and len(queue) >= _MAX_PROGRAMS:
            raise Capacity("this session runs all the programs it may at a time", max_programs=_MAX_PROGRAMS)
        if not run.is_program and len(queue) >= self._queue_length:
            raise _busy(queue, self._queue_length)
        run.admit(self._logs.open(run.exec_id), self._request_cancel, ahead=() if run.is_program else queue)
        run.on_begin = self._on_begin
        run.wake = self._host.wake
        self._known[run.exec_id] = self._active[run.exec_id] = run
        if not run.is_program:
            queue.append(run)
        if _is_activity(run):
            self._host.begin_activity()
        self._host.start_task(self._serve, run)

    def _programs(self) -> list[Run]:
        return [run for run in self._active.values() if run.is_program]

    def stop_clocks(self) -> None:
        """The session is about to stand still."""
        for run in self._active.values():
            run.stop_clock()

    def start_clocks(self) -> None:
        """It goes on."""
        for run in self._active.values():
            run.start_clock()

    @property
    def running(self) -> int:
        """How many run now."""
        return sum(run.began_at is not None for run in self._active.values())

    @property
    def queued(self) -> int:
        """How many wait for their turn."""
        return len(self._active) - self.running

    # Looking up -------------------------------------------------------------------------------------------------

    def find(self, exec_id: str) -> Run:
        """Raises `ExecNotFound`, `ExecGone`."""
        run = self._known.get(exec_id)
        if run is not None:
            return run
        if exec_id in self._gone:
            raise _gone(exec_id)
        raise ExecNotFound("no such run", exec_id=exec_id[:128])

    def infos(self) -> Sequence[ExecInfo]:
        """Return all runs that are known, oldest first."""
        return [run.info for run in self._known.values()]

    def _forget(self, exec_id: str) -> None:
        """Its output is not kept any more: remember the id alone, so that it is not run again."""
        if self._known.pop(exec_id, None) is not None:
            self._gone[exec_id] = None
        if len(self._gone) > _MAX_GONE:
            self._gone.popitem(last=False)

    # One run ----------------------------------------------------------------------------------------------------

    async def _serve(self, run: Run) -> None:
        group = None
        try:
            account = Account.open(self._stats, is_alone=len(self._active) == 1)
            with run.scope:
                if run.is_program:
                    group = await self.groups.make()
                    run.group = group.name
                reply = await drive(run, self._host.link, group)
                await self._settle(run, account, reply)
            if not run.has_ended:
                run.finish(cut_short(run, Cause.CANCELLED, self._host.cwd))
        except SandkastenError as error:
            await self._judge(run, error)
        finally:
            if not run.has_ended:
                run.finish(cut_short(run, self._host.cause_of_stop, self._host.cwd))
            self._retire(run)
            if group is not None:
                self.groups.release(group)
                self._host.start_task(self.groups.discard, group.name)

    def _on_begin(self, run: Run) -> None:
        event, facts = run_events.beginning(run)
        self._host.emit(event, **facts)
        if run.shell is not None and run.shell.screen is not None:
            run.shell.screen.begin(run)

    async def _settle(self, run: Run, account: Account, reply: protocol.ExecReply) -> None:
        end = account.close(run, reply, self._stats, is_alone=len(self._active) == 1)
        if end.cause is Cause.OOM:
            end = await _with_victim(end, self._host)
        run.finish(end)
        if run.shell is not None:
            self.shells.note_cwd(run.shell, reply.cwd)

    async def _judge(self, run: Run, error: SandkastenError) -> None:
        """A run failed below the shell: find out whether the sandbox is dead, hostile, or only said no."""
        if isinstance(error, RunnerLost):
            with trio.move_on_after(_DEATH_NEWS_S):
                await self._host.has_died.wait()
        if isinstance(error, RunnerProtocolError):
            self._host.distrust(error)
        has_died = self._host.has_died.is_set()
        if has_died and run.began_at is not None:
            run.finish(cut_short(run, Cause.SANDBOX_DIED, self._host.cwd))
        else:
            run.fail(self._host.gone() if has_died and is_lost(error) else error)

    def _retire(self, run: Run) -> None:
        del self._active[run.exec_id]
        if run.shell is not None:
            run.shell.runs.remove(run)
            if run.shell.screen is not None:
                run.shell.screen.end(run)
        if _is_activity(run):
            self._host.end_activity()
        if run.end is None:  # refused: it may be tried again
            self._known.pop(run.exec_id, None)
            self._logs.discard(run.exec_id)
            return
        self._logs.retire(run.exec_id)
        self._measure(run, run.end)
        event, facts = run_events.ending(run, run.end)
        self._host.emit(event, **facts)

    def _measure(self, run: Run, end: ExecEnd) -> None:
        began, now = run.began_at, trio.current_time()
        self._metrics.note_run(
            run.kind.value,
            end.cause.value,
            waited_s=None if began is None else began - run.asked_at,
            ran_s=None if began is None else now - began,
            first_output_s=None if began is None or run.first_output_at is None else run.first_output_at - began,
        )

    # Reaching a run ---------------------------------------------------------------------------------------------

    async def signal(self, run: Run, number: int) -> None:
        """Send a signal to what the run started. Raises `ExecEnded`."""
        await self._control(run, protocol.Signal(run.exec_id, number))

    async def resize(self, run: Run, size: TerminalSize) -> None:
        """Change the size of the run's terminal. Raises `ExecEnded`, `InvalidRequest`."""
        if run.size is None and not run.has_ended:
            raise InvalidRequest("the run has no terminal", exec_id=run.exec_id)
        await self._control(run, protocol.Resize(run.exec_id, protocol.TerminalSize(size.cols, size.rows)))
        run.size = size

    async def _control(self, run: Run, request: protocol.Signal | protocol.Resize) -> None:
        if run.has_ended:
            raise ExecEnded("the run has ended", exec_id=run.exec_id)
        if run.began_at is None:
            raise Conflict("the run has not begun; it can be cancelled", exec_id=run.exec_id, status=run.state.value)
        await self._host.ask_runner(request, protocol.Done)

    async def kill_rest(self, run: Run) -> None:
        """Kill what an ended program left running."""
        await run.ended.wait_done()
        if run.group is not None:
            await self.groups.kill(run.group)

    def _request_cancel(self, run: Run, now: bool) -> None:
        self._host.start_task(self._cancel, run, now)

    async def _cancel(self, run: Run, now: bool) -> None:
        """Ask PID 1, again while the run may still be on its way there. What can't be asked for is cancelled by closing
        its connection; the driver waits so long for an end, and no longer."""
        with trio.move_on_after(CONTROL_S):
            await run.connected.wait()
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
        if run.began_at is None:
            run.scope.cancel()


def _is_activity(run: Run) -> bool:
    """Whether the run holds off the session's idle end. Terminals do by their viewers."""
    return run.kind is ExecKind.COMMAND or run.keep_alive


def _busy(queue: Sequence[Run], limit: int) -> ShellBusy:
    running = queue[0]
    return ShellBusy(
        f"{len(queue)} commands are waiting for this shell",
        exec_id=running.exec_id,
        age_ms=running.age_ms,
        last_line=running.last_line,
        queue_length=limit,
    )


def _gone(exec_id: str) -> ExecGone:
    return ExecGone("this run is not kept any more", exec_id=exec_id)


async def _with_victim(end: ExecEnd, host: Host) -> ExecEnd:
    return attrs.evolve(end, victim=await host.find_victim())
