"""The pipes a command writes to: made per command, pumped to whoever listens, and drained after its end.

It must not know when a command ends. A pipe of an ended command that a background job still holds is read and thrown
away, so that the job neither blocks nor dies of SIGPIPE, and so that nothing of it reaches a later command.

Sources: fifo(7); pipe(7) (a reader sees end-of-file when no writer is left, `FIONREAD`).

The standard input of one command, when it has one: what the client sends, through a FIFO, then end-of-file.

It must not write before the command has opened its end: until then the kernel would count PID 1 as the only reader
and closing would lose everything.

Sources: fifo(7); pipe(7).

The standard streams of one command as pipes: two for its output, one for its input when it has one.

It must not know when a command ends or who listens. A terminal in their place: `terminal`.

Sources: `runner.shell.command_driver` says which name the shell opens as what.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import termios
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Protocol

from runner.loop.config import MAX_LEFTOVER_PIPES
from runner.loop.loop import READ, WRITE, Loop
from runner.loop.private import open_fifo, remove_private
from runner.wire.protocol import CHUNK_BYTES, Kind, TerminalSize


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


OnOutput = Callable[[Kind, bytes], None]


class Streams(Protocol):
    """What a command's bytes go through, whatever it is."""

    def open(self, *, needs_input_file: bool) -> None:
        """Make what the shell opens; again after `close`, for another shell. May raise OSError.

        `needs_input_file`: it opens `in`, even if the command has no standard input.
        """

    @property
    def is_begun(self) -> bool:
        """Whether the shell has begun the command: it opens the streams before it runs anything."""

    def on_reader(self) -> None:
        """The command holds its standard input now."""

    def feed(self, data: bytes) -> None: ...

    def end(self) -> None: ...

    def pause(self) -> None:
        """Read no output; writers block when there is no room."""

    def resume(self) -> None: ...

    def stop_input(self) -> None:
        """The command has ended: nothing more is its input."""

    def finish(self, *, may_read: bool) -> None:
        """The command has ended: what was written by now is its last output, `on_done` follows after it."""

    def close(self) -> None:
        """Give everything up; what somebody still writes is thrown away."""

    def resize(self, size: TerminalSize) -> bool: ...

    @property
    def is_done(self) -> bool:
        """Whether the last output was read."""

    @property
    def buffered_bytes(self) -> int:
        """Input not yet taken by the command."""


class PipeStreams:
    """FIFOs `out` and `err`, and for `in` a FIFO or /dev/null."""

    def __init__(
        self,
        loop: Loop,
        file: Callable[[str], str],
        leftovers: Leftovers,
        *,
        stdin: StdinPipe | None,
        on_output: OnOutput,
        on_done: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._file = file
        self._leftovers = leftovers
        self._stdin = stdin
        self._has_input_file = False
        self._on_output = on_output
        self._on_done = on_done
        self._pipes: tuple[OutputPipe, ...] = ()

    def open(self, *, needs_input_file: bool) -> None:
        self._has_input_file = needs_input_file
        if self._stdin is not None:
            self._stdin.open(self._file("in"))
        elif needs_input_file:
            os.symlink("/dev/null", self._file("in"))
        self._pipes = (self._pipe("out", Kind.STDOUT), self._pipe("err", Kind.STDERR))

    def _pipe(self, name: str, kind: Kind) -> OutputPipe:
        return OutputPipe(self._loop, self._file(name), lambda chunk: self._on_output(kind, chunk), self._on_done)

    @property
    def is_begun(self) -> bool:
        return any(pipe.was_opened() for pipe in self._pipes)

    def on_reader(self) -> None:
        if self._stdin is not None:
            self._stdin.on_reader()

    def feed(self, data: bytes) -> None:
        if self._stdin is not None:
            self._stdin.feed(data)

    def end(self) -> None:
        if self._stdin is not None:
            self._stdin.end()

    def pause(self) -> None:
        for pipe in self._pipes:
            pipe.pause()

    def resume(self) -> None:
        for pipe in self._pipes:
            pipe.resume()

    def stop_input(self) -> None:
        if self._stdin is not None:
            self._stdin.close()
        if self._has_input_file:
            remove_private(self._file("in"))

    def finish(self, *, may_read: bool) -> None:
        for pipe in self._pipes:
            pipe.finish(may_read=may_read)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close(self._leftovers)
        self._pipes = ()

    def resize(self, size: TerminalSize) -> bool:
        return False

    @property
    def is_done(self) -> bool:
        return all(pipe.is_done for pipe in self._pipes)

    @property
    def buffered_bytes(self) -> int:
        return self._stdin.buffered_bytes if self._stdin is not None else 0


class NoStreams:
    """What a command has whose reply is out: nothing, so that nothing refers back to it."""

    is_begun = True
    is_done = True
    buffered_bytes = 0

    def open(self, *, needs_input_file: bool) -> None: ...

    def on_reader(self) -> None: ...

    def feed(self, data: bytes) -> None: ...

    def end(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def stop_input(self) -> None: ...

    def finish(self, *, may_read: bool) -> None: ...

    def close(self) -> None: ...

    def resize(self, size: TerminalSize) -> bool:
        return False


NO_STREAMS = NoStreams()
