"""Sockets that listen before the daemon gives its privilege away: ports below 1024, unix sockets anywhere.

Owns them for the life of the process: the front may end and start again, and gets duplicates each time. Blocking, to be
called before there is an event loop or a thread. Removes no unix socket file: the directory may be root's, so that is
left to the keeper (`sockets`). What is served is judged as in `listen.py`. Sources: socket(7) SO_REUSEADDR; ipv6(7).
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence

import attrs
import trio

from sandkasten.api.http.listen import (
    BACKLOG,
    UNIX,
    Bound,
    ListenError,
    bind_unix,
    numeric_addresses,
    split_host_port,
    url_of,
)

_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


@attrs.define
class Held:
    """Listening sockets, how to reach them, and the unix ones' paths with device and inode."""

    listening: list[socket.socket] = attrs.field(factory=list)
    addresses: list[str] = attrs.field(factory=list)
    sockets: list[tuple[str, int, int]] = attrs.field(factory=list)

    def bound(self) -> Bound:
        """Return listeners of the caller's own on the same sockets, which listen again if they had stopped to."""
        for each in self.listening:
            each.listen(BACKLOG)
        duplicates = [trio.socket.from_stdlib_socket(each.dup()) for each in self.listening]
        return Bound([trio.SocketListener(each) for each in duplicates], list(self.addresses))

    def close(self) -> None:
        for each in self.listening:
            each.close()


def hold(addresses: Sequence[str], *, loopback_only: bool) -> Held:
    """Listen on every address.

    Raises:
        ListenError: an address is malformed, refused or taken; nothing is left open.
    """
    held = Held()
    try:
        for address in addresses:
            if address.startswith(UNIX):
                _hold_unix(held, address.removeprefix(UNIX))
            else:
                _hold_tcp(held, address, loopback_only=loopback_only)
    except BaseException:
        held.close()
        for path, _device, _inode in held.sockets:
            os.unlink(path)
        raise
    return held


def _hold_unix(held: Held, path: str) -> None:
    sock = bind_unix(path)
    held.listening.append(sock)
    found = os.lstat(path)
    held.sockets.append((os.path.abspath(path), found.st_dev, found.st_ino))
    held.addresses.append(f"{UNIX}{path}")


def _hold_tcp(held: Held, address: str, *, loopback_only: bool) -> None:
    host, port = split_host_port(address)
    try:
        flags = socket.AI_PASSIVE | socket.AI_ADDRCONFIG
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=flags)
    except (socket.gaierror, UnicodeError):
        raise ListenError(f"listen address {address!r}: the name {host!r} has no address") from None
    opened = 0
    missing: OSError | None = None
    for ip in numeric_addresses(address, found, loopback_only=loopback_only):
        try:
            sock = _listen(ip, port)
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise ListenError(f"can't listen on {address!r}: {error.strerror}") from error
            missing = error  # `localhost` may name an address family this machine hasn't got; one is enough
            continue
        held.listening.append(sock)
        held.addresses.append(url_of(sock))
        opened += 1
    if not opened:
        raise ListenError(f"can't listen on {address!r}: this machine has no such address") from missing


def _listen(ip: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.setblocking(False)
        sock.bind(socket.getaddrinfo(ip, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0][4])
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock
