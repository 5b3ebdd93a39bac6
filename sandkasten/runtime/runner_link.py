"""The daemon's end of the connections to one sandbox's PID 1: `runner.protocol` on trio.

Owns a directory descriptor (so that a long data directory never meets the 108-byte limit of socket addresses) and a
few idle connections. One request runs on one connection at a time; a connection whose request did not end cleanly is
closed, which cancels the request in the sandbox. Every byte received is hostile: anything that is no message of the
contract raises `RunnerProtocolError` and the caller ends the session.

Sources: unix(7), proc(5) on /proc/self/fd.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from runner.protocol import (
    ANSWERS,
    CHUNK_BYTES,
    FROM_RUNNER,
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    REQUESTS,
    Error,
    Frame,
    FrameDecoder,
    Kind,
    ProtocolError,
    encode_frame,
)
from sandkasten.errors import RunnerLost, RunnerProtocolError
from sandkasten.runtime.paths import RUNNER_SOCKET

_MAX_IDLE = 4
_RECEIVE_BYTES = 4 * (CHUNK_BYTES + HEADER_BYTES)
_CONNECT_PAUSE_S = 0.002


class RunnerConnection:
    """One connection to PID 1; carries one request at a time."""

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self._stream = trio.SocketStream(sock)
        self._decoder = FrameDecoder(FROM_RUNNER, max_body_bytes=MAX_FRAME_BYTES)
        self.is_idle = True
        self.is_sending = False
        self._send_lock = trio.Lock()

    async def send_request(self, request: Any) -> None:  # a member of runner.protocol.REQUESTS
        """Start a request; the connection is busy until its final frame was received."""
        self.is_idle = False
        await self.send(Kind.REQUEST, REQUESTS.encode(request))

    async def send(self, kind: Kind, body: bytes = b"") -> None:
        """Send one frame, whole, whichever task it comes from. Raises `RunnerLost` when PID 1 is gone.

        Cancelled in the middle of a frame it leaves `is_sending` true: the connection is of no further use.
        """
        async with self._send_lock:
            self.is_sending = True
            try:
                await self._stream.send_all(encode_frame(kind, body))
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise RunnerLost("the sandbox closed the connection") from error
            self.is_sending = False

    async def receive(self) -> Frame:
        """Return the next frame; REPLY and ERROR make the connection idle again.

        Raises:
            RunnerLost: PID 1 closed the connection, or is gone.
            RunnerProtocolError: it sent something that is no frame of the contract.
        """
        while True:
            try:
                kind, body = next(self._decoder)
            except StopIteration:
                await self._fill()
                continue
            except ProtocolError as error:
                raise RunnerProtocolError(str(error)) from None
            if kind in (Kind.REPLY, Kind.ERROR):
                self.is_idle = True
            return kind, body

    async def receive_answer(self) -> Any:  # a member of runner.protocol.ANSWERS
        """Return the message of the next frame, which must carry one; `Error` messages are returned, too."""
        kind, body = await self.receive()
        if kind not in (Kind.STARTED, Kind.REPLY, Kind.ERROR):
            raise RunnerProtocolError(f"unexpected {kind.name} frame")
        return decode_answer(kind, body)

    def close(self) -> None:
        """Close at once; what runs on it is cancelled in the sandbox."""
        self._stream.socket.close()

    async def _fill(self) -> None:
        try:
            data = await self._stream.receive_some(_RECEIVE_BYTES)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise RunnerLost("the sandbox closed the connection") from error
        if not data:
            raise RunnerLost("the sandbox closed the connection")
        self._decoder.feed(data)


def decode_answer(kind: Kind, body: bytes) -> Any:  # a member of runner.protocol.ANSWERS
    """Return the message in the body of a STARTED, REPLY or ERROR frame. Raises `RunnerProtocolError`."""
    try:
        message = ANSWERS.decode(body)
    except ProtocolError as error:
        raise RunnerProtocolError(str(error)) from None
    if isinstance(message, Error) is not (kind is Kind.ERROR):
        raise RunnerProtocolError(f"{type(message).__name__} in an {kind.name} frame")
    return message


class RunnerLink:
    """All connections to one sandbox. `close` ends them."""

    def __init__(self, run_dir: Path) -> None:
        self._dir_fd = os.open(run_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._idle: list[RunnerConnection] = []
        self._busy: set[RunnerConnection] = set()
        self._closed = False

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[RunnerConnection]:
        """Lend a connection for one request. Raises `RunnerLost` when the sandbox accepts none."""
        connection = self._idle.pop() if self._idle else await self._connect()
        self._busy.add(connection)
        try:
            yield connection
        except BaseException:
            connection.is_idle = False
            raise
        finally:
            self._busy.discard(connection)
            if connection.is_idle and not self._closed and len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
            else:
                connection.close()

    def close(self) -> None:
        """Close every connection; requests still running end with `RunnerLost`."""
        if not self._closed:
            self._closed = True
            os.close(self._dir_fd)
            for connection in (*self._idle, *self._busy):
                connection.close()
            self._idle.clear()

    async def _connect(self) -> RunnerConnection:
        while True:
            if self._closed:
                raise RunnerLost("the session has ended")
            sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                await sock.connect(f"/proc/self/fd/{self._dir_fd}/{RUNNER_SOCKET}")
            except OSError as error:
                sock.close()
                if error.errno != errno.EAGAIN:  # its backlog is full for the moment
                    raise RunnerLost("the sandbox accepts no connection") from error
                await trio.sleep(_CONNECT_PAUSE_S)
            except BaseException:
                sock.close()
                raise
            else:
                return RunnerConnection(sock)
