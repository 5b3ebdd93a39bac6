"""Attacks through a session's own link, in the network mode `bridge`: at the node, its networks, and other sessions.

The truth is on the wire. A packet socket of the node sees all that the node sends and takes; each packet of an attack
carries a mark. The node's end of the link must have had the marks, or nothing was tried, and no other interface may
have one, nor a listener of the node. A packet leaves the machine only if an attempt succeeds.

Sources: packet(7), ip(7), ipv6(7), arp(7); RFC 791, RFC 826, RFC 4861.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import orjson
import trio

from nsinit.wire import protocol
from nsinit.wire.protocol import BRIDGE_LINKS
from sandkasten.model.network import Network, NetworkMode
from sandkasten.security.attacks.field import Field
from sandkasten.security.attacks.ways_out import SPECIAL, not_permitted, own_address
from sandkasten.security.probes.attempt import HELD, Answers, NotApplicable, attempt

_ALLOWED, _ALLOWED_PORT = "9.9.9.9", 443
_ETH_P_ALL, _PACKET_OUTGOING = 3, 4
"""Of linux/if_ether.h and linux/if_packet.h."""
_IPV4, _ARP, _IPV6 = b"\x08\x00", b"\x08\x06", b"\x86\xdd"
_BUFFER_BYTES = 8 * 2**20
_LAST = 9999
"""The number of an attempt's last mark."""

_SENDS = """
import socket, struct, sys, time
token, port, neighbour, targets = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:]
def mark(number):
    return ("%s%04d" % (token, number)).encode()
kept = []
def send(family, kind, protocol, data, place, source=None, options=()):
    try:
        client = socket.socket(family, kind, protocol)
        kept.append(client)
        client.setblocking(False)
        for each in options:
            client.setsockopt(*each)
        if source is not None:
            client.bind((source, 0))
        client.connect_ex(place) if kind == socket.SOCK_STREAM else client.sendto(data, place)
    except OSError:
        pass
ECHO = struct.pack("!BBHHH", 8, 0, 0, 0, 1)
ANY_SOURCE, SPOOFABLE = (socket.SOL_IP, 15, 1), (socket.SOL_IP, 19, 1)
for number, host in enumerate(targets):
    if ":" in host:
        place = (host, port, 0, socket.if_nametoindex("eth0"))
        send(socket.AF_INET6, socket.SOCK_DGRAM, 0, mark(number), place)
        continue
    to_all = ((socket.SOL_SOCKET, socket.SO_BROADCAST, 1),)
    send(socket.AF_INET, socket.SOCK_DGRAM, 0, mark(number), (host, port), options=to_all)
    send(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP, ECHO + mark(number), (host, 0), options=to_all)
    send(socket.AF_INET, socket.SOCK_STREAM, 0, b"", (host, port))
    send(socket.AF_INET, socket.SOCK_RAW, 253, mark(number), (host, 0))
    for source in (neighbour, "8.8.8.8"):
        for option in (ANY_SOURCE, SPOOFABLE):
            send(socket.AF_INET, socket.SOCK_DGRAM, 0, mark(number), (host, port), source, (option,))
time.sleep(0.5)
send(socket.AF_INET, socket.SOCK_DGRAM, 0, mark(9999), (targets[0], port))
"""
"""Program of a session that sends to every target by whatever its user may use."""

_FRAMES = """
import json, os, socket, struct, sys
sys.path.append(sys.argv[1])
from nsinit.kernel import constants, syscalls
said = json.load(sys.stdin)
net_fd = os.open(f"/proc/{said['pid']}/ns/net", os.O_RDONLY)
syscalls.setns(net_fd, constants.CLONE_NEWNET)
own, neighbour, node, out = (socket.inet_aton(said[each]) for each in ("own", "neighbour", "node", "out"))
HOST, ALL, OURS = bytes((2, 0x73, 0x6B, 0x62, 0, 1)), b"\\xff" * 6, bytes((2, 0x73, 0x6B, 0x62, 0, 2))
def mark(number):
    return ("%s%04d" % (said["token"], number)).encode()
def sum_of(data):
    total = sum(struct.unpack("!%dH" % (len(data) // 2), data))
    return ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
def ip(number, source, target, port=443, options=b"", fragment=0):
    data = struct.pack("!HHHH", 1000, port, 8 + len(mark(number)), 0) + mark(number)
    size = 20 + len(options)
    head = struct.pack("!BBHHHBBH", 0x40 | size // 4, 0, size + len(data), 1, fragment, 64, 17, 0)
    head += source + target + options
    return head[:10] + struct.pack("!H", sum_of(head)) + head[12:] + data
def arp(number, kind, sender, target):
    return struct.pack("!HHBBH", 1, 0x800, 6, 4, kind) + OURS + sender + bytes(6) + target + mark(number)
def ipv6(number, target, kind):
    data = bytes((kind, 0, 0, 0)) + bytes(12) + mark(number)
    return struct.pack("!IHBB", 6 << 28, len(data), 58, 255) + socket.inet_pton(10, "fe80::1") + target + data
IP, ARP, V6 = 0x800, 0x806, 0x86DD
route = bytes((131, 7, 4)) + socket.inet_aton("10.0.0.1") + b"\\0"
all_nodes = socket.inet_pton(10, "ff02::1")
frames = {
    "source of nobody": (HOST, IP, lambda n: ip(n, socket.inet_aton("8.8.8.8"), out)),
    "source of a neighbour": (HOST, IP, lambda n: ip(n, neighbour, out)),
    "source of the node": (HOST, IP, lambda n: ip(n, node, out)),
    "source of the loopback": (HOST, IP, lambda n: ip(n, socket.inet_aton("127.0.0.1"), node, said["port"])),
    "to the neighbour": (HOST, IP, lambda n: ip(n, own, neighbour)),
    "to the node": (HOST, IP, lambda n: ip(n, own, node, said["port"])),
    "to the node's loopback": (HOST, IP, lambda n: ip(n, own, socket.inet_aton("127.0.0.1"), said["port"])),
    "to everybody": (ALL, IP, lambda n: ip(n, own, b"\\xff" * 4, said["port"])),
    "to a group": (ALL, IP, lambda n: ip(n, own, socket.inet_aton("224.0.0.1"), said["port"])),
    "by a source route": (HOST, IP, lambda n: ip(n, own, out, 443, route)),
    "a later fragment": (HOST, IP, lambda n: ip(n, own, out, 9, b"", 185)),
    "in a VLAN": (HOST, 0x8100, lambda n: struct.pack("!HH", 1, IP) + ip(n, own, node, said["port"])),
    "ARP for the gateway": (ALL, ARP, lambda n: arp(n, 1, own, socket.inet_aton("169.254.1.1"))),
    "ARP for the node": (ALL, ARP, lambda n: arp(n, 1, own, node)),
    "ARP as the neighbour": (ALL, ARP, lambda n: arp(n, 2, neighbour, neighbour)),
    "router of IPv6": (b"\\x33\\x33\\0\\0\\0\\1", V6, lambda n: ipv6(n, all_nodes, 134)),
    "neighbour of IPv6": (b"\\x33\\x33\\0\\0\\0\\1", V6, lambda n: ipv6(n, all_nodes, 135)),
}
with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as wire:
    wire.bind(("eth0", 0))
    for turn in range(3):
        for number, (target, kind, make) in enumerate(frames.values()):
            wire.send(target + OURS + struct.pack("!H", kind) + make(number))
    wire.send(HOST + OURS + struct.pack("!H", IP) + ip(9999, own, neighbour))
print(json.dumps(list(frames)))
"""
"""Program of root in a session's network, which has what nobody inside has: frames of its own."""


@attrs.define
class _Wire:
    """Marks that were seen where none may be, by number, and whether the last one came to the node's end of a link."""

    token: str
    port: int
    seen: dict[int, str] = attrs.field(factory=dict)
    streams: dict[str, str] = attrs.field(factory=dict)
    replies: set[str] = attrs.field(factory=set)
    has_come: trio.Event = attrs.field(factory=trio.Event)

    def note(self, data: bytes, link: str, kind: int) -> None:
        """Note a frame that an interface of the node sends or takes."""
        is_from_session = link.startswith(BRIDGE_LINKS) and kind != _PACKET_OUTGOING
        for number in self.numbers(data):
            if not is_from_session:
                self.seen[number] = f"left by {link}"
            elif number == _LAST:
                self.has_come.set()
        if kind == _PACKET_OUTGOING and link.startswith(BRIDGE_LINKS) and data[12:14] in (_ARP, _IPV6):
            self.replies.add(link)
        is_tcp = data[12:14] == _IPV4 and data[23] == socket.IPPROTO_TCP  # in a header without options, of 20 bytes
        if kind == _PACKET_OUTGOING and is_tcp and int.from_bytes(data[36:38]) == self.port:
            self.streams[socket.inet_ntoa(data[30:34])] = f"left by {link}"

    def numbers(self, data: bytes) -> list[int]:
        """Return the numbers of marks in data."""
        return [int(each) for each in re.findall(self.token.encode() + rb"(\d{4})", data)]

    async def read(self, sock: trio.socket.SocketType) -> None:
        while True:
            data, (link, _protocol, kind, *_) = await sock.recvfrom(65536)
            self.note(data, link, kind)

    async def hear(self, sock: trio.socket.SocketType) -> None:
        """Note what a service of the node hears."""
        while True:
            data = await sock.recv(2048)
            self.seen |= dict.fromkeys(self.numbers(data), "heard by the node")

    async def settle(self, field: Field) -> str:
        """Wait for the last mark. Return whether the node's end of the link had it."""
        with trio.move_on_after(5 * field.patience):
            await self.has_come.wait()
            return "carries"
        return "carried nothing"


@asynccontextmanager
async def _watched(field: Field) -> AsyncIterator[_Wire]:
    """Watch every interface of the node, and listen on a port of all its addresses. Raises `NotApplicable`."""
    if not field.config.may_bridge:
        raise NotApplicable("no session of this installation may have the network mode bridge")
    if os.geteuid() != 0:
        raise NotApplicable("this attack watches the interfaces of the machine, which takes root")
    with (
        trio.socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL)) as packets,
        trio.socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as listener,
    ):
        packets.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        await listener.bind(("::", 0))
        wire = _Wire(secrets.token_hex(8), listener.getsockname()[1])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wire.read, packets)
            nursery.start_soon(wire.hear, listener)
            yield wire
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def _two(field: Field, *allow: str) -> AsyncIterator[tuple[str, str, str]]:
    """Make two sessions with links; yield the attacker's id, its address, and the neighbour's address."""
    network = Network(NetworkMode.BRIDGE, allow=allow)
    async with field.session(network=network) as attacker, field.session(network=network) as neighbour:
        yield attacker, await _address(field, attacker), await _address(field, neighbour)


async def _address(field: Field, session_id: str) -> str:
    program = f"import socket\ns = socket.socket(2, 2)\ns.connect(({_ALLOWED!r}, 9))\nprint(s.getsockname()[0])"
    return (await field.python(session_id, program)).stdout.decode().strip()


def _known_to_the_node(address: str) -> list[str]:
    """Return the node's entries about an address (proc(5), `net/arp`)."""
    lines = Path("/proc/thread-self/net/arp").read_text().splitlines()
    return [line for line in lines if line.split()[0] == address]


@attempt("bridge.reach", "reach the node, its networks and other sessions by a link, under any source",
         "server-side request forgery", ("stays", "carries"))  # fmt: skip
async def reach(field: Field) -> Answers:
    """Without rules of the session's own: what is refused is refused to every session."""
    async with _watched(field) as wire, _two(field) as (attacker, own, neighbour):
        node = own_address()
        beyond = ("255.255.255.255", "224.0.0.1", "169.254.1.1", "ff02::1", "fe80::1", "fd00::1", "2001:db8::1")
        targets = [neighbour, *filter(None, [node]), *not_permitted(field, SPECIAL), *beyond]
        said = [wire.token, str(wire.port), neighbour, *targets]
        await field.python(attacker, f"import sys; sys.argv[1:] = {said!r}\n{_SENDS}")
        link = await wire.settle(field)
        answers = {each: wire.seen.get(number, "stays") for number, each in enumerate(targets)}
        return {**answers, **wire.streams, own: link}


@attempt("bridge.undo", "take address, route, neighbour and device of a link into one's own hands", "network tampering",
         (HELD, "stays", "carries"))  # fmt: skip
async def undo(field: Field) -> Answers:
    names = ("sockets.routes", "sockets.links", "sockets.raw", "sockets.nftables")
    async with _watched(field) as wire, _two(field) as (attacker, own, neighbour):
        result = await field.probe(attacker, *names, timeout_s=10)
        answers = dict.fromkeys(names, "no answer")
        for line in result.stdout.splitlines():
            told = orjson.loads(line)
            answers[str(told["id"])] = HELD if told["verdict"] == HELD else str(told["seen"])
        said = [wire.token, str(wire.port), neighbour, neighbour]
        await field.python(attacker, f"import sys; sys.argv[1:] = {said!r}\n{_SENDS}")
        return {**answers, own: await wire.settle(field), neighbour: wire.seen.get(0, "stays")}


@attempt("bridge.taken-over", "send frames of one's own: sources of others, ARP, IPv6, fragments, source routes",
         "network tampering", ("stays", "carries", "silent", "unchanged"), users=("",))  # fmt: skip
async def send_frames(field: Field) -> Answers:
    """Root in the session's network sends them, as a session would that got such power by a fault of the kernel."""
    allowed = f"{_ALLOWED}:{_ALLOWED_PORT}"
    async with _watched(field) as wire, _two(field, allowed) as (attacker, own, neighbour):
        node, before = own_address() or own, _known_to_the_node(neighbour)
        pid = await _init_of(field, attacker)
        about = {"pid": pid, "own": own, "neighbour": neighbour, "node": node, "out": _ALLOWED}
        said = orjson.dumps({**about, "token": wire.token, "port": wire.port})
        code = [sys.executable, "-I", "-B", "-c", _FRAMES, str(Path(protocol.__file__).parents[2])]
        done = await trio.run_process(code, stdin=said, capture_stdout=True)
        link = await wire.settle(field)
        answers = {each: wire.seen.get(number, "stays") for number, each in enumerate(orjson.loads(done.stdout))}
        is_same = _known_to_the_node(neighbour) == before
        replies = "answers" if wire.replies else "silent"
        return {**answers, own: link, "node": replies, "entry of the neighbour": "unchanged" if is_same else "another"}


async def _init_of(field: Field, session_id: str) -> int:
    part = (await field.supervisor.diagnose(session_id)).parts["record"]
    assert isinstance(part, Mapping)
    return int(part["init"]["pid"])


BRIDGES = (reach, undo, send_frames)
