"""Rules of nf_tables: the messages that make tables, chains and rules, and the expressions that rules are made of.

Owns the wire format, no policy. All messages of a `commit` take effect together, or none. An expression works on
registers: a loading one puts a value into the first register, and a rule ends at the first comparison that fails.
Sources: linux/netfilter/nf_tables.h, linux/netfilter/nfnetlink.h; nft(8).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from ipaddress import IPv4Network

from nsinit.kernel import netlink

IPV4, NETDEV = 2, 5
"""Families of tables (NFPROTO_IPV4, NFPROTO_NETDEV)."""
INGRESS, INPUT, FORWARD, OUTPUT, POSTROUTING = 0, 1, 2, 3, 4
"""Hooks: the first of NETDEV, the others of IPV4."""
FILTER_PRIORITY, SOURCE_NAT_PRIORITY = 0, 100
DROP, ACCEPT = 0, 1
"""Verdicts."""
ESTABLISHED_OR_RELATED = 2 | 4
"""States of connections (NF_CT_STATE_BIT)."""
UNICAST = 1
"""The type of addresses that a route leads to (RTN_UNICAST), not the host's own, broadcast or multicast ones."""
TO_US = 0
"""The type of packets that are addressed to the host's interface (PACKET_HOST)."""
PROTOCOL, OUTPUT_NAME, INPUT_NAME, TRANSPORT, PACKET_TYPE = 1, 7, 6, 16, 19
"""Facts that `meta` loads: EtherType, names of interfaces, transport protocol, packet type."""

_SUBSYSTEM, _BATCH_BEGIN, _BATCH_END = 10, 0x10, 0x11
_NEW_TABLE, _GET_TABLE, _DEL_TABLE, _NEW_CHAIN, _GET_CHAIN, _DEL_CHAIN, _NEW_RULE, _DEL_RULE = 0, 1, 2, 3, 4, 5, 6, 8
_GENERAL = struct.Struct("!BBH")
_REGISTER, _VERDICT_REGISTER = 1, 0
_EQUAL, _UNEQUAL = 0, 1
_NETWORK_HEADER, _TRANSPORT_HEADER = 1, 2
SOURCE, DESTINATION = 12, 16
"""Places of addresses in an IPv4 header (RFC 791, 3.1)."""
_DESTINATION_PORT = 2

Rule = tuple[bytes, ...]
"""The expressions of a rule, in order."""


def commit(*messages: bytes) -> None:
    """Have all of it take effect, or nothing. Raises `OSError` with the errno of the first message that failed."""
    begin, end = (
        netlink.message(kind, _GENERAL.pack(0, 0, _SUBSYSTEM), asks=False) for kind in (_BATCH_BEGIN, _BATCH_END)
    )
    # One acknowledgement, or the failures: those of hundreds of messages would not fit the socket's buffer.
    *others, last = messages
    asking = bytearray(last)
    struct.pack_into("=H", asking, 6, struct.unpack_from("=H", last, 6)[0] | netlink.NLM_F_ACK)
    netlink.do(netlink.NETLINK_NETFILTER, b"".join((begin, *others, asking, end)))


def tables_of(family: int) -> frozenset[str]:
    """Return the names of the tables of a family. Raises `OSError`."""
    return frozenset(_word(found[1]) for found in _listed(_GET_TABLE, family))


def chains_of(family: int, table: str) -> frozenset[str]:
    """Return the names of the chains of a table, none of one that is not there. Raises `OSError`."""
    return frozenset(_word(found[3]) for found in _listed(_GET_CHAIN, family) if _word(found[1]) == table)


def new_table(family: int, name: str) -> bytes:
    """Return the message that makes a table unless it is there."""
    return _message(_NEW_TABLE, family, _text(1, name), flags=netlink.NLM_F_CREATE)


def delete_table(family: int, name: str) -> bytes:
    return _message(_DEL_TABLE, family, _text(1, name))


def new_chain(
    family: int, table: str, name: str, kind: str, hook: int, priority: int, policy: int = ACCEPT, device: str = ""
) -> bytes:
    """Return the message that makes a chain that packets pass at a hook, at that of `device` if there is one."""
    where = _number(1, hook) + _number(2, priority) + (_text(3, device) if device else b"")
    about = _text(1, table) + _text(3, name) + netlink.nested(4, where) + _number(5, policy) + _text(7, kind)
    return _message(_NEW_CHAIN, family, about, flags=netlink.NLM_F_CREATE)


def delete_chain(family: int, table: str, name: str) -> bytes:
    """Return the message that deletes a chain without rules."""
    return _message(_DEL_CHAIN, family, _text(1, table) + _text(3, name))


def delete_rules(family: int, table: str, chain: str) -> bytes:
    """Return the message that deletes every rule of a chain."""
    return _message(_DEL_RULE, family, _text(1, table) + _text(2, chain))


def new_rule(family: int, table: str, chain: str, rule: Rule) -> bytes:
    """Return the message that appends a rule to a chain."""
    about = _text(1, table) + _text(2, chain) + netlink.nested(4, *rule)
    return _message(_NEW_RULE, family, about, flags=netlink.NLM_F_CREATE | netlink.NLM_F_APPEND)


# Expressions ----------------------------------------------------------------------------------------------------------


def verdict(code: int) -> Rule:
    """End the packet's way through the chain."""
    about = netlink.nested(2, netlink.nested(2, _number(1, code)))
    return (_expression("immediate", _number(1, _VERDICT_REGISTER), about),)


def meta_is(key: int, value: bytes, *, negated: bool = False) -> Rule:
    """Compare the first bytes of a fact about the packet, which the kernel has in its own order."""
    return _expression("meta", _number(1, _REGISTER), _number(2, key)), _compare(value, negated=negated)


def protocol_is(protocol: int) -> Rule:
    """Compare the transport protocol."""
    return meta_is(TRANSPORT, bytes([protocol]))


def set_packet_type(kind: int) -> Rule:
    """Have the packet taken for one of another type."""
    load = _expression("immediate", _number(1, _REGISTER), netlink.nested(2, netlink.attribute(1, bytes([kind]))))
    return load, _expression("meta", _number(2, PACKET_TYPE), _number(3, _REGISTER))


def address_in(place: int, network: IPv4Network, *, negated: bool = False) -> Rule:
    """Compare the address at a place of the header."""
    load = _payload(_NETWORK_HEADER, place, 4)
    mask = _bitwise(network.netmask.packed)
    return load, mask, _compare(network.network_address.packed, negated=negated)


def header_is(place: int, value: bytes, *, negated: bool = False) -> Rule:
    """Compare bytes of the IPv4 header."""
    return _payload(_NETWORK_HEADER, place, len(value)), _compare(value, negated=negated)


def port_is(port: int) -> Rule:
    """Compare the port of the destination, in the first fragment of a packet alone."""
    return _payload(_TRANSPORT_HEADER, _DESTINATION_PORT, 2), _compare(struct.pack("!H", port))


def destination_type_is(kind: int, *, negated: bool = False) -> Rule:
    """Compare the type of the destination in the routing tables."""
    load = _expression("fib", _number(1, _REGISTER), _number(2, 3), _number(3, 2))  # ADDRTYPE, of daddr
    return load, _compare(struct.pack("=I", kind), negated=negated)


def state_is_one_of(states: int) -> Rule:
    """Look whether the state of the packet's connection is one of these."""
    load = _expression("ct", _number(1, _REGISTER), _number(2, 0))
    return load, _bitwise(struct.pack("=I", states)), _compare(bytes(4), negated=True)


def masquerade() -> Rule:
    """Give the packet, and its connection, the address of the interface that it leaves by."""
    return (_expression("masq"),)


def _compare(value: bytes, *, negated: bool = False) -> bytes:
    data = netlink.nested(3, netlink.attribute(1, value))
    return _expression("cmp", _number(1, _REGISTER), _number(2, _UNEQUAL if negated else _EQUAL), data)


def _payload(base: int, offset: int, size: int) -> bytes:
    return _expression("payload", _number(1, _REGISTER), _number(2, base), _number(3, offset), _number(4, size))


def _bitwise(mask: bytes) -> bytes:
    registers = _number(1, _REGISTER) + _number(2, _REGISTER) + _number(3, len(mask))
    values = [netlink.nested(kind, netlink.attribute(1, value)) for kind, value in ((4, mask), (5, bytes(len(mask))))]
    return _expression("bitwise", registers, *values)


def _expression(name: str, *about: bytes) -> bytes:
    return netlink.nested(1, _text(1, name), netlink.nested(2, *about))


def _listed(kind: int, family: int) -> Iterator[dict[int, bytes]]:
    about = _GENERAL.pack(family, 0, 0)
    for body in netlink.dump(netlink.NETLINK_NETFILTER, _SUBSYSTEM << 8 | kind, about):
        yield netlink.attributes_of(body[_GENERAL.size :])


def _word(value: bytes) -> str:
    return value.rstrip(b"\0").decode()


def _message(kind: int, family: int, about: bytes, flags: int = 0) -> bytes:
    return netlink.message(_SUBSYSTEM << 8 | kind, _GENERAL.pack(family, 0, 0) + about, flags, asks=False)


def _text(kind: int, value: str) -> bytes:
    return netlink.attribute(kind, value.encode() + b"\0")


def _number(kind: int, value: int) -> bytes:
    return netlink.attribute(kind, struct.pack("!I", value))
