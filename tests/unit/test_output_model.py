"""Any interleaving of writing, reading, ending and dropping gives exactly the bytes that were written, in order."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import attrs
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandkasten.errors import ExecGone
from sandkasten.model import Output, Stream
from sandkasten.output.log import LogReader, ReaderMode
from sandkasten.output.store import OutputStore
from tests.stores import KB, MB, open_output
from tests.waiting import patience

_LAG_BYTES = 512 * KB
_LAG_PIECES = 2000
"""A reader of the model never lags further, so that the writer, in the same task, need not wait for it."""

_BLOCK_BYTES = 320 * KB
"""No block holds more."""


@attrs.frozen
class Append:
    log: int
    stream: Stream
    size_bytes: int


@attrs.frozen
class Burst:
    """Very many tiny pieces, on both streams in turn."""

    log: int
    pieces: int


@attrs.frozen
class Join:
    log: int
    after: float
    mode: ReaderMode


@attrs.frozen
class Step:
    reader: int
    pieces: int


@attrs.frozen
class Leave:
    reader: int


@attrs.frozen
class Read:
    log: int
    stream: Stream | None
    offset: float
    limit: int


@attrs.frozen
class Turn:
    """The background task and its threads get some time."""


Step_ = Append | Burst | Join | Step | Leave | Read | Turn
_LOGS = 2
_log = st.integers(0, _LOGS - 1)
_place = st.floats(0, 1)
_steps = st.lists(
    st.one_of(
        st.builds(Append, _log, st.sampled_from(Stream), st.integers(1, 64 * KB)),
        st.builds(Append, _log, st.sampled_from(Stream), st.just(64 * KB)),
        st.builds(Append, _log, st.sampled_from(Stream), st.integers(1, 40)),
        st.builds(Burst, _log, st.integers(1, 500)),
        st.builds(Join, _log, _place, st.sampled_from(ReaderMode)),
        st.builds(Step, st.integers(0, 5), st.integers(1, 20)),
        st.builds(Leave, st.integers(0, 5)),
        st.builds(Read, _log, st.sampled_from([None, *Stream]), _place, st.integers(1, 200 * KB)),
        st.just(Turn()),
    ),
    max_size=60,
)


class Model:
    """The pieces written, and those that every reader got; checks the store against it at each step."""

    def __init__(self, store: OutputStore) -> None:
        self._logs = [store.session("session").open(str(number)) for number in range(_LOGS)]
        self._written: list[list[Output]] = [[] for _ in range(_LOGS)]
        self._readers: list[tuple[int, LogReader]] = []
        self._fed: set[LogReader] = set()

    async def perform(self, step: Step_) -> None:
        match step:
            case Append(number, stream, size_bytes):
                await self._append(number, stream, size_bytes)
            case Burst(number, pieces):
                for count in range(pieces):
                    await self._append(number, list(Stream)[count % 2], count % 9 + 1)
            case Join(number, after, mode):
                self._join(number, int(after * len(self._written[number])), mode)
            case Step(index, pieces) if self._readers:
                await self._step(*self._readers[index % len(self._readers)], pieces)
            case Leave(index) if self._readers:
                self._readers.pop(index % len(self._readers))[1].close()
            case Read(number, stream, offset, limit):
                await self._read(number, stream, offset, limit)
            case Turn():
                for _ in range(20):
                    await trio.lowlevel.checkpoint()
                await trio.to_thread.run_sync(int)

    async def finish(self) -> None:
        """End all runs, and read what is left to the end."""
        for log in self._logs:
            log.close()
        for number, reader in self._readers:
            await self._step(number, reader, len(self._written[number]) + 1)
            assert reader.sequence == self._logs[number].last_sequence
            reader.close()
        for number, log in enumerate(self._logs):
            kept = [piece async for piece in log.reader(after=log.first_sequence - 1)]
            assert kept == self._written[number][log.first_sequence - 1 :]

    async def _append(self, number: int, stream: Stream, size_bytes: int) -> None:
        for other, reader in self._readers:
            while other == number and self._is_far_behind(number, reader):
                await self._step(number, reader, 4)
        sequence = len(self._written[number]) + 1
        data = (b"%d:%d;" % (number, sequence) * (size_bytes // 4 + 1))[:size_bytes]
        with trio.fail_after(patience(10)):
            piece = await self._logs[number].append(stream, data)
        assert piece == Output(stream, data, sequence)
        self._written[number].append(piece)

    def _join(self, number: int, after: int, mode: ReaderMode) -> None:
        log = self._logs[number]
        if after + 1 >= log.first_sequence:
            self._readers.append((number, log.reader(after=after, mode=mode)))
        elif mode is ReaderMode.HOLDING:
            with pytest.raises(ExecGone):
                log.reader(after=after)

    async def _step(self, number: int, reader: LogReader, pieces: int) -> None:
        """Read pieces, as far as there are any; a piece that was skipped counts."""
        log, written = self._logs[number], self._written[number]
        for _ in range(pieces):
            if reader.sequence == log.last_sequence:
                return
            before, skipped, is_fresh = reader.sequence, reader.skipped_bytes, reader not in self._fed
            self._fed.add(reader)
            with trio.fail_after(patience(10)):
                piece = await anext(reader)
            assert piece == written[piece.sequence - 1]
            assert reader.sequence == piece.sequence
            assert reader.offset == len(_bytes(written[: piece.sequence], None))
            missed = sum(len(each.data) for each in written[before : piece.sequence - 1])
            assert reader.mode is ReaderMode.FASTEST or missed == 0
            excess = reader.skipped_bytes - skipped - missed
            assert excess == 0 or (is_fresh and missed > 0 and 0 < excess < _BLOCK_BYTES)

    async def _read(self, number: int, stream: Stream | None, place: float, limit: int) -> None:
        log = self._logs[number]
        whole = _bytes(self._written[number], stream)
        offset = int(place * (len(whole) + 10))
        kept_from = len(_bytes(self._written[number][: log.first_sequence - 1], stream))
        try:
            part = await log.read(stream, offset, limit)
        except ExecGone:
            assert offset < len(_bytes(self._written[number][: log.first_sequence - 1], stream))
            return
        assert offset >= kept_from
        assert (part.offset, part.next_offset, part.total_bytes) == (offset, offset + len(part.data), len(whole))
        assert part.data == whole[offset : offset + limit]
        assert not part.is_final

    def _is_far_behind(self, number: int, reader: LogReader) -> bool:
        log = self._logs[number]
        return log.stdout_bytes + log.stderr_bytes - reader.offset > _LAG_BYTES or (
            log.last_sequence - reader.sequence > _LAG_PIECES
        )


def _bytes(pieces: Sequence[Output], stream: Stream | None) -> bytes:
    return b"".join(piece.data for piece in pieces if stream is None or piece.stream is stream)


async def _run(steps: Sequence[Step_], *, memory_bytes: int, session_bytes: int) -> None:
    with tempfile.TemporaryDirectory(prefix="spool") as root:
        async with open_output(Path(root), memory_bytes=memory_bytes, session_bytes=session_bytes) as store:
            model = Model(store)
            for step in steps:
                await model.perform(step)
            await model.finish()
            assert store.lost_bytes == 0
            await store.session("session").destroy()
            assert store.memory_bytes_used == 0
            with trio.fail_after(patience(10)):
                while store.disk_bytes_used or os.listdir(root):
                    await trio.lowlevel.checkpoint()


@pytest.mark.slow
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(_steps)
def test_everything_comes_back_from_memory_and_disk(steps: list[Step_]) -> None:
    """With a memory of a few pieces and all the disk that is needed, nothing is ever missing."""
    trio.run(lambda: _run(steps, memory_bytes=200 * KB, session_bytes=64 * MB))


@pytest.mark.slow
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(_steps)
def test_what_is_kept_is_a_gapless_end(steps: list[Step_]) -> None:
    """With a budget that drops, readers get all behind where they are, or are told that it's gone or skipped."""
    trio.run(lambda: _run(steps, memory_bytes=150 * KB, session_bytes=400 * KB))
