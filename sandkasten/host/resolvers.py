"""The machine's name servers that another network namespace can ask: those of resolv.conf(5) that are no loopback's."""

from __future__ import annotations

from collections.abc import Iterable

from egress.addresses import name_servers

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
    found = [each for each in name_servers(lines) if each.version == 4]
    return tuple(str(each) for each in found if not each.is_loopback and not each.is_unspecified)[:_MOST]
