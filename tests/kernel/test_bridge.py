"""The network mode `bridge`: what passes the link of a session, what does not, and that nothing of it stays.

The host of these sessions is a network namespace of the test's own, with the outside world in a second one.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

import attrs
import pytest
import trio

from egress.addresses import SPECIAL_V4
from nsinit import spawn
from nsinit.helpers.bridge_maker import NAME as BRIDGE_MAKER
from nsinit.kernel import constants as k
from nsinit.kernel import syscalls
from nsinit.wire.protocol import (
    MAX_BRIDGE_PORTS,
    Adopt,
    Adopted,
    BridgeOpened,
    BridgeRule,
    BridgeTerms,
    CloseBridge,
    Failed,
    NetworkOpened,
    Ok,
    OpenBridge,
    OpenNetwork,
)
from sandkasten.actors.services.nsinit import call
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.config import Config, EgressSettings, IsolationSettings
from sandkasten.errors import Conflict, InvalidRequest, InvalidRule
from sandkasten.model import ExecSpec, SessionPatch, SessionSpec
from sandkasten.model.network import Network, NetworkMode
from sandkasten.security.attacks.bridges import BRIDGES
from sandkasten.security.attacks.field import USERS, open_field
from sandkasten.security.campaign import make_all
from sandkasten.security.probes.attempt import BROKEN, HELD
from tests.kernel.harness import Nsinit, Sandbox, data_directory, host_plan, new_node_id, running, wait_until
from tests.kernel.world import served
from tests.waiting import patience, slowness, until

T = TypeVar("T")

HOST, WORLD, OTHER, RESOLVER = "93.184.215.1", "93.184.215.2", "93.184.215.3", "93.184.215.53"
PRIVATE, METADATA = "10.9.8.7", "169.254.169.254"
"""Addresses of the world but the first, which is the host's; the last two are routed there, too."""
PORT = 7
TERMS = BridgeTerms("10.213.0.0/16", tuple(SPECIAL_V4), (RESOLVER,))

PROGRAM = """
import errno, json, os, socket, struct, sys
def udp(host, port=7, wait=0.4):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.settimeout(wait)
        try:
            s.sendto(b'hello', (host, port))
            return s.recvfrom(100)[0].decode()
        except OSError as error:
            return type(error).__name__ if error.errno is None else errno.errorcode[error.errno]
def tcp(host, port=7, wait=0.4):
    try:
        with socket.create_connection((host, port), timeout=wait) as s:
            s.sendall(b'hello')
            return s.recv(100).decode()
    except OSError as error:
        return type(error).__name__ if error.errno is None else errno.errorcode[error.errno]
def ping(host, wait=0.4):
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP) as s:
            s.settimeout(wait)
            s.sendto(struct.pack('!BBHHH', 8, 0, 0, 0, 1), (host, 0))
            return str(s.recv(100)[0])
    except OSError as error:
        return type(error).__name__ if error.errno is None else errno.errorcode[error.errno]
"""
LISTEN = """
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(('0.0.0.0', 7))
open('/tmp/heard', 'w').close()
if os.fork() == 0:
    os.closerange(0, 3)
    while True:
        with open('/tmp/heard', 'a') as file: file.write(s.recvfrom(100)[1][0])
"""
CONNECTED = """
os.mkfifo('/tmp/ask'); os.mkfifo('/tmp/told')
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.connect(({host!r}, 7))
s.settimeout(0.4)
if os.fork() == 0:
    os.closerange(0, 3)
    while True:
        with open('/tmp/ask') as file: file.read()
        s.send(b'hello')
        try: told = s.recv(10).decode()
        except OSError: told = 'silent'
        with open('/tmp/told', 'w') as file: print(told, file=file)
"""
LONG = 20.0
"""Seconds that an answer may take which is to come. One that must not come is waited for much shorter: what is sent is
dropped before `sendto` returns, and the session that it is sent to is asked."""


def in_thread(work: Callable[[], T]) -> T:
    """Do work in a thread, which may change its namespace."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


class Net:
    """A network namespace."""

    def __init__(self) -> None:
        def make() -> int:
            syscalls.unshare(k.CLONE_NEWNET)
            return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

        self.fd = in_thread(make)
        self.ip("link set lo up")

    def inside(self, work: Callable[[], T]) -> T:
        def enter_and_work() -> T:
            syscalls.setns(self.fd, k.CLONE_NEWNET)
            return work()

        return in_thread(enter_and_work)

    def run(self, *command: str) -> str:
        if not shutil.which(command[0]):
            pytest.skip(f"{command[0]} is not installed")
        nsenter = "nsenter", f"--net=/proc/self/fd/{self.fd}"
        done = subprocess.run([*nsenter, *command], check=True, capture_output=True, text=True, pass_fds=[self.fd])
        return done.stdout

    def ip(self, words: str) -> str:
        return self.run("ip", *words.split())

    def links(self) -> set[str]:
        return {each["ifname"] for each in json.loads(self.run("ip", "-json", "link"))} - {"lo"}

    def tables(self) -> str:
        return self.run("nft", "list", "tables")

    def setting(self, name: str, value: str) -> None:
        def write() -> None:
            with open(f"/proc/sys/net/ipv4/{name}", "w") as file:
                file.write(value)

        self.inside(write)


class Server:
    """A server that answers at a port, by UDP and TCP; `heard` is from whom it heard."""

    def __init__(self, net: Net, undo: ExitStack, address: str = "0.0.0.0", port: int = PORT) -> None:
        def bind() -> tuple[socket.socket, socket.socket]:
            datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            datagrams.bind((address, port))
            return datagrams, socket.create_server((address, port))

        self.heard: list[str] = []
        datagrams, listener = net.inside(bind)
        for work, sock in ((self._answer, datagrams), (self._accept, listener)):
            thread = threading.Thread(target=work, args=(sock,), daemon=True)
            thread.start()
            undo.callback(thread.join)
            undo.callback(self._end, sock)

    def _answer(self, sock: socket.socket) -> None:
        with sock:
            while data := sock.recvfrom(100):
                if not data[0]:
                    break
                self.heard.append(data[1][0])
                sock.sendto(data[0], data[1])

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            while True:
                try:
                    connection, (address, _) = listener.accept()
                except OSError:
                    break
                self.heard.append(address)
                with connection:
                    connection.sendall(connection.recv(100))

    @staticmethod
    def _end(sock: socket.socket) -> None:
        try:
            sock.shutdown(socket.SHUT_RDWR)  # wakes accept(2) and recv(2)
        except OSError:  # a datagram socket has no peer, and is woken all the same
            pass


class Place:
    """A host and its world, with an nsinit that takes the host for its machine."""

    def __init__(self, undo: ExitStack) -> None:
        self.host, self.world = Net(), Net()
        self._undo = undo
        for net in (self.host, self.world):
            undo.callback(os.close, net.fd)
        self.host.ip(f"link add up0 type veth peer name w0 netns /proc/{os.getpid()}/fd/{self.world.fd}")
        self.host.ip(f"address add {HOST}/24 dev up0")
        self.host.ip("link set up0 up")
        for address in (f"{WORLD}/24", f"{OTHER}/24", f"{RESOLVER}/24", f"{PRIVATE}/32", f"{METADATA}/32"):
            self.world.ip(f"address add {address} dev w0")
        self.world.ip("link set w0 up")
        self.host.ip(f"route add default via {WORLD}")
        self.host.setting("conf/up0/forwarding", "1")
        self.outside = Server(self.world, undo)
        Server(self.world, undo, RESOLVER, 53)
        self.on_host = Server(self.host, undo)

    @contextmanager
    def nsinit(self, data_dir: object, node_id: str, terms: BridgeTerms | None = TERMS) -> Iterator[Nsinit]:
        wrapper = "/usr/bin/nsenter", f"--net=/proc/{os.getpid()}/fd/{self.host.fd}"
        with running(data_dir, node_id, wrapper, bridge=terms) as server:  # type: ignore[arg-type]
            yield server


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with ExitStack() as undo:
        yield Place(undo)


@pytest.fixture(scope="module")
def shared(place: Place) -> Iterator[Nsinit]:
    """An nsinit with its makers of bridges and of ways out: they are there from the first order on, and no leak."""
    with data_directory() as data_dir, place.nsinit(data_dir, new_node_id()) as server:
        box = server.build(host_plan())
        bridged(server, box)
        for fd in server.ask(OpenNetwork, session_id=box.session_id)[1]:
            os.close(fd)
        server.remove_sandboxes()
        yield server


@pytest.fixture
def box(server: Nsinit) -> Sandbox:
    return server.build(host_plan())


def bridged(server: Nsinit, box: Sandbox, allow: list[BridgeRule] = [], deny: list[BridgeRule] = []) -> str:  # noqa: B006
    """Give a session a bridge, which must be had; return its link."""
    answer, _ = server.ask(OpenBridge, session_id=box.session_id, allow=tuple(allow), deny=tuple(deny))
    assert isinstance(answer, BridgeOpened), server.log[-3000:]
    return answer.link


def tried(box: Sandbox, *calls: str) -> list[str]:
    """Return the answers to attempts inside."""
    return list(json.loads(box.python(f"{PROGRAM}\nprint(json.dumps([{', '.join(calls)}]))")))


def addresses(box: Sandbox) -> list[str]:
    """Return the addresses of a session that are not its loopback's."""
    found = "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)"
    script = f"import socket\ns = {found}\ns.connect(({WORLD!r}, 9))\nprint(s.getsockname()[0])"
    return box.python(script).split()


def counted(place: Place, link: str) -> int:
    """Return the bytes that came from a session."""
    return int(place.host.run("cat", "/proc/self/net/dev").partition(f"{link}:")[2].split()[0])


def spoof(netns_fd: int, source: str, target: str, options: bytes = b"") -> None:
    """Send a datagram with a source and options of one's own choice, as root in a session's network."""

    def send() -> None:
        syscalls.setns(netns_fd, k.CLONE_NEWNET)
        payload = struct.pack("!HHHH5s", 1000, PORT, 13, 0, b"hello")
        header = struct.pack("!BBHHHBBH", 0x45 + len(options) // 4, 0, 0, 1, 0, 64, 17, 0)
        header += socket.inet_aton(source) + socket.inet_aton(target) + options
        with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw:
            raw.sendto(header + payload, (target, 0))

    in_thread(send)


def test_udp_tcp_and_icmp_pass_and_come_back(server: Nsinit, place: Place, box: Sandbox) -> None:
    """Under the host's address, and counted; the session has the host's resolvers, and no IPv6."""
    assert tried(box, f"udp({WORLD!r})", f"ping({WORLD!r})") == ["ENETUNREACH", "EACCES"]
    place.outside.heard.clear()
    link = bridged(server, box)
    reached = tried(box, *(f"{way}({WORLD!r}, wait={LONG})" for way in ("udp", "tcp", "ping")))
    assert reached == ["hello", "hello", "0"], server.log
    assert place.outside.heard == [HOST, HOST]
    assert box.run("cat /etc/resolv.conf").out == f"nameserver {RESOLVER}\noptions edns0\n"
    assert box.run("cat /proc/net/if_inet6").out == ""
    assert counted(place, link) > 100


def test_private_addresses_metadata_the_host_and_a_neighbour_hear_nothing(
    server: Nsinit, place: Place, box: Sandbox
) -> None:
    """Nobody of them, by the count of those who would have heard it; nor does a broadcast reach anybody."""
    neighbour = server.build(host_plan())
    for each in (box, neighbour):
        bridged(server, each)
    (own,) = addresses(neighbour)
    neighbour.python(f"{PROGRAM}\n{LISTEN}")
    place.outside.heard.clear()
    place.on_host.heard.clear()
    targets = PRIVATE, METADATA, HOST, "10.213.0.1", "127.0.0.1", own, "255.255.255.255", "224.0.0.1"
    answers = tried(box, *(f"{way}({each!r})" for each in targets for way in ("udp", "tcp", "ping")))
    assert not {"hello"}.intersection(answers), answers
    assert not [
        answer for answer, target in zip(answers[2::3], targets, strict=True) if answer == "0" and target[0:3] != "127"
    ]
    assert tried(box, f"udp({WORLD!r}, wait={LONG})") == ["hello"]
    assert place.on_host.heard == []
    assert place.outside.heard == [HOST]
    assert neighbour.run("cat /tmp/heard").out == ""


def test_a_session_reaches_what_its_rules_say_from_the_change_on(server: Nsinit, place: Place, box: Sandbox) -> None:
    """Rules with ports are for TCP and UDP; open connections are cut by a change, which keeps address and counters."""
    link = bridged(server, box, [BridgeRule(f"{WORLD}/32", (PORT,)), BridgeRule(f"{OTHER}/32")])
    reached = f"udp({WORLD!r}, wait={LONG})", f"tcp({WORLD!r}, wait={LONG})", f"ping({OTHER!r}, wait={LONG})"
    assert tried(box, *reached, f"ping({WORLD!r})") == ["hello", "hello", "0", "TimeoutError"]
    (address,) = addresses(box)
    before = counted(place, link)
    box.python(f"{PROGRAM}\n{CONNECTED.format(host=WORLD)}")
    assert box.run("echo ask > /tmp/ask; cat /tmp/told").out == "hello\n"
    assert bridged(server, box, [], [BridgeRule("93.184.215.2/31", (PORT, 9))]) == link
    assert box.run("echo ask > /tmp/ask; cat /tmp/told").out == "silent\n"
    assert tried(box, f"udp({WORLD!r})", f"ping({OTHER!r}, wait={LONG})") == ["TimeoutError", "0"]
    # The resolver is reached at the port of DNS, whatever the rules say.
    place_of_names = tried(box, f"udp({RESOLVER!r}, port=53, wait={LONG})")
    assert place_of_names == ["hello"]
    assert addresses(box) == [address]
    assert counted(place, link) > before


def test_the_most_rules_that_are_admitted_open_and_can_be_changed(server: Nsinit, box: Sandbox) -> None:
    """On a new link and on one that is there."""
    most = [BridgeRule(f"198.51.{100 + each // 256}.{each % 256}/32", (each + 1,)) for each in range(MAX_BRIDGE_PORTS)]
    link = bridged(server, box, most, most)
    assert bridged(server, box, [BridgeRule(f"{WORLD}/32", (PORT,)), *most[1:]], most) == link
    assert tried(box, f"udp({WORLD!r}, wait={LONG})") == ["hello"]


def test_a_translation_of_the_host_makes_nothing_private_reachable(server: Nsinit, place: Place, box: Sandbox) -> None:
    """A destination that a session may reach, and that a rule of the operator's turns into another."""
    bridged(server, box)
    place.host.ip(f"route add {PRIVATE}/32 dev up0")
    rules = f"add table ip own; add chain ip own pre {{ type nat hook prerouting priority -100; }}; \
add rule ip own pre ip daddr {OTHER} dnat to {PRIVATE}"
    place.host.run("nft", rules)
    try:
        assert tried(box, f"udp({WORLD!r}, wait={LONG})", f"udp({OTHER!r})") == ["hello", "TimeoutError"]
    finally:
        place.host.run("nft", "delete table ip own")
        place.host.ip(f"route del {PRIVATE}/32 dev up0")


def test_a_spoofed_source_a_source_route_and_lost_rules_get_nothing_through(
    server: Nsinit, place: Place, box: Sandbox
) -> None:
    """From a process of root in the session's network, since nobody inside may send such packets; and without rules
    nothing passes at all."""
    link = bridged(server, box)
    place.outside.heard.clear()
    index = os.open(f"/proc/{box.pid}/ns/net", os.O_RDONLY)
    spoof(index, "10.213.99.99", WORLD)
    spoof(index, "8.8.8.8", WORLD)
    (own,) = addresses(box)
    # Loose source and record route (RFC 791, 3.1): on to a private address.
    spoof(index, own, WORLD, bytes((131, 7, 4)) + socket.inet_aton(PRIVATE) + bytes(1))
    assert tried(box, f"udp({WORLD!r}, wait={LONG})") == ["hello"]
    assert place.outside.heard == [HOST]
    place.host.run("nft", "flush", "ruleset")
    place.on_host.heard.clear()
    assert tried(box, f"udp({WORLD!r})", f"ping({WORLD!r})", f"udp({HOST!r})") == ["TimeoutError"] * 3
    spoof(index, "8.8.8.8", HOST)
    os.close(index)
    assert place.outside.heard == [HOST]
    assert place.on_host.heard == []
    assert bridged(server, box) == link  # and asking again puts them back
    assert tried(box, f"udp({WORLD!r}, wait={LONG})") == ["hello"]


def test_a_live_session_goes_both_ways_between_the_modes(server: Nsinit, place: Place, box: Sandbox) -> None:
    """With a way out after a bridge and before one; what was closed is unreachable at once, pings among it."""
    for _ in range(2):
        bridged(server, box)
        assert tried(box, f"udp({WORLD!r}, wait={LONG})") == ["hello"]
        answer, fds = server.ask(OpenNetwork, session_id=box.session_id)
        assert isinstance(answer, NetworkOpened), server.log
        assert place.host.links() == {"up0"}
        place.outside.heard.clear()
        assert tried(box, f"udp({WORLD!r})", f"ping({WORLD!r})") == ["TimeoutError", "EACCES"]
        assert place.outside.heard == []
        for fd in fds:
            os.close(fd)
    bridged(server, box)
    for _ in range(2):
        assert isinstance(server.ask(CloseBridge, session_id=box.session_id)[0], Ok)
    assert tried(box, f"udp({WORLD!r})", f"ping({WORLD!r})", "ping('127.0.0.1')") == ["ENETUNREACH", "EACCES", "EACCES"]
    assert place.host.links() == {"up0"}


def test_the_end_of_a_session_leaves_nothing_whoever_was_killed(place: Place) -> None:
    """Session, nsinit, or the maker of the bridge: links, rules and tables are gone, at the latest with the next start;
    what lives on keeps its bridge, and the rules of the host's own are left alone."""
    with ExitStack() as undo, data_directory() as data_dir:
        place.host.run("nft", "add", "table", "ip", "operators-own")
        undo.callback(place.host.run, "nft", "delete", "table", "ip", "operators-own")
        node_id = new_node_id()
        with place.nsinit(data_dir, node_id) as first:
            ended, killed, kept = (first.build(host_plan()) for _ in range(3))
            links = [bridged(first, each) for each in (ended, killed, kept)]
            assert place.host.links() == {"up0", *links}
            ended.teardown()
            assert place.host.links() == {"up0", *links[1:]}
            assert links[0] not in place.host.run("nft", "list", "ruleset")
            (maker,) = first.helpers(BRIDGE_MAKER)
            os.kill(maker, signal.SIGKILL)  # the next order has another one
            assert bridged(first, kept) == links[2]
            first.release_sandboxes()
            first.kill()
        os.kill(killed.pid, signal.SIGKILL)
        wait_until(lambda: place.host.links() == {"up0", links[2]}, "the kernel removed the link of the dead session")
        with place.nsinit(data_dir, node_id, terms=None) as second:
            # Not allowed any more: what lives on is adopted with its bridge, which can be closed.
            adopted, fds = second.ask(Adopt, session_id=kept.session_id)
            assert isinstance(adopted, Adopted)
            assert adopted.bridged
            for fd in fds:
                os.close(fd)
            refused, _ = second.ask(OpenBridge, session_id=kept.session_id)
            assert isinstance(refused, Failed)
            assert isinstance(second.ask(CloseBridge, session_id=kept.session_id)[0], Ok)
            assert place.host.links() == {"up0"}
            assert place.host.tables() == "table ip operators-own\n"


def test_what_the_host_lacks_is_said_and_nothing_is_made(server: Nsinit, place: Place, box: Sandbox) -> None:
    """A setting is named and not changed; a range that another route leads to is not taken."""
    place.host.setting("conf/up0/forwarding", "0")
    try:
        refused, _ = server.ask(OpenBridge, session_id=box.session_id)
    finally:
        place.host.setting("conf/up0/forwarding", "1")
    assert (refused.errno, "net.ipv4.conf.up0.forwarding=1" in refused.message) == (errno.EHOSTUNREACH, True), refused
    place.host.ip("route add 10.213.7.0/24 dev up0")
    try:
        refused, _ = server.ask(OpenBridge, session_id=box.session_id)
    finally:
        place.host.ip("route del 10.213.7.0/24 dev up0")
    assert (refused.errno, "10.213.7.0/24" in refused.message) == (errno.EADDRINUSE, True)
    assert refused.stage.startswith("network: ")
    assert place.host.links() == {"up0"}
    assert place.host.tables() == ""
    assert tried(box, f"udp({WORLD!r})") == ["ENETUNREACH"]


def test_a_link_outlives_a_change_of_what_new_ones_need(place: Place) -> None:
    """Another range, and forwarding that is off: a session that has a link keeps it, with its address, and takes other
    rules; one that has none is refused, or gets an address of the new range, and neither reaches the other. Rules of
    the last link, which went while nsinit was away, go with the next start; tables of others stay."""
    with ExitStack() as undo, data_directory() as data_dir:
        neighbours = "table netdev sandkasten-skb00000\n"
        place.host.run("nft", "add", *neighbours.split())
        undo.callback(place.host.run, "nft", "delete", *neighbours.split())
        node_id = new_node_id()
        with place.nsinit(data_dir, node_id) as first:
            older = first.build(host_plan())
            link, (address,) = bridged(first, older), addresses(older)
            first.kill()
            with place.nsinit(data_dir, node_id, replace(TERMS, range="10.214.0.0/16")) as second:
                newer = second.build(host_plan())
                place.host.setting("conf/up0/forwarding", "0")
                try:
                    assert isinstance(second.ask(OpenBridge, session_id=newer.session_id)[0], Failed)
                    assert bridged(second, older, deny=[BridgeRule(f"{OTHER}/32")]) == link
                finally:
                    place.host.setting("conf/up0/forwarding", "1")
                bridged(second, newer)
                assert addresses(older) == [address]
                (own,) = addresses(newer)
                assert own.startswith("10.214.")
                newer.python(f"{PROGRAM}\n{LISTEN}")
                reach = f"udp({WORLD!r}, wait={LONG})"
                assert tried(older, reach, f"udp({OTHER!r})", f"udp({own!r})") == ["hello", *["TimeoutError"] * 2]
                assert tried(newer, reach, f"udp({address!r})") == ["hello", "TimeoutError"]
                assert newer.run("cat /tmp/heard").out == ""
                second.release_sandboxes()
                first.release_sandboxes()
                second.kill()
            for each in (older, newer):
                os.kill(each.pid, signal.SIGKILL)
            wait_until(lambda: place.host.links() == {"up0"}, "the kernel removed the links")
            assert "sandkasten-skb" in place.host.tables().replace(neighbours, "")
            with place.nsinit(data_dir, node_id):
                wait_until(lambda: place.host.tables() == neighbours, "what was left of them is gone")


@pytest.fixture
def at_home(place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Be in the host's network with this thread and the processes that it starts; none is a fork of a seed."""
    monkeypatch.setattr(spawn, "spawn_python", partial(spawn._spawn, spawn.FLAGS))
    home_fd = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    syscalls.setns(place.host.fd, k.CLONE_NEWNET)
    yield
    syscalls.setns(home_fd, k.CLONE_NEWNET)
    os.close(home_fd)


async def asked(supervisor: LocalSupervisor, session_id: str, call: str) -> str:
    """Return the answer to an attempt inside."""
    with trio.fail_after(patience(60)):
        argv = ("python3", "-c", f"{PROGRAM}\nprint({call})")
        return (await supervisor.exec(session_id, ExecSpec(argv=argv))).stdout.decode().strip()


@pytest.mark.usefixtures("at_home")
async def test_a_session_of_another_mode_keeps_no_bridge_of_a_daemon_that_died_over_a_change(
    config: Config, place: Place
) -> None:
    """The bridge goes when the session is adopted; it had ended the way out, which is made anew."""
    isolation = IsolationSettings(allow_bridge=True, bridge_resolvers=(RESOLVER,))
    config = attrs.evolve(config, isolation=isolation)
    by_way_out = f"tcp({WORLD!r}, wait={LONG})"
    async with served(config, ends_sessions=False) as supervisor:
        session = await supervisor.create(SessionSpec(network=Network(NetworkMode.ALLOW, [f"{WORLD}:{PORT}"])))
        assert await asked(supervisor, session.id, by_way_out) == "hello"
        await supervisor._nsinit.ask(call(OpenBridge, session.id, (), ()))
        assert len(place.host.links()) == 2
    async with served(config) as supervisor:

        async def is_way_out() -> bool:
            return await asked(supervisor, session.id, by_way_out) == "hello"

        await until(is_way_out)
        assert place.host.links() == {"up0"}


@pytest.mark.usefixtures("at_home")
async def test_attacks_by_a_link_are_held_and_one_that_succeeds_is_seen(config: Config) -> None:
    """Each of the catalogue by each user; and where a private network is permitted, what goes there is seen."""
    isolation = IsolationSettings(allow_bridge=True, bridge_resolvers=(RESOLVER,))
    config = attrs.evolve(config, isolation=isolation)
    permitted = attrs.evolve(config, egress=EgressSettings(permit=("10.0.0.0/30",)))
    async with open_field(permitted, patience=slowness()) as field:
        made = await make_all(field, BRIDGES, users=USERS, report=lambda _result: None)
        assert {(each.attempt.id, each.user): each.seen for each in made if each.verdict != HELD} == {}
        assert len(made) == 5
        blind = attrs.evolve(field, config=config)
        (seen,) = await make_all(blind, BRIDGES[:1], users=USERS[:1], report=lambda _result: None)
    assert (seen.verdict, "10.0.0.1: left by up0" in seen.seen) == (BROKEN, True), seen.seen


@pytest.mark.usefixtures("at_home")
async def test_a_daemon_changes_counts_and_keeps_a_bridge(config: Config, place: Place) -> None:
    """From `none` on and back, over a restart; a change that was made for an older network, and one that the mode can't
    have, leave it as it is; what is not allowed any more is closed when the session is adopted."""
    isolation = IsolationSettings(allow_bridge=True, bridge_resolvers=(RESOLVER,))
    config = attrs.evolve(config, isolation=isolation)
    bridge = Network(NetworkMode.BRIDGE, deny=[OTHER])
    reach = f"udp({WORLD!r}, wait={LONG})"
    async with served(config, ends_sessions=False) as supervisor:
        system = await supervisor.system()
        assert (system.features["bridge"], system.limits["network_mode"]) == (True, {"max": "bridge"})
        session = await supervisor.create(SessionSpec())
        assert await asked(supervisor, session.id, f"udp({WORLD!r})") == "ENETUNREACH"
        await supervisor.update(session.id, SessionPatch(network=bridge, if_revision=1))
        assert await asked(supervisor, session.id, reach) == "hello"
        assert await asked(supervisor, session.id, f"udp({OTHER!r})") == "TimeoutError"
        with pytest.raises(Conflict):
            await supervisor.update(session.id, SessionPatch(network=Network(), if_revision=1))
        with pytest.raises(InvalidRule, match="use the mode 'allow'"):
            await supervisor.update(session.id, SessionPatch(network=attrs.evolve(bridge, allow=["example.org"])))
        counters = (await supervisor.stats(session.id)).network
        assert counters is not None
        assert counters.bytes_up > counters.bytes_down > 0
        links = place.host.links()
        assert len(links) == 2
    async with served(config, ends_sessions=False) as supervisor:
        assert await asked(supervisor, session.id, reach) == "hello"
        assert place.host.links() == links
        made = await supervisor.create(SessionSpec(network=bridge))
        assert await asked(supervisor, made.id, reach) == "hello"
        await supervisor.destroy(made.id)
        await supervisor.update(session.id, SessionPatch(network=Network()))
        assert await asked(supervisor, session.id, f"udp({WORLD!r})") == "ENETUNREACH"
        assert place.host.links() == {"up0"}
        await supervisor.update(session.id, SessionPatch(network=bridge))
    async with served(attrs.evolve(config, isolation=IsolationSettings())) as supervisor:
        with pytest.raises(InvalidRequest, match="maximum"):
            await supervisor.create(SessionSpec(network=bridge))

        async def is_closed() -> bool:
            return await asked(supervisor, session.id, f"udp({WORLD!r})") == "ENETUNREACH"

        await until(is_closed)
    assert place.host.links() == {"up0"}
    assert place.host.tables() == ""
