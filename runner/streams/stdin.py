"""The standard input of one command, when it has one: what the client sends, through a FIFO, then end-of-file.

It must not write before the command has opened its end: until then the kernel would count PID 1 as the only reader
and closing would lose everything.

Sources: fifo(7); pipe(7).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable

from runner.loop.loop import WRITE, Loop
from runner.loop.private import open_fifo


class StdinPipe:
    """Buffers until the command reads; a command that stops reading makes the rest vanish, like SIGPIPE ignored."""

    def __init__(self, loop: Loop, on_room: Callable[[], None]) -> None:
        self._loop = loop
        self._on_room = on_room
        self._chunks: deque[bytes] = deque()
        self._has_ended = False
        self._has_reader = False
        self._keeper_fd = -1
        self._fd = -1
        self.buffered_bytes = 0

    def open(self, path: str) -> None:
        """Make the FIFO and hold it open, so that the command's own open does not wait."""
        os.mkfifo(path, 0o644)
        self._keeper_fd = open_fifo(path, os.O_RDWR)
        self._fd = open_fifo(path, os.O_WRONLY)

    def feed(self, data: bytes) -> None:
        if not self._has_ended and data:
            self._chunks.append(data)
            self.buffered_bytes += len(data)
            self._flush()

    def end(self) -> None:
        self._has_ended = True
        self._flush()

    def on_reader(self) -> None:
        """The command holds its end now."""
        if not self._has_reader and self._fd >= 0:
            self._has_reader = True
            os.close(self._keeper_fd)
            self._keeper_fd = -1
            self._loop.watch(self._fd, WRITE, lambda _events: self._flush(), lambda _error: self.close())
            self._flush()

    def close(self) -> None:
        """Drop what was not read. May be opened again for another shell if nothing was written yet."""
        if self._has_reader:
            self._loop.unwatch(self._fd)
            self._chunks.clear()
            self.buffered_bytes = 0
        for fd in (self._keeper_fd, self._fd):
            if fd >= 0:
                os.close(fd)
        self._keeper_fd = self._fd = -1

    def _flush(self) -> None:
        if not self._has_reader or self._fd < 0:
            return
        try:
            while self._chunks:
                written = os.write(self._fd, self._chunks[0])
                self.buffered_bytes -= written
                rest = self._chunks[0][written:]
                if rest:
                    self._chunks[0] = rest
                else:
                    self._chunks.popleft()
        except BlockingIOError:
            self._loop.change(self._fd, WRITE)
            self._on_room()
            return
        except BrokenPipeError:
            self.close()
            self._has_ended = True
            self._on_room()
            return
        if self._has_ended:
            self.close()
        else:
            self._loop.change(self._fd, 0)
        self._on_room()
