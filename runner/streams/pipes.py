"""The pipes a command writes to: made per command, pumped to whoever listens, and drained after its end.

It must not know when a command ends. A pipe of an ended command that a background job still holds is read and thrown
away, so that the job neither blocks nor dies of SIGPIPE, and so that nothing of it reaches a later command.

Sources: fifo(7); pipe(7) (a reader sees end-of-file when no writer is left, `FIONREAD`).
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import termios
from collections import OrderedDict
from collections.abc import Callable

from runner.loop.config import MAX_LEFTOVER_PIPES
from runner.loop.loop import READ, Loop
from runner.loop.private import open_fifo, remove_private
from runner.wire.protocol import CHUNK_BYTES


class OutputPipe:
    """The reading end of one stream of one command. Nothing is read before the first `resume` or `finish`."""

    def __init__(self, loop: Loop, path: str, on_chunk: Callable[[bytes], None], on_done: Callable[[], None]) -> None:
        self._loop = loop
        self._on_chunk = on_chunk
        self._on_done = on_done
        self._remaining: int | None = None
        self._is_watched = False
        self._is_clean = False
        self.is_done = False
        self._path = path
        self._fd = _open_fifo(path)

    def was_opened(self) -> bool:
        """Return whether anybody ever opened the writing end, so whether the command was begun.

        Without one, poll(2) reports no hang-up and read(2) end-of-file; afterwards it is one or the other.
        """
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        if self.is_done or poll.poll(0):
            return True
        try:
            chunk = os.read(self._fd, CHUNK_BYTES)
        except BlockingIOError:
            return True
        if chunk:
            self._on_chunk(chunk)
        return bool(chunk)

    def pause(self) -> None:
        """Stop reading; writers block when the pipe is full."""
        if self._is_watched:
            self._loop.unwatch(self._fd)
            self._is_watched = False

    def resume(self) -> None:
        if not self._is_watched and not self.is_done:
            self._loop.watch(self._fd, READ, self._on_readable, self._on_error)
            self._is_watched = True

    def finish(self, *, may_read: bool) -> None:
        """The command has ended: what the pipe holds now is its last output, `on_done` follows after it.

        A FIFO that is empty and has no writer is left in place for the next command; any other loses its name here.
        """
        if may_read and not self.is_done:
            self._remaining = pending_bytes(self._fd)
            if self._remaining:
                self._on_readable(0)
        self._remaining = pending_bytes(self._fd)
        self._is_clean = self._remaining == 0 and not self._has_writer()
        if not self._is_clean:
            remove_private(self._path)
        self._check_done()
        if may_read:
            self.resume()

    def close(self, leftovers: Leftovers) -> None:
        """Give the descriptor up: to `leftovers` if somebody still writes."""
        self.pause()
        self.is_done = True
        if self._is_clean:
            os.close(self._fd)
            return
        if self._remaining is None:  # never finished: the command gets other pipes
            remove_private(self._path)
        leftovers.adopt(self._fd)

    def _on_readable(self, _events: int) -> None:
        want = CHUNK_BYTES if self._remaining is None else min(CHUNK_BYTES, self._remaining)
        try:
            chunk = os.read(self._fd, want)
        except BlockingIOError:
            return
        if not chunk:  # no writer is left
            self._remaining = 0
        elif self._remaining is not None:
            self._remaining -= len(chunk)
        if chunk:
            self._on_chunk(chunk)
        self._check_done()

    def _check_done(self) -> None:
        if self._remaining == 0 and not self.is_done:
            self.pause()
            self.is_done = True
            self._on_done()

    def _has_writer(self) -> bool:
        """Return whether somebody holds the empty pipe open for writing; what is written at this instant is lost."""
        try:
            return bool(os.read(self._fd, CHUNK_BYTES))
        except BlockingIOError:
            return True

    def _on_error(self, _error: Exception) -> None:
        self._remaining = 0
        self._check_done()


def _open_fifo(path: str) -> int:
    try:
        return open_fifo(path, os.O_RDONLY)
    except FileNotFoundError:
        os.mkfifo(path, 0o622)
        return open_fifo(path, os.O_RDONLY)


class Leftovers:
    """Pipes of ended commands that still have writers; a bounded number, the oldest goes first."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._fds: OrderedDict[int, None] = OrderedDict()

    def adopt(self, fd: int) -> None:
        """Own `fd`: discard what comes until its last writer is gone."""
        try:
            if not os.read(fd, CHUNK_BYTES):
                os.close(fd)
                return
        except BlockingIOError:
            pass
        self._fds[fd] = None
        self._loop.watch(fd, READ, lambda _events: self._discard(fd), lambda _error: self._close(fd))
        if len(self._fds) > MAX_LEFTOVER_PIPES:
            self._close(next(iter(self._fds)))

    def _discard(self, fd: int) -> None:
        try:
            if not os.read(fd, CHUNK_BYTES):
                self._close(fd)
        except BlockingIOError:
            pass

    def _close(self, fd: int) -> None:
        if fd in self._fds:
            del self._fds[fd]
            self._loop.unwatch(fd)
            os.close(fd)


def pending_bytes(fd: int) -> int:
    """Return how many bytes a pipe holds now."""
    return int(struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))[0])
