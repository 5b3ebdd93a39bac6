"""The streams of one run together, and the client's side of a request that has streams.

A run's streams are FIFOs or a terminal that a shell opens (`runner.shell.command_streams`), or the pipes or terminal
that a program is born with (`ProgramStreams`). When the run is answered, `NO_STREAMS` takes their place: flows refer to
the run and the run to them, and PID 1 collects no cycles.

Sources: pipe(7); pts(4); dup(2) (a second descriptor of a terminal's master side can be watched for room by itself).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable

from runner.loop.config import STDIN_BUFFER_BYTES
from runner.loop.context import Context, Sink
from runner.loop.identity import UserIdentity
from runner.loop.loop import OnError
from runner.streams import pty
from runner.streams.flow import AbandonedPipes, FlowOwner, Inflow, Outflow
from runner.wire.protocol import CHUNK_BYTES, Kind, TerminalSize

_NULL_FD = 0
"""PID 1's own standard input is /dev/null."""


class Streams:
    """Outflows and at most one inflow. This class has none; the classes below it open them."""

    def __init__(self) -> None:
        self._outflows: list[Outflow] = []
        self._inflow: Inflow | None = None
        self._terminal_fd = -1
        """Master side of the terminal, if the streams are one; an outflow owns it."""

    # Opening: streams of a command only -----------------------------------------------------------------------------

    def open(self, order: str, *, needs_input_file: bool) -> None:
        """Make the files that the shell opens, named after its order; again after `close`, for another shell.
        `needs_input_file`: the shell opens that of the input, even if the command has no standard input.

        Raises:
            OSError
        """

    def on_reader(self) -> None:
        """Let the input flow. To be called once, when the command holds its standard input and output."""

    @property
    def must_hear_begin(self) -> bool:
        """Whether `on_reader` has to come before the streams can tell the end."""
        return False

    def await_end(self, on_end: Callable[[], None], on_error: OnError) -> bool:
        """Call `on_end` once, when nobody has the output open any more, unless it is read before; return whether the
        streams can tell."""
        return False

    # Input ----------------------------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        if self._inflow is not None:
            self._inflow.feed(data)

    def end(self) -> None:
        """End the input. Does nothing on a terminal, where a key ends the input."""
        if self._inflow is not None and self._terminal_fd < 0:
            self._inflow.end()

    @property
    def buffered_bytes(self) -> int:
        """Bytes of input that the run has not taken yet."""
        return self._inflow.buffered_bytes if self._inflow is not None else 0

    # Output ---------------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Read no output; the run blocks when there is no room."""
        for outflow in self._outflows:
            outflow.pause()

    def resume(self) -> None:
        for outflow in self._outflows:
            outflow.resume()

    @property
    def is_done(self) -> bool:
        """Whether the last output was read."""
        return all(outflow.is_done for outflow in self._outflows)

    # The end --------------------------------------------------------------------------------------------------------

    def finish(self, *, may_read: bool) -> None:
        """Take no more input, and read the last output: at once if `may_read`, else after `resume`. To be called when
        the run has ended."""
        if self._inflow is not None:
            self._inflow.close()
        for outflow in self._outflows:
            outflow.finish(may_read=may_read)

    def close(self, leftovers: AbandonedPipes | None) -> None:
        """Close every descriptor, or give it to `leftovers`. Output that comes later is thrown away."""
        if self._inflow is not None:
            self._inflow.close()
        for outflow in self._outflows:
            outflow.close(leftovers)
        self._outflows.clear()
        self._terminal_fd = -1

    # Terminal -------------------------------------------------------------------------------------------------------

    @property
    def is_terminal(self) -> bool:
        return self._terminal_fd >= 0

    def resize(self, size: TerminalSize) -> bool:
        """Change the size of the terminal; return whether there is one."""
        if self._terminal_fd >= 0:
            pty.set_size(self._terminal_fd, size)
        return self._terminal_fd >= 0

    def foreground_group(self) -> int | None:
        return pty.foreground_group(self._terminal_fd) if self._terminal_fd >= 0 else None

    def _open_terminal(self, context: Context, identity: UserIdentity, size: TerminalSize, owner: FlowOwner) -> str:
        """Make a terminal whose screen is the output; return the path of its other side."""
        self._terminal_fd, path = pty.open_pty(context, size, identity)
        self._outflows.append(Outflow(context.loop, self._terminal_fd, Kind.STDOUT, owner, is_terminal=True))
        return path

    def _connect_keyboard(self, context: Context, owner: FlowOwner) -> Inflow:
        """Have the input typed at the terminal. A descriptor of its own: one is watched for input and room apart."""
        fd = fcntl.fcntl(self._terminal_fd, fcntl.F_DUPFD_CLOEXEC, 3)
        self._inflow = Inflow(context.loop, owner, fd)
        return self._inflow


NO_STREAMS = Streams()


class ProgramStreams(Streams):
    """The streams of one program: three pipes, or one terminal. `child_fds` are what the program gets as 0, 1 and 2,
    open until `close_child_side`.

    Pipes and terminal belong to the program's user, who may open them again by their names below `/proc/self/fd`.
    """

    def __init__(
        self,
        context: Context,
        identity: UserIdentity,
        owner: FlowOwner,
        *,
        terminal: TerminalSize | None,
        stdin: bool,
        merged: bool = False,
    ) -> None:
        """Open both sides. `merged`: one pipe is standard output and standard error.

        Raises:
            OSError: nothing is open.
        """
        super().__init__()
        self._context = context
        self._identity = identity
        self._owner = owner
        self._child_side: set[int] = set()
        self.child_fds = (_NULL_FD, _NULL_FD, _NULL_FD)
        try:
            if terminal is not None:
                path = self._open_terminal(context, identity, terminal, owner)
                self._connect_keyboard(context, owner)
                fd = pty.open_terminal(context, path, identity)
                self._child_side.add(fd)
                self.child_fds = (fd, fd, fd)
            else:
                in_fd = self._open_input() if stdin else _NULL_FD
                out_fd = self._open_output(Kind.STDOUT)
                self.child_fds = (in_fd, out_fd, out_fd if merged else self._open_output(Kind.STDERR))
        except BaseException:
            self.close_child_side()
            self.close(None)
            raise

    def close_child_side(self) -> None:
        """Close the program's ends. To be called once the program holds them, or never will."""
        for fd in self._child_side:
            os.close(fd)
        self._child_side.clear()

    def _open_input(self) -> int:
        read_fd, write_fd = self._pipe(1)
        self._inflow = Inflow(self._context.loop, self._owner, write_fd)
        return read_fd

    def _open_output(self, kind: Kind) -> int:
        read_fd, write_fd = self._pipe(0)
        self._outflows.append(Outflow(self._context.loop, read_fd, kind, self._owner))
        return write_fd

    def _pipe(self, own_end: int) -> tuple[int, int]:
        """Make a pipe with one end of PID 1's own, non-blocking, and one of the program's."""
        with self._identity:
            ends = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(ends[own_end], False)
        self._child_side.add(ends[1 - own_end])
        return ends


class ClientSide:
    """The client's side of a request with streams: DATA and END frames to its input, its output to the sink, and a
    pause while either is full. Implements `FlowOwner`, and most of `Job`."""

    def __init__(self, sink: Sink) -> None:
        self._sink: Sink | None = sink
        """None once the answer is out or the client is gone; output is dropped then."""
        self._streams: Streams = NO_STREAMS

    def on_data(self, data: bytes) -> None:
        self._streams.feed(data)

    def on_end(self) -> None:
        self._streams.end()

    def on_drained(self) -> None:
        """Read output again. To be called when the client has taken enough of what was sent."""
        self._streams.resume()

    @property
    def wants_input(self) -> bool:
        return self._streams.buffered_bytes < STDIN_BUFFER_BYTES

    @property
    def piece_bytes(self) -> int:
        return CHUNK_BYTES if self._sink is None else self._sink.piece_bytes

    def on_output(self, kind: Kind, chunk: bytes) -> None:
        if self._sink is None:
            return
        self._sink.send(kind, chunk)
        if self._sink is not None and self._sink.is_full:  # sending may have told that the client is gone
            self._streams.pause()

    def on_room(self) -> None:
        if self._sink is not None:
            self._sink.refresh_input()

    @property
    def _may_read(self) -> bool:
        """Whether output can be sent at once. Without a client it is read and dropped."""
        return self._sink is None or not self._sink.is_full
