"""The session's network namespace: loopback, the settings that only the initial user namespace may change, a way out.

The builder runs the first two, inside the namespace. `sys/net` of any `proc` shows the caller's network.

A way out adds no device and no route that leads anywhere: every address becomes one of the loopback's, and a program
steers what is sent there to two sockets, which are answered from outside by whoever is handed them (`network_maker`
runs this part). The link of the program comes last, so nothing is steered before all is there, and it goes with the
last copy of its descriptor. Without it a connection is refused. A step that fails takes back those before it. Where
the kernel has no such programs, `open_proxy` leaves a proxy to those who use one.

Nobody inside can change address, route or program: that takes capabilities in the initial user namespace. The kernel
itself would answer a ping to any address, but nobody has a socket to ping with (`_SETTINGS`).
Sources: netdevice(7), rtnetlink(7), ip(7); Documentation/networking/ip-sysctl.rst;
Documentation/bpf/prog_sk_lookup.rst.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from contextlib import ExitStack

from nsinit.kernel import constants as k
from nsinit.kernel import netlink, steering
from nsinit.kernel.files import write_file
from nsinit.steps import Steps
from nsinit.wire.protocol import NETWORK_STAGE

_SETTINGS = (
    ("ipv4/ip_unprivileged_port_start", "0"),
    # No group may open ICMP sockets: without a network there is nothing to ping, and no cgroup is charged for what
    # waits in such sockets.
    ("ipv4/ping_group_range", "1 0"),
    ("ipv6/conf/all/disable_ipv6", "1"),
    # A sent packet comes back with its time stamp, its data held by the error queue, which no cgroup is charged for.
    ("core/tstamp_allow_data", "0"),
    # Filters, options and memberships of one socket, in bytes.
    ("core/optmem_max", "20480"),
)
_NEWER = ("ipv6/conf/all/disable_ipv6", "core/tstamp_allow_data", "core/optmem_max")
"""Settings that some kernels lack: those without IPv6, and those in which a setting is the whole machine's."""
_IFREQ = struct.Struct("16sh22x")

ADDRESS = "198.18.0.1"
"""The session's own address beside those of its loopback, and that of its name server. Of a range for tests of devices
(RFC 2544), which is nobody's in the internet."""
TCP_PORT = 61080
"""The port that the listener is bound to, outside of the ephemeral range (ip_local_port_range). Connections come to any
port."""
_BACKLOG = 512
_OWN = socket.inet_aton(ADDRESS)
_LO = 1
"""The loopback's index in every network namespace (LOOPBACK_IFINDEX in the kernel)."""
_IFA_ADDRESS, _IFA_LOCAL, _RTA_OIF, _RTA_PREFSRC = 1, 2, 4, 7
_RT_SCOPE_UNIVERSE, _RT_SCOPE_HOST, _RT_TABLE_LOCAL, _RTPROT_STATIC, _RTN_LOCAL = 0, 254, 255, 4, 2
_IFADDRMSG = struct.Struct("=BBBBI")
_RTMSG = struct.Struct("=BBBBBBBBI")


def write_settings(proc: str) -> None:
    """Let every user of the sandbox bind low ports; switch pings and IPv6 off; bound the memory that a socket holds.

    `proc` is the path of a mount of proc. In one that sees many network namespaces each name is looked for among the
    entries of all of them (Linux, fs/proc/proc_sysctl.c, `proc_sys_compare`): with 1000 sessions that took 6 ms.
    """
    for name, value in _SETTINGS:
        try:
            write_file(f"{proc}/sys/net/{name}", value)
        except FileNotFoundError:
            if name not in _NEWER:
                raise


def loopback_up() -> None:
    """Bring `lo` up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
        # A new network namespace has a loopback device that is down (network_namespaces(7)).
        request = fcntl.ioctl(probe, k.SIOCGIFFLAGS, _IFREQ.pack(b"lo", 0))
        flags = _IFREQ.unpack(request)[1] | k.IFF_UP
        fcntl.ioctl(probe, k.SIOCSIFFLAGS, _IFREQ.pack(b"lo", flags))


def open_way_out(netns_fd: int) -> list[int]:
    """Make a way out of the network namespace that this process is in, and return three descriptors: the listener of
    TCP, the socket of DNS, and the link that steers to both.

    Address and route may be there already. Raises `StepFailed`, and then nothing is left that was not there before.
    `EADDRINUSE`: another process has the ports, maybe with an earlier way out.
    """
    steps = Steps()
    with ExitStack() as undo, ExitStack() as passing:
        with steps.step(f"{NETWORK_STAGE}address and route"):
            _add(undo, _own_address(), _local_route())
        with steps.step(f"{NETWORK_STAGE}sockets"):
            listener, resolver = _listen(undo, TCP_PORT)
        with steps.step(f"{NETWORK_STAGE}map"):
            map_fd = steering.make_socket_map(listener, resolver)
            passing.callback(os.close, map_fd)
        with steps.step(f"{NETWORK_STAGE}program"):
            program_fd = steering.load_steering(map_fd, _OWN)
            passing.callback(os.close, program_fd)
        with steps.step(f"{NETWORK_STAGE}link"):
            link_fd = steering.link_to_network(program_fd, netns_fd)
        undo.pop_all()
        return [listener.detach(), resolver.detach(), link_fd]


def forget_way_out() -> None:
    """Take back the address and the route of a way out, if there are any. Raises `OSError`."""
    for _, remove, body in (_local_route(), _own_address()):
        try:
            _remove(remove, body)
        except OSError as error:
            if error.errno not in (errno.ESRCH, errno.EADDRNOTAVAIL):
                raise


def open_proxy() -> list[int]:
    """Make what there can be of a way out where the kernel does not steer, and return two descriptors: the listener at
    the port of the proxy, and the socket of DNS. No other address can be connected to. Raises as `open_way_out`."""
    steps = Steps()
    with ExitStack() as undo:
        with steps.step(f"{NETWORK_STAGE}address"):
            _add(undo, _own_address())
        with steps.step(f"{NETWORK_STAGE}sockets"):
            listener, resolver = _listen(undo, steering.PROXY_PORT)
        undo.pop_all()
        return [listener.detach(), resolver.detach()]


def _listen(undo: ExitStack, port: int) -> tuple[socket.socket, socket.socket]:
    """Listen for connections at a port of the own address, and for questions at that of DNS."""
    listener = undo.enter_context(_socket(socket.SOCK_STREAM))
    # Connections inherit it, so that one to a foreign port keeps no server inside from that port.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((ADDRESS, port))
    listener.listen(_BACKLOG)
    resolver = undo.enter_context(_socket(socket.SOCK_DGRAM))
    resolver.setsockopt(socket.IPPROTO_IP, k.IP_PKTINFO, 1)  # tells which name server was asked (ip(7))
    resolver.bind((ADDRESS, steering.DNS_PORT))
    return listener, resolver


def make_sockets(count: int) -> list[int]:
    """Make TCP sockets in the network namespace that this process is in, for connections to its servers; return their
    descriptors. connect(2) looks for the address in the namespace of the socket, not in that of its caller. Raises
    `StepFailed`, and then none is left."""
    with ExitStack() as undo, Steps().step(f"{NETWORK_STAGE}sockets"):
        sockets = [undo.enter_context(_socket(socket.SOCK_STREAM)) for _ in range(count)]
        undo.pop_all()
        return [each.detach() for each in sockets]


def _socket(kind: socket.SocketKind) -> socket.socket:
    return socket.socket(socket.AF_INET, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


_Addition = tuple[int, int, bytes]
"""Of a thing: the kind of the message that adds it, of the one that removes it, and the body of both."""


def _own_address() -> _Addition:
    body = _IFADDRMSG.pack(socket.AF_INET, 32, 0, _RT_SCOPE_UNIVERSE, _LO)
    body += netlink.attribute(_IFA_LOCAL, _OWN) + netlink.attribute(_IFA_ADDRESS, _OWN)
    return netlink.RTM_NEWADDR, netlink.RTM_DELADDR, body


def _local_route() -> _Addition:
    """Return the route that makes every address one of the loopback's."""
    kind = 0, 0, 0, _RT_TABLE_LOCAL, _RTPROT_STATIC, _RT_SCOPE_HOST, _RTN_LOCAL, 0
    body = _RTMSG.pack(socket.AF_INET, *kind)
    body += netlink.attribute(_RTA_OIF, struct.pack("=I", _LO)) + netlink.attribute(_RTA_PREFSRC, _OWN)
    return netlink.RTM_NEWROUTE, netlink.RTM_DELROUTE, body


def _add(undo: ExitStack, *added: _Addition) -> None:
    flags = netlink.NLM_F_CREATE | netlink.NLM_F_EXCL
    requests = b"".join(netlink.message(add, body, flags) for add, _, body in added)
    statuses = netlink.ask(netlink.NETLINK_ROUTE, requests, len(added))
    for status, (_, remove, body) in zip(statuses, added, strict=True):
        if status == 0:
            undo.callback(_remove, remove, body)
    for status in statuses:
        if status not in (0, errno.EEXIST):
            raise OSError(status, os.strerror(status))


def _remove(kind: int, body: bytes) -> None:
    (status,) = netlink.ask(netlink.NETLINK_ROUTE, netlink.message(kind, body))
    if status:
        raise OSError(status, os.strerror(status))
