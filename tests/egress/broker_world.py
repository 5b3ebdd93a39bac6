"""The broker as it really is, a confined program, beside an egress process of the test and servers of TLS."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import trio

import egress as egress_package
from egress import brokering as b
from egress import protocol as p
from egress.authority import Authority, new_authority
from tests.egress.harness import PUBLIC, Egress, Handler, Inside, server
from tests.waiting import patience

PLACEHOLDER = "placeholder-of-this-test"
HOST = "api.example"


@contextmanager
def foreign_authority() -> Iterator[tuple[Authority, Path]]:
    """Yield an authority of the world outside, with the file of its certificate."""
    with tempfile.TemporaryDirectory() as directory:
        certificates = os.memfd_create("certificates of the world")
        try:
            authority = Authority(new_authority(), certificates)
            file = Path(directory, "authority-certificate.pem")
            file.write_text(authority.certificate)
            yield authority, file
        finally:
            os.close(certificates)


class BrokerProcess:
    """The program and the daemon's end of its socket."""

    def __init__(self, data_dir: Path, ca_file: Path | None) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(patience())
        self._seq = 0
        words = [f"data={data_dir}", *([] if ca_file is None else [f"ca={ca_file}"])]
        entry = str(Path(egress_package.__file__).parent / "__main__.py")

        def prepare() -> None:
            os.dup2(theirs.fileno(), p.CHANNEL_FD)

        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-B", entry, "broker", *words],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(p.CHANNEL_FD,),
                preexec_fn=prepare,
                env={},
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(self, request: b.BrokerRequest, fds: Sequence[int] = ()) -> b.BrokerAnswer:
        """Send a request and return its answer."""
        socket.send_fds(self._channel, [b.encode(request)], fds)
        return b.decode_broker_answer(self._channel.recv(b.MAX_DATAGRAM_BYTES))

    def put(self, value: str, *hosts: str, name: str = "key", placeholder: str | None = None) -> None:
        answer = self.ask(b.PutSecret(1, name, value, hosts or (HOST,), placeholder))
        assert isinstance(answer, b.BrokerDone), answer

    def listed(self) -> b.SecretsListed:
        answer = self.ask(b.ListSecrets(1))
        assert isinstance(answer, b.SecretsListed), answer
        return answer

    async def join(self, egress: Egress) -> None:
        """Bring the broker together with an egress process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            assert self.ask(b.JoinEgress(1), [ours.fileno()]) == b.BrokerDone(1)
            await egress.done(lambda seq: p.UseBroker(seq), [theirs.fileno()])

    def end(self) -> str:
        """End the program as its daemon's end does; return its log."""
        self._channel.close()
        with self.process:
            assert self.process.stderr is not None
            return self.process.stderr.read().decode()


@contextmanager
def broker(data_dir: Path, ca_file: Path | None = None) -> Iterator[BrokerProcess]:
    """Run a broker."""
    process = BrokerProcess(data_dir, ca_file)
    try:
        yield process
    finally:
        process.end()


async def attach(
    egress: Egress, *allow: str, secrets: Sequence[str] = ("key",), hosts: Sequence[str] = (HOST,)
) -> Inside:
    """Attach a session that may use secrets, all for these hosts and with the same placeholder."""
    inside = Inside()
    egress._insides.append(inside)
    uses = tuple(p.SecretUse(name, PLACEHOLDER, tuple(hosts)) for name in secrets)
    policy = p.PolicyText("allow", allow or (HOST,))
    await egress.done(lambda seq: p.AttachSession(seq, "s-1", policy, p.WayOutLimits(), uses), inside.fds)
    return inside


@asynccontextmanager
async def tls_server(context: ssl.SSLContext, handler: Handler, port: int = 443) -> AsyncIterator[None]:
    """Serve TLS outside, at `PUBLIC`."""

    async def handle(stream: trio.SocketStream) -> None:
        tls = trio.SSLStream(stream, context, server_side=True, https_compatible=True)
        await handler(tls)  # type: ignore[arg-type]  # reads and writes as a plain stream does
        await tls.aclose()

    async with server(PUBLIC, port, handle):
        yield


def trusting(*certificates: str) -> ssl.SSLContext:
    """Return a client's context that trusts these authorities alone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for certificate in certificates:
        context.load_verify_locations(cadata=certificate)
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    return context


@asynccontextmanager
async def client(
    inside: Inside, context: ssl.SSLContext, host: str = HOST, port: int = 443
) -> AsyncIterator[trio.SSLStream[trio.SocketStream]]:
    """Connect from inside, with TLS to a host."""
    tcp = await inside.connect_to(host, port)
    tls = trio.SSLStream(tcp, context, server_hostname=host, https_compatible=True)
    with trio.fail_after(patience()):
        try:
            await tls.do_handshake()
            yield tls
        finally:
            await trio.aclose_forcefully(tls)


async def everything(stream: trio.SSLStream[trio.SocketStream]) -> bytes:
    """Return all bytes up to the stream's end, however it ends."""
    said = b""
    try:
        while data := await stream.receive_some(65536):
            said += data
    except trio.BrokenResourceError:
        pass
    return said
