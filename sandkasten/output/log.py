"""The output log of one run: one writer, any number of readers, at any place in it.

`OutputLog` numbers the pieces, tells its readers, and decides when the writer waits: for a reader that lags, or while
memory is short. `LogReader` is one reader. What is kept, and where, is `KeptOutput`'s.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final

import trio

from sandkasten.errors import ExecGone
from sandkasten.model import Output, OutputSlice, Stream
from sandkasten.output.blocks import PIECE_OVERHEAD_BYTES, Block, KeptOutput, Ledger, OutputAccount
from sandkasten.output.disk import RecordPlace
from sandkasten.output.records import Span

WINDOW_BYTES: Final = 1024 * 1024
"""Output that a reader may be behind before the writer waits. Every piece counts `PIECE_OVERHEAD_BYTES` beside its own.
"""

_PIECE_BYTES: Final = 256 * 1024
"""The largest piece that PID 1 sends."""

_PIECES_PER_CHECKPOINT: Final = 16


CATCH_UP_S = 5.0
"""Longest wait for output that an earlier daemon had and PID 1 has still; a paused PID 1 sends none."""


class ReaderMode(enum.Enum):
    """Meaning of a slow reader: the writer waits for each such reader, or only for the fastest of them."""

    HOLDING = enum.auto()
    FASTEST = enum.auto()


class OutputLog:
    """The log of one run. `append` and `close` are its writer's."""

    __slots__ = (
        "_discarded",
        "_is_closed",
        "_is_earlier",
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

    def __init__(self, exec_id: str, ledger: Ledger, account: OutputAccount) -> None:
        self.exec_id = exec_id
        self.kept = KeptOutput(exec_id, ledger, account)
        self.is_gone = False
        """Nobody finds the log any more; readers that were close behind its end still get the rest."""
        self._is_earlier = False
        """The run was begun by an earlier daemon, which may have sent clients more than it had written to the files."""
        self.expires_at = 0.0
        self.record_bytes = 0
        """Cost of the record of its run, once the run has ended."""
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
        """The last line of the newest output, at most 200 characters of the line."""
        return self.kept.last_line

    @property
    def is_written(self) -> bool:
        """Whether all output that is kept lies in files."""
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

    def note_earlier(self) -> None:
        """Note that an earlier daemon began the run."""
        self._is_earlier = True

    async def recover(self, parts: Sequence[tuple[Span, RecordPlace]], last_line: str) -> None:
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

    async def catch_up(self, after: int) -> None:
        """Wait until there is the piece numbered `after`, if an earlier daemon may have sent that to a client: PID 1
        sends it again. Without, the client would get pieces twice. Waits `CATCH_UP_S` at most."""
        with trio.move_on_after(CATCH_UP_S):
            while self._is_earlier and self.last_sequence < after and not self._is_closed:
                await self.wait_news()

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
        if self.kept.memory_bytes:
            self._ledger.lingering[self.kept] = None
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
        """Bytes that the reader missed; up to a block too many if it joined at output in files and has read nothing."""
        self._log = log
        self._pieces: Sequence[Output] = ()
        self._index = 0
        self._is_closed = False
        self._until_checkpoint = _PIECES_PER_CHECKPOINT
        block = log.kept.find(after + 1)
        self.offset = log.kept.total(None) if block is None else block.offset
        """The reader's place, in bytes of both streams; its block's as long as the block was not read from files."""
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
