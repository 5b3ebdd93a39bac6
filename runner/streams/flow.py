"""Bytes to and from one program through descriptors PID 1 made: a pipe, or the master side of a terminal.

It must not know when the program ends or who listens. What it cannot write it keeps, bounded by whoever feeds it
(`buffered_bytes`); what nobody wants yet it does not read, so that the program waits.

Sources: pipe(7), `FIONREAD`; pts(4) (EIO: nobody has the terminal side open); drivers/tty/n_tty.c (a non-blocking read
of a terminal looks for what is still on its way before it says EAGAIN).
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable

from runner.loop.loop import READ, WRITE, Loop
from runner.streams.pipes import Leftovers, pending_bytes
from runner.wire.protocol import CHUNK_BYTES

_LAST_TERMINAL_BYTES = 128 * 1024
"""More than a terminal holds: what is read after the program's end, while something else writes on."""


class Outflow:
    """What a program writes. Owns the descriptor, non-blocking. Nothing is read before the first `resume`.

    It is over when nobody has the other end open: a terminal, too, though a program that closed it could open
    `/dev/tty` once more.
    """

    def __init__(
        self,
        loop: Loop,
        fd: int,
        *,
        is_terminal: bool,
        on_chunk: Callable[[bytes], None],
        on_done: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._fd = fd
        self._is_terminal = is_terminal
        self._on_chunk = on_chunk
        self._on_done = on_done
        self._is_watched = False
        self._remaining: int | None = None
        self._is_at_end = False
        self.is_done = False

    def resume(self) -> None:
        """Read as it comes, until `pause`."""
        if not self._is_watched and not self._is_at_end and not self.is_done:
            self._is_watched = True
            self._loop.watch(self._fd, READ, self._on_readable, self._on_error)
        if self._remaining is not None:
            self._on_readable(0)

    def pause(self) -> None:
        if self._is_watched:
            self._is_watched = False
            self._loop.unwatch(self._fd)

    def finish(self, *, may_read: bool) -> None:
        """The program has ended: what the descriptor holds now is its last output, `on_done` follows after it."""
        self._remaining = _LAST_TERMINAL_BYTES if self._is_terminal else pending_bytes(self._fd)
        if self._is_at_end or self._remaining == 0:
            self._done()
        elif may_read:
            self.resume()

    def close(self, leftovers: Leftovers) -> None:
        """Give the descriptor up: a pipe that somebody still writes to goes to `leftovers`, a terminal hangs up."""
        self.pause()
        self.is_done = True
        if self._is_terminal:
            os.close(self._fd)
        else:
            leftovers.adopt(self._fd)

    def _on_readable(self, _events: int) -> None:
        if self.is_done:
            return
        want = CHUNK_BYTES if self._remaining is None else min(CHUNK_BYTES, self._remaining)
        chunk, may_come_more = self._read(want)
        if self._remaining is not None:
            self._remaining -= len(chunk)
        if chunk:
            self._on_chunk(chunk)
        if not may_come_more:
            self.pause()
            self._is_at_end = True
        if self._remaining is not None and (self._remaining == 0 or len(chunk) < want):  # all there was is read
            self._done()

    def _read(self, want: int) -> tuple[bytes, bool]:
        """Return what is there, up to `want` bytes, and whether more can come. A terminal gives it in small pieces."""
        chunks: list[bytes] = []
        while want:
            try:
                chunk = os.read(self._fd, want)
            except BlockingIOError:
                return b"".join(chunks), True
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                chunk = b""
            if not chunk:
                return b"".join(chunks), False
            chunks.append(chunk)
            want -= len(chunk)
            if not self._is_terminal:
                break
        return b"".join(chunks), True

    def _done(self) -> None:
        if not self.is_done:
            self.pause()
            self.is_done = True
            self._on_done()

    def _on_error(self, _error: Exception) -> None:
        self.pause()
        self._is_at_end = True
        if self._remaining is not None:
            self._done()


class Inflow:
    """What a program reads. Owns the descriptor, non-blocking. When nobody reads any more, what comes is dropped."""

    def __init__(self, loop: Loop, fd: int, on_room: Callable[[], None]) -> None:
        self._loop = loop
        self._fd = fd
        self._on_room = on_room
        self._chunks: deque[bytes] = deque()
        self._has_ended = False
        self._interest = 0
        self.buffered_bytes = 0
        loop.watch(fd, 0, self._on_event, lambda _error: self.close())

    def feed(self, data: bytes) -> None:
        if self._fd >= 0 and not self._has_ended and data:
            self._chunks.append(data)
            self.buffered_bytes += len(data)
            self._flush()

    def end(self) -> None:
        """Close the descriptor once everything was taken."""
        self._has_ended = True
        self._flush()

    def close(self) -> None:
        """Drop what was not taken."""
        if self._fd >= 0:
            self._loop.unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1
        self._chunks.clear()
        self.buffered_bytes = 0

    def _on_event(self, events: int) -> None:
        if events & ~WRITE:  # the last reader is gone
            self.close()
            self._on_room()
        else:
            self._flush()

    def _flush(self) -> None:
        if self._fd < 0:
            return
        try:
            while self._chunks:
                self._drop(os.write(self._fd, self._chunks[0]))
        except BlockingIOError:
            self._want(WRITE)
        except OSError:  # EPIPE, EIO: nobody reads any more
            self.close()
        else:
            self._want(0)
            if self._has_ended:
                self.close()
        self._on_room()

    def _drop(self, count: int) -> None:
        self.buffered_bytes -= count
        rest = self._chunks.popleft()[count:]
        if rest:
            self._chunks.appendleft(rest)

    def _want(self, interest: int) -> None:
        if interest != self._interest:
            self._interest = interest
            self._loop.change(self._fd, interest)
