"""The broker: it opens the TLS of connections to hosts that have secrets, and puts values in the place of placeholders.

The daemon keeps secrets here and brings egress processes; those hand over connections as two stream sockets each, which
lead to the egress process and not to the network. To the client the broker is the host, by a certificate of the
installation's authority; the server is checked against the machine's authorities before. Between both, HTTP/1 is read
and written anew (`substitution`).

Every wait is bounded: handshakes and writes by deadlines here, a connection without a byte by the egress process, which
closes both sockets then. Memory is: the connections of all egress processes, and what one portion of each has.

Sources: RFC 8446, RFC 9112; unix(7) (SCM_RIGHTS).
"""

from __future__ import annotations

import errno
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar
from weakref import WeakValueDictionary

import attrs
import trio

from egress import brokering as b
from egress.authority import Authority
from egress.guarded import GuardedRelay
from egress.policy import Reason
from egress.protocol import ProtocolError
from egress.relay import send_message
from egress.safe import KeptSecret, Safe
from egress.server import close_all, log, log_fault, next_message
from egress.substitution import SecretGuard

MAX_CONNECTIONS = 2048
HANDSHAKE_S = 10.0
"""Time for TLS with the server, and again with the client."""
WRITE_S = 300.0
"""Time for a client or a server to take one portion."""
_SEND_S = 30.0
"""Time for the daemon or an egress process to take a message."""
_CLOSE_S = 5.0
_OWN_DESCRIPTORS = 64
_PAGE_BYTES = b.MAX_DATAGRAM_BYTES // 2

T = TypeVar("T")
_BROKEN = (trio.BrokenResourceError, trio.ClosedResourceError, ssl.SSLError)


class _NotOpened(Exception):
    """A connection is over before its relay began. `reason`: of a check that ended it."""

    def __init__(self, reason: Reason | None) -> None:
        self.reason = reason


class _Channel:
    """A socket of messages to the daemon or to an egress process."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._sending = trio.Lock()

    async def send(self, message: attrs.AttrsInstance) -> bool:
        """Send a message; tell whether the other end takes messages."""
        data = b.encode(message)
        with trio.move_on_after(_SEND_S):
            async with self._sending:
                with suppress(OSError):  # it is gone: the next read says so
                    await send_message(self.sock, data)
                return True
        return False


@attrs.frozen
class _TlsStream:
    """One side of a connection as `relay.ByteStream`; whatever breaks is an OSError."""

    tls: trio.SSLStream[trio.SocketStream]

    async def receive(self, size: int) -> bytes:
        return bytes(await _unbroken(self.tls.receive_some(size)))

    async def send_all(self, data: bytes) -> None:
        with trio.move_on_after(WRITE_S):
            await _unbroken(self.tls.send_all(data))
            return
        raise OSError(errno.ETIMEDOUT, "the other side takes no bytes")

    async def shut(self) -> None:
        with trio.move_on_after(_CLOSE_S):
            await _unbroken(self.tls.aclose())


async def _unbroken(work: Awaitable[T]) -> T:
    try:
        return await work
    except _BROKEN as error:
        raise ConnectionResetError(errno.ECONNRESET, "the other side has gone") from error


class Broker:
    """See the module's docstring. `outward` checks servers."""

    def __init__(self, channel: socket.socket, safe: Safe, authority: Authority, outward: ssl.SSLContext) -> None:
        self._channel = _Channel(channel)
        self._safe, self._authority, self._outward = safe, authority, outward
        self._turns: WeakValueDictionary[str, trio.Lock] = WeakValueDictionary()
        """A lock for each session, held while bytes of its HTTP are read."""
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = max(1, min(MAX_CONNECTIONS, (descriptors - _OWN_DESCRIPTORS) // 2))
        self._connections: dict[trio.CancelScope, frozenset[str]] = {}
        """Open connections, with the names of the secrets that they may use."""
        self._of_session: Counter[str] = Counter()

    async def run(self) -> None:
        """Serve until the daemon closes its socket. Raises `ProtocolError`."""
        async with trio.open_nursery() as nursery:
            while True:
                try:
                    request, fds = await next_message(self._channel.sock, b.decode_broker_request, max_fds=1)
                except EOFError:
                    break
                answer = self._answer(request, fds, nursery)
                close_all(fds)
                if not await self._channel.send(answer):
                    raise ProtocolError("the daemon does not read its answers")
            nursery.cancel_scope.cancel()

    def _answer(self, request: b.BrokerRequest, fds: list[int], nursery: trio.Nursery) -> b.BrokerAnswer:
        try:
            match request:
                case b.ListSecrets(seq=seq, after=after):
                    return self._page(seq, after)
                case b.PutSecret():
                    return self._put(request)
                case b.DropSecret(seq=seq, name=name):
                    if name not in self._safe:
                        return b.BrokerFailed(seq, "UNKNOWN", "there is no such secret")
                    self._safe.drop(name)
                    self._cut(name)
                case b.JoinEgress(seq=seq):
                    if len(fds) != 1:
                        return b.BrokerFailed(seq, "INVALID", "one socket comes along")
                    nursery.start_soon(self._serve_egress, socket.socket(fileno=fds.pop()))
        except OSError as error:
            log("error", "not_stored", errno=error.errno)
            return b.BrokerFailed(request.seq, "STORAGE", f"the secrets can't be written: {error.strerror}")
        return b.BrokerDone(request.seq)

    def _put(self, request: b.PutSecret) -> b.BrokerAnswer:
        problem = b.secret_problem(request.name, request.value, request.hosts, request.placeholder)
        if problem is not None:
            return b.BrokerFailed(request.seq, "INVALID", ": ".join(problem))
        if request.name not in self._safe and len(self._safe) >= b.MAX_SECRETS:
            return b.BrokerFailed(request.seq, "FULL", f"there are {b.MAX_SECRETS} secrets, the most that are kept")
        self._safe.put(KeptSecret(request.name, request.value, request.hosts, request.placeholder))
        self._cut(request.name)
        return b.BrokerDone(request.seq)

    def _cut(self, name: str) -> None:
        """End the connections that may use a secret: what they know of it holds no more."""
        for scope, names in self._connections.items():
            if name in names:
                scope.cancel()

    def _page(self, seq: int, after: str) -> b.SecretsListed:
        """Return the secrets behind `after` that fit into one datagram."""
        rest = [facts for facts in self._safe.facts if facts.name > after]
        page: list[b.SecretFacts] = []
        size = 0
        for facts in rest:
            size += len(b.encode(facts))
            if size > _PAGE_BYTES:
                break
            page.append(facts)
        return b.SecretsListed(seq, tuple(page), self._authority.certificate, is_last=len(page) == len(rest))

    # Connections

    async def _serve_egress(self, sock: socket.socket) -> None:
        """Serve one egress process until it goes away. Its connections end with its sockets."""
        channel = _Channel(sock)
        try:
            with sock:
                async with trio.open_nursery() as nursery:
                    while True:
                        carry, fds = await next_message(sock, b.decode_carry, max_fds=2)
                        nursery.start_soon(self._serve, channel, carry, fds)
        except* EOFError:
            pass
        except* (ProtocolError, OSError) as group:
            log("error", "egress_not_understood", reason=str(group.exceptions[0]))

    async def _serve(self, channel: _Channel, carry: b.Carry, fds: list[int]) -> None:
        """Serve one connection to its end, and tell the egress process of that."""
        reason: Reason | None = Reason.ERROR
        try:
            if len(fds) != 2:
                raise OSError(errno.EINVAL, f"{len(fds)} descriptors")
            with socket.socket(fileno=fds.pop()) as server, socket.socket(fileno=fds.pop()) as client:
                reason = await self._carry(carry, client, server)
        except Exception as error:  # noqa: BLE001 - one connection must not end the others
            log_fault(carry.session_id, error)
        finally:
            close_all(fds)
        await channel.send(b.CarryEnded(carry.seq, reason))

    async def _carry(self, carry: b.Carry, client_end: socket.socket, server_end: socket.socket) -> Reason | None:
        """Carry a connection; return the reason of the check that ended it, if one did.

        A session has at most as many as are left for all, so that there is some left for one that has none.
        """
        if self._of_session[carry.session_id] >= self._most - len(self._connections):
            return Reason.LIMIT
        with trio.CancelScope() as scope:
            self._connections[scope] = frozenset(use.name for use in carry.uses)
            self._of_session[carry.session_id] += 1
            try:
                server = await _opened(server_end, self._outward, carry.host, Reason.CERTIFICATE)
                client = await _opened(client_end, self._authority.context_for(carry.host), None, Reason.UNTRUSTED)
                values = self._safe.values_for(carry.uses, carry.host, carry.port)
                turn = self._turns.setdefault(carry.session_id, trio.Lock())
                guard = SecretGuard(carry.host, carry.port, values)
                relay = GuardedRelay(guard, client, server, _count_nothing, turn)
                await _relay(relay, client)
                return relay.refused
            except _NotOpened as ended:
                return ended.reason
            finally:
                del self._connections[scope]
                self._of_session[carry.session_id] -= 1
                if not self._of_session[carry.session_id]:
                    del self._of_session[carry.session_id]
        return None


async def _opened(sock: socket.socket, context: ssl.SSLContext, host: str | None, reason: Reason) -> _TlsStream:
    """Return a side after its handshake; `host` is the name of a server, None for the side of the client. Raises
    `_NotOpened`, for `reason` if it was TLS that failed."""
    transport = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
    tls = trio.SSLStream(transport, context, server_hostname=host, server_side=host is None, https_compatible=True)
    try:
        with trio.fail_after(HANDSHAKE_S):
            await tls.do_handshake()
    except trio.TooSlowError:
        raise _NotOpened(Reason.TIMEOUT) from None
    except _BROKEN as error:
        is_of_tls = isinstance(error, ssl.SSLError) or isinstance(error.__cause__, ssl.SSLError)
        raise _NotOpened(reason if is_of_tls else None) from None
    return _TlsStream(tls)


def _count_nothing(_up: int, _down: int) -> None:
    """Leave the counting to the egress process."""


async def _relay(relay: GuardedRelay, client: _TlsStream) -> None:
    """Carry both directions to their ends; what ends one by force ends the other, too."""
    async with trio.open_nursery() as nursery:

        async def read(work: Callable[[], Awaitable[None]]) -> None:
            try:
                await work()
            except OSError:
                if not relay.is_over:  # else the last bytes are under way
                    nursery.cancel_scope.cancel()
            if relay.is_over:
                reading.cancel()

        async def requests() -> None:
            await relay.requests(await client.receive(_FIRST_BYTES))

        for writer in relay.writers:
            nursery.start_soon(writer.run)
        reading = trio.CancelScope()
        with reading:
            async with trio.open_nursery() as readers:
                readers.start_soon(read, requests)
                readers.start_soon(read, relay.answers)


_FIRST_BYTES = 16 * 1024


async def serve(channel: socket.socket, safe: Safe, authority: Authority, outward: ssl.SSLContext) -> int:
    """Serve a daemon on its socket; return the status to end with: 0 when the daemon has closed it."""
    log("info", "started")
    status = 0
    try:
        await Broker(channel, safe, authority, outward).run()
    except* ProtocolError as group:
        log("error", "protocol", reason=str(group.exceptions[0]))
        status = 1
    return status
