"""What the viewers of one terminal see: a bounded scroll-back that each of them follows at its own pace.

A viewer that falls behind what is kept skips ahead and is told by how much. Never holds up a shell that is only
watched; a terminal of its own asks for `room`. No I/O.
"""

from __future__ import annotations

from collections import deque

import trio

from sandkasten.actors.run import Run
from sandkasten.model import Output

SCROLLBACK_BYTES = 256 * 1024
WINDOW_BYTES = 128 * 1024
"""How far the fastest viewer may lag before the terminal's program waits."""

PIECE_BYTES = 64 * 1024
_MERGE_BYTES = 4096
_DIM, _PLAIN = b"\x1b[2m", b"\x1b[0m"


class Screen:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self._first = 0
        self._end = 0
        self._viewers: set[ScreenReader] = set()
        self._changed = trio.Event()
        self._last = b""
        self.is_closed = False

    # Writing ----------------------------------------------------------------------------------------------------

    def show(self, data: bytes) -> None:
        """Append what the screen gets."""
        if not data:
            return
        if self._chunks and len(self._chunks[-1]) + len(data) <= _MERGE_BYTES:
            self._chunks[-1] += data
        else:
            self._chunks.append(data)
        self._end += len(data)
        while self._end - self._first > SCROLLBACK_BYTES and len(self._chunks) > 1:
            self._first += len(self._chunks.popleft())
        self._last = data[-1:]
        self._wake()

    def begin(self, run: Run) -> None:
        """Show a run of a watched shell from now on: its command, unless somebody types it, then what it writes."""
        if run.size is not None:
            run.on_output = self._show_raw
            return
        run.on_output = self._show_text
        command = "".join(
            char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in run.command
        )
        self.show(self._new_line() + _DIM + b"$ " + _lines(command.encode()) + _PLAIN + b"\r\n")

    def end(self, run: Run) -> None:
        """Show how a run of a watched shell ended, if it did not end well, and in any case that a prompt is over."""
        run.on_output = None
        if run.size is not None:
            self._note("given back")
        elif run.end is not None and run.end.exit_code != 0:
            self._note(f"{run.end.cause.value}: {run.end.exit_code}")

    def close(self) -> None:
        """Nothing more will be shown."""
        self.is_closed = True
        self._wake()

    async def room(self) -> None:
        """Wait while there are viewers and every one of them lags."""
        while self._viewers and not self.is_closed and all(each.lag_bytes > WINDOW_BYTES for each in self._viewers):
            await self._changed.wait()

    def _show_raw(self, piece: Output) -> None:
        self.show(piece.data)

    def _show_text(self, piece: Output) -> None:
        self.show(_lines(piece.data))

    def _note(self, text: str) -> None:
        self.show(self._new_line() + _DIM + f"[{text}]".encode() + _PLAIN + b"\r\n")

    def _new_line(self) -> bytes:
        return b"" if self._last in (b"", b"\n") else b"\r\n"

    # Reading ----------------------------------------------------------------------------------------------------

    def reader(self) -> ScreenReader:
        """Return a new viewer's place, at the beginning of what is kept."""
        viewer = ScreenReader(self)
        self._viewers.add(viewer)
        return viewer

    @property
    def end_offset(self) -> int:
        return self._end

    @property
    def first_offset(self) -> int:
        return self._first

    def piece_at(self, offset: int) -> bytes:
        """Return what is kept from `offset` on, at most `PIECE_BYTES`."""
        position, parts, size = self._first, [], 0
        for chunk in self._chunks:
            if position + len(chunk) > offset:
                part = chunk[max(0, offset - position) :]
                parts.append(part)
                size += len(part)
                if size >= PIECE_BYTES:
                    break
            position += len(chunk)
        return b"".join(parts)[:PIECE_BYTES]

    def leave(self, viewer: ScreenReader) -> None:
        self._viewers.discard(viewer)
        self._wake()

    async def wait_change(self) -> None:
        await self._changed.wait()

    def moved(self) -> None:
        """A viewer has read: whoever waits for room looks again."""
        self._wake()

    def _wake(self) -> None:
        if self._changed.statistics().tasks_waiting:
            self._changed.set()
            self._changed = trio.Event()


class ScreenReader:
    """One viewer's place; an async iterator of pieces that ends when the screen is closed and all was read."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._offset = screen.first_offset
        self.skipped_bytes = 0

    @property
    def lag_bytes(self) -> int:
        return self._screen.end_offset - self._offset

    def __aiter__(self) -> ScreenReader:
        return self

    async def __anext__(self) -> bytes:
        while self._offset == self._screen.end_offset:
            if self._screen.is_closed:
                raise StopAsyncIteration
            await self._screen.wait_change()
        await trio.lowlevel.checkpoint()
        missed = max(0, self._screen.first_offset - self._offset)
        self.skipped_bytes += missed
        self._offset += missed
        piece = self._screen.piece_at(self._offset)
        self._offset += len(piece)
        self._screen.moved()
        return piece

    def close(self) -> None:
        self._screen.leave(self)


def _lines(data: bytes) -> bytes:
    """Return text for a screen in raw mode."""
    return data.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")
