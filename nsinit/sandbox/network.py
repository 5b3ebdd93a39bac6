"""The session's network namespace: loopback and the settings that only the initial user namespace may change.

The builder runs it, inside the namespace. `sys/net` of any `proc` shows the caller's network.
Sources: netdevice(7); Documentation/networking/ip-sysctl.rst.
"""

from __future__ import annotations

import fcntl
import socket
import struct

from nsinit.kernel import constants as k
from nsinit.kernel.files import write_file

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
