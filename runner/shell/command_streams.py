"""The standard streams of one command of a shell: FIFOs, or a terminal that is the shell's controlling one meanwhile.

The shell opens either by the names `<order>.out`, `.err` and `.in` in its directory (`runner.shell.command_driver`), so
its driver needs no other way for a terminal. Nobody but the shell knows the order's name (`runner.shell.link`).
When the command has ended, the terminal is hung up before the shell's next command: a background job that is still
running loses it.

Sources: fifo(7), pipe(7); pts(4), termios(3) (VINTR, VQUIT, VSUSP, ISIG), tty_ioctl(4) "Controlling terminal";
symlink(7).
"""

from __future__ import annotations

import contextlib
import os
import signal
import termios
from collections.abc import Callable
from typing import Any, Protocol

from runner.loop.context import Context
from runner.loop.identity import UserIdentity
from runner.loop.loop import READ, EventLoop, OnError
from runner.shell.files import PrivateDirectory
from runner.streams import pty
from runner.streams.flow import AbandonedPipes, Arrivals, FlowOwner, Inflow, Outflow
from runner.streams.streams import Streams
from runner.wire.protocol import Kind, TerminalSize


class CommandPipes(Streams):
    """FIFOs `out` and `err`, and for `in` a FIFO or /dev/null. With `merged`, `err` is a link to `out`: what comes by
    either is in the order in which it was written. Otherwise the FIFO that was written to first is read first.
    """

    def __init__(
        self, loop: EventLoop, files: PrivateDirectory, owner: FlowOwner, *, stdin: bool, merged: bool = False
    ) -> None:
        super().__init__()
        self._loop = loop
        self._files = files
        self._owner = owner
        self._is_merged = merged
        self._names: list[str] = []
        self._both_ends_fd = self._input_fd = -1
        self._writer_fds: list[int] = []
        self._arrivals: Arrivals | None = None
        self._awaits_bytes = False
        """Whether the loop watches the arrivals."""
        if stdin:
            self._inflow = Inflow(loop, owner)

    def open(self, order: str, *, needs_input_file: bool) -> None:
        files = self._files
        if self._inflow is not None:
            name = self._make_fifo(f"{order}.in", 0o644)
            self._both_ends_fd = files.open_fifo(name, os.O_RDWR)  # with it neither our open nor the command's waits
            self._input_fd = files.open_fifo(name, os.O_WRONLY)
        elif needs_input_file:
            files.link(f"{order}.in", "/dev/null")
            self._names.append(f"{order}.in")
        self._open_output(f"{order}.out", Kind.STDOUT)
        if self._is_merged:
            files.link(f"{order}.err", f"{order}.out")
            self._names.append(f"{order}.err")
            return
        self._open_output(f"{order}.err", Kind.STDERR)
        # The open(2) of a FIFO's first writer wakes its readers as bytes do (fs/pipe.c), and shells open `out` first.
        # While PID 1 has both open for writing, nothing but bytes does: `out` until the shell has it open, and so tells
        # the end by a hang-up, `err` until the end.
        for name in ("out", "err"):
            self._writer_fds.append(files.open(f"{order}.{name}", os.O_WRONLY | os.O_NONBLOCK))
        self._arrivals = Arrivals(self._outflows)

    def _open_output(self, name: str, kind: Kind) -> None:
        fd = self._files.open_fifo(self._make_fifo(name, 0o622), os.O_RDONLY)
        self._outflows.append(Outflow(self._loop, fd, kind, self._owner))

    def await_end(self, on_end: Callable[[], None], on_error: OnError) -> bool:
        if self._inflow is not None:
            return False  # its reader is told by the shell (`on_reader`)
        self._outflows[0].await_writers(on_end, on_error)
        return True

    def resume(self) -> None:
        if self._arrivals is None:
            super().resume()
        elif not self._awaits_bytes:
            self._awaits_bytes = True
            self._loop.watch(
                self._arrivals.fileno(), READ, lambda _events: self._on_first_bytes(), lambda _error: self.resume()
            )

    def pause(self) -> None:
        if self._arrivals is not None and self._awaits_bytes:
            self._awaits_bytes = False
            self._loop.unwatch(self._arrivals.fileno())
        super().pause()

    def _on_first_bytes(self) -> None:
        self._sort_outflows()
        super().resume()

    def _sort_outflows(self) -> None:
        """Put the outflows into the order of their first bytes. Later ones are read as they come."""
        if self._arrivals is not None:
            arrivals, self._arrivals = self._arrivals, None
            if self._awaits_bytes:
                self._awaits_bytes = False
                self._loop.unwatch(arrivals.fileno())
            self._outflows.sort(key=arrivals.take().index)

    def _make_fifo(self, name: str, mode: int) -> str:
        self._files.make_fifo(name, mode)
        self._names.append(name)
        return name

    def on_reader(self) -> None:
        # Not earlier: PID 1 would be the only reader for the kernel, and closing would lose all that was written.
        if self._inflow is not None and self._input_fd >= 0:
            os.close(self._both_ends_fd)
            fd, self._both_ends_fd, self._input_fd = self._input_fd, -1, -1
            self._inflow.connect(fd)
        if self._writer_fds:
            os.close(self._writer_fds.pop(0))

    @property
    def must_hear_begin(self) -> bool:
        return bool(self._writer_fds)

    def finish(self, *, may_read: bool) -> None:
        self._remove_files()
        super().finish(may_read=may_read)

    def close(self, leftovers: AbandonedPipes | None) -> None:
        """Give every descriptor up. Input that no shell has taken yet is kept for the next."""
        self._remove_files()
        super().close(leftovers)

    def _remove_files(self) -> None:
        self._sort_outflows()
        for fd in (self._both_ends_fd, self._input_fd, *self._writer_fds):
            if fd >= 0:
                os.close(fd)
        self._both_ends_fd = self._input_fd = -1
        self._writer_fds.clear()
        for name in self._names:
            self._files.unlink(name)
        self._names.clear()


_NAMES = ("out", "err", "in")
_WRITTEN = ("traps", "line")
"""Files the shell writes for itself (`runner.shell.terminal_driver`)."""
_LOCAL_FLAGS, _CHARACTERS = 3, 6
"""Indices in the list of termios.tcgetattr."""
_NO_KEY = b"\0"
_SIGNAL_KEYS = ((termios.VINTR, signal.SIGINT), (termios.VQUIT, signal.SIGQUIT))


class TerminalOwner(FlowOwner, Protocol):
    """The run that a terminal belongs to, which also hears of keys that stand for signals."""

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
        files: PrivateDirectory,
        owner: TerminalOwner,
        size: TerminalSize,
    ) -> None:
        super().__init__()
        self._context = context
        self._identity = identity
        self._files = files
        self._owner = owner
        self._size = size
        self._order = ""
        self._early: list[bytes] = []
        self._early_bytes = 0
        self._answer: bytes | None = None
        """Answer of the owner to the last key, until the owner releases later input."""

    def open(self, order: str, *, needs_input_file: bool) -> None:
        self._order = order
        path = self._open_terminal(self._context, self._identity, self._size, self._owner)
        self._answer = None
        self._refuse_stop_key()
        for name in _WRITTEN:
            os.close(self._files.open(f"{order}.{name}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        for name in _NAMES:
            self._files.link(f"{order}.{name}", path)

    def _refuse_stop_key(self) -> None:
        """Make Ctrl-Z a character like any other: without job control it would stop the shell for good."""
        attributes = termios.tcgetattr(self._terminal_fd)
        attributes[_CHARACTERS][termios.VSUSP] = _NO_KEY
        termios.tcsetattr(self._terminal_fd, termios.TCSANOW, attributes)

    def on_reader(self) -> None:
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
            for name in (*_NAMES, *_WRITTEN):
                self._files.unlink(f"{self._order}.{name}")
        super().close(leftovers)
        self._inflow = None

    def resize(self, size: TerminalSize) -> bool:
        self._size = size
        super().resize(size)
        return True
