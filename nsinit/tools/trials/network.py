"""Trials of networks: the loopback that every session has, and the parts of a network that reaches out.

Each in a network namespace of the trial's own. Sources: netdevice(7), netlink(7), rtnetlink(7), sock_diag(7);
linux/inet_diag.h.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from ipaddress import IPv4Address

from nsinit.kernel import constants as k
from nsinit.kernel import netlink, syscalls
from nsinit.kernel.files import write_file
from nsinit.sandbox import bridge as links
from nsinit.sandbox import network
from nsinit.steps import StepFailed
from nsinit.tools.trials.attempt import FallsBack, Room
from nsinit.wire.protocol import BridgeTerms

_TCPDIAG_GETSOCK, _TCP_LISTEN = 18, 10
_LISTENERS = struct.Struct("=Bxxx48xI4x")
"""Of inet_diag_req: family, states."""
_LISTENER = struct.Struct("=BBxx2s")
_OTHER_WAY = "/proc/net/tcp is read instead"
_FOREIGN = ("192.0.2.1", 443)
"""An address for documentation (RFC 5737)."""
_HOST, _WORLD, _RANGE = IPv4Address("192.0.2.2"), IPv4Address("192.0.2.3"), "198.51.100.0/24"


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
    message = netlink.HEADER.pack(
        netlink.HEADER.size + _LISTENERS.size, _TCPDIAG_GETSOCK, netlink.NLM_F_REQUEST | netlink.NLM_F_DUMP, 1, 0
    )
    message += _LISTENERS.pack(socket.AF_INET, 1 << _TCP_LISTEN)
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.socket(
                socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, netlink.NETLINK_SOCK_DIAG
            ) as channel,
        ):
            channel.settimeout(2)
            channel.send(message)
            answer, port = channel.recv(65536), server.getsockname()[1]
    except OSError as error:
        raise FallsBack(f"sock_diag: {error}; {_OTHER_WAY}") from error
    # inet_diag_msg begins with the family, the state, two counters and the source port.
    found = (_LISTENER.unpack_from(answer, start + netlink.HEADER.size) for start in _starts(answer))
    if (socket.AF_INET, _TCP_LISTEN, port.to_bytes(2, "big")) not in found:
        raise FallsBack(f"sock_diag: does not tell of a listening socket; {_OTHER_WAY}")
    return "asked the kernel for the sockets that listen"


def _starts(answer: bytes) -> Iterator[int]:
    """Yield the offset of each answer of sock_diag in a datagram of netlink."""
    start = 0
    while start + netlink.HEADER.size + _LISTENER.size <= len(answer):
        if netlink.HEADER.unpack_from(answer, start)[1] == _TCPDIAG_GETSOCK:
            yield start
        start += max(netlink.HEADER.unpack_from(answer, start)[0] + 3 & ~3, netlink.HEADER.size)


def sk_lookup(_room: Room) -> str:
    """Open a way out of a network as for a session, and have a connection to a foreign address arrive there."""
    syscalls.unshare(k.CLONE_NEWNET)
    network.write_settings("/proc")  # else the port of DNS takes a capability that a service does not have
    network.loopback_up()
    netns_fd = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        tcp_fd, udp_fd, link_fd = network.open_way_out(netns_fd)
    except StepFailed as error:
        raise FallsBack(f"{error.stage}: {error}") from error
    finally:
        os.close(netns_fd)
    os.close(udp_fd)
    with socket.socket(fileno=tcp_fd) as listener, socket.create_connection(_FOREIGN, timeout=2):
        listener.settimeout(2)
        connection, _ = listener.accept()
        with connection:
            asked_for = connection.getsockname()
    os.close(link_fd)
    if asked_for != _FOREIGN:
        raise FallsBack(f"a connection to {_FOREIGN[0]} arrived as one to {asked_for[0]}")
    return "a connection to a foreign address arrived at a listener of ours"


def bridge(_room: Room) -> str:
    """Give a network a link out through another one, as a session gets it, and send a datagram to a third."""
    session_fd, world_fd, host_fd = (_new_network() for _ in range(3))  # and stay in the last
    try:
        links.make_pair("up0", world_fd)
        links.set_up_session(_HOST, "up0")
        links.join("up0", _WORLD)
        write_file("/proc/sys/net/ipv4/conf/up0/forwarding", "1")
        syscalls.setns(world_fd, k.CLONE_NEWNET)
        links.set_up_session(_WORLD)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as hears:
            hears.bind((str(_WORLD), 0))
            hears.settimeout(2)
            syscalls.setns(host_fd, k.CLONE_NEWNET)
            terms = BridgeTerms(_RANGE, ("127.0.0.0/8",), ())
            links.open_bridge(links.NodeNames("skb"), "skb0", terms, (), (), netns_fd=session_fd, host_fd=host_fd)
            syscalls.setns(session_fd, k.CLONE_NEWNET)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sends:
                sends.sendto(b"hello", hears.getsockname())
            source = hears.recvfrom(16)[1][0]
    except (StepFailed, OSError) as error:
        raise FallsBack(f"{getattr(error, 'stage', 'link')}: {error}") from error
    if source != str(_HOST):
        raise FallsBack(f"a session's datagram came out under {source}, and not under the host's address")
    return "a session's datagram came out under the host's address"


def _new_network() -> int:
    syscalls.unshare(k.CLONE_NEWNET)
    network.loopback_up()
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
