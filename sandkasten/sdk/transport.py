"""Requests and WebSockets over connections that are kept: the one file that knows httpcore2 and wsproto.

A call is repeated when its connection is lost, or the server or a proxy says that it may succeed later, for as long as
its time lasts. That is safe for every call that is `repeat`: it is idempotent by itself, or carries an id by which the
server knows it again. Another call is sent once.

httpx2 is used by its core: its client would add 55 ms to the import, and its streams leave a generator unfinished, of
which trio warns. No redirect is followed, so the key goes to the configured server alone. httpx2's WebSockets are not
used: they need a task, or threads, of their own.
"""

from __future__ import annotations

import base64
import random
import secrets
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote, urlsplit
from weakref import WeakValueDictionary

from sandkasten import errors
from sandkasten.sdk import waiting
from sandkasten.sdk.wire import MAX_MESSAGE_BYTES, HttpCall, WholeAnswer, call, may_pass, reading

if TYPE_CHECKING:
    import httpcore2
    from wsproto.connection import Connection
    from wsproto.events import Event

CONNECT_S = 10.0
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
WRITE_S = 5.0
"""Longest time for which a WebSocket message waits to be taken; a cancelled caller waits with it, so that no message is
left half sent."""
SILENCE_S = 60.0
"""Time after which a silent stream counts as lost: the server sends a ping every 15 or 20 s."""
_SILENT = "nothing came for too long: the connection is half open, or a proxy on the way holds the answer back"
READ_BYTES = 64 * 1024
_STRANGERS_LOSSES = 3
"""Connections after which a port that takes them, and has never answered, counts as no server of ours."""
_GATEWAY_LOST = (502, 504)
"""Answers of a proxy that may have passed the request on."""
_CONNECTIONS = 1000
_IDLE_S = 30.0

_KEEPALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4))
    if hasattr(socket, name)
]
"""A peer that vanished without a word is found within 70 s, also while a command without a time limit runs (tcp(7))."""


class Lost(errors.ConnectionFailed):
    """The connection was lost on the way; `was_sent` tells whether the server may have got the request."""

    def __init__(self, message: str, /, *, was_sent: bool) -> None:
        super().__init__(message)
        self.was_sent = was_sent


class Silent(Lost):
    """Nothing came over the connection for the time that a stream may be silent."""


class SocketClosed(Exception):
    """The server closed a WebSocket: `code` and `reason` as in docs/websocket.md."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"the server closed the WebSocket: {code} {reason}")
        self.code, self.reason = code, reason


class Transport:
    """Connections to one server. `timeout` is in seconds, None for no limit; see `SandboxClient`."""

    def __init__(self, base_url: str, api_key: str | None, timeout: float | None, *, use_proxy: bool = True) -> None:
        import httpcore2

        self.base_url = base_url
        self.timeout = timeout
        unix_path = base_url.removeprefix("unix:") if base_url.startswith("unix:") else None
        server = urlsplit("http://localhost" if unix_path else base_url)
        if server.scheme not in ("http", "https") or not server.hostname:
            raise ValueError(f"the server's URL must begin with http:, https: or unix:, not {base_url!r}")
        self._scheme, self._port = server.scheme.encode("ascii"), server.port
        self._host = server.hostname.encode("idna" if not server.hostname.isascii() else "ascii")
        self._prefix = server.path.rstrip("/")
        place = b"[%b]" % self._host if b":" in self._host else self._host
        place += b":%d" % server.port if server.port else b""
        self._headers = [(b"host", place), (b"accept-encoding", b"identity"), (b"user-agent", b"sandkasten-sdk")]
        self._headers += [(b"authorization", f"Bearer {api_key}".encode())] if api_key else []
        proxy = None if unix_path or not use_proxy else _proxy(server.scheme, server.hostname)
        self._pool = httpcore2.AsyncConnectionPool(
            proxy=None if proxy is None else httpcore2.Proxy(*proxy),
            max_connections=_CONNECTIONS,
            keepalive_expiry=_IDLE_S,
            uds=unix_path,
            socket_options=None if unix_path else _KEEPALIVE,
        )
        self._was_reached = False
        self.holds_answers = False
        """Whether a proxy on the way sends an answer on when it has ended, so that a stream has to end early."""
        self.links: WeakValueDictionary[str, Any] = WeakValueDictionary()
        """The `RunLink` of each session in use, by the session's path."""
        self.open_links: set[Any] = set()
        """The links that have a WebSocket, which are kept for the session's next use."""

    async def aclose(self) -> None:
        """Close all connections."""
        await self._pool.aclose()

    async def send(self, request: HttpCall, *, within_s: float | None = None) -> WholeAnswer:
        """Return the whole answer to a call; `within_s` is its time in place of the client's timeout.

        Raises:
            SandkastenAPIError: the server refuses the call.
            ConnectionFailed: no server answers, or the connection was lost for too long.
            DeadlineExceeded: the call's time is over.
            Uncertain: the connection was lost, and the call must not be repeated.
        """
        answer, _ = await self._exchange(request, is_whole=True, within_s=within_s)
        return answer

    async def open(self, request: HttpCall) -> HttpStream:
        """Return an answer that is read piece by piece; the caller closes it. Errors as of `send`."""
        answer, response = await self._exchange(request, is_whole=False)
        assert response is not None  # the answer is not whole
        return HttpStream(answer, response)

    async def _exchange(
        self, request: HttpCall, *, is_whole: bool, within_s: float | None = None
    ) -> tuple[WholeAnswer, httpcore2.Response | None]:
        began = time.monotonic()
        timeout = self.timeout if within_s is None else within_s
        has_limit = timeout is not None and request.patience_s is not None
        deadline = began + (timeout or 0) + (request.patience_s or 0) if has_limit else None
        lost_at: float | None = None
        losses = 0
        may_have_begun = False
        wait_s = FIRST_WAIT_S
        while True:
            error: errors.SandkastenError
            left_s = None if deadline is None else max(deadline - time.monotonic(), 0.001)
            try:
                answer, response = await self._attempt(request, left_s, is_whole=is_whole)
            except Lost as lost:
                if isinstance(lost, Silent) and request.may_poll:
                    raise
                if lost.was_sent and not request.repeat:
                    raise errors.Uncertain(
                        f"{lost.message}; {request.method} {request.path} may have had its effect"
                    ) from lost
                losses += lost.was_sent
                may_have_begun |= lost.was_sent
                is_known = self._was_reached or 0 < losses < _STRANGERS_LOSSES
                if not is_known or (not lost.was_sent and not request.repeat):
                    raise
                error, advice_s = lost, None
                lost_at = time.monotonic() if lost_at is None or lost.was_sent else lost_at
            else:
                self._was_reached = True
                if answer.status < 400:
                    return answer, response
                if losses and request.method == "DELETE" and answer.status == 404:
                    return WholeAnswer(200, {}, b'{"ok":true}'), None  # the lost request had its effect
                error, advice_s = answer.error, answer.retry_after_s
                is_passing = request.repeat and may_pass(answer)
                may_have_begun |= is_passing and answer.status in _GATEWAY_LOST
                error.may_have_begun = may_have_begun
                if not is_passing:
                    raise error
                lost_at = None
            until = deadline
            if until is None:
                until = (lost_at or began) + (float("inf") if timeout is None else timeout)
            pause_s = advice_s or wait_s * random.uniform(0.5, 1.0)  # also where the advice is to wait for 0 s
            if time.monotonic() + pause_s >= until:
                raise error
            await waiting.sleep(pause_s)
            wait_s = min(wait_s * 2, LONGEST_WAIT_S)

    async def _attempt(
        self, request: HttpCall, left_s: float | None, *, is_whole: bool
    ) -> tuple[WholeAnswer, httpcore2.Response | None]:
        """Send a call once.

        Raises:
            Lost: the connection was lost, or there is none.
            DeadlineExceeded: the time is over.
        """
        import httpcore2

        idle_s = self.timeout if request.is_transfer else left_s
        read_s = idle_s if request.silence_s is None else request.silence_s
        timeouts = {"connect": min(left_s or CONNECT_S, CONNECT_S), "read": read_s, "write": idle_s}
        timeouts["pool"] = left_s or self.timeout
        content = request.body if request.source is None else request.source()
        try:
            response = await self._pool.handle_async_request(self._request(request, content, timeouts))
            headers = {name.decode("latin-1").lower(): each.decode("latin-1") for name, each in response.headers}
            if not is_whole and response.status < 400:
                return WholeAnswer(response.status, headers, b""), response
            try:
                return WholeAnswer(response.status, headers, await response.aread()), None
            finally:
                await response.aclose()  # httpcore2 shields that itself
        except (httpcore2.ConnectError, httpcore2.ConnectTimeout, httpcore2.ProxyError) as error:
            raise Lost(self._said(error), was_sent=False) from error
        except httpcore2.PoolTimeout as error:
            raise errors.DeadlineExceeded(f"all {_CONNECTIONS} connections were in use") from error
        except httpcore2.TimeoutException as error:
            if request.silence_s is not None:
                raise Silent(_SILENT, was_sent=True) from error
            message = f"nothing was heard of {request.method} {request.path} for {idle_s:.1f} s"
            raise errors.DeadlineExceeded(message) from error
        except (httpcore2.NetworkError, httpcore2.ProtocolError) as error:
            raise Lost(self._said(error), was_sent=True) from error

    def _request(self, request: HttpCall, content: Any, timeouts: dict[str, float | None]) -> httpcore2.Request:
        import httpcore2

        target = (self._prefix + request.target).encode("ascii")
        headers = [*self._headers, *((name.encode(), each.encode("latin-1")) for name, each in request.headers.items())]
        if content is not None and "content-length" not in request.headers:
            is_whole = isinstance(content, bytes)
            length = (b"content-length", b"%d" % len(content)) if is_whole else (b"transfer-encoding", b"chunked")
            headers.append(length)
        elif request.method in ("POST", "PUT", "PATCH") and content is None:
            headers.append((b"content-length", b"0"))
        url = httpcore2.URL(scheme=self._scheme, host=self._host, port=self._port, target=target)
        return httpcore2.Request(
            request.method, url, headers=headers, content=content, extensions={"timeout": timeouts}
        )

    def _said(self, error: Exception) -> str:
        import httpcore2

        if isinstance(error, httpcore2.ConnectError | httpcore2.ConnectTimeout):
            return f"no server answers at {self.base_url} ({_words(error)})"
        return f"the connection to {self.base_url} was lost ({_words(error)})"

    async def websocket(self, request: HttpCall, protocol: str) -> WebSocket:
        """Open a WebSocket, at one attempt; the caller closes it. `request` is without the headers of the handshake.

        Raises:
            SandkastenAPIError: the server refuses, or a proxy before it, then without a leaf.
            Lost: no server answers, the connection was lost, or the cause is a refusal that may pass.
            DeadlineExceeded: there is no answer within the client's timeout.
        """
        key = base64.b64encode(secrets.token_bytes(16)).decode("ascii")
        request.headers |= {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
        request.headers |= {"sec-websocket-key": key, "sec-websocket-protocol": protocol}
        answer, response = await self._attempt(request, self.timeout, is_whole=False)
        self._was_reached = True
        if response is None:
            if may_pass(answer):
                raise Lost(f"no WebSocket can be opened now ({answer.error})", was_sent=True) from answer.error
            raise answer.error
        from wsproto.utilities import generate_accept_token

        # RFC 6455 §4.1: the server has read this key, and speaks the protocol that was asked for.
        is_accepted = answer.headers.get("sec-websocket-accept", "").encode() == generate_accept_token(key.encode())
        if answer.status != 101 or not is_accepted or answer.headers.get("sec-websocket-protocol") != protocol:
            with waiting.shield(WRITE_S):
                await response.aclose()
            raise errors.SandkastenAPIError("a proxy between here and the server knows no WebSockets", answer.status)
        return WebSocket(response)


class HasTransport(Protocol):
    """A client, as far as what it makes needs it."""

    _transport: Transport


class Endpoint:
    """A path of the server, and what is asked below it."""

    def __init__(self, transport: Transport, path: str) -> None:
        self.transport, self.path = transport, path

    def call(self, method: str, name: str = "", value: object = None, **fields: Any) -> HttpCall:  # fields of `call`
        """Return a request for the path, followed by `name`."""
        return call(method, self.path + name, value, **fields)

    async def ask(self, method: str, name: str = "", value: object = None, **fields: Any) -> Any:  # a JSON value
        """Return the JSON of the answer to such a request. Errors as of `Transport.send`."""
        return (await self.transport.send(self.call(method, name, value, **fields))).value

    def below(self, name: str) -> Endpoint:
        """Return the place whose path is this one's, followed by `name`."""
        return Endpoint(self.transport, self.path + name)


class HttpStream:
    """An answer that is read piece by piece."""

    def __init__(self, answer: WholeAnswer, response: httpcore2.Response) -> None:
        self.status, self.headers = answer.status, answer.headers
        self._response = response
        self._pieces: Any = response.aiter_stream()  # a generator, though its type says less
        self._is_broken = False

    async def read(self) -> bytes:
        """Return the next piece of the body, empty at its end.

        Raises:
            Lost: the connection was lost before the end, or an earlier call was cancelled, which ends the reading.
        """
        import httpcore2

        if self._is_broken:
            raise Lost("an earlier read was given up", was_sent=True)
        self._is_broken = True
        try:
            data: bytes = await anext(self._pieces, b"")
        except httpcore2.TimeoutException as error:
            raise Silent(_SILENT, was_sent=True) from error
        except (httpcore2.NetworkError, httpcore2.ProtocolError) as error:
            raise Lost(f"the connection was lost ({_words(error)})", was_sent=True) from error
        self._is_broken = False
        return data

    async def aclose(self) -> None:
        """Close the answer; its connection is closed, too, if there was more to read."""
        with waiting.shield(WRITE_S):
            if not self._is_broken:  # else a read may still be under way, in another task
                await self._pieces.aclose()
            await self._response.aclose()


class WebSocket:
    """A WebSocket of a client (RFC 6455). One task reads at a time; any number may send."""

    def __init__(self, response: httpcore2.Response) -> None:
        from wsproto.connection import Connection, ConnectionType

        self._response = response
        self._stream: Any = response.extensions["network_stream"]
        self._connection: Connection = Connection(ConnectionType.CLIENT)
        self._received: list[str | bytes | SocketClosed] = []
        self._parts: list[str | bytes] = []
        self._size = 0
        self._lock = waiting.Lock()
        self._is_closed = False

    async def receive(self) -> str | bytes:
        """Return the next message. A cancelled call loses none.

        Raises:
            SocketClosed: the server closed the connection.
            Lost: the connection broke off.
        """
        import httpcore2

        while not self._received:
            try:
                data = await self._stream.read(READ_BYTES, timeout=SILENCE_S)
            except (httpcore2.NetworkError, httpcore2.TimeoutException) as error:
                raise Lost(f"the connection was lost ({_words(error)})", was_sent=True) from error
            if not data:
                raise Lost("the connection was lost (the server's side ended)", was_sent=True)
            await self._take(data)
        first = self._received[0]
        if isinstance(first, SocketClosed):
            raise first
        del self._received[0]
        return first

    async def _take(self, data: bytes) -> None:
        from wsproto import events as ws
        from wsproto.utilities import RemoteProtocolError

        self._connection.receive_data(data)
        replies: list[Event] = []
        try:
            for event in self._connection.events():
                if isinstance(event, ws.Message):
                    self._add(event.data if isinstance(event.data, str) else bytes(event.data), event.message_finished)
                elif isinstance(event, ws.Ping):
                    replies.append(event.response())
                elif isinstance(event, ws.CloseConnection):
                    self._received.append(SocketClosed(event.code, event.reason or ""))
        except RemoteProtocolError as error:
            raise Lost(f"the server sent what is no WebSocket ({error})", was_sent=True) from error
        for reply in replies:
            await self._send(reply)

    def _add(self, data: str | bytes, is_finished: bool) -> None:
        self._size += len(data)
        if self._size > MAX_MESSAGE_BYTES:
            raise Lost("the server sent a message that is too long", was_sent=True)
        self._parts.append(data)
        if is_finished:
            first = self._parts[0]
            joined: Any = ("" if isinstance(first, str) else b"").join(self._parts)  # type: ignore[arg-type]  # of one type
            self._received.append(joined)
            self._parts, self._size = [], 0

    async def send(self, message: str | bytes) -> None:
        """Send a message.

        Raises:
            Lost: the connection broke off, or does not take the message in time.
        """
        from wsproto import events as ws

        await self._send(ws.TextMessage(message) if isinstance(message, str) else ws.BytesMessage(message))

    async def _send(self, event: Event) -> None:
        import httpcore2
        from wsproto.utilities import LocalProtocolError

        async with self._lock:
            if self._is_closed:
                raise Lost("the connection is closed", was_sent=False)
            try:
                data = self._connection.send(event)
                self._is_closed = True  # until all is sent: half a message may be on the wire
                with waiting.shield(2 * WRITE_S):  # the write's own limit comes first, and raises
                    await self._stream.write(data, timeout=WRITE_S)
                    self._is_closed = False
            except (httpcore2.NetworkError, httpcore2.TimeoutException, LocalProtocolError) as error:
                raise Lost(f"the connection was lost ({_words(error)})", was_sent=True) from error
            if self._is_closed:
                raise Lost("the connection took no message in time", was_sent=True)

    async def close(self) -> None:
        """Say goodbye, if the connection still takes it, and close the connection."""
        from wsproto.events import CloseConnection

        with waiting.shield(WRITE_S):
            try:
                await self._send(CloseConnection(1000))
            except Lost:
                pass
            finally:
                self._is_closed = True
                await self._response.aclose()  # httpcore2 shields that itself


class StreamRecovery:
    """Waits between the connections of a stream. Each wait is longer than the one before, until something comes.

    After `timeout` seconds in which nothing came there is no further wait, but an error.
    """

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._lost_at: float | None = None
        self._wait_s = FIRST_WAIT_S

    def progress(self) -> None:
        """Forget earlier losses, since something came."""
        self._lost_at, self._wait_s = None, FIRST_WAIT_S

    async def wait(self, error: errors.SandkastenError) -> None:
        """Wait before the next connection. Raises the error if the time is over."""
        now = time.monotonic()
        self._lost_at = self._lost_at or now
        if self._timeout is not None and now + self._wait_s >= self._lost_at + self._timeout:
            raise error
        await waiting.sleep(self._wait_s * random.uniform(0.5, 1.0))
        self._wait_s = min(self._wait_s * 2, LONGEST_WAIT_S)


class Pump:
    """Reading of one WebSocket on behalf of all who wait for its messages, without a task of its own.

    Whoever waits first reads, hands each message to `take`, and leaves the reading to another when done. `failure` is
    what ended the connection; everyone who waits then raises it.
    """

    def __init__(self, socket: WebSocket, take: Callable[[str | bytes], None]) -> None:
        self._socket = socket
        self._take = take
        self._turns = waiting.Turns()
        self.failure: Exception | None = None

    async def until(self, is_done: Callable[[], bool]) -> None:
        """Wait until `is_done`, which is asked after each message.

        Raises:
            ConnectionFailed, SocketClosed: the connection ended before, or carried what is none of the protocol.
        """
        while True:
            news = self._turns.news
            if is_done():
                return
            if self.failure is not None:
                raise self.failure
            if await self._turns.take(news):
                try:
                    await self._read(is_done)
                finally:
                    self._turns.give()

    async def _read(self, is_done: Callable[[], bool]) -> None:
        try:
            while not is_done():
                message = await self._socket.receive()
                with reading():
                    self._take(message)
                self._turns.tell()
        except (errors.ConnectionFailed, SocketClosed) as error:
            self.failure = error


def _words(error: BaseException) -> str:
    """Return the text of the first error of a chain that has one: a certificate's is below an empty one of trio."""
    each: BaseException | None = error
    while each is not None and not str(each):
        each = each.__cause__ or each.__context__
    return str(each or type(error).__name__)


def _proxy(scheme: str, host: str) -> tuple[str, tuple[str, str] | None] | None:
    """Return the proxy that the environment names for a server, and its credentials; none for this machine itself."""
    if host in ("localhost", "::1") or host.startswith("127."):
        return None
    import urllib.request

    url = None if urllib.request.proxy_bypass(host) else urllib.request.getproxies().get(scheme)
    if not url:
        return None
    kind, mark, place = url.rpartition("://")
    userinfo, at, place = place.rpartition("@")
    name, _, password = map(unquote, userinfo.partition(":"))
    return f"{kind}{mark}{place}", (name, password) if at else None
