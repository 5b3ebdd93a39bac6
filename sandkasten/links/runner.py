"""The daemon's end of the connections to one sandbox's PID 1: `runner.wire.protocol` on trio.

Owns a directory descriptor (so that a long data directory never meets the 108-byte limit of socket addresses) and a few
idle connections. One request runs on one connection at a time; a connection whose request did not end cleanly is
closed, which cancels the request in the sandbox, unless it is a run that is kept there (`runner.wire.protocol`). Every
byte received is hostile: anything that is no message of the contract raises `RunnerProtocolError` and the caller ends
the session.

Sources: unix(7), proc(5) on /proc/self/fd.
"""

from __future__ import annotations

import dataclasses
import enum
import errno
import itertools
import math
import os
import socket
from pathlib import Path
from typing import Any

import trio

from runner.wire.codec import field_values
from runner.wire.protocol import (
    ANSWERS,
    FROM_RUNNER,
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    REQUESTS,
    Error,
    Frame,
    FrameDecoder,
    Kind,
    ProtocolError,
    encode_header,
)
from sandkasten.errors import Capacity, RunnerLost, RunnerProtocolError, SandkastenError
from sandkasten.host.paths import RUNNER_SOCKET

_MAX_IDLE = 4
"""Connections of a pool that wait for a request. More come and go with theirs."""
_FIRST_RECEIVE_BYTES = 16 * 1024
_BULK_RECEIVE_BYTES = MAX_FRAME_BYTES + HEADER_BYTES
_STEPS_PER_TURN = 32
"""Frames handled in a row before other tasks have a turn: one read may hold thousands."""
_STEPS_OF_A_READ = 8
"""A read counts as so many frames: it copies up to 256 KiB."""
_CONNECT_PAUSE_S = 0.01
_CONNECT_PATIENCE_S = 10.0
_MAX_NUMBER = 2**53
_MAX_TEXT_BYTES = 8 * 1024


class RunnerConnection:
    """One connection to PID 1; carries one request at a time.

    Works on the socket itself: trio's streams pass through the scheduler on every call, which on this path costs more
    than the call.
    """

    def __init__(self, sock: socket.socket) -> None:
        """`sock` is connected and non-blocking; owned from here on."""
        self._socket = sock
        self._decoder = FrameDecoder(FROM_RUNNER, max_body_bytes=MAX_FRAME_BYTES)
        self._receive_bytes = _FIRST_RECEIVE_BYTES
        self._steps_in_a_row = 0
        self.is_idle = True
        self._is_roomy = False
        self._senders = 0
        """Tasks that send a frame or wait for `_send_lock`."""
        self._frame_rest = b""
        """The unsent end of a frame, which goes out before any other frame: the socket took only the beginning, or the
        sender was cancelled."""
        self._patience: trio.CancelScope | None = None
        self._send_lock = trio.Lock()

    async def send_request(
        self, request: Any, *, fd: int | None = None
    ) -> None:  # a member of runner.wire.protocol.REQUESTS
        """Start a request; the connection is busy until its final frame was received. `fd` rides along and stays the
        caller's."""
        self.is_idle = False
        await trio.lowlevel.checkpoint_if_cancelled()
        await self._send_frame(Kind.REQUEST, REQUESTS.encode(request), fd)

    async def send_piece(self, kind: Kind, body: bytes | memoryview, *, within_s: float) -> bool:
        """Send one frame as `send`, without a turn of the event loop if the socket takes it at once. Return whether it
        was sent in time."""
        return await self._send_frame(kind, body, within_s=within_s)

    async def send(self, kind: Kind, body: bytes = b"") -> None:
        """Send one frame, whole, also beside other sending tasks. Raises `RunnerLost` when PID 1 is gone.

        A call that is cancelled in the middle of a frame keeps the rest, which goes out before the next frame.
        """
        await trio.lowlevel.checkpoint()
        await self._send_frame(kind, body)

    def make_room(self) -> None:
        """Let the socket hold a whole frame of a file, if the machine lets everybody have that (net.core.wmem_max)."""
        if not self._is_roomy:
            self._is_roomy = True
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_FRAME_BYTES)

    @property
    def has_arrived(self) -> bool:
        """Whether something was received that is not handed out, or PID 1 has closed the connection."""
        if self._decoder.buffered_bytes:
            return True
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    @property
    def is_sending(self) -> bool:
        """Whether a frame is half sent, or a task sends one or waits for its turn."""
        return self._senders > 0 or bool(self._frame_rest)

    def spend_if_sending(self) -> None:
        """Make the connection unfit for another request if a frame is half sent or waits to be sent."""
        if self.is_sending:
            self.is_idle = False

    def wait_until(self, deadline: float) -> None:
        """Replace the deadline of the task that waits for a frame."""
        if self._patience is not None:
            self._patience.deadline = deadline

    def hasten(self, deadline: float) -> None:
        """Bring the deadline of the task that waits for a frame forward."""
        if self._patience is not None:
            self._patience.deadline = min(self._patience.deadline, deadline)

    async def receive(self, *, deadline: float = math.inf) -> Frame:
        """Return the next frame; REPLY and ERROR make the connection idle again.

        Raises:
            RunnerLost: PID 1 closed the connection, has ended, or sent nothing until `deadline`.
            RunnerProtocolError: PID 1 sent bytes that are no frame of the contract.
        """
        while True:
            if self._steps_in_a_row >= _STEPS_PER_TURN:
                self._steps_in_a_row = 0
                await trio.lowlevel.checkpoint()
            try:
                kind, body = next(self._decoder)
                self._steps_in_a_row += 1
            except StopIteration:
                self._decoder.feed(await self._receive_some(deadline))
                continue
            except ProtocolError as error:
                raise RunnerProtocolError(str(error)) from None
            if kind in (Kind.REPLY, Kind.ERROR):
                self.is_idle = True
            return kind, body

    async def receive_answer(self, *, deadline: float = math.inf) -> Any:  # a member of runner.wire.protocol.ANSWERS
        """Return the message of the next frame, which must carry one; `Error` messages are returned, too."""
        kind, body = await self.receive(deadline=deadline)
        if kind not in (Kind.STARTED, Kind.REPLY, Kind.ERROR, Kind.EVENT):
            raise RunnerProtocolError(f"unexpected {kind.name} frame")
        return decode_answer(kind, body)

    def close(self) -> None:
        """Close at once; the request is cancelled in the sandbox, or its run kept there. A waiting task gets
        `RunnerLost`.
        """
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()

    async def _send_frame(
        self, kind: Kind, body: bytes | memoryview, fd: int | None = None, within_s: float = math.inf
    ) -> bool:
        """Send a frame, and return whether it was sent within `within_s`. Mostly the socket takes the whole frame at
        once, and neither the lock nor a switch of tasks is needed."""
        parts = encode_header(kind, len(body)), body
        sent_bytes = 0
        if fd is None and not self.is_sending:
            try:
                sent_bytes = self._socket.sendmsg(parts)
            except BlockingIOError:
                pass
            except _CLOSED as error:
                raise _lost() from error
            if sent_bytes == HEADER_BYTES + len(body):
                return True
        frame = b"".join(parts)
        if sent_bytes:
            self._frame_rest, frame = frame[sent_bytes:], b""  # so that no frame of another task gets in between
        with trio.move_on_after(within_s) as scope:
            await self._send_in_turn(frame, fd)
        return not scope.cancelled_caught

    async def _send_in_turn(self, frame: bytes, fd: int | None = None) -> None:
        """Send the rest of a half-sent frame, and then this frame."""
        self._senders += 1
        try:
            async with self._send_lock:
                frame = self._frame_rest + frame
                sent_bytes = 0 if fd is None else await self._send_first(frame, fd)
                await self._send_all(memoryview(frame)[sent_bytes:])
        finally:
            self._senders -= 1

    async def _send_all(self, data: memoryview) -> None:
        """Send the bytes, which begin with `_frame_rest`. Cancelled, it leaves there the rest of a frame once begun."""
        whole, before = len(data), self._frame_rest
        self._frame_rest = b""
        try:
            while data:
                try:
                    data = data[self._socket.send(data) :]
                    is_full = False
                except BlockingIOError:
                    is_full = True
                if is_full:
                    await trio.lowlevel.wait_writable(self._socket)
        except _CLOSED as error:
            raise _lost() from error
        except trio.Cancelled:
            self._frame_rest = bytes(data) if len(data) < whole else before
            raise

    async def _send_first(self, data: bytes, fd: int) -> int:
        """Send at least one byte, and with it the descriptor; return the number of bytes sent."""
        try:
            while True:
                try:
                    return socket.send_fds(self._socket, [data], [fd])
                except BlockingIOError:
                    pass
                await trio.lowlevel.wait_writable(self._socket)
        except _CLOSED as error:
            raise _lost() from error

    async def _receive_some(self, deadline: float) -> bytes:
        """Return received bytes, waiting for the first if need be."""
        try:
            data = self._receive_nowait()
            if data is None:
                with trio.CancelScope(deadline=deadline) as self._patience:
                    await trio.lowlevel.wait_readable(self._socket)
                self._patience = None
                self._steps_in_a_row = 0
                data = self._receive_nowait()
            else:
                self._steps_in_a_row += _STEPS_OF_A_READ
                await trio.lowlevel.checkpoint_if_cancelled()
        except _CLOSED as error:
            raise _lost() from error
        if data is None:  # starved, or frozen: late is not hostile
            raise RunnerLost("the sandbox's init did not answer in time")
        if not data:
            raise _lost()
        if len(data) == self._receive_bytes:
            self._receive_bytes = _BULK_RECEIVE_BYTES
        return data

    def _receive_nowait(self) -> bytes | None:
        try:
            return self._socket.recv(self._receive_bytes)
        except BlockingIOError:
            return None


_CLOSED = (OSError, ValueError, trio.ClosedResourceError)
"""Errors of a socket that either side has closed. ValueError: the descriptor is closed."""


def _lost() -> RunnerLost:
    return RunnerLost("the sandbox closed the connection")


def check_piece(body: bytes, what: str) -> None:
    """Refuse an empty piece of output or of a file, which no runner sends. Raises `RunnerProtocolError`."""
    if not body:
        raise RunnerProtocolError(f"an empty piece of {what}")


def decode_answer(kind: Kind, body: bytes) -> Any:  # a member of runner.wire.protocol.ANSWERS
    """Return the message in the body of a STARTED, EVENT, REPLY or ERROR frame. Raises `RunnerProtocolError`."""
    try:
        message = ANSWERS.decode(body)
    except ProtocolError as error:
        raise RunnerProtocolError(str(error)) from None
    if isinstance(message, Error) is not (kind is Kind.ERROR):
        raise RunnerProtocolError(f"{type(message).__name__} in an {kind.name} frame")
    _check_message(message)
    return message


def _check_message(message: Any) -> None:  # a dataclass of runner.wire.protocol
    """Refuse values that JSON allows and no code here expects: huge numbers, surrogates that escape no byte."""
    for value in field_values(message):
        kind = type(value)  # most are small: to call a function costs more than the check
        if value is None or kind is bool or (kind is int and -_MAX_NUMBER <= value <= _MAX_NUMBER):
            continue
        if kind is str and len(value) <= _MAX_TEXT_BYTES and value.isascii():
            continue
        for each in value if isinstance(value, tuple) else (value,):
            _check_value(each)


def _check_value(value: Any) -> None:  # of a field, or of a list in one
    if isinstance(value, int):
        if abs(value) > _MAX_NUMBER:
            raise RunnerProtocolError("a number out of range")
    elif isinstance(value, str):
        _check_text(value)
    elif dataclasses.is_dataclass(value):
        _check_message(value)


def _check_text(text: str) -> None:
    try:
        size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        raise RunnerProtocolError("a string that is no text") from None
    if size > _MAX_TEXT_BYTES:
        raise RunnerProtocolError("a string that is too long")


class Pool(enum.Enum):
    """Connections by what they carry: requests for files without a `user`, or all others. `NONE`: one of its own, for a
    single request."""

    REQUESTS = enum.auto()
    FILES = enum.auto()
    NONE = enum.auto()


class Loan:
    """The context in which a connection is lent. A generator would cost ten times the calls, with each command."""

    __slots__ = ("_connection", "_link", "_pool")

    def __init__(self, link: RunnerLink, pool: Pool) -> None:
        self._link, self._pool = link, pool

    async def __aenter__(self) -> RunnerConnection:
        self._connection = await self._link.take(self._pool)
        return self._connection

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None and (not isinstance(error, SandkastenError) or isinstance(error, RunnerProtocolError)):
            self._connection.is_idle = False
        self._link.give_back(self._connection, self._pool)


class RunnerLink:
    """All connections to one sandbox. `close` ends them. `version`: of the protocol that PID 1 speaks."""

    def __init__(self, run_dir: Path) -> None:
        self.version = PROTOCOL_VERSION
        self._dir_fd = os.open(run_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._idle: dict[Pool, list[RunnerConnection]] = {pool: [] for pool in Pool}
        self._busy: set[RunnerConnection] = set()
        self._closed = False

    def note_version(self, version: int) -> None:
        """Know which protocol PID 1 said that it speaks."""
        self.version = version

    @property
    def connections(self) -> dict[str, int]:
        """Number of connections that are idle, and that carry a request."""
        return {"connections_idle": sum(map(len, self._idle.values())), "connections_busy": len(self._busy)}

    def connection(self, pool: Pool = Pool.REQUESTS) -> Loan:
        """Lend a connection for one request. Entering raises `RunnerLost` when the sandbox accepts none.

        It is kept for the next request when the final frame has come, which may be a refusal, and nothing is half sent.
        """
        return Loan(self, pool)

    async def take(self, pool: Pool) -> RunnerConnection:
        """Lend a connection until `give_back`."""
        connection = self._take_idle(pool) or await self._connect()
        if pool is not Pool.REQUESTS:
            connection.make_room()
        self._busy.add(connection)
        return connection

    def give_back(self, connection: RunnerConnection, pool: Pool) -> None:
        """Keep a connection that was lent, or close it."""
        connection.spend_if_sending()
        self._busy.discard(connection)
        idle = self._idle[pool]
        if connection.is_idle and not self._closed and pool is not Pool.NONE and len(idle) < _MAX_IDLE:
            idle.append(connection)
        else:
            connection.close()

    def _take_idle(self, pool: Pool) -> RunnerConnection | None:
        """Return an idle connection. Any may become one for files, and not the other way round."""
        idle = self._idle[pool]
        if pool is Pool.FILES:
            while idle and idle[-1].has_arrived:  # its file worker was killed
                idle.pop().close()
            idle = idle or self._idle[Pool.REQUESTS]
        return idle.pop() if idle else None

    def close(self) -> None:
        """Close every connection; requests still running end with `RunnerLost`."""
        if not self._closed:
            self._closed = True
            os.close(self._dir_fd)
            for connection in (*itertools.chain(*self._idle.values()), *self._busy):
                connection.close()
            self._idle = {pool: [] for pool in Pool}

    async def _connect(self) -> RunnerConnection:
        give_up_at = trio.current_time() + _CONNECT_PATIENCE_S
        while True:
            if self._closed:
                raise RunnerLost("the session has ended")
            try:
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            except OSError as error:  # EMFILE
                raise Capacity(f"no descriptor to be had: {os.strerror(error.errno or 0)}") from error
            try:
                # unix(7): a socket address has 108 bytes, which a path through a descriptor never fills.
                sock.connect(f"/proc/self/fd/{self._dir_fd}/{RUNNER_SOCKET}")
            except OSError as error:
                sock.close()
                if error.errno != errno.EAGAIN or trio.current_time() > give_up_at:  # EAGAIN: its backlog is full
                    raise RunnerLost("the sandbox accepts no connection") from error
                await trio.sleep(_CONNECT_PAUSE_S)
            else:
                return RunnerConnection(sock)
