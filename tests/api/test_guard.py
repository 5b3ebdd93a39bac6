"""No connection can end, freeze or outlive the server, whatever application is behind the guard."""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from random import Random

import pytest
import trio
import trio.testing

from sandkasten.api.http.guard import Receive, Scope, Send
from tests.api import apps
from tests.api.harness import (
    PATIENCE_S,
    Running,
    read_to_end,
    read_until,
    running_app,
    running_front,
    send_and_read,
)
from tests.api.malformed import KILLERS, MALFORMED, http2_request
from tests.waiting import patience

Server = Callable[[], AbstractAsyncContextManager[Running]]

SERVERS: dict[str, Server] = {
    "plain": lambda: running_app(apps.plain),
    "quart": lambda: running_app(apps.quart()),
    "front": lambda: running_front(),
}
RESET = struct.pack("ii", 1, 0)
UPGRADE = (
    b"GET /ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


HEALTHZ = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


async def reset(stream: trio.SocketStream) -> None:
    """Leave without a goodbye."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    await stream.aclose()


async def wait_for_leave(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer `/healthz` at once, and other requests never."""
    if scope.get("path") == "/healthz":
        await apps.plain(scope, receive, send)
    while (await receive())["type"] != "http.disconnect":
        pass


async def begin_request(running: Running, host: str = "127.0.0.1") -> trio.SocketStream:
    """Begin a request that is not answered, from an address of this machine."""
    stream = await connect_from(running, host)
    await stream.send_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await trio.testing.wait_all_tasks_blocked(0.02)
    return stream


async def connect_from(running: Running, host: str) -> trio.SocketStream:
    sock = trio.socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    await sock.bind((host, 0))
    await sock.connect(("127.0.0.1", running.port))
    return trio.SocketStream(sock)


async def mistreat(running: Running, data: bytes) -> None:
    """Send `data` whole and end politely, send it in two segments, send it and reset."""
    await send_and_read(running, data)
    async with await running.connect() as stream:
        await stream.send_all(data[: len(data) // 2])
        await trio.testing.wait_all_tasks_blocked()
        try:
            await stream.send_all(data[len(data) // 2 :])
            await stream.send_eof()
        except trio.BrokenResourceError:
            pass  # the first half was enough to be dropped
        await read_to_end(stream)
    stream = await running.connect()
    await stream.send_all(data)
    await reset(stream)


@pytest.mark.parametrize("server", SERVERS.values(), ids=SERVERS.keys())
@pytest.mark.parametrize("data", KILLERS.values(), ids=KILLERS.keys())
async def test_a_request_that_kills_unguarded_servers_is_survived(server: Server, data: bytes) -> None:
    """A connection that was open before is still served, new ones are, and the stop ends in time."""
    async with server() as running:
        bystander = await running.connect()
        await mistreat(running, data)
        assert await running.is_alive()
        await bystander.send_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in await read_until(bystander, b"\r\n")
        await bystander.aclose()
        assert await running.stop() < 2


@pytest.mark.parametrize("server", SERVERS.values(), ids=SERVERS.keys())
async def test_malformed_requests_harm_only_their_own_connections(server: Server) -> None:
    """The whole list against one server: after each request the next client is served."""
    async with server() as running:
        for name, data in MALFORMED.items():
            await mistreat(running, data)
            assert await running.is_alive(), name
        assert await running.stop() < 2


@pytest.mark.parametrize("seed", range(3))
async def test_mutated_requests_harm_only_their_own_connections(seed: int) -> None:
    """Every request of the lists with random bytes changed, doubled or cut out."""
    random = Random(seed)
    async with running_front() as running:
        for data in [*KILLERS.values(), *MALFORMED.values()]:
            mutated = bytearray(data[:4096])
            for _ in range(random.randint(1, 4)):
                at = random.randrange(len(mutated) + 1)
                mutated[at : at + random.randint(0, 3)] = random.randbytes(random.randint(0, 3))
            await send_and_read(running, bytes(mutated))
        assert await running.is_alive()
        assert await running.stop() < 2


async def test_a_client_that_leaves_frees_its_connection_at_once() -> None:
    """The keep-alive timeout is for clients that are there: with one slot, the next client is served without delay."""
    async with running_app(apps.plain, max_connections=1, keep_alive_timeout_s=300.0) as running:
        for _ in range(3):
            stream = await running.connect()
            await stream.send_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b" 200 " in await read_until(stream, b"\r\n\r\nok")
            await stream.aclose()
            await trio.testing.wait_all_tasks_blocked(0.02)


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize("leave", ["reset", "close", "half_close"])
async def test_an_application_that_only_sends_ends_with_its_client(kind: str, leave: str) -> None:
    """hypercorn's send neither fails nor yields after the client left; ours does both."""
    app = apps.Endless()
    async with running_app(app) as running:
        stream = await running.connect()
        await stream.send_all(UPGRADE if kind == "websocket" else b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await read_until(stream, b"\r\n\r\n")
        if leave == "reset":
            await reset(stream)
        elif leave == "close":
            await stream.aclose()
        else:
            await stream.send_eof()
            if kind == "websocket":
                await read_to_end(stream)
            else:
                await stream.receive_some(1)  # it may still read
            await stream.aclose()
        with trio.fail_after(patience()):
            await app.ended.wait()
        assert await running.is_alive()
        assert await running.stop() < 2


async def test_a_websocket_close_frame_ends_an_application_that_only_sends() -> None:
    """A clean close while the sender is stuck on a full socket frees it."""
    app = apps.Endless()
    async with running_app(app) as running:
        stream = await running.connect()
        await stream.send_all(UPGRADE)
        await read_until(stream, b"\r\n\r\n")
        await stream.send_all(b"\x88\x82\x00\x00\x00\x00\x03\xe8")
        await read_to_end(stream)
        with trio.fail_after(patience()):
            await app.ended.wait()
        await stream.aclose()
        assert await running.is_alive()


async def test_an_application_that_sends_nothing_for_ever_does_not_freeze_the_server() -> None:
    """Empty parts go nowhere and never block; each of them is a checkpoint all the same."""
    app = apps.Endless(b"")
    async with running_app(app) as running, await running.connect() as stream:
        await stream.send_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with trio.fail_after(patience()):
            await app.started.wait()
        assert await running.is_alive()
        assert await running.stop() < 2
        assert app.ended.is_set()


async def test_an_offer_to_switch_to_http2_is_ignored() -> None:
    """curl --http2 and Java's client make it by default; they are answered in HTTP/1.1."""
    async with running_front() as running:
        offer = MALFORMED["h2c_upgrade"].replace(b"Upgrade, HTTP2", b"Upgrade, close, HTTP2")
        assert (await send_and_read(running, offer)).startswith(b"HTTP/1.1 200 ")


async def test_http2_without_asking_is_refused() -> None:
    """An answer in HTTP/2 would be buffered without bound for a client that opens no window."""
    async with running_front() as running:
        answer = await send_and_read(running, http2_request(b"/healthz"))
        assert re.match(rb"HTTP/1\.1 4\d\d ", answer)


async def test_a_malformed_body_frees_an_answer_that_nobody_reads() -> None:
    """The connection is over for hypercorn while a write is still stuck: it must not wait for the write deadline."""
    app = apps.Endless()
    async with running_app(app, write_timeout_s=300.0) as running:
        head = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        async with await stall(running, head) as stream:
            await app.started.wait()
            await trio.testing.wait_all_tasks_blocked(0.05)
            await stream.send_all(b"nonsense\r\n")
            with trio.fail_after(patience()):
                await app.ended.wait()


@pytest.mark.parametrize("is_reading", [True, False])
async def test_an_early_answer_does_not_break_a_client_that_is_still_sending(is_reading: bool) -> None:
    """The rest of the client's body is discarded for a while instead of being answered with a reset, until the client
    has read the answer.
    """

    async def hasty(scope: Scope, receive: Receive, send: Send) -> None:
        if is_reading:
            await receive()
        await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"no"})

    async with running_app(hasty) as running, await running.connect() as stream:
        await stream.send_all(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 16777216\r\n\r\n")
        for _ in range(256):
            await stream.send_all(bytes(65_536))
        await stream.send_eof()
        assert (await read_to_end(stream)).startswith(b"HTTP/1.1 413")


async def stall(running: Running, request: bytes) -> trio.SocketStream:
    """Open a connection that asks for much and reads nothing."""
    stream = await running.connect(receive_buffer=4096)
    await stream.send_all(request)
    return stream


@pytest.mark.parametrize("request_head", [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", UPGRADE], ids=["http", "ws"])
async def test_a_client_that_stops_reading_does_not_delay_the_stop(request_head: bytes) -> None:
    """The stop takes the graceful timeout, although the write deadline is far away."""
    app = apps.Endless()
    async with running_app(app, write_timeout_s=300.0, graceful_timeout_s=0.3) as running:
        stream = await stall(running, request_head)
        await app.started.wait()
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert 0.25 < await running.stop() < 1.5
        assert app.ended.is_set()
        await stream.aclose()


async def test_a_client_that_stops_reading_is_dropped_at_the_write_deadline() -> None:
    """A stalled reader holds its connection for one write deadline, and nobody else notices."""
    app = apps.Endless()
    async with running_app(app, write_timeout_s=0.2) as running:
        stream = await stall(running, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await app.started.wait()
        assert await running.is_alive()
        with trio.fail_after(patience()):
            await app.ended.wait()
        await stream.aclose()
        assert await running.stop() < 1.5


@pytest.mark.parametrize("server", SERVERS.values(), ids=SERVERS.keys())
async def test_the_stop_does_not_wait_for_idle_connections(server: Server) -> None:
    """Connections that were answered and kept are closed at once."""
    async with server() as running:
        streams = [await running.connect() for _ in range(3)]
        for stream in streams[:2]:
            await stream.send_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await read_until(stream, b"\r\n\r\n")
        assert await running.stop() < 0.25
        for stream in streams:
            await read_to_end(stream)
            await stream.aclose()


@pytest.mark.parametrize("first", [b"", b"GET /hea", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"])
@pytest.mark.parametrize("server", ["plain", "quart", "front"])
async def test_an_idle_connection_is_closed_after_the_keep_alive_timeout(server: str, first: bytes) -> None:
    """Before a request, in the middle of its head, and after an answer, whatever the application."""
    timeout_s = 0.3
    servers: dict[str, Server] = {
        "plain": lambda: running_app(apps.plain, keep_alive_timeout_s=timeout_s),
        "quart": lambda: running_app(apps.quart(), keep_alive_timeout_s=timeout_s),
        "front": lambda: running_front(keep_alive_timeout_s=timeout_s),
    }
    async with servers[server]() as running, await running.connect() as stream:
        await stream.send_all(first)
        began = trio.current_time()
        await read_to_end(stream)
        assert timeout_s * 0.8 < trio.current_time() - began < timeout_s + 2


async def test_connections_over_the_limit_are_refused_with_an_answer() -> None:
    """With all connections busy, one more gets 503 and is closed; when one leaves, the next is served."""
    async with running_app(wait_for_leave, max_connections=2) as running:
        first, second = [await begin_request(running) for _ in range(2)]
        answer = await send_and_read(running, HEALTHZ)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"CAPACITY" in answer
        assert b"x-request-id" in answer.lower()
        await first.aclose()
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert await running.is_alive()
        await second.aclose()


async def test_requests_sent_together_are_answered_in_order() -> None:
    """Pipelining works, on one connection, with Quart behind it."""
    async with running_front() as running, await running.connect() as stream:
        one = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Request-ID: %d\r\n\r\n"
        last = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Request-ID: 4\r\nConnection: close\r\n\r\n"
        await stream.send_all(one % 1 + one % 2 + one % 3 + last)
        answers = await read_to_end(stream)
        assert answers.count(b'{"status":"ok"}') == 4
        assert [answers.index(b"x-request-id: %d" % number) for number in (1, 2, 3, 4)] == sorted(
            answers.index(b"x-request-id: %d" % number) for number in (1, 2, 3, 4)
        )


async def test_a_stop_lets_running_requests_finish() -> None:
    """A request that is being served when the stop begins is answered, if its answer comes within the graceful
    timeout.
    """
    asked, release = trio.Event(), trio.Event()

    async def waiting(scope: Scope, receive: Receive, send: Send) -> None:
        asked.set()
        await release.wait()
        await apps.plain(scope, receive, send)

    async with running_app(waiting, graceful_timeout_s=PATIENCE_S) as running, await running.connect() as stream:
        await stream.send_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await asked.wait()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(running.stop)
            await trio.testing.wait_all_tasks_blocked()
            release.set()
            assert b" 200 " in await read_to_end(stream)


async def test_no_descriptor_of_the_server_is_inheritable() -> None:
    """A command started by hand-written fork and exec must not hold the daemon's port."""
    async with running_app(apps.plain) as running, await running.connect() as stream:
        await stream.send_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await read_until(stream, b"\r\n\r\n")
        for name in os.listdir("/proc/self/fd"):
            try:
                is_socket = os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
            except FileNotFoundError:
                continue
            assert not (is_socket and os.get_inheritable(int(name))), name
