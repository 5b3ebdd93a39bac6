"""Connections through an operator's proxy: what the proxy is asked for, what it never hears of, and how it may fail."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from egress import barrier
from egress import protocol as p
from egress.upstream import MAX_HEAD_BYTES
from nsinit.cgroup.beside import name_cgroups, remove_cgroups
from tests.egress import broker_world
from tests.egress.conftest import OWN
from tests.egress.harness import (
    METADATA,
    PRIVATE,
    PUBLIC,
    PUBLIC_V6,
    Egress,
    Handler,
    Inside,
    Names,
    client_hello,
    echo,
    egress,
    is_refused,
    program,
    read_all,
    server,
)
from tests.egress.taken_over import WAYS
from tests.egress.test_barrier import taken_over
from tests.egress.test_proxy import PROXY as SESSIONS_PROXY
from tests.egress.test_proxy import answer_head, asked, tunnel
from tests.waiting import patience

pytestmark = pytest.mark.usefixtures("outside")

PROXY = "10.3.3.3"
PROXY_PORT = 3129
ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"


class Proxy:
    """The operator's proxy: answers each request as it is told, and leads wherever `then` says."""

    def __init__(self, answer: bytes = ESTABLISHED, then: Handler = echo) -> None:
        self.answer, self.then = answer, then
        self.heads: list[bytes] = []

    async def __call__(self, stream: trio.SocketStream) -> None:
        self.heads.append(await answer_head(stream))
        await stream.send_all(self.answer)
        await self.then(stream)

    @property
    def targets(self) -> list[str]:
        return [each.split()[1].decode() for each in self.heads]


@asynccontextmanager
async def behind(proxy: Proxy, credentials: str = "", *permit: str) -> AsyncIterator[Egress]:
    """Run an egress process behind a proxy, on a machine whose resolver fails the test when it is asked."""
    names = Names()
    upstream = p.UpstreamProxy(PROXY, PROXY_PORT, credentials)
    async with egress(names, upstream=upstream, permit=permit) as daemon, server(PROXY, PROXY_PORT, proxy):
        yield daemon
    assert names.asked == []


async def over_and_back(inside: Inside, address: str, port: int, data: bytes) -> bool:
    stream = await inside.connect(address, port)
    async with stream:
        await stream.send_all(data)
        await stream.send_eof()
        return await read_all(stream) == data


async def test_the_proxy_is_given_the_name_and_finds_its_address() -> None:
    """Bytes of any protocol go through, those of a server that speaks first too; the log has no address, for none is
    known. Literal addresses go through as they are."""
    proxy = Proxy(ESTABLISHED + b"220 ")
    async with behind(proxy, "someone:a secret") as daemon:
        inside = await daemon.attach("good.example:443,5000", "none.example:5000", f"{PUBLIC}:5000")
        async with await inside.connect_to("good.example", 5000) as stream:
            await stream.send_all(b"hello")
            await stream.send_eof()
            assert await read_all(stream) == b"220 hello"
        proxy.answer = b"HTTP/1.1 103 Early\r\n\r\n" + b"HTTP/1.0 299 Fine\r\nContent-Length: 7\r\n\r\n"
        hello = client_hello("good.example")
        assert await over_and_back(inside, await inside.address_of("good.example"), 443, hello)
        assert await over_and_back(inside, PUBLIC, 5000, b"\1raw")
        assert proxy.targets == ["good.example:5000", "good.example:443", f"{PUBLIC}:5000"]
        code = base64.b64encode(b"someone:a secret")
        assert all(head.count(b"Proxy-Authorization: Basic " + code + b"\r\n") == 1 for head in proxy.heads)
        entry = await daemon.entry(host="good.example", port=5000)
        assert (entry.verdict, entry.address, entry.bytes_down) == ("allowed", None, 9)


async def test_rules_first_bytes_and_limits_hold_as_without() -> None:
    """The proxy hears of nothing that no rule allows; another Host on the way is an answer of 403; a
    change of the policy resets what goes through the proxy; and bytes are bounded."""
    proxy = Proxy()
    async with behind(proxy) as daemon:
        inside = await daemon.attach("good.example:80,443,5000", bytes_down=3000)
        assert (await inside.ask("other.example")).code == 3
        address = await inside.address_of("good.example")
        assert await is_refused(inside, address, 22)
        async with await inside.connect(address, 443) as stream:
            await stream.send_all(client_hello("other.example"))
            with pytest.raises(trio.BrokenResourceError):
                await stream.receive_some(1)
        assert proxy.heads == []
        async with await inside.connect(address, 80) as stream:
            await stream.send_all(b"GET / HTTP/1.1\r\nHost: other.example\r\n\r\n")
            assert (await read_all(stream)).startswith(b"HTTP/1.1 403 ")
        async with await inside.connect(address, 5000) as stream:
            await stream.send_all(b"\1")
            await stream.receive_some(1)
            await daemon.set_policy("good.example:80", bytes_down=3000)
            with pytest.raises(trio.BrokenResourceError):
                await stream.receive_some(1)
        await daemon.set_policy("good.example:5000", bytes_down=3000)
        assert not await over_and_back_or_reset(inside, address, bytes(8000))


async def over_and_back_or_reset(inside: Inside, address: str, data: bytes) -> bool:
    try:
        return await over_and_back(inside, address, 5000, b"\1" + data)
    except trio.BrokenResourceError:
        return False


@pytest.mark.parametrize("host", [PRIVATE, METADATA, OWN, "127.0.0.1", PROXY])
async def test_an_address_that_no_session_reaches_is_not_asked_for(host: str) -> None:
    """Private and special addresses, this machine's own and the proxy's: `open` or a rule for them changes nothing."""
    proxy = Proxy()
    async with behind(proxy) as daemon:
        inside = await daemon.attach(f"{host}:5000", mode="open")
        answer = await asked(inside, tunnel(f"{host}:5000"))
        assert answer.startswith(b"HTTP/1.1 403 bad_address")
        assert proxy.heads == []


async def test_a_permit_holds_for_addresses_as_without_a_proxy() -> None:
    """The proxy is asked for an address of a permitted network; IPv6 has its brackets."""
    proxy = Proxy()
    async with behind(proxy, "", "10.1.2.0/24") as daemon:
        inside = await daemon.attach(f"{PRIVATE}:5000", f"[{PUBLIC_V6}]:5000")
        assert await over_and_back(inside, PRIVATE, 5000, b"\1x")
        async with await inside.connect(*SESSIONS_PROXY) as stream:
            await stream.send_all(tunnel(f"[{PUBLIC_V6}]:5000"))
            assert await answer_head(stream) == ESTABLISHED
        assert proxy.targets == [f"{PRIVATE}:5000", f"[{PUBLIC_V6}]:5000"]


async def test_names_of_machines_and_sites_are_nobodys() -> None:
    """The proxy would find its own loopback, its neighbours or its cloud's metadata by them."""
    local = ("localhost", "a.localhost", "db", "printer.local", "metadata.google.internal", "nas.home.arpa")
    proxy = Proxy()
    async with behind(proxy) as daemon:
        inside = await daemon.attach(*(f"{each}:5000" for each in local), mode="open")
        for name in local:
            answer = await inside.ask(name)
            assert (answer.code, answer.extended) == (3, 15)
            assert (await asked(inside, tunnel(f"{name}:5000"))).startswith(b"HTTP/1.1 403 bad_address")
        assert proxy.heads == []


async def hang(stream: trio.SocketStream) -> None:
    await stream.receive_some(1)


async def close(stream: trio.SocketStream) -> None:
    await stream.aclose()


async def endless(stream: trio.SocketStream) -> None:
    while True:
        await stream.send_all(b"X: y\r\n" * 1000)


@pytest.mark.parametrize(
    ("answer", "then", "cause"),
    [
        (b"HTTP/1.1 403 Forbidden\r\nContent-Length: 5\r\n\r\nnever", hang, "status 403"),
        (b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", hang, "status 407"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://portal.example/\r\n\r\n", hang, "status 302"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", hang, "no HTTP"),
        (b"SSH-2.0-lies\r\n\r\n", hang, "no HTTP"),
        (b"\r\n\r\n" + ESTABLISHED, hang, "no HTTP"),
        (b"HTTP/1.1 200", close, "closed"),
        (b"", close, "closed"),
        (b"HTTP/1.1 200 OK\r\n", endless, "head too long"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * (MAX_HEAD_BYTES // 20), hang, "head too long"),
        (b"HTTP/1.1 200 OK\r\n", hang, "timeout"),
    ],
)
async def test_a_proxy_that_fails_is_named(answer: bytes, then: Handler, cause: str) -> None:
    """The connection is refused with the reason `upstream`, within the time for a dial; the log has the cause, and so
    has the answer to who asks the session's own proxy."""
    async with behind(Proxy(answer, then)) as daemon:
        inside = await daemon.attach("good.example:5000", dial_s=1.0 if cause == "timeout" else patience())
        assert await is_refused(inside, await inside.address_of("good.example"), 5000)
        entry = await daemon.entry(host="good.example", kind="tcp")
        assert (entry.verdict, entry.reason, entry.cause) == ("denied", "upstream", cause)
        said = await asked(inside, tunnel("good.example:5000"))
        assert said.startswith(f"HTTP/1.1 502 upstream: good.example:5000 ({cause})\r\n".encode())


async def test_a_proxy_that_is_away_is_named() -> None:
    """A port where nothing listens is the cause ECONNREFUSED."""
    async with egress(upstream=p.UpstreamProxy(PROXY, PROXY_PORT)) as daemon:
        inside = await daemon.attach("good.example:5000")
        assert await is_refused(inside, await inside.address_of("good.example"), 5000)
        assert (await daemon.entry(host="good.example")).cause == "ECONNREFUSED"


async def test_a_secret_is_put_in_behind_the_proxy(tmp_path: Path) -> None:
    """The broker opens the TLS of a connection that leads through the proxy, whose sight of it ends with the name."""
    with broker_world.foreign_authority() as (world, ca_file), broker_world.broker(tmp_path, ca_file) as broker:

        async def serve(stream: trio.SocketStream) -> None:
            tls = trio.SSLStream(stream, world.context_for(broker_world.HOST), server_side=True, https_compatible=True)
            seen.append(await answer_head(tls))  # type: ignore[arg-type]  # reads as a plain stream does
            await tls.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await tls.aclose()

        seen: list[bytes] = []
        proxy = Proxy(then=serve)
        async with behind(proxy) as daemon:
            broker.put("the-value-itself", broker_world.HOST)
            await broker.join(daemon)
            inside = await broker_world.attach(daemon)
            trust = broker_world.trusting(broker.listed().certificate)
            async with broker_world.client(inside, trust) as tls:
                head = f"GET / HTTP/1.1\r\nHost: {broker_world.HOST}\r\nX-Key: {broker_world.PLACEHOLDER}\r\n\r\n"
                await tls.send_all(head.encode())
                assert (await broker_world.everything(tls)).startswith(b"HTTP/1.1 200 ")
        assert b"the-value-itself" in seen[0]
        assert proxy.targets == [f"{broker_world.HOST}:443"]


async def test_the_kernel_lets_the_process_reach_the_proxy_alone() -> None:
    """A process that checks nothing reaches the proxy's port at the proxy's address: no other port there, no public
    address, no resolver. The process itself works behind it, and not without being told so."""
    url = f"http://{PROXY}:{PROXY_PORT}"
    targets = [(PROXY, PROXY_PORT), (PROXY, 80), (PROXY, 53), (PUBLIC, PROXY_PORT), (PUBLIC, 443), ("127.0.0.1", 53)]
    cgroups = name_cgroups("egress")
    try:
        found = taken_over(cgroups, proxy=url, permit=["10.0.0.0/8"], targets=targets)["found"]
    finally:
        remove_cgroups(cgroups)
    reached = {each for each, outcome in found.items() if outcome != "errno 1"} - {"leave", "detach"}
    assert reached == {f"{way} {PROXY} {PROXY_PORT}" for way in WAYS}
    assert barrier.PROXY not in barrier.make_table([], [], []).values()
    proxy = Proxy()
    async with server(PROXY, PROXY_PORT, proxy), server(PUBLIC, 5000):
        async with program(proxy=url, upstream=p.UpstreamProxy(PROXY, PROXY_PORT)) as one:
            inside = await one.daemon.attach("good.example:5000")
            assert await over_and_back(inside, await inside.address_of("good.example"), 5000, b"\1x")
        async with program(proxy=url) as other:
            inside = await other.daemon.attach(f"{PUBLIC}:5000")
            assert await is_refused(inside, PUBLIC, 5000)
            assert (await other.daemon.entry(host=PUBLIC)).cause == "EPERM"
