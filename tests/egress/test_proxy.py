"""The proxy of a session: its requests go through the checks of any connection, and a refusal has a reason."""

from __future__ import annotations

import socket

import pytest
import trio

from tests.egress.conftest import OWN, add_own_address
from tests.egress.harness import (
    METADATA,
    OTHER_PUBLIC,
    PRIVATE,
    PUBLIC,
    PUBLIC_V6,
    Egress,
    Inside,
    Names,
    client_hello,
    egress,
    is_refused,
    is_reset,
    read_all,
    server,
)
from tests.egress.test_connections import NAMES, answering
from tests.waiting import patience

pytestmark = pytest.mark.usefixtures("outside")

PROXY = ("198.18.0.1", 3128)


async def asked(inside: Inside, data: bytes) -> bytes:
    """Return all that the proxy answers to these bytes."""
    stream = await inside.connect(*PROXY)
    async with stream:
        await stream.send_all(data)
        return await read_all(stream)


async def answer_head(stream: trio.SocketStream) -> bytes:
    """Return the head of an answer that has no body."""
    data = b""
    with trio.fail_after(patience()):
        while not data.endswith(b"\r\n\r\n"):
            piece = await stream.receive_some(1)
            assert piece, data
            data += piece
    return data


def tunnel(target: str, more: str = "") -> bytes:
    return f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{more}\r\n".encode()


@pytest.mark.parametrize(
    ("target", "address"),
    [
        ("good.example:5000", PUBLIC),
        ("GOOD.Example.:5000", PUBLIC),
        (f"{PUBLIC}:5000", PUBLIC),
        (f"[::ffff:{PUBLIC}]:5000", PUBLIC),
        (f"[{PUBLIC_V6}]:5000", PUBLIC_V6),
    ],
)
async def test_a_tunnel_carries_bytes(target: str, address: str) -> None:
    """To a name or an address, with what came along with the request, and half-closed as any connection."""
    async with egress(Names(**NAMES)) as daemon, server(address, 5000):
        inside = await daemon.attach("good.example:5000", f"{PUBLIC}:5000", f"[{PUBLIC_V6}]:5000")
        stream = await inside.connect(*PROXY)
        async with stream:
            await stream.send_all(tunnel(target) + b"\x01ahead ")
            assert (await answer_head(stream)).startswith(b"HTTP/1.1 200 ")
            await stream.send_all(b"and behind")
            await stream.send_eof()
            assert await read_all(stream) == b"\x01ahead and behind"
        entry = await daemon.entry(verdict="allowed")
        assert (entry.port, entry.address, entry.bytes_up, entry.bytes_down) == (5000, address, 17, 17)
        assert entry.host == ("good.example" if "xample" in target else address)


@pytest.mark.parametrize(
    ("target", "status", "reason"),
    [
        ("secret.example:443", 403, "not_allowed"),
        ("good.example:25", 403, "port"),
        (f"{OTHER_PUBLIC}:5000", 403, "not_allowed"),
        (f"{PRIVATE}:5000", 403, "bad_address"),
        (f"{METADATA}:5000", 403, "bad_address"),
        (f"{OWN}:5000", 403, "bad_address"),
        (f"[::ffff:{PRIVATE}]:5000", 403, "bad_address"),
        ("[64:ff9b::a01:203]:5000", 403, "bad_address"),
        ("[::1]:5000", 403, "bad_address"),
        ("198.18.0.1:5000", 403, "unknown_address"),
        ("198.18.7.7:5000", 403, "unknown_address"),
        ("private.example:5000", 403, "bad_address"),
        ("2130706433:5000", 403, "bad_name"),
        ("0x7f.1:5000", 403, "bad_name"),
        ("127.1:5000", 403, "bad_name"),
        ("good@evil:5000", 403, "bad_name"),
        ("[good.example]:5000", 403, "bad_name"),
        ("good.example:0", 403, "bad_name"),
        ("good.example:99999", 403, "bad_name"),
        ("good.example:+80", 403, "bad_name"),
        ("good.evil:5000", 403, "not_allowed"),
        ("localhost.:5000", 403, "not_allowed"),
        ("gone.example:5000", 502, "no_address"),
        ("good.example:5001", 502, "dial"),
        ("good.example", 400, "bad_http"),
    ],
)
async def test_a_tunnel_to_elsewhere_is_refused_with_the_reason(target: str, status: int, reason: str) -> None:
    """In the reason phrase of the answer, and in the log. No name that is not allowed is asked for."""
    outside = Names(**NAMES)
    async with egress(outside) as daemon:
        rules = [f"{name}.example:5000,5001" for name in ("good", "private", "gone")]
        inside = await daemon.attach(*rules, "10.0.0.0/8:5000", f"{METADATA}:5000", f"{OWN}:5000", "[::/0]:5000")
        answer = await asked(inside, tunnel(target))
        assert answer.startswith(f"HTTP/1.1 {status} {reason}: ".encode()), answer
        assert b'"EGRESS_DENIED"' in answer
        entry = await daemon.entry(reason=reason)
        assert (entry.verdict, entry.bytes_up) == ("allowed" if reason == "dial" else "denied", 0)
        assert not {"secret.example", "good.evil", "localhost"}.intersection(outside.asked)


@pytest.mark.parametrize("server_name", [None, "other.example"])
async def test_a_tunnel_to_443_is_for_tls_that_names_the_host(server_name: str | None) -> None:
    """A ClientHello without the name, and what is no ClientHello, are reset; the server gets no byte."""
    async with egress(Names(**NAMES)) as daemon, server(PUBLIC, 443):
        inside = await daemon.attach("good.example")
        for first, reason in ((client_hello(server_name), "sni"), (b"SSH-2.0-x\r\n", "not_tls")):
            stream = await inside.connect(*PROXY)
            async with stream:
                await stream.send_all(tunnel("good.example:443"))
                await answer_head(stream)
                await stream.send_all(first)
                assert await is_reset(stream)
            assert (await daemon.entry(reason=reason)).bytes_up == 0
        stream = await inside.connect(*PROXY)
        async with stream:
            hello = client_hello("good.example")
            await stream.send_all(tunnel("good.example:443") + hello)
            await answer_head(stream)
            await stream.send_eof()
            assert await read_all(stream) == hello


async def test_requests_in_a_tunnel_have_to_name_the_host() -> None:
    """As in a connection without a proxy."""
    seen: list[bytes] = []
    async with egress(Names(**NAMES)) as daemon, server(PUBLIC, 80, lambda stream: answering(stream, seen)):
        inside = await daemon.attach("good.example")
        answer = await asked(inside, tunnel("good.example:80") + b"GET / HTTP/1.1\r\nHost: other.example\r\n\r\n")
        assert b"HTTP/1.1 403 " in answer
        assert seen == []


async def test_a_request_with_an_absolute_target_is_forwarded() -> None:
    """The server gets a path, its own name and nothing that is for the proxy; the connection ends with the answer."""
    seen: list[bytes] = []
    async with egress(Names(**NAMES)) as daemon, server(PUBLIC, 8080, lambda stream: answering(stream, seen)):
        inside = await daemon.attach("good.example:8080", f"{PUBLIC}:8080")
        for host in ("good.example:8080", f"{PUBLIC}:8080"):
            head = f"GET http://{host}/a?b=http://c HTTP/1.1\r\nHost: {host}\r\nProxy-Connection: keep-alive\r\n"
            answer = await asked(inside, (head + "Proxy-Authorization: Basic eA==\r\nX: y\r\n\r\n").encode())
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert b"Connection: close" in answer
            assert answer.endswith(b"ok")
            lines = seen.pop().split(b"\r\n")
            assert lines == [b"GET /a?b=http://c HTTP/1.1", f"Host: {host}".encode(), b"X: y"]
        entry = await daemon.entry(kind="proxy", host="good.example")
        assert (entry.verdict, entry.port, entry.address) == ("allowed", 8080, PUBLIC)


@pytest.mark.parametrize(
    ("request_line", "host", "status", "reason"),
    [
        ("GET http://secret.example/", "secret.example", 403, "not_allowed"),
        ("GET http://secret.example/", "good.example", 403, "not_allowed"),
        ("GET http://good.example/", "secret.example", 403, "host"),
        ("GET http://good.example/", "good.example:8080", 403, "host"),
        ("GET http://good.example/\r\nHost: good.example", "good.example", 400, "bad_http"),
        ("GET http://x@good.example/", "good.example", 403, "bad_name"),
        ("GET http://good.example:81/", "good.example:81", 403, "port"),
        ("GET http://private.example/", "private.example", 403, "bad_address"),
        ("GET https://good.example/", "good.example", 400, "bad_http"),
        ("GET //good.example/", "good.example", 400, "bad_http"),
        ("GET http:///", "good.example", 403, "bad_name"),
        ("GET http://good.example/#x", "good.example", 400, "bad_http"),
        ("GET /", "198.18.0.1:3128", 400, "bad_http"),
        ("CONNECT good.example:80 HTTP/1.1\r\nContent-Length: 5\r\nX:", "good.example", 400, "bad_http"),
    ],
)
async def test_a_forwarded_request_to_elsewhere_is_refused(
    request_line: str, host: str, status: int, reason: str
) -> None:
    """With an answer; the server of an allowed name sees nothing of it."""
    seen: list[bytes] = []
    async with egress(Names(**NAMES)) as daemon, server(PUBLIC, 80, lambda stream: answering(stream, seen)):
        inside = await daemon.attach("good.example", "private.example")
        line = request_line if "\r" in request_line else f"{request_line} HTTP/1.1"
        line = line.replace("/\r\n", "/ HTTP/1.1\r\n")
        answer = await asked(inside, f"{line}\r\nHost: {host}\r\n\r\n".encode())
        assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer
        assert (await daemon.entry(verdict="denied")).reason == reason
        assert seen == []


async def test_a_second_request_is_not_carried() -> None:
    """Each request to the proxy has a connection of its own: a second one, for another server, gets no answer."""
    seen: list[bytes] = []
    request = b"GET http://good.example/ HTTP/1.1\r\nHost: good.example\r\n\r\n"
    async with egress(Names(**NAMES)) as daemon, server(PUBLIC, 80, lambda stream: answering(stream, seen)):
        inside = await daemon.attach("good.example", "other.example")
        answer = await asked(inside, request + request.replace(b"good", b"other"))
        assert answer.count(b"HTTP/1.1 ") == len(seen) == 1


async def test_a_client_that_asks_for_nothing_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """When its time runs out, or its stream ends within a head."""
    monkeypatch.setattr("egress.connection.FIRST_BYTES_S", 0.05)
    async with egress(Names(**NAMES)) as daemon:
        inside = await daemon.attach("good.example")
        assert (await asked(inside, b"CONNECT good.ex")).startswith(b"HTTP/1.1 408 timeout: ")
        monkeypatch.setattr("egress.connection.FIRST_BYTES_S", 60)
        stream = await inside.connect(*PROXY)
        async with stream:
            await stream.send_all(b"CONNECT good.ex")
            await stream.send_eof()
            assert (await read_all(stream)).startswith(b"HTTP/1.1 400 bad_http: ")


async def waiting_tunnel(daemon: Egress, inside: Inside) -> trio.SocketStream:
    stream = await inside.connect(*PROXY)
    await stream.send_all(tunnel("good.example:5000"))
    await answer_head(stream)
    return stream


async def test_a_new_policy_cuts_tunnels_it_does_not_allow() -> None:
    """A connection that has asked for nothing yet is judged by the policy of when it asks."""
    async with egress(Names(**NAMES)) as daemon, server(PUBLIC, 5000):
        inside = await daemon.attach("good.example:5000")
        stream, waiting = await waiting_tunnel(daemon, inside), await inside.connect(*PROXY)
        async with stream, waiting:
            await daemon.set_policy("good.example:5001")
            assert await is_reset(stream)
            await waiting.send_all(tunnel("good.example:5000"))
            assert (await read_all(waiting)).startswith(b"HTTP/1.1 403 port: good.example:5000")


async def test_only_the_own_address_is_a_proxy() -> None:
    """Port 3128 of another address is a port as any other."""
    async with egress(Names(**NAMES)) as daemon:
        inside = await daemon.attach("good.example")
        assert await is_refused(inside, PUBLIC, 3128)
        assert (await daemon.entry(host=PUBLIC)).reason == "not_allowed"


def sockets_alone(_network_fd: int) -> list[int]:
    """Return the sockets of a way out where no connection is steered: the listener is on the proxy's port."""
    add_own_address(PROXY[0])
    listener = socket.create_server(PROXY)
    questions = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    questions.bind((PROXY[0], 53))
    return [listener.detach(), questions.detach()]


async def test_the_proxy_needs_no_steering() -> None:
    """Names are resolved and tunnels carried with two sockets alone; without the proxy there is no route."""
    async with egress(Names(**NAMES)) as daemon, server(PUBLIC, 5000):
        inside = await daemon.attach("good.example:5000", inside=Inside(sockets_alone))
        synthetic = await inside.address_of("good.example")
        with pytest.raises(OSError, match="unreachable"):
            await inside.connect(synthetic, 5000)
        for target in ("good.example", synthetic):
            stream = await inside.connect(*PROXY)
            async with stream:
                await stream.send_all(tunnel(f"{target}:5000") + b"\x01x")
                await answer_head(stream)
                await stream.send_eof()
                assert await read_all(stream) == b"\x01x"
        assert (await asked(inside, tunnel("secret.example:443"))).startswith(b"HTTP/1.1 403 not_allowed: ")
