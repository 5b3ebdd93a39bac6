"""The standard streams of one command of a shell: FIFOs, or a terminal that is the shell's controlling one meanwhile.

The shell opens either by the names `out`, `err` and `in` in its directory (`runner.shell.command_driver`), so its
driver needs no other way for a terminal. When the command has ended, the terminal is hung up before the shell's next
command: a background job that is still running loses it.

Sources: fifo(7), pipe(7); pts(4), termios(3) (VINTR, VQUIT, VSUSP, ISIG), tty_ioctl(4) "Controlling terminal";
symlink(7).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import termios
from collections.abc import Callable
from typing import Any, Protocol

from runner.loop.context import Context
from runner.loop.identity import UserIdentity
from runner.loop.loop import EventLoop
from runner.shell.files import open_fifo, open_private, remove_private
from runner.streams import pty
from runner.streams.flow import AbandonedPipes, FlowOwner, Inflow, Outflow
from runner.streams.streams import Streams
from runner.wire.protocol import CHUNK_BYTES, Kind, TerminalSize


class FifoOutflow(Outflow):
    """Output of a command through a FIFO that its shell opens by name, and that the next command uses again."""

    def __init__(self, loop: EventLoop, path: str, kind: Kind, owner: FlowOwner) -> None:
        """Open the FIFO, made if it is not there.

        Raises:
            OSError
        """
        try:
            fd = open_fifo(path, os.O_RDONLY)
        except FileNotFoundError:
            os.mkfifo(path, 0o622)
            fd = open_fifo(path, os.O_RDONLY)
        super().__init__(loop, fd, kind, owner)
        self._path = path
        self._is_clean = False

    def was_opened(self) -> bool:
        """Return whether anybody ever opened the writing end: the shell does before it runs the command."""
        # Without a writer ever, poll(2) reports no hang-up and read(2) end-of-file; afterwards it is one or the other.
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        if self._is_at_end or self.is_done or poll.poll(0):
            return True
        try:
            chunk = os.read(self._fd, CHUNK_BYTES)
        except BlockingIOError:
            return True
        if chunk:
            self._owner.on_output(self._kind, chunk)
        return bool(chunk)

    def finish(self, *, may_read: bool) -> None:
        """As for a pipe. A FIFO that is empty and has no writer stays for the next command; any other loses its name,
        so that a background job which holds it does not write into a later command's output."""
        super().finish(may_read=may_read)
        self._is_clean = self.is_done and not self._has_writer()
        if not self._is_clean:
            remove_private(self._path)

    def close(self, leftovers: AbandonedPipes | None) -> None:
        if not self.is_done and self._remaining is None:  # never finished: the command gets other FIFOs
            remove_private(self._path)
        super().close(None if self._is_clean else leftovers)

    def _has_writer(self) -> bool:
        """Return whether a process has the empty FIFO open for writing. Output of this very instant is lost."""
        try:
            return bool(os.read(self._fd, CHUNK_BYTES))
        except BlockingIOError:
            return True


class CommandPipes(Streams):
    """FIFOs `out` and `err`, and for `in` a FIFO or /dev/null."""

    def __init__(self, loop: EventLoop, file: Callable[[str], str], owner: FlowOwner, *, stdin: bool) -> None:
        super().__init__()
        self._loop = loop
        self._file = file
        self._owner = owner
        self._has_input_file = False
        self._keeper_fd = self._input_fd = -1
        if stdin:
            self._inflow = Inflow(loop, owner)

    def open(self, *, needs_input_file: bool) -> None:
        self._has_input_file = needs_input_file
        if self._inflow is not None:
            path = self._file("in")
            os.mkfifo(path, 0o644)
            self._keeper_fd = open_fifo(path, os.O_RDWR)  # with it neither our open nor the command's waits
            self._input_fd = open_fifo(path, os.O_WRONLY)
        elif needs_input_file:
            os.symlink("/dev/null", self._file("in"))
        for name, kind in (("out", Kind.STDOUT), ("err", Kind.STDERR)):
            self._outflows.append(FifoOutflow(self._loop, self._file(name), kind, self._owner))

    @property
    def is_begun(self) -> bool:
        return any(isinstance(outflow, FifoOutflow) and outflow.was_opened() for outflow in self._outflows)

    def on_reader(self) -> None:
        # Not earlier: PID 1 would be the only reader for the kernel, and closing would lose all that was written.
        if self._inflow is not None and self._input_fd >= 0:
            os.close(self._keeper_fd)
            fd, self._keeper_fd, self._input_fd = self._input_fd, -1, -1
            self._inflow.connect(fd)

    def finish(self, *, may_read: bool) -> None:
        self._remove_input()
        super().finish(may_read=may_read)

    def close(self, leftovers: AbandonedPipes | None) -> None:
        """Give every descriptor up. Input that no shell has taken yet is kept for the next."""
        self._remove_input()
        super().close(leftovers)

    def _remove_input(self) -> None:
        for fd in (self._keeper_fd, self._input_fd):
            if fd >= 0:
                os.close(fd)
        self._keeper_fd = self._input_fd = -1
        if self._has_input_file:
            self._has_input_file = False
            remove_private(self._file("in"))


_NAMES = ("out", "err", "in")
_WRITTEN = ("traps", "line")
"""Files the shell writes for itself (`runner.shell.terminal_driver`)."""
_LOCAL_FLAGS, _CHARACTERS = 3, 6
"""Indices in the list of termios.tcgetattr."""
_NO_KEY = b"\0"
_SIGNAL_KEYS = ((termios.VINTR, signal.SIGINT), (termios.VQUIT, signal.SIGQUIT))


class TerminalOwner(FlowOwner, Protocol):
    """The owner of a terminal."""

    def on_key(self, number: int, is_raw: Callable[[], bool], release: Callable[[], None]) -> bytes | None:
        """Return the bytes to type right after a key that stands for a signal, which is about to be typed. Later input
        waits until `release` is called; but such a key waits only if there are bytes. None: no bytes, and no input
        waits. `is_raw` returns whether the terminal does not edit lines."""


class CommandTerminal(Streams):
    """A terminal, as the command's three streams."""

    def __init__(
        self,
        context: Context,
        identity: UserIdentity,
        file: Callable[[str], str],
        owner: TerminalOwner,
        size: TerminalSize,
    ) -> None:
        super().__init__()
        self._context = context
        self._identity = identity
        self._file = file
        self._owner = owner
        self._size = size
        self._early: list[bytes] = []
        self._early_bytes = 0
        self._answer: bytes | None = None
        """Answer of the owner to the last key, until the owner releases later input."""
        self._is_begun = False

    def open(self, *, needs_input_file: bool) -> None:
        path = self._open_terminal(self._context, self._identity, self._size, self._owner)
        self._is_begun, self._answer = False, None
        self._refuse_stop_key()
        for name in _WRITTEN:
            os.close(open_private(self._file(name), os.O_CREAT | os.O_WRONLY, 0o666))
        for name in _NAMES:
            remove_private(self._file(name))
            os.symlink(path, self._file(name))

    def _refuse_stop_key(self) -> None:
        """Make Ctrl-Z a character like any other: without job control it would stop the shell for good."""
        attributes = termios.tcgetattr(self._terminal_fd)
        attributes[_CHARACTERS][termios.VSUSP] = _NO_KEY
        termios.tcsetattr(self._terminal_fd, termios.TCSANOW, attributes)

    @property
    def is_begun(self) -> bool:
        return self._is_begun

    def on_reader(self) -> None:
        self._is_begun = True
        if self._inflow is None and self._terminal_fd >= 0:
            self._connect_keyboard(self._context, self._owner)
            self._release()

    def feed(self, data: bytes) -> None:
        """Type. Input from before the command has begun waits: the terminal would give it to the shell's driver."""
        found = self._find_key(data) if self._inflow is not None else None
        if self._inflow is None or self._answer or (found is None and self._answer is not None):
            self._early.append(data)
            self._early_bytes += len(data)
            return
        if found is None:
            self._inflow.feed(data)
            return
        self._release()
        number, end = found
        self._answer = self._owner.on_key(number, self._is_raw, self._release)
        self._inflow.feed(data[:end] + (self._answer or b""))
        if self._answer is not None:
            with contextlib.suppress(OSError):  # no descriptor is left: the order of what is typed may suffer, no more
                pty.settle(self._terminal_fd)
        if rest := data[end:]:
            self.feed(rest)  # no key is left in it

    def _release(self) -> None:
        self._answer = None
        if self._inflow is not None:
            early, self._early, self._early_bytes = self._early, [], 0
            for data in early:
                self.feed(data)

    def _find_key(self, data: bytes) -> tuple[int, int] | None:
        """Return the signal that the last such key in `data` stands for, and where the key ends."""
        attributes = self._attributes()
        if not attributes[_LOCAL_FLAGS] & termios.ISIG:
            return None
        characters = attributes[_CHARACTERS]
        keys = [(data.rfind(characters[key]) + 1, number) for key, number in _SIGNAL_KEYS if characters[key] != _NO_KEY]
        end, number = max(keys, default=(0, 0))
        return (number, end) if end else None

    def _is_raw(self) -> bool:
        return not self._attributes()[_LOCAL_FLAGS] & termios.ICANON

    def _attributes(self) -> list[Any]:
        """As termios gives them."""
        return termios.tcgetattr(self._terminal_fd)

    @property
    def buffered_bytes(self) -> int:
        return self._early_bytes + super().buffered_bytes

    def finish(self, *, may_read: bool) -> None:
        """Read the rest, little as it can be, even for a client that reads slowly, and hang up: the shell waits for
        the hang-up."""
        super().finish(may_read=True)
        self.close(None)
        self._owner.on_output_done()

    def close(self, leftovers: AbandonedPipes | None) -> None:
        """Hang up: the kernel tells every process that has the terminal open."""
        self._early, self._early_bytes = [], 0
        if self._terminal_fd >= 0:
            for name in _NAMES:
                remove_private(self._file(name))
        super().close(leftovers)
        self._inflow = None

    def resize(self, size: TerminalSize) -> bool:
        self._size = size
        super().resize(size)
        return True
