"""The machine's name servers that another network namespace can ask: those of resolv.conf(5) that are no loopback's."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import AddressValueError, IPv4Address

_FILES = "/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"
"""The second has the servers that a resolver on the loopback asks itself (systemd-resolved.service(8))."""
_MOST = 3
"""Name servers that the C library asks (MAXNS, resolv.conf(5))."""


def machine_resolvers() -> tuple[str, ...]:
    """Return the IPv4 addresses of the machine's name servers, none if all are on its loopback. Blocking."""
    for path in _FILES:
        try:
            with open(path, errors="replace") as file:
                found = usable(file)
        except OSError:
            continue
        if found:
            return found
    return ()


def usable(lines: Iterable[str]) -> tuple[str, ...]:
    """Return the servers that lines of resolv.conf(5) name and that may be asked from elsewhere."""
    found = []
    for words in map(str.split, lines):
        if len(words) > 1 and words[0] == "nameserver":
            try:
                address = IPv4Address(words[1])
            except AddressValueError:
                continue
            if not address.is_loopback and not address.is_unspecified:
                found.append(str(address))
    return tuple(found[:_MOST])
