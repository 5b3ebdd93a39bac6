"""What is kept of one log: a gapless end of its output, in blocks that lie in memory or in a file.

A block is the unit of the index, of writing and of dropping. The oldest ones are on disk, the newest ones in memory.
Knows neither readers nor policy; counts every byte it takes or gives back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Final

import trio

from sandkasten.model import Output, Stream
from sandkasten.output.spool_ledger import Account, Ledger
from sandkasten.output.spool_segment import Segment, SegmentDamaged, pack, read_block, unpack

PIECE_OVERHEAD_BYTES: Final = 160
"""What a piece costs in memory beside its bytes; makes a flood of tiny pieces as dear as it is."""

BLOCK_OVERHEAD_BYTES: Final = 1024
"""What a block costs beside its pieces; covers a log that has only one."""

_PACK_FROM_PIECES: Final = 128
"""A full block of so many pieces is packed: tiny ones then take little more than their bytes."""

_LAST_LINE_CHARS: Final = 200
_MAX_CHARACTER_BYTES: Final = 4


class Block:
    """Consecutive pieces: as a list that may grow, packed, or as a part of a file. The offsets are of its start."""

    __slots__ = (
        "cost_bytes",
        "first_sequence",
        "is_dropped",
        "is_sealed",
        "last_sequence",
        "length",
        "offset",
        "packed",
        "pieces",
        "position",
        "segment",
        "stderr_offset",
        "stdout_offset",
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
        self.is_sealed = False
        self.is_dropped = False
        self.segment: Segment | None = None
        self.position = 0
        self.length = 0


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
        "_on_disk",
        "account",
        "cost_bytes",
        "last_sequence",
        "memory_bytes",
        "stderr_bytes",
        "stdout_bytes",
    )

    def __init__(self, ledger: Ledger, account: Account) -> None:
        self._ledger = ledger
        self._blocks: list[Block] = []
        self._on_disk = 0
        self._is_charged = True
        self._is_settled = False
        self._last_line = ""
        self.account = account
        self.cost_bytes = 0
        self.memory_bytes = 0
        self.last_sequence = 0
        self.stdout_bytes = 0
        self.stderr_bytes = 0
        ledger.running[self] = None

    # What there is

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
        assert block.segment is not None
        place = (block.segment.path, block.position, block.length, block.first_sequence)
        try:
            return await trio.to_thread.run_sync(
                read_block, *place, limiter=self._ledger.reading, abandon_on_cancel=True
            )
        except (OSError, SegmentDamaged) as error:
            if not block.is_dropped:
                self._ledger.report(error)
                self.lose_through(block)
            return ()

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
        self.stdout_bytes, self.stderr_bytes, self.last_sequence = stdout_bytes, stderr_bytes, sequence

    def settle(self) -> None:
        """The run has ended: what is in memory may go to disk whole, before that of running ones."""
        if not self._is_settled:
            self._is_settled = True
            self._ledger.running.pop(self, None)
            if self._blocks and not self._blocks[-1].is_sealed:
                self._seal(self._blocks[-1])
            if self.memory_bytes:
                self._ledger.add_unwritten(self)

    def leave_account(self) -> None:
        """Cost the session nothing from now on; no more is added."""
        if self._is_charged:
            self._is_charged = False
            self.account.used_bytes -= self.cost_bytes

    def seal_unwritten(self, cost_bytes: int) -> Sequence[Block]:
        """Return the oldest blocks in memory that cost together at least `cost_bytes`, or all. They grow no more."""
        chosen: list[Block] = []
        for block in self._blocks[self._on_disk :]:
            if cost_bytes <= 0:
                break
            block.is_sealed = True
            chosen.append(block)
            cost_bytes -= block.cost_bytes
        return chosen

    def move_to_disk(self, block: Block, segment: Segment, position: int, length: int) -> None:
        """Note that a block of this log, the oldest in memory, lies in a file now."""
        assert self._blocks[self._on_disk] is block
        self._remember_last_line(block)
        block.segment, block.position, block.length = segment, position, length
        block.pieces = block.packed = None
        self._on_disk += 1
        self._leave_memory(block.cost_bytes)

    def drop_oldest(self) -> None:
        """Forget the oldest block."""
        block = self._blocks[0]
        self._remember_last_line(block)
        del self._blocks[0]
        block.is_dropped = True
        self.cost_bytes -= block.cost_bytes
        if self._is_charged:
            self.account.used_bytes -= block.cost_bytes
        if block.segment is None:
            self._leave_memory(block.cost_bytes)
        else:
            self._on_disk -= 1
            self._ledger.release(block.segment)

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
        self._leave_memory(saved)

    def _leave_memory(self, cost_bytes: int) -> None:
        self.memory_bytes -= cost_bytes
        if self._is_settled and not self.memory_bytes:
            self._ledger.remove_unwritten(self)
        self._ledger.give_back(cost_bytes)

    def _remember_last_line(self, block: Block) -> None:
        if block is self._blocks[-1] and block.pieces:
            self._last_line = _last_line(block.pieces)


def _last_line(pieces: Sequence[Output]) -> str:
    """Return the last line of what the stream of the last piece wrote without a break."""
    stream, tail = pieces[-1].stream, b""
    for piece in reversed(pieces):
        if piece.stream is not stream or len(tail) > _MAX_CHARACTER_BYTES * _LAST_LINE_CHARS:
            break
        tail = piece.data[-_MAX_CHARACTER_BYTES * _LAST_LINE_CHARS :] + tail
    lines = tail.decode("utf-8", "replace").rstrip("\r\n").splitlines()
    return lines[-1][-_LAST_LINE_CHARS:] if lines else ""
