"""The link between PID 1 and one process of a shell: a socket pair on which PID 1 gives orders and takes reports.

The kernel stamps what is written with the pid of the writer, and never puts bytes of two writers into one answer of
recvmsg(2). PID 1 takes the bytes of the shell itself and drops all others: a fork of the shell that holds a copy of the
shell's end can report nothing. A fork can read an order away; then the report of the beginning does not come, and the
owner replaces the shell and this link with it.

An order is a name: a letter for what the command needs (`runner.shell.command_driver`), and random digits that are
told nowhere else before the command begins. bash reads so many characters at once; other shells read a line, byte by
byte. Reports:

- `<name> +`: the shell begins the command.
- `<name> <status>`: the command has ended. `0 0`: the shell is ready.
- `<text>`, line end, `<name> .`: the text makes a successor what the shell is now.
- `0 r`: the line of the order was not whole.

The state follows each end, and nobody waits for it: it is read together with the next report, or when the shell is
gone. So PID 1 looks away from the socket after an end, also when it has given the next order: the beginning of a short
command is read with its end. The owner says when to `listen`.

Sources: unix(7) SO_PASSCRED, SCM_CREDENTIALS; `unix_stream_read_generic` in the kernel. A stream and no packets: shells
read byte by byte, and would lose the rest of a packet.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

from runner.loop.loop import READ, EventLoop, OnError

STATE_BYTES = 1024 * 1024
"""Longest state that is kept. Of a longer one nothing is taken: the successor gets the last that was short enough."""

_READ_BYTES = 16384
_MAX_QUEUED = 1024
"""More than the messages that the kernel queues in one direction (`net.core.wmem_default`)."""
_READS_PER_TURN = 16
_CREDENTIALS = struct.Struct("=iII")
_MARK = re.compile(rb"(?:\A|\n)(0|[pviw][0-9a-f]{10}) ([+.r]|[0-9]{1,3})\n")
_MARK_BYTES = 32
_FIRST = b"0"


def new_name(letter: str) -> str:
    """Return the name of an order, of 40 random bits."""
    return letter + os.urandom(5).hex()


@dataclass(frozen=True, slots=True)
class Reports:
    """Calls that a link makes to its owner. `on_ready`: the shell waits for its first order. `on_begun`: it begins the
    last order. `on_end(status)`: it has ended that."""

    on_ready: Callable[[], None]
    on_begun: Callable[[], None]
    on_end: Callable[[int], None]


class Link:
    """Owns PID 1's end, and the shell's until `close_child_side`. `reads_lines`: an order is a line for the shell."""

    def __init__(self, loop: EventLoop, reports: Reports, on_error: OnError, *, reads_lines: bool) -> None:
        self._loop = loop
        self._reports = reports
        self._socket, self._child = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.setblocking(False)
        self._pid = 0
        self._is_over = False
        self._text = b""
        self._is_cut = False
        self._order = b""
        self._order_end = b"\n" if reads_lines else b""
        self._name = self._name_before = _FIRST
        self._has_ended = False
        self.has_begun = False
        """Whether the shell has begun the last order."""
        self.state = b""
        """The last state of the shell, as a text to be sourced; empty before the first."""
        self._is_watched = True
        loop.watch(self._socket.fileno(), READ, self._on_readable, on_error)

    @property
    def child_fd(self) -> int:
        """The shell's end."""
        return self._child.fileno()

    def close_child_side(self, pid: int) -> None:
        """Close the shell's end, which the shell has; the process with this pid is the one that is heard."""
        self._child.close()
        self._pid = pid

    def order(self, name: str, *, is_heard: bool = False) -> None:
        """Give the waiting shell its next order. With `is_heard` the reports on it are taken as they come."""
        self._name_before, self._name = self._name, name.encode()
        self._has_ended = self.has_begun = False
        self._order = self._name + self._order_end
        self._watch(is_heard)
        self._send()

    def _send(self) -> None:
        try:
            self._socket.send(self._order, socket.MSG_NOSIGNAL)
        except OSError:
            pass  # the shell is dead, which is told soon, or its end is full of what it does not read: it is replaced

    def listen(self) -> None:
        """Take what the shell has reported, and what comes from now on, until it has ended the order."""
        for _ in range(_READS_PER_TURN):  # a fork of the shell may write without end
            if self._has_ended or not self._read():
                break
        self._watch(not self._has_ended)

    def look_away(self) -> None:
        """Take no reports until `listen`, which does not end a `listen` that is under way."""
        self._watch(False)

    def _watch(self, is_watched: bool) -> None:
        if is_watched is not self._is_watched and not self._is_over:
            self._is_watched = is_watched
            self._loop.change(self._socket.fileno(), READ if is_watched else 0)

    def _on_readable(self, _events: int) -> None:
        self._read()

    def _read(self) -> bool:
        """Take one message; return whether there was one."""
        try:
            data, ancillary, _flags, _address = self._socket.recvmsg(
                _READ_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size)
            )  # with room for credentials only: descriptors that come along are closed by the kernel
        except BlockingIOError:
            return False
        except OSError:
            data, ancillary = b"", []  # the shell died with an order unread
        if not data:
            self._is_over = True
            self._loop.unwatch(self._socket.fileno())
        if data and ancillary and _CREDENTIALS.unpack(ancillary[0][2])[0] == self._pid:
            self._take(data)
        return bool(data)

    def _take(self, data: bytes) -> None:
        text, begin, start = self._text + data, 0, max(0, len(self._text) - _MARK_BYTES)
        self._text = b""
        while (mark := _MARK.search(text, start)) is not None:
            start = mark.end() - 1
            if mark[1] not in (self._name, self._name_before, _FIRST):  # a variable's value that looks like a mark
                continue
            is_whole, self._is_cut = not self._is_cut and mark.start() - begin <= STATE_BYTES, False
            said = text[begin : mark.start()] if is_whole else b""
            begin = mark.end()
            self._on_mark(mark[1], mark[2], said, is_whole=is_whole)
        if len(text) - begin > STATE_BYTES:
            begin = len(text) - _MARK_BYTES
            self._is_cut = True
        self._text = text[begin:]

    def _on_mark(self, name: bytes, word: bytes, text: bytes, *, is_whole: bool) -> None:
        is_current = name == self._name and not self._has_ended
        if word == b".":
            if is_whole and name != _FIRST:
                self.state = text + b"\n"
        elif word == b"r":
            if self._order and not self.has_begun:
                self._send()  # a signal cut the read short; the driver runs a name once at most
        elif not is_current:
            return
        elif word == b"+":
            self.has_begun = True
            self._reports.on_begun()
        else:
            self._has_ended = True
            self._watch(False)
            if name == _FIRST:
                self._reports.on_ready()
            else:
                self._reports.on_end(int(word))

    def finish(self) -> None:
        """Take what the shell has reported before it died, and close the link."""
        for _ in range(_MAX_QUEUED):
            if not self._read():
                break
        self.close()

    def close(self) -> None:
        self._loop.unwatch(self._socket.fileno())
        self._socket.close()
        self._child.close()
