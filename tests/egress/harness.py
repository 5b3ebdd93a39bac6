"""A world for the egress process, in network namespaces of the test's own: no packet leaves them.

Where the process dials, every address is one of the loopback's (`tests/egress/conftest.py`), so servers listen on
public, private and metadata addresses alike. `Inside` is a session's network, made by the code that makes real ones.
`Egress` is the daemon's side of the process, which runs as tasks of the test; `Program` is the process itself.
"""

from __future__ import annotations

import array
import fcntl
import json
import os
import socket
import ssl
import struct
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from ipaddress import IPv4Address, ip_address
from pathlib import Path

import trio

import egress as egress_package
from egress import protocol as p
from egress.policy import Address, PolicyMode
from egress.resolver import KEPT_S, NoSuchName
from egress.server import serve
from nsinit.cgroup.beside import name_cgroups, remove_cgroups
from nsinit.kernel import constants as k
from nsinit.kernel import syscalls
from nsinit.sandbox.network import open_way_out
from tests.egress.conftest import new_network, present_network
from tests.waiting import patience

PUBLIC, OTHER_PUBLIC, PUBLIC_V6 = "93.184.216.34", "151.101.1.69", "2606:2800:220:1::1"
PRIVATE, METADATA = "10.1.2.3", "169.254.169.254"
_IPV6_FREEBIND = 78  # linux/in6.h
_MANY = 1 << 20


class Inside:
    """The network of a session, with its way out, which `make` opens in the namespace of a descriptor. `fds` are the
    daemon's copies of the descriptors.
    """

    def __init__(self, make: Callable[[int], list[int]] = open_way_out) -> None:
        with new_network() as here:
            self._network = os.dup(here)
            self.fds = make(here)
        self._sockets: list[trio.socket.SocketType] = []

    def close(self) -> None:
        """Close the daemon's copies, and the session's sockets that a test left open."""
        for each in self._sockets:
            each.close()
        self.close_copies()
        os.close(self._network)

    def close_copies(self) -> None:
        """Close the daemon's copies of the three descriptors."""
        for fd in self.fds:
            os.close(fd)
        self.fds = []

    def socket(self, kind: socket.SocketKind) -> trio.socket.SocketType:
        """Return a socket of the session's."""
        back = present_network()
        try:
            syscalls.setns(self._network, k.CLONE_NEWNET)
            try:
                self._sockets.append(trio.socket.from_stdlib_socket(socket.socket(socket.AF_INET, kind)))
                return self._sockets[-1]
            finally:
                syscalls.setns(back, k.CLONE_NEWNET)
        finally:
            os.close(back)

    async def connect(self, address: str, port: int) -> trio.SocketStream:
        """Return a connection of the session's."""
        sock = self.socket(socket.SOCK_STREAM)
        try:
            with trio.fail_after(patience()):
                await sock.connect((address, port))
        except BaseException:
            sock.close()
            raise
        return trio.SocketStream(sock)

    async def ask(self, name: str, kind: int = 1, *, server: str = "198.18.0.1") -> Answer:
        """Ask the session's name server by UDP."""
        with self.socket(socket.SOCK_DGRAM) as sock:
            await sock.connect((server, 53))  # only what comes from there is received
            await sock.send(question(name, kind))
            with trio.fail_after(patience()):
                return Answer(await sock.recv(4096))

    async def address_of(self, name: str) -> str:
        """Return the synthetic address of a name."""
        answer = await self.ask(name)
        assert answer.address is not None, answer
        return answer.address

    async def connect_to(self, name: str, port: int) -> trio.SocketStream:
        """Return a connection of the session's to a name."""
        return await self.connect(await self.address_of(name), port)


def question(name: str, kind: int = 1) -> bytes:
    """Return a question with EDNS, as bytes."""
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return (
        struct.pack("!6H", 7, 0x0100, 1, 0, 0, 1)
        + labels
        + struct.pack("!BHH", 0, kind, 1)
        + b"\0\0\x29\4\xd0"
        + bytes(6)
    )


class Answer:
    """An answer of DNS, as far as tests ask: its code, its one address, its extended error."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        _id, flags, _questions, answers, _authorities, _additional = struct.unpack_from("!6H", data)
        self.code = flags & 0xF
        at = 12
        while data[at]:
            at += 1 + data[at]
        at += 5
        self.address: str | None = None
        if answers:
            self.ttl, size = struct.unpack_from("!IH", data, at + 6)
            self.address = str(IPv4Address(data[at + 12 : at + 12 + size]))
            at += 12 + size
        self.extended: int | None = None
        if len(data) >= at + 17:
            self.extended = int.from_bytes(data[at + 15 : at + 17], "big")


class Names:
    """The names outside, and the addresses of each. Asked for in threads."""

    def __init__(self, **names: Sequence[str]) -> None:
        self.addresses: dict[str, Sequence[str]] = dict(names)
        self.asked: list[str] = []
        self.hanging: set[str] = set()
        self.go_on = threading.Event()

    def __call__(self, name: str) -> list[Address]:
        self.asked.append(name)
        if name in self.hanging:
            self.go_on.wait()
        if name not in self.addresses:
            raise NoSuchName(name)
        return [ip_address(each) for each in self.addresses[name]]


class Egress:
    """The daemon's side. `entries` are the log entries so far, `dropped` the number that was lost, `totals` the last
    counts of the process."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = trio.socket.from_stdlib_socket(channel)
        self.entries: list[p.EgressEntry] = []
        self.totals = p.EgressTotals()
        self.dropped = 0
        self.reading = trio.CancelScope()
        self._seq = 0
        self._answers: dict[int, p.EgressAnswer] = {}
        self._changed = trio.Event()
        self._insides: list[Inside] = []

    async def read(self) -> None:
        """Read answers and entries until the other end closes."""
        with self.reading:
            while data := await self._receive():
                answer = p.decode_answer(data)
                if isinstance(answer, p.Entries):
                    self.entries += answer.entries
                    self.totals = answer.totals
                    self.dropped += answer.dropped
                else:
                    self._answers[answer.seq] = answer
                self._changed.set()
                self._changed = trio.Event()

    async def _receive(self) -> bytes:
        try:
            return await self.channel.recv(p.MAX_DATAGRAM_BYTES)
        except OSError:
            if self.reading.cancel_called:  # closed while something arrived
                return b""
            raise

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until `condition` holds after some answer or notice."""
        with trio.fail_after(patience()):
            while not condition():
                await self._changed.wait()

    async def ask(self, make: Callable[[int], p.EgressRequest], fds: Sequence[int] = ()) -> p.EgressAnswer:
        """Send a request and return its answer."""
        self._seq += 1
        seq = self._seq
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        await self.channel.sendmsg([p.encode(make(seq))], rights)
        await self.until(lambda: seq in self._answers)
        return self._answers.pop(seq)

    async def done(self, make: Callable[[int], p.EgressRequest], fds: Sequence[int] = ()) -> None:
        """Send a request that succeeds."""
        answer = await self.ask(make, fds)
        assert isinstance(answer, p.Accomplished | p.Configured), answer

    async def attach(
        self,
        *allow: str,
        mode: PolicyMode = "allow",
        deny: Sequence[str] = (),
        name: str = "s-1",
        inside: Inside | None = None,
        **limits: float,
    ) -> Inside:
        """Attach a session that has this policy, and return its network."""
        inside = inside or Inside()
        self._insides.append(inside)
        policy = p.PolicyText(mode, allow, tuple(deny))
        await self.done(lambda seq: p.AttachSession(seq, name, policy, p.WayOutLimits(**limits)), inside.fds)  # type: ignore[arg-type]
        return inside

    async def set_policy(
        self, *allow: str, mode: PolicyMode = "allow", deny: Sequence[str] = (), **limits: float
    ) -> None:
        """Replace the first session's policy."""
        policy = p.PolicyText(mode, allow, tuple(deny))
        await self.done(lambda seq: p.SetPolicy(seq, "s-1", policy, p.WayOutLimits(**limits)))  # type: ignore[arg-type]

    async def counters(self, name: str = "s-1") -> p.WayOutCounters:
        """Return a session's counters."""
        answer = await self.ask(lambda seq: p.DescribeSession(seq, name))
        assert isinstance(answer, p.Described)
        return answer.counters

    async def entry(self, **fields: object) -> p.EgressEntry:
        """Wait for a log entry with these fields and return it."""

        def found() -> list[p.EgressEntry]:
            return [
                each for each in self.entries if all(getattr(each, name) == value for name, value in fields.items())
            ]

        try:
            await self.until(found)
        except trio.TooSlowError:
            raise AssertionError(f"no entry with {fields} among {self.entries}") from None
        return found()[0]

    def close(self) -> None:
        """Close everything of the daemon's."""
        self.channel.close()
        for each in self._insides:
            each.close()


@asynccontextmanager
async def egress(
    names: Names | None = None,
    *,
    permit: Sequence[str] = (),
    always_deny: Sequence[str] = (),
    kept_s: float = KEPT_S,
    upstream: p.UpstreamProxy | None = None,
) -> AsyncIterator[Egress]:
    """Run the server, configured, in this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    names = names or Names()
    daemon = Egress(ours)
    with theirs:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, theirs, names, kept_s)
            nursery.start_soon(daemon.read)
            try:
                await daemon.done(lambda seq: p.Configure(seq, tuple(permit), tuple(always_deny), upstream))
                yield daemon
            finally:
                names.go_on.set()
                daemon.reading.cancel()
                daemon.close()


class Program:
    """The egress process as it really is: a program of its own, in a cgroup, confined."""

    def __init__(self, permit: Sequence[str], descriptors: int, proxy: str) -> None:
        self.cgroups = name_cgroups("egress")
        words = [f"cgroup={each}" for each in self.cgroups] + [f"permit={each}" for each in permit]
        words += [f"proxy={proxy}"] if proxy else []
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.daemon = Egress(ours)
        self._log_read, log_write = os.pipe()
        os.set_blocking(self._log_read, False)
        self._log = ""
        self._status: tuple[int, int] | None = None
        high = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 64)  # dup2 onto itself would keep close-on-exec
        program = str(Path(egress_package.__file__).parent / "__main__.py")
        limited = ["sh", "-c", 'ulimit -n "$0" && exec "$@"']
        self.pid = os.posix_spawn(
            "/bin/sh",
            [*limited, str(descriptors), sys.executable, "-I", "-B", program, "egress", *words],
            {},
            file_actions=[(os.POSIX_SPAWN_DUP2, log_write, 2), (os.POSIX_SPAWN_DUP2, high, p.CHANNEL_FD)],
        )
        os.close(high)
        os.close(log_write)
        theirs.close()

    async def ended(self) -> tuple[int, list[dict[str, object]]]:
        """Wait for the end of the process; return its status and its log."""
        if self._status is None:
            self._status = await trio.to_thread.run_sync(os.waitpid, self.pid, 0)
            self.log_so_far()
            os.close(self._log_read)
            remove_cgroups(self.cgroups)
        return os.waitstatus_to_exitcode(self._status[1]), [json.loads(line) for line in self._log.splitlines()]

    def log_so_far(self) -> str:
        """Return the lines of the log."""
        with suppress(BlockingIOError):
            while data := os.read(self._log_read, 65536):
                self._log += data.decode()
        return self._log


@asynccontextmanager
async def program(
    *permit: str, descriptors: int = 1024, proxy: str = "", upstream: p.UpstreamProxy | None = None
) -> AsyncIterator[Program]:
    """Run the process itself, and have it end well if the test has not waited for its end."""
    process = Program(permit, descriptors, proxy)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(process.daemon.read)
        await process.daemon.done(lambda seq: p.Configure(seq, permit, upstream=upstream))
        try:
            yield process
        finally:
            process.daemon.reading.cancel()
            process.daemon.close()
            with trio.CancelScope(shield=True):
                await process.ended()


Handler = Callable[[trio.SocketStream], Awaitable[None]]


@asynccontextmanager
async def server(address: str, port: int, handler: Handler | None = None) -> AsyncIterator[None]:
    """Run a server of TCP outside; one that sends everything back, unless told otherwise."""

    async def handle(stream: trio.SocketStream) -> None:
        try:
            await (handler or echo)(stream)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            await trio.aclose_forcefully(stream)

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = trio.socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:  # of IPv6, an address that only a route makes local is bound to with this alone
        sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_FREEBIND, 1)
    await sock.bind((address, port))
    sock.listen(512)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, handle, [trio.SocketListener(sock)])
        yield
        nursery.cancel_scope.cancel()


async def echo(stream: trio.SocketStream) -> None:
    """Send back what comes, then end the stream."""
    async for data in stream:
        await stream.send_all(data)
    await stream.send_eof()


async def read_all(stream: trio.SocketStream) -> bytes:
    """Return everything up to the stream's end."""
    with trio.fail_after(patience()):
        return b"".join([each async for each in stream])


async def is_reset(stream: trio.SocketStream) -> bool:
    """Wait for the stream's end; tell whether it is a reset."""
    try:
        with trio.fail_after(patience()):
            while await stream.receive_some(_MANY):
                pass
    except trio.BrokenResourceError as broken:
        return isinstance(broken.__cause__, ConnectionResetError)
    return False


async def is_refused(inside: Inside, address: str, port: int) -> bool:
    """Tell whether a connection is refused: a reset may come before or after the client's connect(2) returns."""
    try:
        stream = await inside.connect(address, port)
    except (ConnectionRefusedError, ConnectionResetError):
        return True
    async with stream:
        return await is_reset(stream)


def client_hello(server_name: str | None) -> bytes:
    """Return a real ClientHello."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    outgoing = ssl.MemoryBIO()
    tls = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=server_name)
    try:
        tls.do_handshake()
    except ssl.SSLWantReadError:
        pass
    return outgoing.read()
