"""The end of a log that is kept, in blocks, and the counters of its cost.

`Ledger` and `OutputAccount` count what all logs, and those of one session, cost. Which log has to give way is decided
in `store.py`.

`KeptOutput` is what is kept of one log: a gapless end of its output. A block is the unit of the index, of leaving
memory and of being dropped. Its pieces are in memory, in files, or in both: `written_sequence` tells how far the log
lies in its session's files, as parts of blocks (`disk.RecordPlace`), and each byte is put there at most once. The
oldest blocks may have left memory.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from math import inf
from operator import attrgetter
from typing import Final

import attrs
import trio

from sandkasten.model import Output, Stream
from sandkasten.output.disk import PIECE_HEADER_BYTES, DataFile, RecordPlace, SessionFiles, Tail, pack, unpack
from sandkasten.output.records import BadRecord, Span

log = logging.getLogger(__name__)

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
_READING_THREADS: Final = 4
_REPORT_EVERY_S: Final = 60.0


# Counters -----------------------------------------------------------------------------------------------------------


class OutputAccount:
    """The cost of all logs of one session, wherever their output lies. `make_room` is called when the cost passes the
    limit.

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
        self.in_memory: OrderedDict[OutputAccount, None] = OrderedDict()
        """Sessions with output of ended runs in memory, in the order of their turns."""
        self.lingering: dict[KeptOutput, None] = {}
        """Dropped logs with an end in memory for readers that are close behind."""
        self.unneeded: dict[SessionFiles, None] = {}
        """Sessions with files of which nothing may be needed any more."""
        self.reading = trio.CapacityLimiter(_READING_THREADS)
        self.work = trio.Event()
        """Set when the background task has something to do."""
        self._writers: set[trio.Event] = set()
        self._next_report = -inf

    def take(self, cost_bytes: int) -> None:
        """Count output that came into memory."""
        self.memory_bytes += cost_bytes
        if self.memory_bytes > self.memory_limit_bytes:
            self.work.set()

    def give_back(self, cost_bytes: int) -> None:
        """Count output that left memory, and let the writers that wait look again."""
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
        self.lingering.pop(kept, None)
        kept.account.in_memory.pop(kept, None)
        if not kept.account.in_memory:
            self.in_memory.pop(kept.account, None)

    def release(self, place: RecordPlace) -> None:
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
                "output_not_written", extra={"error": f"{type(error).__name__}: {error}", "lost_bytes": self.lost_bytes}
            )


# Blocks -------------------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Block:
    """Consecutive pieces. In memory they are a list that may grow, or packed; in files they are `parts`, in order.
    `packed_bytes` is the size of all pieces when packed, `written_bytes` of those in files. The offsets are of the
    block's start."""

    first_sequence: int
    stdout_offset: int
    stderr_offset: int
    offset: int = attrs.Factory(lambda self: self.stdout_offset + self.stderr_offset, takes_self=True)
    last_sequence: int = attrs.Factory(lambda self: self.first_sequence - 1, takes_self=True)
    cost_bytes: int = 0
    pieces: list[Output] | None = attrs.field(factory=list)
    packed: bytes | None = None
    packed_bytes: int = 0
    parts: list[RecordPlace] = attrs.field(factory=list)
    written_bytes: int = 0
    is_sealed: bool = False
    is_dropped: bool = False

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
    """The blocks of one log, and how much was ever added to the log."""

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

    def __init__(self, exec_id: str, ledger: Ledger, account: OutputAccount) -> None:
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
        """Whether all output that is kept lies in files."""
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
        """The last line of the newest output, cut from its left."""
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
        """Return the block with the piece of that number, None if there is no such block."""
        blocks = self._blocks
        if not blocks or not blocks[0].first_sequence <= sequence <= self.last_sequence:
            return None
        if sequence >= blocks[-1].first_sequence:
            return blocks[-1]
        return blocks[bisect_right(blocks, sequence, key=_first_sequence) - 1]

    def find_offset(self, stream: Stream | None, offset: int) -> Block | None:
        """Return the block with that byte of a stream, or of both, None if there is no such block."""
        if not self.first_offset(stream) <= offset < self.total(stream):
            return None
        return self._blocks[bisect_right(self._blocks, offset, key=_STARTS[stream]) - 1]

    def start(self, block: Block, stream: Stream | None) -> int:
        """Return the offset in a stream, or in both, at which a block begins."""
        return _STARTS[stream](block)

    async def load(self, block: Block) -> Sequence[Output]:
        """Return the pieces of a block, from memory or from files; none if the block is lost or was dropped meanwhile.

        A list of pieces in memory grows while its block is the newest one.
        """
        if block.pieces is not None:
            return block.pieces
        if block.packed is not None:
            return unpack(block.packed, block.first_sequence)
        try:
            return await trio.to_thread.run_sync(block.read, limiter=self._ledger.reading, abandon_on_cancel=True)
        except (OSError, BadRecord) as error:
            if any(part.file.is_given_up for part in block.parts):
                self.drop_through(block)
            elif not block.is_dropped:
                self._ledger.report(error)
                self.lose_through(block)
            return ()

    def unwritten(
        self, limit_bytes: float = inf, *, among: Sequence[Block] | None = None
    ) -> Sequence[tuple[Block, Tail]]:
        """Return the oldest output that lies in no file, in parts of about `limit_bytes` together or less; only that
        of the blocks `among`, the oldest in memory."""
        found: list[tuple[Block, Tail]] = []
        number = len(self._blocks)
        while number > self._left and self._blocks[number - 1].last_sequence > self.written_sequence:
            number -= 1
        for block in self._blocks[number:]:
            if limit_bytes <= 0 or (among is not None and block not in among):
                break
            limit_bytes -= block.packed_bytes - block.written_bytes
            found.append((block, self._tail(block)))
        return found

    def _tail(self, block: Block) -> Tail:
        """Return the part of a block that is in no file."""
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
        """Cost the session nothing from now on; no more is added, and blocks in memory stay there."""
        self._is_settled = True
        self._ledger.running.pop(self, None)
        self._ledger.remove_ended(self)
        if self._is_charged:
            self._is_charged = False
            self.account.used_bytes -= self.cost_bytes

    async def recover(self, parts: Sequence[tuple[Span, RecordPlace]], last_line: str) -> None:
        """Begin with the output that an earlier daemon wrote to files."""
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
        """Return the oldest blocks in memory that cost together `cost_bytes` or more, or all, and seal them."""
        chosen: list[Block] = []
        for block in self._blocks[self._left :]:
            if cost_bytes <= 0:
                break
            block.is_sealed = True
            chosen.append(block)
            cost_bytes -= block.cost_bytes
        return chosen

    def note_written(self, block: Block, span: Span, place: RecordPlace) -> None:
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

    def drop_through(self, block: Block) -> None:
        """Forget everything up to the end of a block."""
        while not block.is_dropped:
            self.drop_oldest()

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
        self.drop_through(block)
        self._ledger.lost_bytes += self.first_offset(None) - before

    def _seal(self, block: Block) -> None:
        """Add no more to the newest block, and pack it where that saves much."""
        block.is_sealed = True
        if block.pieces is None or len(block.pieces) < _PACK_FROM_PIECES:
            return
        self._remember_last_line(block)
        block.packed = pack(block.pieces)
        saved = len(block.pieces) * (PIECE_OVERHEAD_BYTES - PIECE_HEADER_BYTES)
        block.pieces = None
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
