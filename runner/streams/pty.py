"""Pseudo-terminals: making a pair, its size, and the process group in its foreground.

Both sides are opened with the file system ids of the terminal's user, so that a program may open `/dev/tty` or
`/dev/stdout` again. A read of the master side gives EIO once nobody has the terminal side open, and waits before
anybody had.

Sources: pts(4), ioctl_tty(2), TIOCSPTLCK(2const), TIOCGPTPEER(2const), TIOCSWINSZ(2const), termios(3), devpts in
Documentation/filesystems; drivers/tty/n_tty.c (`n_tty_poll` flushes the work queue of the terminal).
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import termios

from runner.loop.context import Context
from runner.loop.identity import UserIdentity
from runner.wire.protocol import TerminalSize

MAX_CELLS = 10_000
"""Most columns, and most rows, a terminal may have."""

_OPEN_FLAGS = os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC
"""PID 1 leads a session: without O_NOCTTY the first terminal it opens would become its own."""

_TIOCSPTLCK = 0x40045431
_TIOCGPTN = 0x80045430
_TIOCGPTPEER = 0x5441
_IUTF8 = 0o40000
"""asm-generic/ioctls.h and asm-generic/termbits.h; x86, arm64 and riscv use these."""

_INT = struct.Struct("i")
_WINSIZE = struct.Struct("4H")
_INPUT_FLAGS = 0


def check_size(size: TerminalSize) -> str | None:
    """Return what is wrong with a size, or None."""
    if 0 < size.cols <= MAX_CELLS and 0 < size.rows <= MAX_CELLS:
        return None
    return f"a terminal has 1 to {MAX_CELLS} columns and rows"


def open_pty(context: Context, size: TerminalSize, identity: UserIdentity | None = None) -> tuple[int, str]:
    """Return the non-blocking master side of a new terminal, the caller's, and the path of the other side.

    Raises:
        OSError: ENOSPC, the sandbox has as many terminals as it may have, for one.
    """
    with identity or context.as_user:
        master_fd = os.open("/dev/ptmx", _OPEN_FLAGS | os.O_NONBLOCK)
    try:
        fcntl.ioctl(master_fd, _TIOCSPTLCK, _INT.pack(0))
        (number,) = _INT.unpack(fcntl.ioctl(master_fd, _TIOCGPTN, _INT.pack(0)))
        attributes = termios.tcgetattr(master_fd)
        attributes[_INPUT_FLAGS] |= _IUTF8  # erasing takes a whole character; the kernel's other defaults are sane
        termios.tcsetattr(master_fd, termios.TCSANOW, attributes)
        set_size(master_fd, size)
    except BaseException:
        os.close(master_fd)
        raise
    return master_fd, f"/dev/pts/{number}"


def open_terminal(context: Context, path: str, identity: UserIdentity | None = None) -> int:
    """Return a descriptor of the terminal side, the caller's. The terminal becomes nobody's controlling terminal."""
    with identity or context.as_user:
        return os.open(path, _OPEN_FLAGS)


def settle(master_fd: int) -> None:
    """Wait until the terminal has acted on what was typed, which a worker of the kernel does some time after the write:
    a key has then sent its signal. With unread input on the terminal this does nothing.

    Raises:
        OSError: EMFILE, for one.
    """
    fd = fcntl.ioctl(master_fd, _TIOCGPTPEER, _OPEN_FLAGS)
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.poll(0)  # n_tty_poll waits for the worker if it finds nothing to read
    finally:
        os.close(fd)


def set_size(master_fd: int, size: TerminalSize) -> None:
    """Change the size of a terminal. The processes in its foreground get SIGWINCH."""
    fcntl.ioctl(master_fd, termios.TIOCSWINSZ, _WINSIZE.pack(size.rows, size.cols, 0, 0))


def foreground_group(master_fd: int) -> int | None:
    """Return the process group in the foreground of a terminal, None if it is nobody's controlling terminal."""
    try:
        group = os.tcgetpgrp(master_fd)
    except OSError:
        return None
    return group if group > 1 else None
