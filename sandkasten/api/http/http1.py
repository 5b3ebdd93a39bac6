"""hypercorn's HTTP/1 protocol, without HTTP/2, and with the usual error body where hypercorn answers by itself.

hypercorn does so for malformed heads and bodies, without asking an application, and here for broken WebSocket
handshakes as well. Requests are served by `guard.py` and WebSockets by `websocket.py` instead of hypercorn's own code.
Knows no route. tests/api/test_hypercorn_parts.py names the parts that are relied upon.

Sources: RFC 9112 §9.6, RFC 9110 §7.8.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Sequence
from http import HTTPStatus
from typing import cast

import h11
from hypercorn.events import Closed, RawData
from hypercorn.protocol.events import Request
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol, H11WSConnection
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.protocol.ws_stream import Handshake, WSStream
from hypercorn.trio.tcp_server import TCPServer

from sandkasten import errors, logcontext
from sandkasten.api.http.connection import GuardedStream
from sandkasten.api.http.errors import Answer, error_answer, head_too_large
from sandkasten.api.http.guard import App, RequestStream
from sandkasten.api.http.websocket import WebSocketStream

log = logging.getLogger(__name__)

_SPOKEN_VERSION = ((b"sec-websocket-version", b"13"),)
"""A header of each refused handshake (RFC 6455 §4.2.2)."""


class _H11Connection(h11.Connection):
    """h11's connection, which drops bytes after a request that ends the connection (RFC 9112 §9.6).

    h11 takes such bytes for an error, on which hypercorn would close at once, in the middle of the answer.
    """

    def receive_data(self, data: bytes) -> None:
        if self.their_state is not h11.MUST_CLOSE:
            super().receive_data(data)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        return h11.NEED_DATA if self.their_state is h11.MUST_CLOSE else super().next_event()


class Http1(H11Protocol):
    """HTTP/1 and WebSockets only: an offer to switch to HTTP/2 is ignored, its preface is refused.

    hypercorn would switch whatever is configured, and buffers an HTTP/2 answer without bound for a client that opens
    no window.
    """

    transport: GuardedStream
    _is_head = False
    _made_up_headers: Sequence[tuple[bytes, bytes]] = ()

    @classmethod
    def install(cls, connection: TCPServer, transport: GuardedStream) -> None:
        """Have `connection`, which speaks over `transport`, use this protocol."""
        made = connection.protocol
        made.protocol = protocol = cls(
            made.app,
            made.config,
            made.context,
            made.task_group,
            made.state,
            made.ssl,
            made.client,
            made.server,
            made.send,
        )
        protocol.connection = _H11Connection(h11.SERVER, max_incomplete_event_size=made.config.h11_max_incomplete_size)
        protocol.transport = transport

    async def _check_protocol(self, event: h11.Request) -> None:
        self._is_head = event.method == b"HEAD"

    async def _create_stream(self, request: h11.Request) -> None:
        """Serve requests and WebSockets by our own code, and refuse broken handshakes before any application is asked.

        Extensions are taken out of the offer: hypercorn's handshake would agree to inflate messages of any size.
        """
        app = cast(App, self.app)  # typed for hypercorn's own message types
        headers = list(request.headers)
        if not _is_upgrade(request.method, headers):
            # Both streams have the one method that is used.
            self.stream = cast(HTTPStream, RequestStream(self, self.transport, app))
        else:
            headers = [(name, value) for name, value in headers if name != b"sec-websocket-extensions"]
            if not _is_valid_handshake(headers, request.http_version):
                self._made_up_headers = _SPOKEN_VERSION
                await self._send_error_response(HTTPStatus.BAD_REQUEST)
                await self.send(Closed())
                return
            ping_interval_s = self.config.websocket_ping_interval or math.inf
            stream = WebSocketStream(self, self.transport, app, ping_interval_s=ping_interval_s)
            self.stream = cast(WSStream, stream)
            self.connection = H11WSConnection(cast(h11.Connection, self.connection))
        await self.stream.handle(
            Request(
                stream_id=STREAM_ID,
                headers=headers,
                http_version=request.http_version.decode(),
                method=request.method.decode("ascii"),
                raw_path=request.target,
                state=self.connection_state,
            )
        )

    async def _send_error_response(self, status_code: int) -> None:
        """Answer bytes that are not HTTP, in one piece: the application may be about to answer the request's head."""
        headers, answer = self._make_up(status_code)
        is_head = self._is_head and self.connection.our_state is h11.SEND_RESPONSE
        events = (
            h11.Response(status_code=answer.status, headers=[*headers, *self.config.response_headers("h11")]),
            h11.Data(data=b"" if is_head else answer.body),
            h11.EndOfMessage(),
        )
        await self.send(RawData(data=b"".join(self.connection.send(event) or b"" for event in events)))

    def _make_up(self, status: int) -> tuple[list[tuple[bytes, bytes]], Answer]:
        self.transport.has_unread_body = True  # the bytes behind a malformed head stay unread
        request_id = secrets.token_hex(8)
        logcontext.origin.set(logcontext.Origin(request_id))
        answer = self._refusal(status)
        log.info("malformed_request", extra={"status": answer.status})
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(answer.body)),
            (b"connection", b"close"),
            (b"x-request-id", request_id.encode()),
            (b"x-content-type-options", b"nosniff"),
            *self._made_up_headers,
        ]
        return headers, answer

    def _refusal(self, status: int) -> Answer:
        if status == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            return error_answer(head_too_large(self.config.h11_max_incomplete_size))
        return error_answer(errors.InvalidRequest("the request is not valid HTTP/1.1", request="malformed"))


def _is_upgrade(method: bytes, headers: list[tuple[bytes, bytes]]) -> bool:
    """Return whether a request asks for a WebSocket (RFC 9110 §7.8)."""
    if method != b"GET":
        return False
    fields: dict[bytes, bytes] = {}
    for name, value in headers:
        fields[name] = fields[name] + b"," + value if name in fields else value
    tokens = {token.strip().lower() for token in fields.get(b"connection", b"").split(b",")}
    is_named = fields.get(b"upgrade", b"").strip().lower() == b"websocket"
    return b"upgrade" in tokens and is_named


def _is_valid_handshake(headers: list[tuple[bytes, bytes]], http_version: bytes) -> bool:
    """Return whether the upgrade can be accepted (RFC 6455 §4.2.1)."""
    try:
        return Handshake(headers, http_version.decode()).is_valid()
    except UnicodeDecodeError:
        return False
