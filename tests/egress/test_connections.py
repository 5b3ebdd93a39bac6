"""Connections of a session: which are carried, to whom, and what becomes of those that are not."""

from __future__ import annotations

import ssl
from contextlib import AsyncExitStack
from ipaddress import IPv4Address

import pytest
import trio

from egress import protocol as p
from egress import state
from egress.names import RANGE
from tests.egress.conftest import OWN, add_own_address
from tests.egress.harness import (
    METADATA,
    OTHER_PUBLIC,
    PRIVATE,
    PUBLIC,
    PUBLIC_V6,
    Inside,
    Names,
    client_hello,
    egress,
    is_refused,
    is_reset,
    read_all,
    server,
)
from tests.waiting import patience

pytestmark = pytest.mark.usefixtures("outside")

NAMES = {
    "good.example": [PUBLIC],
    "a.b.wild.example": [PUBLIC],
    "wild.example": [PUBLIC],
    "other.example": [OTHER_PUBLIC],
    "v6.example": [PUBLIC_V6],
    "two.example": ["8.8.4.4", PUBLIC],
    "private.example": [PRIVATE],
    "metadata.example": [METADATA],
    "own.example": [OWN],
    "mapped.example": [f"::ffff:{PRIVATE}"],
    "nat64.example": ["64:ff9b::a01:203"],
    "mixed.example": [PRIVATE, METADATA, PUBLIC],
}


def names() -> Names:
    return Names(**NAMES)


async def echoes(inside: Inside, address: str, port: int, data: bytes = b"\x01over and back") -> bool:
    """Tell whether what is sent through a connection comes back."""
    stream = await inside.connect(address, port)
    async with stream:
        await stream.send_all(data)
        await stream.send_eof()
        return await read_all(stream) == data


@pytest.mark.parametrize("name", ["good.example", "a.b.wild.example", "v6.example", "two.example", "mixed.example"])
async def test_a_name_that_is_allowed_is_reached(name: str) -> None:
    """By a synthetic address, over IPv4 or IPv6, at the first good address that answers; the log has all of it."""
    address = NAMES[name][-1]
    async with egress(names()) as daemon, server(address, 5000):
        inside = await daemon.attach("good.example:5000", "*.wild.example:5000", *(f"{each}:5000" for each in NAMES))
        synthetic = await inside.address_of(name)
        assert IPv4Address(synthetic) in RANGE
        assert await echoes(inside, synthetic, 5000)
        entry = await daemon.entry(kind="tcp")
        assert (entry.host, entry.port, entry.address, entry.verdict) == (name, 5000, address, "allowed")
        assert (entry.bytes_up, entry.bytes_down, entry.cause) == (14, 14, "end")
        assert entry.rule in (f"{name}:5000", "*.wild.example:5000")
        counters = await daemon.counters()
        assert (counters.connections, counters.connections_open, counters.bytes_up) == (1, 0, 14 + len(name))


async def test_a_rule_for_names_below_is_not_for_the_name_itself() -> None:
    """A suffix has names of any depth below it, and not itself."""
    async with egress(names()) as daemon:
        inside = await daemon.attach("*.wild.example")
        assert (await inside.ask("a.b.wild.example")).address
        assert (await inside.ask("wild.example")).code == 3


async def test_another_port_is_refused() -> None:
    """The name resolves, for some port is allowed; the port is checked at the connection."""
    async with egress(names()) as daemon, server(PUBLIC, 5001):
        inside = await daemon.attach("good.example:5000")
        assert await is_refused(inside, await inside.address_of("good.example"), 5001)
        entry = await daemon.entry(verdict="denied")
        assert (entry.reason, entry.host, entry.port, entry.address) == ("port", "good.example", 5001, None)
        assert (await daemon.counters()).denied == 1


async def test_an_address_without_a_rule_is_refused() -> None:
    """A name's rule is not for the address that the name has."""
    async with egress(names()) as daemon, server(PUBLIC, 80):
        inside = await daemon.attach("good.example")
        assert await is_refused(inside, PUBLIC, 80)
        assert (await daemon.entry(verdict="denied")).reason == "not_allowed"


async def test_a_network_with_a_rule_is_reached() -> None:
    """A literal address is dialled as it is, on its ports, whatever is said there."""
    async with egress() as daemon, server(PUBLIC, 443):
        inside = await daemon.attach("93.184.216.0/24:443")
        assert await echoes(inside, PUBLIC, 443)
        assert (await daemon.entry(verdict="allowed")).host == PUBLIC


@pytest.mark.parametrize("address", [PRIVATE, METADATA, OWN, "198.18.7.7", "198.18.0.1", "100.64.0.1"])
async def test_no_rule_reaches_what_nobody_may_reach(address: str) -> None:
    """Private, link-local and the host's own addresses, and those that stand for no name."""
    async with egress() as daemon:
        inside = await daemon.attach("0.0.0.0/0:5000,61080")
        assert await is_refused(inside, address, 61080 if address == "198.18.0.1" else 5000)
        assert (await daemon.entry(host=address)).reason in ("bad_address", "unknown_address")


@pytest.mark.parametrize("name", ["private", "metadata", "own", "mapped", "nat64"])
async def test_a_name_with_such_an_address_does_not_resolve(name: str) -> None:
    """In whatever notation; the log says why."""
    async with egress(names()) as daemon:
        inside = await daemon.attach(f"{name}.example")
        answer = await inside.ask(f"{name}.example")
        assert (answer.code, answer.extended) == (3, 15)
        assert (await daemon.entry(kind="dns", host=f"{name}.example")).reason == "bad_address"


async def test_the_operator_permits_a_private_network() -> None:
    """`permit` is the only exception, and the host's own address takes a permit for itself alone."""
    async with egress(names(), permit=["10.1.2.0/24", "45.33.32.0/24"]) as daemon, server(PRIVATE, 5000):
        inside = await daemon.attach("private.example:5000", "own.example")
        assert await echoes(inside, await inside.address_of("private.example"), 5000)
        assert (await inside.ask("own.example")).code == 3


async def test_an_address_that_becomes_the_hosts_own_is_refused() -> None:
    """Own addresses are read again when they change."""
    async with egress(names()) as daemon, server(PUBLIC, 5000):
        inside = await daemon.attach("good.example:5000", f"{PUBLIC}:5000")
        assert await echoes(inside, PUBLIC, 5000)
        add_own_address(PUBLIC)
        with trio.fail_after(patience()):
            while not await is_refused(inside, PUBLIC, 5000):
                pass


async def test_a_name_can_not_be_rebound() -> None:
    """A second answer with a private address changes nothing about what is dialled, and is refused itself."""
    outside = names()
    async with egress(outside, kept_s=0) as daemon, server(PUBLIC, 5000), server(PRIVATE, 5000):
        inside = await daemon.attach("good.example:5000")
        synthetic = await inside.address_of("good.example")
        outside.addresses["good.example"] = [PRIVATE]
        assert (await inside.ask("good.example")).code == 3
        assert await echoes(inside, synthetic, 5000)
        assert (await daemon.entry(verdict="allowed")).address == PUBLIC


async def test_an_address_that_a_program_keeps_is_its_names_in_the_next_process() -> None:
    """If a rule has that name; one below a wildcard is refused until it is asked for, and is no other name's."""
    rules = "good.example:5000", "*.wild.example:5000", "other.example:5000"
    async with egress(names()) as daemon, server(PUBLIC, 5000):
        inside = await daemon.attach(*rules)
        kept, below = [await inside.address_of(name) for name in ("good.example", "a.b.wild.example")]
        await daemon.done(lambda seq: p.DetachSession(seq, "s-1"))
        await daemon.done(lambda seq: p.AttachSession(seq, "s-1", p.PolicyText("allow", rules)), inside.fds)
        await inside.address_of("other.example")
        assert await is_refused(inside, below, 5000)
        assert (await daemon.entry(reason="unknown_address")).host == below
        assert await echoes(inside, kept, 5000)
        assert await inside.address_of("a.b.wild.example") == below
        assert await echoes(inside, below, 5000)


async def test_a_rule_that_denies_an_address_holds_for_names() -> None:
    """A name that is allowed is not dialled at an address that is denied, be it the operator's rule."""
    async with egress(names(), always_deny=[OTHER_PUBLIC]) as daemon, server(PUBLIC, 5000), server(OTHER_PUBLIC, 5000):
        inside = await daemon.attach("good.example:5000", "other.example:5000", deny=["93.184.0.0/16"])
        for name in ("good.example", "other.example"):
            assert await is_refused(inside, await inside.address_of(name), 5000)
            assert (await daemon.entry(host=name)).reason == "denied"


async def test_open_reaches_everything_public() -> None:
    """Names and addresses on any port; what is denied, private or the host's own stays out."""
    async with egress(names()) as daemon, server(PUBLIC, 5000):
        inside = await daemon.attach(mode="open", deny=["other.example"])
        assert await echoes(inside, PUBLIC, 5000)
        assert await echoes(inside, await inside.address_of("good.example"), 5000)
        assert (await inside.ask("other.example")).code == 3
        for address in (PRIVATE, METADATA, OWN):
            assert await is_refused(inside, address, 5000)


async def test_a_server_that_refuses_is_told_of() -> None:
    """The client sees a reset, the log the error."""
    async with egress(names()) as daemon:
        inside = await daemon.attach("good.example:5000")
        assert await is_refused(inside, await inside.address_of("good.example"), 5000)
        entry = await daemon.entry(verdict="allowed")
        assert (entry.reason, entry.cause, entry.address) == ("dial", "ECONNREFUSED", PUBLIC)


# What the client sends first


@pytest.mark.parametrize("port", [443, 8443])
async def test_tls_has_to_name_the_host(port: int) -> None:
    """The ClientHello goes through whole when its server name is the host's; another name, or none, is a reset."""
    async with egress(names()) as daemon, server(PUBLIC, port):
        inside = await daemon.attach(f"good.example:{port}")
        synthetic = await inside.address_of("good.example")
        assert await echoes(inside, synthetic, port, client_hello("good.example"))
        for other in ("other.example", None):
            stream = await inside.connect(synthetic, port)
            async with stream:
                await stream.send_all(client_hello(other))
                assert await is_reset(stream)
        await daemon.until(lambda: [each.reason for each in daemon.entries].count("sni") == 2)
        assert all(each.bytes_up == 0 for each in daemon.entries if each.reason == "sni")


RETRY = bytes.fromhex("cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c")


def retry_for(hello: bytes) -> bytes:
    """Return a HelloRetryRequest (RFC 8446, 4.1.4) for another group, with the session id of a ClientHello."""
    body = b"\3\3" + RETRY + hello[43 : 44 + hello[43]] + b"\x13\1\0" + b"\0\x0c\0\x2b\0\2\3\4\0\x33\0\2\0\x18"
    return b"\x16\3\3" + (len(body) + 4).to_bytes(2, "big") + b"\2" + len(body).to_bytes(3, "big") + body


@pytest.mark.parametrize("second", [b"good.example", b"evil.example", b""])
@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("port", [443, 8443])
async def test_a_second_hello_has_to_name_the_host(port: int, is_early: bool, second: bytes) -> None:
    """Servers take the name from it when they have asked for it. It may come before they ask."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname="good.example")
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    hello = outgoing.read()
    incoming.write(retry_for(hello))
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    again = outgoing.read()
    assert again.startswith(b"\x14\3\3\0\1\1\x16")
    sent = again.replace(b"good.example", second) if second else b"\x14\3\3\0\1\1\x17\3\3\0\1x" + again
    heard = bytearray()

    async def ask_again(stream: trio.SocketStream) -> None:
        while data := await stream.receive_some(65536):
            heard.extend(data)
            if len(heard) == len(hello):
                await stream.send_all(retry_for(hello))
            elif len(heard) == len(hello) + len(again):
                await stream.send_all(b"done")

    async with egress(names()) as daemon, server(PUBLIC, port, ask_again):
        inside = await daemon.attach(f"good.example:{port}")
        async with await inside.connect_to("good.example", port) as stream:
            await stream.send_all(hello + (sent if is_early else b""))
            if is_early and second != b"good.example":
                assert await is_reset_after(stream, retry_for(hello))
            else:
                assert await receive_exactly(stream, len(retry_for(hello))) == retry_for(hello)
                if not is_early:
                    await stream.send_all(sent)
                if second == b"good.example":
                    assert await receive_exactly(stream, 4) == b"done"
                else:
                    assert await is_reset(stream)
        if second != b"good.example":
            assert (await daemon.entry(reason="sni")).host == "good.example"
        assert heard == hello + (again if second == b"good.example" else b"")


async def receive_exactly(stream: trio.SocketStream, size: int) -> bytes:
    received = b""
    with trio.fail_after(patience()):
        while len(received) < size:
            piece = await stream.receive_some(size - len(received))
            assert piece
            received += piece
    return received


async def is_reset_after(stream: trio.SocketStream, expected: bytes) -> bool:
    """Tell whether nothing but a part of this comes before the reset."""
    received = b""
    try:
        with trio.fail_after(patience()):
            while piece := await stream.receive_some(65536):
                received += piece
    except trio.BrokenResourceError:
        return expected.startswith(received)
    return False


async def test_a_hello_in_pieces_is_a_hello() -> None:
    """Segments as short as they get change nothing."""
    async with egress(names()) as daemon, server(PUBLIC, 8443):
        inside = await daemon.attach("good.example:8443")
        hello = client_hello("good.example")
        stream = await inside.connect_to("good.example", 8443)
        async with stream:
            for at in range(len(hello)):
                await stream.send_all(hello[at : at + 1])
            await stream.send_eof()
            assert await read_all(stream) == hello


async def test_port_443_is_for_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other bytes are a reset there, and so is silence, and nothing was dialled for either."""
    monkeypatch.setattr("egress.connection.FIRST_BYTES_S", 0.2)
    async with egress(names()) as daemon:
        inside = await daemon.attach("good.example")
        for first, reason in ((b"SSH-2.0-x\r\n", "not_tls"), (b"", "timeout")):
            stream = await inside.connect_to("good.example", 443)
            async with stream:
                await stream.send_all(first)
                assert await is_reset(stream)
            assert (await daemon.entry(reason=reason)).address is None


async def test_a_server_may_speak_first() -> None:
    """Nothing is awaited of the client on ports other than 443."""

    async def greet(stream: trio.SocketStream) -> None:
        await stream.send_all(b"220 hello\r\n")
        await stream.send_all(await stream.receive_some(100))

    async with egress(names()) as daemon, server(PUBLIC, 25, greet):
        inside = await daemon.attach("good.example:25")
        stream = await inside.connect_to("good.example", 25)
        async with stream:
            with trio.fail_after(patience()):
                assert await stream.receive_some(100) == b"220 hello\r\n"
            await stream.send_all(b"EHLO me\r\n")
            assert await read_all(stream) == b"EHLO me\r\n"


# HTTP


async def answering(stream: trio.SocketStream, seen: list[bytes]) -> None:
    """Answer each request that has no body."""
    data = b""
    async for piece in stream:
        data += piece
        while b"\r\n\r\n" in data:
            head, _, data = data.partition(b"\r\n\r\n")
            seen.append(head)
            await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")


def get(host: str) -> bytes:
    return f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()


async def test_every_request_has_to_name_the_host() -> None:
    """The second request of a connection is refused with an answer, and the server sees the first alone."""
    seen: list[bytes] = []
    async with egress(names()) as daemon, server(PUBLIC, 80, lambda stream: answering(stream, seen)):
        inside = await daemon.attach("good.example")
        stream = await inside.connect_to("good.example", 80)
        async with stream:
            await stream.send_all(get("good.example"))
            with trio.fail_after(patience()):
                assert (await stream.receive_some(1000)).endswith(b"ok")
            await stream.send_all(get("other.example"))
            answer = await read_all(stream)
        assert answer.startswith(b"HTTP/1.1 403 ")
        assert b'"error_code": "EGRESS_DENIED"' in answer
        entry = await daemon.entry(kind="http")
        assert (entry.verdict, entry.reason, entry.host) == ("denied", "host", "good.example")
        assert len(seen) == 1


async def test_a_first_request_for_another_host_never_leaves() -> None:
    """The server sees no byte of it."""
    seen: list[bytes] = []
    async with egress(names()) as daemon, server(PUBLIC, 8080, lambda stream: answering(stream, seen)):
        inside = await daemon.attach("good.example:8080")
        stream = await inside.connect_to("good.example", 8080)
        async with stream:
            await stream.send_all(get("other.example"))
            assert (await read_all(stream)).startswith(b"HTTP/1.1 403 ")
        assert (await daemon.entry(kind="http")).bytes_up == 0
        assert seen == []


async def test_requests_one_behind_the_other_are_all_answered() -> None:
    """Pipelined requests wait for each other; a large answer arrives whole, and a client may end its stream first."""
    body = bytes(range(256)) * 8192

    async def large(stream: trio.SocketStream) -> None:
        data = b""
        async for piece in stream:
            data += piece
            while b"\r\n\r\n" in data:
                data = data.partition(b"\r\n\r\n")[2]
                await stream.send_all(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    async with egress(names()) as daemon, server(PUBLIC, 80, large):
        inside = await daemon.attach("good.example")
        stream = await inside.connect_to("good.example", 80)
        async with stream:
            await stream.send_all(get("good.example") * 3)
            await stream.send_eof()
            answers = await read_all(stream)
        assert answers.count(b"HTTP/1.1 200 ") == 3
        assert answers.count(body) == 3
        entry = await daemon.entry(kind="http")
        assert (entry.verdict, entry.cause, entry.bytes_down) == ("allowed", "end", len(answers))


async def test_a_request_without_a_server_breaks_off() -> None:
    """A server that has ended its stream before the request is not waited for."""

    async def leave(stream: trio.SocketStream) -> None:
        await stream.send_eof()
        await stream.receive_some(1)

    async with egress(names()) as daemon, server(PUBLIC, 80, leave):
        inside = await daemon.attach("good.example")
        stream = await inside.connect_to("good.example", 80)
        async with stream:
            assert await read_all(stream) == b""
            await stream.send_all(get("good.example"))
            assert (await daemon.entry(kind="tcp")).cause == "ECONNRESET"


async def test_a_web_socket_becomes_plain_bytes() -> None:
    """After 101 both directions go through as they are, each with its own end."""

    async def upgrade(stream: trio.SocketStream) -> None:
        await stream.receive_some(1000)
        await stream.send_all(b"HTTP/1.1 101 Go\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
        await stream.send_all(bytes([0, 255]) + b"".join([each async for each in stream]))

    async with egress(names()) as daemon, server(PUBLIC, 80, upgrade):
        inside = await daemon.attach("good.example")
        stream = await inside.connect_to("good.example", 80)
        async with stream:
            head = get("good.example")[:-2] + b"Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
            await stream.send_all(head)
            with trio.fail_after(patience()):
                assert (await stream.receive_some(1000)).startswith(b"HTTP/1.1 101 ")
            await stream.send_all(b"\x81\x01x\nGET / HTTP/1.1\r\nHost: other\r\n\r\n")
            await stream.send_eof()
            assert (await read_all(stream)).endswith(b"\x81\x01x\nGET / HTTP/1.1\r\nHost: other\r\n\r\n")


# Limits and changes


async def test_a_session_has_so_many_connections() -> None:
    """One more is reset and told of; when one has ended there is room again."""
    async with egress(names()) as daemon, server(PUBLIC, 5000):
        inside = await daemon.attach("good.example:5000", connections=2)
        synthetic = await inside.address_of("good.example")
        first, second = [await inside.connect(synthetic, 5000) for _ in range(2)]
        async with first, second:
            assert await is_refused(inside, synthetic, 5000)
            entry = await daemon.entry(reason="limit")
            assert (entry.host, entry.port) == ("good.example", 5000)
            await first.send_eof()
            assert await read_all(first) == b""
            await daemon.entry(verdict="allowed")
            assert await echoes(inside, synthetic, 5000)


async def test_all_sessions_have_so_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has a limit of its own."""
    monkeypatch.setattr(state, "MAX_CONNECTIONS", 1)
    async with egress(names()) as daemon, server(PUBLIC, 5000):
        one, other = [await daemon.attach("good.example:5000", name=name) for name in ("s-1", "s-2")]
        stream = await one.connect_to("good.example", 5000)
        async with stream:
            await daemon.counters()
            assert await is_refused(other, await other.address_of("good.example"), 5000)
        assert (await daemon.entry(reason="limit")).session_id == "s-2"


async def test_no_session_takes_all_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session has as many as are left for others at most, whatever its own limit is."""
    monkeypatch.setattr(state, "MAX_CONNECTIONS", 6)
    async with egress(names()) as daemon, server(PUBLIC, 5000), AsyncExitStack() as held:
        greedy, late = [
            await daemon.attach("good.example:5000", name=name, connections=8192) for name in ("s-1", "s-2")
        ]
        synthetic = await greedy.address_of("good.example")
        for _ in range(3):
            stream = await held.enter_async_context(await greedy.connect(synthetic, 5000))
            await stream.send_all(b"\x01")
            assert await stream.receive_some(1) == b"\x01"
        assert await is_refused(greedy, synthetic, 5000)
        assert await echoes(late, await late.address_of("good.example"), 5000)


async def test_connections_beyond_the_rate_wait() -> None:
    """Connections beyond it are served later, and none is refused."""
    async with egress(names()) as daemon, server(PUBLIC, 5000):
        inside = await daemon.attach("good.example:5000", rate=20.0, burst=2)
        synthetic = await inside.address_of("good.example")
        begin = trio.current_time()
        for _ in range(8):
            assert await echoes(inside, synthetic, 5000)
        assert trio.current_time() - begin > 0.2


@pytest.mark.parametrize("limit", ["bytes_up", "bytes_down"])
async def test_no_byte_more_than_allowed(limit: str) -> None:
    """Over all connections of a session, in each direction: who wants more has all cut, and none opened any more."""
    async with egress(names()) as daemon, server(PUBLIC, 5000):
        inside = await daemon.attach("good.example:5000")
        synthetic = await inside.address_of("good.example")
        before = getattr(await daemon.counters(), limit)
        await daemon.set_policy("good.example:5000", **{limit: before + 20})
        assert await echoes(inside, synthetic, 5000)
        stream, silent = [await inside.connect(synthetic, 5000) for _ in range(2)]
        async with stream, silent:
            await silent.send_all(b"\x01")
            assert await silent.receive_some(1) == b"\x01"  # it is carried, and not only accepted by the kernel
            await stream.send_all(b"\x01over and back")
            assert await is_reset(stream)
            assert await is_reset(silent)
        assert (await daemon.entry(reason="limit")).verdict == "denied"
        assert (await daemon.entry(cause="limit")).verdict == "allowed"
        assert getattr(await daemon.counters(), limit) == before + 15
        assert await is_refused(inside, synthetic, 5000)
        await daemon.set_policy("good.example:5000")
        assert await echoes(inside, synthetic, 5000)


async def test_a_silent_connection_is_cut() -> None:
    """No byte in either direction for the session's time is the end; bytes put it off."""
    async with egress(names()) as daemon, server(PUBLIC, 5000):
        inside = await daemon.attach("good.example:5000", idle_s=0.5)
        stream = await inside.connect_to("good.example", 5000)
        async with stream:
            for _ in range(4):
                await trio.sleep(0.2)
                await stream.send_all(b"\x01")
            assert await is_reset(stream)
        entry = await daemon.entry(cause="idle")
        assert (entry.bytes_up, entry.bytes_down) == (4, 4)
        assert entry.duration_ms >= 1000


async def test_a_dial_has_a_deadline() -> None:
    """A server that never answers costs the session's time for it, and the connection."""
    with trio.socket.socket() as full:  # a backlog that is full: further SYNs are not answered (listen(2))
        await full.bind((PUBLIC, 5000))
        full.listen(0)
        async with egress(names()) as daemon:
            inside = await daemon.attach("good.example:5000", dial_s=0.5)
            synthetic = await inside.address_of("good.example")
            holders = [await inside.connect(synthetic, 5000) for _ in range(2)]
            assert await is_refused(inside, synthetic, 5000)
            assert (await daemon.entry(reason="dial")).cause == "ETIMEDOUT"
            for each in holders:
                await trio.aclose_forcefully(each)


async def test_a_new_policy_cuts_what_it_does_not_allow() -> None:
    """When the change is answered the one connection is reset and logged, and the other goes on."""
    async with egress(names()) as daemon, server(PUBLIC, 5000), server(OTHER_PUBLIC, 5000):
        inside = await daemon.attach("good.example:5000", "other.example:5000")
        good = await inside.connect_to("good.example", 5000)
        other = await inside.connect_to("other.example", 5000)
        async with good, other:
            for stream in (good, other):
                await stream.send_all(b"\x01")
                assert await stream.receive_some(10) == b"\x01"
            await daemon.set_policy("good.example:5000")
            assert [(each.host, each.cause) for each in daemon.entries] == [("other.example", "policy")]
            assert await is_reset(other)
            await good.send_all(b"\x02")
            assert await good.receive_some(10) == b"\x02"
            assert (await inside.ask("other.example")).code == 3
