"""One run of a session: a command, a background process or a terminal. Its state, its owner and its readers.

The session's `Runs` own every run and drive it; whoever asked holds it, and may leave. A run is cancelled when its last
holder leaves before the end, unless it was to be detached or never had one. Its output goes to its log, which readers
follow and from which it is read long after. Does not know shells, leases or HTTP.

What a caller holds of a run: its claim on it, and its place in the output. It gives back what it holds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import attrs
import trio

from runner.wire.protocol import CHUNK_BYTES, Kind
from sandkasten import logcontext
from sandkasten.actors.core import Reply
from sandkasten.actors.runs.output import Collector
from sandkasten.links.runner import RunnerConnection
from sandkasten.model import (
    ExecEnd,
    ExecInfo,
    ExecKind,
    ExecSpec,
    ExecState,
    OnDisconnect,
    Output,
    Stream,
)
from sandkasten.model.errors import Capacity, ExecEnded, InvalidRequest, RunnerLost, SandkastenError
from sandkasten.model.run import make_exec_id
from sandkasten.output.spool import LogReader, OutputLog, ReaderMode

if TYPE_CHECKING:
    from sandkasten.actors.runs.accounting import Account
    from sandkasten.actors.runs.persistence import RunKeeping
    from sandkasten.actors.runs.shells import Shell

TRACEPARENT = "TRACEPARENT"
"""The variable that names the trace, after the header."""

_COMMAND_CHARS = 200
"""How much of what runs is shown."""

PATIENCE_S = 30.0
"""How long after its time limit a run's end must come; covers the kill ladder in a sandbox starved of CPU."""

MAX_STDIN_SENDERS = 16
"""How many may wait in `queue_stdin` of one run: each holds all that it sends."""

_BULK_CHARS = 4096
"""What runs is not kept after the end if it is longer, or if it came with more than this of input."""

_UNDIGESTED = ("exec_id", "has_new_id", "env", "stdin")
_DIGESTED = tuple(field.name for field in attrs.fields(ExecSpec) if field.name not in _UNDIGESTED)


class Run:
    """See the module's docstring. Made by whoever asks, taken over by `Runs.admit`."""

    def __init__(
        self,
        spec: ExecSpec,
        *,
        timeout_ms: int | None,
        kind: ExecKind = ExecKind.COMMAND,
        on_disconnect: OnDisconnect = OnDisconnect.CANCEL,
        collector: Collector | None = None,
        interactive: bool = False,
        keep_alive: bool = False,
        pass_trace: bool = False,
    ) -> None:
        """`collector` gets all output besides the log. `pass_trace`: what runs is told the trace it is part of."""
        self.spec = spec
        self.kind = kind
        self.is_program = spec.is_program
        self.timeout_ms = timeout_ms
        self.interactive = interactive
        self.keep_alive = keep_alive
        self.trace = logcontext.origin.get().trace
        self.pass_trace = pass_trace
        self.collector = collector
        self.exec_id = spec.exec_id or make_exec_id()
        self.has_new_id = spec.exec_id is None or spec.has_new_id
        """No other run can have had it."""
        self.digest = _digest(spec, kind, keep_alive=keep_alive)
        self.shell: Shell | None = None
        """The shell it runs in; it may be closed, and another one of its name be opened, before the run is over."""
        self.command = _shown(spec, interactive=interactive)
        self.size = spec.terminal
        self.state = ExecState.QUEUED
        self.created_at = datetime.now(UTC)
        self.asked_at = trio.current_time()
        self.first_output_at: float | None = None
        self.began_at: float | None = None
        """When the shell took it, `trio.current_time()` seconds."""
        self.pid: int | None = None
        self.group: str | None = None
        """The cgroup of its own; what it left running is still in it."""
        self.end: ExecEnd | None = None
        self.ended: Reply[ExecEnd] = Reply()
        self.started: Reply[None] = Reply()
        self.log: OutputLog | None = None
        self.on_begin: Callable[[Run], None] | None = None
        """Called when it begins; must not block."""
        self.on_output: Callable[[Output], None] | None = None
        """Whom each piece of output is shown to besides; must not block."""
        self.wait_room: Callable[[], Awaitable[None]] | None = None
        """Waited for after each piece of output."""
        self.scope = trio.CancelScope()
        """Cancelling it closes the connection to the runner and ends the run here; PID 1 is told to forget it."""
        self.account: Account | None = None
        """What is counted of it, from its turn to its end."""
        self.readings: tuple[int, ...] = ()
        """The same as numbers, to be written down."""
        self.keeping: RunKeeping | None = None
        """Writes it down for the next daemon."""
        self.facts_json: bytes | None = None
        """What is written down of it, as of now; None if that has to be made anew."""
        self.goes_on = False
        """This daemon stops, the run does not."""
        self._connection: RunnerConnection | None = None
        self.connected = trio.Event()
        self._stdin_lock = trio.Lock()
        self._stdin_senders = 0
        self._is_stdin_open = spec.stdin is not None or spec.stdin_open or spec.terminal is not None
        self._on_disconnect = on_disconnect
        self._holders = 0
        self._cancel: Callable[[Run, bool], None] | None = None
        self._is_cancelled = False
        self._started_at: datetime | None = None
        self._ended_at: datetime | None = None
        self._start_by = math.inf
        self._waited_for_reader_s = 0.0
        self._end_by = math.inf
        self._stopped_at: float | None = None
        self.wake: Callable[[], Awaitable[None]] | None = None
        """Makes a paused session go on."""

    # Facts ------------------------------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        return self.state is ExecState.ENDED

    @property
    def is_detached(self) -> bool:
        """Whether it is to go on without a caller."""
        return self._on_disconnect is OnDisconnect.DETACH

    @property
    def last_line(self) -> str:
        return self.log.last_line if self.log is not None else ""

    @property
    def age_ms(self) -> int:
        """How long it has been running."""
        return 0 if self.began_at is None else round((trio.current_time() - self.began_at) * 1000)

    @property
    def info(self) -> ExecInfo:
        log = self.log
        return ExecInfo(
            exec_id=self.exec_id,
            kind=self.kind,
            state=self.state,
            command=self.command,
            created_at=self.created_at,
            shell=None if self.is_program else self.spec.shell,
            started_at=self._started_at,
            ended_at=self._ended_at,
            pid=self.pid,
            end=self.end,
            stdout_bytes=log.stdout_bytes if log else 0,
            stderr_bytes=log.stderr_bytes if log else 0,
            first_sequence=log.first_sequence if log else 1,
            last_sequence=log.last_sequence if log else 0,
            last_line=self.last_line,
            keep_alive=self.keep_alive,
            terminal=self.size,
            trace_id=None if self.trace is None else self.trace.trace_id,
        )

    # Holders ----------------------------------------------------------------------------------------------------

    def admit(self, log: OutputLog, cancel: Callable[[Run, bool], None], *, ahead: Sequence[Run]) -> None:
        """Become a run of a session. `cancel(run, now)` has it cancelled; `ahead` are the runs before it."""
        self.log, self._cancel = log, cancel
        self._start_by = trio.current_time() + PATIENCE_S
        for run in ahead:
            self._start_by += math.inf if run.timeout_ms is None else run.timeout_ms / 1000 + PATIENCE_S

    def hold(self) -> None:
        """One more caller cares for this run."""
        self._holders += 1

    def leave(self, *, as_owner: bool) -> None:
        """One caller less. Without its owner a run goes on if it was to be detached, or while somebody else cares at
        that moment; those never cancel it. Never blocks, never raises."""
        self._holders -= 1
        if as_owner and self._on_disconnect is OnDisconnect.CANCEL:
            if self._holders == 0:
                self.cancel()
            else:
                self.detach()

    def cancel(self, *, now: bool = False) -> None:
        """Have it cancelled, if it has not ended; never blocks, never raises."""
        if self._cancel is not None and not self.has_ended and (now or not self._is_cancelled):
            self._is_cancelled = True
            self._end_by = min(self._end_by, trio.current_time() + PATIENCE_S)
            if self._connection is not None:
                self._connection.hasten(self.answer_by)
            self._cancel(self, now)

    def detach(self) -> None:
        """From now on it goes on without a caller."""
        if not self.is_detached:
            self._on_disconnect = OnDisconnect.DETACH
            self.facts_json = None
            self._note_change()

    # Input ------------------------------------------------------------------------------------------------------

    async def send_stdin(self, data: bytes, *, close: bool = False) -> None:
        """Send input, in turn with other senders. Waits while the run does not read.

        Raises:
            ExecEnded: it has ended, or ended meanwhile.
            InvalidRequest: it has no open standard input.
            SessionPaused: the session is, and is not to go on by itself.
        """
        if self.wake is not None:
            await self.wake()
        await self.connected.wait()
        async with self._stdin_lock:
            connection = self._connection
            if self.has_ended or connection is None:
                raise ExecEnded("the run has ended", exec_id=self.exec_id)
            if not self._is_stdin_open:
                raise InvalidRequest("the run has no open standard input", stdin="is not open")
            try:
                for start in range(0, len(data), CHUNK_BYTES):
                    self._require_connected(connection)
                    await connection.send(Kind.DATA, data[start : start + CHUNK_BYTES])
                if close and self.size is None:
                    self._require_connected(connection)
                    await connection.send(Kind.END)
                    self._is_stdin_open = False
                return
            except RunnerLost:  # the connection went with the run, whose end may be that of the sandbox
                pass
            with trio.move_on_after(PATIENCE_S):
                await self.ended.wait_done()
            raise ExecEnded("the run has ended", exec_id=self.exec_id)

    def note_input_ended(self) -> None:
        """An earlier daemon said all that there was to say. A terminal's input never ends."""
        self._is_stdin_open = self._is_stdin_open and self.size is not None

    async def queue_stdin(self, data: bytes, *, close: bool) -> None:
        """As `send_stdin`, for senders whose number nothing else bounds.

        Raises:
            Capacity: too many wait already.
        """
        if self._stdin_senders >= MAX_STDIN_SENDERS:
            raise Capacity("too many senders wait for the run to read", max_senders=MAX_STDIN_SENDERS)
        self._stdin_senders += 1
        try:
            await self.send_stdin(data, close=close)
        finally:
            self._stdin_senders -= 1

    def _require_connected(self, connection: RunnerConnection) -> None:
        """A connection that went back carries another request by now: not one more byte for it."""
        if self._connection is not connection:
            raise ExecEnded("the run has ended", exec_id=self.exec_id)

    # The end ----------------------------------------------------------------------------------------------------

    def begin(self, pid: int) -> None:
        """The shell has taken it, or the program was started."""
        self.state = ExecState.RUNNING
        self.began_at = trio.current_time()
        self._started_at = datetime.now(UTC)
        self.pid = pid or None
        if self.timeout_ms is not None:
            self._end_by = min(self._end_by, self.began_at + self.timeout_ms / 1000 + PATIENCE_S)
        self.started.set(None)
        self._note_change()
        if self.on_begin is not None:
            self.on_begin(self)

    def recover(
        self, *, started_at: datetime | None, ended_at: datetime | None, pid: int | None, end: ExecEnd | None
    ) -> None:
        """Become what the run was to an earlier daemon."""
        self._started_at, self._ended_at, self.pid, self.end = started_at, ended_at, pid, end
        if end is not None:
            self.state = ExecState.ENDED
            self.connected.set()
            self.started.set(None)
            self.ended.set(end)
        elif started_at is not None:
            self.go_on((datetime.now(UTC) - started_at).total_seconds(), pid)

    def go_on(self, age_s: float, pid: int | None) -> None:
        """It runs, and has for so long."""
        self.state = ExecState.RUNNING
        self.began_at = self.asked_at = trio.current_time() - max(0.0, age_s)
        self._started_at = self._started_at or datetime.now(UTC) - timedelta(seconds=max(0.0, age_s))
        self.pid = pid or None
        if self.timeout_ms is not None:  # PID 1 knows how much of it is left
            self._end_by = trio.current_time() + self.timeout_ms / 1000 + PATIENCE_S
        self.started.set(None)

    def finish(self, end: ExecEnd) -> None:
        """No more output comes; it ended like this."""
        if not self.has_ended:
            self._close()
            self.end = end
            self._note_change()
            self.ended.set(end)
            self.started.set(None)

    def fail(self, error: SandkastenError) -> None:
        """It never ran, or its end will never be known."""
        if not self.has_ended:
            self._close()
            self.started.fail(error)
            self.ended.fail(error)

    def _close(self) -> None:
        self.state = ExecState.ENDED
        self.connected.set()
        self.collector = self.on_begin = self.on_output = self.wait_room = self.wake = None
        self._ended_at = datetime.now(UTC)
        if self._is_bulky():
            self.spec = attrs.evolve(self.spec, command=None, argv=None, env={}, stdin=None)
        if self.log is not None:
            self.log.close()

    def _note_change(self) -> None:
        if self.keeping is not None:
            self.keeping.changed(self)

    def _is_bulky(self) -> bool:
        spec = self.spec
        texts = (spec.command or "", *(spec.argv or ()), *spec.env.values())
        return len(spec.stdin or b"") + sum(map(len, texts)) > _BULK_CHARS

    # What the driver uses ---------------------------------------------------------------------------------------

    def connect(self, connection: RunnerConnection | None) -> None:
        """Input goes there from now on; None: nowhere any more."""
        self._connection = connection
        self.connected.set()

    def stop_clock(self) -> None:
        """The session stands still: nothing is late."""
        self._stopped_at = trio.current_time()
        if self._connection is not None:
            self._connection.wait_until(math.inf)

    def start_clock(self) -> None:
        """It goes on: what was due is due by so much later."""
        if self._stopped_at is not None:
            still_s = trio.current_time() - self._stopped_at
            self._start_by += still_s
            self._end_by += still_s
            self._stopped_at = None
        if self._connection is not None:
            self._connection.wait_until(self.answer_by)

    @property
    def answer_by(self) -> float:
        """When a runner that says nothing is given up: long after it had to end the run itself."""
        if self._stopped_at is not None:
            return math.inf
        if self.began_at is None:
            return min(self._start_by, self._end_by)
        return self._end_by + self._waited_for_reader_s

    async def put(self, stream: Stream, data: bytes) -> None:
        """Take a piece of output: to the log, which holds us up while a reader lags, and to who else wants it."""
        assert self.log is not None
        began = trio.current_time()
        if self.first_output_at is None:
            self.first_output_at = began
        piece = await self.log.append(stream, data)
        if self.collector is not None:
            self.collector.add(piece)
        if self.on_output is not None:
            self.on_output(piece)
        if self.wait_room is not None:
            await self.wait_room()
        if self.keeping is not None and self.keeping.put(self, piece):
            await self.keeping.wait_written(self)
        self._waited_for_reader_s += trio.current_time() - began


def _digest(spec: ExecSpec, kind: ExecKind, *, keep_alive: bool) -> bytes:
    """Return what two requests for the same run have in common: everything but the id."""
    facts = [getattr(spec, name) for name in _DIGESTED]
    small = repr((kind.value, keep_alive, sorted(spec.env.items()), spec.stdin is None, facts))
    digest = hashlib.blake2b(small.encode("utf-8", "surrogatepass"), digest_size=16)
    digest.update(spec.stdin or b"")
    return digest.digest()


def _shown(spec: ExecSpec, *, interactive: bool) -> str:
    if interactive:
        return "(interactive)"
    text = " ".join(spec.argv) if spec.argv is not None else spec.command or ""
    return text[:_COMMAND_CHARS]


class Joined(SandkastenError):
    """Another run has the id: to be waited for by who asked. Never leaves this package."""


class Hold:
    """One caller's claim on a run: on the one it asked for, or on the one that had its id already."""

    def __init__(self, wish: Run) -> None:
        self.run = wish
        self._is_owner = False
        self._is_taken = False
        self._is_left = False

    def take(self, run: Run) -> None:
        """Hold that run; a caller who has left meanwhile leaves it at once."""
        self._is_owner = run is self.run
        self.run, self._is_taken = run, True
        run.hold()
        if self._is_left:
            run.leave(as_owner=self._is_owner)

    def leave(self) -> None:
        """Care no more; never blocks, never raises, and more than once is fine."""
        if not self._is_left:
            self._is_left = True
            if self._is_taken:
                self.run.leave(as_owner=self._is_owner)


class RunReader:
    """A reader of one run; implements `supervisor.ExecStream`."""

    def __init__(self, run: Run, *, after: int = 0, is_joined: bool = True) -> None:
        """Raises `ExecGone` when what follows `after` is not kept any more."""
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
        await self._run.send_stdin(data)

    async def close_stdin(self) -> None:
        """See `supervisor.ExecStream`."""
        await self._run.send_stdin(b"", close=True)

    def close(self) -> None:
        """Stop holding the run up."""
        self._pieces.close()
