"""The output log of one run: one writer, any number of readers, at any place in it.

Three layers, each of which knows only those before it:

- `Ledger` and `Account` count what all logs, and those of one session, hold in memory. Which log has to give way is
  decided in `store.py`.
- `KeptOutput` is what is kept of a log: a gapless end of its output, in blocks. A block is the unit of the index, of
  leaving memory and of being dropped. Its pieces are in memory, in a file, or in both: `written_sequence` tells how far
  the log is in its session's file, as parts of blocks (`disk.Place`), and each byte is put there at most once. The
  oldest blocks may have left memory.
- `OutputLog` numbers the pieces, tells its readers, and decides when the writer waits. `LogReader` is one reader.
"""

from __future__ import annotations

import enum
import logging
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from math import inf
from operator import attrgetter
from typing import Final

import trio

from sandkasten.model import Output, OutputSlice, Stream
from sandkasten.model.errors import ExecGone
from sandkasten.output.disk import PIECE_HEADER_BYTES, DataFile, Place, SessionFiles, Tail, pack, unpack
from sandkasten.output.records import BadRecord, Span

log = logging.getLogger(__name__)

WINDOW_BYTES: Final = 1024 * 1024
"""How far behind a reader may be before the writer waits. Every piece counts `PIECE_OVERHEAD_BYTES` beside its own."""

PIECE_OVERHEAD_BYTES: Final = 160
"""Memory of a piece beside its bytes; makes a flood of tiny pieces as dear as it is."""

BLOCK_OVERHEAD_BYTES: Final = 1024
"""Memory of a block beside its pieces; covers a log that has only one."""

PART_OVERHEAD_BYTES: Final = 256
"""Memory of each further part of a block that lies in a file."""

BLOCK_BYTES: Final = 256 * 1024

_PACK_FROM_PIECES: Final = 128
"""A full block of so many pieces is packed: tiny ones then take little more than their bytes."""

_LAST_LINE_CHARS: Final = 200
_MAX_CHARACTER_BYTES: Final = 4
_PIECE_BYTES: Final = 64 * 1024
_PIECES_PER_CHECKPOINT: Final = 16
_READING_THREADS: Final = 4
_REPORT_EVERY_S: Final = 60.0


# Counters -----------------------------------------------------------------------------------------------------------


class Account:
    """The costs of all logs of one session, wherever their output lies. `make_room` is called when they are more than
    the limit.

    `block_bytes` is the cost at which a block takes no further piece: small beside the limit, which is kept in blocks.
    `in_memory` are the logs of ended runs of which something is in memory, in the order in which they ended.
    """

    def __init__(self, limit_bytes: int, make_room: Callable[[], None]) -> None:
        self.limit_bytes = limit_bytes
        self.block_bytes = min(BLOCK_BYTES, limit_bytes // 16)
        self.make_room = make_room
        self.in_memory: OrderedDict[KeptOutput, None] = OrderedDict()
        self.used_bytes = 0


class Ledger:
    """The counters of the whole store.

    Blocks leave memory when `memory_bytes` passes the limit, until three quarters of it are left. A quarter above the
    limit, writers whose log holds more than its share wait; all shares together are a quarter. So memory stays below
    one and a half of the limit, plus one piece for each log that is written to.
    """

    def __init__(self, memory_limit_bytes: int) -> None:
        self.memory_limit_bytes = memory_limit_bytes
        self.memory_low_bytes = memory_limit_bytes * 3 // 4
        self.memory_bytes = 0
        self.lost_bytes = 0
        self.is_closed = False
        self.running: dict[KeptOutput, None] = {}
        self.in_memory: OrderedDict[Account, None] = OrderedDict()
        """The sessions that have something of ended runs in memory, in the order in which it is their turn."""
        self.unneeded: dict[SessionFiles, None] = {}
        """Sessions with files of which nothing may be needed any more."""
        self.reading = trio.CapacityLimiter(_READING_THREADS)
        self.work = trio.Event()
        """Set when the background task has something to do."""
        self._writers: set[trio.Event] = set()
        self._next_report = -inf

    def take(self, cost_bytes: int) -> None:
        """Count what came into memory."""
        self.memory_bytes += cost_bytes
        if self.memory_bytes > self.memory_limit_bytes:
            self.work.set()

    def give_back(self, cost_bytes: int) -> None:
        """Count what left memory, and let the writers that wait look again."""
        self.memory_bytes -= cost_bytes
        self.wake_writers()

    def is_short_for(self, held_bytes: int) -> bool:
        """Whether a running log that holds `held_bytes` in memory has to wait until some of them leave."""
        quarter = self.memory_limit_bytes // 4
        if self.memory_bytes <= self.memory_limit_bytes + quarter or self.is_closed:
            return False
        return held_bytes > quarter // max(1, len(self.running))

    def add_ended(self, kept: KeptOutput) -> None:
        """Something of an ended run is in memory."""
        kept.account.in_memory[kept] = None
        self.in_memory.setdefault(kept.account)

    def remove_ended(self, kept: KeptOutput) -> None:
        """Nothing of an ended run is in memory any more."""
        kept.account.in_memory.pop(kept, None)
        if not kept.account.in_memory:
            self.in_memory.pop(kept.account, None)

    def release(self, place: Place) -> None:
        """One part less is needed of a file; a file without any may be removed."""
        place.file.live_parts -= 1
        if not place.file.live_parts:
            self.note_unneeded(place.file.owner)

    def note_unneeded(self, files: SessionFiles) -> None:
        """Some of these files may have to be removed."""
        self.unneeded[files] = None
        self.work.set()

    async def wait_room(self, room: trio.Event) -> None:
        """Wait until `room` is set by a reader, or memory was given back."""
        self._writers.add(room)
        try:
            await room.wait()
        finally:
            self._writers.discard(room)

    def wake_writers(self) -> None:
        for room in self._writers:
            room.set()

    def report(self, error: Exception) -> None:
        """Log a failure of the disk, one a minute at most."""
        now = trio.current_time()
        if now >= self._next_report:
            self._next_report = now + _REPORT_EVERY_S
            log.error(
                "spool_failed", extra={"error": f"{type(error).__name__}: {error}", "lost_bytes": self.lost_bytes}
            )


# Blocks -------------------------------------------------------------------------------------------------------------


class Block:
    """Consecutive pieces. In memory they are a list that may grow, or packed; in files they are `parts`, in order.
    `packed_bytes` is the size of all pieces when packed, `written_bytes` of those in files. The offsets are of the
    block's start."""

    __slots__ = (
        "cost_bytes",
        "first_sequence",
        "is_dropped",
        "is_sealed",
        "last_sequence",
        "offset",
        "packed",
        "packed_bytes",
        "parts",
        "pieces",
        "stderr_offset",
        "stdout_offset",
        "written_bytes",
    )

    def __init__(self, first_sequence: int, stdout_offset: int, stderr_offset: int) -> None:
        self.first_sequence = first_sequence
        self.last_sequence = first_sequence - 1
        self.stdout_offset = stdout_offset
        self.stderr_offset = stderr_offset
        self.offset = stdout_offset + stderr_offset
        self.cost_bytes = 0
        self.pieces: list[Output] | None = []
        self.packed: bytes | None = None
        self.packed_bytes = 0
        self.parts: list[Place] = []
        self.written_bytes = 0
        self.is_sealed = False
        self.is_dropped = False

    @property
    def is_written(self) -> bool:
        """Whether all pieces lie in files."""
        return self.written_bytes == self.packed_bytes

    def read(self) -> list[Output]:
        """Return the pieces from the files; for worker threads. Raises `OSError`, `BadRecord`."""
        return unpack(b"".join([part.read() for part in self.parts]), self.first_sequence)


_first_sequence = attrgetter("first_sequence")
_STARTS: Final[dict[Stream | None, Callable[[Block], int]]] = {
    None: attrgetter("offset"),
    Stream.STDOUT: attrgetter("stdout_offset"),
    Stream.STDERR: attrgetter("stderr_offset"),
}


class KeptOutput:
    """The blocks of one log, and how much was ever added to it."""

    __slots__ = (
        "_blocks",
        "_is_charged",
        "_is_settled",
        "_last_line",
        "_ledger",
        "_left",
        "account",
        "cost_bytes",
        "exec_id",
        "last_sequence",
        "memory_bytes",
        "stderr_bytes",
        "stdout_bytes",
        "written_sequence",
    )

    def __init__(self, exec_id: str, ledger: Ledger, account: Account) -> None:
        self.exec_id = exec_id
        self._ledger = ledger
        self._blocks: list[Block] = []
        self._left = 0
        self._is_charged = True
        self._is_settled = False
        self._last_line = ""
        self.account = account
        self.cost_bytes = 0
        self.memory_bytes = 0
        self.last_sequence = 0
        self.stdout_bytes = 0
        self.stderr_bytes = 0
        self.written_sequence = 0
        """Number of the last piece that lies in a file, or is lost and need not be written."""
        ledger.running[self] = None

    # What there is

    @property
    def is_written(self) -> bool:
        """Whether nothing that is kept lies in memory alone."""
        return not self._blocks or self.last_sequence <= self.written_sequence

    @property
    def blocks(self) -> Sequence[Block]:
        return self._blocks

    @property
    def first_sequence(self) -> int:
        """Number of the first piece that is kept, or of the next one to come."""
        return self._blocks[0].first_sequence if self._blocks else self.last_sequence + 1

    @property
    def last_line(self) -> str:
        """The last line of what came last, cut from its left."""
        block = self._blocks[-1] if self._blocks else None
        if block is None or not block.pieces:
            return self._last_line
        return _last_line(block.pieces)

    def total(self, stream: Stream | None) -> int:
        """Return how many bytes were ever added."""
        if stream is None:
            return self.stdout_bytes + self.stderr_bytes
        return self.stdout_bytes if stream is Stream.STDOUT else self.stderr_bytes

    def first_offset(self, stream: Stream | None) -> int:
        """Return the offset of the first byte that is kept."""
        return _STARTS[stream](self._blocks[0]) if self._blocks else self.total(stream)

    def find(self, sequence: int) -> Block | None:
        """Return the block with the piece of that number, None if it isn't kept."""
        blocks = self._blocks
        if not blocks or not blocks[0].first_sequence <= sequence <= self.last_sequence:
            return None
        if sequence >= blocks[-1].first_sequence:
            return blocks[-1]
        return blocks[bisect_right(blocks, sequence, key=_first_sequence) - 1]

    def find_offset(self, stream: Stream | None, offset: int) -> Block | None:
        """Return the block with that byte of a stream, or of both, None if it isn't kept."""
        if not self.first_offset(stream) <= offset < self.total(stream):
            return None
        return self._blocks[bisect_right(self._blocks, offset, key=_STARTS[stream]) - 1]

    def start(self, block: Block, stream: Stream | None) -> int:
        """Return the offset in a stream, or in both, at which a block begins."""
        return _STARTS[stream](block)

    async def load(self, block: Block) -> Sequence[Output]:
        """Return the pieces of a block, from disk if they are there; none if they are lost or were dropped meanwhile.

        A list of pieces in memory grows while its block is the newest one.
        """
        if block.pieces is not None:
            return block.pieces
        if block.packed is not None:
            return unpack(block.packed, block.first_sequence)
        try:
            return await trio.to_thread.run_sync(block.read, limiter=self._ledger.reading, abandon_on_cancel=True)
        except (OSError, BadRecord) as error:
            if not block.is_dropped:
                self._ledger.report(error)
                self.lose_through(block)
            return ()

    def unwritten(self, limit_bytes: float = inf) -> Sequence[tuple[Block, Tail]]:
        """Return the oldest output that lies in no file, in parts of about `limit_bytes` together or less."""
        found: list[tuple[Block, Tail]] = []
        number = len(self._blocks)
        while number > self._left and self._blocks[number - 1].last_sequence > self.written_sequence:
            number -= 1
        for block in self._blocks[number:]:
            if limit_bytes <= 0:
                break
            limit_bytes -= block.packed_bytes - block.written_bytes
            found.append((block, self._tail(block)))
        return found

    def _tail(self, block: Block) -> Tail:
        """Return what of a block is in no file."""
        first = max(self.written_sequence + 1, block.first_sequence)
        content: bytes | Sequence[Output]
        if block.packed is not None:
            content = block.packed[block.written_bytes :]
            pieces: Sequence[Output] = unpack(content, first)
        else:
            assert block.pieces is not None
            content = pieces = block.pieces[first - block.first_sequence :]
        size = dict.fromkeys(Stream, 0)
        for piece in pieces:
            size[piece.stream] += len(piece.data)
        stdout_end, stderr_end = self._end(block)
        stdout_start, stderr_start = stdout_end - size[Stream.STDOUT], stderr_end - size[Stream.STDERR]
        span = Span(first, block.last_sequence + 1, stdout_start, stdout_end, stderr_start, stderr_end)
        return Tail(self.exec_id, span, content)

    def _end(self, block: Block) -> tuple[int, int]:
        """Return the offsets behind a block."""
        if block is self._blocks[-1]:
            return self.stdout_bytes, self.stderr_bytes
        following = self._blocks[bisect_right(self._blocks, block.first_sequence, key=_first_sequence)]
        return following.stdout_offset, following.stderr_offset

    # How it changes

    def add(self, piece: Output) -> None:
        """Keep the next piece. May drop older ones, of this log or another, when the session's account is full."""
        cost = len(piece.data) + PIECE_OVERHEAD_BYTES
        account = self.account
        block = self._blocks[-1] if self._blocks else None
        if block is None or block.is_sealed:
            block = Block(piece.sequence, self.stdout_bytes, self.stderr_bytes)
            self._blocks.append(block)
            cost += BLOCK_OVERHEAD_BYTES
        assert block.pieces is not None
        block.pieces.append(piece)
        block.last_sequence = piece.sequence
        block.packed_bytes += PIECE_HEADER_BYTES + len(piece.data)
        block.cost_bytes += cost
        self.last_sequence = piece.sequence
        if piece.stream is Stream.STDOUT:
            self.stdout_bytes += len(piece.data)
        else:
            self.stderr_bytes += len(piece.data)
        self.cost_bytes += cost
        self.memory_bytes += cost
        self._ledger.take(cost)
        account.used_bytes += cost
        if block.cost_bytes >= account.block_bytes:
            self._seal(block)
        if account.used_bytes > account.limit_bytes:
            account.make_room()

    def skip_to(self, stdout_bytes: int, stderr_bytes: int, sequence: int) -> None:
        """Keep nothing, and count as if so much had been added, the last piece of that number."""
        while self._blocks:
            self.drop_oldest()
        self.stdout_bytes, self.stderr_bytes = stdout_bytes, stderr_bytes
        self.last_sequence = self.written_sequence = sequence

    def settle(self) -> None:
        """The run has ended: what is in memory may go to disk whole, before that of running ones."""
        if not self._is_settled:
            self._is_settled = True
            self._ledger.running.pop(self, None)
            if self._blocks and not self._blocks[-1].is_sealed:
                self._seal(self._blocks[-1])
            if self.memory_bytes:
                self._ledger.add_ended(self)

    def leave_account(self) -> None:
        """Cost the session nothing from now on, and stay in memory until it is dropped; no more is added."""
        self._is_settled = True
        self._ledger.running.pop(self, None)
        self._ledger.remove_ended(self)
        if self._is_charged:
            self._is_charged = False
            self.account.used_bytes -= self.cost_bytes

    async def recover(self, parts: Sequence[tuple[Span, Place]], last_line: str) -> None:
        """Begin with the output that an earlier daemon wrote down, which lies in files."""
        for span, place in parts:
            block = self._blocks[-1] if self._blocks else None
            cost = PART_OVERHEAD_BYTES
            if block is None or block.cost_bytes >= self.account.block_bytes:
                block = Block(span.first_sequence, span.stdout_start, span.stderr_start)
                block.pieces, block.is_sealed = None, True
                self._blocks.append(block)
                self._left += 1
                cost = BLOCK_OVERHEAD_BYTES
            place.file.live_parts += 1
            block.parts.append(place)
            block.last_sequence = self.last_sequence = self.written_sequence = span.next_sequence - 1
            self.stdout_bytes, self.stderr_bytes = span.stdout_end, span.stderr_end
            block.packed_bytes += _packed_bytes(span)
            block.written_bytes = block.packed_bytes
            self._charge(block, cost + _packed_bytes(span))
        self._last_line = last_line
        if self._blocks and not last_line and (pieces := await self.load(self._blocks[-1])):
            self._last_line = _last_line(pieces)

    def oldest_in_memory(self, cost_bytes: int) -> Sequence[Block]:
        """Return the oldest blocks in memory that cost together at least `cost_bytes`, or all. They grow no more."""
        chosen: list[Block] = []
        for block in self._blocks[self._left :]:
            if cost_bytes <= 0:
                break
            block.is_sealed = True
            chosen.append(block)
            cost_bytes -= block.cost_bytes
        return chosen

    def note_written(self, block: Block, span: Span, place: Place) -> None:
        """The tail of a block lies in a file now."""
        place.file.live_parts += 1
        if block.is_dropped:
            self._ledger.release(place)
            return
        block.parts.append(place)
        self.written_sequence = span.next_sequence - 1
        block.written_bytes += _packed_bytes(span)
        if len(block.parts) > 1:
            self._charge(block, PART_OVERHEAD_BYTES)
            self.memory_bytes += PART_OVERHEAD_BYTES
            self._ledger.take(PART_OVERHEAD_BYTES)

    def leave_memory(self) -> None:
        """Have the oldest blocks leave memory that grow no more and lie in files."""
        while self._left < len(self._blocks) and (block := self._blocks[self._left]).is_sealed and block.is_written:
            self._remember_last_line(block)
            block.pieces = block.packed = None
            self._left += 1
            self._give_back(block.cost_bytes)

    def drop_oldest(self) -> None:
        """Forget the oldest block."""
        block = self._blocks[0]
        self._remember_last_line(block)
        del self._blocks[0]
        block.is_dropped = True
        self.cost_bytes -= block.cost_bytes
        if self._is_charged:
            self.account.used_bytes -= block.cost_bytes
        if self._left:
            self._left -= 1
        else:
            self._give_back(block.cost_bytes)
        for part in block.parts:
            self._ledger.release(part)

    def drop_file(self, file: DataFile) -> None:
        """Forget everything up to the last block of which a part lies in `file`, the oldest of its session."""
        while self._blocks and any(part.file is file for part in self._blocks[0].parts):
            self.drop_oldest()

    def lose(self, blocks: Sequence[Block]) -> None:
        """Forget those of some blocks, the oldest in memory, that the disk did not take; the others leave memory."""
        unwritten = [block for block in blocks if not block.is_written and not block.is_dropped]
        if unwritten:
            self.lose_through(unwritten[-1])
        self.leave_memory()

    def lose_through(self, block: Block) -> None:
        """Forget everything up to the end of a block that the disk did not take or give back."""
        before = self.first_offset(None)
        while not block.is_dropped:
            self.drop_oldest()
        self._ledger.lost_bytes += self.first_offset(None) - before

    def _seal(self, block: Block) -> None:
        """Add no more to the newest block, and pack it where that saves much."""
        block.is_sealed = True
        if block.pieces is None or len(block.pieces) < _PACK_FROM_PIECES:
            return
        self._remember_last_line(block)
        block.packed = pack(block.pieces)
        block.pieces = None
        saved = block.cost_bytes - BLOCK_OVERHEAD_BYTES - len(block.packed)
        block.cost_bytes -= saved
        self.cost_bytes -= saved
        if self._is_charged:
            self.account.used_bytes -= saved
        self._give_back(saved)

    def _charge(self, block: Block, cost_bytes: int) -> None:
        block.cost_bytes += cost_bytes
        self.cost_bytes += cost_bytes
        if self._is_charged:
            self.account.used_bytes += cost_bytes

    def _give_back(self, cost_bytes: int) -> None:
        self.memory_bytes -= cost_bytes
        if self._is_settled and not self.memory_bytes:
            self._ledger.remove_ended(self)
        self._ledger.give_back(cost_bytes)

    def _remember_last_line(self, block: Block) -> None:
        if block is self._blocks[-1] and block.pieces:
            self._last_line = _last_line(block.pieces)


def _packed_bytes(span: Span) -> int:
    return span.size_bytes + PIECE_HEADER_BYTES * (span.next_sequence - span.first_sequence)


def _last_line(pieces: Sequence[Output]) -> str:
    """Return the last line of what the stream of the last piece wrote without a break."""
    stream, tail = pieces[-1].stream, b""
    for piece in reversed(pieces):
        if piece.stream is not stream or len(tail) > _MAX_CHARACTER_BYTES * _LAST_LINE_CHARS:
            break
        tail = piece.data[-_MAX_CHARACTER_BYTES * _LAST_LINE_CHARS :] + tail
    lines = tail.decode("utf-8", "replace").rstrip("\r\n").splitlines()
    return lines[-1][-_LAST_LINE_CHARS:] if lines else ""


# The log ------------------------------------------------------------------------------------------------------------


class ReaderMode(enum.Enum):
    """What a reader that is slow means: the writer waits for it, or only for the fastest of its kind."""

    HOLDING = enum.auto()
    FASTEST = enum.auto()


class OutputLog:
    """The log of one run. `append` and `close` are its writer's."""

    __slots__ = (
        "_discarded",
        "_is_closed",
        "_ledger",
        "_news",
        "_readers",
        "_room",
        "exec_id",
        "expires_at",
        "is_gone",
        "kept",
        "record_bytes",
    )

    def __init__(self, exec_id: str, ledger: Ledger, account: Account) -> None:
        self.exec_id = exec_id
        self.kept = KeptOutput(exec_id, ledger, account)
        self.is_gone = False
        """Nobody finds it any more; readers that were close behind its end still get the rest."""
        self.expires_at = 0.0
        self.record_bytes = 0
        """What is kept of its run costs besides, once it has ended."""
        self._ledger = ledger
        self._discarded = 0
        self._is_closed = False
        self._readers: list[LogReader] = []
        self._news: trio.Event | None = None
        self._room: trio.Event | None = None

    @property
    def first_sequence(self) -> int:
        """Number of the first piece that is kept, or of the next one to come."""
        return self.kept.first_sequence

    @property
    def last_sequence(self) -> int:
        return self.kept.last_sequence

    @property
    def stdout_bytes(self) -> int:
        return self.kept.stdout_bytes

    @property
    def stderr_bytes(self) -> int:
        return self.kept.stderr_bytes

    @property
    def last_line(self) -> str:
        """The last line of what came last, at most 200 characters of it."""
        return self.kept.last_line

    @property
    def is_written(self) -> bool:
        """Whether nothing that is kept lies in memory alone."""
        return self.kept.is_written

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    # The writer

    async def append(self, stream: Stream, data: bytes) -> Output:
        """Number a piece of output and hand it to the readers.

        Waits while a reader holds the log, or while memory is short and much of this log is not written yet; else it
        is no checkpoint. What comes after the session's logs were closed is numbered, and kept nowhere.
        """
        if self._is_held():
            await self._wait_room()
        if self.is_gone:
            self._discarded += 1
            return Output(stream, data, self.kept.last_sequence + self._discarded)
        assert not self._is_closed
        piece = Output(stream, data, self.kept.last_sequence + 1)
        self.kept.add(piece)
        if self._news is not None:
            self.tell()
        return piece

    async def recover(self, parts: Sequence[tuple[Span, Place]], last_line: str) -> None:
        """Begin with output that an earlier daemon wrote to the session's files."""
        if parts:
            first = parts[0][0]
            self.skip_to(
                stdout_bytes=first.stdout_start, stderr_bytes=first.stderr_start, sequence=first.first_sequence - 1
            )
        await self.kept.recover(parts, last_line)

    def skip_to(self, *, stdout_bytes: int, stderr_bytes: int, sequence: int | None = None) -> None:
        """Go on at these offsets, behind the piece of that number, or if it is not known behind any that can have been
        before them; what is kept before the gap is dropped."""
        gap_bytes = stdout_bytes - self.stdout_bytes + stderr_bytes - self.stderr_bytes
        if gap_bytes > 0:
            self.kept.skip_to(stdout_bytes, stderr_bytes, sequence or self.last_sequence + gap_bytes)
            self.tell()

    def close(self) -> None:
        """No more output comes: readers finish."""
        self._is_closed = True
        self.tell()

    # Readers

    def reader(self, *, after: int = 0, mode: ReaderMode = ReaderMode.HOLDING) -> LogReader:
        """Return a reader of what follows the piece numbered `after`. The caller closes it.

        One that is `FASTEST` begins with what is kept when that is later.

        Raises:
            ExecGone: what follows is not kept any more.
        """
        after = min(after, self.last_sequence)
        if after + 1 < self.first_sequence:
            if mode is ReaderMode.HOLDING:
                raise self.gone()
            after = self.first_sequence - 1
        reader = LogReader(self, mode, after)
        self._readers.append(reader)
        return reader

    async def read(self, stream: Stream | None, offset: int, limit: int) -> OutputSlice:
        """Return at most `limit` bytes of a stream, or of both, from `offset` on. Never waits for output.

        Raises:
            ExecGone: what is at that offset is not kept any more.
        """
        parts: list[bytes] = []
        at = offset
        while at - offset < limit and (block := self.kept.find_offset(stream, at)) is not None:
            pieces = await self.kept.load(block)
            start = self.kept.start(block, stream)
            part = _cut(pieces, stream, at - start, limit - (at - offset))
            if not part:
                break
            parts.append(part)
            at += len(part)
            await trio.lowlevel.checkpoint()
        first_offset = self.kept.first_offset(stream)
        if offset < first_offset and not parts:
            raise ExecGone("that part of the output is not kept any more", first_offset=first_offset)
        total = self.kept.total(stream)
        return OutputSlice(b"".join(parts), offset, at, first_offset, total, self._is_closed and at >= total)

    def gone(self) -> ExecGone:
        return ExecGone("that part of the output is not kept any more", first_sequence=self.first_sequence)

    # For those who make room

    @property
    def can_shrink(self) -> bool:
        """Whether the oldest part is needed by no reader that the log waits for, and is not the newest as well."""
        blocks = self.kept.blocks
        return len(blocks) > 1 and blocks[0].last_sequence <= self._needed_after()

    def drop(self) -> None:
        """Keep nothing but what readers that are close behind the end still need. Never blocks."""
        self.is_gone = self._is_closed = True
        self.kept.leave_account()
        self._drop_unneeded()
        self.tell()
        self._wake_writer()

    # For readers

    def moved(self) -> None:
        """A reader got ahead."""
        if self._room is not None:
            self._wake_writer()

    def left(self, reader: LogReader) -> None:
        """A reader was closed."""
        self._readers.remove(reader)
        self.turned(reader)
        self._wake_writer()
        self.tell()

    def turned(self, reader: LogReader) -> None:
        """A reader is done with a block, or with everything."""
        if self.is_gone:
            self._drop_unneeded()

    async def wait_news(self) -> None:
        """Wait until something was appended, or the log or a reader was closed."""
        if self._news is None:
            self._news = trio.Event()
        await self._news.wait()

    def tell(self) -> None:
        """Wake the readers."""
        if self._news is not None:
            self._news.set()
            self._news = None

    def _drop_unneeded(self) -> None:
        close_behind = [each.sequence for each in self._readers if self._lag(each) <= WINDOW_BYTES + 2 * _PIECE_BYTES]
        done = min(close_behind, default=self.last_sequence)
        while self.kept.blocks and self.kept.blocks[0].last_sequence <= done:
            self.kept.drop_oldest()

    def _needed_after(self) -> int:
        """Return the number of the last piece that no reader needs for which the writer waits."""
        holding = [each.sequence for each in self._readers if each.mode is ReaderMode.HOLDING]
        fastest = max((each.sequence for each in self._readers if each.mode is ReaderMode.FASTEST), default=None)
        return min([self.last_sequence, *holding] if fastest is None else [fastest, *holding])

    def _lag(self, reader: LogReader) -> int:
        return (
            self.kept.total(None) - reader.offset + PIECE_OVERHEAD_BYTES * (self.kept.last_sequence - reader.sequence)
        )

    def _is_held(self) -> bool:
        return self._ledger.is_short_for(self.kept.memory_bytes) or (bool(self._readers) and self._is_held_by_readers())

    def _is_held_by_readers(self) -> bool:
        fastest: int | None = None
        for reader in self._readers:
            lag = self._lag(reader)
            if reader.mode is ReaderMode.FASTEST:
                fastest = lag if fastest is None else min(lag, fastest)
            elif lag > WINDOW_BYTES:
                return True
        return fastest is not None and fastest > WINDOW_BYTES

    async def _wait_room(self) -> None:
        while not self.is_gone and self._is_held():
            self._room = trio.Event()
            try:
                await self._ledger.wait_room(self._room)
            finally:
                self._room = None

    def _wake_writer(self) -> None:
        if self._room is not None:
            self._room.set()


class LogReader:
    """An async iterator over a log, for one task at a time. A cancelled step loses nothing.

    Besides its place it holds at most one block of output.
    """

    __slots__ = (
        "_index",
        "_is_closed",
        "_is_exact",
        "_log",
        "_pieces",
        "_until_checkpoint",
        "mode",
        "offset",
        "sequence",
        "skipped_bytes",
    )

    def __init__(self, log: OutputLog, mode: ReaderMode, after: int) -> None:
        self.mode = mode
        self.sequence = after
        """Number of the last piece that was handed out."""
        self.skipped_bytes = 0
        """What it missed; up to a block too many when it joined at what is on disk and had read nothing yet."""
        self._log = log
        self._pieces: Sequence[Output] = ()
        self._index = 0
        self._is_closed = False
        self._until_checkpoint = _PIECES_PER_CHECKPOINT
        block = log.kept.find(after + 1)
        self.offset = log.kept.total(None) if block is None else block.offset
        """Where it is, in bytes of both streams; that of its block as long as that was not read from disk."""
        self._is_exact = block is None or block.pieces is not None
        if block is not None and block.pieces is not None:
            self.offset += _size(block.pieces[: after + 1 - block.first_sequence])

    def __aiter__(self) -> LogReader:
        return self

    async def __anext__(self) -> Output:
        """Return the next piece.

        Raises:
            ExecGone: it is not kept any more, and this reader does not skip.
            trio.ClosedResourceError: the reader was closed.
        """
        self._until_checkpoint -= 1
        if self._until_checkpoint < 0:
            self._until_checkpoint = _PIECES_PER_CHECKPOINT
            await trio.lowlevel.checkpoint()
        while self._index >= len(self._pieces) or self._is_closed:
            if not await self._turn():
                raise StopAsyncIteration
        piece = self._pieces[self._index]
        self._index += 1
        self.sequence = piece.sequence
        self.offset += len(piece.data)
        self._log.moved()
        return piece

    def close(self) -> None:
        """Leave: the writer waits for this reader no more."""
        if not self._is_closed:
            self._is_closed = True
            self._pieces = ()
            self._log.left(self)

    async def _turn(self) -> bool:
        """Get hold of the pieces that come next, or wait for some. False: there will be none."""
        if self._is_closed:
            raise trio.ClosedResourceError("the reader was closed")
        log = self._log
        self._pieces, self._index = (), 0
        log.turned(self)
        block = log.kept.find(self.sequence + 1)
        if block is not None:
            await self._open(block)
        elif self.sequence < log.last_sequence:
            self._skip()
        elif log.is_closed:
            return False
        else:
            await log.wait_news()
        return True

    async def _open(self, block: Block) -> None:
        pieces = await self._log.kept.load(block)
        if self._is_closed:
            return
        self._index = self.sequence + 1 - block.first_sequence
        self._pieces = pieces
        if not self._is_exact and pieces:
            self.offset = block.offset + _size(pieces[: self._index])
            self._is_exact = True

    def _skip(self) -> None:
        log = self._log
        if self.mode is ReaderMode.HOLDING:
            raise log.gone()
        first_offset = log.kept.first_offset(None)
        self.skipped_bytes += first_offset - self.offset
        self.offset, self.sequence, self._is_exact = first_offset, log.first_sequence - 1, True
        log.moved()


def _size(pieces: Sequence[Output]) -> int:
    return sum(len(piece.data) for piece in pieces)


def _cut(pieces: Sequence[Output], stream: Stream | None, skip: int, limit: int) -> bytes:
    """Return at most `limit` bytes of a stream, or of both, behind the first `skip` ones."""
    parts: list[bytes] = []
    for piece in pieces:
        if limit <= 0:
            break
        if stream is None or piece.stream is stream:
            part = piece.data[skip : skip + limit]
            skip = max(0, skip - len(piece.data))
            limit -= len(part)
            parts.append(part)
    return b"".join(parts)
