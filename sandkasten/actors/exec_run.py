"""One running command: what its reader holds, and the task that drives it over a runner connection.

The task belongs to the session actor, the reader to whoever asked; a bounded channel lies between them, so a reader
that stops reading stops this command's pipe and nothing else. Does not know leases, states or HTTP.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any

import trio

from runner import protocol
from runner.protocol import CHUNK_BYTES, Kind
from sandkasten.actors.actor import Reply
from sandkasten.actors.output import Collector
from sandkasten.errors import InvalidRequest, RunnerLost, RunnerProtocolError, SandboxError, SandkastenError
from sandkasten.model import ExecEnd, ExecSpec, Output, Stream
from sandkasten.runtime.runner_link import RunnerConnection, RunnerLink, decode_answer

_CHANNEL_PIECES = 8
"""Pieces of at most 64 KiB between the runner's socket and the reader."""

_RUNNER_PATIENCE_S = 30.0
"""How long after a command's timeout its end must come; covers the kill ladder in a sandbox starved of CPU."""

_LAST_LINE_CHARS = 200

_STREAMS = {Kind.STDOUT: Stream.STDOUT, Kind.STDERR: Stream.STDERR}


class ExecRun:
    """A command from its request to its end; implements `supervisor.ExecStream`."""

    def __init__(self, spec: ExecSpec, timeout_ms: int, collector: Collector | None = None) -> None:
        """With a `collector` the output goes there and iteration gives nothing."""
        self.spec = spec
        self.timeout_ms = timeout_ms
        self._exec_id = spec.exec_id or secrets.token_hex(8)
        self.started_at: float | None = None
        self.scope = trio.CancelScope()
        """Cancelling it closes the connection, which cancels the command in the sandbox."""
        self._collector = collector
        self._pieces, self._reader = trio.open_memory_channel[Output](_CHANNEL_PIECES)
        self._end: Reply[ExecEnd] = Reply()
        self._last_piece = b""
        self._has_ended = False
        self._waited_for_reader_s = 0.0
        self._start_by = math.inf
        self._connection: RunnerConnection | None = None

    @property
    def exec_id(self) -> str:
        return self._exec_id

    @property
    def last_line(self) -> str:
        """The last line of output that has come so far, at most `_LAST_LINE_CHARS` of it."""
        lines = self._last_piece[-4 * _LAST_LINE_CHARS :].decode("utf-8", "replace").rstrip("\n").splitlines()
        return lines[-1][-_LAST_LINE_CHARS:] if lines else ""

    @property
    def has_ended(self) -> bool:
        return self._has_ended

    def __aiter__(self) -> AsyncIterator[Output]:
        return self._reader

    async def wait_end(self) -> ExecEnd:
        """See `supervisor.ExecStream`."""
        async for _ in self._reader:
            pass
        return await self._end.wait()

    async def cancel(self) -> None:
        """See `supervisor.ExecStream`."""
        if self._connection is not None and not self._has_ended:
            await self._connection.send(Kind.CANCEL)

    def abandon(self) -> None:
        """The reader leaves. What still runs is cancelled; never blocks, never raises."""
        self._reader.close()
        if not self._has_ended:
            self.scope.cancel()

    def finish(self, end: ExecEnd) -> None:
        """No more output comes; the command ended like this."""
        self._has_ended = True
        self._end.set(end)
        self._pieces.close()

    def fail(self, error: SandkastenError) -> None:
        """The command's end will never be known."""
        self._has_ended = True
        self._end.fail(error)
        self._pieces.close()

    def expect_start(self, *, after: Sequence[ExecRun]) -> None:
        """Note by when the runner must have begun this command, behind those that are before it."""
        ahead_s = sum(run.timeout_ms / 1000 + _RUNNER_PATIENCE_S for run in after)
        self._start_by = trio.current_time() + ahead_s + _RUNNER_PATIENCE_S

    def answer(self, reply: Reply[ExecEnd]) -> None:
        """Answer with the end this command had."""
        self._end.copy_to(reply)

    async def drive(self, link: RunnerLink, started: Reply[None]) -> protocol.ExecReply:
        """Run the command to its end and return how it ended.

        `started` is answered when the shell has taken the command.

        Raises:
            RunnerLost, RunnerProtocolError: PID 1 is gone or hostile.
            SandkastenError: the runner refused the command.
        """
        async with link.connection() as connection:
            await connection.send_request(self._request())
            self._connection = connection
            try:
                if self.spec.stdin is None:
                    return await self._receive(connection, started)
                return await self._receive_while_sending(connection, started, self.spec.stdin)
            finally:
                self._connection = None

    def _request(self) -> protocol.Exec:
        return protocol.Exec(
            exec_id=self._exec_id,
            command=self.spec.command,
            timeout_ms=self.timeout_ms,
            cwd=self.spec.cwd,
            env=dict(self.spec.env),
            stdin=self.spec.stdin is not None,
        )

    async def _receive_while_sending(
        self, connection: RunnerConnection, started: Reply[None], stdin: bytes
    ) -> protocol.ExecReply:
        """Feed the command's standard input while its output comes; whichever end ends it, the other stops."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_send_input, connection, stdin)
                reply = await self._receive(connection, started)
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise unwrap(group) from None
        if connection.is_sending:  # cut in the middle of a frame: of no further use
            connection.is_idle = False
        return reply

    async def _receive(self, connection: RunnerConnection, started: Reply[None]) -> protocol.ExecReply:
        sequence = 0
        while True:
            kind, body = await connection.receive(deadline=self._answer_by())
            if kind in _STREAMS:
                sequence += 1
                await self._hand_out(Output(_STREAMS[kind], body, sequence))
                continue
            message = decode_answer(kind, body)
            match message:
                case protocol.Started() if self.started_at is None:
                    self.started_at = trio.current_time()
                    started.set(None)
                case protocol.ExecReply() if kind is Kind.REPLY:
                    return message
                case protocol.Error():
                    raise refusal(message)
                case _:
                    raise RunnerProtocolError(f"{type(message).__name__} while a command runs")

    def _answer_by(self) -> float:
        """Return when a runner that says nothing is given up: long after it had to end the command itself."""
        if self.started_at is None:
            return self._start_by
        return self.started_at + self.timeout_ms / 1000 + self._waited_for_reader_s + _RUNNER_PATIENCE_S

    async def _hand_out(self, piece: Output) -> None:
        self._last_piece = piece.data
        if self._collector is not None:
            self._collector.add(piece)
            return
        try:
            self._pieces.send_nowait(piece)
        except trio.WouldBlock:
            began = trio.current_time()
            await self._pieces.send(piece)
            self._waited_for_reader_s += trio.current_time() - began
        except trio.BrokenResourceError:  # nobody reads any more; the scope is about to be cancelled
            await trio.lowlevel.checkpoint()


async def _send_input(connection: RunnerConnection, stdin: bytes) -> None:
    for start in range(0, len(stdin), CHUNK_BYTES):
        await connection.send(Kind.DATA, stdin[start : start + CHUNK_BYTES])
    await connection.send(Kind.END)


def refusal(error: protocol.Error) -> SandkastenError:
    """Return what the runner's refusal of a command means to the caller."""
    if error.code == "FILE_NOT_FOUND":  # the one file that a command needs is its directory
        return InvalidRequest(error.message, cwd="is no directory that can be entered")
    if error.code in ("INVALID_PATH", "BAD_REQUEST", "PERMISSION_DENIED", "NOT_A_FILE"):
        return InvalidRequest(error.message)
    if error.code in ("NO_SHELL", "SHELL_FAILED"):
        return SandboxError(error.message)
    return SandboxError(f"the sandbox could not run the command: {error.message}")


def is_lost(error: BaseException) -> bool:
    """Whether `error` means that PID 1 is gone or hostile."""
    return isinstance(error, RunnerLost | RunnerProtocolError)


def unwrap(group: BaseExceptionGroup[Any]) -> BaseException:
    """Return the first leaf of a group that is not a cancellation."""
    for error in group.exceptions:
        leaf = unwrap(error) if isinstance(error, BaseExceptionGroup) else error
        if not isinstance(leaf, trio.Cancelled):
            return leaf
    return group
