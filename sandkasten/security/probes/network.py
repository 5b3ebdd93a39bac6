"""Attempts over sockets: out of the session, to a neighbour, into the kernel's network code; and per-process limits.

Runs inside a session; standard library only. Sources: socket(2), address_families(7), netlink(7), packet(7).
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import socket
import struct

from sandkasten.security.probes.attempt import Answers, OutsideFacts, attempt, collect
from sandkasten.security.probes.kernel import answer, call

_NO_WAY = ("ENETUNREACH", "EHOSTUNREACH", "EPERM", "EACCES", "EADDRNOTAVAIL")
_NO_FAMILY = ("EPERM", "EACCES", "EAFNOSUPPORT", "EPROTONOSUPPORT", "ESOCKTNOSUPPORT")
_OUTSIDE = {"documentation": "192.0.2.1", "metadata": "169.254.169.254", "private": "10.0.0.1", "gateway": "172.17.0.1"}
_FAMILIES = {"ALG": 38, "VSOCK": 40, "TIPC": 30, "CAN": 29, "RDS": 21, "BLUETOOTH": 31, "KEY": 15, "XDP": 44, "SMC": 43,
             "X25": 9, "APPLETALK": 5, "NFC": 39, "QIPCRTR": 42, "PPPOX": 24, "PACKET": 17}  # fmt: skip
_NETFILTER, _UEVENT, _ROUTE = 12, 15, 0


def _connect(family: int, address: object, *, kind: int = socket.SOCK_STREAM) -> str:
    def connect() -> None:
        with socket.socket(family, kind) as client:
            client.settimeout(1)
            client.connect(address)  # type: ignore[arg-type]  # its shape is the family's

    return answer(connect)


def _socket(family: int, kind: int, protocol: int) -> None:
    socket.socket(family, kind, protocol).close()


@attempt(
    "sockets.outside",
    "reach the internet, the cloud's metadata service, private networks",
    "server-side request forgery",
    _NO_WAY,
    control="host",
)
def reach_outside(target: OutsideFacts) -> Answers:
    answers = {
        name: _connect(socket.AF_INET, (address, 80), kind=socket.SOCK_DGRAM) for name, address in _OUTSIDE.items()
    }
    answers["IPv6"] = _connect(socket.AF_INET6, ("2001:db8::1", 80), kind=socket.SOCK_DGRAM)
    return {name: "ENETUNREACH" if each == "EAFNOSUPPORT" else each for name, each in answers.items()}


@attempt(
    "sockets.neighbour-port",
    "connect to a port that another session listens on",
    "leak between sessions",
    ("ECONNREFUSED",),
    control="neighbour",
)
def reach_neighbour_port(target: OutsideFacts) -> Answers:
    return {"127.0.0.1": _connect(socket.AF_INET, ("127.0.0.1", target.neighbour_port))}


@attempt(
    "sockets.abstract",
    "connect to an abstract socket of another session or the host",
    "CVE-2020-15257",
    ("ECONNREFUSED",),
    control="neighbour",
)
def reach_abstract(target: OutsideFacts) -> Answers:
    return {target.abstract_name: _connect(socket.AF_UNIX, "\0" + target.abstract_name)}


@attempt(
    "sockets.interfaces",
    "see a network interface besides loopback",
    "network namespace escape",
    ("lo",),
    control="host",
)
def list_interfaces(target: OutsideFacts) -> Answers:
    return {"interfaces": " ".join(sorted(name for _, name in socket.if_nameindex()))}


@attempt("sockets.raw", "open raw and packet sockets", "CVE-2020-14386", ("EPERM", "EACCES"), control="host")
def open_raw(target: OutsideFacts) -> Answers:
    return {
        "packet": answer(_socket, socket.AF_PACKET, socket.SOCK_RAW, 0),
        "raw": answer(_socket, socket.AF_INET, socket.SOCK_RAW, 1),
        "raw IPv6": answer(_socket, socket.AF_INET6, socket.SOCK_RAW, 58),
    }


@attempt(
    "sockets.families",
    "open sockets of rare families, which load kernel modules",
    "CVE-2021-26708",
    _NO_FAMILY,
    layer="seccomp",
)
def open_families(target: OutsideFacts) -> Answers:
    answers = {}
    for name, family in _FAMILIES.items():
        kinds = [answer(_socket, family, kind, 0) for kind in (1, 2, 3, 5)]
        answers[name] = "ok" if "ok" in kinds else next((each for each in kinds if each not in _NO_FAMILY), kinds[0])
    return {name: "EAFNOSUPPORT" if each in ("ESOCKTNOSUPPORT", "EINVAL") else each for name, each in answers.items()}


@attempt(
    "sockets.protocols",
    "open SCTP, DCCP, MPTCP and UDP-Lite, which load kernel modules",
    "CVE-2017-6074",
    _NO_FAMILY,
    layer="seccomp",
)
def open_protocols(target: OutsideFacts) -> Answers:
    protocols = {"SCTP": (1, 132), "DCCP": (6, 33), "MPTCP": (1, 262), "UDP-Lite": (2, 136)}
    return {name: answer(_socket, socket.AF_INET, kind, number) for name, (kind, number) in protocols.items()}


@attempt("sockets.nftables", "make a firewall table", "CVE-2024-1086", ("EPERM", "EAFNOSUPPORT", "EPROTONOSUPPORT"))
def make_table(target: OutsideFacts) -> Answers:
    """One batch: begin, new table, end. The kernel's reply to it is the answer."""
    name = b"evil\0\0\0\0"
    attribute = struct.pack("HH", 4 + 5, 1) + name
    batch = (
        _netlink(16, b"\0\0" + struct.pack(">H", 10), seq=1)
        + _netlink((10 << 8) | 0, bytes([2, 0, 0, 0]) + attribute, flags=0x405, seq=2)
        + _netlink(17, b"\0\0" + struct.pack(">H", 10), seq=3)
    )
    return {"NFT_MSG_NEWTABLE": answer(_ask_netlink, _NETFILTER, batch)}


@attempt(
    "sockets.links",
    "make a network interface, take loopback down",
    "network tampering",
    ("EPERM", "EAFNOSUPPORT", "EPROTONOSUPPORT", "EOPNOTSUPP"),
    control="host",
)
def change_links(target: OutsideFacts) -> Answers:
    new_link, interface = 16, struct.pack("BxHiII", 0, 0, 0, 0, 0)
    kind = struct.pack("HH", 4 + 6, 1) + b"dummy\0\0\0"
    info = struct.pack("HH", 4 + len(kind), 18) + kind
    return {"dummy": answer(_ask_netlink, _ROUTE, _netlink(new_link, interface + info, flags=0x605, seq=1))}


@attempt(
    "sockets.routes",
    "change routes, addresses and settings of the network, take part in foreign connections",
    "network tampering",
    ("EPERM", "EACCES", "EROFS", "EAFNOSUPPORT", "EPROTONOSUPPORT", "EOPNOTSUPP", "ENOENT"),
    control="host",
)
def change_routes(target: OutsideFacts) -> Answers:
    """`IP_TRANSPARENT` is 19 in linux/in.h. The route is into a network for documentation; a file of a setting that is
    not there can't be written."""
    new_route, del_route, del_address, loopback = 24, 25, 21, 1
    route = struct.pack("8BI", socket.AF_INET, 32, 0, 0, 254, 4, 0, 1, 0)
    route += struct.pack("HH4sHHI", 8, 1, socket.inet_aton("192.0.2.9"), 8, 4, loopback)
    address = struct.pack("4BIHH4s", socket.AF_INET, 8, 0, 0, loopback, 8, 2, socket.inet_aton("127.0.0.1"))

    def be_transparent() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as client:
            client.setsockopt(socket.IPPROTO_IP, 19, 1)

    def write(name: str) -> None:
        with open(f"/proc/sys/net/{name}", "r+") as file:
            file.write(file.readline())

    return {
        "new route": answer(_ask_netlink, _ROUTE, _netlink(new_route, route, flags=0x605)),
        "delete route": answer(_ask_netlink, _ROUTE, _netlink(del_route, route, flags=5)),
        "delete address": answer(_ask_netlink, _ROUTE, _netlink(del_address, address, flags=5)),
        "IP_TRANSPARENT": answer(be_transparent),
        **{name: answer(write, name) for name in ("ipv4/icmp_echo_ignore_all", "ipv4/ip_local_port_range")},
    }


@attempt(
    "sockets.uevents",
    "forge a device event for the host's device manager",
    "CVE-2009-1185",
    ("EPERM", "EACCES", "EPROTONOSUPPORT", "ECONNREFUSED"),
)
def forge_uevent(target: OutsideFacts) -> Answers:
    def send() -> None:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _UEVENT) as client:
            client.sendto(b"add@/devices/x\0ACTION=add\0", (0, 1))

    return {"uevent": answer(send)}


def _netlink(kind: int, body: bytes, *, flags: int = 1, seq: int = 1) -> bytes:
    message = struct.pack("IHHII", 16 + len(body), kind, flags, seq, 0) + body
    return message + bytes(-len(message) % 4)


def _ask_netlink(protocol: int, message: bytes) -> None:
    """Send, and raise the first error the kernel reports."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as client:
        client.settimeout(1)
        client.sendto(message, (0, 0))
        reply = client.recv(65536)
        length, kind = struct.unpack_from("IH", reply)
        code = struct.unpack_from("i", reply, 16)[0]
        if kind == 2 and code and length >= 20:  # NLMSG_ERROR
            raise OSError(-code, os.strerror(-code))


# Limits of one process --------------------------------------------------------------------------------------------


@attempt("limits.descriptors", "open descriptors until refused", "exhaustion", ("EMFILE",))
def open_many(target: OutsideFacts) -> Answers:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    first = os.open("/dev/null", os.O_RDONLY)
    for _ in range(200_000):
        reason = answer(os.dup, first)
        if reason != "ok":
            return {"dup": reason}
    return {"dup": "200000 open"}


@attempt(
    "limits.terminals",
    "open terminals until refused",
    "exhaustion of the machine's ptys",
    ("ENOSPC", "EMFILE", "EAGAIN"),
)
def open_terminals(target: OutsideFacts) -> Answers:
    for _ in range(500):
        reason = answer(os.open, "/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
        if reason != "ok":
            return {"ptmx": reason}
    return {"ptmx": "500 open"}


@attempt("limits.inotify", "make inotify instances until refused", "exhaustion of the host's watches", ("EMFILE",))
def watch_many(target: OutsideFacts) -> Answers:
    libc = ctypes.CDLL(None, use_errno=True)
    for _ in range(100_000):
        if libc.inotify_init1(0) < 0:
            return {"inotify": errno.errorcode[ctypes.get_errno()]}
    return {"inotify": "100000 instances"}


@attempt(
    "limits.locked-memory", "lock more memory than allowed", "exhaustion", ("ENOMEM", "EPERM", "EAGAIN"), control="host"
)
def lock_memory(target: OutsideFacts) -> Answers:
    size = 64 << 20
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    area = libc.mmap(None, ctypes.c_size_t(size), 3, 0x22, -1, ctypes.c_long(0))
    if libc.mlock(ctypes.c_void_p(area), ctypes.c_size_t(size)) == 0:
        return {"mlock": "ok"}
    return {"mlock": errno.errorcode[ctypes.get_errno()]}


@attempt(
    "limits.message-queues",
    "hold memory in message queues",
    "exhaustion",
    ("EMFILE", "ENOSPC", "EPERM", "ENOSYS", "ENOMEM"),
)
def fill_queues(target: OutsideFacts) -> Answers:
    attributes = struct.pack("8q", 0, 10, 8192, 0, 0, 0, 0, 0)
    for count in range(2000):
        reason = call("mq_open", b"fill%d" % count, os.O_CREAT | os.O_RDWR, 0o600, attributes)
        if reason != "ok":
            return {"mq_open": reason}
    return {"mq_open": "2000 queues"}


NETWORK = collect(globals())
