"""Requests to the session's proxy, port 3128 of its own address. No input, no output.

For programs that follow proxy variables, and for kernels that cannot steer connections. A request is CONNECT, with a
port, or has an absolute target of plain HTTP (RFC 9110, 9.3.6; RFC 9112, 3.2). What is asked for goes through the
checks of a connection that was steered; a refusal has its reason in the reason phrase, which many programs print.
"""

from __future__ import annotations

from ipaddress import ip_address

import attrs
import h11

from egress import http
from egress.policy import Address, Reason, unwrapped

PROXY_PORT = 3128
ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"

_BODY = {b"content-length", b"transfer-encoding"}
_STATUSES = {
    Reason.BAD_HTTP: 400,
    Reason.TIMEOUT: 408,
    Reason.ERROR: 500,
    Reason.NO_ADDRESS: 502,
    Reason.RESOLVER: 502,
    Reason.DIAL: 502,
    Reason.UPSTREAM: 502,
}


class BadProxyRequest(Exception):
    """A request that names no host and port."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@attrs.frozen
class ProxyRequest:
    """A request that names its host: a canonical name, or an address."""

    host: str | Address
    port: int
    is_tunnel: bool
    rest: bytes
    """Bytes for the server: those behind the head of CONNECT, else all bytes of the client so far."""


class ProxyReader:
    """Reader of the head of a client's first request."""

    def __init__(self) -> None:
        self._reader = h11.Connection(h11.SERVER, max_incomplete_event_size=http.MAX_HEAD_BYTES)
        self._data = bytearray()

    def feed(self, data: bytes) -> ProxyRequest | None:
        """Return the request once its head is whole, None while more is needed. No bytes are the end of the stream.

        Raises:
            BadProxyRequest: the bytes are no request to a proxy, or end within its head.
        """
        self._data += data
        try:
            self._reader.receive_data(data)
            event = self._reader.next_event()
        except h11.RemoteProtocolError as error:
            raise BadProxyRequest(Reason.BAD_HTTP, f"no request to a proxy: {error}") from None
        match event:
            case h11.Request(method=b"CONNECT"):
                return self._tunnel(event)
            case h11.Request():
                return self._forwarded(event)
            case h11.ConnectionClosed():
                raise BadProxyRequest(Reason.BAD_HTTP, "no request came")
        return None

    def _tunnel(self, request: h11.Request) -> ProxyRequest:
        if _BODY.intersection(name for name, _ in request.headers):
            raise BadProxyRequest(Reason.BAD_HTTP, "CONNECT has no body")
        host, port = _split(request.target)
        if port is None:
            raise BadProxyRequest(Reason.BAD_HTTP, "CONNECT names a host and a port")
        return ProxyRequest(host, port, True, self._reader.trailing_data[0])

    def _forwarded(self, request: h11.Request) -> ProxyRequest:
        absolute = http.split_absolute(request.target)
        if absolute is None:
            raise BadProxyRequest(
                Reason.BAD_HTTP, "a proxy is asked by CONNECT or for a target that begins with http://"
            )
        host, port = _split(absolute[0])
        return ProxyRequest(host, http.HTTP_PORT if port is None else port, False, bytes(self._data))


def _split(authority: bytes) -> tuple[str | Address, int | None]:
    split = http.split_authority(authority)
    if split is None:
        raise BadProxyRequest(Reason.BAD_NAME, "the target is no name and no address")
    host, port = split
    try:
        return unwrapped(ip_address(host)), port
    except ValueError:
        return host, port


def refusal(reason: Reason, text: str) -> bytes:
    """Return the answer to a request that is refused, or whose server is not reached; `text` says of what."""
    phrase = f"{reason}: {text}"
    return http.refusal(_STATUSES.get(reason, 403), phrase, phrase=phrase)
