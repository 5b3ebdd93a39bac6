"""The terminal of the person who typed the command: raw while a program inside has it, and always given back.

Raw mode ends at the end of the block, at exit, before a stop by SIGTSTP, and on SIGTERM, SIGHUP, SIGINT and SIGQUIT;
modes that the program inside switched on and left on (a second screen, mouse reports, bracketed paste, a hidden cursor)
are switched off. Output is written by a thread, so that a terminal that takes nothing holds up the output and not the
keys. Descriptors stay blocking, as others share them.

Sources: termios(3), tty_ioctl(4) SIGWINCH, credentials(7) job control, xterm's ctlseqs (DECSET).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import re
import select
import signal
import termios
import tty
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any

import anyio
import anyio.to_thread

from sandkasten.cli.common import Stop

IN, OUT, ERR = 0, 1, 2
_READ_BYTES = 64 * 1024
_MOST_CELLS = 1000
_TYPED_AHEAD = 256
"""Readings of the keyboard that may wait while the program takes no input; one has 4095 bytes at most (termios(3))."""
_STUCK_S = 1.0
"""A program that takes no input for so long while they wait loses more keys, as at a terminal; those that detach count.
"""

DETACHED = -1
"""Result of `attach` after the keys that detach."""
_DETACH_FIRST, _DETACH_SECOND = 0x10, 0x11
_DETACH_WAIT_S = 0.5
"""A ^P is sent on when no ^Q follows for so long: it is also the previous line of a shell's history."""

_LAST_KEYS_S = 1.0
"""Time for what was typed before the keys that detach, where the program reads nothing."""

_FINAL = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_PATIENCE = 3
"""Number of SIGINT, SIGTERM or SIGHUP that end the wait for a command that takes no notice."""


def size() -> tuple[int, int]:
    """Return columns and rows of the terminal, 80 by 24 if it does not know."""
    try:
        cols, rows = os.get_terminal_size(OUT)
    except OSError:
        cols = rows = 0
    return min(cols, _MOST_CELLS) or 80, min(rows, _MOST_CELLS) or 24


def require_terminal() -> None:
    """Refuse to go on where standard input or output is no terminal. Raises `Stop`."""
    if not (os.isatty(IN) and os.isatty(OUT)):
        raise Stop("a terminal is asked for, and the standard input or output is none: leave out -t", 2)


class Keys:
    """Typed bytes, without the two keys that detach: ^P ^Q. A ^P waits for the next key."""

    def __init__(self) -> None:
        self.is_waiting = False

    def feed(self, data: bytes) -> tuple[bytes, bool]:
        """Return the bytes to send, and whether to detach after them."""
        sent = bytearray()
        for byte in data:
            if self.is_waiting and byte == _DETACH_SECOND:
                self.is_waiting = False
                return bytes(sent), True
            sent += self.flush()
            if byte == _DETACH_FIRST:
                self.is_waiting = True
            else:
                sent.append(byte)
        return bytes(sent), False

    def flush(self) -> bytes:
        """Return the key that waited, if any."""
        waited, self.is_waiting = self.is_waiting, False
        return bytes([_DETACH_FIRST]) if waited else b""


_SWITCH = re.compile(rb"\x1b\[\?([0-9;]{1,64})([hl])")
_LONGEST_SWITCH = 80
_CURSOR = 25
PLAIN = b"\x1b(B\x0f\x1b>\x1b[4l\x1b7\x1b[r\x1b8"
"""ASCII letters, the keypad's digits, no insertion, and a screen that scrolls whole, with the cursor where it was."""
_MODES = frozenset({1, 9, 47, 1000, 1001, 1002, 1003, 1004, 1005, 1006, 1015, 1016, 1047, 1049, 2004, 2026, _CURSOR})
"""Cursor keys, mouse, screens, focus, paste, held updates: all off in a shell, but for the cursor, which is shown."""


class Modes:
    """Private modes that output switches on, so that what a program left on can be switched off."""

    def __init__(self) -> None:
        self._changed: set[int] = set()
        self._tail = b""

    def feed(self, data: bytes) -> None:
        """Notice the switches in a piece of output; one may be cut anywhere."""
        text = self._tail + data if self._tail else data
        if b"\x1b[?" in text:
            for numbers, what in _SWITCH.findall(text):
                for mode in {int(each) for each in numbers.split(b";") if each} & _MODES:
                    is_changed = (what == b"h") != (mode == _CURSOR)
                    (self._changed.add if is_changed else self._changed.discard)(mode)
        start = text.rfind(b"\x1b", -_LONGEST_SWITCH)
        self._tail = text[start:] if start >= 0 and not _SWITCH.match(text[start:]) else b""

    def undo(self) -> bytes:
        """Return what makes the terminal usable again, whatever was cut off in the middle (ST ends a string)."""
        switches = b"".join(b"\x1b[?%d%c" % (mode, b"h" if mode == _CURSOR else b"l") for mode in sorted(self._changed))
        self._changed.clear()
        return b"\x1b\\\x1b[0m" + switches + PLAIN


class RawTerminal:
    """The terminal in raw mode: `with RawTerminal() as terminal`. Nothing else may write to it meanwhile."""

    def __init__(self) -> None:
        require_terminal()
        self._before: list[Any] = termios.tcgetattr(IN)
        self._modes = Modes()
        self._is_raw = False

    def __enter__(self) -> RawTerminal:
        atexit.register(self.leave)
        self.enter()
        return self

    def __exit__(self, *_error: object) -> None:
        self.leave()
        atexit.unregister(self.leave)

    def enter(self) -> None:
        """Make the terminal raw, again if need be."""
        self._is_raw = True
        with contextlib.suppress(termios.error):  # the terminal may be gone
            tty.setraw(IN, termios.TCSANOW)

    def leave(self) -> None:
        """Give the terminal back as it was. Waits for nothing: a terminal may be stuck, or gone."""
        if not self._is_raw:
            return
        self._is_raw = False
        with contextlib.suppress(OSError):
            if select.select([], [OUT], [], 0)[1]:
                os.write(OUT, self._modes.undo())
        with contextlib.suppress(termios.error):
            # Answers to questions that the program asked the terminal are no input for the person's shell.
            termios.tcflush(IN, termios.TCIFLUSH)
            termios.tcsetattr(IN, termios.TCSANOW, self._before)

    async def write(self, data: bytes) -> None:
        """Write output of the program inside; returns when the terminal has taken it."""
        self._modes.feed(data)
        await write_all(OUT, data)


async def write_all(fd: int, data: bytes) -> None:
    """Write bytes by a thread. A cancelled call leaves the thread to itself. Raises `OSError`."""
    await anyio.to_thread.run_sync(_write, fd, data, abandon_on_cancel=True)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


async def read_some(fd: int) -> bytes:
    """Return what there is to read, empty at the end. A regular file is always readable (epoll(7), EPERM)."""
    with contextlib.suppress(PermissionError):
        await anyio.wait_readable(fd)
    try:
        return os.read(fd, _READ_BYTES)
    except OSError:  # EIO: the terminal is gone
        return b""


# Signals

_acts: dict[signal.Signals, Callable[[int], None]] = {}
"""Functions of the signals that are heeded at the moment. A process has one disposition for a signal (signal(7))."""


@contextlib.contextmanager
def heeding(act: Callable[[int], None], *numbers: signal.Signals) -> Iterator[None]:
    """Have signals call a function, with their numbers, in the event loop while the block lasts.

    At its end they are the block's around it again, and at no moment between end the process. Signals that were ignored
    when we began, as by nohup(1) or a shell's `&`, stay ignored.
    """
    loop = asyncio.get_running_loop()
    around = {each: _acts.get(each) for each in numbers if signal.getsignal(each) != signal.SIG_IGN}
    for number in around:
        _acts[number] = act
        loop.add_signal_handler(number, act, number)
    try:
        yield
    finally:
        for number, before in around.items():
            if before is None:
                del _acts[number]
                loop.remove_signal_handler(number)
            else:
                _acts[number] = before
                loop.add_signal_handler(number, before, number)


# A program on a terminal


async def attach(
    terminal: RawTerminal,
    output: AsyncIterator[bytes],
    send: Callable[[bytes], Awaitable[None]],
    resize: Callable[[int, int], Awaitable[None]],
) -> int:
    """Connect a program's terminal with this one until either ends.

    Returns 0 at the end of the output, `DETACHED`, or 128 and the number of the signal that ended it.
    """
    outcome = 0
    is_stuck = False
    are_sent, resized = anyio.Event(), anyio.Event()
    typed_in, typed_out = anyio.create_memory_object_stream[bytes](_TYPED_AHEAD)

    async with anyio.create_task_group() as tasks:

        def end(how: int) -> None:
            nonlocal outcome
            outcome = how
            tasks.cancel_scope.cancel()

        async def pass_on(data: bytes) -> None:
            nonlocal is_stuck
            if is_stuck:
                with contextlib.suppress(anyio.WouldBlock):
                    typed_in.send_nowait(data)
                    is_stuck = False
            else:
                with anyio.move_on_after(_STUCK_S) as scope:
                    await typed_in.send(data)
                is_stuck = scope.cancelled_caught

        async def read_keys() -> None:
            keys = Keys()
            while True:
                with anyio.move_on_after(_DETACH_WAIT_S if keys.is_waiting else None) as scope:
                    data = await read_some(IN)
                if scope.cancelled_caught:
                    await pass_on(keys.flush())
                    continue
                sent, is_over = keys.feed(data)
                if sent:
                    await pass_on(sent)
                if is_over or not data:
                    break
            typed_in.close()
            with anyio.move_on_after(_LAST_KEYS_S):
                await are_sent.wait()
            end(DETACHED if data else 128 + signal.SIGHUP)

        async def send_keys() -> None:
            async for data in typed_out:
                await send(data)
            are_sent.set()

        async def show() -> None:
            try:
                async for data in output:
                    await terminal.write(data)
            except OSError:
                end(128 + signal.SIGHUP)
            else:
                end(0)

        def heed(number: int) -> None:
            # A stop by the keyboard can't be, in raw mode; one by kill(1) is passed on to ourselves after cleaning up.
            if number == signal.SIGTSTP:
                terminal.leave()
                os.kill(os.getpid(), signal.SIGSTOP)
            elif number in _FINAL:
                end(128 + number)
            else:
                if number == signal.SIGCONT:
                    terminal.enter()
                resized.set()

        async def follow_size() -> None:
            nonlocal resized
            while True:
                await resized.wait()
                resized = anyio.Event()
                await resize(*size())

        for task in (read_keys, send_keys, show, follow_size):
            tasks.start_soon(task)
        with heeding(heed, *_FINAL, signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT):
            await anyio.sleep_forever()
    return outcome


# A program on pipes


async def forward_signals(send: Callable[[str], Coroutine[None, None, None]], give_up: Callable[[int], None]) -> None:
    """Pass signals on by their names, for ever; `give_up` gets the status of one that was sent too often."""
    seen = 0
    async with anyio.create_task_group() as tasks:

        def heed(number: int) -> None:
            nonlocal seen
            seen += number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if seen >= _PATIENCE:
                give_up(128 + number)
            tasks.start_soon(send, signal.Signals(number).name)

        with heeding(heed, *_FORWARDED):
            await anyio.sleep_forever()
