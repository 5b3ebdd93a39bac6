"""HTTP/1 between a client inside and one server, with Host checked on every request. On h11, no input, no output.

Both sides are parsed, and what goes on is written anew: so both readers see one request where this module saw one, with
lengths, folded lines and ends of lines in one form. Refused are requests for another host, CONNECT, absolute targets,
HTTP/2, and lengths that two readers may read in two ways. After a WebSocket's 101 the connection is plain bytes.

As a proxy's, a guard takes one request, whose target is absolute and names the same server as its Host.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from ipaddress import ip_address

import attrs
import h11

from egress.policy import InvalidRule, Reason, canonical_name

MAX_HEAD_BYTES = 64 * 1024
"""Bytes of a request's or an answer's head, or of one chunk's."""
MAX_FEED_BYTES = 16 * 1024
"""Bytes to give at a time. A body in chunks of one byte takes 23 ms for as much."""
MAX_WAITING_BYTES = 256 * 1024
"""Bytes of further requests that may wait for the answer to one."""

HTTP_PORT = 80
_MAX_FIRST_LINE_BYTES = 16 * 1024
_BLANK = rb"[ \t\r\n\v\f]*"
_FIRST_LINE = re.compile(
    _BLANK + rb"[!#$%&'*+.^_`|~0-9a-z-]+[ \t\r\v\f]"
    rb"(?:[^\n\0-\10\16-\37]*[ \t\r\v\f]HTTP/"
    rb"|(?<=GET.)[ \t\r\v\f]*(?:/|[a-z]+://)[^ \n\0-\10\16-\37]*+(?: [ \t\r\v\f]*+)?\n)",
    re.IGNORECASE,
)
"""A request line as lenient servers read it (RFC 9112, 2.2 and 3), that of HTTP/0.9 included. No part can match what
the next one could: all sessions wait while one line is looked at."""
_SO_FAR = re.compile(_BLANK + rb"(?:[!#$%&'*+.^_`|~0-9a-z-]+(?:[ \t\r\v\f][^\n\0-\10\16-\37]*)?)?\Z", re.IGNORECASE)
"""The beginning of such a line."""
_AUTHORITY = re.compile(rb"(\[[0-9a-f.]*:[0-9a-f:.]*\]|[^\[\]:]+)(?::([1-9][0-9]{0,4}))?", re.IGNORECASE)
_ABSOLUTE_TARGET = re.compile(rb"http://([^/?#]*)(/[^#]*|\?[^#]*)?", re.IGNORECASE)
_NOT_PRINTABLE = re.compile(r"[^ -~]")
_KEEPING = (b"connection", b"keep-alive", b"proxy-connection")
_TO_PROXY = (b"proxy-connection", b"proxy-authorization")
_FRAMING = {b"content-length", b"transfer-encoding", b"host", b"connection", b"upgrade"}
"""Fields that no trailer may have: some servers merge trailers with the head (RFC 9110, 6.5.1)."""
_REASON_PHRASES = {400: "Bad Request", 403: "Forbidden", 502: "Bad Gateway"}

Headers = list[tuple[bytes, bytes]]


def looks_like_http(data: bytes) -> bool | None:
    """Tell whether bytes begin an HTTP request; None if more are needed. A first line without an end counts as one."""
    data = data[:_MAX_FIRST_LINE_BYTES]
    if _FIRST_LINE.match(data):
        return True
    if not _SO_FAR.match(data):
        return False
    return True if len(data) >= _MAX_FIRST_LINE_BYTES else None


def refusal(status: int, message: str, *, has_body: bool = True, phrase: str | None = None) -> bytes:
    """Return an answer that says why a request is refused, and that the connection ends.

    The reason phrase is the status's own without `phrase`, of which control characters are taken out.
    """
    body = json.dumps({"error_code": "EGRESS_DENIED", "message": message}).encode()
    words = _REASON_PHRASES[status] if phrase is None else _NOT_PRINTABLE.sub("", phrase)
    head = (
        f"HTTP/1.1 {status} {words}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (body if has_body else b"")


@attrs.frozen
class Step:
    """Bytes to send, and how the connection goes on after them."""

    to_server: bytes = b""
    to_client: bytes = b""
    is_over: bool = False
    """Both connections end once the bytes are sent."""
    refused: Reason | None = None
    """Cause of the end, if a check refused. Nothing of that request went to the server, or its body broke off."""
    wants_raw: bool = False
    """Plain bytes from here, in both directions."""
    is_client_waiting: bool = False
    """Nothing more is to be read from the client until the server has answered."""


class HttpRefused(Exception):
    """A request or an answer goes no further; `status` and `message` are told to the client if they can be."""

    def __init__(self, reason: Reason, status: int, message: str) -> None:
        self.reason, self.status, self.message = reason, status, message


class HttpGuard:
    """One client's connection to one server. After a step that is over, further bytes are ignored.

    `name` is the canonical name, or the text of a literal address; `port` is the server's.
    """

    def __init__(self, name: str, port: int, *, is_proxy: bool = False) -> None:
        self._name, self._port, self._is_proxy = name, port, is_proxy
        self._client = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        """The connection that the client opened: we are its server."""
        self._server = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._request: h11.Request | None = None
        """The request that is not answered whole."""
        self._is_answered = False
        self._is_over = self._is_raw = self._has_client_ended = False
        self._to_server: list[bytes] = []
        self._to_client: list[bytes] = []

    def from_client(self, data: bytes) -> Step:
        """Take bytes of the client; none are the end of its stream."""
        if self._is_raw or self._is_over:
            return Step(to_server=b"" if self._is_over else data, is_over=self._is_over, wants_raw=self._is_raw)
        if self._has_client_ended:
            return Step()
        self._has_client_ended = not data
        return self._step(self._client, data)

    def from_server(self, data: bytes) -> Step:
        """Take bytes of the server; none are the end of its stream."""
        if self._is_raw or self._is_over:
            return self._raw_step(data)
        if self._request is None:  # bytes that answer nothing, or the end of a connection that was kept open
            self._is_over = True
            return Step(is_over=True)
        return self._step(self._server, data)

    def _raw_step(self, data: bytes) -> Step:
        """Take plain bytes of the server, or what comes after the end of the connection."""
        if self._is_over:
            return Step(is_over=True, wants_raw=self._is_raw)
        try:
            return Step(to_client=self._plain_answer(data), wants_raw=True)
        except HttpRefused as error:
            self._is_over = True
            return Step(is_over=True, wants_raw=True, refused=error.reason)

    def _look_at_answer(self, event: object) -> None:
        """Look at an event of the server before it is passed on; an event of h11, or one of its constants. A subclass
        may raise HttpRefused."""

    def _plain_answer(self, data: bytes) -> bytes:
        """Return what of these bytes of an answer's body, or of the bytes after a 101, may go to the client now; none
        are the end of them. A subclass may hold some back, or raise HttpRefused."""
        return data

    def _put_answer(self, data: bytes) -> None:
        if data:
            self._to_client.append(self._sent(self._client, h11.Data(data=data)))

    def _step(self, side: h11.Connection, data: bytes) -> Step:
        refused = None
        try:
            side.receive_data(data)
            if side is self._client:
                self._read_client()
            else:
                self._read_server()
                self._is_over |= not data
        except HttpRefused as error:
            refused = error.reason
            self._refuse(error.status, error.message)
        except h11.RemoteProtocolError as error:
            if data:
                refused = Reason.BAD_HTTP
                if self._client.their_state is h11.ERROR:
                    self._refuse(400, f"not HTTP/1 as it must be: {error}")
                else:  # the error has the server's bytes in it, which may be the value of a secret
                    self._refuse(502, "the server's answer is not HTTP/1 as it must be")
            self._is_over = True  # without data: a message that broke off
        except h11.LocalProtocolError:  # the other side has ended, or cannot be told this
            self._is_over = True
        is_paused = self._request is not None and not self._is_raw and self._client.their_state is not h11.SEND_BODY
        waiting = len(self._client.trailing_data[0]) if is_paused else 0
        if waiting > MAX_WAITING_BYTES:
            refused, self._is_over = Reason.LIMIT, True
        if self._is_answered and self._request is not None and self._server.trailing_data[0]:
            self._is_over = True  # bytes behind an answer whose request is not at its end
        step = Step(
            b"".join(self._to_server), b"".join(self._to_client), self._is_over, refused, self._is_raw, waiting > 0
        )
        self._to_server.clear()
        self._to_client.clear()
        return step

    def _refuse(self, status: int, message: str) -> None:
        """End the connection; the client is told unless an answer is on its way to it."""
        self._is_over = True
        if self._client.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            is_head = self._request is not None and self._request.method == b"HEAD"
            self._to_client.append(refusal(status, message, has_body=not is_head))

    def _read_client(self) -> None:
        while not self._is_over:
            event = self._client.next_event()
            match event:
                case h11.Request():
                    self._request, self._is_answered = event, False
                    self._to_server.append(self._sent(self._server, self._checked(event)))
                case h11.Data():
                    self._to_server.append(self._sent(self._server, event))
                case h11.EndOfMessage():
                    if _FRAMING.intersection(name for name, _ in event.headers):
                        raise HttpRefused(Reason.BAD_HTTP, 400, "a trailer has a field that belongs into the head")
                    self._to_server.append(self._sent(self._server, event))
                    self._finish()
                case h11.ConnectionClosed():
                    self._is_over = self._request is None
                    return
                case _:  # more is needed, or an answer must come first
                    return

    def _read_server(self) -> None:
        while not self._is_over and self._request is not None:
            event = self._server.next_event()
            self._look_at_answer(event)
            match event:
                case h11.InformationalResponse(status_code=101):
                    self._to_client.append(self._sent(self._client, _as_http11(event)))
                    self._to_client.append(self._plain_answer(self._server.trailing_data[0]))
                    self._to_server.append(self._client.trailing_data[0])
                    self._is_raw = True
                    return
                case h11.InformationalResponse():
                    if self._client.their_http_version == b"1.1":  # RFC 9110, 15.2: not for clients of 1.0
                        self._to_client.append(self._sent(self._client, _as_http11(event)))
                case h11.Response():
                    if self._is_proxy:  # the next request may be for another server
                        event = _as_last(event)
                    self._to_client.append(self._sent(self._client, _as_http11(event)))
                case h11.Data():
                    self._put_answer(self._plain_answer(event.data))
                case h11.EndOfMessage():
                    self._put_answer(self._plain_answer(b""))
                    self._to_client.append(self._sent(self._client, event))
                    self._is_answered = True
                    self._finish()
                case h11.ConnectionClosed():
                    self._is_over = True
                case _:
                    return

    def _sent(self, side: h11.Connection, event: h11.Event) -> bytes:
        return side.send(event) or b""

    def _finish(self) -> None:
        """Go on to the next request, once the present one and its answer are whole."""
        if not self._is_answered or self._server.our_state is h11.SEND_BODY:
            return
        sides = (self._client, self._server)
        self._request = None
        if self._server.trailing_data[0] or any(
            state is not h11.DONE for side in sides for state in (side.our_state, side.their_state)
        ):
            self._is_over = True
            return
        for side in sides:
            side.start_next_cycle()
        self._read_client()

    def _checked(self, request: h11.Request) -> h11.Request:
        """Return the request as it goes to the server, or raise `HttpRefused`."""
        headers = list(request.headers.raw_items())
        names = [name for name, _ in request.headers]
        if request.http_version not in (b"1.0", b"1.1"):
            raise HttpRefused(Reason.BAD_HTTP, 400, "neither HTTP/1.0 nor HTTP/1.1")
        if names.count(b"host") != 1:  # h11 refuses two, and none in HTTP/1.1, as no HTTP
            raise HttpRefused(Reason.HOST, 403, "a request names its Host once")
        self._check_host(dict(request.headers)[b"host"])
        target = request.target
        if self._is_proxy:
            target, headers = self._for_origin(target, headers)
        is_star = request.method == b"OPTIONS" and target == b"*"
        if request.method == b"CONNECT" or not (target.startswith(b"/") or is_star):
            raise HttpRefused(Reason.BAD_HTTP, 403, "CONNECT and absolute targets are for proxies")
        if b"transfer-encoding" in names and (b"content-length" in names or request.http_version == b"1.0"):
            raise HttpRefused(Reason.BAD_HTTP, 400, "Transfer-Encoding beside a Content-Length, or in HTTP/1.0")
        upgrade = [value.strip().lower() for name, value in request.headers if name == b"upgrade"]
        if upgrade and (upgrade != [b"websocket"] or request.method != b"GET" or request.http_version == b"1.0"):
            headers = _without_upgrade(headers)  # as a server may ignore it (RFC 9110, 7.8): h2c would hide requests
        return h11.Request(method=request.method, target=target, headers=headers, http_version=b"1.1")

    def _check_host(self, value: bytes, default_port: int | None = None) -> None:
        name, port = split_authority(value) or ("", None)
        if name != self._name:
            raise HttpRefused(Reason.HOST, 403, f"Host is {_shown(value)}, and this connection is to {self._name}")
        if (default_port if port is None else port) not in (None, self._port):
            raise HttpRefused(Reason.HOST, 403, f"Host is {_shown(value)}, and this connection is to port {self._port}")

    def _for_origin(self, target: bytes, headers: Headers) -> tuple[bytes, Headers]:
        """Return the target and the headers of a proxy's request as the server takes them (RFC 9112, 3.2.2)."""
        authority, path = split_absolute(target) or (b"", b"")
        self._check_host(authority, HTTP_PORT)
        kept = [(name, value) for name, value in headers if name.lower() not in (b"host", *_TO_PROXY)]
        return path, [(b"Host", authority), *kept]


def split_absolute(target: bytes) -> tuple[bytes, bytes] | None:
    """Return the authority and the path with the query of an absolute target of plain HTTP; None if it is none."""
    match = _ABSOLUTE_TARGET.fullmatch(target)
    if match is None:
        return None
    path = match[2] or b"/"
    return match[1], path if path.startswith(b"/") else b"/" + path


def split_authority(value: bytes) -> tuple[str, int | None] | None:
    """Return the canonical name, or the address, and the port of a Host or a target; None if it names no host."""
    match = _AUTHORITY.fullmatch(value)
    name = None if match is None else _host_name(match[1])
    port = None if match is None or match[2] is None else int(match[2])
    return None if name is None or (port or 0) > 65535 else (name, port)


def _host_name(text: bytes) -> str | None:
    try:
        host = text.decode("ascii")
        try:
            return str(ip_address(host.strip("[]")))
        except ValueError:
            return canonical_name(host)
    except (InvalidRule, UnicodeDecodeError):
        return None


def _shown(value: bytes) -> str:
    return repr(value[:100].decode("ascii", "replace"))


def _as_http11(event: h11.InformationalResponse | h11.Response) -> h11.InformationalResponse | h11.Response:
    """Return an answer as h11 sends it: in HTTP/1.1, whatever the server's version."""
    if event.http_version == b"1.1":
        return event
    return type(event)(status_code=event.status_code, headers=list(event.headers.raw_items()), reason=event.reason)


def _as_last(response: h11.Response) -> h11.Response:
    """Return an answer that says that the connection ends after it."""
    headers = [(name, value) for name, value in response.headers.raw_items() if name.lower() not in _KEEPING]
    return h11.Response(
        status_code=response.status_code,
        headers=[*headers, (b"Connection", b"close")],
        http_version=response.http_version,
        reason=response.reason,
    )


def _without_upgrade(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return headers without an offer of another protocol."""
    dropped, kept = (b"upgrade", b"http2-settings"), []
    for name, value in headers:
        if name.lower() == b"connection":
            tokens = [token.strip() for token in value.split(b",")]
            value = b", ".join(token for token in tokens if token.lower() not in dropped)
        if name.lower() not in dropped and not (name.lower() == b"connection" and not value):
            kept.append((name, value))
    return kept
