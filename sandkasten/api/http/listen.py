"""Listening sockets from `host:port` and `unix:/path`. Accepts nothing.

Without an API key only loopback addresses and unix sockets are opened. Names are resolved once and exactly the resolved
addresses are bound, so the answer that was checked is the one that is served. No socket is inheritable.

`open_listeners` opens sockets for as long as the front runs. `listen_early` opens them before the daemon gives its
privilege away, for ports below 1024 and unix sockets anywhere: the process keeps them for its life, and a front that
ends and starts again gets duplicates. `listen_early` blocks, so call it before there is an event loop or a thread. Its
unix socket files are left to the launcher to remove: the directory may be root's.

Sources: unix(7), bind(2), ipv6(7); socket(7) SO_REUSEADDR.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import ipaddress
import os
import socket
import stat
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

import attrs
import trio

UNIX = "unix:"
BACKLOG = 512


class ListenError(Exception):
    """An address can't be served. The message is one sentence for the operator."""


@attrs.frozen
class Bound:
    """Open listeners and how to reach them."""

    listeners: list[trio.SocketListener]
    addresses: list[str]


def split_host_port(address: str) -> tuple[str, int]:
    """Parse `host:port`, `[v6]:port` or `:port`.

    Raises:
        ListenError: `address` has none of these forms.
    """
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ListenError(f"listen address {address!r}: write an IPv6 address in brackets")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ListenError(f"listen address {address!r} is neither host:port nor unix:/path")
    return host, int(port)


def resolve(address: str, *, loopback_only: bool) -> list[tuple[str, int]]:
    """Return the numeric addresses behind `host:port`, in the resolver's order, each once. Blocking.

    Raises:
        ListenError: the name has no address, or one that is not loopback although `loopback_only`.
    """
    host, port = split_host_port(address)
    try:
        flags = socket.AI_PASSIVE | socket.AI_ADDRCONFIG
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=flags)
    except (socket.gaierror, UnicodeError):
        raise ListenError(f"listen address {address!r}: the name {host!r} has no address") from None
    numeric = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    for ip in numeric:
        if loopback_only and not ipaddress.ip_address(ip.partition("%")[0]).is_loopback:
            raise ListenError(f"refusing to listen on {address!r} ({ip}) without an API key: set one, or use 127.0.0.1")
    return [(ip, port) for ip in numeric]


@contextlib.asynccontextmanager
async def open_listeners(addresses: Sequence[str], *, loopback_only: bool) -> AsyncIterator[Bound]:
    """Open every address; at the end close the sockets and remove the unix socket files.

    Raises:
        ListenError: an address is malformed, refused or taken.
    """
    if not addresses:
        raise ListenError("there is no address to listen on")
    bound = Bound([], [])
    async with contextlib.AsyncExitStack() as stack:
        for address in addresses:
            if address.startswith(UNIX):
                path = address.removeprefix(UNIX)
                listener = stack.enter_context(_unix_listener(path))
                bound.listeners.append(listener)
                bound.addresses.append(f"{UNIX}{path}")
            else:
                look_up = functools.partial(resolve, address, loopback_only=loopback_only)
                for sock in _listen_tcp(address, await trio.to_thread.run_sync(look_up, abandon_on_cancel=True)):
                    stack.enter_context(contextlib.closing(sock))
                    bound.listeners.append(trio.SocketListener(trio.socket.from_stdlib_socket(sock)))
                    bound.addresses.append(url_of(sock))
        yield bound


def _listen_tcp(address: str, resolved: Iterable[tuple[str, int]]) -> list[socket.socket]:
    """Listen on what `address` was resolved to. Raises `ListenError`; nothing is left open then."""
    opened: list[socket.socket] = []
    missing: OSError | None = None
    for ip, port in resolved:
        try:
            opened.append(_listen(ip, port))
        except OSError as error:
            # `localhost` may name an address family this machine hasn't got; one that works is enough.
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                missing = error
                continue
            for sock in opened:
                sock.close()
            raise ListenError(f"can't listen on {address!r}: {error.strerror}") from error
    if not opened:
        raise ListenError(f"can't listen on {address!r}: this machine has no such address") from missing
    return opened


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


def url_of(sock: socket.socket) -> str:
    """Return the URL of a listening TCP socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def _unix_listener(path: str) -> Iterator[trio.SocketListener]:
    with contextlib.closing(bind_unix(path)) as sock:
        created = os.lstat(path)
        try:
            yield trio.SocketListener(trio.socket.from_stdlib_socket(sock))
        finally:
            _remove_if_same(path, created)


def bind_unix(path: str, *, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """Listen on `path` with mode 0600. A socket file without a listener is replaced; any other file is an error.

    Raises:
        ListenError: the path is taken, or can't be used.
    """
    _remove_stale(path, kind)
    sock = socket.socket(socket.AF_UNIX, kind)
    try:
        os.fchmod(sock.fileno(), 0o600)  # bind(2) gives the file this mode, so nobody else can connect in between
        sock.setblocking(False)
        sock.bind(path)
        sock.listen(BACKLOG)
    except (OSError, ValueError) as error:
        sock.close()
        raise ListenError(f"can't listen on unix:{path}: {error}") from error
    return sock


def _remove_stale(path: str, kind: socket.SocketKind) -> None:
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, ValueError):
        return
    if not stat.S_ISSOCK(mode):
        raise ListenError(f"can't listen on unix:{path}: something that is not a socket is in the way")
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError as error:
            raise ListenError(f"can't listen on unix:{path}: {error.strerror or error}") from error
        else:
            raise ListenError(f"can't listen on unix:{path}: another process listens there")


def _remove_if_same(path: str, created: os.stat_result) -> None:
    """Unlink our socket file, but not one that a successor has bound meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        now = os.lstat(path)
        if (now.st_dev, now.st_ino) == (created.st_dev, created.st_ino):
            os.unlink(path)


@attrs.define
class EarlySockets:
    """Sockets that listen since before the daemon gave its privilege away.

    `addresses` is how to reach them. `unix_paths` are the socket files.
    """

    listening: list[socket.socket] = attrs.field(factory=list)
    addresses: list[str] = attrs.field(factory=list)
    unix_paths: list[str] = attrs.field(factory=list)

    def bound(self) -> Bound:
        """Return duplicates for one front. A socket that had been shut down listens again."""
        for each in self.listening:
            each.listen(BACKLOG)
        duplicates = [trio.socket.from_stdlib_socket(each.dup()) for each in self.listening]
        return Bound([trio.SocketListener(each) for each in duplicates], list(self.addresses))

    def close(self) -> None:
        for each in self.listening:
            each.close()


def listen_early(addresses: Sequence[str], *, loopback_only: bool) -> EarlySockets:
    """Listen on every address. Blocking.

    Raises:
        ListenError: an address is malformed, refused or taken; nothing is left open.
    """
    early = EarlySockets()
    try:
        for address in addresses:
            if address.startswith(UNIX):
                _listen_early_unix(early, address.removeprefix(UNIX))
            else:
                opened = _listen_tcp(address, resolve(address, loopback_only=loopback_only))
                early.listening += opened
                early.addresses += map(url_of, opened)
    except BaseException:
        early.close()
        for path in early.unix_paths:
            os.unlink(path)
        raise
    return early


def _listen_early_unix(early: EarlySockets, path: str) -> None:
    sock = bind_unix(path)
    early.listening.append(sock)
    early.unix_paths.append(os.path.abspath(path))
    early.addresses.append(f"{UNIX}{path}")
