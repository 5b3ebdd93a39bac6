"""One command: its files, its streams, its time limit and its result.

It must not know how the shell runs it (`shell`, `driver`) or how frames reach the client (`Sink`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Protocol

from runner import handover, processes
from runner.config import STDIN_BUFFER_BYTES
from runner.context import Context
from runner.ladder import Ladder
from runner.loop import Timer
from runner.output import Leftovers, OutputPipe
from runner.protocol import Cause, Error, ErrorCode, Exec, ExecReply, Kind, Started
from runner.shell import Shell
from runner.stdin import StdinPipe

EXIT_TIMED_OUT = 124
EXIT_CANCELLED = 130
_SIGNAL_BASE = 128
_LAST_SIGNAL = 64
_SETTLE_S = 0.001
"""A command that ends sooner is not watched: its output is collected at its end, all of stdout first."""


class Sink(Protocol):
    """Where the answer to a request goes. `finish` sends the one final frame; nothing may follow it."""

    def send(self, kind: Kind, body: bytes) -> None: ...

    def start(self, message: object) -> None: ...

    def finish(self, message: object) -> None: ...

    def refresh_input(self) -> None: ...

    @property
    def is_full(self) -> bool: ...


class Execution:
    """From request to reply.

    `on_over` is called when the shell may take the next command, which can be before the reply is out: a client that
    reads slowly holds up its own output only.
    """

    def __init__(
        self,
        context: Context,
        request: Exec,
        sink: Sink,
        shell: Shell,
        leftovers: Leftovers,
        *,
        on_over: Callable[[Execution], None],
    ) -> None:
        self.request = request
        self.shell_restarted = False
        self.has_ended = False
        self.is_taken_back = False
        self._sink: Sink | None = sink
        self._context = context
        self._leftovers = leftovers
        self._on_over = on_over
        self._shell = shell
        self._has_begun = False
        self._began = processes.Moment(0, 0)
        self._pipes: list[OutputPipe] = []
        self._stdin = StdinPipe(context.loop, self._refresh_input) if request.stdin else None
        self._timer: Timer | None = None
        self._settled: Timer | None = None
        self._ladder: Ladder | None = None
        self._forced: Cause | None = None
        self._result: tuple[int, int | None, Cause] | None = None
        self._cwd: bytes | None = None
        self._started_s = 0.0
        self._duration_us = 0

    # What the engine tells -----------------------------------------------------------------------------------------

    def begin(self, number: int) -> None:
        """Hand the command to the waiting shell; a second time if its predecessor never began it.

        Raises:
            OSError: its files could not be made.
        """
        is_first, self._has_begun = not self._has_begun, True
        self.is_taken_back = False
        handover.write(self._context, self.request, self._stdin)
        self._pipes = [self._pipe("out", Kind.STDOUT), self._pipe("err", Kind.STDERR)]
        self._began = processes.now()
        self._shell.hand_over(number, handover.mode_of(self.request))
        self._settled = self._context.loop.call_later(_SETTLE_S, self.on_drained, self._on_error)
        if is_first:
            self._started_s = time.monotonic()
            if self._sink is not None:
                self._sink.start(Started(self.request.exec_id))
            if self.request.timeout_ms is not None:
                self._timer = self._context.loop.call_later(
                    self.request.timeout_ms / 1000, lambda: self._force("timed_out"), self._on_error
                )

    def on_status(self, status: int | None) -> None:
        """The shell reports: None when the command holds its standard input, else its exit status."""
        if status is None:
            if self._stdin is not None:
                self._stdin.on_reader()
        elif _SIGNAL_BASE < status <= _SIGNAL_BASE + _LAST_SIGNAL:
            self._shell_done(status, status - _SIGNAL_BASE, "signalled")
        else:
            self._shell_done(status, None, "exited")

    def on_shell_death(self, wait_status: int) -> None:
        """The shell process ended while it ran the command."""
        self.shell_restarted = True
        code = os.waitstatus_to_exitcode(wait_status)
        if code < 0:
            self._shell_done(_SIGNAL_BASE - code, -code, "shell_died")
        else:
            self._shell_done(code, None, "exited")

    @property
    def is_begun(self) -> bool:
        """Whether the shell has begun the command: it opens the streams before it runs anything."""
        return any(pipe.was_opened() for pipe in self._pipes)

    @property
    def can_be_retried(self) -> bool:
        """Whether the shell never began the command, and its end is still open."""
        return self._result is None and self._forced is None and not self.is_begun

    def take_back(self) -> None:
        """The shell never began the command; another one gets it."""
        self.is_taken_back = True
        self._remove_files()

    def _remove_files(self) -> None:
        for pipe in self._pipes:
            pipe.close(self._leftovers)
        self._pipes.clear()
        if self._stdin is not None:
            self._stdin.close()
        handover.remove(self._context, self.request)

    def fail(self, code: ErrorCode, message: str) -> None:
        """Answer with an error instead of a result; the command is not running."""
        self.has_ended = True
        self._stop_clocks()
        self._remove_files()
        if self._sink is not None:
            self._sink.finish(Error(code, message))
            self._sink = None
        self._on_over(self)

    def conclude(self, cwd: bytes) -> None:
        """The command has ended and a shell waits in `cwd`: the reply follows the last output."""
        self._cwd = cwd
        self._on_over(self)
        self._reply_if_drained()

    # What the client tells -----------------------------------------------------------------------------------------

    def on_data(self, data: bytes) -> None:
        if self._stdin is not None:
            self._stdin.feed(data)

    def on_end(self) -> None:
        if self._stdin is not None:
            self._stdin.end()

    def on_cancel(self) -> None:
        self._force("cancelled")

    def on_close(self) -> None:
        """Nobody waits for the answer any more."""
        self._sink = None
        self.on_drained()
        self._force("cancelled")

    def on_drained(self) -> None:
        """The client has taken enough of what was sent."""
        for pipe in self._pipes:
            pipe.resume()

    @property
    def wants_input(self) -> bool:
        return self._stdin is None or self._stdin.buffered_bytes < STDIN_BUFFER_BYTES

    # The end -------------------------------------------------------------------------------------------------------

    def _force(self, cause: Cause) -> None:
        """Begin to end the command, unless it has ended or is ending already."""
        if self._result is not None or self._forced is not None:
            return
        self._forced = cause
        if not self._has_begun:  # still queued
            self._result = (0, None, cause)
            self.has_ended = True
            self.conclude(self._shell.cwd)
            return
        if self.is_taken_back or self._shell.take_back():  # between two shells, or not read yet
            self._result = (0, None, cause)
            self._end()
            return
        self._ladder = Ladder(
            self._context, self._shell, began=self._began, is_begun=lambda: self.is_begun, on_clear=self._end
        )
        self._ladder.climb()

    def _shell_done(self, exit_code: int, signal_number: int | None, cause: Cause) -> None:
        if self._result is not None:
            return
        self._result = (exit_code, signal_number, cause)
        if self._ladder is None:
            self._end()
        else:
            self._ladder.shell_is_busy = False
            self._ladder.climb()

    def _end(self) -> None:
        """Nothing of the command runs in the shell any more, nor anywhere if it was ended by force."""
        self._duration_us = int((time.monotonic() - self._started_s) * 1_000_000)
        self.has_ended = True
        self._stop_clocks()
        if self._stdin is not None:
            self._stdin.close()
        handover.remove(self._context, self.request)
        for pipe in self._pipes:
            pipe.finish(may_read=self._sink is None or not self._sink.is_full)
        if self._shell.is_ready:
            self.conclude(self._shell.cwd)

    def _reply_if_drained(self) -> None:
        if self._cwd is None or not all(pipe.is_done for pipe in self._pipes):
            return
        for pipe in self._pipes:
            pipe.close(self._leftovers)
        self._pipes.clear()
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.finish(self._reply(self._cwd))

    def _reply(self, cwd: bytes) -> ExecReply:
        assert self._result is not None
        exit_code, signal_number, cause = self._result
        if self._forced is not None:
            cause, signal_number = self._forced, None
            exit_code = EXIT_TIMED_OUT if cause == "timed_out" else EXIT_CANCELLED
        return ExecReply(
            exec_id=self.request.exec_id,
            exit_code=exit_code,
            signal=signal_number,
            cause=cause,
            cwd=os.fsdecode(cwd),
            duration_us=self._duration_us,
            shell_restarted=self.shell_restarted,
        )

    def _stop_clocks(self) -> None:
        for timer in (self._timer, self._settled):
            if timer is not None:
                timer.cancel()
        if self._ladder is not None:
            self._ladder.stop()

    def _on_error(self, _error: Exception) -> None:
        self.fail("IO_ERROR", "the command was lost")
        self._shell.replace()

    # Streams -------------------------------------------------------------------------------------------------------

    def _pipe(self, name: str, kind: Kind) -> OutputPipe:
        return OutputPipe(
            self._context.loop,
            self._context.file(name),
            lambda chunk: self._on_output(kind, chunk),
            self._reply_if_drained,
        )

    def _on_output(self, kind: Kind, chunk: bytes) -> None:
        if self._sink is None:
            return
        self._sink.send(kind, chunk)
        if self._sink is not None and self._sink.is_full:
            for pipe in self._pipes:
                pipe.pause()

    def _refresh_input(self) -> None:
        if self._sink is not None:
            self._sink.refresh_input()
