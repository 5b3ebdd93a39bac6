"""Bytes between two TCP sockets: reading, writing, dialling, an end that is a half-close or a reset; and messages.

Sockets are non-blocking. All copying goes through one buffer of the process, for between the read and the write nothing
else runs; what a slow reader does not take is kept for its connection, in smaller portions when that is much in all. So
an open connection that carries nothing has no buffer. No deadline is here: the caller's cancel scope is one.

Sources: tcp(7), socket(7) (SO_LINGER), connect(2) (EINPROGRESS).
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import IPv6Address
from typing import Protocol

import attrs
import trio

from egress.policy import Address

CHUNK_BYTES = 256 * 1024
SMALL_CHUNK_BYTES = 16 * 1024
NARROW_BYTES = 64 * 1024
"""Bytes that each buffer of a socket has beyond a session's first connections; the kernel doubles it (socket(7))."""
_MUCH_KEPT_BYTES = 64 * 1024 * 1024
_TURNS = 8
"""Portions that a connection copies before others get their turn."""

_RESET = struct.pack("=ii", 1, 0)  # struct linger: close(2) sends a reset and waits for nothing


class _Buffer:
    view = memoryview(bytearray(CHUNK_BYTES))
    small = view[:SMALL_CHUNK_BYTES]
    kept = 0
    """Bytes that slow readers have not taken."""
    turns = 0
    """Portions that were there when they were asked for."""


async def receive(
    sock: socket.socket, size: int, wait: Callable[[socket.socket], Awaitable[None]] = trio.lowlevel.wait_readable
) -> bytes:
    """Return what there is, at most `size` bytes, as soon as there is something; nothing at the stream's end. Others
    have their turns when it waits, and at each of some portions that were there: a turn costs as much as the rest."""
    await trio.lowlevel.checkpoint_if_cancelled()
    try:
        data = sock.recv(size)
    except BlockingIOError:
        pass
    else:
        _Buffer.turns += 1
        if _Buffer.turns % _TURNS == 0:  # what was read may not be lost to a cancellation
            await trio.lowlevel.cancel_shielded_checkpoint()
        return data
    while True:
        await wait(sock)
        try:
            return sock.recv(size)
        except BlockingIOError:
            continue


async def send_all(sock: socket.socket, data: bytes) -> None:
    """Write all of it."""
    view = memoryview(data)
    while view:
        try:
            view = view[sock.send(view) :]
        except BlockingIOError:
            await trio.lowlevel.wait_writable(sock)


async def copy(
    source: socket.socket, target: socket.socket, count: Callable[[int], None], is_taken: Callable[[], bool]
) -> bool:
    """Copy until the stream ends, and end the target's likewise; return True.

    Before each read `is_taken` is asked, and False returned once the stream is somebody else's. `count` is told of each
    portion before it is written, and may refuse it by an exception.
    """
    turns = 0
    while not is_taken():
        try:
            size = source.recv_into(_Buffer.small if _Buffer.kept > _MUCH_KEPT_BYTES else _Buffer.view)
        except BlockingIOError:
            await trio.lowlevel.wait_readable(source)
            continue
        if not size:
            shut(target)
            return True
        count(size)
        try:
            sent = target.send(_Buffer.view[:size])
        except BlockingIOError:
            sent = 0
        if sent < size:
            await _send_rest(target, bytes(_Buffer.view[sent:size]))
        turns += 1
        if turns % _TURNS == 0:
            await trio.lowlevel.checkpoint()
    return False


async def exchange(one: socket.socket, other: socket.socket, idle_s: float, half_closed_s: float) -> bool:
    """Copy both ways until both streams have ended; tell whether they did. It is over, too, when either side fails,
    when no byte came either way for `idle_s`, and `half_closed_s` after the first stream's end."""
    has_failed, bound_s = False, idle_s

    def touch(_size: int = 0) -> None:
        nursery.cancel_scope.deadline = trio.current_time() + bound_s

    async def carry(source: socket.socket, target: socket.socket) -> None:
        nonlocal has_failed, bound_s
        try:
            await copy(source, target, touch, lambda: False)
        except OSError:
            has_failed = True
            nursery.cancel_scope.cancel()
        bound_s = half_closed_s
        touch()

    async with trio.open_nursery() as nursery:
        touch()
        nursery.start_soon(carry, one, other)
        nursery.start_soon(carry, other, one)
    return not has_failed and not nursery.cancel_scope.cancelled_caught


async def _send_rest(target: socket.socket, rest: bytes) -> None:
    _Buffer.kept += len(rest)
    try:
        await send_all(target, rest)
    finally:
        _Buffer.kept -= len(rest)


class ByteStream(Protocol):
    """Bytes both ways. Each method raises OSError when the other side is gone."""

    async def receive(self, size: int) -> bytes:
        """Return what there is, at most `size` bytes, as soon as there is something; nothing at the stream's end."""
        ...

    async def send_all(self, data: bytes) -> None:
        """Write all of it."""
        ...

    async def shut(self) -> None:
        """End the stream to the other side."""
        ...


@attrs.frozen
class SocketStream:
    """A non-blocking socket with the methods of `ByteStream`. Its maker closes it."""

    sock: socket.socket

    async def receive(self, size: int) -> bytes:
        return await receive(self.sock, size)

    async def send_all(self, data: bytes) -> None:
        await send_all(self.sock, data)

    async def shut(self) -> None:
        shut(self.sock)


class Writer:
    """Bytes on their way to one stream, in the order of `put`, for which nobody waits but who wants to.

    A stream that can't be written to any more swallows what comes: what its other side still has to say is read.
    """

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._waiting = bytearray()
        self._is_ended = False
        self._is_idle = True
        self._scope = trio.CancelScope()
        self._changed = trio.Event()

    def put(self, data: bytes) -> None:
        """Send these bytes after those before."""
        if data:
            self._waiting += data
            self._tell()

    def end(self) -> None:
        """End the stream when all is sent."""
        self._is_ended = True
        self._tell()

    def drop(self) -> None:
        """Send nothing more."""
        self._waiting.clear()
        self._scope.cancel()
        self._tell()

    async def drained(self) -> None:
        """Wait until all is sent, or nothing will be."""
        await trio.lowlevel.checkpoint()
        while not self._scope.cancel_called and (self._waiting or not self._is_idle):
            await self._changed.wait()

    async def run(self) -> None:
        """Send what comes, until `end` or `drop`."""
        with self._scope:
            try:
                while self._waiting or not self._is_ended:
                    if self._waiting:
                        data, self._is_idle = bytes(self._waiting), False
                        self._waiting.clear()
                        await self._stream.send_all(data)
                        self._is_idle = True
                        self._tell()
                    else:
                        await self._changed.wait()
                await self._stream.shut()
            except OSError:
                self.drop()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


async def dial(address: Address, port: int) -> socket.socket:
    """Return a connected socket.

    Raises:
        OSError: nothing answers there, or the kernel refuses.
    """
    family = socket.AF_INET6 if isinstance(address, IPv6Address) else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        await connect(sock, str(address), port)
    except BaseException:
        sock.close()
        raise
    return sock


def narrow(sock: socket.socket) -> None:
    """Have a socket hold little, whether its other end reads or not."""
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, NARROW_BYTES)


async def connect(sock: socket.socket, address: str, port: int) -> None:
    """Connect a socket that does not block (connect(2), EINPROGRESS). Raises as `dial`."""
    code = sock.connect_ex((address, port))
    if code == errno.EINPROGRESS:  # over a loopback the handshake is over when that call returns: a second one tells
        code = sock.connect_ex((address, port))
    if code == errno.EALREADY:
        await trio.lowlevel.wait_writable(sock)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


async def send_message(channel: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Send one message, with copies of descriptors (unix(7)), and wait for room. Raises `OSError`: nobody is there, or
    our end was closed meanwhile."""
    while True:
        try:
            socket.send_fds(channel, [data], fds)
            return
        except BlockingIOError:
            try:
                await trio.lowlevel.wait_writable(channel)
            except trio.ClosedResourceError:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from None


def name_of(error: OSError) -> str:
    """Return the short name of an error, such as ECONNREFUSED."""
    return errno.errorcode.get(error.errno or 0, type(error).__name__)


def shut(sock: socket.socket) -> None:
    """End the stream to the other side, which may go on sending."""
    try:
        sock.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # the other side has reset the connection: the next read says so


def close(sock: socket.socket, *, with_reset: bool) -> None:
    """Close a socket; with a reset, what is under way is thrown away, and the other side learns that it broke off."""
    if sock.fileno() < 0:
        return
    if with_reset:
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        except OSError:
            pass  # a socket that was never connected, or is reset already
    trio.lowlevel.notify_closing(sock)
    sock.close()
