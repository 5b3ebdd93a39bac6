"""One run of a session (a command, a background process or a terminal): its state, its readers, and who observes it.

`Run` holds the state and changes it itself; `Runs` drive it. Accounting, persistence and screens are `RunObserver`s:
the run calls them when it is admitted, begins, writes, changes and ends. A caller has a `RunClaim` on a run and may
leave; a run is cancelled when its last caller leaves before the end, unless it is detached or never had a caller. Its
output goes to its log, which readers follow. Knows no lease and no HTTP.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from operator import attrgetter

import attrs
import trio

from runner.wire.protocol import CHUNK_BYTES, Kind
from sandkasten import logcontext
from sandkasten.actors.core import Reply
from sandkasten.errors import Capacity, ExecEnded, InvalidRequest, RunnerLost, SandkastenError
from sandkasten.links.runner import RunnerConnection
from sandkasten.logcontext import Trace
from sandkasten.model import (
    ExecEnd,
    ExecInfo,
    ExecKind,
    ExecSpec,
    ExecState,
    OnDisconnect,
    Output,
    ProcessSpec,
    SessionOptions,
    ShellInfo,
    Stream,
    TerminalSize,
)
from sandkasten.model.run import make_exec_id
from sandkasten.output.log import LogReader, OutputLog, ReaderMode
from sandkasten.output.records import Input

PATIENCE_S = 30.0
"""Longest time between a run's time limit and its end; covers the kill ladder in a sandbox starved of CPU."""

MAX_STDIN_SENDERS = 16
"""Callers that may wait in `RunInput.queue` of one run: each holds all that it sends."""

WORKSPACE_DIR = "/workspace"

_COMMAND_CHARS = 200
"""Length of a command as shown."""

_BULK_CHARS = 4096
"""A command, its environment and its input are dropped at the end of the run if they are longer together."""

_UNDIGESTED = ("exec_id", "has_new_id", "env", "stdin", "queue_timeout_ms", "streams", "reads_both")
_DIGESTED = attrgetter(*(field.name for field in attrs.fields(ExecSpec) if field.name not in _UNDIGESTED))


def _digest(request: RunRequest) -> bytes:
    """Return what two requests for the same run have in common: everything but the id."""
    spec = request.spec
    facts = list(_DIGESTED(spec))
    small = repr((request.kind.value, request.keep_alive, sorted(spec.env.items()), spec.stdin is None, facts))
    digest = hashlib.blake2b(small.encode("utf-8", "surrogatepass"), digest_size=16)
    digest.update(spec.stdin or b"")
    return digest.digest()


def _input(request: RunRequest) -> Input:
    if request.spec.stdin_open:
        return "open"
    return "none" if request.spec.stdin is None else "given"


def _shell(request: RunRequest) -> str | None:
    return None if request.spec.is_program else request.spec.shell


def _shown(request: RunRequest) -> str:
    if request.interactive:
        return "(interactive)"
    spec = request.spec
    text = " ".join(spec.argv) if spec.argv is not None else spec.command or ""
    return text[:_COMMAND_CHARS]


@attrs.frozen(eq=False)
class RunRequest:
    """A run as a caller asks for it. Everything from `exec_id` on follows from the rest, except in a request that is
    read back from what an earlier daemon wrote down.

    `interactive`: a shell's prompt, or a program that is typed to. `pass_trace`: the run gets its trace in its
    environment. `digest` is equal for two requests of one id only if they ask for the same.
    """

    spec: ExecSpec
    timeout_ms: int | None
    kind: ExecKind = ExecKind.COMMAND
    on_disconnect: OnDisconnect = OnDisconnect.CANCEL
    interactive: bool = False
    queue_timeout_ms: int | None = None
    keep_alive: bool = False
    pass_trace: bool = False
    trace: Trace | None = attrs.field(factory=lambda: logcontext.origin.get().trace)
    exec_id: str = attrs.Factory(lambda self: self.spec.exec_id or make_exec_id(), takes_self=True)
    digest: bytes = attrs.Factory(_digest, takes_self=True)
    input: Input = attrs.Factory(_input, takes_self=True)
    command: str = attrs.Factory(_shown, takes_self=True)
    created_at: datetime = attrs.field(factory=partial(datetime.now, UTC))
    shell: str | None = attrs.Factory(_shell, takes_self=True)
    """The name of the shell asked for; None for a program, which is a process of its own beside the shells."""

    @classmethod
    def of_process(cls, spec: ProcessSpec, options: SessionOptions, *, pass_trace: bool = False) -> RunRequest:
        """Return the request for a background process."""
        return cls(
            spec.program.in_session(options),
            timeout_ms=spec.timeout_ms,
            kind=ExecKind.PROCESS,
            on_disconnect=OnDisconnect.DETACH,
            keep_alive=spec.keep_alive,
            pass_trace=pass_trace,
        )

    @property
    def is_program(self) -> bool:
        return self.shell is None

    @property
    def has_new_id(self) -> bool:
        """Whether no other run can have had the id."""
        return self.spec.exec_id is None or self.spec.has_new_id

    @property
    def is_activity(self) -> bool:
        """Whether the run holds off the session's idle end. Terminals do by their viewers."""
        return self.kind is ExecKind.COMMAND or self.keep_alive

    def without_bulk(self) -> RunRequest:
        """Return the request without command, environment and input, if they are long."""
        spec = self.spec
        texts = (spec.command or "", *(spec.argv or ()), *spec.env.values())
        if len(spec.stdin or b"") + sum(map(len, texts)) <= _BULK_CHARS:
            return self
        return attrs.evolve(self, spec=attrs.evolve(spec, command=None, argv=None, env={}, stdin=None))


class RunObserver:
    """Base of all that observe runs. A run calls these methods at once, in the order in which its observers were added;
    none may block or raise. The run drops its observers when it has ended."""

    def admitted(self, run: Run) -> None:
        """The run belongs to a session from now on: it waits in its shell's queue or is about to begin."""

    def began(self, run: Run) -> None:
        """The shell has taken the run, or its program was started."""

    def changed(self, run: Run) -> None:
        """A fact about the run that is written down has changed."""

    def wrote(self, run: Run, piece: Output) -> bool:
        """The run wrote `piece`, which is in its log. Return whether the run is to be held up (`wait_room`)."""
        return False

    async def wait_room(self, run: Run) -> None:
        """Wait until the run may write on."""

    def ended(self, run: Run) -> None:
        """The run has ended as `run.end` says; with None it was refused, or its end will never be known here."""


class RunClock:
    """When a run was asked for, began and ended, and until when the runner must answer. The clock of a paused session
    stands still: nothing is late. Moments are `trio.current_time()` seconds, except the two of type `datetime`."""

    __slots__ = (
        "_end_by",
        "_start_by",
        "_stopped_at",
        "_waited_s",
        "asked_at",
        "began_at",
        "ended_at",
        "first_output_at",
        "started_at",
    )

    def __init__(self) -> None:
        self.asked_at = trio.current_time()
        self.began_at: float | None = None
        self.first_output_at: float | None = None
        self.started_at: datetime | None = None
        self.ended_at: datetime | None = None
        self._start_by = self._end_by = math.inf
        self._stopped_at: float | None = None
        self._waited_s = 0.0

    @property
    def answer_by(self) -> float:
        """When a runner that says nothing is given up: long after it had to end the run itself."""
        if self._stopped_at is not None:
            return math.inf
        if self.began_at is None:
            return min(self._start_by, self._end_by)
        return self._end_by + self._waited_s

    @property
    def age_ms(self) -> int:
        """Time since the run began, 0 before that."""
        return 0 if self.began_at is None else round((trio.current_time() - self.began_at) * 1000)

    @property
    def queued_ms(self) -> int:
        """Time from the request to the run's turn, or until now."""
        until = trio.current_time() if self.began_at is None else self.began_at
        return round((until - self.asked_at) * 1000)

    def enqueue(self, ahead: Sequence[Run]) -> None:
        """The run waits behind others since it was asked for."""
        self._start_by = self.asked_at + PATIENCE_S
        for run in ahead:
            timeout_ms = run.request.timeout_ms
            self._start_by += math.inf if timeout_ms is None else timeout_ms / 1000 + PATIENCE_S

    def begin(self, timeout_ms: int | None) -> None:
        """Note that the run begins at this moment; it has to end `timeout_ms` and `PATIENCE_S` later."""
        self.began_at = trio.current_time()
        self.started_at = datetime.now(UTC)
        if timeout_ms is not None:
            self._end_by = min(self._end_by, self.began_at + timeout_ms / 1000 + PATIENCE_S)

    def go_on(self, age_s: float, timeout_ms: int | None) -> None:
        """The run began `age_s` ago, under an earlier daemon. PID 1 knows how much of its time limit is left."""
        age_s = max(0.0, age_s)
        self.began_at = self.asked_at = trio.current_time() - age_s
        self.started_at = self.started_at or datetime.now(UTC) - timedelta(seconds=age_s)
        if timeout_ms is not None:
            self._end_by = trio.current_time() + timeout_ms / 1000 + PATIENCE_S

    def recover(self, started_at: datetime | None, ended_at: datetime | None) -> None:
        """Take over the times that an earlier daemon wrote down."""
        self.started_at, self.ended_at = started_at, ended_at

    def hasten(self) -> None:
        """The run was cancelled: its end must come soon."""
        self._end_by = min(self._end_by, trio.current_time() + PATIENCE_S)

    def end(self) -> None:
        """Note that the run has ended at this moment."""
        self.ended_at = datetime.now(UTC)

    def note_output(self, arrived_at: float) -> None:
        """Output that came at that moment has been taken: the time its readers held the run up is not the runner's."""
        if self.first_output_at is None:
            self.first_output_at = arrived_at
        self._waited_s += trio.current_time() - arrived_at

    def stop(self) -> None:
        """Stand still."""
        self._stopped_at = trio.current_time()

    def start(self) -> None:
        """Go on: all that was due is due later by the time the clock stood still."""
        if self._stopped_at is not None:
            still_s = trio.current_time() - self._stopped_at
            self._start_by += still_s
            self._end_by += still_s
            self._stopped_at = None


class RunInput:
    """The standard input of one run: its senders take turns on the connection to the runner."""

    __slots__ = (
        "_ended",
        "_exec_id",
        "_is_closed",
        "_is_open",
        "_is_terminal",
        "_lock",
        "_senders",
        "_wake",
        "connected",
        "connection",
    )

    def __init__(self, request: RunRequest, ended: Reply[ExecEnd]) -> None:
        spec = request.spec
        self.connection: RunnerConnection | None = None
        """The connection on which the runner serves the run."""
        self.connected = trio.Event()
        """Set with the first connection, and at the end of the run."""
        self._exec_id = request.exec_id
        self._is_terminal = spec.terminal is not None
        self._is_open = spec.stdin is not None or spec.stdin_open or self._is_terminal
        self._is_closed = False
        self._ended = ended
        self._lock = trio.Lock()
        self._senders = 0
        self._wake: Callable[[], Awaitable[None]] | None = None

    def admit(self, wake: Callable[[], Awaitable[None]]) -> None:
        """`wake` makes a paused session go on. Raises `SessionPaused`."""
        self._wake = wake

    def connect(self, connection: RunnerConnection | None) -> None:
        """Send to `connection` from now on; with None nowhere any more."""
        self.connection = connection
        self.connected.set()

    def close(self) -> None:
        """Take no more input, since the run has ended."""
        self._is_closed = True
        self._wake = None
        self.connected.set()

    def note_ended(self) -> None:
        """An earlier daemon sent all of the input. A terminal's input never ends."""
        self._is_open = self._is_open and self._is_terminal

    async def send(self, data: bytes, *, close: bool = False) -> None:
        """Send `data`, in turn with other senders. Waits while the run does not read.

        Raises:
            ExecEnded: the run has ended, or ended meanwhile.
            InvalidRequest: the run has no open standard input.
            SessionPaused: the session is paused and does not resume by itself.
        """
        if self._wake is not None:
            await self._wake()
        await self.connected.wait()
        async with self._lock:
            connection = self.connection
            if connection is None or self._is_closed:
                raise self._too_late()
            if not self._is_open:
                raise InvalidRequest("the run has no open standard input", stdin="is not open")
            try:
                for start in range(0, len(data), CHUNK_BYTES):
                    self._require_connected(connection)
                    await connection.send(Kind.DATA, data[start : start + CHUNK_BYTES])
                if close and not self._is_terminal:
                    self._require_connected(connection)
                    await connection.send(Kind.END)
                    self._is_open = False
                return
            except RunnerLost:  # the connection went with the run, whose end may be that of the sandbox
                pass
            with trio.move_on_after(PATIENCE_S):
                await self._ended.wait_done()
            raise self._too_late()

    async def queue(self, data: bytes, *, close: bool) -> None:
        """As `send`, for senders whose number nothing else bounds.

        Raises:
            Capacity: too many senders wait already.
        """
        if self._senders >= MAX_STDIN_SENDERS:
            raise Capacity("too many senders wait for the run to read", max_senders=MAX_STDIN_SENDERS)
        self._senders += 1
        try:
            await self.send(data, close=close)
        finally:
            self._senders -= 1

    def _require_connected(self, connection: RunnerConnection) -> None:
        """A connection that went back carries another request by now: not one more byte for it."""
        if self.connection is not connection:
            raise self._too_late()

    def _too_late(self) -> ExecEnded:
        return ExecEnded("the run has ended", exec_id=self._exec_id)


class Run:
    """The state of one run. Made by the caller that asks for it, taken over by `Runs.admit`."""

    def __init__(self, request: RunRequest, *listeners: RunObserver) -> None:
        """`listeners` observe the output alone."""
        self.request = request
        self.exec_id = request.exec_id
        self.state = ExecState.QUEUED
        self.clock = RunClock()
        self.ended: Reply[ExecEnd] = Reply()
        self.started: Reply[None] = Reply()
        self.input = RunInput(request, self.ended)
        self.size = request.spec.terminal
        self.end: ExecEnd | None = None
        self.log: OutputLog | None = None
        self.shell: Shell | None = None
        """The shell of the run. The shell may be closed, and another one of its name opened, before the run ends."""
        self.cgroup: str | None = None
        """The run cgroup of a program; processes that the program left running are still in it."""
        self.pid: int | None = None
        self.is_detached = request.on_disconnect is OnDisconnect.DETACH
        """Whether the run goes on without a caller."""
        self.scope = trio.CancelScope()
        """Cancelling this scope closes the connection to the runner and ends the run here; PID 1 is told to forget the
        run.
        """
        self._observers: tuple[RunObserver, ...] = ()
        self._listeners = listeners
        """The observers of the output: there are few, and there is much of it."""
        self._cancel: Callable[[Run, bool], None] | None = None
        self._is_cancelled = False
        self._callers = 0

    # Readers ----------------------------------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        return self.clock.began_at is not None

    @property
    def has_ended(self) -> bool:
        return self.state is ExecState.ENDED

    @property
    def is_behind_others(self) -> bool:
        """Whether the run waits behind others of its shell."""
        return self.shell is not None and self.shell.runs[0] is not self

    @property
    def output_bytes(self) -> int:
        """Number of bytes that the run has written."""
        return 0 if self.log is None else self.log.stdout_bytes + self.log.stderr_bytes

    @property
    def last_line(self) -> str:
        return self.log.last_line if self.log is not None else ""

    @property
    def info(self) -> ExecInfo:
        log, request, clock = self.log, self.request, self.clock
        return ExecInfo(
            exec_id=self.exec_id,
            kind=request.kind,
            state=self.state,
            command=request.command,
            created_at=request.created_at,
            shell=request.shell,
            started_at=clock.started_at,
            ended_at=clock.ended_at,
            pid=self.pid,
            end=self.end,
            stdout_bytes=log.stdout_bytes if log else 0,
            stderr_bytes=log.stderr_bytes if log else 0,
            first_sequence=log.first_sequence if log else 1,
            last_sequence=log.last_sequence if log else 0,
            last_line=self.last_line,
            keep_alive=request.keep_alive,
            terminal=self.size,
            trace_id=None if request.trace is None else request.trace.trace_id,
        )

    # Observers --------------------------------------------------------------------------------------------------

    def observe(self, observer: RunObserver) -> None:
        """Have `observer` called from now on, until the run has ended."""
        if not self.has_ended:
            self._observers += (observer,)
            self._listeners += (observer,)

    def unobserve(self, observer: RunObserver) -> None:
        """Have `observer` called no more."""
        self._observers = _without(observer, self._observers)
        self._listeners = _without(observer, self._listeners)

    def note_change(self) -> None:
        """Tell the observers that a fact which is written down has changed."""
        for observer in self._observers:
            observer.changed(self)

    # Callers ----------------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Count one more caller."""
        self._callers += 1

    def leave(self, *, as_owner: bool) -> None:
        """Count one caller less. Without its owner a run goes on if it is detached, or if another caller has it at
        that moment; such a caller never cancels it. Never blocks, never raises."""
        self._callers -= 1
        if as_owner and not self.is_detached:
            if self._callers == 0:
                self.cancel()
            else:
                self.detach()

    def cancel(self, *, now: bool = False) -> None:
        """Have the run cancelled unless it has ended; never blocks, never raises."""
        if self._cancel is not None and not self.has_ended and (now or not self._is_cancelled):
            self._is_cancelled = True
            self.clock.hasten()
            if self.input.connection is not None:
                self.input.connection.hasten(self.clock.answer_by)
            self._cancel(self, now)

    def detach(self) -> None:
        """Let the run go on without a caller."""
        if not self.is_detached:
            self.is_detached = True
            self.note_change()

    # Life -------------------------------------------------------------------------------------------------------

    def join(
        self,
        log: OutputLog,
        *,
        observers: tuple[RunObserver, ...] = (),
        listeners: tuple[RunObserver, ...] = (),
        ahead: Sequence[Run] = (),
        cancel: Callable[[Run, bool], None],
        wake: Callable[[], Awaitable[None]],
    ) -> None:
        """Become a run of a session. `observers` see all but the output, `listeners` the output; `ahead` are the runs
        that come first. `cancel(run, now)` has the run cancelled; `wake` makes a paused session go on."""
        self.log, self._cancel = log, cancel
        self.input.admit(wake)
        self._observers, self._listeners = observers, listeners + self._listeners
        self.clock.enqueue(ahead)

    def admit(self, shell: Shell | None) -> None:
        """Wait for a turn in `shell`, or, with None, for a process of one's own; tell the observers."""
        if shell is not None:
            self.enter(shell)
        for observer in self._observers:
            observer.admitted(self)

    def enter(self, shell: Shell) -> None:
        """Wait in the queue of `shell`, or run there."""
        self.shell = shell
        shell.enqueue(self)

    def enter_cgroup(self, name: str) -> None:
        """Record the run cgroup that the run's program is born in."""
        self.cgroup = name

    def begin(self, pid: int) -> None:
        """The shell has taken the run, or its program was started."""
        self.state = ExecState.RUNNING
        self.clock.begin(self.request.timeout_ms)
        self.pid = pid or None
        self.started.set(None)
        for observer in self._observers:
            observer.began(self)

    def go_on(self, age_s: float, pid: int | None) -> None:
        """Run, as the run has done for so long under an earlier daemon."""
        self.state = ExecState.RUNNING
        self.clock.go_on(age_s, self.request.timeout_ms)
        self.pid = pid or None
        self.started.set(None)

    def recover(
        self,
        *,
        cgroup: str | None,
        started_at: datetime | None,
        ended_at: datetime | None,
        pid: int | None,
        end: ExecEnd | None,
    ) -> None:
        """Become the run as an earlier daemon wrote it down."""
        self.cgroup, self.pid, self.end = cgroup, pid, end
        self.clock.recover(started_at, ended_at)
        if end is not None:
            self.state = ExecState.ENDED
            self.input.close()
            self.started.set(None)
            self.ended.set(end)
        elif started_at is not None:
            self.go_on((datetime.now(UTC) - started_at).total_seconds(), pid)

    async def put(self, stream: Stream, data: bytes) -> None:
        """Append output to the log, which waits while a reader lags, and show it to the observers."""
        assert self.log is not None
        arrived_at = trio.current_time()
        piece = await self.log.append(stream, data)
        # Everyone hears of the piece before anyone is waited for: a slow disk holds up the run, not its viewers.
        for observer in [each for each in self._listeners if each.wrote(self, piece)]:
            await observer.wait_room(self)
        self.clock.note_output(arrived_at)

    def resize(self, size: TerminalSize) -> None:
        """The run's terminal has that size now."""
        self.size = size

    def finish(self, end: ExecEnd) -> None:
        """End as `end` says; no more output comes."""
        if not self.has_ended:
            self.end = end
            self._close()
            self.ended.set(end)
            self.started.set(None)
            self._tell_ended()

    def fail(self, error: SandkastenError) -> None:
        """End with `error`: the run never ran, or its end will never be known here."""
        if not self.has_ended:
            self._close()
            self.started.fail(error)
            self.ended.fail(error)
            self._tell_ended()

    def _close(self) -> None:
        self.state = ExecState.ENDED
        self.input.close()
        self.clock.end()
        self.request = self.request.without_bulk()
        if self.log is not None:
            self.log.close()

    def _tell_ended(self) -> None:
        """Tell the observers, once. The waiters have their answer by then, even if an observer fails."""
        observers, self._observers, self._listeners = self._observers, (), ()
        for observer in observers:
            observer.ended(self)

    # The connection to the runner -------------------------------------------------------------------------------

    def stop_clock(self) -> None:
        """The session is paused: nothing is late."""
        self.clock.stop()
        if self.input.connection is not None:
            self.input.connection.wait_until(math.inf)

    def start_clock(self) -> None:
        """The session goes on, and so do the run's time limits."""
        self.clock.start()
        if self.input.connection is not None:
            self.input.connection.wait_until(self.clock.answer_by)


class Shell:
    """One persistent shell of a session: its directory, its run cgroup, and the queue of its runs."""

    def __init__(self, name: str, cwd: str = WORKSPACE_DIR, cgroup: str | None = None) -> None:
        self.name = name
        self.cwd = cwd
        self.cgroup = cgroup
        """None for the default shell, which shares the session's cgroup with PID 1."""
        self.runs: list[Run] = []
        """The runs of the shell in order, the running one first."""
        self._observers: tuple[RunObserver, ...] = ()

    @property
    def info(self) -> ShellInfo:
        return ShellInfo(
            name=self.name,
            cwd=self.cwd,
            running=self.runs[0].info if self.runs else None,
            queued=tuple(run.exec_id for run in self.runs[1:]),
        )

    def enqueue(self, run: Run) -> None:
        """Put a run behind the others."""
        self.runs.append(run)
        for observer in self._observers:
            run.observe(observer)

    def remove(self, run: Run) -> None:
        """Take an ended run out of the queue."""
        self.runs.remove(run)

    def note_cwd(self, cwd: str) -> None:
        """A command left the shell in that directory."""
        self.cwd = cwd

    def recover(self, cwd: str, cgroup: str | None) -> None:
        """PID 1 of a session that outlived its daemon says where the shell is."""
        self.cwd, self.cgroup = cwd, self.cgroup or cgroup

    def observe(self, observer: RunObserver) -> None:
        """Have `observer` called for all runs that are in the queue, or will be."""
        self._observers += (observer,)
        for run in self.runs:
            run.observe(observer)

    def unobserve(self, observer: RunObserver) -> None:
        """Have `observer` called no more."""
        self._observers = _without(observer, self._observers)
        for run in self.runs:
            run.unobserve(observer)


def _without(observer: RunObserver, observers: tuple[RunObserver, ...]) -> tuple[RunObserver, ...]:
    return tuple(each for each in observers if each is not observer)


class Joined(SandkastenError):
    """Another run has the id: the caller is to wait for that one. Never leaves the daemon's actors."""


class RunClaim:
    """One caller's claim on a run: on the one asked for, or on the one that had its id already."""

    def __init__(self, wanted: Run) -> None:
        self.run = wanted
        self._is_owner = False
        self._is_taken = False
        self._is_left = False

    def take(self, run: Run) -> None:
        """Claim `run`. A caller who has left meanwhile leaves it at once."""
        self._is_owner = run is self.run
        self.run, self._is_taken = run, True
        run.claim()
        if self._is_left:
            run.leave(as_owner=self._is_owner)

    def leave(self) -> None:
        """Give the claim up; never blocks, never raises, and may be called more than once."""
        if not self._is_left:
            self._is_left = True
            if self._is_taken:
                self.run.leave(as_owner=self._is_owner)


class RunReader:
    """A reader of one run; implements `supervisor.ExecStream`."""

    def __init__(self, run: Run, *, after: int = 0, is_joined: bool = True) -> None:
        """Raises `ExecGone` when the output behind `after` is not kept any more."""
        assert run.log is not None
        self._run = run
        self.is_joined = is_joined
        self._pieces: LogReader = run.log.reader(after=after, mode=ReaderMode.HOLDING)

    @property
    def exec_id(self) -> str:
        return self._run.exec_id

    @property
    def info(self) -> ExecInfo:
        return self._run.info

    def __aiter__(self) -> AsyncIterator[Output]:
        return self._pieces.__aiter__()

    async def wait_end(self) -> ExecEnd:
        """See `supervisor.ExecStream`."""
        self._pieces.close()
        return await self._run.ended.wait()

    def detach(self) -> None:
        """See `supervisor.ExecStream`."""
        self._run.detach()

    async def cancel(self) -> None:
        """See `supervisor.ExecStream`."""
        self._run.cancel()
        await trio.lowlevel.checkpoint()

    async def send_stdin(self, data: bytes) -> None:
        """See `supervisor.ExecStream`."""
        await self._run.input.send(data)

    async def close_stdin(self) -> None:
        """See `supervisor.ExecStream`."""
        await self._run.input.send(b"", close=True)

    def close(self) -> None:
        """Stop holding the run up."""
        self._pieces.close()
