"""Connections: frames in, one request at a time, frames out, each behind a wall of its own.

An error of a peer costs that peer its connection, never the loop. One descriptor may come with a request's frame; any
other is closed as it arrives. The meaning of requests is the business of the `Dispatch` function.

Sources: unix(7) (SO_PEERCRED: a peer of another pid namespace has pid 0 here; SCM_RIGHTS: what is received at once ends
with the data that descriptors came with).
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from runner.loop.config import MAX_CONNECTIONS, OUT_BUFFER_BYTES
from runner.loop.context import Caller, Context, Descriptor, Job
from runner.loop.loop import HANG_UP, READ, WRITE, EventLoop, Timer
from runner.wire.protocol import (
    ANSWERS,
    CHUNK_BYTES,
    FROM_DAEMON,
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    MAX_REQUEST_BYTES,
    REQUESTS,
    Error,
    FrameDecoder,
    Kind,
    ProtocolError,
    encode_header,
)

_PEER_CREDENTIALS = struct.Struct("3i")
_INT_BYTES = struct.calcsize("i")
_ANCILLARY_BYTES = socket.CMSG_SPACE(_INT_BYTES)
"""Room for one descriptor, or two, for alignment; the kernel closes what does not fit."""
_ACCEPTS_PER_TURN = 16
_PARTS_PER_CALL = 64
_STARTED_DELAY_S = 0.001
"""STARTED waits this long for more frames: a short command is then answered in one piece."""


Dispatch = Callable[[Any, Caller, Descriptor], Job | None]
"""Begin a decoded request; return its job, or None when the request is answered already. A descriptor that is not
taken by then is closed."""


class Connection:
    """One peer. Implements `Caller` for the request it carries."""

    def __init__(
        self, loop: EventLoop, sock: socket.socket, dispatch: Dispatch, on_closed: Callable[[Connection], None]
    ):
        self._loop = loop
        self._socket = sock
        self._dispatch = dispatch
        self._on_closed = on_closed
        self._decoder = FrameDecoder(FROM_DAEMON, max_body_bytes=MAX_REQUEST_BYTES)
        self._job: Job | None = None
        self._descriptor = Descriptor()
        self._is_busy = False
        self._is_closed = False
        self._out: deque[bytes] = deque()
        self._out_bytes = 0
        self._was_full = False
        self._is_blocked = False
        self._is_flush_due = False
        self._flush_timer = Timer(0.0, self._flush, self._on_error)
        self._events = READ
        loop.watch(sock.fileno(), READ | HANG_UP, self._on_event, self._on_error)

    # Sink ----------------------------------------------------------------------------------------------------------

    def send(self, kind: Kind, body: bytes) -> None:
        if self._is_closed:
            return
        self._out += (encode_header(kind, len(body)), body)
        self._out_bytes += HEADER_BYTES + len(body)
        self._was_full = self._was_full or self.is_full
        if kind is Kind.STARTED:
            self._flush_timer = self._loop.call_later(_STARTED_DELAY_S, self._flush, self._on_error)
        elif not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush, self._on_error)

    def start(self, message: object) -> None:
        self.send(Kind.STARTED, ANSWERS.encode(message))

    def finish(self, message: object) -> None:
        kind = Kind.ERROR if isinstance(message, Error) else Kind.REPLY
        self._is_busy, self._job = False, None
        self.send(kind, ANSWERS.encode(message))
        self._loop.call_soon(self._on_frames, self._on_error)  # a peer may have sent its next request already

    def refresh_input(self) -> None:
        if not self._is_closed:
            self._update_events()

    # Caller --------------------------------------------------------------------------------------------------------

    def hand_over(self) -> tuple[int, bytes]:
        return self._socket.fileno(), self._decoder.take_rest()

    def take_back(self) -> None:
        if not self._is_closed:
            self._socket.setblocking(False)  # a mode of the open socket, which the other process has changed
            self._is_busy, self._job = False, None
            self._update_events()

    @property
    def piece_bytes(self) -> int:
        return MAX_FRAME_BYTES

    @property
    def is_full(self) -> bool:
        return self._out_bytes >= OUT_BUFFER_BYTES

    # Events --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close and cancel what runs."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.unwatch(self._socket.fileno())
        self._socket.close()
        self._descriptor.close()
        self._out.clear()
        job, self._job = self._job, None
        self._on_closed(self)
        if job is not None:
            job.on_close()

    def _on_event(self, events: int) -> None:
        if events & WRITE:
            self._flush()
        if events & READ and not self._is_closed:
            self._receive()
        elif events & HANG_UP:
            self.close()

    def _receive(self) -> None:
        ancillary: list[tuple[int, int, bytes]] = []
        try:
            data, ancillary, _flags, _address = self._socket.recvmsg(
                CHUNK_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if ancillary:
            self._take_descriptors(ancillary)
        if not data:
            self.close()
            return
        self._decoder.feed(data)
        self._on_frames()

    def _take_descriptors(self, ancillary: Iterable[tuple[int, int, bytes]]) -> None:
        """Keep the first descriptor for the request whose frame is about to be complete; close all others."""
        received: list[int] = []
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                received += struct.unpack_from(f"{len(content) // _INT_BYTES}i", content)
        for fd in reversed(received):
            self._descriptor.close()
            self._descriptor = Descriptor(fd)

    def _on_frames(self) -> None:
        if self._is_closed:
            return
        try:
            for kind, body in self._decoder:
                self._on_frame(kind, body)
                if self._is_closed:
                    return
        except ProtocolError:
            self.close()
            return
        if not self._decoder.buffered_bytes:
            self._descriptor.close()  # came with a frame that was no request
        self._update_events()

    def _on_frame(self, kind: Kind, body: bytes) -> None:
        if kind is Kind.REQUEST:
            self._on_request(body)
        elif self._job is None:
            return  # meant for a request that ended meanwhile
        elif kind is Kind.DATA:
            self._job.on_data(body)
        elif kind is Kind.END:
            self._job.on_end()
        else:
            self._job.on_cancel()

    def _on_request(self, body: bytes) -> None:
        if self._is_busy:
            raise ProtocolError("a request while another one runs")
        request = REQUESTS.decode(body)
        self._is_busy = True
        descriptor, self._descriptor = self._descriptor, Descriptor()
        try:
            job = self._dispatch(request, self, descriptor)
        finally:
            descriptor.close()
        if self._is_busy:
            self._job = job

    def _on_error(self, _error: Exception) -> None:
        self.close()

    # Output --------------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Send as much as fits. The output of one turn of the loop goes in one call, so that the peer wakes up once."""
        self._is_flush_due = False
        self._flush_timer.cancel()
        self._is_blocked = False
        while self._out and not self._is_closed:
            sent = self._send_some()
            if sent == 0:
                self._is_blocked = True
                break
            self._out_bytes -= sent
            while self._out and sent >= len(self._out[0]):
                sent -= len(self._out.popleft())
            if sent:
                self._out[0] = self._out[0][sent:]
        self._update_events()
        if self._was_full and self._out_bytes <= OUT_BUFFER_BYTES // 2:
            self._was_full = False
            if self._job is not None:
                self._job.on_drained()

    def _send_some(self) -> int:
        try:
            return self._socket.sendmsg(islice(self._out, _PARTS_PER_CALL))
        except BlockingIOError:
            return 0
        except OSError:  # the peer is gone; its hang-up event closes the connection
            return self._out_bytes

    def _update_events(self) -> None:
        wants_input = self._job is None or self._job.wants_input
        events = (READ if wants_input else 0) | (WRITE if self._is_blocked else 0)
        if events != self._events and not self._is_closed:
            self._events = events
            self._loop.change(self._socket.fileno(), events | HANG_UP)


class RunnerServer:
    """Accepts connections on a listening socket."""

    def __init__(self, context: Context, listener_fd: int, dispatch: Dispatch) -> None:
        self._config = context.config
        self._loop = context.loop
        self._dispatch = dispatch
        self._listener = socket.socket(fileno=listener_fd)
        self._listener.setblocking(False)
        self._connections: set[Connection] = set()
        self._loop.watch(listener_fd, READ, self._on_readable, lambda _error: None)

    def _on_readable(self, _events: int) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                sock, _address = self._listener.accept()
            except OSError:  # nobody left to accept, or one that left already
                return
            sock.setblocking(False)
            if len(self._connections) >= MAX_CONNECTIONS or not self._is_welcome(sock):
                sock.close()
                continue
            self._connections.add(Connection(self._loop, sock, self._dispatch, self._connections.discard))

    def _is_welcome(self, sock: socket.socket) -> bool:
        if not self._config.outside_peers_only:
            return True
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        return bool(_PEER_CREDENTIALS.unpack(credentials)[0] == 0)
