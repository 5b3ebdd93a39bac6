"""A run: a command of a shell (`runner.shell.execution`) or a program (`runner.programs.program`), as far as the two
are alike. That is the client's side, the time limit, the end by force, and the answer.

News of a run is an event of its `Lifecycle`, and the table names the action that the run then performs.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from runner.loop.context import Context, Sink
from runner.loop.loop import Timer
from runner.process.storage import RoomGauge
from runner.shell.ending import Ladder
from runner.shell.lifecycle import Action, Lifecycle, Notice, Table
from runner.streams.flow import AbandonedPipes
from runner.streams.streams import NO_STREAMS, ClientSide
from runner.wire.protocol import Cause, Error, Exec, ExecReply, RunProgram, Started, TerminalSize

SIGNAL_BASE = 128
"""Exit status of a process that a signal ended, less the signal's number."""


class Run(ClientSide, ABC):
    """One run, from its request to its answer. Implements `Job` and `Reachable`."""

    def __init__(
        self, context: Context, request: Exec | RunProgram, sink: Sink, leftovers: AbandonedPipes, table: Table
    ) -> None:
        super().__init__(sink)
        self._context = context
        self._id = request.exec_id
        self._timeout_ms = request.timeout_ms
        self._leftovers = leftovers
        self._life = Lifecycle(table)
        self._ladder: Ladder | None = None
        self._in_hurry = False
        self._time_limit: Timer | None = None
        self._started_s: float | None = None
        self._duration_us = 0
        self._room = RoomGauge()

    # Events and actions ---------------------------------------------------------------------------------------------

    def _take(self, event: Notice) -> None:
        self._perform(self._life.take(event))

    @abstractmethod
    def _perform(self, action: Action) -> None:
        """Perform an action of the table. That may end in a next event."""

    # News of the client ---------------------------------------------------------------------------------------------

    def on_cancel(self) -> None:
        self._force("cancelled")

    def on_close(self) -> None:
        """The connection is gone, and nobody else waits for the answer."""
        self._sink = None
        self.on_drained()
        self._force("cancelled")

    # News of other connections, by the run's id ---------------------------------------------------------------------

    @abstractmethod
    def signal(self, number: int) -> bool:
        """Send a signal to the processes of the run; return whether the run goes on."""

    def cancel(self, *, now: bool) -> None:
        self._in_hurry = self._in_hurry or now
        self._force("cancelled")

    def resize(self, size: TerminalSize) -> bool:
        return self._streams.resize(size)

    # News of the streams --------------------------------------------------------------------------------------------

    def on_output_done(self) -> None:
        if self._streams.is_done:
            self._take(Notice.DRAINED)

    # Parts of actions -----------------------------------------------------------------------------------------------

    def _announce(self, pid: int = 0) -> None:
        """The run begins: tell the client. The time limit counts from now."""
        self._started_s = time.monotonic()
        if self._sink is not None:
            self._sink.start(Started(self._id, pid))

    def _limit_time(self, passed_s: float = 0.0) -> None:
        """Set the clock of the time limit, unless it is set; so much of the time has passed since `_announce`."""
        if self._timeout_ms is not None and self._time_limit is None:
            left_s = max(0.0, self._timeout_ms / 1000 - passed_s)
            self._time_limit = self._context.loop.call_later(left_s, lambda: self._force("timed_out"), self._on_error)

    @abstractmethod
    def _on_error(self, error: Exception) -> None:
        """A turn of a clock was lost."""

    def _force(self, cause: Cause) -> None:
        self._perform(self._life.force(cause))

    def _hurry(self) -> None:
        if self._in_hurry and self._ladder is not None:
            self._ladder.hurry()

    def _finish_streams(self) -> None:
        """Stop the clocks, take no more input, and read the last output: the run has ended."""
        if self._started_s is not None:
            self._duration_us = int((time.monotonic() - self._started_s) * 1_000_000)
        self._stop_clocks()
        self._streams.finish(may_read=self._may_read)

    def _stop_clocks(self) -> None:
        """Stop the clocks and let go of them: they refer back to the run, and PID 1 collects no cycles."""
        if self._time_limit is not None:
            self._time_limit.cancel()
        if self._ladder is not None:
            self._ladder.stop()
        self._time_limit = self._ladder = None

    def _answer_with(self, answer: Callable[[], ExecReply | Error]) -> None:
        """Close the streams, whose last output is sent or not wanted, and send an answer, also if the close raises."""
        sink, self._sink = self._sink, None
        streams, self._streams = self._streams, NO_STREAMS
        try:
            streams.close(self._leftovers)
        finally:
            if sink is not None:
                sink.finish(answer())

    def _reply(
        self,
        *,
        cwd: bytes,
        shell_restarted: bool = False,
        cpu_us: int = -1,
        peak_bytes: int = -1,
        written_bytes: int = -1,
    ) -> ExecReply:
        outcome = self._life.outcome
        has_failed = self._started_s is not None and outcome.exit_code != 0  # only then a full disk is told of
        is_full, was_filled = self._room.read(self._context, has_failed=has_failed)
        return ExecReply(
            exec_id=self._id,
            exit_code=outcome.exit_code,
            signal=outcome.signal,
            cause=outcome.cause,
            cwd=os.fsdecode(cwd),
            duration_us=self._duration_us,
            shell_restarted=shell_restarted,
            disk_full=is_full,
            cpu_us=cpu_us,
            peak_bytes=peak_bytes,
            written_bytes=written_bytes,
            disk_filled=was_filled,
        )
