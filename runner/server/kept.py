"""Kept runs: those with a ticket, which outlive the connection they were begun on, and how another connection goes on.

A kept run writes to its `KeptRun`, which passes all output on to the connection while there is one, and remembers the
newest. Without a connection the run goes on until that memory is full, and then waits as it would for a slow reader. A
run that has not begun is cancelled, so that none begins when no daemon knows of it. The end of a run, with the output
that was not known to have arrived, is kept until the daemon forgets the run. Everything is bounded: the oldest ends go
first, and of many runs each keeps less.

Tickets are the daemon's and are not read. A run is a `Job` here, whether a command or a program.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from itertools import count, islice

from runner.loop.context import Job, Refused, Sink
from runner.wire.protocol import (
    KEPT_PIECE_BYTES,
    KEPT_RUN_BYTES,
    MAX_FRAME_BYTES,
    MAX_LISTED_RUNS,
    MAX_TICKET_CHARS,
    Attached,
    AttachRun,
    Exec,
    ExecReply,
    ForgetRuns,
    Kind,
    ListRuns,
    RunEntry,
    RunList,
    RunProgram,
    Started,
)

MAX_ENDED_RUNS = 256
MAX_ENDED_BYTES = 1024 * 1024
MAX_KEPT_BYTES = 16 * 1024 * 1024
"""Output of all runs that go on, `KEPT_PIECE_BYTES` for each piece included. Each keeps an equal part at least, and
never less than a pipe holds."""

_LEAST_KEPT_BYTES = 128 * 1024
_PIECES_KEPT = 4
"""The newest output is kept in whole pieces; so many at least."""
_STREAMS = (Kind.STDOUT, Kind.STDERR)


class KeptRun:
    """One run, as the sink it writes to. `line` is the connection that follows the run, if there is one."""

    __slots__ = (
        "_began_s",
        "_first",
        "_on_over",
        "_part_bytes",
        "_pieces",
        "_total",
        "exec_id",
        "input_ended",
        "job",
        "kept_bytes",
        "line",
        "number",
        "reply",
        "started",
        "ticket",
    )

    def __init__(
        self,
        number: int,
        request: Exec | RunProgram,
        *,
        part_bytes: Callable[[], int],
        on_over: Callable[[KeptRun], None],
    ) -> None:
        """`part_bytes` returns how much the run may keep; `on_over` is called once, after the end."""
        self.number = number
        self.exec_id = request.exec_id
        self.ticket = request.ticket
        self.job: Job | None = None
        self.line: Line | None = None
        self.started: Started | None = None
        self.reply: ExecReply | None = None
        self.input_ended = not request.stdin
        self.kept_bytes = 0
        self._part_bytes = part_bytes
        self._on_over: Callable[[KeptRun], None] | None = on_over
        self._pieces: deque[tuple[Kind, bytes]] = deque()
        self._first = dict.fromkeys(_STREAMS, 0)
        self._total = dict.fromkeys(_STREAMS, 0)
        self._began_s = 0.0

    # Sink ----------------------------------------------------------------------------------------------------------

    def send(self, kind: Kind, body: bytes) -> None:
        self._pieces.append((kind, body))
        self._total[kind] += len(body)
        self.kept_bytes += KEPT_PIECE_BYTES + len(body)
        if self.line is not None:
            self.shrink(self._part_bytes())
            self.line.sink.send(kind, body)

    def start(self, message: object) -> None:
        assert isinstance(message, Started)
        self.started = message
        self._began_s = time.monotonic()
        if self.line is not None:
            self.line.sink.start(message)

    def finish(self, message: object) -> None:
        line, self.line, self.job = self.line, None, None
        self.reply = message if isinstance(message, ExecReply) else None
        on_over, self._on_over = self._on_over, None
        if on_over is not None:
            on_over(self)
        if line is not None:
            line.sink.finish(message)

    def refresh_input(self) -> None:
        if self.line is not None:
            self.line.sink.refresh_input()

    @property
    def piece_bytes(self) -> int:
        return min(MAX_FRAME_BYTES, self._part_bytes() // _PIECES_KEPT)

    @property
    def is_full(self) -> bool:
        if self.line is not None:
            return self.line.sink.is_full
        return self.kept_bytes >= self._part_bytes()

    # What is kept --------------------------------------------------------------------------------------------------

    def shrink(self, limit_bytes: int) -> None:
        """Give up the oldest output, until no more than `limit_bytes` is kept."""
        while self.kept_bytes > limit_bytes:
            kind, body = self._pieces.popleft()
            self._first[kind] += len(body)
            self.kept_bytes -= KEPT_PIECE_BYTES + len(body)

    @property
    def entry(self) -> RunEntry:
        return RunEntry(
            *(self.number, self.exec_id, self.ticket),
            has_begun=self.started is not None,
            has_ended=self.reply is not None,
            input_ended=self.input_ended,
        )

    def has_written(self, stdout_offset: int, stderr_offset: int) -> bool:
        """Return whether the run has written so many bytes."""
        return 0 <= stdout_offset <= self._total[Kind.STDOUT] and 0 <= stderr_offset <= self._total[Kind.STDERR]

    def _skip(self, offsets: dict[Kind, int]) -> None:
        """Give up the output before these offsets of the streams."""
        at, pieces = dict(self._first), self._pieces
        self._pieces, self.kept_bytes = deque(), 0
        for kind, body in pieces:
            rest = body[max(0, offsets[kind] - at[kind]) :]
            at[kind] += len(body)
            if rest:
                self._pieces.append((kind, rest))
                self.kept_bytes += KEPT_PIECE_BYTES + len(rest)
        for kind in _STREAMS:
            self._first[kind] = max(self._first[kind], offsets[kind])

    # Connections ---------------------------------------------------------------------------------------------------

    def attach(self, request: AttachRun, sink: Sink) -> Line | None:
        """Go on with another connection, behind the output that it knows; return its job, None when the run has
        ended."""
        self._skip({Kind.STDOUT: request.stdout_offset, Kind.STDERR: request.stderr_offset})
        self.line = None  # the connection that was there hears no more
        offsets = (self._first[Kind.STDOUT], self._first[Kind.STDERR])
        pid = self.started.pid if self.started is not None else 0
        age_us = int((time.monotonic() - self._began_s) * 1_000_000) if self.started is not None else 0
        sink.start(Attached(self.exec_id, *offsets, age_us=age_us, pid=pid))
        for kind, body in self._pieces:
            sink.send(kind, body)
        if self.reply is not None:
            sink.finish(self.reply)
            return None
        self.line = Line(self, sink)
        if self.job is not None and not sink.is_full:
            self.job.on_drained()
        return self.line

    def detach(self) -> None:
        """Go on without a connection: it is gone."""
        self.line = None
        if self.job is None:
            return
        if self.started is None:
            self.job.on_cancel()
        elif not self.is_full:
            self.job.on_drained()

    def abandon(self) -> None:
        """Give the run up: nobody will ask for it again."""
        self.line = self._on_over = None
        if self.job is not None:
            self.job.on_close()


class Line:
    """Job of one connection that follows a kept run. The line of another connection may take its place."""

    __slots__ = ("_run", "sink")

    def __init__(self, run: KeptRun, sink: Sink) -> None:
        self._run = run
        self.sink = sink

    @property
    def _job(self) -> Job | None:
        return self._run.job if self._run.line is self else None

    def on_data(self, data: bytes) -> None:
        if (job := self._job) is not None:
            job.on_data(data)

    def on_end(self) -> None:
        if (job := self._job) is not None:
            self._run.input_ended = True
            job.on_end()

    def on_cancel(self) -> None:
        if (job := self._job) is not None:
            job.on_cancel()

    def on_close(self) -> None:
        if self._run.line is self:
            self._run.detach()

    def on_drained(self) -> None:
        if (job := self._job) is not None:
            job.on_drained()

    @property
    def wants_input(self) -> bool:
        job = self._job
        return job is None or job.wants_input


class KeptRuns:
    """All kept runs of the sandbox: those that go on, and those that ended and are not forgotten."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._going: dict[str, KeptRun] = {}
        self._ended: OrderedDict[str, KeptRun] = OrderedDict()
        self._ended_bytes = 0

    def begin(self, request: Exec | RunProgram, sink: Sink, begin: Callable[[Sink], Job | None]) -> Job | None:
        """Begin a run by calling `begin` with the sink to write to. A run without a ticket is not kept.

        Raises:
            Refused
        """
        if not request.ticket:
            return begin(sink)
        if len(request.ticket) > MAX_TICKET_CHARS:
            raise Refused("BAD_REQUEST", "the ticket is too long")
        if request.exec_id in self._going or request.exec_id in self._ended:
            raise Refused("EXISTS", f"there is a run {request.exec_id[:64]!r}")
        run = KeptRun(next(self._numbers), request, part_bytes=self._part_bytes, on_over=self._on_over)
        self._going[run.exec_id] = run
        if (part_bytes := self._part_bytes()) < KEPT_RUN_BYTES:
            for each in self._going.values():
                if each.line is not None:
                    each.shrink(part_bytes)
        line = run.line = Line(run, sink)
        try:
            job = begin(run)
        except BaseException:
            self._going.pop(run.exec_id, None)  # there was no run
            run.abandon()  # the run and its line refer to each other, and PID 1 collects no cycles
            raise
        if job is None or run.line is None:  # the run is answered already
            return None
        run.job = job
        return line

    def list(self, request: ListRuns) -> RunList:
        """Return a page of the runs that are kept, in the order in which they began."""
        runs = sorted((*self._ended.values(), *self._going.values()), key=lambda run: run.number)
        later = (run for run in runs if run.number > request.after)
        page = list(islice(later, MAX_LISTED_RUNS + 1))
        return RunList(tuple(run.entry for run in page[:MAX_LISTED_RUNS]), len(page) > MAX_LISTED_RUNS)

    def attach(self, request: AttachRun, sink: Sink) -> Job | None:
        """Have a connection go on with a run; return the connection's job unless the run is answered.

        Raises:
            Refused
        """
        run = self._going.get(request.exec_id) or self._ended.get(request.exec_id)
        if run is None:
            raise Refused("NOT_RUNNING", f"no kept run {request.exec_id[:64]!r}")
        if not run.has_written(request.stdout_offset, request.stderr_offset):
            raise Refused("BAD_REQUEST", "the run has not written that much")
        if run.reply is None:
            return run.attach(request, sink)
        self._ended_bytes -= run.kept_bytes
        run.attach(request, sink)
        self._ended_bytes += run.kept_bytes
        return None

    def forget(self, request: ForgetRuns) -> None:
        """Drop runs that the daemon will not ask for again."""
        for exec_id in request.exec_ids:
            self._drop_ended(exec_id)
            run = self._going.pop(exec_id, None)
            if run is not None:
                run.abandon()

    def _part_bytes(self) -> int:
        return max(_LEAST_KEPT_BYTES, min(KEPT_RUN_BYTES, MAX_KEPT_BYTES // max(1, len(self._going))))

    def _on_over(self, run: KeptRun) -> None:
        self._going.pop(run.exec_id, None)
        if run.reply is None:  # refused: there was no run
            return
        self._ended[run.exec_id] = run
        self._ended_bytes += run.kept_bytes
        while len(self._ended) > MAX_ENDED_RUNS:
            self._drop_ended(next(iter(self._ended)))
        if self._ended_bytes > MAX_ENDED_BYTES:
            self._shrink_ended()

    def _shrink_ended(self) -> None:
        """Give up output of the ended runs, the oldest first; their ends stay."""
        for run in self._ended.values():
            if self._ended_bytes <= MAX_ENDED_BYTES:
                return
            self._ended_bytes -= run.kept_bytes
            run.shrink(max(0, MAX_ENDED_BYTES - self._ended_bytes))
            self._ended_bytes += run.kept_bytes

    def _drop_ended(self, exec_id: str) -> None:
        run = self._ended.pop(exec_id, None)
        if run is not None:
            self._ended_bytes -= run.kept_bytes
