"""The standard streams of one program: three pipes, or one terminal. Owns every descriptor of both sides.

It must not know when the program ends. What it makes belongs to the program's user, who may open it again by its name
below `/proc/self/fd`.

Sources: pipe(7); pts(4); dup(2) (a second descriptor of a terminal's master side can be watched for room on its own).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable

from runner.loop.context import Context
from runner.loop.identity import UserIdentity
from runner.streams import pty
from runner.streams.flow import Inflow, Outflow
from runner.streams.pipes import Leftovers
from runner.wire.protocol import Kind, TerminalSize

_NULL_FD = 0
"""PID 1's own standard input is /dev/null."""

OnOutput = Callable[[Kind, bytes], None]


class Stdio:
    """`child_fds` are what the program gets as 0, 1 and 2, until `close_child_side`."""

    def __init__(
        self,
        context: Context,
        identity: UserIdentity,
        *,
        terminal: TerminalSize | None,
        stdin: bool,
        on_output: OnOutput,
        on_done: Callable[[], None],
        on_room: Callable[[], None],
    ) -> None:
        self._context = context
        self._identity = identity
        self._on_output = on_output
        self._on_done = on_done
        self._on_room = on_room
        self._master_fd = -1
        self._opened: set[int] = set()
        self._outflows: list[Outflow] = []
        self._inflow: Inflow | None = None
        self.child_fds = (_NULL_FD, _NULL_FD, _NULL_FD)
        try:
            if terminal is not None:
                self._open_terminal(terminal)
            else:
                self._open_pipes(stdin)
        except BaseException:
            self.close_child_side()
            self.close(Leftovers(context.loop))
            raise

    def close_child_side(self) -> None:
        """The program holds its ends now, or never will."""
        for fd in self._opened:
            os.close(fd)
        self._opened.clear()

    # Input ---------------------------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        if self._inflow is not None:
            self._inflow.feed(data)

    def end(self) -> None:
        """The input ends here; on a terminal that takes a key, not this."""
        if self._inflow is not None and self._master_fd < 0:
            self._inflow.end()

    def stop_input(self) -> None:
        if self._inflow is not None:
            self._inflow.close()
            self._inflow = None

    @property
    def buffered_bytes(self) -> int:
        return self._inflow.buffered_bytes if self._inflow is not None else 0

    # Output --------------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        for outflow in self._outflows:
            outflow.pause()

    def resume(self) -> None:
        for outflow in self._outflows:
            outflow.resume()

    def finish(self, *, may_read: bool) -> None:
        for outflow in self._outflows:
            outflow.finish(may_read=may_read)

    @property
    def is_done(self) -> bool:
        return all(outflow.is_done for outflow in self._outflows)

    def close(self, leftovers: Leftovers) -> None:
        self.stop_input()
        self._master_fd = -1
        for outflow in self._outflows:
            outflow.close(leftovers)
        self._outflows.clear()

    # Terminal ------------------------------------------------------------------------------------------------------

    @property
    def is_terminal(self) -> bool:
        return self._master_fd >= 0

    def resize(self, size: TerminalSize) -> None:
        pty.set_size(self._master_fd, size)

    def foreground_group(self) -> int | None:
        return pty.foreground_group(self._master_fd) if self.is_terminal else None

    # Opening -------------------------------------------------------------------------------------------------------

    def _open_terminal(self, size: TerminalSize) -> None:
        self._master_fd, path = pty.open_pty(self._context, size, self._identity)
        self._add_outflow(Kind.STDOUT, self._master_fd, is_terminal=True)
        self._add_inflow(fcntl.fcntl(self._master_fd, fcntl.F_DUPFD_CLOEXEC, 3))
        fd = pty.open_terminal(self._context, path, self._identity)
        self._opened.add(fd)
        self.child_fds = (fd, fd, fd)

    def _open_pipes(self, stdin: bool) -> None:
        in_fd = _NULL_FD
        if stdin:
            in_fd, own_fd = self._pipe()
            self._opened.add(in_fd)
            self._add_inflow(own_fd)
        self.child_fds = (in_fd, self._open_output(Kind.STDOUT), self._open_output(Kind.STDERR))

    def _open_output(self, kind: Kind) -> int:
        own_fd, fd = self._pipe()
        self._opened.add(fd)
        self._add_outflow(kind, own_fd, is_terminal=False)
        return fd

    def _pipe(self) -> tuple[int, int]:
        with self._identity:
            return os.pipe2(os.O_CLOEXEC)

    def _add_outflow(self, kind: Kind, fd: int, *, is_terminal: bool) -> None:
        os.set_blocking(fd, False)
        self._outflows.append(
            Outflow(
                self._context.loop,
                fd,
                is_terminal=is_terminal,
                on_chunk=lambda chunk: self._on_output(kind, chunk),
                on_done=self._on_done,
            )
        )

    def _add_inflow(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._inflow = Inflow(self._context.loop, fd, self._on_room)
