"""Trials of networks: the loopback that every session has, and the parts of a network that reaches out.

Each in a network namespace of the trial's own. Sources: netdevice(7), netlink(7), rtnetlink(7), sock_diag(7);
linux/netfilter/nf_tables.h; linux/veth.h;
linux/inet_diag.h.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

from nsinit.kernel import constants as k
from nsinit.kernel import syscalls
from nsinit.sandbox import network
from nsinit.tools.trials.attempt import FallsBack, Room

_NETLINK_ROUTE, _NETLINK_SOCK_DIAG, _NETLINK_NETFILTER = 0, 4, 12
_NLMSG_ERROR = 2
_NLM_F_REQUEST, _NLM_F_ACK, _NLM_F_EXCL, _NLM_F_CREATE = 0x1, 0x4, 0x200, 0x400
_NLA_F_NESTED = 0x8000
_RTM_NEWLINK = 16
_IFLA_LINKINFO, _IFLA_INFO_KIND = 18, 1
_NFNL_MSG_BATCH_BEGIN, _NFNL_MSG_BATCH_END, _NFNL_SUBSYS_NFTABLES = 16, 17, 10
_NFT_MSG_NEWTABLE, _NFTA_TABLE_NAME, _NFPROTO_INET = 0, 1, 1
_NLM_F_DUMP = 0x300
_TCPDIAG_GETSOCK, _TCP_LISTEN = 18, 10
_LISTENERS = struct.Struct("=Bxxx48xI4x")
"""Of inet_diag_req: family, states."""
_LISTENER = struct.Struct("=BBxx2s")
_OTHER_WAY = "/proc/net/tcp is read instead"
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")


def loopback(_room: Room) -> str:
    """Try settings and device as a session gets them, and a connection over the loopback."""
    syscalls.unshare(k.CLONE_NEWNET)
    network.write_settings("/proc")
    network.loopback_up()
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=2).close()
    try:
        socket.create_connection(("192.0.2.1", 9), timeout=2).close()
    except OSError:
        return "connected over the loopback of a new network, and to nowhere else"
    raise OSError(0, "a new network reached another one")


def socket_diag(_room: Room) -> str:
    """Ask for listening sockets as PID 1 of a sandbox does, and find one of the trial's own among them."""
    message = _HEADER.pack(_HEADER.size + _LISTENERS.size, _TCPDIAG_GETSOCK, _NLM_F_REQUEST | _NLM_F_DUMP, 1, 0)
    message += _LISTENERS.pack(socket.AF_INET, 1 << _TCP_LISTEN)
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as channel,
        ):
            channel.settimeout(2)
            channel.send(message)
            answer, port = channel.recv(65536), server.getsockname()[1]
    except OSError as error:
        raise FallsBack(f"sock_diag: {error}; {_OTHER_WAY}") from error
    # inet_diag_msg begins with the family, the state, two counters and the source port.
    found = (_LISTENER.unpack_from(answer, start + _HEADER.size) for start in _starts(answer))
    if (socket.AF_INET, _TCP_LISTEN, port.to_bytes(2, "big")) not in found:
        raise FallsBack(f"sock_diag: does not tell of a listening socket; {_OTHER_WAY}")
    return "asked the kernel for the sockets that listen"


def _starts(answer: bytes) -> Iterator[int]:
    """Yield the offset of each answer of sock_diag in a datagram of netlink."""
    start = 0
    while start + _HEADER.size + _LISTENER.size <= len(answer):
        if _HEADER.unpack_from(answer, start)[1] == _TCPDIAG_GETSOCK:
            yield start
        start += max(_HEADER.unpack_from(answer, start)[0] + 3 & ~3, _HEADER.size)


def veth(_room: Room) -> str:
    syscalls.unshare(k.CLONE_NEWNET)
    kind = _attribute(_IFLA_LINKINFO | _NLA_F_NESTED, _attribute(_IFLA_INFO_KIND, b"veth"))
    message = _message(_RTM_NEWLINK, struct.pack("=BxHiII", 0, 0, 0, 0, 0) + kind, _NLM_F_CREATE | _NLM_F_EXCL)
    _ask(_NETLINK_ROUTE, message, "veth")
    return "made a pair of devices"


def nftables(_room: Room) -> str:
    syscalls.unshare(k.CLONE_NEWNET)
    family = struct.pack("=BBH", 0, 0, socket.htons(_NFNL_SUBSYS_NFTABLES))
    table = struct.pack("=BBH", _NFPROTO_INET, 0, 0) + _attribute(_NFTA_TABLE_NAME, b"sandkasten\0")
    kind = _NFNL_SUBSYS_NFTABLES << 8 | _NFT_MSG_NEWTABLE
    batch = _message(_NFNL_MSG_BATCH_BEGIN, family, 0, asks=False) + _message(kind, table, _NLM_F_CREATE)
    _ask(_NETLINK_NETFILTER, batch + _message(_NFNL_MSG_BATCH_END, family, 0, asks=False), "nftables")
    return "made a table of rules"


def _ask(family: int, data: bytes, what: str) -> None:
    """Send a request and read its acknowledgement."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, family) as channel:
            channel.settimeout(2)
            channel.send(data)
            answer = channel.recv(65536)
    except OSError as error:
        raise FallsBack(f"{what}: {error}") from error
    kind = _HEADER.unpack_from(answer)[1]
    (status,) = struct.unpack_from("=i", answer, _HEADER.size)
    if kind != _NLMSG_ERROR or status:
        raise FallsBack(f"{what}: {os.strerror(-status)}")


def _message(kind: int, body: bytes, flags: int, *, asks: bool = True) -> bytes:
    flags |= _NLM_F_REQUEST | (_NLM_F_ACK if asks else 0)
    return _HEADER.pack(_HEADER.size + len(body), kind, flags, 1, 0) + body + bytes(-len(body) % 4)


def _attribute(kind: int, value: bytes) -> bytes:
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + bytes(-len(value) % 4)
