"""Addresses that nobody may reach through a way out: a table of special ranges with their RFCs, and this host's own.

The table is ours because `ipaddress.is_global` differs between versions of Python, and is true of addresses that hold
a private one (64:ff9b::10.0.0.1). Sources are IANA's special-purpose address registries, which RFC 6890 and RFC 8190
describe. Ranges that the registries call globally reachable are refused, too: they are for infrastructure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

from egress.policy import Address, Network, unwrapped

SPECIAL_V4: Mapping[str, str] = {
    "0.0.0.0/8": "this network (RFC 791, 3.2); Linux connects 0.0.0.0 to the host itself",
    "10.0.0.0/8": "private use (RFC 1918)",
    "100.64.0.0/10": "shared by carriers (RFC 6598)",
    "127.0.0.0/8": "loopback (RFC 1122, 3.2.1.3)",
    "168.63.129.16/32": "a cloud's metadata and agents: public by registration, answered by the machine's own host",
    "169.254.0.0/16": "link local, metadata of clouds among it (RFC 3927)",
    "172.16.0.0/12": "private use (RFC 1918)",
    "192.0.0.0/24": "protocol assignments (RFC 6890, 2.1)",
    "192.0.2.0/24": "documentation (RFC 5737)",
    "192.31.196.0/24": "AS112 (RFC 7535)",
    "192.52.193.0/24": "multicast tunnels (RFC 7450)",
    "192.88.99.0/24": "relays of 6to4 (RFC 7526)",
    "192.168.0.0/16": "private use (RFC 1918)",
    "192.175.48.0/24": "AS112 (RFC 7534)",
    "198.18.0.0/15": "benchmarks (RFC 2544), and names of sessions here",
    "198.51.100.0/24": "documentation (RFC 5737)",
    "203.0.113.0/24": "documentation (RFC 5737)",
    "224.0.0.0/4": "multicast (RFC 5771)",
    "240.0.0.0/4": "reserved (RFC 1112, 4), and the broadcast address (RFC 919)",
}
UNICAST_V6 = "2000::/3"
"""The one range of global unicast (RFC 4291, 2.4): outside are loopback, IPv4-compatible addresses, NAT64
(64:ff9b::/96, RFC 6052; 64:ff9b:1::/48, RFC 8215), discard (100::/64, RFC 6666), segment routing (5f00::/16, RFC 9602),
unique local (fc00::/7, RFC 4193), link and site local (fe80::/10, fec0::/10) and multicast (ff00::/8)."""

SPECIAL_V6: Mapping[str, str] = {
    "2001::/23": "protocol assignments (RFC 2928): Teredo (RFC 4380), ORCHID (RFC 7343) and others",
    "2001:db8::/32": "documentation (RFC 3849)",
    "2002::/16": "6to4, which holds an IPv4 address (RFC 3056)",
    "2620:4f:8000::/48": "AS112 (RFC 7534)",
    "3ffe::/16": "the 6bone, given back (RFC 3701)",
    "3fff::/20": "documentation (RFC 9637)",
}
_V4 = [(IPv4Network(text), meaning) for text, meaning in SPECIAL_V4.items()]
_V6 = [(IPv6Network(text), meaning) for text, meaning in SPECIAL_V6.items()]
_UNICAST_V6 = IPv6Network(UNICAST_V6)
_UNSPECIFIED = (IPv4Address(0), IPv6Address(0))


class AddressCheck:
    """Refusal of addresses that are special, or of this host.

    `permit` holds the operator's networks, the only exception. An address of this host outside of loopback needs a
    permit for itself alone: who permits 10.0.0.0/8 for a mirror means no service of the host. `own` is read at each
    check, so its owner may change the contents; IPv6 addresses in it have no zone.
    """

    def __init__(self, permit: Sequence[Network], own: Collection[Address]) -> None:
        self._permit, self._own = tuple(permit), own

    def refusal(self, address: Address) -> str | None:
        """Return a sentence on why an address may not be dialled, or None."""
        address = unwrapped(address)
        if isinstance(address, IPv6Address) and address.scope_id is not None:
            return f"{address} has a zone"  # and would differ from the same address without
        permits = [network for network in self._permit if address in network]
        if (address in self._own and not address.is_loopback) or address in _UNSPECIFIED:
            is_named = any(network.prefixlen == network.max_prefixlen for network in permits)
            return None if is_named else f"{address} is an address of this host"
        return None if permits else special_range(address)


@lru_cache(4096)
def special_range(address: Address) -> str | None:
    """Return a sentence that names the special range of an address, or None for a public address."""
    address = unwrapped(address)
    if isinstance(address, IPv6Address) and address not in _UNICAST_V6:
        return f"{address} is outside of {UNICAST_V6}, the global addresses (RFC 4291, 2.4)"
    for network, meaning in _V4 if isinstance(address, IPv4Address) else _V6:
        if address in network:
            return f"{address} is in {network}: {meaning}"
    return None


def name_servers(lines: Iterable[str]) -> Sequence[Address]:
    """Return the addresses that lines of resolv.conf(5) name as servers, in their order. What is no address is passed
    over, as the C library does."""
    found = []
    for words in map(str.split, lines):
        if len(words) > 1 and words[0] == "nameserver":
            try:
                found.append(ip_address(words[1].partition("%")[0]))
            except ValueError:
                continue
    return found
