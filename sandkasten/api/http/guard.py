"""One HTTP request between hypercorn's HTTP/1 protocol and an ASGI application.

In place of hypercorn's own `HTTPStream`, whose send returns without a checkpoint once the client is gone, so that a
loop of sends would freeze the event loop; whose queue of a few pieces makes an application that answers without reading
wait for itself; and which reports `http.disconnect` after each complete answer, on which quart-trio cancels itself.
Here every send of a piece is a checkpoint and raises once the connection is over, the unread rest of a body is dropped,
and `receive` stays silent after the final part of the answer. The end of an HTTP client's side alone does not end the
connection: a handler that is soon done still answers. A handler that waits is told by the connection's `Leave`
(`Exchange.until_disconnect`), and by `http.disconnect`.

What the application says at a time goes out in one write: the head of an answer of known length with its body, and the
last piece of a body with its end. Looks at no route and no key.

Source: asgi.readthedocs.io, "HTTP".
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import unquote

import h11
import trio
from hypercorn.events import RawData
from hypercorn.protocol.events import Body, EndBody, Event, Request, StreamClosed
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol
from hypercorn.typing import H11SendableEvent
from hypercorn.utils import suppress_body

from sandkasten.api.http.connection import ClientGone, GuardedStream

log = logging.getLogger(__name__)

# ASGI scopes and messages are dicts of mixed values by specification (asgi.readthedocs.io, "Applications").
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


LEAVE_KEY = "sandkasten.leave"
"""Where the scope of a request has the `Leave` of its connection."""

HAS_ARRIVED_KEY = "sandkasten.has_arrived"
"""Where the scope of an HTTP request has a function that tells whether `receive` would return without waiting."""

_WAITING_PIECES = 10
"""Pieces of a body that wait for the application. Behind them the socket is not read, so the client's writes wait."""

NO_ANSWER = [(b"content-length", b"0"), (b"connection", b"close")]
"""The headers of an answer for an application that ended without one."""


class RequestStream:
    """The `H11Protocol.stream` of an HTTP request that is no upgrade."""

    def __init__(self, protocol: H11Protocol, transport: GuardedStream, app: App) -> None:
        self._protocol, self._transport, self._app = protocol, transport, app
        self._pieces: deque[bytes] = deque()
        self._readers = trio.lowlevel.ParkingLot()
        self._room = trio.lowlevel.ParkingLot()
        self._is_whole = self._is_read = False
        """Whether the request's body has come to its end, and whether the application has heard of that."""
        self._is_answered = self._is_over = False
        self._has_no_body = False
        self._method = ""
        self._held: list[H11SendableEvent] = []
        """The head of an answer of known length, which goes out with what follows it."""

    # What the connection tells ----------------------------------------------------------------------------------

    async def handle(self, event: Event) -> None:
        """Take an event of the HTTP/1 connection."""
        if isinstance(event, Request):
            self._method = event.method
            self._protocol.task_group.spawn(self._serve, self._make_scope(event))
            return
        if isinstance(event, Body):
            while len(self._pieces) >= _WAITING_PIECES and not (self._is_answered or self._is_over):
                await self._room.park()
            if not self._is_answered:
                self._pieces.append(bytes(event.data))
        elif isinstance(event, EndBody):
            self._is_whole = True
        elif isinstance(event, StreamClosed):
            self._is_over = True
        self._wake()

    def _wake(self) -> None:
        """Have who waits look again."""
        for waiting in self._readers, self._room:
            if waiting:
                waiting.unpark_all()

    def _make_scope(self, event: Request) -> Scope:
        return shared_scope(self._protocol, event) | {
            "type": "http",
            "asgi": {"spec_version": "2.1", "version": "3.0"},
            "scheme": "http",
            "method": event.method,
            "extensions": {},
            HAS_ARRIVED_KEY: self._has_arrived,
        }

    # What the application gets ----------------------------------------------------------------------------------

    async def _serve(self, scope: Scope) -> None:
        """Have the application answer, and answer in its place if it does not."""
        try:
            await serve_guarded(self._app, self._transport, scope, self._receive, self._send)
        except Exception:
            log.exception("a handler failed")
        if self._is_over or self._transport.is_broken:
            return
        if self._protocol.connection.our_state is h11.SEND_RESPONSE and not self._held:
            await self._send({"type": "http.response.start", "status": 500, "headers": NO_ANSWER})
            await self._send({"type": "http.response.body"})
        else:
            await self._flush()
            await self._protocol.stream_send(StreamClosed(stream_id=STREAM_ID))

    def _has_arrived(self) -> bool:
        """Whether a piece of the body, or its end, is there."""
        return bool(self._pieces) or self._is_whole

    async def _receive(self) -> Message:
        await trio.lowlevel.checkpoint_if_cancelled()
        while self._is_answered or not (self._pieces or self._is_over or self._is_whole is not self._is_read):
            await self._readers.park()
        if not self._pieces and self._is_whole is self._is_read:
            await trio.lowlevel.checkpoint()
            return {"type": "http.disconnect"}
        piece = self._pieces.popleft() if self._pieces else b""
        self._wake()
        self._is_read = self._is_whole and not self._pieces
        if not self._is_read:
            await trio.lowlevel.checkpoint()  # a body may come faster than others get their turns
        return {"type": "http.request", "body": piece, "more_body": not self._is_read}

    # What the application says ----------------------------------------------------------------------------------

    async def _send(self, message: Message) -> None:
        """Carry out ASGI's `send`. Raises `ClientGone` when the connection is over."""
        if self._transport.is_broken:
            await trio.lowlevel.checkpoint()
            raise ClientGone
        if message["type"] == "http.response.start":
            # Stripped: h11 refuses a value with space around it, as a list is that begins or ends with an empty name.
            headers = [(name, value.strip()) for name, value in message["headers"]]
            headers += self._protocol.config.response_headers("h11")
            self._held.append(h11.Response(status_code=int(message["status"]), headers=headers))
            self._has_no_body = suppress_body(self._method, int(message["status"]))
            if not any(name == b"content-length" for name, _ in headers):
                await self._flush()
            return
        if (body := message.get("body", b"")) and not self._has_no_body:
            self._held.append(h11.Data(data=bytes(body)))
        if message.get("more_body", False):
            await self._flush()
            await trio.lowlevel.checkpoint()
            return
        self._is_answered = True
        self._transport.has_unread_body = not self._is_whole
        self._wake()
        self._held.append(h11.EndOfMessage())
        await self._flush()
        await self._protocol.stream_send(StreamClosed(stream_id=STREAM_ID))

    async def _flush(self) -> None:
        """Send what is held, in one write."""
        events, self._held = self._held, []
        connection = self._protocol.connection
        try:
            data = b"".join(connection.send(event) or b"" for event in events)
        except h11.LocalProtocolError:
            if connection.their_state is not h11.ERROR:
                raise
            return  # the client went on with bytes that are no HTTP, and was told so
        if data:
            await self._protocol.send(RawData(data=data))


def shared_scope(protocol: H11Protocol, event: Request) -> dict[str, Any]:
    """Return what the scope of a request and that of a WebSocket have in common."""
    path, _, query_string = event.raw_path.partition(b"?")
    return {
        "http_version": event.http_version,
        "path": unquote(path.decode("ascii")),
        "raw_path": path,
        "query_string": query_string,
        "root_path": "",
        "headers": event.headers,
        "client": protocol.client,
        "server": protocol.server,
        "state": event.state.copy(),
    }


async def serve_guarded(app: App, transport: GuardedStream, scope: Scope, receive: Receive, send: Send) -> None:
    """Have `app` serve a request or WebSocket while its connection counts as busy. The client's leaving is no error."""
    transport.has_unread_body = False
    scope[LEAVE_KEY] = transport.leave
    try:
        transport.begin_serving()
        await app(scope, receive, send)
    except* ClientGone:
        pass
    finally:
        transport.end_serving()


def has_body(scope: Scope) -> bool:
    """Return whether the request's head announces a body (RFC 9112 §6)."""
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0"))
        for name, value in scope["headers"]
    )
