"""Secrets on their way: where the value arrives, where the placeholder does, and what never comes back.

The broker is the real program; the egress process runs in the test, in networks of the test's own.
"""

from __future__ import annotations

import base64
import os
import signal
import socket
import ssl
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import attrs
import pytest
import trio

from egress import broker as broker_program
from egress import brokering as b
from egress import protocol as p
from egress.policy import Reason
from egress.safe import Safe
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
from tests.egress.harness import PUBLIC, Egress, Inside, Names, client_hello, egress, is_reset, server
from tests.waiting import patience

pytestmark = pytest.mark.usefixtures("outside")

UPGRADED = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n"
VALUE = "sk-live-4f3a9c71e5d24b8a"
NAMES = {HOST: [PUBLIC], "other.example": [PUBLIC], "sub.wild.example": [PUBLIC]}


@attrs.define
class Api:
    """A server. `requests` are the heads that arrived; `answer` makes the answer to one."""

    requests: list[bytes] = attrs.field(factory=list)
    answer: Callable[[bytes], bytes] = lambda _head: b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    is_echo: bool = False
    """Whether all that comes after the first head is sent back as it is."""

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
            if self.is_echo:
                while data := received or await stream.receive_some(65536):
                    received = b""
                    await stream.send_all(data)
            if self.is_echo or b"\r\nConnection: close" in head:
                return


@attrs.define
class Scene:
    broker: BrokerProcess
    egress: Egress
    inside: Inside
    api: Api
    trust: Callable[[], ssl.SSLContext]

    async def ask(self, head: bytes, host: str = HOST, port: int = 443) -> bytes:
        """Send one request on a connection of its own and return the answer, to the connection's end."""
        async with client(self.inside, self.trust(), host, port) as stream:
            await stream.send_all(head + b"\r\nConnection: close\r\n\r\n")
            return await everything(stream)


@asynccontextmanager
async def scene(
    tmp_path: Path, *allow: str, hosts: tuple[str, ...] = (HOST,), served_as: str = HOST, port: int = 443
) -> AsyncIterator[Scene]:
    """A session with one secret, and a server that is its host."""
    api = Api()
    with foreign_authority() as (authority, ca_file), broker(tmp_path, ca_file) as process:
        process.put(VALUE, *hosts)
        certificate = process.listed().certificate
        async with egress(Names(**NAMES)) as daemon, tls_server(authority.context_for(served_as), api, port):
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
    """The TLS of another host is not opened: the client meets the server's own certificate."""
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
    """Three signs of the value at most have come through before it is known to be the value."""
    async with scene(tmp_path) as world:
        world.api.answer = lambda _head: body
        head = f"GET / HTTP/1.1\r\nHost: {HOST}\r\nX-Key: {PLACEHOLDER}"
        if b" 101 " in body:
            async with client(world.inside, world.trust()) as stream:
                await stream.send_all(head.encode() + b"\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n")
                answer = await everything(stream)
        else:
            answer = await world.ask(head.encode())
        entry = await world.egress.entry(verdict="denied")
    assert entry.reason == "echo"
    assert VALUE[:4].encode() not in answer.replace(b"\r\n1\r\n", b"")


async def test_credentials_that_come_back_are_cut(tmp_path: Path) -> None:
    """The value in the base64 that it was sent in is known, too: three signs of it at most come through."""
    coded = base64.b64encode(f"git:{VALUE}".encode())
    async with scene(tmp_path) as world:
        world.api.answer = lambda _head: b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(coded), coded)
        sent = base64.b64encode(f"git:{PLACEHOLDER}".encode()).decode()
        answer = await world.ask(f"GET / HTTP/1.1\r\nHost: {HOST}\r\nAuthorization: Basic {sent}".encode())
    assert coded[: len("git:") * 8 // 6 + 5] not in answer


async def test_a_body_that_begins_like_the_value_comes_through(tmp_path: Path) -> None:
    """Bytes that were held back are let out when they turn out to be something else, at the end of the body, too."""
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
    async with scene(tmp_path) as world:
        world.api.answer = lambda _head: UPGRADED + b"hello"
        world.api.is_echo = True
        async with client(world.inside, world.trust()) as stream:
            await stream.send_all(
                f"GET /ws HTTP/1.1\r\nHost: {HOST}\r\nX-Key: {PLACEHOLDER}\r\n"
                "Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n".encode()
            )
            said = b""
            while not said.endswith(b"hello"):
                said += await stream.receive_some(65536)
            for ping in (b"one", os.urandom(1_000_000), VALUE[:3].encode()):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(stream.send_all, ping)
                    back = b""
                    while len(back) < len(ping):
                        back += await stream.receive_some(65536)
                assert back == ping
    assert VALUE.encode() in world.api.requests[0]


async def test_large_bodies_go_both_ways(tmp_path: Path) -> None:
    """Both without a length that is known before, at the same time, and neither is held in memory."""
    size, piece = 40_000_000, os.urandom(1_000_000)
    chunk = b"%x\r\n%s\r\n" % (len(piece), piece)
    async with scene(tmp_path) as world:
        world.api.answer = lambda _head: b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        world.api.is_echo = True
        before = resident_bytes(world.broker.pid)
        async with client(world.inside, world.trust()) as stream:
            head = f"POST / HTTP/1.1\r\nHost: {HOST}\r\nTransfer-Encoding: chunked\r\n\r\n"
            came = 0

            async def send() -> None:
                await stream.send_all(head.encode())
                for _ in range(size // len(piece)):
                    await stream.send_all(chunk)
                await stream.send_all(b"0\r\n\r\n")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                last = b""
                while not last.endswith(b"0\r\n\r\n"):
                    data = await stream.receive_some(1 << 20)
                    assert data
                    came += len(data)
                    last = (last + data)[-10:]
        grown = resident_bytes(world.broker.pid) - before
        counters = await world.egress.counters()
    assert came > size
    assert grown < size // 2
    assert min(counters.bytes_up, counters.bytes_down) > size


def resident_bytes(pid: int) -> int:
    """Return the memory that a process has."""
    (line,) = (each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


async def test_events_come_as_they_are_sent(tmp_path: Path) -> None:
    """An event of an endless answer is there before the next one is sent."""
    async with scene(tmp_path) as world:
        world.api.answer = lambda _head: b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        world.api.is_echo = True
        async with client(world.inside, world.trust()) as stream:
            head = f"POST / HTTP/1.1\r\nHost: {HOST}\r\nTransfer-Encoding: chunked\r\n\r\n"
            await stream.send_all(head.encode())
            said = b""
            for number in range(5):
                event = b"data: %d\n\n" % number
                await stream.send_all(b"%x\r\n%s\r\n" % (len(event), event))
                while event not in said:
                    said += await stream.receive_some(65536)


async def test_a_client_of_http_2_falls_back(tmp_path: Path) -> None:
    """Of the protocols that a client offers, HTTP/1.1 is taken."""
    async with scene(tmp_path) as world:
        context = world.trust()
        context.set_alpn_protocols(["h2", "http/1.1"])
        async with client(world.inside, context) as stream:
            assert stream.selected_alpn_protocol() == "http/1.1"


@pytest.mark.parametrize("change", ["policy", "secret", "detach", "delete"])
async def test_a_connection_that_was_handed_over_is_cut(tmp_path: Path, change: str) -> None:
    """By another policy, by other secrets of the session, by the session's end, by the end of the secret."""
    async with scene(tmp_path) as world, client(world.inside, world.trust()) as stream:
        await stream.send_all(f"GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
        said = b""
        while not said.endswith(b"ok"):
            said += await stream.receive_some(65536)
        match change:
            case "policy":
                await world.egress.set_policy("other.example")
            case "secret":
                await world.egress.set_policy(HOST)
            case "detach":
                await world.egress.done(lambda seq: p.DetachSession(seq, "s-1"))
            case _:
                assert world.broker.ask(b.DropSecret(1, "key")) == b.BrokerDone(1)
        assert await everything(stream) == b""
        entry = await world.egress.entry(host=HOST, kind="tcp")
        assert entry.bytes_up > 0


async def test_bytes_beyond_the_limit_end_a_connection(tmp_path: Path) -> None:
    """The bytes of connections that are handed over count as all others do."""
    async with scene(tmp_path) as world:
        uses = (p.SecretUse("key", PLACEHOLDER, (HOST,)),)
        limits = p.WayOutLimits(bytes_up=100_000)
        await world.egress.done(lambda seq: p.SetPolicy(seq, "s-1", p.PolicyText("allow", (HOST,)), limits, uses))
        async with client(world.inside, world.trust()) as stream:
            body = b"x" * 1_000_000
            head = f"POST / HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            try:
                await stream.send_all(head + body)
            except trio.BrokenResourceError:
                pass
            await everything(stream)
        assert (await world.egress.counters()).bytes_up <= 100_000
        assert (await world.egress.entry(verdict="denied")).reason == "limit"


async def test_without_a_broker_a_host_with_a_secret_is_refused(tmp_path: Path) -> None:
    """The server hears nothing then, and the other hosts of the session are reached as before."""
    async with scene(tmp_path, HOST, "other.example", served_as="other.example") as world:
        os.kill(world.broker.pid, signal.SIGKILL)
        world.broker.process.wait()
        stream = await world.inside.connect_to(HOST, 443)
        async with stream:
            await stream.send_all(client_hello(HOST))
            assert await is_reset(stream)
        assert (await world.egress.entry(verdict="denied")).reason == "broker"
        await world.ask(b"GET / HTTP/1.1\r\nHost: other.example", "other.example")
    assert len(world.api.requests) == 1


async def test_a_client_that_trusts_nobody_is_told_of(tmp_path: Path) -> None:
    """The log says that the session's authority is not trusted, not that the server is at fault."""
    async with scene(tmp_path) as world:
        with pytest.raises(trio.BrokenResourceError):
            async with client(world.inside, trusting()):
                pass
        assert (await world.egress.entry(verdict="denied")).reason == "untrusted"


async def test_another_port_has_its_tls_opened_too(tmp_path: Path) -> None:
    """On a port where the server might speak first, the ClientHello decides."""
    async with scene(tmp_path, f"{HOST}:8443", hosts=(f"{HOST}:8443",), port=8443) as world:
        answer = await world.ask(f"GET / HTTP/1.1\r\nHost: {HOST}:8443\r\nX-Key: {PLACEHOLDER}".encode(), port=8443)
        assert b"200 OK" in answer
    assert VALUE.encode() in world.api.requests[0]


async def test_one_session_leaves_connections_of_the_broker_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session has at most as many as are left for all; one more is told so, and another session's is carried."""
    monkeypatch.setattr(broker_program, "MAX_CONNECTIONS", 4)
    with ExitStack() as held, foreign_authority() as (authority, _):

        def pair(kind: socket.SocketKind) -> tuple[socket.socket, socket.socket]:
            one, other = socket.socketpair(socket.AF_UNIX, kind)
            return held.enter_context(one), held.enter_context(other)

        directory = os.open(tmp_path, os.O_RDONLY)
        held.callback(os.close, directory)
        (daemon, theirs), (process, joined) = pair(socket.SOCK_SEQPACKET), pair(socket.SOCK_SEQPACKET)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(broker_program.Broker(theirs, Safe(directory), authority, trusting()).run)
            socket.send_fds(daemon, [b.encode(b.JoinEgress(1))], [joined.fileno()])
            for seq, session_id in enumerate(("s-1", "s-1", "s-1", "s-2", "s-2")):
                ends = [pair(socket.SOCK_STREAM)[1].fileno() for _ in range(2)]
                socket.send_fds(process, [b.encode(b.Carry(seq, session_id, HOST, 443, ()))], ends)
            process.setblocking(False)
            ended = []
            for _ in range(2):
                with trio.fail_after(patience()):
                    await trio.lowlevel.wait_readable(process)
                ended.append(b.decode_carried(process.recv(b.MAX_DATAGRAM_BYTES)))
            assert ended == [b.CarryEnded(2, Reason.LIMIT), b.CarryEnded(4, Reason.LIMIT)]
            nursery.cancel_scope.cancel()


def test_the_broker_keeps_its_files_to_itself(tmp_path: Path) -> None:
    """Files and directory are of the broker's user; the next broker has what is in them, and the same authority."""
    with broker(tmp_path) as first:
        first.put(VALUE)
        certificate = first.listed().certificate
    directory = tmp_path / "broker"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    files = {file.name: file.stat() for file in directory.iterdir()}
    assert files.keys() == {"secrets.json", "authority.pem"}
    assert {(each.st_uid, stat.S_IMODE(each.st_mode)) for each in files.values()} == {(p.BROKER_ID, 0o600)}
    with broker(tmp_path) as second:
        listed = second.listed()
    assert ([each.name for each in listed.secrets], listed.certificate) == (["key"], certificate)


def test_a_broker_begins_with_nothing_of_somebody_elses(tmp_path: Path) -> None:
    """A directory that another user has made is not taken, and a damaged file is not replaced."""
    (tmp_path / "broker").mkdir(mode=0o700)
    os.chown(tmp_path / "broker", 12345, 12345)
    process = BrokerProcess(tmp_path, None)
    assert process.process.wait(patience()) == 1
    assert "not_ready" in process.end()
    os.chown(tmp_path / "broker", p.BROKER_ID, p.BROKER_ID)
    file = tmp_path / "broker" / "secrets.json"
    file.write_text('[{"name": "key", "value": "' + VALUE)
    os.chown(file, p.BROKER_ID, p.BROKER_ID)
    process = BrokerProcess(tmp_path, None)
    assert process.process.wait(patience()) == 1
    said = process.end()
    assert "not_ready" in said
    assert VALUE not in said
    assert file.read_text().endswith(VALUE)


def test_the_broker_can_reach_nothing(tmp_path: Path) -> None:
    """The process has no capability and no right to open a socket of the internet."""
    with broker(tmp_path) as process:
        process.put(VALUE)
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        status = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    assert status["Uid"].split() == [str(p.BROKER_ID)] * 4
    assert (status["CapEff"], status["CapPrm"], status["Groups"]) == ("0" * 16, "0" * 16, "")
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


@pytest.mark.parametrize(
    "secret",
    [
        b.PutSecret(1, "a b", VALUE, (HOST,)),
        b.PutSecret(1, "key", "short", (HOST,)),
        b.PutSecret(1, "key", f"{VALUE}\r\nX: y", (HOST,)),
        b.PutSecret(1, "key", VALUE, ()),
        b.PutSecret(1, "key", VALUE, ("*",)),
        b.PutSecret(1, "key", VALUE, ("192.0.2.1",)),
        b.PutSecret(1, "key", VALUE, (HOST,), "short"),
        b.PutSecret(1, "key", VALUE, (HOST,), VALUE),
    ],
    ids=["name", "short", "line", "no host", "all", "address", "placeholder", "placeholder is value"],
)
def test_what_is_no_secret_is_refused(tmp_path: Path, secret: b.PutSecret) -> None:
    """A refusal has no value in it."""
    with broker(tmp_path) as process:
        answer = process.ask(secret)
        assert isinstance(answer, b.BrokerFailed)
        assert answer.code == "INVALID"
        assert secret.value not in answer.message
        assert process.listed().secrets == ()
