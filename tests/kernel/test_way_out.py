"""A way out of a session's network: what arrives at its descriptors, what does not, and that nothing of it stays."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import resource
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nsinit.helpers.network_maker import NAME as NETWORK_MAKER
from nsinit.kernel import constants as k
from nsinit.kernel import netlink, steering, syscalls
from nsinit.sandbox import network
from nsinit.steps import StepFailed
from nsinit.wire.protocol import (
    Adopt,
    Build,
    Built,
    Failed,
    NetworkOpened,
    OpenNetwork,
    Prepare,
    SandboxPlan,
    Teardown,
    TornDown,
)
from runner.wire.protocol import ExecReply, RunProgram, Setup
from tests.kernel.harness import (
    ROOMY,
    Nsinit,
    Sandbox,
    data_directory,
    host_plan,
    new_id,
    new_node_id,
    running,
    wait_until,
)
from tests.waiting import patience

PATIENCE_S = 20.0
FOREIGN = ("203.0.113.7", 443)
"""An address for documentation (RFC 5737)."""
PRELUDE = """
import errno, os, socket, struct
def attempt(work):
    try:
        return work() or "done"
    except OSError as error:
        return errno.errorcode[error.errno]
def dialled(host, port):
    with socket.create_connection((host, port), timeout=20): return "done"
"""


class WayOut:
    """The three descriptors of a way out, as their holder has them."""

    def __init__(self, fds: list[int]) -> None:
        tcp_fd, udp_fd, self.link_fd = fds
        assert not any(map(os.get_blocking, (tcp_fd, udp_fd)))
        self.listener, self.resolver = socket.socket(fileno=tcp_fd), socket.socket(fileno=udp_fd)
        self.listener.settimeout(patience(PATIENCE_S))
        self.resolver.settimeout(patience(PATIENCE_S))

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        """Return the next connection, and the address that its client asked for."""
        connection, _ = self.listener.accept()
        connection.settimeout(patience(PATIENCE_S))
        return connection, connection.getsockname()

    def take(self) -> tuple[str, int]:
        """Accept the next connection, close it, and return the address that its client asked for."""
        connection, asked_for = self.accept()
        connection.close()
        return asked_for

    def has_connection(self) -> bool:
        """Tell whether a connection waits to be accepted."""
        return bool(select.select([self.listener], [], [], 0)[0])

    def unlink(self) -> None:
        """Close the link alone."""
        if self.link_fd >= 0:
            os.close(self.link_fd)
            self.link_fd = -1

    def close(self) -> None:
        self.listener.close()
        self.resolver.close()
        self.unlink()


def open_network(server: Nsinit, box: Sandbox) -> WayOut:
    """Open a way out that must open."""
    answer, fds = server.ask(OpenNetwork, session_id=box.session_id)
    assert isinstance(answer, NetworkOpened), (answer, server.log)
    assert answer.session_id == box.session_id
    return WayOut(fds)


def refused(server: Nsinit, session_id: str) -> Failed:
    """Ask for a way out that must not open."""
    answer, fds = server.ask(OpenNetwork, session_id=session_id)
    assert isinstance(answer, Failed), answer
    assert fds == []
    assert answer.stage.startswith("network: ")
    return answer


def told(box: Sandbox, script: str, *, user: str | None = None) -> dict[str, str]:
    """Run a script inside that prints names and answers."""
    argv = "python3", "-c", f"{PRELUDE}\n{script}"
    program = RunProgram(f"t{new_id()}", argv, user=user, timeout_ms=round(patience(20_000)))
    reply, out, err = box.request(program)
    assert isinstance(reply, ExecReply), reply
    assert reply.exit_code == 0, err.decode()
    return dict(line.split(" ", 1) for line in out.decode().splitlines())


@contextlib.contextmanager
def meanwhile(work: Callable[[], object]) -> Iterator[list[Any]]:
    """Do work in a thread; its result is in the list after the block."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    try:
        yield results
    finally:
        thread.join()


@contextlib.contextmanager
def in_network(netns_fd: int = -1) -> Iterator[None]:
    """Be in a network namespace, a new one unless given, with this thread."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    if netns_fd < 0:
        syscalls.unshare(k.CLONE_NEWNET)
    else:
        syscalls.setns(netns_fd, k.CLONE_NEWNET)
    try:
        yield
    finally:
        syscalls.setns(home, k.CLONE_NEWNET)
        os.close(home)


@pytest.fixture(scope="module")
def shared() -> Iterator[Nsinit]:
    """An nsinit with its network maker, which is there from the first way out on and is no leak of a test."""
    with data_directory() as data_dir, running(data_dir) as nsinit:
        open_network(nsinit, nsinit.build(host_plan())).close()
        nsinit.remove_sandboxes()
        yield nsinit


@pytest.fixture
def box(server: Nsinit) -> Sandbox:
    return server.build(host_plan(root_inside=True))


@pytest.fixture
def way_out(server: Nsinit, box: Sandbox) -> Iterator[WayOut]:
    opened = open_network(server, box)
    yield opened
    opened.close()


def test_a_connection_to_any_address_and_port_arrives_with_that_name(box: Sandbox, way_out: WayOut) -> None:
    """The accepted end is named as the client asked, and bytes and ends of streams pass both ways."""
    for host, port in (FOREIGN, ("10.0.0.1", 22), ("169.254.169.254", 80), ("198.18.1.9", 65535), ("8.8.8.8", 53)):
        script = f"""
with socket.create_connection(({host!r}, {port}), timeout=20) as there:
    print("peer", *there.getpeername()); print("own", there.getsockname()[0])
    there.sendall(b"ask"); there.shutdown(socket.SHUT_WR); print("got", there.makefile().read())
"""
        with meanwhile(lambda: told(box, script)) as results:  # noqa: B023
            connection, asked_for = way_out.accept()
            with connection:
                assert asked_for == (host, port)
                assert connection.makefile("rb").read() == b"ask"
                connection.sendall(b"answer")
        assert results == [{"peer": f"{host} {port}", "own": network.ADDRESS, "got": "answer"}]


def test_without_a_way_out_nothing_is_connectable(box: Sandbox) -> None:
    """A session that has none meets ENETUNREACH, has no route, and has no address but its loopback's."""
    script = f"""
print("tcp", attempt(lambda: dialled(*{FOREIGN})))
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    print("udp", attempt(lambda: s.connect(("8.8.8.8", 53))))
    print("own", attempt(lambda: s.bind(({network.ADDRESS!r}, 9))))
print("servers", any(line.startswith("nameserver") for line in open("/etc/resolv.conf")))
"""
    assert told(box, script) == {"tcp": "ENETUNREACH", "udp": "ENETUNREACH", "own": "EADDRNOTAVAIL", "servers": "False"}


def test_dns_arrives_whatever_server_was_asked_and_other_udp_is_refused_at_once(box: Sandbox, way_out: WayOut) -> None:
    """A datagram to port 53 of any address comes with that address, from which the answer goes back; one to another
    port is ECONNREFUSED, so that QUIC falls back to TCP."""
    script = f"""
for host in ({network.ADDRESS!r}, "8.8.8.8"):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.settimeout(20); s.connect((host, 53)); s.send(b"question"); print(host, s.recv(100).decode())
for port in (443, 123, 3128):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.settimeout(20); s.connect(("203.0.113.7", port)); s.send(b"hello"); print(port, attempt(lambda: s.recv(100)))
"""
    with meanwhile(lambda: told(box, script)) as results:
        for host in (network.ADDRESS, "8.8.8.8"):
            question, notes, _, client = way_out.resolver.recvmsg(512, socket.CMSG_SPACE(12))
            ((_, _, info),) = notes
            _, _, destination = struct.unpack("=I4s4s", info)  # struct in_pktinfo, ip(7)
            assert (question, socket.inet_ntoa(destination)) == (b"question", host)
            note = socket.IPPROTO_IP, k.IP_PKTINFO, struct.pack("=I4s4s", 0, destination, bytes(4))
            way_out.resolver.sendmsg([b"answer"], [note], 0, client)
    refusals = dict.fromkeys(("443", "123", "3128"), "ECONNREFUSED")
    assert results == [{network.ADDRESS: "answer", "8.8.8.8": "answer", **refusals}]


def test_servers_inside_get_their_own_connections_and_no_foreign_one(box: Sandbox, way_out: WayOut) -> None:
    """A server on every address, or on the session's own, is reached by the loopback and by the own address; a
    connection to a foreign address passes it by, on its very port. The proxy's port of the own address is not its."""
    script = f"""
any_port = socket.create_server(("0.0.0.0", 443)); own = socket.create_server(({network.ADDRESS!r}, 3128))
for host in ("127.0.0.1", "127.9.9.9", {network.ADDRESS!r}):
    with socket.create_connection((host, 443), timeout=20) as c:
        any_port.settimeout(20); taken, _ = any_port.accept(); print(host, taken.getsockname()[0])
dialled(*{FOREIGN}); dialled({network.ADDRESS!r}, 3128)
for name, server in (("foreign", any_port), ("proxy", own)):
    server.setblocking(False); print(name, attempt(server.accept))
"""
    own = {host: host for host in ("127.0.0.1", "127.9.9.9", network.ADDRESS)}
    assert told(box, script) == {**own, "foreign": "EAGAIN", "proxy": "EAGAIN"}
    assert [way_out.take(), way_out.take()] == [FOREIGN, (network.ADDRESS, 3128)]
    assert not way_out.has_connection()


def test_an_open_connection_to_a_foreign_port_keeps_no_server_from_that_port(box: Sandbox, way_out: WayOut) -> None:
    """The accepted end has the foreign port as its own, and a server inside can be bound to that port all the same."""
    script = f"""
with socket.create_connection({FOREIGN}, timeout=20) as c:
    c.sendall(b"here"); c.recv(1)
    print("server", attempt(lambda: socket.create_server(("0.0.0.0", {FOREIGN[1]})).close()))
"""
    with meanwhile(lambda: told(box, script)) as results:
        connection, _ = way_out.accept()
        with connection:
            assert connection.recv(4) == b"here"
            connection.sendall(b"!")
            connection.recv(1)
    assert results == [{"server": "done"}]


@pytest.mark.parametrize("user", [None, "root"])
def test_nobody_inside_undoes_any_of_it(box: Sandbox, way_out: WayOut, user: str | None) -> None:
    """Route, address, device, raw and packet sockets, filters, foreign addresses as one's own, pings and settings of
    the network are refused, to the session's root, too; and a connection arrives as before."""
    script = f"""
def asked(kind, body):
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as route:
        route.settimeout(20); route.send(struct.pack("=IHHII", 16 + len(body), kind, 5, 1, 0) + body)
        code = -struct.unpack_from("=i", route.recv(4096), 16)[0]
        if code: raise OSError(code, "")
own = struct.pack("=HH4s", 8, 2, socket.inet_aton({network.ADDRESS!r}))
def option(level, name, value=1):
    with socket.socket() as s: s.setsockopt(level, name, value)
def made(*kind): socket.socket(*kind).close()
def write(name): open("/proc/sys/net/" + name, "w").write("1")
for name, work in dict(
    address=lambda: asked(21, struct.pack("=BBBBI", 2, 32, 0, 0, 1) + own),
    route=lambda: asked(25, struct.pack("=8BI", 2, 0, 0, 0, 255, 0, 254, 2, 0)),
    device=lambda: asked(16, struct.pack("=BBHiII", 0, 0, 0, 1, 0, 1)),
    raw=lambda: made(socket.AF_INET, socket.SOCK_RAW, 1), packet=lambda: made(17, socket.SOCK_RAW, 3),
    ping=lambda: made(socket.AF_INET, socket.SOCK_DGRAM, 1), nftables=lambda: made(16, socket.SOCK_RAW, 12),
    transparent=lambda: option(socket.IPPROTO_IP, 19), mark=lambda: option(socket.SOL_SOCKET, 36),
    forward=lambda: write("ipv4/ip_forward"), pings=lambda: write("ipv4/ping_group_range"),
).items():
    print(name, attempt(work))
"""
    answers = told(box, script, user=user)
    assert set(answers.values()) <= {"EPERM", "EACCES", "EROFS", "ENOSYS", "EAFNOSUPPORT", "EPROTONOSUPPORT"}, answers
    assert len(answers) == 11
    assert told(box, f"print('dialled', dialled(*{FOREIGN}))", user=user) == {"dialled": "done"}
    assert way_out.take() == FOREIGN


def test_a_foreign_address_as_ones_own_leads_nowhere_but_here(box: Sandbox, way_out: WayOut) -> None:
    """Every address is local, so a program can bind to a foreign one; its server is passed by, and its connections
    arrive like others."""
    script = f"""
server = socket.create_server(("203.0.113.7", 443))
with socket.socket() as s:
    s.bind(("192.0.2.55", 0)); s.settimeout(20); s.connect({FOREIGN})
server.setblocking(False); print("server", attempt(server.accept))
"""
    assert told(box, script) == {"server": "EAGAIN"}
    assert way_out.take() == FOREIGN


def test_without_the_link_connections_are_refused(box: Sandbox, way_out: WayOut) -> None:
    """The last copy of the link gone, a connection is refused at once, and so is a name server's port; nothing comes to
    the sockets."""
    way_out.unlink()
    script = f"""
print("tcp", attempt(lambda: dialled(*{FOREIGN})))
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.settimeout(20); s.connect(("8.8.8.8", 53)); s.send(b"question"); print("dns", attempt(lambda: s.recv(100)))
"""
    assert told(box, script) == {"tcp": "ECONNREFUSED", "dns": "ECONNREFUSED"}
    assert not way_out.has_connection()


def test_with_the_listener_gone_the_link_drops(box: Sandbox, way_out: WayOut) -> None:
    """A connection finds no listener in the map, and is refused rather than given to a server inside."""
    way_out.listener.close()
    script = f"""
server = socket.create_server(("0.0.0.0", {FOREIGN[1]}))
print("tcp", attempt(lambda: dialled(*{FOREIGN}))); server.setblocking(False); print("server", attempt(server.accept))
"""
    assert told(box, script) == {"tcp": "ECONNREFUSED", "server": "EAGAIN"}


def test_a_second_way_out_waits_for_the_end_of_the_first(server: Nsinit, box: Sandbox, way_out: WayOut) -> None:
    """While somebody has the sockets of the first it is refused after two seconds, and the first goes on; given up in
    that time, the second takes its place, with the address and the route that are there."""
    began = time.monotonic()
    failed = refused(server, box.session_id)
    assert (failed.stage, failed.errno) == ("network: sockets", errno.EADDRINUSE)
    assert 2 <= time.monotonic() - began < patience(PATIENCE_S)
    assert told(box, f"print('first', dialled(*{FOREIGN}))") == {"first": "done"}
    assert way_out.take() == FOREIGN
    seq = server.send(OpenNetwork, session_id=box.session_id)
    way_out.close()
    answer, fds = server.receive()
    assert isinstance(answer, NetworkOpened), answer
    assert answer.seq == seq
    second = WayOut(fds)
    assert told(box, f"print('second', dialled(*{FOREIGN}))") == {"second": "done"}
    assert second.take() == FOREIGN
    second.close()


def test_ports_that_a_program_took_before_are_a_failure_that_leaves_nothing(server: Nsinit, box: Sandbox) -> None:
    """A name server inside on every address keeps the way out from opening; the session is as before, until it ends."""
    taken = 'import socket; s = socket.socket(2, 2); s.bind(("0.0.0.0", 53)); print(1, flush=True); s.recv(9)'
    box.run(f"python3 -c '{taken}' >f &")
    box.run("until [ -s f ]; do sleep 0.01; done")
    assert refused(server, box.session_id).errno == errno.EADDRINUSE
    assert told(box, f"print('tcp', attempt(lambda: dialled(*{FOREIGN})))") == {"tcp": "ENETUNREACH"}
    box.run("kill %1; wait")
    opened = open_network(server, box)
    opened.close()


def test_a_step_that_fails_takes_back_those_before(server: Nsinit, box: Sandbox) -> None:
    """The network maker may have one descriptor more each time, up to the last: the named step fails, the session has
    no route and no address, and the network maker holds nothing and serves the next."""
    (maker,) = server.helpers(NETWORK_MAKER)
    held = set(os.listdir(f"/proc/{maker}/fd"))
    free = [fd for fd in range(64) if str(fd) not in held]
    usual, seen = resource.prlimit(maker, resource.RLIMIT_NOFILE), []
    script = f"""
print("tcp", attempt(lambda: dialled(*{FOREIGN})))
with socket.socket() as s: print("own", attempt(lambda: s.bind(({network.ADDRESS!r}, 9))))
"""
    try:
        for number in range(2, 7):  # an order brings two
            resource.prlimit(maker, resource.RLIMIT_NOFILE, (free[number], usual[1]))
            failed = refused(server, box.session_id)
            assert failed.errno == errno.EMFILE
            seen.append(failed.stage)
            assert told(box, script) == {"tcp": "ENETUNREACH", "own": "EADDRNOTAVAIL"}
            assert set(os.listdir(f"/proc/{maker}/fd")) == held
    finally:
        resource.prlimit(maker, resource.RLIMIT_NOFILE, usual)
    assert seen == [f"network: {step}" for step in ("address and route", "sockets", "map", "program", "link")]
    open_network(server, box).close()
    assert server.helpers(NETWORK_MAKER) == {maker}


def test_a_kernel_without_such_programs_is_named_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's answer to an unknown kind of program is a failure of the step `program`; address, route and sockets
    are gone, in a network of the test's own."""

    def attempt() -> str:
        syscalls.unshare(k.CLONE_NEWNET)
        network.loopback_up()
        before, netns_fd = sorted(os.listdir("/proc/self/fd")), os.open("/proc/self/ns/net", os.O_RDONLY)
        monkeypatch.setattr(k, "BPF_PROG_TYPE_SK_LOOKUP", 999)
        try:
            network.open_way_out(netns_fd)
            return "opened"
        except StepFailed as failed:
            os.close(netns_fd)
            assert sorted(os.listdir("/proc/self/fd")) == before
            with socket.socket() as probe:
                assert probe.connect_ex(FOREIGN) == errno.ENETUNREACH
                assert Path("/proc/net/fib_trie").read_text().count(network.ADDRESS) == 0
            return f"{failed.stage}: {failed}"

    read_fd, write_fd = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.write(write_fd, attempt().encode())
        finally:
            os._exit(0)
    os.close(write_fd)
    with open(read_fd) as answer:
        assert answer.read() == "network: program: [Errno 22] this kernel has no sk_lookup programs"
    os.waitpid(pid, 0)


def test_a_network_maker_that_dies_fails_its_order_alone() -> None:
    """There is none before the first way out. One that dies over an order is replaced, under its own filter alone, and
    the next order is carried out."""
    with data_directory() as data_dir, running(data_dir) as server:
        box = server.build(host_plan())
        assert server.helpers(NETWORK_MAKER) == set()
        open_network(server, box).close()
        (maker,) = server.helpers(NETWORK_MAKER)
        held = set(os.listdir(f"/proc/{maker}/fd"))
        free = [fd for fd in range(64) if str(fd) not in held]
        resource.prlimit(maker, resource.RLIMIT_NOFILE, (free[1], free[1]))  # an order brings two
        failed = refused(server, box.session_id)
        assert failed.stage == "network: network maker"
        open_network(server, box).close()
        (next_one,) = server.helpers(NETWORK_MAKER)
        status = Path(f"/proc/{next_one}/status").read_text()
        assert next_one != maker
        assert "Seccomp_filters:\t1\n" in status
        only = 1 << k.CAP_NET_ADMIN | 1 << k.CAP_SYS_ADMIN
        assert f"CapPrm:\t{only:016x}\nCapEff:\t{only:016x}\n" in status
        assert os.readlink(f"/proc/{next_one}/ns/net") == os.readlink(f"/proc/{server.pid}/ns/net")


def test_only_a_session_that_runs_gets_a_way_out(server: Nsinit) -> None:
    """An unknown session, and a sandbox of the pool, are refused, and the pool's one is not touched."""
    failed = refused(server, new_id())
    assert (failed.stage, failed.errno) == ("network: session", errno.ESRCH)
    blank = new_id()
    server.ask(Prepare, session_id=blank, limits=ROOMY)
    failed = refused(server, blank)
    assert (failed.stage, failed.errno) == ("network: session", errno.ENOENT)
    box = server.build(host_plan(blank))
    assert told(box, f"print('tcp', attempt(lambda: dialled(*{FOREIGN})))") == {"tcp": "ENETUNREACH"}


def test_the_next_nsinit_opens_a_way_out_of_a_session_that_it_did_not_build() -> None:
    """After the end of the first nsinit the way out goes on while its descriptors are open, and the next one makes
    another when they are closed."""
    with data_directory() as data_dir:
        node_id = new_node_id()
        with running(data_dir, node_id) as first:
            box = first.build(host_plan())
            opened = open_network(first, box)
            first.kill()
            assert told(box, f"print('tcp', dialled(*{FOREIGN}))") == {"tcp": "done"}
            opened.close()
            box.release()
        with running(data_dir, node_id) as second:
            _, fds = second.ask(Adopt, session_id=box.session_id)
            opened = open_network(second, box)
            netns_fd = os.open(f"/proc/{box.pid}/ns/net", os.O_RDONLY)
            with in_network(netns_fd), socket.create_connection(FOREIGN, timeout=patience(PATIENCE_S)):
                assert opened.take() == FOREIGN
            opened.close()
            for fd in (*fds, netns_fd):
                os.close(fd)


# The name server's address ------------------------------------------------------------------------------------------

RESOLVER = f"nameserver {network.ADDRESS}\noptions edns0\n"


@pytest.mark.parametrize("readonly", [False, True])
def test_the_session_is_told_of_its_name_server(server: Nsinit, readonly: bool) -> None:
    """`/etc/resolv.conf` names it after the way out opened and not before, also below a read-only root."""
    box = server.build(host_plan(readonly_rootfs=readonly))
    assert "nameserver" not in box.run("cat /etc/resolv.conf").out
    opened = open_network(server, box)
    assert box.run("cat /etc/resolv.conf").out == RESOLVER
    assert box.run("echo changed >/etc/resolv.conf").code != 0
    opened.close()


def begin_build(server: Nsinit) -> tuple[SandboxPlan, int, list[int]]:
    """Begin to build a prepared sandbox, whose PID 1 is stopped, and ask for its way out; return the plan, PID 1, and
    the way out's descriptors.
    """
    plan, before = host_plan(), server.processes()
    server.ask(Prepare, session_id=plan.session_id, limits=plan.limits)
    (pid,) = server.processes() - before
    os.kill(pid, signal.SIGSTOP)
    server.send(Build, plan=plan)
    server.send(OpenNetwork, session_id=plan.session_id)
    answer, fds = server.receive()
    assert isinstance(answer, NetworkOpened), answer
    return plan, pid, fds


def test_a_way_out_opens_while_pid_1_starts(server: Nsinit) -> None:
    """The answer does not wait for that of the build; the session is told of its name server all the same."""
    _plan, pid, fds = begin_build(server)
    os.kill(pid, signal.SIGCONT)
    built, box_fds = server.receive()
    assert isinstance(built, Built), (built, server.log)
    box, opened = Sandbox(server, built, box_fds, Setup(shell="bash")), WayOut(fds)
    assert box.run("cat /etc/resolv.conf").out == RESOLVER
    assert told(box, f"print('tcp', dialled(*{FOREIGN}))") == {"tcp": "done"}
    assert opened.take() == FOREIGN
    opened.close()
    box.teardown()


def test_a_build_with_a_way_out_is_undone(server: Nsinit) -> None:
    """A teardown that comes meanwhile ends it; nothing is left once the descriptors are closed."""
    plan, _pid, fds = begin_build(server)
    server.send(Teardown, session_id=plan.session_id)
    (failed, _), (torn_down, _) = server.receive(), server.receive()
    assert isinstance(failed, Failed), failed
    assert isinstance(torn_down, TornDown), torn_down
    WayOut(fds).close()
    assert server.traces(plan.session_id) == []
    refused(server, plan.session_id)


HOSTILE = {
    "a link out of the root": "rm /etc/resolv.conf; ln -s /proc/1/root{outside} /etc/resolv.conf",
    "a way up": "rm /etc/resolv.conf; ln -s ../../../../../../..{outside} /etc/resolv.conf",
    "a pipe": "rm /etc/resolv.conf; mkfifo /etc/resolv.conf",
    "a hard link": "mkdir -p /root; echo kept >/root/kept; rm /etc/resolv.conf; ln /root/kept /etc/resolv.conf",
}
DAMAGED = {
    "a link in place of /etc": "mv /etc /elsewhere; ln -s /elsewhere /etc",
    "a file in place of /etc": "mv /etc /elsewhere; echo >/etc",
    "no /etc": "mv /etc /elsewhere",
    "a directory of that name": "rm /etc/resolv.conf; mkdir /etc/resolv.conf",
}


@pytest.mark.parametrize("how", [*HOSTILE, *DAMAGED])
def test_what_a_session_made_of_its_etc_misleads_nobody(server: Nsinit, box: Sandbox, tmp_path: Path, how: str) -> None:
    """No link is followed and no other file is written; where there is no place for the file, that is logged, and the
    way out opens."""
    outside = tmp_path / "outside"
    outside.write_text("untouched")
    made = told(box, f"print('code', os.system({(HOSTILE | DAMAGED)[how].format(outside=outside)!r}))", user="root")
    assert made == {"code": "0"}
    opened = open_network(server, box)
    assert outside.read_text() == "untouched"
    if how in HOSTILE:
        assert box.run(
            "cat /etc/resolv.conf; [ -f /etc/resolv.conf ] && [ ! -L /etc/resolv.conf ] && echo a file"
        ).out == (RESOLVER + "a file\n")
        assert told(box, "print('kept', attempt(lambda: open('/root/kept').read().strip()))", user="root")["kept"] in (
            "kept",
            "ENOENT",
        )
    else:
        assert "name server not written" in server.log
        assert told(box, f"print('tcp', dialled(*{FOREIGN}))", user="0") == {"tcp": "done"}
    opened.close()


# Leftovers ----------------------------------------------------------------------------------------------------------

_RTM_NEWNSID, _RTM_DELNSID = 88, 89
_RTNLGRP_NSID = 28
_NETNSA_NSID, _NETNSA_FD = 1, 3
_BPF_PROG_GET_FD_BY_ID, _BPF_LINK_GET_FD_BY_ID = 13, 30


class Obituaries:
    """Tells when network namespaces end: the kernel removes the numbers that they have in another namespace, and says
    so (rtnetlink's group NSID)."""

    def __init__(self) -> None:
        with in_network():
            self._news = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, netlink.NETLINK_ROUTE)
            self._requests = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, netlink.NETLINK_ROUTE)
        self._news.bind((0, 1 << _RTNLGRP_NSID - 1))
        self._news.settimeout(patience(PATIENCE_S))
        self._alive: set[int] = set()

    def watch(self, netns_fd: int) -> None:
        """Note a namespace."""
        number = len(self._alive)
        body = b"\0\0\0\0" + netlink.attribute(_NETNSA_NSID, struct.pack("=i", number))
        self._requests.send(
            netlink.message(_RTM_NEWNSID, body + netlink.attribute(_NETNSA_FD, struct.pack("=I", netns_fd)))
        )
        answer = self._requests.recv(4096)
        assert struct.unpack_from("=i", answer, netlink.HEADER.size) == (0,)
        self._alive.add(number)

    def await_all(self) -> None:
        """Wait until all of them have ended."""
        while self._alive:
            note = self._news.recv(4096)
            if netlink.HEADER.unpack_from(note)[1] == _RTM_DELNSID:
                (number,) = struct.unpack_from("=i", note, netlink.HEADER.size + 8)
                self._alive.discard(number)

    def close(self) -> None:
        self._news.close()
        self._requests.close()


def numbers_of(link_fd: int) -> dict[str, int]:
    """Return the kernel's numbers of a link and its program."""
    lines = Path(f"/proc/self/fdinfo/{link_fd}").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(":\t") for line in lines) if name in ("link_id", "prog_id")}


def exists(command: int, number: int) -> bool:
    """Tell whether a program or link of that number is still there."""
    try:
        os.close(syscalls.bpf(command, array.array("I", [number, 0, 0]).tobytes()))
    except FileNotFoundError:
        return False
    return True


def test_nothing_stays_of_fifty_sessions(server: Nsinit) -> None:
    """Namespaces, sockets, links and programs are gone when sessions and descriptors are, in either order; the
    network maker holds what it held before."""
    obituaries, numbers, held = Obituaries(), [], set[str]()
    for turn in range(50):
        box = server.build(host_plan())
        netns_fd = os.open(f"/proc/{box.pid}/ns/net", os.O_RDONLY)
        obituaries.watch(netns_fd)
        os.close(netns_fd)
        opened = open_network(server, box)
        (maker,) = server.helpers(NETWORK_MAKER)
        held = held or set(os.listdir(f"/proc/{maker}/fd"))
        numbers.append(numbers_of(opened.link_fd))
        assert exists(_BPF_PROG_GET_FD_BY_ID, numbers[-1]["prog_id"])
        if turn % 2:
            opened.close()
        box.teardown()
        opened.close()
    obituaries.await_all()
    obituaries.close()
    for each in numbers:
        wait_until(lambda: not exists(_BPF_LINK_GET_FD_BY_ID, each["link_id"]), "the link is gone")  # noqa: B023
        wait_until(lambda: not exists(_BPF_PROG_GET_FD_BY_ID, each["prog_id"]), "the program is gone")  # noqa: B023
    assert set(os.listdir(f"/proc/{maker}/fd")) == held


def test_the_program_asks_for_no_name_of_a_slot_that_is_not_there() -> None:
    """Of its jumps none leads out of the program, and its last instructions are ends."""
    code = steering.steering_program(7, socket.inet_aton(network.ADDRESS))
    lines = [struct.unpack_from("=BBhi", code, at) for at in range(0, len(code), 8)]
    ends = {at for at, line in enumerate(lines) if line[0] == 0x95}
    assert {len(lines) - 1} <= ends
    assert all(
        0 < at + 1 + line[2] < len(lines) for at, line in enumerate(lines) if line[0] in (0x05, 0x15, 0x55, 0x56)
    )
