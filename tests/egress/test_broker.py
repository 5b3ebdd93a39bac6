"""Secrets on their way: where the value arrives, where the placeholder does, and what never comes back.

The broker is the real program; the egress process runs in the test, in networks of the test's own.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import pytest
import trio

from tests.egress.broker_world import (
    HOST,
    PLACEHOLDER,
    BrokerProcess,
    attach,
    broker,
    client,
    everything,
    foreign_authority,
    tls_server,
    trusting,
)
from tests.egress.harness import PUBLIC, Egress, Inside, Names, egress, server
from tests.waiting import patience

pytestmark = pytest.mark.usefixtures("outside")

VALUE = "sk-live-4f3a9c71e5d24b8a"
NAMES = {HOST: [PUBLIC], "other.example": [PUBLIC], "sub.wild.example": [PUBLIC]}


@attrs.define
class Api:
    """A server of TLS. `requests` are the heads that arrived; `answer` makes the answer to one."""

    requests: list[bytes] = attrs.field(factory=list)
    answer: Callable[[bytes], bytes] = lambda _head: b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

    async def __call__(self, stream: trio.SocketStream) -> None:
        received = b""
        while True:
            while b"\r\n\r\n" not in received:
                if not (data := await stream.receive_some(65536)):
                    return
                received += data
            head, _, received = received.partition(b"\r\n\r\n")
            self.requests.append(head)
            await stream.send_all(self.answer(head))
            if b"\r\nConnection: close" in head:
                return


@attrs.define
class Scene:
    broker: BrokerProcess
    egress: Egress
    inside: Inside
    api: Api
    trust: Callable[[], object]

    async def ask(self, head: bytes, host: str = HOST) -> bytes:
        """Send one request on a connection of its own and return the answer, to the connection's end."""
        async with client(self.inside, self.trust(), host) as stream:  # type: ignore[arg-type]
            await stream.send_all(head + b"\r\nConnection: close\r\n\r\n")
            return await everything(stream)


@asynccontextmanager
async def scene(
    tmp_path: Path, *allow: str, hosts: tuple[str, ...] = (HOST,), served_as: str = HOST
) -> AsyncIterator[Scene]:
    """A session with one secret, and a server that is its host."""
    api = Api()
    with foreign_authority() as (authority, ca_file), broker(tmp_path, ca_file) as process:
        process.put(VALUE, *hosts)
        certificate = process.listed().certificate
        async with egress(Names(**NAMES)) as daemon, tls_server(authority.context_for(served_as), api):
            await process.join(daemon)
            inside = await attach(daemon, *(allow or (HOST,)), hosts=hosts)
            trust = lambda: trusting(certificate, authority.certificate)  # noqa: E731 - a context for each client
            yield Scene(process, daemon, inside, api, trust)


async def test_the_value_arrives_in_a_header(tmp_path: Path) -> None:
    """The placeholder in a field is the value at the server; target and body are as they were."""
    async with scene(tmp_path) as world:
        head = f"POST /v?q={PLACEHOLDER} HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 0\r\n"
        assert b"200 OK" in await world.ask(f"{head}Authorization: Bearer {PLACEHOLDER}".encode())
    (request,) = world.api.requests
    assert f"Authorization: Bearer {VALUE}".encode() in request
    assert request.startswith(f"POST /v?q={PLACEHOLDER} ".encode())


async def test_the_value_arrives_inside_of_basic_credentials(tmp_path: Path) -> None:
    """As git sends them: user and password in base64."""
    async with scene(tmp_path) as world:
        sent = base64.b64encode(f"git:{PLACEHOLDER}".encode()).decode()
        await world.ask(f"GET / HTTP/1.1\r\nHost: {HOST}\r\nAuthorization: Basic {sent}".encode())
    (request,) = world.api.requests
    expected = base64.b64encode(f"git:{VALUE}".encode())
    assert b"Authorization: Basic " + expected in request


async def test_another_host_gets_the_placeholder(tmp_path: Path) -> None:
    """Its TLS is not opened: the client meets the server's own certificate."""
    async with scene(tmp_path, HOST, "other.example", served_as="other.example") as world:
        await world.ask(f"GET / HTTP/1.1\r\nHost: other.example\r\nX-Key: {PLACEHOLDER}".encode(), "other.example")
    (request,) = world.api.requests
    assert PLACEHOLDER.encode() in request
    assert VALUE.encode() not in request


async def test_plain_http_gets_the_placeholder(tmp_path: Path) -> None:
    """Port 80 of the secret's host is carried as ever."""
    plain = Api()
    async with scene(tmp_path) as world, server(PUBLIC, 80, plain):
        stream = await world.inside.connect_to(HOST, 80)
        async with stream:
            await stream.send_all(f"GET / HTTP/1.1\r\nHost: {HOST}\r\nX-Key: {PLACEHOLDER}\r\n\r\n".encode())
            with trio.fail_after(patience()):
                await stream.receive_some(100)
    (request,) = plain.requests
    assert PLACEHOLDER.encode() in request
    assert VALUE.encode() not in request


async def test_another_host_within_the_tls_is_refused(tmp_path: Path) -> None:
    """Host must be the name of the connection; the server hears nothing."""
    async with scene(tmp_path, HOST, "other.example") as world:
        answer = await world.ask(f"GET / HTTP/1.1\r\nHost: other.example\r\nX-Key: {PLACEHOLDER}".encode())
        assert answer.startswith(b"HTTP/1.1 403")
        entry = await world.egress.entry(verdict="denied")
    assert entry.reason == "host"
    assert world.api.requests == []


@pytest.mark.parametrize(
    "body",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + f"you sent {VALUE}".encode().ljust(100),
        f"HTTP/1.1 200 OK\r\nX-Echo: {VALUE}\r\nContent-Length: 0\r\n\r\n".encode(),
        f"HTTP/1.1 302 Found\r\nLocation: https://other.example/?k={VALUE}\r\nContent-Length: 0\r\n\r\n".encode(),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"".join(b"1\r\n%c\r\n" % sign for sign in VALUE.encode())
        + b"0\r\n\r\n",
        f"HTTP/1.1 103 Early Hints\r\nLink: {VALUE}\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n".encode(),
        f"HTTP/1.1 200 {VALUE}\r\nContent-Length: 0\r\n\r\n".encode(),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + f"X-T: {VALUE}\r\n\r\n".encode(),
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n\x81\x18"
        + VALUE.encode(),
    ],
    ids=["body", "field", "redirect", "chunks of one byte", "early hints", "reason", "trailer", "after a 101"],
)
async def test_an_echo_is_cut(tmp_path: Path, body: bytes) -> None:
    """What of the value has come through before it is known to be the value is three signs at most."""
    async with scene(tmp_path) as world:
        world.api.answer = lambda _head: body
        head = f"GET / HTTP/1.1\r\nHost: {HOST}\r\nX-Key: {PLACEHOLDER}"
        if b" 101 " in body:
            async with client(world.inside, world.trust()) as stream:  # type: ignore[arg-type]
                await stream.send_all(head.encode() + b"\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n")
                answer = await everything(stream)
        else:
            answer = await world.ask(head.encode())
        entry = await world.egress.entry(verdict="denied")
    assert entry.reason == "echo"
    assert VALUE[:4].encode() not in answer.replace(b"\r\n1\r\n", b"")


async def test_credentials_that_come_back_are_cut(tmp_path: Path) -> None:
    """The value in the base64 that it was sent in is known, too."""
    coded = base64.b64encode(f"git:{VALUE}".encode())
    async with scene(tmp_path) as world:
        world.api.answer = lambda _head: b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(coded), coded)
        sent = base64.b64encode(f"git:{PLACEHOLDER}".encode()).decode()
        answer = await world.ask(f"GET / HTTP/1.1\r\nHost: {HOST}\r\nAuthorization: Basic {sent}".encode())
    assert coded[:8] not in answer


async def test_a_body_that_begins_like_the_value_comes_through(tmp_path: Path) -> None:
    """What was held back is let out when it turns out to be something else, at the end of the body, too."""
    body = f"{VALUE[:-1]}! and {VALUE[:10]}".encode()
    async with scene(tmp_path) as world:
        world.api.answer = lambda _head: b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        answer = await world.ask(f"GET / HTTP/1.1\r\nHost: {HOST}".encode())
    assert answer.endswith(b"\r\n\r\n" + body)


async def test_requests_ask_for_no_coding(tmp_path: Path) -> None:
    """A body in gzip could not be searched, so nobody inside can have one sent."""
    async with scene(tmp_path) as world:
        await world.ask(
            f"GET / HTTP/1.1\r\nHost: {HOST}\r\nAccept-Encoding: gzip, br\r\n"
            "Sec-WebSocket-Extensions: permessage-deflate".encode()
        )
    (request,) = world.api.requests
    assert b"Accept-Encoding: identity" in request
    assert b"gzip" not in request
    assert b"deflate" not in request


async def test_a_websocket_goes_through(tmp_path: Path) -> None:
    """After the 101 bytes go both ways as they come."""

    async def handle(stream: trio.SocketStream) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            head += await stream.receive_some(65536)
        world.api.requests.append(head)
        await stream.send_all(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\nhello"
        )
        while data := await stream.receive_some(65536):
            await stream.send_all(data)

    async with scene(tmp_path) as world:
        world.api.__class__.__call__, before = lambda _self, stream: handle(stream), world.api.__class__.__call__  # type: ignore[method-assign]
        try:
            async with client(world.inside, world.trust()) as stream:  # type: ignore[arg-type]
                await stream.send_all(
                    f"GET /ws HTTP/1.1\r\nHost: {HOST}\r\nX-Key: {PLACEHOLDER}\r\n"
                    "Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n".encode()
                )
                said = b""
                while not said.endswith(b"hello"):
                    said += await stream.receive_some(65536)
                for ping in (b"one", b"x" * 100_000, VALUE[:3].encode()):
                    await stream.send_all(ping)
                    back = b""
                    while len(back) < len(ping):
                        back += await stream.receive_some(65536)
                    assert back == ping
        finally:
            world.api.__class__.__call__ = before  # type: ignore[method-assign]
    assert VALUE.encode() in world.api.requests[0]
