"""The operator's proxy: a connection through it by CONNECT (RFC 9110, 9.3.6), where the node reaches nothing by itself.

The proxy looks a name up and dials; no address of it is known here, so none can be checked. What is checked are the
rules on names, literal addresses, and names that lead to machines rather than into the internet.

The answer is read up to the end of its head and no further, for what follows is the server's. Owns no deadline.
"""

from __future__ import annotations

import base64
import re
import socket
from ipaddress import IPv6Address, ip_address

import h11
import trio

from egress import relay
from egress.policy import Address
from egress.protocol import UpstreamProxy

MAX_HEAD_BYTES = 16 * 1024
"""Bytes of the answer, interim answers included."""

_HEAD_END = re.compile(rb"\n\r?\n")
_LOCAL_SUFFIXES = ("localhost", "local", "internal", "home.arpa")
"""RFC 6761, 6.3; RFC 6762, 3; the ICANN board's resolution 2024.07.29.06; RFC 8375."""


class NotTunnelled(Exception):
    """The proxy gave no connection. The text says what it did, in few words and without bytes of it."""


def is_local_name(name: str) -> bool:
    """Tell whether a canonical name is one of a machine or a site: the proxy would find its own services by it."""
    return "." not in name or any(f".{name}".endswith(f".{suffix}") for suffix in _LOCAL_SUFFIXES)


async def tunnel(proxy: UpstreamProxy, host: str | Address, port: int) -> socket.socket:
    """Return a socket to a port of a host, through the proxy.

    Raises:
        NotTunnelled: the proxy refuses, does not speak HTTP, or can't be reached.
    """
    try:
        sock = await relay.dial(ip_address(proxy.address), proxy.port)
    except OSError as error:
        raise NotTunnelled(relay.name_of(error)) from None
    try:
        await _ask(sock, proxy, f"[{host}]:{port}" if isinstance(host, IPv6Address) else f"{host}:{port}")
    except OSError as error:
        relay.close(sock, with_reset=True)
        raise NotTunnelled(relay.name_of(error)) from None
    except BaseException:
        relay.close(sock, with_reset=True)
        raise
    return sock


async def _ask(sock: socket.socket, proxy: UpstreamProxy, target: str) -> None:
    http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
    headers = [("Host", target)]
    if proxy.credentials:
        headers.append(("Proxy-Authorization", f"Basic {base64.b64encode(proxy.credentials.encode()).decode()}"))
    request = http.send(h11.Request(method="CONNECT", target=target, headers=headers))
    await relay.send_all(sock, (request or b"") + (http.send(h11.EndOfMessage()) or b""))
    left = MAX_HEAD_BYTES
    while True:
        head = await _head(sock, left)
        left -= len(head)
        try:
            http.receive_data(head)
            answer = http.next_event()
        except h11.RemoteProtocolError:
            raise NotTunnelled("no HTTP") from None
        if isinstance(answer, h11.Response):
            if not 200 <= answer.status_code < 300:
                raise NotTunnelled(f"status {answer.status_code}")
            return
        if not isinstance(answer, h11.InformationalResponse):
            raise NotTunnelled("no HTTP")


async def _head(sock: socket.socket, most: int) -> bytes:
    """Read up to the first empty line."""
    head = b""
    while len(head) < most:
        try:
            seen = sock.recv(most - len(head), socket.MSG_PEEK)
        except BlockingIOError:
            await trio.lowlevel.wait_readable(sock)
            continue
        if not seen:
            raise NotTunnelled("closed")
        end = _HEAD_END.search(head + seen)
        head += sock.recv(len(seen) if end is None else end.end() - len(head))
        if end is not None:
            return head
    raise NotTunnelled("head too long")
