"""The session's network namespace: loopback and the settings that only the initial user namespace may change.

The builder runs it, inside the namespace, through the host's `/proc`, whose `sys/net` shows the caller's network.
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
    ("ipv4/ping_group_range", "{base} {last}"),
    ("ipv6/conf/all/disable_ipv6", "1"),
)
_IFREQ = struct.Struct("16sh22x")


def write_settings(base_id: int) -> None:
    """Let every user of the sandbox bind low ports and send pings; switch IPv6 off. Group ids are host ids here."""
    for name, template in _SETTINGS:
        value = template.format(base=base_id, last=base_id + 65535)
        try:
            write_file(f"/proc/sys/net/{name}", value)
        except FileNotFoundError:
            if not name.startswith("ipv6"):  # a kernel without IPv6 has nothing to switch off
                raise


def loopback_up() -> None:
    """Bring `lo` up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
        # A new network namespace has a loopback device that is down (network_namespaces(7)).
        request = fcntl.ioctl(probe, k.SIOCGIFFLAGS, _IFREQ.pack(b"lo", 0))
        flags = _IFREQ.unpack(request)[1] | k.IFF_UP
        fcntl.ioctl(probe, k.SIOCSIFFLAGS, _IFREQ.pack(b"lo", flags))
