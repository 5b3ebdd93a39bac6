"""Any interleaving of writing, reading, ending and dropping gives exactly the bytes that were written, in order; and so
does any number of daemons, each killed at some moment, over disks that are full at times."""

from __future__ import annotations

import os
import resource
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import attrs
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandkasten.errors import ExecGone
from sandkasten.model import Output, Stream
from sandkasten.output import disk
from sandkasten.output.blocks import BLOCK_OVERHEAD_BYTES, PART_OVERHEAD_BYTES, PIECE_OVERHEAD_BYTES, Block
from sandkasten.output.log import LogReader, ReaderMode
from sandkasten.output.records import RunFacts, RunState
from sandkasten.output.store import OutputStore, SessionOutput
from tests.stores import KB, MB, disk_bytes, open_output
from tests.unit.test_output_disk import END, FACTS
from tests.waiting import patience, until

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


# Daemons that are killed --------------------------------------------------------------------------------------------


@attrs.frozen
class End:
    """The run ends; the next output in its place is another run's."""

    log: int


@attrs.frozen
class Write:
    """The records of a session are written, and with `output` its output."""

    log: int
    output: bool


@attrs.frozen
class Disk:
    """From now on the disk is full, or is no more."""

    is_full: bool


@attrs.frozen
class Kill:
    """The next daemon takes over. The last records came into the files by `cut` bytes alone."""

    cut: int


Deed = Append | Burst | End | Write | Disk | Kill | Turn
_deeds: st.SearchStrategy[list[Deed]] = st.lists(
    st.one_of(
        st.builds(Append, _log, st.sampled_from(Stream), st.sampled_from([1, 20, 64 * KB, 64 * KB, 64 * KB])),
        st.builds(Burst, _log, st.integers(1, 300)),
        st.builds(End, _log),
        st.builds(Write, _log, st.booleans()),
        st.builds(Disk, st.sampled_from([False, False, True])),
        st.builds(Kill, st.integers(0, 60)),
        st.just(Turn()),
    ),
    min_size=20,
    max_size=150,
)
_SESSIONS = ("a" * 24, "b" * 24)
_MEMORY_BYTES = 300 * KB


class Daemons:
    """Two sessions, with one run at a time each, and the daemons that serve them in turn. PID 1 has all output of the
    run that goes on."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._written: dict[str, list[Output]] = {}
        self._current: list[str] = ["", ""]
        self._recorded: set[str] = set()
        self._dropped: set[str] = set()
        self._cut: set[Path] = set()
        self._told: dict[str, tuple[int, int]] = {}
        """Numbers of the first piece that the last daemon kept, and of the last that it had written, of each run."""
        self._sure: set[str] = set()
        """Runs of the last daemon whose record said the last of them."""

    async def live(self, deeds: Sequence[Deed]) -> None:
        """Be one daemon, up to its kill."""
        self._store = OutputStore(self._root, memory_bytes=_MEMORY_BYTES, session_bytes=2 * MB, disk_bytes=3 * MB)
        await self._store.open(_SESSIONS)
        self._outputs = [self._store.session(session_id) for session_id in _SESSIONS]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._store.run)
            for number, output in enumerate(self._outputs):
                output.describe_with(self._describe)
                output.when_gone(self._dropped.add)
                await self._recover(number, output)
            for deed in deeds:
                await self._perform(deed)
                self._check_counters()
            await until(self._is_at_rest)
            await self._check_output()
            nursery.cancel_scope.cancel()
        while self._store._writing.borrowed_tokens:  # noqa: ASYNC110 - no thread outlives a daemon that is killed
            await trio.sleep(0.001)
        for output in self._outputs:
            self._sure |= output._logs.keys() - output._changed.keys()
            self._told |= {each: (log.first_sequence, log.kept.written_sequence) for each, log in output._logs.items()}
        self._recorded |= self._sure

    def cut(self, size_bytes: int) -> None:
        """Leave the beginning of a record in the newest file of each kind."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
        for session_id in _SESSIONS:
            for kind in ("runs", "out"):
                newest = sorted(self._root.glob(f"{session_id}.*.{kind}"))[-1:]
                for path in set(newest) - self._cut:
                    self._cut.add(path)
                    with path.open("ab") as file:
                        file.write(b"".join(disk._record(b"run " + bytes(60)))[:size_bytes])

    def _describe(self, exec_id: str) -> tuple[RunFacts, RunState]:
        is_over = exec_id not in self._current
        state = RunState(
            end=attrs.evolve(END, exec_id=exec_id) if is_over else None, last_sequence=len(self._written[exec_id])
        )
        return attrs.evolve(FACTS, exec_id=exec_id), state

    async def _recover(self, number: int, output: SessionOutput) -> None:
        """Take over what is in the files, which is all that was written, and get the rest from PID 1."""
        found = await output.read()
        assert found.damaged_files == 0
        assert found.used.is_whole
        ours = {exec_id for exec_id in self._written if exec_id.startswith(f"{number}/")}
        assert self._sure & ours <= found.runs.keys()
        assert all(each in found.runs or each in found.used for each in self._dropped & self._recorded & ours)
        for exec_id, known in found.runs.items():
            log, (first, last) = output.open(exec_id), self._told.get(exec_id, (1, 0))
            await log.recover(known.parts, "")
            assert last < first or log.first_sequence <= first <= last <= log.last_sequence
            assert exec_id not in self._sure or (known.state.end is None) is (exec_id in self._current)
            if exec_id not in self._current:
                output.note_changed(exec_id)
                output.retire(exec_id)
        output.recovered_all()
        self._sure -= ours
        self._told = {exec_id: told for exec_id, told in self._told.items() if exec_id not in ours}
        exec_id = self._current[number]
        if exec_id:
            output.note_changed(exec_id)
            log = output.get(exec_id) or output.open(exec_id)
            for piece in self._written[exec_id][log.last_sequence :]:
                assert await log.append(piece.stream, piece.data) == piece

    async def _perform(self, deed: Deed) -> None:
        match deed:
            case Append(number, stream, size_bytes):
                await self._append(number, stream, size_bytes)
            case Burst(number, pieces):
                for count in range(pieces):
                    await self._append(number, list(Stream)[count % 2], count % 9 + 1)
            case End(number) if self._current[number]:
                exec_id, self._current[number] = self._current[number], ""
                self._outputs[number].note_changed(exec_id)
                self._outputs[number].retire(exec_id)
            case Write(number, output):
                try:
                    await self._outputs[number].write(None if output else ())
                except OSError:
                    pass
            case Disk(is_full):
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000 if is_full else -1, -1))
            case Turn():
                await trio.sleep(0.001)

    async def _append(self, number: int, stream: Stream, size_bytes: int) -> None:
        output = self._outputs[number]
        if not self._current[number]:
            exec_id = self._current[number] = f"{number}/{len(self._written)}"
            self._written[exec_id] = []
            output.open(exec_id)
            output.note_changed(exec_id)
        written, log = self._written[self._current[number]], output.get(self._current[number])
        assert log is not None
        with trio.fail_after(100):
            piece = await log.append(stream, (b"%d;" % (len(written) + 1) * size_bytes)[:size_bytes])
        assert piece.sequence == len(written) + 1
        written.append(piece)

    def _check_counters(self) -> None:
        memory_bytes, parts = 0, Counter[disk.DataFile]()
        for output in self._outputs:
            used_bytes = sum(log.record_bytes for log in output._retired)
            for log in output._logs.values():
                kept = log.kept
                assert kept.cost_bytes == sum(block.cost_bytes for block in kept.blocks)
                assert kept.memory_bytes == sum(block.cost_bytes for block in kept.blocks[kept._left :])
                assert all(block.cost_bytes >= _least_cost(block) for block in kept.blocks)
                memory_bytes += kept.memory_bytes
                used_bytes += kept.cost_bytes
                parts.update(part.file for block in kept.blocks for part in block.parts)
            assert output.account.used_bytes == used_bytes
        assert self._store.memory_bytes_used == memory_bytes
        assert all(file.live_parts == count for file, count in parts.items())
        assert not any(
            file.live_parts for output in self._outputs for file in list(output.files._outputs) if file not in parts
        )

    async def _check_output(self) -> None:
        assert self._store.disk_bytes_used == disk_bytes(self._root)
        assert self._store.output_bytes_on_disk <= 3 * MB
        for output in self._outputs:
            for exec_id, log in list(output._logs.items()):
                pieces = [piece for block in list(log.kept.blocks) for piece in await log.kept.load(block)]
                assert log.last_sequence == len(self._written[exec_id]) or exec_id not in self._current
                assert pieces == self._written[exec_id][log.first_sequence - 1 : log.last_sequence]

    async def _is_at_rest(self) -> bool:
        store = self._store
        is_busy = store._writing.borrowed_tokens or store._ledger.unneeded or store._ledger.work.is_set()
        return not is_busy and store.memory_bytes_used <= _MEMORY_BYTES


def _least_cost(block: Block) -> int:
    pieces_bytes = 0
    if block.packed is not None:
        pieces_bytes = len(block.packed)
    elif block.pieces is not None:
        pieces_bytes = sum(len(piece.data) + PIECE_OVERHEAD_BYTES for piece in block.pieces)
    return BLOCK_OVERHEAD_BYTES + PART_OVERHEAD_BYTES * max(0, len(block.parts) - 1) + pieces_bytes


async def _run_daemons(deeds: Sequence[Deed]) -> None:
    with tempfile.TemporaryDirectory(prefix="spool") as root:
        daemons, life = Daemons(Path(root)), list[Deed]()
        for deed in (*deeds, Kill(0), Kill(30), Kill(0)):
            life.append(deed)
            if isinstance(deed, Kill):
                await daemons.live(life)
                daemons.cut(deed.cut)
                life = []


@pytest.mark.slow
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(_deeds)
def test_the_next_daemon_has_all_that_was_written_and_no_counter_drifts(deeds: list[Deed]) -> None:
    """Daemons are killed at any moment, whatever is full or short."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        trio.run(_run_daemons, deeds)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
