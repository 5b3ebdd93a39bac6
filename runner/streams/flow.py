"""One stream of a run: a descriptor of PID 1's that is read (`Outflow`) or written (`Inflow`) without blocking.

The descriptor is a pipe, a FIFO of the private directory, or the master side of a terminal. A flow does not know when
its run ends; its owner says so (`finish`). Output that nobody takes is not read, so that the run waits. Input that the
run does not take is buffered; the owner bounds it by `buffered_bytes`.

Sources: pipe(7), fifo(7), epoll(7); FIONREAD in ioctl_tty(2); pts(4) (EIO: nobody has the terminal side open);
drivers/tty/n_tty.c (a non-blocking read of a terminal looks for bytes on their way before it returns EAGAIN).
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import struct
import termios
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Protocol

from runner.loop.config import MAX_LEFTOVER_PIPES
from runner.loop.loop import READ, WRITE, EventLoop, OnError
from runner.wire.protocol import CHUNK_BYTES, MAX_FRAME_BYTES, Kind

_LAST_TERMINAL_BYTES = 128 * 1024
"""More than a terminal holds. Bounds the read after the end of a run whose terminal a background job still fills."""


class FlowOwner(Protocol):
    """The run that flows of input and output belong to."""

    @property
    def piece_bytes(self) -> int:
        """Largest piece of output to read at once from a pipe that runs full."""

    def on_output(self, kind: Kind, chunk: bytes) -> None:
        """Take output of the run."""

    def on_output_done(self) -> None:
        """Look whether the run is over. Called after a flow has given its last output."""

    def on_room(self) -> None:
        """Accept input again. Called when the run has taken input, or never will take any."""


class Outflow:
    """Output of a run. Owns the descriptor, non-blocking. Nothing is read before the first `resume` or `finish`."""

    def __init__(self, loop: EventLoop, fd: int, kind: Kind, owner: FlowOwner, *, is_terminal: bool = False) -> None:
        self._loop = loop
        self._fd = fd
        self._kind = kind
        self._owner = owner
        self._is_terminal = is_terminal
        self._is_watched = self._awaits_writers = False
        self._is_at_end = False
        self._remaining: int | None = None
        self._is_enlarged = is_terminal
        """Whether the pipe was made larger, or can't be."""
        self.is_done = False
        """Whether the last output was read, or is not wanted."""

    def fileno(self) -> int:
        return self._fd

    def resume(self) -> None:
        """Read output as it comes, until `pause`."""
        if self._awaits_writers:
            self._awaits_writers = False
            self.pause()
        if not (self._is_watched or self._is_at_end or self.is_done):
            self._is_watched = True
            self._loop.watch(self._fd, READ, self._on_readable, self._on_error)
        if self._remaining is not None:
            self._on_readable(0)  # a terminal with nothing in it reports no event, and would never be done

    def await_writers(self, on_gone: Callable[[], None], on_error: OnError) -> None:
        """Call `on_gone` once, when the last writer of a FIFO is gone, unless `resume` or `pause` comes first."""
        self._is_watched = self._awaits_writers = True
        self._loop.watch(self._fd, 0, lambda _events: self._on_gone(on_gone), on_error)  # a hang-up is always reported

    def _on_gone(self, on_gone: Callable[[], None]) -> None:
        self.pause()
        on_gone()

    def pause(self) -> None:
        """Stop reading; the run blocks when the pipe or terminal is full."""
        if self._is_watched:
            self._is_watched = False
            self._loop.unwatch(self._fd)

    def finish(self, *, may_read: bool) -> None:
        """The run has ended: the bytes that are there now are its last output, and `on_output_done` follows them."""
        if not self._is_at_end:
            self._remaining = _LAST_TERMINAL_BYTES if self._is_terminal else pending_bytes(self._fd)
        if not self._remaining:
            self._done()
        elif may_read:
            self._on_readable(0)
            if not self.is_done:
                self.resume()

    def close(self, leftovers: AbandonedPipes | None) -> None:
        """Give the descriptor up. A pipe goes to `leftovers`, for a background job may hold it; a terminal hangs up."""
        self.pause()
        self.is_done = True
        if self._is_terminal or leftovers is None:
            os.close(self._fd)
        else:
            leftovers.adopt(self._fd)

    def _on_readable(self, _events: int) -> None:
        if self.is_done:
            return
        most = self._owner.piece_bytes if self._is_enlarged and not self._is_terminal else CHUNK_BYTES
        want = most if self._remaining is None else min(most, self._remaining)
        chunk, may_come_more = self._read(want)
        if self._remaining is not None:
            self._remaining -= len(chunk)
        if len(chunk) == CHUNK_BYTES and not self._is_enlarged:
            self._enlarge()
        if chunk:
            self._owner.on_output(self._kind, chunk)
        if not may_come_more:
            self.pause()
            self._is_at_end = True
        # A pipe may give less than is there (in packets, O_DIRECT), but never nothing; `_read` has emptied a terminal.
        is_empty = len(chunk) < want if self._is_terminal else not chunk
        if self._remaining is not None and (self._remaining == 0 or is_empty):
            self._done()

    def _enlarge(self) -> None:
        """Make room for larger pieces: the pipe was full."""
        self._is_enlarged = True
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, MAX_FRAME_BYTES)
        except OSError:
            pass  # EPERM: the user's pipes take all that they may (pipe-user-pages-soft); reads are as large as before

    def _read(self, want: int) -> tuple[bytes, bool]:
        """Return up to `want` bytes, and whether more can come. A terminal gives them in small pieces."""
        chunks: list[bytes] = []
        while want:
            try:
                chunk = os.read(self._fd, want)
            except BlockingIOError:
                return b"".join(chunks), True
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                chunk = b""  # the terminal side is closed; one that opens /dev/tty once more is not waited for
            if not chunk:
                return b"".join(chunks), False
            if not self._is_terminal:
                return chunk, True
            chunks.append(chunk)
            want -= len(chunk)
        return b"".join(chunks), True

    def _done(self) -> None:
        if not self.is_done:
            self.pause()
            self.is_done = True
            self._owner.on_output_done()

    def _on_error(self, _error: Exception) -> None:
        self.pause()
        self._is_at_end = True
        if self._remaining is not None:
            self._done()


class Arrivals:
    """Order in which outflows that were empty got their first bytes. Owns an epoll instance: the kernel puts a
    descriptor at the end of the list of ready ones when it is written to (`ep_poll_callback` in fs/eventpoll.c)."""

    def __init__(self, outflows: Sequence[Outflow]) -> None:
        """Look at the outflows from now on. Raises: OSError."""
        self._outflows = {outflow.fileno(): outflow for outflow in outflows}
        self._epoll = select.epoll()
        for fd in self._outflows:
            self._epoll.register(fd, READ)

    def fileno(self) -> int:
        """Return the instance's descriptor: readable once an outflow is."""
        return self._epoll.fileno()

    def take(self) -> list[Outflow]:
        """Return all outflows, those that got bytes first, and close the instance."""
        with self._epoll:
            ready = [self._outflows.pop(fd) for fd, _events in self._epoll.poll(0)]
        return [*ready, *self._outflows.values()]


class Inflow:
    """Input of a run. Owns the descriptor, non-blocking. Buffers all until there is one (`connect`), and afterwards the
    bytes that the run does not take yet. When nobody reads any more, input is dropped, as if the run had ignored
    SIGPIPE for the client."""

    def __init__(self, loop: EventLoop, owner: FlowOwner, fd: int = -1) -> None:
        self._loop = loop
        self._owner = owner
        self._fd = -1
        self._chunks: deque[bytes] = deque()
        self._has_ended = False
        self._interest = 0
        self.buffered_bytes = 0
        if fd >= 0:
            self.connect(fd)

    def connect(self, fd: int) -> None:
        """Begin to write to `fd`: the run holds the other end."""
        self._fd = fd
        self._loop.watch(fd, 0, self._on_event, lambda _error: self.close())
        if self._chunks or self._has_ended:
            self._flush()

    def feed(self, data: bytes) -> None:
        if data and not self._has_ended:
            self._chunks.append(data)
            self.buffered_bytes += len(data)
            self._flush()

    def end(self) -> None:
        """Close the descriptor once everything was taken."""
        self._has_ended = True
        self._flush()

    def close(self) -> None:
        """Close the descriptor and drop all that was not taken. Before there is a descriptor this does nothing."""
        if self._fd >= 0:
            self._loop.unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1
            self._has_ended = True
            self._chunks.clear()
            self.buffered_bytes = 0

    def _on_event(self, events: int) -> None:
        if events & ~WRITE:  # the last reader is gone
            self.close()
            self._owner.on_room()
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
            if self._has_ended:
                self.close()
            else:
                self._want(0)
        self._owner.on_room()

    def _drop(self, count: int) -> None:
        self.buffered_bytes -= count
        rest = self._chunks.popleft()[count:]
        if rest:
            self._chunks.appendleft(rest)

    def _want(self, interest: int) -> None:
        if interest != self._interest:
            self._interest = interest
            self._loop.change(self._fd, interest)


class AbandonedPipes:
    """Pipes of ended runs that still have writers, background jobs, say: read and thrown away, so that the writers
    neither block nor die of SIGPIPE. A bounded number; the oldest is closed first."""

    def __init__(self, loop: EventLoop) -> None:
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
