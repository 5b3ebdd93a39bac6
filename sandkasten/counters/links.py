"""Byte counters of links, as the kernel keeps them for the network namespace of this process (proc_pid_net(5))."""

from __future__ import annotations

from sandkasten.model.network import NetworkCounters

_DEVICES = "/proc/self/net/dev"
_TO_SESSION = 8
"""The place of the bytes that were sent, behind those of what was received."""


def read_link(link: str) -> NetworkCounters:
    """Return what passed the host's end of a session's link, whose `up` are bytes that the host received, refused ones
    among them; all are 0 without the link."""
    with open(_DEVICES) as file:
        for line in file:
            name, _, numbers = line.partition(":")
            if name.strip() == link:
                values = numbers.split()
                return NetworkCounters(bytes_up=int(values[0]), bytes_down=int(values[_TO_SESSION]))
    return NetworkCounters()
