"""Kept runs of PID 1 against a model of them: output, broken connections and the knowledge of daemons, in any order."""

from __future__ import annotations

import gc
import sys
import weakref
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from runner.loop.context import Job, Refused, Sink
from runner.server.kept import MAX_ENDED_BYTES, MAX_KEPT_BYTES, KeptRuns
from runner.wire.protocol import (
    KEPT_RUN_BYTES,
    MAX_FRAME_BYTES,
    Attached,
    AttachRun,
    Error,
    Exec,
    ExecReply,
    ForgetRuns,
    Kind,
    ListRuns,
    Started,
)

_PIECE_BYTES = 64 * 1024
_FULL_BYTES = 256 * 1024
_STREAMS = (Kind.STDOUT, Kind.STDERR)


class Connection:
    """A sink, with a peer that takes what was sent when the test says so. Carries one run."""

    piece_bytes = MAX_FRAME_BYTES

    def __init__(self) -> None:
        self.sent: list[tuple[Kind, bytes]] = []
        self.unsent_bytes = 0
        self.first: Attached | Started | None = None
        self.final: Any = None
        self.job: Job | None = None

    def send(self, kind: Kind, body: bytes) -> None:
        assert self.final is None
        self.sent.append((kind, body))
        self.unsent_bytes += len(body)

    def start(self, message: object) -> None:
        assert isinstance(message, Attached | Started)
        self.first = message

    def finish(self, message: object) -> None:
        assert self.final is None
        self.final = message

    def refresh_input(self) -> None: ...

    @property
    def is_full(self) -> bool:
        return self.unsent_bytes >= _FULL_BYTES

    def drain(self) -> None:
        self.unsent_bytes = 0
        if self.job is not None and self.final is None:
            self.job.on_drained()


class Program:
    """A run as its real ones are: reads on when there is room, and ends when it is told to."""

    def __init__(self, exec_id: str, sink: Sink) -> None:
        self.exec_id, self.sink = exec_id, sink
        self.written = dict.fromkeys(_STREAMS, b"")
        self.stored = dict.fromkeys(_STREAMS, 0)
        self.waiting: list[tuple[Kind, bytes]] = []
        self.is_over = self.is_cancelled = False
        self.wants_input = True

    def write(self, kind: Kind, body: bytes) -> None:
        self.waiting.append((kind, body))
        self.on_drained()

    def on_drained(self) -> None:
        while self.waiting and not self.sink.is_full:
            kind, body = self.waiting.pop(0)
            self.written[kind] += body
            self.sink.send(kind, body)

    def end(self) -> None:
        if not self.waiting and not self.is_over:
            self.is_over = True
            self.sink.finish(ExecReply(self.exec_id, 0, None, "exited", "/", 1, shell_restarted=False))

    def on_data(self, data: bytes) -> None: ...

    def on_end(self) -> None: ...

    def on_cancel(self) -> None:
        self.is_cancelled = True

    def on_close(self) -> None:
        self.is_cancelled = self.is_over = True


class KeptRunsMachine(RuleBasedStateMachine):
    """The daemon stores a part of what was sent, dies, and asks for what comes behind that."""

    programs = Bundle("programs")

    def __init__(self) -> None:
        super().__init__()
        self.runs = KeptRuns()
        self.count = 0
        self.alive: list[Program] = []
        self.connections: dict[str, Connection] = {}

    @rule(target=programs)
    def begin(self) -> Program:
        self.count += 1
        exec_id = f"r{self.count}"
        connection = Connection()
        made: list[Program] = []

        def make(sink: Sink) -> Job:
            made.append(Program(exec_id, sink))
            sink.start(Started(exec_id))
            return made[0]

        connection.job = self.runs.begin(Exec(exec_id, "true", ticket="t"), connection, make)
        self.connections[exec_id] = connection
        self.alive.append(made[0])
        return made[0]

    @rule(program=programs, kind=st.sampled_from(_STREAMS), size=st.integers(1, _PIECE_BYTES), times=st.integers(1, 9))
    def write(self, program: Program, kind: Kind, size: int, times: int) -> None:
        for number in range(times if not program.is_over else 0):
            program.write(kind, bytes([number + size % 200]) * size)

    @rule(program=programs)
    def end(self, program: Program) -> None:
        program.end()

    @rule(program=programs)
    def drain(self, program: Program) -> None:
        if program.exec_id in self.connections:
            self.connections[program.exec_id].drain()

    @rule(program=programs)
    def disconnect(self, program: Program) -> None:
        connection = self.connections.pop(program.exec_id, None)
        if connection is not None and connection.job is not None and connection.final is None:
            connection.job.on_close()

    @rule(program=programs, lags=st.tuples(st.integers(0, _PIECE_BYTES), st.integers(0, _PIECE_BYTES)))
    def attach(self, program: Program, lags: tuple[int, int]) -> None:
        """Output that follows is exactly the output behind the offsets in the answer."""
        wanted = [
            max(program.stored[kind], len(program.written[kind]) - lag)
            for kind, lag in zip(_STREAMS, lags, strict=True)
        ]
        program.stored = dict(zip(_STREAMS, wanted, strict=True))
        connection = Connection()
        connection.job = self.runs.attach(AttachRun(program.exec_id, *wanted), connection)
        if isinstance(connection.final, Error):
            assert program not in self.alive
            return
        assert isinstance(connection.first, Attached)
        offsets = (connection.first.stdout_offset, connection.first.stderr_offset)
        assert all(got >= asked for got, asked in zip(offsets, wanted, strict=True))
        if not program.is_over:
            assert list(offsets) == wanted, "what was sent last is kept while it runs"
        for kind, offset in zip(_STREAMS, offsets, strict=True):
            sent = b"".join(body for each, body in connection.sent if each is kind)
            assert sent == program.written[kind][offset:]
        assert (connection.final is not None) is program.is_over
        self.connections[program.exec_id] = connection

    @rule(program=consumes(programs))
    def forget(self, program: Program) -> None:
        self.runs.forget(ForgetRuns((program.exec_id,)))
        assert program.is_over, "a run that is forgotten is cancelled"
        self.alive.remove(program)

    @invariant()
    def lists_what_there_is(self) -> None:
        entries = self.runs.list(ListRuns()).runs
        assert [entry.number for entry in entries] == sorted(entry.number for entry in entries)
        listed = {entry.exec_id: entry.has_ended for entry in entries}
        assert listed == {program.exec_id: program.is_over for program in self.alive[:32]}

    @invariant()
    def is_bounded(self) -> None:
        going, ended = self.runs._going.values(), self.runs._ended.values()
        for run in going:
            assert run.kept_bytes <= KEPT_RUN_BYTES + _PIECE_BYTES
        assert sum(run.kept_bytes for run in going) <= MAX_KEPT_BYTES + len(going) * _PIECE_BYTES
        assert sum(run.kept_bytes for run in ended) == self.runs._ended_bytes <= MAX_ENDED_BYTES


TestKeptRuns = KeptRunsMachine.TestCase
TestKeptRuns.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_tiny_pieces_count_for_what_they_take() -> None:
    """A run that writes byte by byte leaves as little memory taken as others do: at most 16 MiB for its 3."""
    runs, sink = KeptRuns(), Connection()
    runs.begin(Exec("tiny", "true", ticket="t"), sink, lambda sink: Program("tiny", sink))
    run = runs._going["tiny"]
    for _ in range(KEPT_RUN_BYTES // 4):
        run.send(Kind.STDOUT, b"x")
    taken_bytes = sum(sys.getsizeof(piece) + sys.getsizeof(piece[1]) for piece in run._pieces)
    assert len(run._pieces) > 100_000, "what may be on its way is kept"
    assert taken_bytes <= 16 * 1024 * 1024


def test_runs_that_fell_silent_keep_no_more_than_their_part() -> None:
    """Each wrote when there were fewer, and nothing since."""
    runs = KeptRuns()
    for number in range(40):
        exec_id = f"r{number}"
        runs.begin(Exec(exec_id, "true", ticket="t"), Connection(), partial(Program, exec_id))
        for _ in range(KEPT_RUN_BYTES // _PIECE_BYTES):
            runs._going[exec_id].send(Kind.STDOUT, bytes(_PIECE_BYTES))
    assert sum(run.kept_bytes for run in runs._going.values()) <= MAX_KEPT_BYTES


def refuse_run(_sink: Sink) -> Job | None:
    raise Refused("BAD_REQUEST", "no such shell")


def test_a_refused_run_leaves_nothing_behind() -> None:
    """PID 1 collects no cycles, so neither the run nor its connection may be part of one."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        connection = Connection()
        left = weakref.ref(connection)
        with pytest.raises(Refused):
            KeptRuns().begin(Exec("r", "true", ticket="t"), connection, refuse_run)
        del connection
        assert left() is None
    finally:
        if was_enabled:
            gc.enable()
