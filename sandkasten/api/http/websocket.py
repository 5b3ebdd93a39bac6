"""One WebSocket connection between hypercorn's HTTP/1 protocol and an ASGI application, on wsproto.

In place of hypercorn's own `WSStream`, which accepts permessage-deflate unasked (a message of 1 MB may then cost
1 GiB), tells an application nothing of a message that was too large, never looks for pongs, and blocks for ever on the
inbox of an application that has ended. Here no extension is ever agreed on, the inbox is bounded and the reader waits
for room in it, and each way to end reaches both sides: the peer as a close frame, the application as
`websocket.disconnect`. Knows no route and no key.

Parsing frames costs far more than sending them, so frames are parsed a few at a time, and parts without bytes, pings
and pongs are bounded. Frames of a server are not masked: a frame is a short head and the payload, and several frames go
out in one write.

Beyond ASGI's messages the application may send `{"type": "websocket.send", "frames": bytes}`, frames of `encode_frame`
that are written at once, and in `websocket.accept` `first_message_bytes`, within which the first message must be
complete. `scope["state"]["stopping"]`, if present, is the event on which the connection is closed with 1001.

Sources: RFC 6455 §5.2 (framing), §5.4 (parts), §5.5 (control frames), §7 (closing, codes), §10.4 (limits);
asgi.readthedocs.io, "WebSocket".
"""

from __future__ import annotations

import enum
import io
import logging
import math
import struct
from collections import deque
from typing import Any

import trio
from hypercorn.events import RawData
from hypercorn.protocol.events import Body, Data, EndBody, Event, Request, Response, StreamClosed
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol
from hypercorn.protocol.ws_stream import Handshake
from wsproto import events as ws
from wsproto.connection import Connection, ConnectionState

from sandkasten.api.http.connection import ClientGone, GuardedStream
from sandkasten.api.http.guard import NO_ANSWER, App, Message, Scope, serve_guarded, shared_scope

MAX_REASON_BYTES = 123

_FIN = 0x80
_SHORT = struct.Struct("!BB")
_MIDDLE = struct.Struct("!BBH")
_LONG = struct.Struct("!BBQ")


class Opcode(enum.IntEnum):
    """The kind of a message (RFC 6455 §5.2)."""

    TEXT = 0x1
    BINARY = 0x2


class CloseCode(enum.IntEnum):
    """The code of a close: one of the RFC, or 4000 plus the HTTP status of the same refusal."""

    NORMAL = 1000
    GOING_AWAY = 1001
    PROTOCOL_ERROR = 1002
    ABNORMAL = 1006
    INVALID_TEXT = 1007
    TOO_BIG = 1009
    INTERNAL_ERROR = 1011
    INVALID = 4400
    UNAUTHORIZED = 4401
    NOT_FOUND = 4404
    SUBPROTOCOL = 4406
    ENDED = 4410
    TOO_MANY = 4429
    CAPACITY = 4503


def encode_frame(opcode: Opcode, payload: bytes) -> bytes:
    """Return a message as one frame."""
    return encode_frame_head(opcode, len(payload)) + payload


def encode_frame_head(opcode: Opcode, length: int) -> bytes:
    """Return the part of a frame that stands before a payload of `length` bytes."""
    if length < 126:
        return _SHORT.pack(_FIN | opcode, length)
    if length < 65536:
        return _MIDDLE.pack(_FIN | opcode, 126, length)
    return _LONG.pack(_FIN | opcode, 127, length)


def cut_reason(reason: str) -> str:
    """Return as much of `reason` as fits into a close frame, without splitting a character."""
    return reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore")


log = logging.getLogger(__name__)

INBOX_MESSAGES = 16
"""Messages that wait for the application. Behind them the socket is not read, so the client's writes wait."""

FRAMES_PER_TURN = 32
"""Frames that are parsed before other tasks get a turn: some 0.3 ms."""

MAX_PARTS = 1024
"""Parts of one message. A message of the largest size still fits in parts of a KiB."""

MAX_CONTROL_FRAMES = 128
"""Pings and pongs of the peer within `CONTROL_S`."""

CONTROL_S = 1.0

GOODBYE_S = 10.0
"""Seconds that a close frame waits behind a write."""

PINGS_UNANSWERED = 6
"""Ping intervals without a byte from the peer after which the peer counts as gone."""


class _State(enum.Enum):
    HANDSHAKE = enum.auto()
    REFUSED = enum.auto()
    OPEN = enum.auto()
    OVER = enum.auto()


class WebSocketStream:
    """The `H11Protocol.stream` of an upgrade whose handshake is valid."""

    def __init__(self, protocol: H11Protocol, transport: GuardedStream, app: App, *, ping_interval_s: float) -> None:
        self._protocol, self._transport, self._app = protocol, transport, app
        self._ping_interval_s = ping_interval_s
        self._max_message_bytes = protocol.config.websocket_max_message_size
        self._state = _State.HANDSHAKE
        self._decided = trio.Event()
        self._handshake: Handshake
        self._connection: Connection
        self._refusal: Message = {}
        self._inbox: deque[Message] = deque()
        self._readers = trio.lowlevel.ParkingLot()
        self._room = trio.lowlevel.ParkingLot()
        self._message: io.StringIO | io.BytesIO | None = None
        """The parts of a message that is not complete."""
        self._message_bytes = 0
        self._message_parts = 0
        self._first_message_bytes: int | None = None
        """Bytes that may still come before the first message is complete; None once that does not matter."""
        self._control_frames = 0
        self._control_since = -math.inf
        self._is_silent = False
        self._is_told = False
        self._parted = trio.Event()
        self._parted.set()
        self._tending = trio.CancelScope()
        self._stopping: trio.Event | None = None

    # What the connection tells ----------------------------------------------------------------------------------

    async def handle(self, event: Event) -> None:
        """Take an event of the HTTP/1 connection."""
        if isinstance(event, Request):
            self._handshake = Handshake(event.headers, event.http_version)
            self._stopping = event.state.get("stopping")
            self._put({"type": "websocket.connect"})
            self._protocol.task_group.spawn(self._run_app, self._make_scope(event))
        elif isinstance(event, Data):
            await self._decided.wait()  # a peer may send at once, and is not heard before it is accepted
            await self._handle_data(event.data)
        elif isinstance(event, StreamClosed):
            self._end()
            self._tell(CloseCode.ABNORMAL)

    async def _handle_data(self, data: bytes) -> None:
        allowed = self._first_message_bytes
        await self._handle_frames(data if allowed is None else data[:allowed])
        if allowed is None or self._state is not _State.OPEN:
            return
        if self._first_message_bytes is None:
            await self._handle_frames(data[allowed:])
        elif len(data) < allowed:
            self._first_message_bytes -= len(data)
        else:
            await self._say_goodbye(CloseCode.TOO_BIG, "the first message is too large")

    async def _handle_frames(self, data: bytes) -> None:
        if self._state is not _State.OPEN or not data:
            return
        self._is_silent = False
        self._connection.receive_data(data)
        for count, event in enumerate(self._connection.events(), start=1):
            await self._handle_frame(event)
            if count % FRAMES_PER_TURN == 0:
                await trio.lowlevel.checkpoint()
            if self._state is not _State.OPEN:
                break

    async def _handle_frame(self, event: ws.Event) -> None:
        if isinstance(event, ws.Message):
            if not self._add(event):
                await self._say_goodbye(CloseCode.TOO_BIG, f"a message is larger than {self._max_message_bytes} bytes")
            elif self._message_parts > MAX_PARTS:
                await self._say_goodbye(CloseCode.TOO_MANY, f"a message has more than {MAX_PARTS} parts")
            elif event.message_finished:
                await self._wait_for_room()
                self._put(self._take_message())
        elif isinstance(event, ws.CloseConnection):
            await self._handle_close(event)
        elif self._is_flooding():
            await self._say_goodbye(CloseCode.TOO_MANY, "too many pings or pongs")
        elif isinstance(event, ws.Ping):
            await self._write(self._connection.send(event.response()))

    def _is_flooding(self) -> bool:
        """Count a control frame, and return whether there were too many."""
        now = trio.current_time()
        if now - self._control_since >= CONTROL_S:
            self._control_since, self._control_frames = now, 0
        self._control_frames += 1
        return self._control_frames > MAX_CONTROL_FRAMES

    def _add(self, event: ws.Message[Any]) -> bool:  # str, bytes or bytearray
        """Keep a part of a message, and return False once the message is too large."""
        size = len(event.data.encode()) if isinstance(event.data, str) else len(event.data)
        self._message_bytes += size
        self._message_parts += event.frame_finished
        if self._message_bytes > self._max_message_bytes:
            return False
        if self._message is None:
            self._message = io.StringIO() if isinstance(event.data, str) else io.BytesIO()
        self._message.write(event.data)
        return True

    def _take_message(self) -> Message:
        message, self._message = self._message, None
        self._message_bytes = self._message_parts = 0
        self._first_message_bytes = None
        text = message.getvalue() if isinstance(message, io.StringIO) else None
        data = message.getvalue() if isinstance(message, io.BytesIO) else None
        return {"type": "websocket.receive", "text": text, "bytes": data}

    async def _handle_close(self, event: ws.CloseConnection) -> None:
        """Handle a close frame of the peer, or bytes that are no WebSocket."""
        if self._connection.state is ConnectionState.REMOTE_CLOSING:
            await self._part(event.response(), event.code)
            await self._protocol.stream_send(StreamClosed(stream_id=STREAM_ID))
        else:
            await self._say_goodbye(event.code, event.reason or "")

    # What the application gets ----------------------------------------------------------------------------------

    def _make_scope(self, event: Request) -> Scope:
        return shared_scope(self._protocol, event) | {
            "type": "websocket",
            "asgi": {"spec_version": "2.3", "version": "3.0"},
            "scheme": "ws",
            "subprotocols": self._handshake.subprotocols or [],
            "extensions": {"websocket.http.response": {}},
        }

    async def _run_app(self, scope: Scope) -> None:
        try:
            await serve_guarded(self._app, self._transport, scope, self._receive, self._send)
        except Exception:
            log.exception("a WebSocket handler failed")
            if self._state is _State.OPEN:
                await self._say_goodbye(CloseCode.INTERNAL_ERROR, "")
        if self._state is _State.HANDSHAKE:
            await self._refuse({"status": 500, "headers": NO_ANSWER}, b"")
        elif self._state is _State.OPEN:
            await self._say_goodbye(CloseCode.NORMAL, "")
        self._end()
        with trio.move_on_after(GOODBYE_S, shield=True):
            await self._parted.wait()
        await self._protocol.stream_send(StreamClosed(stream_id=STREAM_ID))

    def _put(self, message: Message) -> None:
        self._inbox.append(message)
        self._readers.unpark()

    async def _wait_for_room(self) -> None:
        while len(self._inbox) >= INBOX_MESSAGES and self._state is _State.OPEN:
            await self._room.park()

    async def _receive(self) -> Message:
        while not self._inbox:
            await self._readers.park()
        await trio.lowlevel.checkpoint_if_cancelled()
        message = self._inbox.popleft()
        self._room.unpark()
        return message

    def _end(self) -> None:
        """End the connection for this side: nothing is sent or received from now on."""
        self._state = _State.OVER
        self._decided.set()
        self._tending.cancel()
        self._room.unpark_all()

    def _tell(self, code: int) -> None:
        """Tell the application once that the connection is over, behind the messages that came before."""
        if not self._is_told:
            self._is_told = True
            self._put({"type": "websocket.disconnect", "code": int(code)})

    # What the application says ----------------------------------------------------------------------------------

    async def _send(self, message: Message) -> None:
        """Carry out ASGI's `send`. Raises `ClientGone` when the connection is over."""
        kind = message["type"]
        await trio.lowlevel.checkpoint()
        if self._transport.is_broken or self._transport.is_at_eof:
            raise ClientGone
        if self._state is _State.HANDSHAKE:
            if kind == "websocket.accept":
                await self._accept(message)
            elif kind == "websocket.close":
                await self._refuse({"status": 403, "headers": [(b"content-length", b"0")]}, b"")
            elif kind == "websocket.http.response.start":
                self._refusal = message
            elif kind == "websocket.http.response.body":
                await self._refuse(self._refusal, bytes(message.get("body", b"")))
        elif self._state is not _State.OPEN:
            raise ClientGone
        elif kind == "websocket.close":
            await self._say_goodbye(int(message.get("code", CloseCode.NORMAL)), message.get("reason") or "")
        elif (frames := message.get("frames")) is not None:
            await self._write(frames)
        elif (data := message.get("bytes")) is not None:
            await self._write(encode_frame(Opcode.BINARY, bytes(data)))
        else:
            await self._write(encode_frame(Opcode.TEXT, message["text"].encode()))

    async def _accept(self, message: Message) -> None:
        status, headers, self._connection = self._handshake.accept(
            message.get("subprotocol"), message.get("headers", [])
        )
        self._state = _State.OPEN
        self._first_message_bytes = message.get("first_message_bytes")
        await self._protocol.stream_send(Response(stream_id=STREAM_ID, status_code=status, headers=headers))
        self._protocol.task_group.spawn(self._tend)
        self._decided.set()

    async def _refuse(self, start: Message, body: bytes) -> None:
        self._state = _State.REFUSED
        self._transport.has_unread_body = True  # the peer may still send, and nobody will read
        headers = [(bytes(name).lower(), bytes(value)) for name, value in start["headers"]]
        await self._protocol.stream_send(
            Response(stream_id=STREAM_ID, status_code=int(start["status"]), headers=headers)
        )
        await self._protocol.stream_send(Body(stream_id=STREAM_ID, data=body))
        await self._protocol.stream_send(EndBody(stream_id=STREAM_ID))
        self._decided.set()

    async def _say_goodbye(self, code: int, reason: str) -> None:
        """Close from our side."""
        self._transport.has_unread_body = True  # the peer may still send, and nobody will read
        await self._part(ws.CloseConnection(code=code, reason=cut_reason(reason)), code)

    async def _part(self, event: ws.CloseConnection, code: int) -> None:
        """Send the last frame, and only then let the application hear of it: its end closes the socket."""
        frame = self._connection.send(event)
        self._end()
        self._parted = trio.Event()
        with trio.move_on_after(GOODBYE_S, shield=True):  # bounded; what wrote before us has a deadline, too
            await self._write(frame)
        self._parted.set()
        self._tell(code)

    async def _write(self, data: bytes) -> None:
        await self._protocol.send(RawData(data=data))

    # Meanwhile --------------------------------------------------------------------------------------------------

    async def _tend(self) -> None:
        """Ping until the end, give up a silent peer, and say goodbye when the server stops."""
        with self._tending:
            await self._ping_until_stop()
        if self._state is not _State.OPEN:
            return
        if self._stopping is not None and self._stopping.is_set():
            await self._say_goodbye(CloseCode.GOING_AWAY, "the daemon is stopping")
        else:
            self._end()
            self._tell(CloseCode.ABNORMAL)
            await self._protocol.stream_send(StreamClosed(stream_id=STREAM_ID))

    async def _ping_until_stop(self) -> None:
        """Return when the server stops or the peer said nothing for too long."""
        unanswered = 0
        while not await self._is_stopping(self._ping_interval_s):
            unanswered = unanswered + 1 if self._is_silent and not self._inbox else 0
            if unanswered == PINGS_UNANSWERED:
                return
            self._is_silent = True
            await self._write(self._connection.send(ws.Ping()))

    async def _is_stopping(self, wait_s: float) -> bool:
        """Return whether the server began to stop within `wait_s` seconds."""
        with trio.move_on_after(wait_s):
            if self._stopping is None:
                await trio.sleep_forever()
            else:
                await self._stopping.wait()
                return True
        return False
