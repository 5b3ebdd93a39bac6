"""The network mode `bridge`: a pair of links from the host's network into a session's, and rules on the host's end.

The host's end has the rules of its session, at the first place that a packet comes to: source, special addresses, the
host's own, those of other sessions, the session's rules. What they let through they address to the host's interface.
The session addresses its packets to no interface at all, so without these rules the kernel drops every one but
multicast and broadcast, which services of the host may hear: rules that are lost, as by a firewall that flushes all
tables, close the way. A second table, of the node, has the translation of
addresses, and lets answers in and nothing else.

The kernel is the record of what there is: links, routes and tables have names that begin with the node's. An address
is taken by the route to it, which is made last. Functions run in the host's network namespace (`helpers/bridge_maker`)
and enter a session's for a part. Nothing is written to settings of the host's other interfaces.
Sources: veth(4), rtnetlink(7), ip(7), icmp(7); Documentation/networking/ip-sysctl.rst; `kernel/nftables.py`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import struct
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

from nsinit.kernel import constants as k
from nsinit.kernel import netlink, nftables, syscalls
from nsinit.kernel.files import write_file
from nsinit.sandbox import network
from nsinit.steps import Steps
from nsinit.wire.protocol import BRIDGE_LINKS, NETWORK_STAGE, BridgeRule, BridgeTerms

SESSION_LINK = "eth0"
GATEWAY = IPv4Address("169.254.1.1")
"""The next hop of every session, by a fixed neighbour entry: a link-local address (RFC 3927) that no interface has."""
PING_GROUPS, NO_PING_GROUPS = "0 2147483647", "1 0"
"""Groups that may open sockets for pings (icmp(7)): all, none."""
DNS_PORT = 53
DNS_PROTOCOLS = PORT_PROTOCOLS = (socket.IPPROTO_UDP, socket.IPPROTO_TCP)

_FAMILIES = nftables.NETDEV, nftables.IPV4
_HOST_MAC, _SESSION_MAC, _NO_MAC = (bytes((2, 0x73, 0x6B, 0x62, 0, each)) for each in (1, 2, 3))
"""Addresses of both ends, and one that no interface has; locally administered (IEEE 802)."""
_IP = struct.pack("!H", 0x0800)
_NO_OPTIONS = b"\x45"
"""The first byte of a header without options (RFC 791, 3.1): those could name a way around the destination."""

_LINK = struct.Struct("=BxHiII")
_ADDRESS = struct.Struct("=BBBBI")
_ROUTE = struct.Struct("=BBBBBBBBI")
_NEIGHBOUR = struct.Struct("=B3xiHBB")
"""`struct ifinfomsg`, `ifaddrmsg`, `rtmsg`, `ndmsg`."""
_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_OPERSTATE, _IFLA_LINKINFO, _IFLA_NET_NS_FD = 1, 3, 16, 18, 28
_IFLA_INFO_KIND, _IFLA_INFO_DATA, _VETH_INFO_PEER = 1, 2, 1
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_RTA_DST, _RTA_OIF, _RTA_GATEWAY, _RTA_PRIORITY, _RTA_PREFSRC = 1, 4, 5, 6, 7
_RT_TABLE_MAIN, _RTPROT_STATIC, _RTN_UNICAST = 254, 4, 1
_RT_SCOPE_UNIVERSE, _RT_SCOPE_LINK = 0, 253
_NDA_DST, _NDA_LLADDR, _NUD_PERMANENT = 1, 2, 0x80
_CREATE = netlink.NLM_F_CREATE | netlink.NLM_F_EXCL
_IF_OPER_UP = bytes([6])
_ACTIVE_S, _ACTIVE_PAUSE_S = 2.0, 0.001
_INTEGER = struct.Struct("=I")


@dataclass(frozen=True, slots=True)
class NodeNames:
    """The names of the links and the table that one node has in the host's network."""

    links: str
    """The beginning of every link's."""

    @property
    def table(self) -> str:
        return f"sandkasten-{self.links}"

    def link_of(self, session_id: str) -> str:
        """Return the name of the host's end of a session's pair: 15 characters, the most there may be (IFNAMSIZ)."""
        return self.links + hashlib.sha256(session_id.encode()).hexdigest()[:8]


def names_of(node_id: str) -> NodeNames:
    """Return the names that a node gives to its network devices and tables: a digest of its id, so that two nodes
    differ."""
    return NodeNames(BRIDGE_LINKS + hashlib.sha256(node_id.encode()).hexdigest()[:4])


def links_of(names: NodeNames) -> frozenset[str]:
    """Return the links of a node in the network namespace that this process is in. Raises `OSError`."""
    return frozenset(name for _, name in socket.if_nameindex() if name.startswith(names.links))


def open_bridge(
    names: NodeNames,
    link: str,
    terms: BridgeTerms,
    allow: Collection[BridgeRule],
    deny: Collection[BridgeRule],
    *,
    netns_fd: int,
    host_fd: int,
) -> None:
    """Give a session a link out, or the one that it has other rules. Raises `StepFailed`: then nothing is there that
    was not there before, and the rules are those of before."""
    steps, prefix = Steps(), IPv4Network(terms.range)
    with ExitStack() as undo:
        with steps.step(f"{NETWORK_STAGE}routes"):
            view = _HostRoutes.read(names)
            address = view.address_of(link)
            if address is None:  # a link that is there lives on: range and settings are those for new ones
                view.check(prefix)
        is_new = address is None
        if address is None:
            address = view.free_address(prefix)
            with steps.step(f"{NETWORK_STAGE}link"):
                undo.callback(close_bridge, names, link)
                close_bridge(names, link)  # half of one that was being made when its maker was killed
                make_pair(link, netns_fd)
                _set_up_link(link)
        ours = view.networks_of_sessions(prefix)
        rules = _rules(address, ours, terms, allow, deny)
        with steps.step(f"{NETWORK_STAGE}rules"):
            nftables.commit(*_node_table(names, ours, terms))
            _put_rules(names, link, rules)
        if is_new:
            with steps.step(f"{NETWORK_STAGE}session"), _in_network(netns_fd, host_fd):
                set_up_session(address)
            with steps.step(f"{NETWORK_STAGE}host"):
                join(link, address)
            with steps.step(f"{NETWORK_STAGE}earlier way out"), _in_network(netns_fd, host_fd):
                _wait_active()
                network.forget_way_out()
        undo.pop_all()


def close_bridge(names: NodeNames, link: str) -> None:
    """Remove a link and its rules, and the node's tables with the last link. Idempotent. Raises `OSError`."""
    index = _index_of(link)
    if index is not None:
        with _unless(errno.ENODEV):  # the session's network has just ended
            netlink.do(netlink.NETLINK_ROUTE, netlink.message(netlink.RTM_DELLINK, _LINK.pack(0, 0, index, 0, 0)))
    table = nftables.NETDEV, names.table
    # Some kernels have deleted it together with the link.
    with _unless(errno.ENOENT):
        nftables.commit(nftables.delete_rules(*table, link), nftables.delete_chain(*table, link))
    if not links_of(names):
        for family in _FAMILIES:
            with _unless(errno.ENOENT):
                nftables.commit(nftables.delete_table(family, names.table))


def forbid_pings(netns_fd: int, host_fd: int) -> None:
    """Put a session's network back to what it is without a bridge. Raises `OSError`."""
    with _in_network(netns_fd, host_fd):
        _set("ping_group_range", NO_PING_GROUPS)


def sweep(names: NodeNames, kept: Collection[str]) -> None:
    """Remove every link of the node that is not to be kept, with its rules, and the rules of links that the kernel has
    removed. Raises `OSError`."""
    for link in (links_of(names) | lone_rules_of(names)).difference(kept):
        close_bridge(names, link)


def lone_rules_of(names: NodeNames) -> frozenset[str]:
    """Return the links that rules of the node are for and that are there no more: the kernel removes a link with the
    network of its session, and not always its chain. Of a node without links every table is such a rule. Raises
    `OSError`."""
    links = links_of(names)
    chains = nftables.chains_of(nftables.NETDEV, names.table)
    is_lone = not links and any(names.table in nftables.tables_of(family) for family in _FAMILIES)
    return (chains | {names.links} if is_lone else chains) - links


# Routes ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _HostRoutes:
    """The host's IPv4 routes: those of the node's sessions by link, the networks of all others, and the interface of
    the route to everywhere."""

    sessions: dict[str, IPv4Address]
    others: list[IPv4Network]
    way_out: str | None

    @classmethod
    def read(cls, names: NodeNames) -> _HostRoutes:
        links = dict(socket.if_nameindex())
        sessions, others, defaults = {}, [], []
        for body in netlink.dump(netlink.NETLINK_ROUTE, netlink.RTM_GETROUTE, _ROUTE.pack(socket.AF_INET, *[0] * 8)):
            _family, bits, _, _, table, *_, kind, _flags = _ROUTE.unpack_from(body)
            found = netlink.attributes_of(body[_ROUTE.size :])
            if table != _RT_TABLE_MAIN or kind != _RTN_UNICAST:
                continue
            link = links.get(_INTEGER.unpack(found[_RTA_OIF])[0], "") if _RTA_OIF in found else ""
            if not bits:
                (metric,) = _INTEGER.unpack(found.get(_RTA_PRIORITY, bytes(4)))
                defaults.append((metric, link))
            elif link.startswith(names.links):
                sessions[link] = IPv4Address(found[_RTA_DST])
            else:
                others.append(IPv4Network((found[_RTA_DST], bits)))
        return cls(sessions, others, min(defaults)[1] if defaults else None)

    def check(self, prefix: IPv4Network) -> None:
        """Raise `OSError` unless the host can carry packets of addresses of `prefix`, and nobody else has those."""
        taken = next((str(each) for each in self.others if each.overlaps(prefix)), None)
        if taken is not None:
            raise OSError(errno.EADDRINUSE, f"isolation.bridge_range {prefix} overlaps the host's route to {taken}")
        if not self.way_out:
            raise OSError(errno.ENETUNREACH, "the host has no default route by one interface")
        with open(f"/proc/sys/net/ipv4/conf/{self.way_out}/forwarding", "rb") as file:
            forwards = file.read().strip() == b"1"
        if not forwards:
            setting = f"net.ipv4.conf.{self.way_out}.forwarding"
            raise OSError(errno.EHOSTUNREACH, f"the host takes no answers for sessions: set {setting}=1 (sysctl(8))")

    def address_of(self, link: str) -> IPv4Address | None:
        """Return the address of the session with this link."""
        return self.sessions.get(link)

    def networks_of_sessions(self, prefix: IPv4Network) -> Sequence[IPv4Network]:
        """Return the networks of sessions' addresses: of new ones, and of each that has one of an earlier range."""
        return prefix, *(IPv4Network(each) for each in self.sessions.values() if each not in prefix)

    def free_address(self, prefix: IPv4Network) -> IPv4Address:
        """Return an address that no session has. By chance: connections of the one that had it last may be known to the
        kernel still. Raises `OSError`: none is left."""
        taken, count = set(self.sessions.values()), prefix.num_addresses - 2
        start = int.from_bytes(os.urandom(8), "little")
        for step in range(len(taken) + 1):
            address = prefix[1 + (start + step) % count]
            if address not in taken:
                return address
        raise OSError(errno.EADDRNOTAVAIL, f"every address of isolation.bridge_range {prefix} is a session's")


# Links ----------------------------------------------------------------------------------------------------------------


def make_pair(link: str, netns_fd: int) -> None:
    """Make both ends, which are down, one of them in the session's network."""
    peer = _LINK.pack(0, 0, 0, 0, 0) + _name(SESSION_LINK) + netlink.attribute(_IFLA_ADDRESS, _SESSION_MAC)
    peer += netlink.attribute(_IFLA_NET_NS_FD, _INTEGER.pack(netns_fd))
    kind = netlink.attribute(_IFLA_INFO_KIND, b"veth")
    about = netlink.nested(_IFLA_INFO_DATA, netlink.attribute(_VETH_INFO_PEER | netlink.NLA_F_NESTED, peer))
    body = _LINK.pack(0, 0, 0, 0, 0) + _name(link) + netlink.attribute(_IFLA_ADDRESS, _HOST_MAC)
    body += netlink.nested(_IFLA_LINKINFO, kind, about)
    netlink.do(netlink.NETLINK_ROUTE, netlink.message(netlink.RTM_NEWLINK, body, _CREATE))


def _set_up_link(link: str) -> None:
    """Let the host forward what comes from this link alone, from an address that the link leads to. The session has no
    router, no ARP, and no IPv6 there."""
    for name, value in (("forwarding", "1"), ("rp_filter", "1"), ("send_redirects", "0"), ("accept_redirects", "0")):
        _set(f"conf/{link}/{name}", value)
    with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
        write_file(f"/proc/sys/net/ipv6/conf/{link}/disable_ipv6", "1")


def set_up_session(address: IPv4Address, link: str = SESSION_LINK) -> None:
    """Give the network that this process is in an address, and a way to everywhere by a link. Raises `OSError`."""
    index = socket.if_nametoindex(link)
    own, gateway = address.packed, GATEWAY.packed
    place = netlink.attribute(_IFA_LOCAL, own) + netlink.attribute(_IFA_ADDRESS, own)
    netlink.do(
        netlink.NETLINK_ROUTE,
        netlink.message(
            netlink.RTM_NEWADDR, _ADDRESS.pack(socket.AF_INET, 32, 0, _RT_SCOPE_UNIVERSE, index) + place, _CREATE
        ),
        _up(index),
        _route(index, gateway, _RT_SCOPE_LINK),
        _neighbour(index, gateway, _NO_MAC),
        _route(index, b"", _RT_SCOPE_UNIVERSE, (_RTA_GATEWAY, gateway), (_RTA_PREFSRC, own)),
    )
    _set("ping_group_range", PING_GROUPS)


def join(link: str, address: IPv4Address) -> None:
    """Lead to an address by a link, whose other end is a session's. Raises `OSError`."""
    index, own = socket.if_nametoindex(link), address.packed
    requests = _up(index), _neighbour(index, own, _SESSION_MAC), _route(index, own, _RT_SCOPE_LINK)
    netlink.do(netlink.NETLINK_ROUTE, *requests)


def _wait_active() -> None:
    """Wait until the session's end sends: its carrier came with the host's end, and the kernel gives it a queue in the
    background (net/core/link_watch.c); until then it has the one that drops all. State and queue change under one lock.
    Raises `OSError`."""
    deadline = time.monotonic() + _ACTIVE_S
    while True:
        for body in netlink.dump(netlink.NETLINK_ROUTE, netlink.RTM_GETLINK, _LINK.pack(0, 0, 0, 0, 0)):
            found = netlink.attributes_of(body[_LINK.size :])
            if found[_IFLA_IFNAME].rstrip(b"\0") == SESSION_LINK.encode() and found.get(_IFLA_OPERSTATE) == _IF_OPER_UP:
                return
        if time.monotonic() > deadline:
            raise OSError(errno.ETIMEDOUT, "the link does not come up")
        time.sleep(_ACTIVE_PAUSE_S)


def _name(link: str) -> bytes:
    return netlink.attribute(_IFLA_IFNAME, link.encode() + b"\0")


def _up(index: int) -> bytes:
    return netlink.message(netlink.RTM_NEWLINK, _LINK.pack(0, 0, index, k.IFF_UP, k.IFF_UP))


def _route(index: int, destination: bytes, scope: int, *more: tuple[int, bytes]) -> bytes:
    bits = 8 * len(destination)
    kind = bits, 0, 0, _RT_TABLE_MAIN, _RTPROT_STATIC, scope, _RTN_UNICAST, 0
    body = _ROUTE.pack(socket.AF_INET, *kind) + netlink.attribute(_RTA_OIF, _INTEGER.pack(index))
    body += b"".join(netlink.attribute(*each) for each in ((_RTA_DST, destination), *more) if each[1])
    return netlink.message(netlink.RTM_NEWROUTE, body, _CREATE)


def _neighbour(index: int, address: bytes, mac: bytes) -> bytes:
    body = _NEIGHBOUR.pack(socket.AF_INET, index, _NUD_PERMANENT, 0, 0)
    body += netlink.attribute(_NDA_DST, address) + netlink.attribute(_NDA_LLADDR, mac)
    return netlink.message(netlink.RTM_NEWNEIGH, body, _CREATE)


def _index_of(link: str) -> int | None:
    try:
        return socket.if_nametoindex(link)
    except OSError:
        return None


def _set(name: str, value: str) -> None:
    """Write a setting of the network that this process is in: `sys/net` of any proc shows that one."""
    write_file(f"/proc/sys/net/ipv4/{name}", value)


@contextlib.contextmanager
def _in_network(netns_fd: int, home_fd: int) -> Iterator[None]:
    syscalls.setns(netns_fd, k.CLONE_NEWNET)
    try:
        yield
    finally:
        syscalls.setns(home_fd, k.CLONE_NEWNET)


@contextlib.contextmanager
def _unless(number: int) -> Iterator[None]:
    """Suppress the error of this number."""
    try:
        yield
    except OSError as error:
        if error.errno != number:
            raise


# Rules ----------------------------------------------------------------------------------------------------------------


def _rules(
    address: IPv4Address,
    ours: Sequence[IPv4Network],
    terms: BridgeTerms,
    allow: Collection[BridgeRule],
    deny: Collection[BridgeRule],
) -> Iterator[nftables.Rule]:
    """Yield the rules of a session, in order. A packet that no rule matches is dropped. Without an `allow`, the last
    rule accepts every packet."""
    drop = nftables.verdict(nftables.DROP)
    accept = nftables.set_packet_type(nftables.TO_US) + nftables.verdict(nftables.ACCEPT)
    yield nftables.meta_is(nftables.PROTOCOL, _IP, negated=True) + drop
    yield nftables.header_is(0, _NO_OPTIONS, negated=True) + drop
    yield nftables.header_is(nftables.SOURCE, address.packed, negated=True) + drop
    yield nftables.destination_type_is(nftables.UNICAST, negated=True) + drop
    yield from (nftables.address_in(nftables.DESTINATION, each) + drop for each in ours)
    yield from (each + accept for each in _name_service(terms))
    yield from (each + drop for each in _refused(terms))
    for rule in deny:
        yield from (each + drop for each in _matches(rule))
    for rule in allow:
        yield from (each + accept for each in _matches(rule))
    if not allow:
        yield accept


def _name_service(terms: BridgeTerms) -> Iterator[nftables.Rule]:
    for resolver in terms.resolvers:
        for protocol in DNS_PROTOCOLS:
            is_question = nftables.protocol_is(protocol) + nftables.port_is(DNS_PORT)
            yield nftables.header_is(nftables.DESTINATION, IPv4Address(resolver).packed) + is_question


def _refused(terms: BridgeTerms) -> Iterator[nftables.Rule]:
    for each in terms.refused:
        yield nftables.address_in(nftables.DESTINATION, IPv4Network(each))


def _matches(rule: BridgeRule) -> Iterator[nftables.Rule]:
    destination = nftables.address_in(nftables.DESTINATION, IPv4Network(rule.network))
    if not rule.ports:
        yield destination
    for port in rule.ports:
        for protocol in PORT_PROTOCOLS:
            yield destination + nftables.protocol_is(protocol) + nftables.port_is(port)


def _put_rules(names: NodeNames, link: str, rules: Iterator[nftables.Rule]) -> None:
    """Put rules at the place of those that the link has, in one step."""
    table = nftables.NETDEV, names.table
    hook, priority, policy = nftables.INGRESS, nftables.FILTER_PRIORITY, nftables.DROP
    chain = nftables.new_chain(*table, link, "filter", hook, priority, policy, device=link)
    added = (nftables.new_rule(*table, link, rule) for rule in rules)
    # Table and chain are made unless they are there: a batch whose first message fails has a failure for each.
    nftables.commit(nftables.new_table(*table), chain, nftables.delete_rules(*table, link), *added)


def _node_table(names: NodeNames, ours: Sequence[IPv4Network], terms: BridgeTerms) -> Iterator[bytes]:
    """Yield the messages that put the node's table at the place of the one that is there. What is refused is refused
    once more when a firewall's translation (PREROUTING) has made another destination of one that a session may reach.
    """
    table, links = (nftables.IPV4, names.table), names.links.encode()
    to_session = nftables.meta_is(nftables.OUTPUT_NAME, links)
    answers = nftables.state_is_one_of(nftables.ESTABLISHED_OR_RELATED)
    drop, accept = nftables.verdict(nftables.DROP), nftables.verdict(nftables.ACCEPT)
    only_answers = to_session + answers + accept, to_session + drop
    from_session = nftables.meta_is(nftables.INPUT_NAME, links)
    no_detour = (
        *(from_session + each + accept for each in _name_service(terms)),
        *(from_session + nftables.address_in(nftables.DESTINATION, each) + drop for each in ours),
        *(from_session + each + drop for each in _refused(terms)),
    )
    from_us = [nftables.address_in(nftables.SOURCE, each) for each in ours]
    is_outward = nftables.meta_is(nftables.OUTPUT_NAME, links, negated=True)
    chains = (
        ("input", nftables.INPUT, (from_session + drop,)),
        ("forward", nftables.FORWARD, (*only_answers, *no_detour)),
        ("output", nftables.OUTPUT, only_answers),
        ("outward", nftables.POSTROUTING, [each + is_outward + nftables.masquerade() for each in from_us]),
    )
    yield nftables.new_table(*table)
    yield nftables.delete_table(*table)
    yield nftables.new_table(*table)
    for name, hook, rules in chains:
        is_nat = hook == nftables.POSTROUTING
        kind, priority = ("nat", nftables.SOURCE_NAT_PRIORITY) if is_nat else ("filter", nftables.FILTER_PRIORITY)
        yield nftables.new_chain(*table, name, kind, hook, priority)
        yield from (nftables.new_rule(*table, name, rule) for rule in rules)
