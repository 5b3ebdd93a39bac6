"""The standard streams of one command of a shell as a terminal, which is the shell's controlling one meanwhile.

It must not know when the command ends. When it has, the terminal is hung up before the shell's next command: what is
still running loses it. The shell opens it by the names of the pipes (`out`, `err`, `in`), so its driver needs no other
way for a terminal.

Sources: pts(4), termios(3) (VINTR, VQUIT, VSUSP, ISIG), tty_ioctl(4) "Controlling terminal"; symlink(7).
"""

from __future__ import annotations

import fcntl
import os
import signal
import termios
from collections.abc import Callable
from typing import Any

from runner.loop.context import Context
from runner.loop.identity import UserIdentity
from runner.loop.private import open_private, remove_private
from runner.streams import pty
from runner.streams.flow import Inflow, Outflow
from runner.streams.pipes import Leftovers, OnOutput
from runner.wire.protocol import Kind, TerminalSize

_NAMES = ("out", "err", "in")
_WRITTEN = ("traps", "line")
"""Files the shell writes for itself (`terminal_driver`, `repl`)."""
_LOCAL_FLAGS, _CHARACTERS = 3, 6
_NONE = b"\0"
OnKey = Callable[[int, bool, Callable[[], None]], bytes | None]
_SIGNALS = ((termios.VINTR, signal.SIGINT), (termios.VQUIT, signal.SIGQUIT))


class TerminalStreams:
    """Implements `streams.Streams`. `on_key(signal, is_raw, release)` is called before the terminal gets a key that
    stands for a signal, and returns what is typed after it; None: what comes later waits until `release` is called."""

    def __init__(
        self,
        context: Context,
        identity: UserIdentity,
        file: Callable[[str], str],
        leftovers: Leftovers,
        size: TerminalSize,
        *,
        on_output: OnOutput,
        on_done: Callable[[], None],
        on_room: Callable[[], None],
        on_key: OnKey,
    ) -> None:
        self._context = context
        self._identity = identity
        self._file = file
        self._leftovers = leftovers
        self._size = size
        self._on_output = on_output
        self._on_done = on_done
        self._on_room = on_room
        self._on_key = on_key
        self._early: list[bytes] = []
        self._early_bytes = 0
        self._is_held = False
        self._fd = -1
        self._in: Inflow | None = None
        self._out: Outflow | None = None
        self.is_begun = False
        self.is_done = True

    def open(self, *, needs_input_file: bool) -> None:
        self._fd, path = pty.open_pty(self._context, self._size, self._identity)
        self.is_begun = self.is_done = self._is_held = False
        self._refuse_stop_key()
        loop = self._context.loop
        self._out = Outflow(
            *(loop, fcntl.fcntl(self._fd, fcntl.F_DUPFD_CLOEXEC, 3)),
            is_terminal=True,
            on_chunk=lambda chunk: self._on_output(Kind.STDOUT, chunk),
            on_done=lambda: None,
        )
        for name in _WRITTEN:
            os.close(open_private(self._file(name), os.O_CREAT | os.O_WRONLY, 0o666))
        for name in _NAMES:
            remove_private(self._file(name))
            os.symlink(path, self._file(name))

    def _refuse_stop_key(self) -> None:
        """Make Ctrl-Z a character like any other: without job control it would stop the shell, and nothing could make
        that go on."""
        attributes = termios.tcgetattr(self._fd)
        attributes[_CHARACTERS][termios.VSUSP] = _NONE
        termios.tcsetattr(self._fd, termios.TCSANOW, attributes)

    def on_reader(self) -> None:
        self.is_begun = True
        if self._in is None and self._fd >= 0:
            fd = fcntl.fcntl(self._fd, fcntl.F_DUPFD_CLOEXEC, 3)
            self._in = Inflow(self._context.loop, fd, self._on_room)
            self._feed_early(self.feed)

    def feed(self, data: bytes) -> None:
        """Type. What is typed before the command has begun waits: the terminal would take it for somebody else's."""
        found = self._find_key(data) if self._in is not None else None
        if self._in is None or (found is None and self._is_held):
            self._early.append(data)
            self._early_bytes += len(data)
            return
        if found is None:
            self._in.feed(data)
            return
        self._release()
        number, end = found
        is_raw = not self._attributes()[_LOCAL_FLAGS] & termios.ICANON
        answer = self._on_key(number, is_raw, self._release)
        self._is_held = answer is None
        self._in.feed(data[:end] + (answer or b""))
        if rest := data[end:]:
            self.feed(rest)  # no key is left in it

    def _release(self) -> None:
        self._is_held = False
        if self._in is not None:
            self._feed_early(self._in.feed)

    def _feed_early(self, feed: Callable[[bytes], None]) -> None:
        early, self._early, self._early_bytes = self._early, [], 0
        for data in early:
            feed(data)

    def _find_key(self, data: bytes) -> tuple[int, int] | None:
        """Return the signal that the last such key in `data` stands for, and where the key ends."""
        attributes = self._attributes()
        if not attributes[_LOCAL_FLAGS] & termios.ISIG:
            return None
        characters = attributes[_CHARACTERS]
        keys = [(data.rfind(characters[key]) + 1, number) for key, number in _SIGNALS if characters[key] != _NONE]
        end, number = max(keys, default=(0, 0))
        return (number, end) if end else None

    def _attributes(self) -> list[Any]:
        """As termios gives them."""
        return termios.tcgetattr(self._fd)

    def end(self) -> None:
        """Nobody types any more; the terminal stays, as it would."""

    def pause(self) -> None:
        if self._out is not None:
            self._out.pause()

    def resume(self) -> None:
        if self._out is not None and not self.is_done:
            self._out.resume()

    def stop_input(self) -> None:
        self._early.clear()
        self._early_bytes = 0
        if self._in is not None:
            self._in.close()

    def finish(self, *, may_read: bool) -> None:
        """Read the rest, little as it can be, even if the client is slow: the shell is waiting for the hang-up."""
        if self._out is not None and not self.is_done:
            self._out.finish(may_read=True)
        self._hang_up()
        self._on_done()

    def close(self) -> None:
        self._hang_up()

    def _hang_up(self) -> None:
        self.is_done = True
        self.stop_input()
        if self._fd < 0:
            return
        for name in _NAMES:
            remove_private(self._file(name))
        if self._out is not None:
            self._out.close(self._leftovers)
        os.close(self._fd)
        self._fd, self._in, self._out = -1, None, None

    def resize(self, size: TerminalSize) -> bool:
        self._size = size
        if self._fd >= 0:
            pty.set_size(self._fd, size)
        return True

    @property
    def buffered_bytes(self) -> int:
        return self._early_bytes + (self._in.buffered_bytes if self._in is not None else 0)
