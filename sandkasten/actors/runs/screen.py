"""What the viewers of one terminal see: a bounded scroll-back that each of them follows at its own pace.

A viewer that falls behind what is kept skips ahead and is told by how much. Never holds up a shell that is only
watched; a terminal of its own asks for `room`. No I/O.
"""

from __future__ import annotations

from collections import deque

import trio

from sandkasten.actors.runs.run import Run
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
        self._held: deque[tuple[bytes, bool]] | None = None
        self._held_bytes = 0
        self.is_closed = False

    # Writing ----------------------------------------------------------------------------------------------------

    def show(self, data: bytes, *, on_new_line: bool = False) -> None:
        """Append what the screen gets; while it is held, behind what is still to come before it."""
        if self._held is None:
            self._append(data, on_new_line)
            return
        self._held.append((data, on_new_line))
        self._held_bytes += len(data)
        while self._held_bytes > SCROLLBACK_BYTES and len(self._held) > 1:
            self._held_bytes -= len(self._held.popleft()[0])

    def hold(self) -> None:
        """Let what is shown wait until the past has been put before it and `release` is called."""
        self._held, self._held_bytes = deque(), 0

    def release(self) -> None:
        """Show what waited."""
        held, self._held = self._held or (), None
        for data, on_new_line in held:
            self._append(data, on_new_line)

    def _append(self, data: bytes, on_new_line: bool) -> None:
        if on_new_line and self._last not in (b"", b"\n"):
            data = b"\r\n" + data
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
        self.follow(run)
        if run.size is None:
            self.show(_command_line(run), on_new_line=True)

    def follow(self, run: Run) -> None:
        """Show what a run of a watched shell writes from now on."""
        run.on_output = self._show_text if run.size is None else self._show_raw

    def end(self, run: Run) -> None:
        """Show how a run of a watched shell ended, if it did not end well, and in any case that a prompt is over."""
        run.on_output = None
        if note := _end_note(run):
            self.show(note, on_new_line=True)

    def show_past(self, run: Run, data: bytes, *, is_over: bool) -> None:
        """Show what a run of a watched shell wrote before the screen was there, though the screen is held."""
        if run.size is None:
            self._append(_command_line(run), True)
            data = _lines(data)
        for start in range(0, len(data), PIECE_BYTES):
            self._append(data[start : start + PIECE_BYTES], False)
        if is_over and (note := _end_note(run)):
            self._append(note, True)

    def close(self) -> None:
        """Nothing more will be shown."""
        self.release()
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


def _command_line(run: Run) -> bytes:
    command = "".join(
        char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in run.command
    )
    return _DIM + b"$ " + _lines(command.encode()) + _PLAIN + b"\r\n"


def _end_note(run: Run) -> bytes:
    """Return what is shown of an end; nothing of a good one."""
    if run.size is not None:
        text = "given back"
    elif run.end is not None and run.end.exit_code != 0:
        text = f"{run.end.cause.value}: {run.end.exit_code}"
    else:
        return b""
    return _DIM + f"[{text}]".encode() + _PLAIN + b"\r\n"


def _lines(data: bytes) -> bytes:
    """Return text for a screen in raw mode."""
    return data.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")
