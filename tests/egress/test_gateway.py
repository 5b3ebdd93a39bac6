"""The preview gateway between clients and servers on the loopback, with this test as the daemon that is asked."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import attrs
import pytest
import trio

from egress import gateway, knocking
from tests.waiting import patience

SESSION = "0123456789abcdef01234567"
TOKEN = "the-token-of-this-test"
PATIENCE_S = 20.0


@attrs.define
class Daemon:
    """The other end of the gateway's socket: lets requests in that bring `TOKEN`, and remembers the knocks."""

    channel: socket.socket
    address: tuple[str, int]
    port: int = 0
    """The port of the server inside, which the name of its preview has."""
    knocks: list[knocking.Knock] = attrs.field(factory=list)
    lasts_s: float | None = 60.0
    sessions: tuple[str, ...] = (SESSION,)

    @property
    def host(self) -> str:
        return f"{self.port}-{SESSION}.localhost:{self.address[1]}"

    def say(self, order: knocking.Order, *fds: int) -> None:
        socket.send_fds(self.channel, [knocking.encode(order)], fds)

    async def answer(self) -> None:
        while True:
            await trio.lowlevel.wait_readable(self.channel)
            data = self.channel.recv(knocking.MAX_DATAGRAM_BYTES)
            if not data:
                return
            knock = knocking.decode_knock(data)
            self.knocks.append(knock)
            if (knock.is_plain or TOKEN in knock.tokens) and knock.session_id in self.sessions:
                with socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as door:
                    self.say(knocking.Admitted(knock.seq, self.lasts_s), door.fileno())
            else:
                self.say(knocking.NotAdmitted(knock.seq, 401, "UNAUTHORIZED", "no"))


@asynccontextmanager
async def gate(domain: str | None = None) -> AsyncIterator[Daemon]:
    """A gateway that serves, until the block is left."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, trio.fail_after(patience(PATIENCE_S)):
        async with trio.open_nursery() as nursery:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                ours.setblocking(False)
                daemon = Daemon(ours, listener.getsockname())
                daemon.say(knocking.Open(domain), listener.fileno())
            nursery.start_soon(gateway.serve, theirs)
            nursery.start_soon(daemon.answer)
            yield daemon
            nursery.cancel_scope.cancel()


Serve = Callable[[trio.SocketStream], Awaitable[object]]


@asynccontextmanager
async def inside(daemon: Daemon, handle: Serve) -> AsyncIterator[list[bytes]]:
    """A server behind the gateway; yields what it has read of each connection, up to the end of the first head."""
    heads: list[bytes] = []

    async def serve(stream: trio.SocketStream) -> None:
        async with stream:
            head = b""
            while b"\r\n\r\n" not in head:
                if not (data := await stream.receive_some(65536)):
                    return
                head += data
            heads.append(head)
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await handle(stream)

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        daemon.port = listener.socket.getsockname()[1]
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        yield heads
        nursery.cancel_scope.cancel()


def says(answer: bytes) -> Serve:
    """A server that answers with these bytes."""
    return lambda stream: stream.send_all(answer)


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


async def talk(daemon: Daemon, sent: bytes) -> bytes:
    """Send bytes on a connection of their own, and return what comes until it ends."""
    stream = await trio.open_tcp_stream(*daemon.address)
    async with stream:
        await stream.send_all(sent)
        return await to_the_end(stream)


async def to_the_end(stream: trio.SocketStream) -> bytes:
    """Return what comes until the stream ends. Raises `BrokenResourceError` for a reset."""
    said = b""
    while data := await stream.receive_some(65536):
        said += data
    return said


def get(daemon: Daemon, *lines: str, target: str = "/", method: str = "GET", token: str | None = TOKEN) -> bytes:
    """A request for the preview, after which the connection ends."""
    head = [f"{method} {target} HTTP/1.1", f"Host: {daemon.host}", *lines]
    head += [f"X-Sandkasten-Preview-Token: {token}"] if token else []
    return "\r\n".join([*head, "Connection: close", "", ""]).encode()


async def test_a_request_goes_inside_without_its_token() -> None:
    """By header, query or cookie a token lets in, and neither it nor what a client says of itself arrives."""
    async with gate() as daemon, inside(daemon, says(OK)) as heads:
        lines = ["X-Forwarded-For: 203.0.113.1", "X-Forwarded-Proto: https", "Forwarded: for=203.0.113.1"]
        lines += ["Connection: close, X-Secret", "X-Secret: hop", "Cookie: a=1; _sandkasten_preview=abc; b=2"]
        request = get(daemon, *lines, target=f"/path?x=1&_sandkasten_token={TOKEN}&y=2", method="POST")
        answer = await talk(daemon, request.replace(b"Connection: close\r\n\r\n", b"Content-Length: 0\r\n\r\n"))
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"noindex" in answer
        assert answer.endswith(b"ok")
        head = heads[0].decode()
        assert head.startswith("POST /path?x=1&y=2 HTTP/1.1\r\n")
        assert "oken" not in head.replace(daemon.host, "")
        assert "X-Secret" not in head
        assert "203.0.113.1" not in head
        assert "X-Forwarded-For: 127.0.0.1\r\n" in head
        assert f"X-Forwarded-Host: {daemon.host}\r\n" in head
        assert "X-Forwarded-Proto: http\r\n" in head
        assert "Cookie: a=1; b=2\r\n" in head


async def test_a_cookie_lets_in_and_a_page_elsewhere_can_not_use_it() -> None:
    """A cookie counts for requests of the preview's own pages; with another origin the browser's cookie is ignored."""
    async with gate() as daemon, inside(daemon, says(OK)) as heads:
        cookie = f"Cookie: _sandkasten_preview={TOKEN}"
        assert (await talk(daemon, get(daemon, cookie, token=None))).startswith(b"HTTP/1.1 200")
        own = get(daemon, cookie, f"Origin: http://{daemon.host}", token=None)
        assert (await talk(daemon, own)).startswith(b"HTTP/1.1 200")
        for origin in ("null", "https://" + daemon.host, f"http://1-{SESSION}.localhost"):
            answer = await talk(daemon, get(daemon, cookie, f"Origin: {origin}", token=None))
            assert answer.startswith(b"HTTP/1.1 401")
        assert len(heads) == 2


@pytest.mark.parametrize(
    ("domain", "cookie"),
    [
        (None, f"_sandkasten_preview={TOKEN}; Path=/; HttpOnly; SameSite=Lax; Max-Age=60"),
        ("p.example", f"__Host-sandkasten_preview={TOKEN}; Path=/; HttpOnly; SameSite=Lax; Max-Age=60; Secure"),
    ],
)
async def test_a_link_is_answered_with_a_cookie(domain: str | None, cookie: str) -> None:
    """A browser that follows a link with a token is sent to the URL without it; nothing goes inside for that."""
    async with gate(domain) as daemon, inside(daemon, says(OK)) as heads:
        host = daemon.host if domain is None else f"{daemon.port}-{SESSION}.{domain}"
        request = get(daemon, target=f"//elsewhere?_sandkasten_token={TOKEN}", token=None)
        answer = (await talk(daemon, request.replace(daemon.host.encode(), host.encode()))).decode()
        assert answer.startswith("HTTP/1.1 303 ")
        scheme = "http" if domain is None else "https"
        assert f"Location: {scheme}://{host}//elsewhere\r\n" in answer
        assert f"Set-Cookie: {cookie}\r\n" in answer
        assert heads == []


async def test_a_link_with_a_void_token_leaves_a_good_cookie_alone() -> None:
    """Such a link is refused, whatever cookie comes along, and sets none."""
    async with gate() as daemon, inside(daemon, says(OK)):
        target = "/?_sandkasten_token=void-void-void-void"
        answer = await talk(daemon, get(daemon, f"Cookie: _sandkasten_preview={TOKEN}", target=target, token=None))
        assert answer.startswith(b"HTTP/1.1 401")
        assert b"Set-Cookie" not in answer


async def test_a_second_request_needs_a_token_of_its_own() -> None:
    """Sent behind one that was let in, on the same connection, it is asked about anew and refused."""
    async with gate() as daemon, inside(daemon, says(OK)) as heads:
        first = get(daemon).replace(b"Connection: close\r\n", b"")
        answer = await talk(daemon, first + first + get(daemon, token=None))
        assert answer.count(b"HTTP/1.1 200") == 2
        assert answer.count(b"HTTP/1.1 401") == 1
        assert len(heads) == 2
        assert [bool(each.tokens) for each in daemon.knocks] == [True, True, False]


async def test_requests_behind_one_another_wait_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many a client has sent, one portion of them is kept in memory."""
    taken: list[int] = []
    take = gateway._Visitor.take

    def take_and_look(client: gateway._Visitor) -> None:
        take(client)
        taken.append(len(client.http.trailing_data[0]))

    monkeypatch.setattr(gateway._Visitor, "take", take_and_look)
    async with gate() as daemon, inside(daemon, says(OK)):
        one = get(daemon, f"X-Y: {'z' * 6000}").replace(b"Connection: close\r\n", b"")
        answer = await talk(daemon, one * 12 + get(daemon))
    assert answer.count(b"HTTP/1.1 200") == 13
    assert 0 < max(taken) <= gateway._READ_BYTES


async def test_cookies_for_other_names_are_taken_off() -> None:
    """Cookies with a Domain, and those that would replace the token, stay behind; the others reach the browser."""
    cookies = ["a=1", "b=2; Domain=localhost", "c=3; path=/; dOmAiN =.localhost", "_sandkasten_preview=x", "d=domain"]
    lines = "".join(f"Set-Cookie: {each}\r\n" for each in cookies)
    lines += 'Clear-Site-Data: "cookies"\r\n'  # of all previews below one domain
    said = f"HTTP/1.1 200 OK\r\n{lines}X-Robots-Tag: all\r\nContent-Length: 0\r\n\r\n".encode()
    async with gate() as daemon, inside(daemon, says(said)):
        answer = (await talk(daemon, get(daemon))).decode()
    assert [line for line in answer.splitlines() if line.startswith("Set-Cookie")] == [
        "Set-Cookie: a=1",
        "Set-Cookie: d=domain",
    ]
    assert "all" not in answer
    assert "Clear" not in answer


async def test_a_port_on_which_nothing_listens_is_told() -> None:
    """The answer is 502 with the code and a sentence; for HEAD without the sentence."""
    async with gate() as daemon:
        with socket.create_server(("127.0.0.1", 0)) as unused:
            daemon.port = unused.getsockname()[1]
        answer = await talk(daemon, get(daemon))
        assert answer.startswith(b"HTTP/1.1 502 ")
        assert b"X-Sandkasten-Error: PORT_NOT_LISTENING\r\n" in answer
        assert answer.endswith(f"listens on port {daemon.port}\n".encode())
        assert (await talk(daemon, get(daemon, method="HEAD"))).endswith(b"\r\n\r\n")


@pytest.mark.parametrize("said", [b"", b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"])
async def test_a_server_that_speaks_no_http_is_told(said: bytes) -> None:
    """An answer that is none, or that breaks off before its head, is 502."""
    async with gate() as daemon, inside(daemon, says(said)):
        assert b"BAD_ANSWER" in await talk(daemon, get(daemon))


async def test_an_answer_that_breaks_off_is_reset() -> None:
    """The client sees no whole answer where the server sent none."""
    async with gate() as daemon, inside(daemon, says(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok")):
        stream = await trio.open_tcp_stream(*daemon.address)
        async with stream:
            await stream.send_all(get(daemon))
            with pytest.raises(trio.BrokenResourceError):
                await to_the_end(stream)


@pytest.mark.parametrize(
    "request_of",
    [
        "GET / HTTP/1.1\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: {host}\r\nHost: {host}\r\n\r\n",
        "GET http://{host}/ HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "CONNECT 1.2.3.4:5 HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: {host}\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "\x16\x03\x01\x02",
        "GET / HTTP/1.1\r\nHost: {host}\r\nX: " + "a" * 100_000 + "\r\n\r\n",
    ],
)
async def test_a_request_that_two_readers_could_read_in_two_ways_is_refused(request_of: str) -> None:
    """Nobody is asked about it, and nothing goes inside."""
    async with gate() as daemon, inside(daemon, says(OK)) as heads:
        answer = await talk(daemon, request_of.format(host=daemon.host).encode("latin-1"))
        assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431")), answer
        assert (heads, daemon.knocks) == ([], [])


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "8000-x.localhost", f"0-{SESSION}.localhost", f"8000-{SESSION}.localhost.evil"]
)
async def test_a_name_that_is_no_previews_leads_nowhere(host: str) -> None:
    """The answer is 404, whatever token came along."""
    async with gate() as daemon:
        request = f"GET / HTTP/1.1\r\nHost: {host}\r\nX-Sandkasten-Preview-Token: {TOKEN}\r\n\r\n"
        assert (await talk(daemon, request.encode())).startswith(b"HTTP/1.1 404")
        assert daemon.knocks == []


async def test_events_of_a_stream_come_at_once() -> None:
    """A part of an answer without an end is with the client while the server waits."""
    seen = trio.Event()

    async def stream_events(stream: trio.SocketStream) -> None:
        await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n")
        await seen.wait()
        await stream.send_all(b"data: 2\n\n")

    async with gate() as daemon, inside(daemon, stream_events):
        stream = await trio.open_tcp_stream(*daemon.address)
        async with stream:
            await stream.send_all(get(daemon))
            said = b""
            while b"data: 1\n\n" not in said:
                said += await stream.receive_some(65536)
            seen.set()
            assert b"data: 2\n\n" in await to_the_end(stream)


async def test_an_upload_arrives_whole() -> None:
    """Some MiB in chunks of a client, and the answer after them."""
    body = bytes(range(256)) * 16384
    digest = hashlib.sha256()

    async def take(stream: trio.SocketStream) -> None:
        begun = heads[0].partition(b"\r\n\r\n")[2]  # came with the head
        digest.update(begun)
        left = len(body) - len(begun)
        while left > 0:
            data = await stream.receive_some(65536)
            digest.update(data)
            left -= len(data)
        await stream.send_all(OK)

    async with gate() as daemon, inside(daemon, take) as heads:
        answer = await talk(daemon, get(daemon, f"Content-Length: {len(body)}", "Expect: x", method="PUT") + body)
    assert answer.endswith(b"ok")
    assert digest.digest() == hashlib.sha256(body).digest()


async def test_a_websocket_is_carried_both_ways() -> None:
    """After 101 bytes pass as they come, in both directions, until both have ended."""

    async def echo(stream: trio.SocketStream) -> None:
        await stream.send_all(
            b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nX-A: 1\r\n\r\nhi"
        )
        while data := await stream.receive_some(65536):
            await stream.send_all(data)

    lines = ("Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==")
    async with gate() as daemon, inside(daemon, echo) as heads:
        request = get(daemon, *lines).replace(b"Connection: close", b"Connection: keep-alive, Upgrade")
        stream = await trio.open_tcp_stream(*daemon.address)
        async with stream:
            await stream.send_all(request + b"\x81\x00first")
            said = b""
            while not said.endswith(b"hi\x81\x00first"):
                said += await stream.receive_some(65536)
            assert said.startswith(b"HTTP/1.1 101 ")
            await stream.send_eof()
            assert await to_the_end(stream) == b""
        assert b"Connection: Upgrade\r\nUpgrade: websocket\r\n" in heads[0]


@pytest.mark.parametrize("port", [knocking.ALL_PORTS, None])
async def test_a_revoked_preview_ends_what_is_under_way(port: int | None) -> None:
    """A WebSocket is reset, for its port or for all of the session; another port's is not."""

    async def hold(stream: trio.SocketStream) -> None:
        await stream.send_all(b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
        while data := await stream.receive_some(65536):
            await stream.send_all(data)

    async with gate() as daemon, inside(daemon, hold):
        stream = await trio.open_tcp_stream(*daemon.address)
        async with stream:
            await stream.send_all(
                get(daemon, "Upgrade: websocket").replace(b"Connection: close", b"Connection: Upgrade")
            )
            assert (await stream.receive_some(65536)).startswith(b"HTTP/1.1 101")
            daemon.say(knocking.Revoke(SESSION, 1))
            daemon.say(knocking.Revoke("f" * 24, daemon.port))
            daemon.say(knocking.Revoke(SESSION, knocking.ALL_PORTS, (daemon.port,)))
            await stream.send_all(b"x")
            assert await stream.receive_some(1) == b"x"
            daemon.say(knocking.Revoke(SESSION, daemon.port if port is None else port))
            with pytest.raises(trio.BrokenResourceError):
                await stream.receive_some(1)


async def test_a_request_ends_with_its_preview() -> None:
    """A server that does not answer is waited for until then, and no longer."""

    async with gate() as daemon, inside(daemon, never):
        daemon.lasts_s = 0.1
        assert (await talk(daemon, get(daemon))).startswith(b"HTTP/1.1 401")


async def test_requests_of_one_session_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One beyond the bound is told to come back, and has room when another has ended."""
    monkeypatch.setattr(gateway, "MAX_OF_SESSION", 1)
    is_asked, may_answer = trio.Event(), trio.Event()

    async def wait(stream: trio.SocketStream) -> None:
        is_asked.set()
        await may_answer.wait()
        await stream.send_all(OK)

    async with gate() as daemon, inside(daemon, wait), trio.open_nursery() as nursery:
        has_answer = trio.Event()

        async def ask() -> None:
            assert (await talk(daemon, get(daemon))).startswith(b"HTTP/1.1 200")
            has_answer.set()

        nursery.start_soon(ask)
        await is_asked.wait()
        assert (await talk(daemon, get(daemon))).startswith(b"HTTP/1.1 503")
        may_answer.set()
        await has_answer.wait()
        assert (await talk(daemon, get(daemon))).startswith(b"HTTP/1.1 200")


async def never(_stream: trio.SocketStream) -> None:
    """Answer nothing."""
    await trio.sleep_forever()


async def test_sessions_that_never_answer_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has at most as many requests as it leaves to others, so a session that has none yet has its answer."""
    monkeypatch.setattr(gateway, "MAX_CONNECTIONS", 8)
    monkeypatch.setattr(gateway, "MAX_OF_SESSION", 4)
    others = "a" * 24, "b" * 24
    async with AsyncExitStack() as held:
        daemon = await held.enter_async_context(gate())
        daemon.sessions = SESSION, *others
        await held.enter_async_context(inside(daemon, never))
        for number in range(8):
            stream = await held.enter_async_context(await trio.open_tcp_stream(*daemon.address))
            await stream.send_all(get(daemon).replace(SESSION.encode(), others[number % 2].encode()))
        async with inside(daemon, says(OK)):
            assert (await talk(daemon, get(daemon))).startswith(b"HTTP/1.1 200")


async def test_who_has_no_token_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that was let in keeps its place; of those that wait with a request, the oldest has to go."""
    monkeypatch.setattr(gateway, "MAX_CONNECTIONS", 4)
    is_asked = trio.Event()

    async def wait(stream: trio.SocketStream) -> None:
        is_asked.set()
        await seen.wait()
        await stream.send_all(OK)

    seen = trio.Event()
    async with AsyncExitStack() as held:
        daemon = await held.enter_async_context(gate())
        await held.enter_async_context(inside(daemon, wait))
        first = await held.enter_async_context(await trio.open_tcp_stream(*daemon.address))
        await first.send_all(get(daemon))
        await is_asked.wait()
        idle = [await held.enter_async_context(await trio.open_tcp_stream(*daemon.address)) for _ in range(6)]
        for each in idle:
            with suppress(trio.BrokenResourceError):
                await each.send_all(b"G")
        async with inside(daemon, says(OK)):
            assert (await talk(daemon, get(daemon))).startswith(b"HTTP/1.1 200")
        with suppress(trio.BrokenResourceError):  # reset, which the sending may have been told of
            assert await idle[0].receive_some(1) == b""
        seen.set()
        assert (await to_the_end(first)).startswith(b"HTTP/1.1 200")


@asynccontextmanager
async def published(daemon: Daemon) -> AsyncIterator[socket.socket]:
    """A listener of the daemon's, from which the gateway carries to the server inside."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        daemon.say(knocking.PublishedPort(SESSION, daemon.port), listener.fileno())
        yield listener


async def is_reset(listener: socket.socket) -> bool:
    """Connect and wait for the end; tell whether it is a reset, which may come before connect(2) is seen to succeed."""
    try:
        stream = await trio.open_tcp_stream(*listener.getsockname())
        async with stream:
            await to_the_end(stream)
    except (OSError, trio.BrokenResourceError):
        return True
    return False


async def backwards(stream: trio.SocketStream) -> None:
    """Answer with what came, backwards, once the other side has ended its own."""
    said = b"".join([each async for each in stream])
    await stream.send_all(said[::-1])


@asynccontextmanager
async def plain_server(daemon: Daemon, handle: Serve) -> AsyncIterator[None]:
    """A server of plain TCP behind the gateway."""

    async def serve(stream: trio.SocketStream) -> None:
        async with stream:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await handle(stream)

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        daemon.port = listener.socket.getsockname()[1]
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        yield
        nursery.cancel_scope.cancel()


async def test_a_published_port_carries_bytes_as_they_come() -> None:
    """Some MiB of no protocol, both ways, with the end of each side told to the other; each connection is asked about,
    without a token."""
    body = bytes(range(256)) * 16384
    async with gate() as daemon, plain_server(daemon, backwards), published(daemon) as listener:
        for _ in range(2):
            stream = await trio.open_tcp_stream(*listener.getsockname())
            async with stream:
                await stream.send_all(body)
                await stream.send_eof()
                assert await to_the_end(stream) == body[::-1]
        assert [(each.is_plain, each.tokens) for each in daemon.knocks] == [(True, ())] * 2


async def test_a_published_port_on_which_nothing_listens_is_reset() -> None:
    """The client is not left without an end, nor given one that looks like a server's."""
    async with gate() as daemon:
        with socket.create_server(("127.0.0.1", 0)) as unused:
            daemon.port = unused.getsockname()[1]
        async with published(daemon) as listener:
            assert await is_reset(listener)


async def test_a_revoked_port_has_no_listener_and_no_connection() -> None:
    """Connections are reset, and the daemon's shutdown of its listener ends the gateway's copy."""
    async with gate() as daemon, plain_server(daemon, echoes), published(daemon) as listener:
        stream = await trio.open_tcp_stream(*listener.getsockname())
        async with stream:
            await stream.send_all(b"x")
            assert await stream.receive_some(1) == b"x"
            listener.shutdown(socket.SHUT_RDWR)
            with pytest.raises(OSError, match="all attempts to connect"):
                await trio.open_tcp_stream(*listener.getsockname())
            daemon.say(knocking.Revoke(SESSION, daemon.port))
            with pytest.raises(trio.BrokenResourceError):
                await stream.receive_some(1)


async def test_a_listener_that_ended_on_its_way_is_no_fault() -> None:
    """The gateway goes on when the daemon shuts one down before it is taken up."""
    async with gate() as daemon, plain_server(daemon, echoes):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.shutdown(socket.SHUT_RDWR)
            daemon.say(knocking.PublishedPort(SESSION, daemon.port), listener.fileno())
        async with published(daemon) as listener:
            stream = await trio.open_tcp_stream(*listener.getsockname())
            async with stream:
                await stream.send_all(b"x")
                assert await stream.receive_some(1) == b"x"


async def test_connections_to_published_ports_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One beyond the session's bound is reset, and what was there goes on; one that carries nothing has its end."""
    monkeypatch.setattr(gateway, "MAX_OF_SESSION", 1)
    async with gate() as daemon, plain_server(daemon, echoes), published(daemon) as listener:
        first = await trio.open_tcp_stream(*listener.getsockname())
        async with first:
            await first.send_all(b"x")
            assert await first.receive_some(1) == b"x"
            assert await is_reset(listener)
            await first.send_all(b"y")
            assert await first.receive_some(1) == b"y"
        monkeypatch.setattr(gateway, "IDLE_S", 0.05)
        monkeypatch.setattr(gateway, "MAX_OF_SESSION", 9)
        assert await is_reset(listener)


async def test_published_ports_leave_room_for_previews(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the gateway's connections are theirs at most; the next is reset, and a preview answers meanwhile."""
    monkeypatch.setattr(gateway, "MAX_CONNECTIONS", 4)
    async with AsyncExitStack() as held:
        daemon = await held.enter_async_context(gate())
        await held.enter_async_context(plain_server(daemon, echoes))
        listener = await held.enter_async_context(published(daemon))
        for _ in range(2):
            stream = await held.enter_async_context(await trio.open_tcp_stream(*listener.getsockname()))
            await stream.send_all(b"x")
            assert await stream.receive_some(1) == b"x"
        assert await is_reset(listener)
        assert (await talk(daemon, get(daemon, token=None))).startswith(b"HTTP/1.1 401")


async def echoes(stream: trio.SocketStream) -> None:
    """Send back what comes."""
    while data := await stream.receive_some(65536):
        await stream.send_all(data)


async def test_a_client_that_does_not_read_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each portion of an answer has a deadline, and the server inside is told by the end of its connection."""
    monkeypatch.setattr(gateway, "WRITE_S", 0.2)
    has_ended = trio.Event()

    async def flood(stream: trio.SocketStream) -> None:
        try:
            await stream.send_all(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                await stream.send_all(bytes(65536))
        finally:
            has_ended.set()

    async with gate() as daemon, inside(daemon, flood):
        stream = await trio.open_tcp_stream(*daemon.address)
        async with stream:
            await stream.send_all(get(daemon))
            await has_ended.wait()


@pytest.mark.parametrize("lines", [(), ("Content-Length: 0",)])
async def test_a_client_that_leaves_ends_its_request(lines: tuple[str, ...]) -> None:
    """The server inside learns of it while it has nothing to say, whether the request could have a body or not."""
    is_asked, has_ended = trio.Event(), trio.Event()

    async def wait_for_end(stream: trio.SocketStream) -> None:
        is_asked.set()
        with suppress(trio.BrokenResourceError):
            await stream.receive_some(1)
        has_ended.set()

    async with gate() as daemon, inside(daemon, wait_for_end):
        stream = await trio.open_tcp_stream(*daemon.address)
        await stream.send_all(get(daemon, *lines))
        await is_asked.wait()
        await stream.aclose()
        await has_ended.wait()
