"""A client's socket as the HTTP protocol code sees it: every write has a deadline, and any task can abort it.

The protocol code only says that it is done (`aclose`). The accept loop owns the socket and closes it after reading the
bytes that are left: closing with unread bytes makes the kernel send a reset that may overtake the answer (RFC 9112
§9.6). The protocol code shields its writes, so only a deadline inside the stream or an abort ends a write whose reader
has stopped.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import socket
import struct
from collections.abc import Callable, Iterator

import trio

LINGER_S = 2.0
BULK_BYTES = 256 * 1024
"""Read at once of a client that sends much: each piece costs the same, whatever its size."""
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class ClientGone(Exception):
    """The client has left. Raised into a handler, caught at the edge, never logged as an error."""


class Leave:
    """The moment at which a client leaves: the end of its side, a reset, or a write that failed."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], None]] = []
        self._has_come = False

    def note(self) -> None:
        """The moment has come; it may be noted again."""
        self._has_come = True
        for call in list(self._calls):
            call()

    @contextlib.contextmanager
    def calling(self, call: Callable[[], None]) -> Iterator[None]:
        """Have `call` called at that moment if it comes within the block, at once if it came before."""
        if self._has_come:
            call()
        self._calls.append(call)
        try:
            yield
        finally:
            self._calls.remove(call)


class GuardedStream:
    """The part of a stream that hypercorn's `TCPServer` uses; not a full `trio.abc.Stream`.

    `is_broken`: data that is sent reaches nobody. `is_at_eof`: the client ended its side and may still read ours.
    `has_unread_body`: the application answered before the request had been read to its end; the application sets it.
    `idle_since`: the moment since which no request is being served, None while one is. `peer`: the client's address
    for the share of connections, "" behind a unix socket. `leave` tells of the client's leaving.
    """

    def __init__(self, stream: trio.SocketStream, *, write_timeout_s: float, head_timeout_s: float) -> None:
        self.socket = stream.socket
        self.peer = _peer_of(stream.socket)
        self._stream = stream
        self._write_timeout_s, self._head_timeout_s = write_timeout_s, head_timeout_s
        self._requests = 0
        self.idle_since: float | None = trio.current_time()
        self._head_deadline = trio.current_time() + head_timeout_s
        self._idle_deadline = math.inf
        self.leave = Leave()
        self._is_sending = False
        self._is_closed = False
        self._read_bytes = 0
        self.is_broken = False
        self.is_at_eof = False
        self.has_unread_body = False

    async def send_all(self, data: bytes) -> None:
        """Send `data` within the write deadline.

        Raises:
            trio.BrokenResourceError: the deadline passed (the socket is then closed), or the peer is gone.
            trio.ClosedResourceError: after `aclose` or `abort`.
        """
        if self._is_closed:
            raise trio.ClosedResourceError
        if not data:
            await trio.lowlevel.checkpoint()
            return
        self._is_sending = True
        try:
            with trio.move_on_after(self._write_timeout_s) as scope:
                await self._stream.send_all(data)
        except trio.BrokenResourceError:
            self._break()
            raise
        except trio.BusyResourceError:  # `send_eof` is running
            self._break()
            raise trio.BrokenResourceError("the connection is being ended") from None
        finally:
            self._is_sending = False
        if scope.cancelled_caught:
            self.abort()
            raise trio.BrokenResourceError("the client did not read in time")

    def send_nowait(self, data: bytes) -> int:
        """Send what the socket takes at once, mostly all of it, and return the number of bytes; `send_all` is for the
        rest."""
        if self._is_sending or self._is_closed:
            return 0
        try:
            return os.write(self.socket.fileno(), data)
        except OSError:  # it is full, or the stream says what is wrong
            return 0

    def begin_serving(self) -> None:
        """Have the connection count as busy until `end_serving`: the head of a request has come."""
        self._requests += 1
        self.idle_since = None
        self._head_deadline = math.inf

    def end_serving(self) -> None:
        self._requests -= 1
        if not self._requests:
            self.idle_since = trio.current_time()

    def set_idle_deadline(self, deadline: float) -> None:
        """Set when the connection ends unless a request comes, in `trio.current_time()` seconds."""
        self._idle_deadline = deadline

    def end_if_late(self, now: float) -> None:
        """End the connection if a head, or the next request, has not come in its time."""
        if now >= min(self._head_deadline, self._idle_deadline):
            self._end_wait()

    def end_if_idle(self) -> None:
        """End the connection now if it waits for a request."""
        if self._idle_deadline < math.inf:
            self.set_idle_deadline(-math.inf)
            self._end_wait()

    def _end_wait(self) -> None:
        """Have the task that waits for bytes get `trio.ClosedResourceError`, unless some have come."""
        if self.socket.fileno() != -1:
            trio.lowlevel.notify_closing(self.socket)

    def _break(self) -> None:
        self.is_broken = True
        self.leave.note()

    async def receive_some(self, max_bytes: int) -> bytes:
        """Return the next bytes, `b""` at the end: at most `max_bytes`, or while a body comes fast `BULK_BYTES`.

        Raises:
            trio.BrokenResourceError: the connection was reset.
            trio.ClosedResourceError: after, or because of, `aclose` or `abort`, or a head or request that did not come
                in time.
        """
        if self._is_closed or self._idle_deadline == -math.inf:
            raise trio.ClosedResourceError
        data = await self._read(max(max_bytes, self._read_bytes))
        self.is_at_eof = not data
        if not data:
            self.leave.note()
        self._read_bytes = BULK_BYTES if len(data) >= max_bytes else 0
        if not self._requests and self._head_deadline == math.inf:  # the first bytes of a further head
            self._head_deadline = trio.current_time() + self._head_timeout_s
        return data

    async def _read(self, max_bytes: int) -> bytes:
        """Wait for bytes, which are seldom there already, so that trio's stream would look for them once more."""
        while True:
            await trio.lowlevel.wait_readable(self.socket)
            try:
                return os.read(self.socket.fileno(), max_bytes)
            except BlockingIOError:
                continue
            except OSError as error:
                self.is_at_eof = True
                self._break()
                raise trio.BrokenResourceError("the connection was reset") from error

    async def send_eof(self) -> None:
        """End our side of the connection."""
        await self._stream.send_eof()

    async def aclose(self) -> None:
        """End both directions for the protocol code. The socket itself lives until its owner closes it."""
        self._is_closed = True
        self._break()
        if self._is_sending:
            self.abort()
        self._end_wait()
        await trio.lowlevel.checkpoint()

    def abort(self) -> None:
        """Reset the connection at once; pending reads and writes raise."""
        self._is_closed = True
        self._break()
        if self.socket.fileno() != -1:
            with contextlib.suppress(OSError):
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self.socket.close()

    async def linger(self) -> None:
        """After an early answer, discard what the client still sends until it closes, for `LINGER_S` at most."""
        if not self.has_unread_body or self.is_at_eof:
            return
        with (
            trio.move_on_after(LINGER_S),
            contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError),
        ):
            while await self._stream.receive_some(64 * 1024):
                pass


def _peer_of(sock: trio.socket.SocketType) -> str:
    """Return an IPv4 address, the /64 network of an IPv6 address (one client has all of it), or "" for neither."""
    try:
        if sock.family == socket.AF_UNIX:
            return ""
        address = ipaddress.ip_address(sock.getpeername()[0])
    except OSError:  # the client has left
        return "gone"
    return str(address if address.version == 4 else ipaddress.IPv6Network((int(address), 64), strict=False))
