"""HTTP/1.1 over connections that are kept for the next request (RFC 9112).

httpcore2 opens the connections: TCP, Unix sockets and TLS, on asyncio, on trio and in threads. The messages are written
and read here. A request of the SDK is small and its head and body go out in one write, so that the server wakes once;
httpcore2's own HTTP costs more time than all else that a client does for a command (docs/benchmarks/README.md).
"""

from __future__ import annotations

import base64
import re
import socket
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from sandkasten.sdk import waiting

READ_BYTES = 64 * 1024
BODY_BYTES = 512 * 1024
"""Most bytes of a long body that one read takes."""
CLOSE_S = 5.0
_HEAD_BYTES = 100 * 1024
_IDLE_S = 30.0
"""Time after which an unused connection is not used again."""
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [^\r\n]*)?")
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?")
_TARGET = re.compile(rb"[!-~]+")

_KEEPALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4))
    if hasattr(socket, name)
]
"""A peer that vanished without a word is found within 70 s, also while a command without a time limit runs (tcp(7))."""

Timeouts = Mapping[str, float | None]
"""Seconds for `pool` (a free connection), `connect`, and each `read` and `write`; None is no limit."""
Headers = Sequence[tuple[bytes, bytes]]


class Connections:
    """Connections to one server, at most `most` at a time. Its errors are those of httpcore2."""

    def __init__(
        self, server: SplitResult, host: bytes, *, unix_path: str | None, proxy: str | None, most: int
    ) -> None:
        self._host, self._is_tls = host.decode("ascii"), server.scheme == "https"
        self._port = server.port or (443 if self._is_tls else 80)
        self._place = b"[%b]" % host if b":" in host else host
        self._unix_path = unix_path
        self._proxy = None if proxy is None else urlsplit(proxy)
        self._authority = b"%b:%d" % (self._place, self._port)
        self._slots = waiting.Slots(most)
        self._idle: deque[Connection] = deque()
        self.used: set[Connection] = set()
        """The connections that have a request, or are a WebSocket."""

    async def ask(
        self,
        method: str,
        target: bytes,
        headers: Headers,
        content: bytes | AsyncIterator[bytes] | None,
        at_most: Timeouts,
    ) -> HttpAnswer:
        """Send a request, and return the answer once its head has come; the caller closes it.

        A content that is no bytes goes in chunks, unless `headers` have its length.
        """
        import httpcore2

        if not await waiting.take_slot(self._slots, at_most["pool"]):
            raise httpcore2.PoolTimeout
        connection: Connection | None = None
        try:
            head = self._head(method, target, headers)
            connection = await self._take() or await self._connect(at_most["connect"])
            self.used.add(connection)
            is_sent = await connection.send(head, content, headers, at_most["write"])
            status, is_kept, found = await connection.answer(at_most["read"])
            return HttpAnswer(self, connection, status, found, at_most["read"], is_kept=is_kept and is_sent)
        except BaseException:
            await self.give(connection, is_kept=False)
            raise

    def _head(self, method: str, target: bytes, headers: Headers) -> bytes:
        import httpcore2

        if self._proxy is not None and not self._is_tls:  # RFC 9112 §3.2.2
            target = b"http://" + self._authority + target
            headers = [*headers, *self._credentials()]
        if not _TARGET.fullmatch(target) or any(b"\r" in value or b"\n" in value for _, value in headers):
            raise httpcore2.LocalProtocolError("a line break in the head of a request")
        lines = [b"%b %b HTTP/1.1" % (method.encode("ascii"), target)]
        return b"\r\n".join([*lines, *(b"%b: %b" % each for each in headers), b"", b""])

    def _credentials(self) -> Headers:
        """Return the header with which the proxy's URL says who asks (RFC 7617 §2)."""
        if self._proxy is None or self._proxy.username is None:
            return []
        pair = f"{unquote(self._proxy.username)}:{unquote(self._proxy.password or '')}"
        return [(b"proxy-authorization", b"Basic " + base64.b64encode(pair.encode()))]

    async def _take(self) -> Connection | None:
        """Return a kept connection that still serves, if there is one, and close those that wait for too long."""
        while self._idle:
            try:
                is_old = time.monotonic() > self._idle[0].until
                connection = self._idle.popleft() if is_old else self._idle.pop()
            except IndexError:  # another thread took the last one
                return None
            # what can be read of an unused connection is its end
            if not is_old and not connection.rest and not connection.stream.get_extra_info("is_readable"):
                return connection
            await connection.aclose()
        return None

    async def _connect(self, timeout: float | None) -> Connection:
        import httpcore2

        network = waiting.network()
        if self._unix_path is not None:
            return Connection(await network.connect_unix_socket(self._unix_path, timeout=timeout))
        host, port = self._host, self._port
        if self._proxy is not None:
            if self._proxy.scheme not in ("http", "https") or not self._proxy.hostname:
                raise httpcore2.ProxyError(f"a proxy of {self._proxy.scheme!r} is not known, http and https are")
            host, port = self._proxy.hostname, self._proxy.port or (443 if self._proxy.scheme == "https" else 80)
        connection = Connection(await network.connect_tcp(host, port, timeout=timeout, socket_options=_KEEPALIVE))
        try:
            if self._proxy is not None and self._proxy.scheme == "https":
                await connection.start_tls(host, timeout)
            if self._is_tls:
                if self._proxy is not None:
                    await self._tunnel(connection, timeout)
                await connection.start_tls(self._host, timeout)
        except BaseException:
            await connection.aclose()
            raise
        return connection

    async def _tunnel(self, connection: Connection, timeout: float | None) -> None:
        """Ask the proxy for a tunnel to the server (RFC 9110 §9.3.6)."""
        import httpcore2

        lines = [b"CONNECT %b HTTP/1.1" % self._authority, b"host: " + self._authority]
        lines += [b"%b: %b" % each for each in self._credentials()]
        await connection.stream.write(b"\r\n".join([*lines, b"", b""]), timeout)
        status, _, _ = await connection.answer(timeout)
        if status // 100 != 2:
            raise httpcore2.ProxyError(f"the proxy refuses a tunnel with status {status}")

    async def give(self, connection: Connection | None, *, is_kept: bool) -> None:
        """Take a connection back, and close it unless it is to be kept."""
        self._slots.release()
        if connection is None:
            return
        if is_kept and connection in self.used:
            connection.until = time.monotonic() + _IDLE_S
            self._idle.append(connection)
        self.used.discard(connection)
        if not is_kept:
            await connection.aclose()

    async def aclose(self) -> None:
        """Close all connections, also those in use."""
        while self._idle or self.used:
            await (self._idle or self.used).pop().aclose()


class Connection:
    """Connection to the server, with what came over it and was not read."""

    def __init__(self, stream: Any) -> None:  # httpcore2.AsyncNetworkStream
        self.stream = stream
        self.rest = b""
        self._at = 0
        self.until = 0.0

    async def start_tls(self, host: str, timeout: float | None) -> None:
        """Go on with TLS, with a server of that name."""
        import httpcore2

        context = httpcore2.default_ssl_context()
        context.set_alpn_protocols(["http/1.1"])
        self.stream = await self.stream.start_tls(context, host, timeout)

    async def send(
        self, head: bytes, content: bytes | AsyncIterator[bytes] | None, headers: Headers, timeout: float | None
    ) -> bool:
        """Send a request. Return False if the server does not take all of it: it may have answered before."""
        import httpcore2

        try:
            if content is None or isinstance(content, bytes):
                await self.write(head + content if content else head, timeout)
            else:
                length = next((int(value) for name, value in headers if name == b"content-length"), None)
                await self._send_pieces(head, content, length, timeout)
        except httpcore2.WriteError:
            return False
        return True

    async def _send_pieces(
        self, head: bytes, pieces: AsyncIterator[bytes], length: int | None, timeout: float | None
    ) -> None:
        import httpcore2

        try:
            await self.write(head, timeout)
            sent = 0
            async for piece in pieces:
                sent += len(piece)
                if length is not None:
                    if sent > length:
                        break
                    await self.write(piece, timeout)
                elif piece:
                    await self.write(b"%x\r\n%b\r\n" % (len(piece), piece), timeout)
            if length is None:
                await self.write(b"0\r\n\r\n", timeout)
            elif sent != length:
                raise httpcore2.LocalProtocolError("the content has changed its size")
        finally:
            if isinstance(pieces, AsyncGenerator):
                await pieces.aclose()

    async def answer(self, timeout: float | None) -> tuple[int, bool, dict[str, str]]:
        """Return the status of the next answer, whether the connection may be used again, and the headers, whose names
        are in lower case."""
        import httpcore2

        while True:
            head, *lines = (await self._until(b"\r\n\r\n", timeout)).split(b"\r\n")
            if not (found := _STATUS.fullmatch(head)):
                raise httpcore2.RemoteProtocolError("what the server sent is no HTTP/1.1")
            headers: dict[str, str] = {}
            for line in lines:
                name, colon, value = line.partition(b":")
                if not colon or not _NAME.fullmatch(name):
                    raise httpcore2.RemoteProtocolError("the server sent a header that is none")
                key, text = name.decode("ascii").lower(), value.strip(b" \t").decode("latin-1")
                if key in headers:
                    if key == "content-length" and headers[key] != text:
                        raise httpcore2.RemoteProtocolError("the server sent two lengths of one answer")
                    text = text if key == "content-length" else f"{headers[key]}, {text}"
                headers[key] = text
            status = int(found[2])
            if status >= 200 or status == 101:
                is_kept = found[1] == b"1" and status != 101 and "close" not in headers.get("connection", "").lower()
                return status, is_kept, headers

    async def _until(self, mark: bytes, timeout: float | None) -> bytes:
        """Return what comes before a mark, which is taken as well."""
        import httpcore2

        while (end := self.rest.find(mark, self._at)) < 0:
            if len(self.rest) - self._at > _HEAD_BYTES:
                raise httpcore2.RemoteProtocolError("the server sent too long a head")
            data = await self.stream.read(READ_BYTES, timeout)
            if not data:
                raise httpcore2.RemoteProtocolError("the server ended the connection without an answer")
            self.rest, self._at = self.rest[self._at :] + data, 0
        found = self.rest[self._at : end]
        self._at = end + len(mark)
        if self._at == len(self.rest):
            self.rest, self._at = b"", 0
        return found

    async def line(self, timeout: float | None) -> bytes:
        """Return the next line, without its end."""
        return await self._until(b"\r\n", timeout)

    async def read(self, most: int, timeout: float | None) -> bytes:
        """Return the next bytes, empty at the end of the connection."""
        if not self.rest:
            data: bytes = await self.stream.read(most, timeout)
            return data
        end = min(self._at + most, len(self.rest))
        found = self.rest[self._at : end]
        self._at = end
        if end == len(self.rest):
            self.rest, self._at = b"", 0
        return found

    async def write(self, data: bytes, timeout: float | None) -> None:
        """Send bytes."""
        await self.stream.write(data, timeout)

    async def aclose(self) -> None:
        """Close the connection, also for a caller that is cancelled."""
        with waiting.shield(CLOSE_S):
            await self.stream.aclose()


class HttpAnswer:
    """An answer whose body is read piece by piece."""

    def __init__(
        self,
        connections: Connections,
        connection: Connection,
        status: int,
        headers: dict[str, str],
        timeout: float | None,
        *,
        is_kept: bool,
    ) -> None:
        import httpcore2

        self.status, self.headers, self.connection = status, headers, connection
        self._connections, self.timeout, self._is_kept = connections, timeout, is_kept
        self._is_closed = False
        self._is_chunked = "transfer-encoding" in headers
        self._left: int | None = None
        """Bytes of the body, or of its chunk, that are still to come; None: up to the end of the connection."""
        self._is_first = True
        # RFC 9112 §6.3: how long a body is
        if status in (101, 204, 304):
            self._left, self._is_chunked = 0, False
        elif self._is_chunked:
            if headers["transfer-encoding"].lower() != "chunked":
                raise httpcore2.RemoteProtocolError("the server sent a transfer encoding that is not known")
            self._left = 0
        elif "content-length" in headers:
            if not re.fullmatch(r"[0-9]{1,18}", headers["content-length"]):
                raise httpcore2.RemoteProtocolError("the server sent a length that is none")
            self._left = int(headers["content-length"])
        else:
            self._is_kept = False
        self._is_over = self._left == 0 and not self._is_chunked

    async def read(self) -> bytes:
        """Return the next piece of the body, empty at its end."""
        import httpcore2

        if self.status == 101:
            raise httpcore2.RemoteProtocolError("the server changed to a protocol that was not asked for")
        if self._is_chunked and self._left == 0 and not self._is_over:
            await self._next_chunk()
        if self._is_over:
            return b""
        data = await self.connection.read(
            BODY_BYTES if self._left is None else min(self._left, BODY_BYTES), self.timeout
        )
        if self._left is None:
            self._is_over = not data
        elif not data:
            raise httpcore2.RemoteProtocolError("the server ended the connection within an answer")
        else:
            self._left -= len(data)
            self._is_over = not self._left and not self._is_chunked
        return data

    async def _next_chunk(self) -> None:
        """Read what is between two chunks (RFC 9112 §7.1)."""
        import httpcore2

        is_parted = self._is_first or await self.connection.line(self.timeout) == b""
        self._is_first = False
        found = _SIZE.fullmatch(await self.connection.line(self.timeout))
        if not is_parted or not found:
            raise httpcore2.RemoteProtocolError("the server sent a chunk that is none")
        self._left = int(found[1], 16)
        if not self._left:
            while await self.connection.line(self.timeout):
                pass  # a trailer
            self._is_over = True

    async def whole(self) -> bytes:
        """Return the rest of the body."""
        pieces = []
        while data := await self.read():
            pieces.append(data)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def aclose(self) -> None:
        """Close the answer; its connection is closed, too, if there was more to read."""
        if not self._is_closed:
            self._is_closed = True
            await self._connections.give(self.connection, is_kept=self._is_kept and self._is_over)
