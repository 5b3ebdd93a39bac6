"""One connection of a session: from its destination to a name, through the policy, to an address, and its bytes.

The order of checks: the destination stands for a name or is an address; a rule allows it; the addresses of the name,
each checked and judged by the rules right before it is dialled; what the client sends first. A refusal, and any fault
of ours, is a reset; a refused request of HTTP gets an answer.

What the client sends first is looked at before it is forwarded. On port 443 it is awaited, before anything is dialled,
and has to be a TLS ClientHello that names the host. On other ports the server may speak first; there a ClientHello has
to name the host, and so does each request of HTTP. So has a second ClientHello, which a server may ask for. Anything
else goes through as it is: an explicit rule allowed the port. A destination that is an address has no name that could
be compared.

In the mode `ask` a connection to a host that no rule decides on is held, before a byte of it is read or its name is
looked up, until a policy decides or the time for that has passed.

A connection to the session's proxy gets its destination from the client's first request. Until the proxy has answered,
a refusal is an answer.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from ipaddress import IPv4Address

import trio

from egress import relay
from egress.brokering import Carry
from egress.guarded import GuardedRelay
from egress.handed import BrokerAway
from egress.hello import CHANGE_CIPHER_SPEC, ClientHello, HelloReader, NotTls, is_retry
from egress.http import MAX_FEED_BYTES, HttpGuard, looks_like_http
from egress.names import OWN_ADDRESS, RANGE, SyntheticName
from egress.policy import Address, Reason
from egress.protocol import EgressEntry, SecretUse, UpstreamProxy
from egress.proxy import ESTABLISHED, PROXY_PORT, BadProxyRequest, ProxyReader, ProxyRequest, refusal
from egress.resolver import LookupFailed, NoSuchName
from egress.state import Refusal, WayOutState
from egress.upstream import NotTunnelled, is_local_name, tunnel

TLS_PORT = 443
FIRST_BYTES_S = 10.0
"""The longest wait for the rest of a beginning that is not clear yet, and for a ClientHello on port 443."""

_MANY_PIECES, _PIECES_PAUSE_S = 32, 0.05
"""A beginning that comes in more pieces is looked at less often."""

_FAREWELL_S = 2.0


class CarriedConnection:
    """A connection from its accept(2) to its end. `ended` is set when both sockets are closed and it is reported."""

    def __init__(
        self, state: WayOutState, client: socket.socket, destination: IPv4Address, port: int, *, is_narrow: bool = False
    ) -> None:
        self.ended = trio.Event()
        self._is_narrow = is_narrow
        self._state = state
        self._client = client
        self._server: socket.socket | None = None
        self._destination: Address = destination
        self._port = port
        self._is_to_proxy = (destination, port) == (OWN_ADDRESS, PROXY_PORT)
        self._request: ProxyRequest | None = None
        """Request to the proxy, once it is read."""
        self._is_answer_due = False
        """Whether a refusal is to be told to the proxy's client."""
        self._bad_request: str | None = None
        """Sentence on a request to the proxy that names no host and port."""
        self._entry: SyntheticName | None = None
        self._address: Address | None = None
        self._scope = trio.CancelScope()
        self._reading_server = trio.CancelScope()
        self._guard: GuardedRelay | None = None
        self._hello_bytes = 0
        """Length of the ClientHello that the client's first bytes begin with; 0 is none."""
        self._uses: Sequence[SecretUse] = ()
        """Secrets that the host has in this session; with one, the connection is handed over to the broker."""
        self._has_let_go = trio.Event()
        """Set when nobody reads the server in the way of connections that are not handed over."""
        self._is_retry, self._has_answered = False, trio.Event()
        """Whether the server asks for a second ClientHello; known with the event."""
        self._rule: str | None = None
        self._held: Refusal | None = None
        """The refusal of a connection that ends while it waits for a decision; None if it does not wait."""
        self._refusal: Refusal | None = None
        self._reason: Reason | None = None
        self._cause: str | None = None
        self._is_orderly = self._has_server_ended = False
        self._up = self._down = 0
        self._dial_ms: float | None = None
        self._began, self._began_at = trio.current_time(), time.time()

    @property
    def is_cut(self) -> bool:
        """Whether the connection was told to end."""
        return self._scope.cancel_called

    def cut(self, cause: str) -> None:
        """End the connection by a reset; the first cause given counts."""
        self._cause = self._cause or cause
        self._scope.cancel()

    def judge_again(self) -> None:
        """Cut the connection if the session's policy, which has changed, no longer allows it."""
        if self._held or (self._entry is None and self._destination in RANGE):
            return  # it judges for itself when it begins or goes on, or the proxy was not asked for anything yet
        try:
            self._state.judge(self._name, self._address if self._entry else self._literal, self._port)
        except Refusal:
            self.cut("policy")
        if self._uses and self._uses != self._uses_now():
            self.cut("policy")

    async def run(self) -> None:
        """Carry the connection to its end. Never raises."""
        try:
            await self._carry_or_refuse()
            if self._is_answer_due and not self.is_cut:
                await self._answer_refusal()
        finally:
            self._close()

    async def _carry_or_refuse(self) -> None:
        try:
            with self._scope:
                await self._carry()
        except Refusal as refusal:
            self._refuse(refusal)
        except OSError as error:
            self._cause = self._cause or relay.name_of(error)
        except Exception as error:  # noqa: BLE001 - a fault of ours refuses one connection, and no other
            self._fault(error)

    # Before the relay

    @property
    def _name(self) -> str | None:
        if self._entry:
            return self._entry.name
        return self._request.host if self._request and isinstance(self._request.host, str) else None

    @property
    def _literal(self) -> Address | None:
        return None if self._name else self._destination

    async def _carry(self) -> None:
        if self._is_to_proxy:
            await self._carry_request(await self._proxy_request())
            return
        await self._decide()
        first, kind = await self._awaited_hello() if self._port == TLS_PORT else (b"", None)
        await self._connect()
        await self._relay(first, kind)

    async def _connect(self) -> None:
        began = trio.current_time()
        self._server = await self._dial()
        if self._is_narrow:
            relay.narrow(self._server)
        self._state.pacing.add(self._client, self._server)
        self._dial_ms = round((trio.current_time() - began) * 1000, 3)

    async def _decide(self) -> None:
        """Find the name that the destination stands for, and the rule that allows it."""
        if not self._name and self._destination in RANGE:
            self._use(self._state.name_at(IPv4Address(self._destination)), Reason.UNKNOWN_ADDRESS)
        self._rule = await self._allowing_rule()
        if self._request and isinstance(self._request.host, str):
            self._use(self._state.names.give(self._request.host), Reason.LIMIT)

    async def _allowing_rule(self) -> str | None:
        """Return the text of the rule that allows the destination, None if the mode does; wait while nothing decides.

        Raises:
            Refusal: a rule denies it, nothing has decided in time, or it is an address that no rule opens.
        """
        while True:
            changed = self._state.policy_changed
            try:
                rule = self._state.judge(self._name, self._literal, self._port)
            except Refusal as refusal:
                if refusal.reason is not Reason.UNANSWERED:
                    raise
                self._held = refusal
            else:
                self._held = None
                return rule
            host = self._name or self._destination
            if not isinstance(host, str) and self._state.machine.check.refusal(host) is not None:
                raise Refusal(Reason.BAD_ADDRESS)
            with trio.move_on_at(self._state.ask(host, self._port)) as patience:
                await self._wait_with_client(changed)
            if patience.cancelled_caught:
                raise self._held

    async def _wait_with_client(self, changed: trio.Event) -> None:
        """Wait for an event, and cut the connection when the client ends its stream before: it has given up.

        What the client has sent stays unread, so that being readable says nothing; an epoll(7) of its own waits for
        EPOLLRDHUP alone. It takes the place that the descriptor of the server will have.
        """
        with select.epoll() as ends:
            ends.register(self._client, select.EPOLLRDHUP)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._cut_when_readable, ends.fileno())
                await changed.wait()
                nursery.cancel_scope.cancel()

    async def _cut_when_readable(self, fd: int) -> None:
        await trio.lowlevel.wait_readable(fd)
        self.cut("gave up")

    def _use(self, entry: SyntheticName | None, otherwise: Reason) -> None:
        if entry is None:
            raise Refusal(otherwise)
        self._entry = entry
        entry.uses += 1

    async def _awaited_hello(self, ahead: bytes = b"") -> tuple[bytes, str | None]:
        """Return the ClientHello that has to come, if there is a name that it has to be for."""
        if not self._entry:
            return ahead, None
        first, kind = await self._first_bytes(ahead)
        if kind != "tls":
            raise Refusal(Reason.NOT_TLS)
        return first, kind

    # The proxy

    async def _proxy_request(self) -> ProxyRequest:
        reader, self._is_answer_due = ProxyReader(), True
        with trio.move_on_after(FIRST_BYTES_S):
            try:
                while not (request := reader.feed(await relay.receive(self._client, MAX_FEED_BYTES))):
                    pass
                return request
            except BadProxyRequest as bad:
                self._bad_request = str(bad)
                raise Refusal(bad.reason) from None
        raise Refusal(Reason.TIMEOUT)

    async def _carry_request(self, request: ProxyRequest) -> None:
        self._request, self._port = request, request.port
        if not isinstance(request.host, str):
            self._destination = request.host
        await self._decide()
        await self._connect()
        self._is_answer_due = False
        if not request.is_tunnel:
            await self._relay(request.rest, "http")
            return
        await relay.send_all(self._client, ESTABLISHED)
        is_tls = self._port == TLS_PORT
        first, kind = await self._awaited_hello(request.rest) if is_tls else (request.rest, None)
        await self._relay(first, kind)

    async def _answer_refusal(self) -> None:
        """Tell the proxy's client why there is no connection; the end is no reset then."""
        reason = (self._refusal.reason if self._refusal else self._reason) or Reason.ERROR
        text = self._bad_request or f"{self._name or self._destination}:{self._port}"
        if reason is Reason.UPSTREAM:
            text += f" ({self._cause})"
        with trio.move_on_after(_FAREWELL_S), suppress(OSError):
            await relay.send_all(self._client, refusal(reason, text))
            relay.shut(self._client)
            self._is_orderly = True
        await self._farewell()

    # The first bytes and the address

    async def _dial(self) -> socket.socket:
        """Return a socket that is connected to one of the addresses; each was checked and is judged right before."""
        if self._state.machine.upstream is not None:
            return await self._dial_through(self._state.machine.upstream)
        with trio.move_on_after(self._state.limits.dial_s) as scope:
            addresses = await self._addresses()
            last: OSError | Refusal = Refusal(Reason.NO_ADDRESS)
            for left, address in zip(range(len(addresses), 0, -1), addresses, strict=True):
                try:
                    if self._state.machine.check.refusal(address) is not None:  # may be the host's own since
                        raise Refusal(Reason.BAD_ADDRESS)
                    self._address = address
                    self._rule = self._state.judge(self._name, address, self._port)
                    with trio.move_on_after((scope.deadline - trio.current_time()) / left):
                        return await relay.dial(address, self._port)
                    last = OSError(errno.ETIMEDOUT, "no answer")
                except (OSError, Refusal) as error:
                    last = error
            if isinstance(last, Refusal):
                raise last
            self._reason = Reason.DIAL
            raise last
        self._reason = Reason.DIAL
        raise OSError(errno.ETIMEDOUT, "no answer")

    async def _dial_through(self, proxy: UpstreamProxy) -> socket.socket:
        """Return a socket that leads to the host by way of the operator's proxy, which finds the addresses of names."""
        host = self._name or self._destination
        refused = is_local_name(host) if isinstance(host, str) else self._state.machine.check.refusal(host) is not None
        if refused:
            raise Refusal(Reason.BAD_ADDRESS)
        self._state.spend(len(self._name or ""), 0)  # the proxy looks it up outside
        try:
            with trio.move_on_after(self._state.limits.dial_s):
                return await tunnel(proxy, host, self._port)
            self._cause = "timeout"
        except NotTunnelled as error:
            self._cause = str(error)
        raise Refusal(Reason.UPSTREAM)

    async def _addresses(self) -> list[Address]:
        if self._entry is None:
            return [self._destination]
        try:
            return list(await self._state.pin(self._entry))
        except NoSuchName:
            raise Refusal(Reason.NO_ADDRESS) from None
        except LookupFailed:
            raise Refusal(Reason.RESOLVER) from None

    async def _first_bytes(self, ahead: bytes = b"") -> tuple[bytes, str]:
        """Return what the client has sent first, and the kind of it: `tls`, `http`, `raw`, or `end` if that is all.

        `ahead` are bytes of it that were read already.

        Raises:
            Refusal: it is a ClientHello that does not name the host, or is not clear within `FIRST_BYTES_S`.
        """
        hello, first, turns = HelloReader(), b"", 0
        with trio.CancelScope() as scope:
            if self._port == TLS_PORT:
                scope.deadline = trio.current_time() + FIRST_BYTES_S
            while data := ahead or await relay.receive(self._client, relay.CHUNK_BYTES):
                ahead = b""
                scope.deadline = min(scope.deadline, trio.current_time() + FIRST_BYTES_S)
                first += data
                match hello.feed(data):
                    case ClientHello(server_name=name):
                        if name != self._name:
                            raise Refusal(Reason.SNI)
                        self._hello_bytes, self._uses = hello.size, self._uses_now()
                        return first, "tls"
                    case NotTls():
                        is_http = looks_like_http(first)
                        if is_http is not None:
                            return first, "http" if is_http else "raw"
                turns += 1
                if turns > _MANY_PIECES:  # each look is at all bytes so far
                    await trio.sleep(_PIECES_PAUSE_S)
            return first, "end"  # no request and no ClientHello ends before its first line, or record, does
        raise Refusal(Reason.TIMEOUT)

    def _uses_now(self) -> Sequence[SecretUse]:
        return self._state.uses_at(self._name, self._port) if self._name else ()

    # The relay

    async def _relay(self, first: bytes, kind: str | None) -> None:
        """Carry both directions to their ends; `kind` is that of the first bytes, None before they are looked at."""
        server = self._server
        assert server is not None
        self._touch()
        async with trio.open_nursery() as nursery:
            if self._uses:
                self._has_let_go.set()
            else:
                nursery.start_soon(self._in_relay, self._to_client, server)
            await self._in_relay(self._to_server, server, first, kind, nursery)
        if self._guard or self._uses:
            if self._guard and self._guard.refused:
                self._refuse(Refusal(self._guard.refused))
            await self._farewell()
        if not self.is_cut:
            self._cause, self._is_orderly = "end", True

    async def _in_relay(self, work: Callable[..., Awaitable[None]], *arguments: object) -> None:
        """Run one direction; what ends it by force ends the other, too."""
        try:
            await work(*arguments)
        except Refusal as refusal:
            self._refuse(refusal)
            self._scope.cancel()
        except OSError as error:
            self.cut(relay.name_of(error))
        except Exception as error:  # noqa: BLE001 - as in `run`
            self._fault(error)
            self._scope.cancel()

    async def _to_server(self, server: socket.socket, first: bytes, kind: str | None, nursery: trio.Nursery) -> None:
        if self._entry and kind is None:
            first, kind = await self._first_bytes(first)
        if kind == "http":
            await self._guard_requests(server, first, nursery)
            return
        if self._uses:
            await self._hand_over(server, first)
            return
        if self._hello_bytes:
            await self._send_up(server, first[: self._hello_bytes])
            await self._has_answered.wait()
            first = first[self._hello_bytes :]
            if self._is_retry:
                first = await self._second_hello(first)
        await self._send_up(server, first)
        await relay.copy(self._client, server, self._count_up, lambda: False)

    async def _send_up(self, server: socket.socket, data: bytes) -> None:
        if data:
            self._count_up(len(data))
            await relay.send_all(server, data)

    async def _second_hello(self, first: bytes) -> bytes:
        """Return what the client sends after a request for another ClientHello, at least all of that.

        Raises:
            Refusal: it does not name the host, is something else, or is not there within `FIRST_BYTES_S`.
        """
        with trio.move_on_after(FIRST_BYTES_S):
            while True:
                match HelloReader().feed(first.removeprefix(CHANGE_CIPHER_SPEC)):
                    case ClientHello(server_name=name) if name == self._name:
                        return first
                    case ClientHello() | NotTls() if not CHANGE_CIPHER_SPEC.startswith(first):
                        raise Refusal(Reason.SNI)
                if not (data := await relay.receive(self._client, relay.SMALL_CHUNK_BYTES)):
                    raise Refusal(Reason.SNI)
                first += data
        raise Refusal(Reason.TIMEOUT)

    async def _hand_over(self, server: socket.socket, first: bytes) -> None:
        """Have the broker open the TLS that begins with these bytes, to the connection's end."""
        self._reading_server.cancel()
        await self._has_let_go.wait()
        if self._down:
            raise Refusal(Reason.NOT_TLS)  # who has spoken before the ClientHello is no server of TLS
        if self._has_server_ended:
            raise ConnectionResetError(errno.ECONNRESET, "a ClientHello without a server")
        machine = self._state.machine
        if machine.broker is None or self._name is None:
            raise Refusal(Reason.BROKER)
        order = Carry(0, self._state.session_id, self._name, self._port, tuple(self._uses))
        machine.handed += 1
        try:
            reason = await machine.broker.carry(
                order, first, self._client, server, count_up=self._count_up, count_down=self._count_down
            )
        except BrokerAway:
            raise Refusal(Reason.BROKER) from None
        finally:
            machine.handed -= 1
        if reason is not None:
            self._refuse(Refusal(reason))

    async def _to_client(self, server: socket.socket) -> None:
        try:
            await self._carry_answers(server)
        finally:
            self._has_let_go.set()

    async def _carry_answers(self, server: socket.socket) -> None:
        with self._reading_server:
            self._has_server_ended = await relay.copy(
                server, self._client, self._count_down, lambda: self._guard is not None or self._hello_bytes > 0
            )
            if self._has_server_ended:
                self._has_answered.set()
            elif self._hello_bytes:
                await self._first_answer(server)
                await relay.copy(server, self._client, self._count_down, lambda: False)
            if self._guard:
                await self._guard.answers()

    async def _first_answer(self, server: socket.socket) -> None:
        """Find out whether the server asks for a second ClientHello, and pass on what was read."""
        answer = b""
        while (is_retry_ := is_retry(answer)) is None:
            if not (data := await relay.receive(server, relay.SMALL_CHUNK_BYTES)):
                break
            answer += data
        self._is_retry = bool(is_retry_)
        self._has_answered.set()
        self._count_down(len(answer))
        await relay.send_all(self._client, answer)

    async def _guard_requests(self, server: socket.socket, first: bytes, nursery: trio.Nursery) -> None:
        """Have every request checked from here on, and every answer read, which `_to_client` does from its next one."""
        if self._down:
            raise Refusal(Reason.BAD_HTTP)  # who has spoken before the request is no server of HTTP
        if self._has_server_ended:
            raise ConnectionResetError(errno.ECONNRESET, "a request without a server")
        name, is_proxy = self._name or str(self._destination), self._request is not None and not self._request.is_tunnel
        http, client = HttpGuard(name, self._port, is_proxy=is_proxy), relay.SocketStream(self._client)
        guard = self._guard = GuardedRelay(http, client, relay.SocketStream(server), self._count, self._state.turn)
        for writer in guard.writers:
            nursery.start_soon(self._in_relay, writer.run)
        await guard.requests(first)
        if guard.is_over:
            self._reading_server.cancel()

    async def _farewell(self) -> None:
        """Let the client read the last answer: closed at once, what it still sends would turn that into a reset."""
        with trio.move_on_after(_FAREWELL_S), suppress(OSError):
            while await relay.receive(self._client, relay.CHUNK_BYTES):
                pass

    def _touch(self) -> None:
        """Put off the end of a connection that nothing goes through."""
        self._scope.deadline = trio.current_time() + self._state.limits.idle_s

    def _count_up(self, size: int) -> None:
        self._count(size, 0)

    def _count_down(self, size: int) -> None:
        self._count(0, size)

    def _count(self, up: int, down: int) -> None:
        self._state.spend(up, down)
        self._up += up
        self._down += down
        self._touch()

    # The end

    def _refuse(self, refusal: Refusal) -> None:
        self._refusal = self._refusal or refusal

    def _fault(self, error: Exception) -> None:
        self._refuse(Refusal(Reason.ERROR))
        self._state.machine.fault(self._state.session_id, error)

    def _close(self) -> None:
        self._refusal = self._refusal or self._held
        self._state.machine.report(self._report())  # before the client can know of it
        if self._server is not None:
            self._state.pacing.remove(self._client, self._server)
        relay.close(self._client, with_reset=not self._is_orderly)
        if self._server is not None:
            relay.close(self._server, with_reset=not self._is_orderly or self._refusal is not None)
        if self._entry:
            self._entry.uses -= 1
        if self._refusal:
            self._state.counters.denied += 1
        self.ended.set()

    def _report(self) -> EgressEntry:
        refusal = self._refusal
        return EgressEntry(
            session_id=self._state.session_id,
            time=self._began_at,
            kind="proxy" if self._is_to_proxy else "http" if self._guard else "tcp",
            host=self._name or str(self._destination),
            port=self._port,
            verdict="denied" if refusal else "allowed",
            address=None if self._address is None else str(self._address),
            reason=(refusal.reason if refusal else self._reason),
            rule=refusal.rule if refusal and refusal.rule else self._rule,
            bytes_up=self._up,
            bytes_down=self._down,
            duration_ms=round((trio.current_time() - self._began) * 1000),
            cause=None if refusal and refusal.reason is not Reason.UPSTREAM else self._cause or "idle",
            dial_ms=self._dial_ms,
        )
