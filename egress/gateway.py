"""The preview gateway: from clients outside to servers inside sessions, each request by leave of the daemon.

One task serves a client's connection, a request after the other, since a proxy in front may send those of many people
over one. Each request has a connection of its own inside, over a socket that the daemon hands out with its leave. Both
sides are parsed, and what goes on is written anew (`preview`); after a WebSocket's 101 bytes are passed as they come.
So are those of a published port, which has a listener of its own and no HTTP: each connection is one request.

Every wait for a client has a deadline, every buffer is one portion of `_READ_BYTES` or one head, and the numbers of
connections and of requests of one session are bounded. When all places are taken, a connection more ends the one that
has gone longest without a request that was let in.

Sources: RFC 9112; RFC 6455, 4; tcp(7) (keep-alive of connections whose other end went away).
"""

from __future__ import annotations

import errno
import math
import resource
import select
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import attrs
import h11
import trio

from egress import knocking as k
from egress import relay
from egress.preview import Site, Visit, VisitRefused, answer_outside
from egress.server import close_all, log, log_fault, next_message

MAX_CONNECTIONS = 1024
MAX_OF_SESSION = 128
"""Requests of one session that are under way."""

HEAD_S = 30.0
"""Time for the next request on a connection, its head included."""
BODY_S = 60.0
"""Time without a byte of a body that a client is sending."""
WRITE_S = 30.0
"""Time for a client, or a server inside, to take one portion."""
CONNECT_S = 5.0
ANSWER_S = 10.0
"""Time for the daemon's answer."""
IDLE_S = 3600.0
"""Time without a byte either way, of a WebSocket or of a connection to a published port, half closed or not."""
HALF_CLOSED_S = 60.0
"""Time for the second half of a WebSocket's connection to end after the first, or for another byte of it."""
_LINGER_S = 1.0
_OWN_DESCRIPTORS = 64

_READ_BYTES = 16 * 1024
_MAX_HEAD_BYTES = 64 * 1024
_MAX_DRAINED_BYTES = 256 * 1024
_ACCEPT_PAUSE_S = 0.1
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))


class _ClientGone(Exception):
    """The client left, is too slow, or sent what is no HTTP."""


class _Link:
    """The socket to the daemon. `receive` must run while somebody knocks."""

    def __init__(self, channel: socket.socket, obey: Callable[[k.PublishedPort | k.Revoke, list[int]], None]) -> None:
        self._channel, self._obey = channel, obey
        self._seq = 0
        self._waiting: dict[int, tuple[trio.Event, list[tuple[k.Admitted | k.NotAdmitted, list[int]]]]] = {}
        self._knocks = trio.CapacityLimiter(k.MAX_KNOCKS)

    async def knock(self, knock: k.Knock) -> tuple[float, socket.socket]:
        """Return how long a visit may last, and a socket for it. `seq` of the knock is set here.

        Raises:
            VisitRefused: the daemon refuses it, or does not answer.
        """
        answers: list[tuple[k.Admitted | k.NotAdmitted, list[int]]] = []
        with trio.move_on_after(ANSWER_S):
            try:
                self._knocks.acquire_nowait()  # `acquire` would let others have their turns first
            except trio.WouldBlock:
                await self._knocks.acquire()
            self._seq += 1
            seq, done = self._seq, trio.Event()
            self._waiting[seq] = done, answers
            try:
                with suppress(OSError):  # the daemon is gone: `receive` says so
                    await relay.send_message(self._channel, k.encode(attrs.evolve(knock, seq=seq)))
                await done.wait()
            except trio.Cancelled:
                close_all(fd for _, fds in answers for fd in fds)
                answers.clear()
                raise
            finally:
                del self._waiting[seq]
                self._knocks.release()
        match answers:
            case [(k.Admitted(lasts_s=lasts_s), [fd])]:
                return math.inf if lasts_s is None else lasts_s, socket.socket(fileno=fd)
            case [(k.NotAdmitted() as refused, [])]:
                raise VisitRefused(refused.status, refused.code, refused.message)
        close_all(fd for _, fds in answers for fd in fds)
        raise VisitRefused(503, "CAPACITY", "the daemon does not answer; try again")

    async def first(self) -> tuple[k.Open, list[int]]:
        """Return the daemon's first message, and the listener for HTTP if there is one."""
        order, fds = await self._next()
        if not isinstance(order, k.Open):
            close_all(fds)
            raise k.ProtocolError("the first message is Open")
        return order, fds

    async def receive(self) -> None:
        """Hand on what the daemon says until it closes the socket. Raises `ProtocolError`."""
        try:
            while True:
                order, fds = await self._next()
                if isinstance(order, k.PublishedPort | k.Revoke):
                    self._obey(order, fds)
                    continue
                if not isinstance(order, k.Open) and (waiting := self._waiting.get(order.seq)) is not None:
                    waiting[1].append((order, fds))
                    waiting[0].set()
                    continue
                close_all(fds)  # of a request that did not wait so long
        except EOFError:
            return

    async def _next(self) -> tuple[k.Order, list[int]]:
        return await next_message(self._channel, k.decode_order, max_fds=1)


class _Side:
    """HTTP/1 with one other side over a socket, with deadlines."""

    def __init__(self, sock: socket.socket, role: Any) -> None:
        self.sock = sock  # `role` is h11.CLIENT or h11.SERVER, of a class that h11 does not name
        self.http = h11.Connection(role, max_incomplete_event_size=_MAX_HEAD_BYTES)
        self._beside: tuple[_Visitor, select.epoll] | None = None

    async def next(self, within_s: float) -> Any:  # an event of h11, or PAUSED
        """Return the next event. Raises `RemoteProtocolError`, `TooSlowError`, `OSError`."""
        if (event := self.http.next_event()) is h11.NEED_DATA:
            with trio.fail_after(within_s):
                while event is h11.NEED_DATA:
                    self.http.receive_data(await relay.receive(self.sock, _READ_BYTES, self._wait))
                    event = self.http.next_event()
        return event

    def watch(self, client: _Visitor, ends: select.epoll) -> None:
        """Have `next` raise `_ClientGone` when a client, whose request is whole, leaves. Two tasks, of which each waits
        for a socket, would cost more than the rest of a short request."""
        for each in (client, self):
            ends.register(each.sock, select.EPOLLIN)
        self._beside = client, ends

    async def _wait(self, sock: socket.socket) -> None:
        """Wait until there is something to read; with a client beside, for that to leave as well."""
        if self._beside is None:
            await trio.lowlevel.wait_readable(sock)
            return
        client, ends = self._beside
        while True:
            await trio.lowlevel.wait_readable(ends.fileno())
            ready = {fd for fd, _ in ends.poll(0)}
            if client.sock.fileno() in ready:
                ends.unregister(client.sock)
                client.take()
            if sock.fileno() in ready:
                return

    async def send(self, event: h11.Event) -> None:
        """Send an event. Raises `LocalProtocolError`, `TooSlowError`, `OSError`."""
        await self.write(self.http.send(event) or b"")

    async def write(self, data: bytes) -> None:
        """Write all of it; others have their turns when more is read. Raises `TooSlowError`, `OSError`."""
        try:
            sent = self.sock.send(data) if data else 0
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            with trio.fail_after(WRITE_S):
                await relay.send_all(self.sock, data[sent:])


_GONE = (OSError, trio.TooSlowError, h11.RemoteProtocolError, h11.LocalProtocolError)


class _Visitor(_Side):
    """The side of a client, whose every fault is `_ClientGone`."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        super().__init__(sock, h11.SERVER)
        self.address = address
        self.is_head = False
        """Whether the present request is HEAD, whose answer has no body."""
        self.scope = trio.CancelScope()
        self._held: list[bytes] = []

    async def next(self, within_s: float) -> Any:  # as above
        try:
            return await super().next(within_s)
        except _GONE as error:
            raise _ClientGone from error

    async def send(self, event: h11.Event) -> None:
        try:
            await super().send(event)
        except _GONE as error:
            raise _ClientGone from error

    def take(self) -> None:
        """Read a portion of the next request, which waits for its turn. Where one waits already, nothing is read.

        Raises:
            _ClientGone: at the end of the stream, too.
        """
        if self.http.trailing_data[0]:
            return
        try:
            data = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise _ClientGone from error
        if not data:
            raise _ClientGone
        self.http.receive_data(data)

    def put(self, event: h11.Event) -> None:
        """Have an event sent by the next `flush`. Raises `_ClientGone`."""
        try:
            self._held.append(self.http.send(event) or b"")
        except h11.LocalProtocolError as error:
            raise _ClientGone from error

    async def flush(self) -> None:
        """Send what was put. Raises `_ClientGone`."""
        held = b"".join(self._held)
        self._held.clear()
        try:
            await self.write(held)
        except _GONE as error:
            raise _ClientGone from error

    @property
    def has_no_answer(self) -> bool:
        """Whether nothing of an answer is on its way."""
        return self.http.our_state in (h11.IDLE, h11.SEND_RESPONSE)

    async def refuse(self, refusal: VisitRefused) -> None:
        """Answer with a refusal, and read what the client still sends, or the answer could be lost with a reset."""
        code = refusal.code.encode()
        await self.answer(refusal.status, f"{refusal.code}: {refusal}\n", [(b"X-Sandkasten-Error", code)])
        relay.shut(self.sock)
        left = _MAX_DRAINED_BYTES
        with trio.move_on_after(_LINGER_S):
            while left > 0 and (data := await relay.receive(self.sock, _READ_BYTES)):
                left -= len(data)

    async def answer(self, status: int, text: str, headers: list[tuple[bytes, bytes]]) -> None:
        """Send an answer of our own, the last one on this connection."""
        body = text.encode()
        fixed = [
            (b"Content-Type", b"text/plain; charset=utf-8"),
            (b"Content-Length", str(len(body)).encode()),
            (b"Cache-Control", b"no-store"),
            (b"Referrer-Policy", b"no-referrer"),
            (b"X-Robots-Tag", b"noindex"),
            (b"Connection", b"close"),
        ]
        await self.send(h11.Response(status_code=status, headers=[*headers, *fixed]))
        await self.send(h11.Data(data=b"" if self.is_head else body))
        await self.send(h11.EndOfMessage())


class Gateway:
    """See the module's docstring."""

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(False)
        self._link = _Link(channel, self._obey)
        self._site = Site()
        self._under_way: dict[tuple[str, int], set[trio.CancelScope]] = {}
        self._of_session: Counter[str] = Counter()
        self._published: dict[tuple[str, int], trio.CancelScope] = {}
        self._nursery: trio.Nursery
        # A connection has two descriptors, and an epoll(7) while it waits for an answer. Beyond the limit a socket of
        # the daemon's would be lost (unix(7)).
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OWN_DESCRIPTORS - k.MAX_PUBLISHED
        self._room = trio.CapacityLimiter(max(2, min(MAX_CONNECTIONS, descriptors // 3)))
        self._waiting: dict[_Visitor, None] = {}
        """Clients that no session has a request of at present; who has waited longest is the first."""
        self._plain = set[object]()
        """Connections to published ports, which have half of the room at most."""

    async def run(self) -> None:
        """Serve until the daemon closes its socket. Raises `ProtocolError`."""
        try:
            order, fds = await self._link.first()
        except EOFError:
            return
        self._site = Site(order.domain)
        async with trio.open_nursery() as self._nursery:
            if fds:
                self._nursery.start_soon(self._accept, _listener(fds))
            await self._link.receive()
            self._nursery.cancel_scope.cancel()

    def _obey(self, order: k.PublishedPort | k.Revoke, fds: list[int]) -> None:
        if isinstance(order, k.PublishedPort):
            place = order.session_id, order.port
            if (before := self._published.pop(place, None)) is not None:
                before.cancel()
            if not fds:  # it did not arrive, which the log tells
                return
            scope = self._published[place] = trio.CancelScope()
            self._nursery.start_soon(self._accept_plain, _listener(fds), place, scope)
            return
        close_all(fds)
        for place in [each for each in self._published if _is_meant(each, order)]:
            self._published.pop(place).cancel()
        for scopes in [scopes for place, scopes in self._under_way.items() if _is_meant(place, order)]:
            for scope in scopes:
                scope.cancel()

    async def _accept(self, listener: socket.socket) -> None:
        with listener:
            while True:
                owner = object()
                sock, address = await _next_client(listener)
                if self._waiting and self._room.available_tokens < 1:  # whoever has no token keeps nobody out
                    oldest = next(iter(self._waiting))
                    del self._waiting[oldest]
                    oldest.scope.cancel()
                await self._room.acquire_on_behalf_of(owner)
                self._nursery.start_soon(self._serve, sock, partial(self._serve_requests, sock, address), owner)

    async def _accept_plain(self, listener: socket.socket, place: tuple[str, int], scope: trio.CancelScope) -> None:
        """Serve a published port until it is revoked, or the daemon has shut the listener down."""
        with listener, scope, suppress(OSError):
            while True:
                sock, _ = await _next_client(listener)
                owner = object()
                if 2 * len(self._plain) >= self._room.total_tokens or self._room.available_tokens < 1:
                    relay.close(sock, with_reset=True)
                    continue
                self._room.acquire_on_behalf_of_nowait(owner)
                self._plain.add(owner)
                self._nursery.start_soon(self._serve, sock, partial(self._serve_plain, sock, *place), owner)

    async def _serve(self, sock: socket.socket, serve: Callable[[], Awaitable[bool]], owner: object) -> None:
        """Serve a client's connection to its end, and reset it unless `serve` says that it ended well."""
        is_broken = True
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEP_ALIVE:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
            is_broken = not await serve()
        except (_ClientGone, VisitRefused, OSError):
            pass
        except Exception as error:  # noqa: BLE001 - one connection must not end the others
            log_fault(None, error)
        finally:
            relay.close(sock, with_reset=is_broken)
            self._plain.discard(owner)
            self._room.release_on_behalf_of(owner)

    async def _serve_plain(self, sock: socket.socket, session_id: str, port: int) -> bool:
        """Carry a connection to a published port; tell whether both of its streams ended."""
        lasts_s, inside = await self._link.knock(k.Knock(0, session_id, port, is_plain=True))
        is_whole = False
        try:
            with self._counted(session_id, port, lasts_s):
                await _connect(inside, port)
                is_whole = await relay.exchange(sock, inside, IDLE_S, IDLE_S)
        finally:
            relay.close(inside, with_reset=not is_whole)
        return is_whole

    async def _serve_requests(self, sock: socket.socket, address: str) -> bool:
        client = _Visitor(sock, address)
        self._waiting[client] = None
        try:
            with client.scope:
                while await self._serve_request(client):
                    client.http.start_next_cycle()
        finally:
            self._waiting.pop(client, None)
        return not client.scope.cancelled_caught

    async def _serve_request(self, client: _Visitor) -> bool:
        """Serve one request; tell whether another may follow."""
        try:
            request = await client.next(HEAD_S)
        except _ClientGone as gone:
            if isinstance(gone.__cause__, h11.RemoteProtocolError) and client.has_no_answer:
                await client.refuse(VisitRefused(400, "INVALID_REQUEST", "not HTTP/1 as it must be"))
            return False
        if not isinstance(request, h11.Request):
            return False
        client.is_head = request.method == b"HEAD"
        try:
            visit = self._site.read(request, client.address)
            lasts_s, sock = await self._link.knock(k.Knock(0, visit.session_id, visit.port, visit.tokens))
            is_whole = False
            try:
                if visit.redirect is not None:
                    await self._redirect(client, visit, lasts_s)
                    return False
                with self._counted(visit.session_id, visit.port, lasts_s), self._let_in(client):
                    may_follow = await _carry(client, _Side(sock, h11.CLIENT), visit)
                    is_whole = True
                    return may_follow
                if client.has_no_answer:
                    raise VisitRefused(401, "UNAUTHORIZED", "the preview has ended")
                raise _ClientGone
            finally:
                relay.close(sock, with_reset=not is_whole)
        except VisitRefused as refusal:
            await client.refuse(refusal)
            return False

    async def _redirect(self, client: _Visitor, visit: Visit, lasts_s: float) -> None:
        assert visit.redirect is not None
        headers = [(b"Location", visit.redirect)]
        headers += [(b"Set-Cookie", self._site.cookie_for(each, lasts_s)) for each in visit.tokens[:1]]
        await client.answer(303, "", headers)

    @contextmanager
    def _let_in(self, client: _Visitor) -> Iterator[None]:
        """Have a client keep its place, whoever else comes."""
        self._waiting.pop(client, None)
        try:
            yield
        finally:
            self._waiting[client] = None

    @contextmanager
    def _counted(self, session_id: str, port: int, lasts_s: float) -> Iterator[None]:
        """Have a request known as under way; it ends with its preview. Raises `VisitRefused` beyond the bound.

        A session has at most as many as are left for all, so that there is some left for one that has none.
        """
        left = int(self._room.total_tokens) - self._of_session.total()
        if self._of_session[session_id] >= min(MAX_OF_SESSION, left):
            raise VisitRefused(503, "CAPACITY", "too many requests of this session are under way")
        place = session_id, port
        self._of_session[session_id] += 1
        try:
            with trio.CancelScope(deadline=trio.current_time() + lasts_s) as scope:
                self._under_way.setdefault(place, set()).add(scope)
                yield
        finally:
            self._of_session[session_id] -= 1
            if not self._of_session[session_id]:
                del self._of_session[session_id]
            self._under_way[place].discard(scope)
            if not self._under_way[place]:
                del self._under_way[place]


def _listener(fds: Sequence[int]) -> socket.socket:
    """Return the listener that came with a message; the daemon may have shut it down since. Raises `ProtocolError`."""
    if len(fds) != 1:
        raise k.ProtocolError("a listener is missing")
    listener = socket.socket(fileno=fds[0])
    listener.setblocking(False)
    return listener


def _is_meant(place: tuple[str, int], order: k.Revoke) -> bool:
    session_id, port = place
    is_one_of_all = order.port == k.ALL_PORTS and port not in order.kept
    return session_id == order.session_id and (order.port == port or is_one_of_all)


async def _next_client(listener: socket.socket) -> tuple[socket.socket, str]:
    """Return the next connection and the address of its other end. Raises `OSError` (EINVAL) when nothing listens."""
    while True:
        await trio.lowlevel.wait_readable(listener)
        try:
            sock, address = listener.accept()
            return sock, str(address[0])
        except (BlockingIOError, ConnectionAbortedError):
            continue
        except OSError as error:
            if error.errno == errno.EINVAL:  # shutdown(2) of a listener ends its listening
                raise
            log("error", "accept", errno=error.errno)  # no descriptor is free
            await trio.sleep(_ACCEPT_PAUSE_S)


# One request ----------------------------------------------------------------------------------------------------------


async def _carry(client: _Visitor, inside: _Side, visit: Visit) -> bool:
    """Carry a request inside and its answer out; tell whether another may follow on the client's connection.

    Raises:
        VisitRefused: nothing of an answer was sent.
        _ClientGone: the connection must end, for either side broke off.
    """
    await _connect(inside.sock, visit.port)
    if not visit.has_body and not visit.is_upgrade:
        client.http.next_event()  # the end of the request, for which nothing has to come
        with suppress(*_GONE):  # the server takes no more; what it says is read
            await inside.send(visit.request)
            await inside.send(h11.EndOfMessage())
        with select.epoll() as ends:
            inside.watch(client, ends)
            await _down(client, inside, visit)
        return _is_over(client)
    faults: list[Exception] = []
    async with trio.open_nursery() as nursery:

        async def send_up() -> None:
            try:
                await _up(client, inside, visit)
            except _ClientGone as gone:
                faults.append(gone)
                nursery.cancel_scope.cancel()

        nursery.start_soon(send_up)
        try:
            await _down(client, inside, visit)
        except (VisitRefused, _ClientGone) as error:
            faults.append(error)
        nursery.cancel_scope.cancel()
    if faults:
        raise faults[0]
    return not visit.is_upgrade and _is_over(client)


def _is_over(client: _Visitor) -> bool:
    return client.http.our_state is h11.DONE and client.http.their_state is h11.DONE


async def _connect(sock: socket.socket, port: int) -> None:
    """Connect a socket of a session's network to a server there. Raises `VisitRefused`."""
    try:
        with trio.fail_after(CONNECT_S):
            await relay.connect(sock, "127.0.0.1", port)
    except (OSError, trio.TooSlowError):
        raise VisitRefused(502, "PORT_NOT_LISTENING", f"nothing in this session listens on port {port}") from None


async def _up(client: _Visitor, inside: _Side, visit: Visit) -> None:
    """Send a request and its body, and then watch for the client's leaving. Raises `_ClientGone`."""
    try:
        await inside.send(visit.request)
        while isinstance(event := await client.next(BODY_S), h11.Data):
            await inside.send(h11.Data(data=event.data))
        if not isinstance(event, h11.EndOfMessage):
            raise _ClientGone
        await inside.send(h11.EndOfMessage())  # without trailers: some servers merge them with the head
    except (OSError, trio.TooSlowError, h11.LocalProtocolError):
        return  # the server takes no more; what it says is read
    if visit.is_upgrade:
        return
    await trio.lowlevel.wait_readable(client.sock)
    client.take()


async def _down(client: _Visitor, inside: _Side, visit: Visit) -> None:
    """Send an answer out, and after a 101 carry bytes both ways. Head and body go together if they came so. Raises as
    `_carry`."""
    try:
        while True:
            if (event := inside.http.next_event()) is h11.NEED_DATA:
                await client.flush()
                event = await inside.next(math.inf)
            match event:
                case h11.InformationalResponse(status_code=101) if visit.is_upgrade:
                    await client.send(answer_outside(event))
                    await _exchange(client, inside)
                    return
                case h11.InformationalResponse():
                    if client.http.their_http_version == b"1.1":  # RFC 9110, 15.2: not for clients of 1.0
                        await client.send(answer_outside(event))
                case h11.Response():
                    client.put(answer_outside(event))
                case h11.Data():
                    client.put(h11.Data(data=event.data))
                case h11.EndOfMessage():
                    client.put(h11.EndOfMessage())
                    await client.flush()
                    return
                case _:
                    raise h11.RemoteProtocolError("an answer of another protocol")
    except (OSError, h11.RemoteProtocolError) as error:
        if client.has_no_answer:
            raise VisitRefused(502, "BAD_ANSWER", "the server in the session did not answer with HTTP/1") from None
        raise _ClientGone from error


async def _exchange(client: _Visitor, inside: _Side) -> None:
    """Carry bytes both ways until both streams end. Raises `_ClientGone`."""
    try:
        await inside.write(client.http.trailing_data[0])
        await client.write(inside.http.trailing_data[0])
    except _GONE as error:
        raise _ClientGone from error
    if not await relay.exchange(client.sock, inside.sock, IDLE_S, HALF_CLOSED_S):
        raise _ClientGone


async def serve(channel: socket.socket) -> int:
    """Serve a daemon on its socket; return the status to end with: 0 when the daemon has closed it."""
    log("info", "started")
    status = 0
    try:
        await Gateway(channel).run()
    except* k.ProtocolError as group:
        log("error", "protocol", reason=str(group.exceptions[0]))
        status = 1
    return status
