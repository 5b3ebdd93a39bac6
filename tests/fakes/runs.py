"""Runs in memory: what a script makes of a command, process or terminal, with its log, readers and viewers.

A run has no task of its own: whoever reads it, waits for it or looks at it drives it on, so that a test decides when
something happens and nothing goes on behind its back. What a test wants to see is an event, a list or a counter here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Protocol

import attrs
import trio

from sandkasten import logcontext
from sandkasten.model import (
    Cause,
    ExecEnd,
    ExecInfo,
    ExecKind,
    ExecSpec,
    ExecState,
    Output,
    OutputSlice,
    ProcessSpec,
    Stream,
    TerminalSize,
    Usage,
    errors,
)
from sandkasten.model.run import make_exec_id

PIECE_BYTES = 64 * 1024
KEPT_BYTES = 1024 * 1024
SETTLED_PIECES = 10_000
"""Number of pieces that a run without a reader writes before somebody looks at the run."""

CANCELLED_CODE = 130
"""As after Ctrl-C."""

_HARMLESS = frozenset({17, 18, 23, 28})  # SIGCHLD, SIGCONT, SIGURG, SIGWINCH: signal(7)


@attrs.define
class Script:
    """Behaviour of a run: wait for `turn`, write `outputs`, `repeat` times, wait for `hold`, end (or raise).

    With `echo` what it is sent comes back, and it ends with its input (for a terminal: with Ctrl-D). Input is taken
    once `reads` is set. Signals end it, except those in `ignores`; cancelling does, unless it `is_tough` and it isn't
    done `now`.
    """

    outputs: Sequence[tuple[Stream, bytes]] = ()
    exit_code: int = 0
    cause: Cause = Cause.EXITED
    signal: int | None = None
    cwd: str = "/workspace"
    repeat: int = 1
    omitted: int = 0
    turn: trio.Event | None = None
    hold: trio.Event | None = None
    refusal: errors.SandkastenError | None = None
    failure: BaseException | None = None
    echo: bool = False
    reads: trio.Event | None = None
    ignores: frozenset[int] = frozenset()
    is_tough: bool = False
    usage: Usage = attrs.field(factory=Usage)
    victim: str | None = None
    restarts_shell: bool = False


class Positioned(Protocol):
    """A reader; `position` is the number of the piece that it took last."""

    position: int


class Run:
    """One run. `cancelled` is set when it was, by whatever way; `pieces_taken` counts what came from the script."""

    def __init__(
        self,
        spec: ExecSpec,
        script: Script,
        *,
        kind: ExecKind = ExecKind.COMMAND,
        process: ProcessSpec | None = None,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        self.spec = spec
        self.process = process
        self.script = script
        self.kind = kind
        self.exec_id = spec.exec_id or make_exec_id()
        self.created_at = datetime.now(UTC)
        self.trace = logcontext.origin.get().trace
        self.started_at: datetime | None = None
        self.ended_at: datetime | None = None
        self.end: ExecEnd | None = None
        self.cancelled = trio.Event()
        self.was_killed_now = False
        self.signals: list[int] = []
        self.sizes: list[TerminalSize] = [] if spec.terminal is None else [spec.terminal]
        self.stdin = bytearray(spec.stdin or b"")
        self.is_stdin_open = spec.stdin_open or spec.terminal is not None
        self.pieces_taken = 0
        self.readers: set[Positioned] = set()
        self.takers: set[object] = set()
        self.changed = trio.Event()
        self.on_end: Callable[[Run], None] | None = None
        self._kept_bytes = kept_bytes
        self._log: deque[Output] = deque()
        self._log_bytes = 0
        self._last_sequence = 0
        self._totals = dict.fromkeys(Stream, 0)
        self._dropped = dict.fromkeys(Stream, 0)
        if script.echo and spec.stdin:
            self.write(Stream.STDOUT, spec.stdin)

    # What a test does to it

    def write(self, stream: Stream, data: bytes) -> None:
        """Have the run write `data` now."""
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            self._last_sequence += 1
            self._log.append(Output(stream, piece, self._last_sequence))
            self._log_bytes += len(piece)
            self._totals[stream] += len(piece)
        while self._log_bytes > self._kept_bytes and not self._is_awaited(self._log[0].sequence):
            self._drop_first()
        self._notify()

    def finish(self, *, cause: Cause | None = None, exit_code: int | None = None, signal: int | None = None) -> None:
        """End the run now, as its script says unless told otherwise."""
        if self.end is not None:
            return
        timeout_ms = None if self.spec.unlimited or self.kind is not ExecKind.COMMAND else self.spec.timeout_ms or 0
        self.end = ExecEnd(
            exec_id=self.exec_id,
            exit_code=self.script.exit_code if exit_code is None else exit_code,
            signal=self.script.signal if signal is None else signal,
            cause=cause or self.script.cause,
            cwd=self.spec.cwd or self.script.cwd,
            duration_ms=7,
            timeout_ms=timeout_ms,
            shell_restarted=self.script.restarts_shell,
            usage=self.script.usage,
            victim=self.script.victim,
        )
        self.ended_at = datetime.now(UTC)
        self.is_stdin_open = False
        if self.on_end is not None:
            self.on_end(self)
        self._notify()

    def forget_output(self) -> None:
        """Let go of all output that was written so far."""
        while self._log:
            self._drop_first()

    # What the supervisor does with it

    @property
    def state(self) -> ExecState:
        if self.end is not None:
            return ExecState.ENDED
        return ExecState.QUEUED if self.started_at is None else ExecState.RUNNING

    @property
    def first_sequence(self) -> int:
        return self._log[0].sequence if self._log else self._last_sequence + 1

    @property
    def info(self) -> ExecInfo:
        """The run as it is; nothing is driven on."""
        command = self.spec.command if self.spec.command is not None else " ".join(self.spec.argv or ())
        lines = b"".join(piece.data for piece in list(self._log)[-8:]).splitlines()
        return ExecInfo(
            exec_id=self.exec_id,
            kind=self.kind,
            state=self.state,
            command=command[:200],
            created_at=self.created_at,
            shell=None if self.spec.is_program or self.kind is not ExecKind.COMMAND else self.spec.shell,
            started_at=self.started_at,
            ended_at=self.ended_at,
            pid=42 if self.kind is ExecKind.PROCESS else None,
            end=self.end,
            stdout_bytes=self._totals[Stream.STDOUT],
            stderr_bytes=self._totals[Stream.STDERR],
            first_sequence=self.first_sequence,
            last_sequence=self._last_sequence,
            last_line=lines[-1][:200].decode(errors="replace") if lines else "",
            keep_alive=self.process is not None and self.process.keep_alive,
            terminal=self.sizes[-1] if self.sizes else None,
            trace_id=None if self.trace is None else self.trace.trace_id,
        )

    @property
    def dropped_bytes(self) -> int:
        """Number of bytes of output that are not kept any more."""
        return sum(self._dropped.values())

    def start(self) -> None:
        """Begin the run: its turn has come."""
        if self.started_at is None:
            self.started_at = datetime.now(UTC)
            self._notify()

    def cancel(self, *, now: bool = False) -> None:
        if self.end is None and (now or not self.script.is_tough):
            self.was_killed_now = now
            self.finish(cause=Cause.CANCELLED, exit_code=CANCELLED_CODE)
            self.cancelled.set()

    def kill(self, number: int) -> None:
        """Send a signal."""
        self._need_running()
        self.signals.append(number)
        if number not in self.script.ignores | _HARMLESS:
            self.finish(cause=Cause.SIGNALLED, exit_code=128 + number, signal=number)

    def resize(self, size: TerminalSize) -> None:
        self._need_running()
        if not self.sizes:
            raise errors.InvalidRequest("the run has no terminal", exec_id=self.exec_id)
        self.sizes.append(size)

    async def send(self, data: bytes) -> None:
        """Take input, once `reads` is set."""
        self._need_stdin()
        await trio.lowlevel.checkpoint()
        while self.script.reads is not None and not self.script.reads.is_set() and self.end is None:
            await wait_any(self.script.reads, self.changed)
        self._need_stdin()
        self.stdin += data
        if self.script.echo:
            self.write(Stream.STDOUT, data)
        if self.sizes and self.script.echo and b"\x04" in data:
            self.finish()

    def close_stdin(self) -> None:
        self._need_running()
        self.is_stdin_open = False
        self._notify()

    def piece_after(self, sequence: int) -> Output | None:
        """Return the piece behind `sequence`, None if there is none yet. Raises `ExecGone`."""
        if sequence >= self._last_sequence:
            return None
        if sequence + 1 < self.first_sequence:
            raise errors.ExecGone("that output is not kept any more", first_sequence=self.first_sequence)
        return self._log[sequence + 1 - self.first_sequence]

    def output(self, stream: Stream | None, offset: int, limit: int) -> OutputSlice:
        """Return kept output by offset. Raises `ExecGone`."""
        wanted = set(Stream) if stream is None else {stream}
        first = sum(self._dropped[each] for each in wanted)
        total = sum(self._totals[each] for each in wanted)
        if offset < first:
            raise errors.ExecGone("that output is not kept any more", first_offset=first)
        kept = b"".join(piece.data for piece in self._log if piece.stream in wanted)
        data = kept[offset - first : offset - first + limit]
        return OutputSlice(
            data=data,
            offset=offset,
            next_offset=offset + len(data),
            first_offset=first,
            total_bytes=total,
            is_final=self.end is not None and offset + len(data) >= total,
        )

    def settle(self) -> None:
        """Catch up with what happened while nobody read. Memory stays at what is kept."""
        if self.readers or self.started_at is None:
            return
        for _ in range(SETTLED_PIECES):
            if self.end is not None or not self._step():
                return

    async def advance(self) -> None:
        """Go one step on at once, or wait until something changes. Raises the script's `failure`."""
        if self.end is not None or (self.started_at is not None and self._step()):
            return
        if self.started_at is None:
            await self.changed.wait()
            return
        if self._is_at_its_end() and self.script.failure is not None:
            raise self.script.failure
        if self.script.hold is not None and not self.script.hold.is_set() and not self._has_script():
            await wait_any(self.script.hold, self.changed)
        else:
            await self.changed.wait()

    async def wait_ended(self) -> ExecEnd:
        """Wait for the end, driving the run on if nobody reads it."""
        await trio.lowlevel.checkpoint()
        while self.end is None:
            if self.readers:
                await self.changed.wait()
            else:
                await self.advance()
                await trio.lowlevel.checkpoint()
        return self.end

    def taken(self) -> None:
        """A reader went on."""
        if self.changed.statistics().tasks_waiting:
            self._notify()

    def _step(self) -> bool:
        """Do what can be done now; False when something has to happen first."""
        if self._has_script():
            if self._log_bytes >= self._kept_bytes and self._is_awaited(self._log[0].sequence):
                return False
            stream, data = self.script.outputs[self.pieces_taken % len(self.script.outputs)]
            self.pieces_taken += 1
            self.write(stream, data)
            return True
        if self._is_at_its_end() and self.script.failure is None:
            self.finish()
            return True
        return False

    def _has_script(self) -> bool:
        return self.pieces_taken < len(self.script.outputs) * self.script.repeat

    def _is_at_its_end(self) -> bool:
        is_held = self.script.hold is not None and not self.script.hold.is_set()
        return not (self._has_script() or is_held or (self.script.echo and self.is_stdin_open))

    def _is_awaited(self, sequence: int) -> bool:
        return any(reader.position < sequence for reader in self.readers)

    def _drop_first(self) -> None:
        piece = self._log.popleft()
        self._log_bytes -= len(piece.data)
        self._dropped[piece.stream] += len(piece.data)

    def _need_running(self) -> None:
        if self.end is not None:
            raise errors.ExecEnded("the run has ended", exec_id=self.exec_id)

    def _need_stdin(self) -> None:
        self._need_running()
        if not self.is_stdin_open:
            raise errors.InvalidRequest("the run has no open standard input", exec_id=self.exec_id)

    def _notify(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


async def wait_any(*events: trio.Event) -> None:
    """Return when one of the events is set."""

    async def wait(event: trio.Event) -> None:
        await event.wait()
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for each in events:
            nursery.start_soon(wait, each)
