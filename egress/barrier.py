"""The second check of addresses, made by the kernel: a cgroup for the process alone, with programs that refuse.

The kernel asks the programs when a socket of the cgroup connects, or sends a datagram to an address. They refuse what
`addresses` refuses: special ranges, and this host's own addresses; but for the operator's permits, and for port 53 of
the machine's resolvers. The first check knows more: names and rules. With an operator's proxy they refuse everything
but its port.

Maps, programs and cgroup are made before the process gives its rights away. Of all that, one descriptor is kept: of the
map that addresses are added to which the host gets later. What is in that map is refused, whatever its value, and of
bpf(2) the process keeps the one command that adds. The files of the cgroup are root's. So a process that was taken over
can't undo the check. The programs go with the cgroup, which the starter of the process removes. A socket belongs to
the cgroup that its maker was in: those of sessions' networks, which the daemon hands over, are not asked about.

The assembler of the programs stands in `nsinit/kernel/steering.py` as well: the trust domains share no code.

Sources: bpf(2); linux/bpf.h; Documentation/bpf/{map_lpm_trie,standardization/instruction-set}.rst; cgroups(7);
Documentation/admin-guide/cgroup-v2.rst; cgroup-v1/memory.rst; resolv.conf(5).
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

from egress.addresses import SPECIAL_V4, SPECIAL_V6, UNICAST_V6, name_servers
from egress.confinement import MAP_UPDATE_ELEM, call
from egress.policy import Address, Network
from egress.resolver import Lookup, LookupFailed
from egress.server import log

MEMORY_BYTES = 384 * 1024**2
_LIMITS = {
    "memory limit": {"memory.max": str(MEMORY_BYTES), "memory.limit_in_bytes": str(MEMORY_BYTES)},
    "processor weight": {"cpu.weight": "50", "cpu.shares": "512"},
}
"""File of a limit in v2 and in v1, and its value; the weights are half of what a cgroup has that nobody set."""

# What may be reached -------------------------------------------------------------------------------------------------

REACHABLE, RESOLVER, PROXY = 1, 2, 4
"""Bits of a verdict: every port may be reached; the port of DNS may; the port of the operator's proxy may."""

DNS_PORT = 53
RESOLV_CONF = "/etc/resolv.conf"

Table = dict[IPv6Network, int]
"""Verdicts of networks, of which the longest one with an address counts; IPv4 ones are mapped (RFC 4291, 2.5.5.2)."""

_MAPPED = IPv6Network("::ffff:0:0/96")
_UNSPECIFIED = (ip_address("0.0.0.0"), ip_address("::"))


def make_table(
    permit: Iterable[Network], own: Collection[Address], servers: Iterable[Address], proxy: Address | None = None
) -> Table:
    """Return the table of the operator's permits, this host's own addresses and its resolvers. It says the same as
    `AddressCheck`, but for the resolvers. With a proxy it has the proxy's address alone."""
    if proxy is not None:
        return {IPv6Network("::/0"): 0, _host(proxy): PROXY}
    table: Table = {_MAPPED: REACHABLE, IPv6Network("::/0"): 0, IPv6Network(UNICAST_V6): REACHABLE}
    table |= dict.fromkeys((_mapped(ip_network(text)) for text in (*SPECIAL_V4, *SPECIAL_V6)), 0)
    # A permit of mapped addresses permits nothing there, since an address is unwrapped first.
    permits = {_mapped(each) for each in permit if each.version == 4 or not each.subnet_of(_MAPPED)}
    for network in permits:
        same_family = [each for each in table if each.subnet_of(_MAPPED) == network.subnet_of(_MAPPED)]
        table |= dict.fromkeys((each for each in same_family if each.subnet_of(network)), REACHABLE)
        table[network] = REACHABLE
    for address in (*own, *_UNSPECIFIED):
        if not address.is_loopback:  # of this host: permitted by itself alone
            table[_host(address)] = REACHABLE if _host(address) in permits else 0
    for address in servers:
        table[_host(address)] = verdict(table, address) | RESOLVER
    return table


class LaterAddresses:
    """Addresses that this host got after the start of the process: they are added to what the programs refuse, and stay
    refused when the host has them no more. Addresses that the table names, each by itself, are the table's to decide:
    those of the start, a resolver, the proxy, one that is permitted by itself alone."""

    def __init__(self, table: Table) -> None:
        self._named = frozenset(table)
        self._known: set[Address] = set()
        self._map_fd = -1

    def keep(self, map_fd: int) -> None:
        """Own the descriptor of the map."""
        self._map_fd = map_fd

    def add(self, own: Collection[Address]) -> None:
        """Have these refused from now on. Where the kernel does not grant that (before 5.19, with
        kernel.unprivileged_bpf_disabled), or the map is full, the first check alone refuses them: a warning."""
        for address in [each for each in own if each not in self._known and not each.is_loopback]:
            self._known.add(address)
            if self._map_fd < 0 or _host(address) in self._named:
                continue
            try:
                _update(self._map_fd, _host(address).network_address.packed, 1)
            except OSError as error:
                log("warning", "less_protected", addresses_of_later=f"bpf(2): {error.strerror}")
                os.close(self._map_fd)
                self._map_fd = -1


def verdict(table: Table, address: Address) -> int:
    """Return what the programs find for an address."""
    host = _host(address)
    return table[max((each for each in table if host.subnet_of(each)), key=lambda each: each.prefixlen)]


def _host(address: Address) -> IPv6Network:
    return _mapped(ip_network(address))


def _mapped(network: Network) -> IPv6Network:
    if isinstance(network, IPv4Network):
        return IPv6Network((int(_MAPPED.network_address) | int(network.network_address), 96 + network.prefixlen))
    return network


def resolvers() -> frozenset[Address]:
    """Return the addresses that getaddrinfo(3) asks at port 53; without any it asks this host (resolv.conf(5))."""
    try:
        with open(RESOLV_CONF, errors="replace") as file:
            found = name_servers(file)
    except OSError:
        found = ()
    return frozenset(found or {ip_address("127.0.0.1")})


def watch_resolvers(lookup: Lookup, table: Table, end: Callable[[], object]) -> Lookup:
    """Return a look-up that calls `end` when it fails and the machine's resolvers are others now, which the programs
    refuse. The daemon starts a process that knows them."""

    def look_up(name: str) -> Sequence[Address]:
        try:
            return lookup(name)
        except LookupFailed:
            if not all(verdict(table, each) for each in resolvers()):
                log("warning", "resolvers_changed")
                end()
            raise

    return look_up


# The cgroup ----------------------------------------------------------------------------------------------------------


def enclose(
    directories: Sequence[str], table: Table | None, proxy_port: int = 0, later: LaterAddresses | None = None
) -> dict[str, str]:
    """Make the cgroups of these paths, one in each hierarchy, with limits; enter them and have the programs asked there
    if there is a table. To be called as root, with one thread. `proxy_port`: of the address in the table that is the
    proxy's. `later` gets a map for its addresses.

    Return what this machine does not have, with the reasons.

    Raises:
        OSError: a cgroup can't be made, is another process's, or takes no limit; the process must end.
    """
    lacks = {}
    for directory in directories:
        try:
            os.rmdir(directory)  # left by a process of the same starter; with old programs
        except FileNotFoundError:
            pass
        os.mkdir(directory)
        _write(f"{directory}/cgroup.procs", "0")  # at once, or a sweep of empty ones could take it
    for name, files in _LIMITS.items():
        found = {f"{each}/{file}": value for each in directories for file, value in files.items()}
        found = {path: value for path, value in found.items() if os.path.exists(path)}
        for path, value in found.items():
            _write(path, value)
        if not found:
            lacks[name] = "the cgroup has no such controller"
    if table is not None:
        unified = [each for each in directories if os.path.exists(f"{each}/cgroup.controllers")]
        reason = _attach(unified[0], table, proxy_port, later) if unified else "there is no cgroup v2 tree"
        if reason is not None:
            lacks["address programs"] = reason
    return lacks


def _write(path: str, value: str) -> None:
    with open(path, "w") as file:
        file.write(value)


# The programs --------------------------------------------------------------------------------------------------------

_MAP_CREATE, _PROG_LOAD, _PROG_ATTACH = 0, 5, 8
_HASH, _LPM_TRIE, _NO_PREALLOC, _SOCK_ADDR = 1, 11, 1, 18
_ALLOW_MULTI = 2
"""With the programs of cgroups above, such as a service manager's, which are asked, too."""

HOOKS = {10: 4, 11: 6, 14: 4, 15: 6}
"""BPF_CGROUP_INET4_CONNECT, INET6_CONNECT, UDP4_SENDMSG and UDP6_SENDMSG, with the family of the address. A socket of
IPv6 hands a mapped address to its own hook."""
_NOT_HERE = (errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP)
"""A kernel without the call, the map, the kind of program or of hook; one that grants them to nobody in a container."""

_CREATE = struct.Struct("=5I")
_UPDATE = struct.Struct("=I4x3Q")
_LOAD_PROGRAM = struct.Struct("=IIQQIIQII16sII")
_ATTACH = struct.Struct("=4I")
"""Beginnings of `union bpf_attr`; the kernel takes the rest for 0."""
_INSTRUCTION = struct.Struct("=BBhi")
_LICENCE = ctypes.create_string_buffer(b"MIT")
_NAME = b"sandkasten_dial"

_USER_IP4, _USER_IP6, _USER_PORT = 4, 8, 24
"""Places in `struct bpf_sock_addr`, in network order."""
_MAX_LATER = 4096
_KEY_BYTES, _KEY, _DATA = 20, -20, -16
"""Size of `struct bpf_lpm_trie_key` with an IPv6 address, and the places of the key and of its address in the frame."""
_MAPPED_WORD = -(1 << 16)
"""The third word of a mapped address, bytes 00 00 ff ff, on a machine that has the lowest one first."""
_REFUSE, _ALLOW = 0, 1
_LOOKUP = 1
"""Number of the helper function that finds a key's value."""
_LOAD, _STORE, _STORE_VALUE, _MOVE, _MOVE_VALUE, _ADD_VALUE = 0x61, 0x63, 0x62, 0xBF, 0xB7, 0x07
_CALL, _EXIT, _JUMP_EQUAL, _JUMP_UNEQUAL, _JUMP_SET, _LOAD_64 = 0x85, 0x95, 0x15, 0x55, 0x45, 0x18
_PSEUDO_MAP_FD = 1
_FRAME = 10
"""The register with the end of the program's stack."""

Line = tuple[int, int, int, "int | str", int] | str
"""An instruction: code, target register, source register, offset (or the label that it jumps to), value. A text is a
label."""


def _lines(map_fd: int, later_fd: int, family: int, proxy_port: int) -> tuple[Line, ...]:
    if family == 4:
        words = [(_STORE_VALUE, _FRAME, 0, _DATA + 4 * word, 0) for word in (0, 1)]
        words += [(_STORE_VALUE, _FRAME, 0, _DATA + 8, _MAPPED_WORD)]
        words += [(_LOAD, 2, 6, _USER_IP4, 0), (_STORE, _FRAME, 2, _DATA + 12, 0)]
    else:
        words = []
        for offset in range(0, 16, 4):
            words += [(_LOAD, 2, 6, _USER_IP6 + offset, 0), (_STORE, _FRAME, 2, _DATA + offset, 0)]
    return (
        (_MOVE, 6, 1, 0, 0),  # the facts of the call, which helper functions leave alone
        (_STORE_VALUE, _FRAME, 0, _KEY, 128),  # bits to compare
        *words,
        (_LOAD_64, 1, _PSEUDO_MAP_FD, 0, later_fd),
        (0, 0, 0, 0, 0),
        (_MOVE, 2, _FRAME, 0, 0),
        (_ADD_VALUE, 2, 0, 0, _DATA),
        (_CALL, 0, 0, 0, _LOOKUP),
        (_JUMP_UNEQUAL, 0, 0, "refuse", 0),
        (_LOAD_64, 1, _PSEUDO_MAP_FD, 0, map_fd),
        (0, 0, 0, 0, 0),  # the upper half of the value above
        (_MOVE, 2, _FRAME, 0, 0),
        (_ADD_VALUE, 2, 0, 0, _KEY),
        (_CALL, 0, 0, 0, _LOOKUP),
        (_JUMP_EQUAL, 0, 0, "refuse", 0),
        (_LOAD, 7, 0, 0, 0),
        (_JUMP_SET, 7, 0, "allow", REACHABLE),
        (_LOAD, 2, 6, _USER_PORT, 0),
        (_JUMP_UNEQUAL, 2, 0, "other port", socket.htons(DNS_PORT)),
        (_JUMP_SET, 7, 0, "allow", RESOLVER),
        "other port",
        (_JUMP_UNEQUAL, 2, 0, "refuse", socket.htons(proxy_port)),
        (_JUMP_SET, 7, 0, "allow", PROXY),
        "refuse",
        (_MOVE_VALUE, 0, 0, 0, _REFUSE),
        (_EXIT, 0, 0, 0, 0),
        "allow",
        (_MOVE_VALUE, 0, 0, 0, _ALLOW),
        (_EXIT, 0, 0, 0, 0),
    )


def _program(map_fd: int, later_fd: int, family: int, proxy_port: int) -> bytes:
    places: dict[str, int] = {}
    instructions: list[tuple[int, int, int, int | str, int]] = []
    for line in _lines(map_fd, later_fd, family, proxy_port):
        if isinstance(line, str):
            places[line] = len(instructions)
        else:
            instructions.append(line)
    return b"".join(
        _INSTRUCTION.pack(code, target | source << 4, offset if isinstance(offset, int) else places[offset] - at, value)
        for at, (code, target, source, offset, value) in enumerate(instructions, start=1)
    )


def _attach(directory: str, table: Table, proxy_port: int, later: LaterAddresses | None) -> str | None:
    """Have the programs asked in a cgroup that this process is in; return why they can't be, None if they are."""
    directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    map_fd = later_fd = -1
    try:
        map_fd = _make_map(table)
        later_fd = _bpf(_MAP_CREATE, _CREATE.pack(_HASH, _KEY_BYTES - 4, 4, _MAX_LATER, _NO_PREALLOC))
        for hook, family in HOOKS.items():
            program_fd = _load(_program(map_fd, later_fd, family, proxy_port), hook)
            try:
                _bpf(_PROG_ATTACH, _ATTACH.pack(directory_fd, program_fd, hook, _ALLOW_MULTI))
            finally:
                os.close(program_fd)
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
        return f"bpf(2): {error.strerror}"
    else:
        if later is not None:
            later.keep(later_fd)
            later_fd = -1
    finally:
        for fd in (directory_fd, map_fd, later_fd):
            if fd >= 0:
                os.close(fd)
    return None if _is_refused(table) else "the programs are asked about no socket of this process"


def _make_map(table: Table) -> int:
    map_fd = _bpf(_MAP_CREATE, _CREATE.pack(_LPM_TRIE, _KEY_BYTES, 4, len(table), _NO_PREALLOC))
    for network, bits in table.items():
        _update(map_fd, struct.pack("=I16s", network.prefixlen, network.network_address.packed), bits)
    return map_fd


def _update(map_fd: int, key_bytes: bytes, bits: int) -> None:
    key, value = ctypes.create_string_buffer(key_bytes, len(key_bytes)), ctypes.c_uint32(bits)
    _bpf(MAP_UPDATE_ELEM, _UPDATE.pack(map_fd, ctypes.addressof(key), ctypes.addressof(value), 0))


def _load(code: bytes, hook: int) -> int:
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _SOCK_ADDR, len(code) // _INSTRUCTION.size, ctypes.addressof(buffer), ctypes.addressof(_LICENCE)
    return _bpf(_PROG_LOAD, _LOAD_PROGRAM.pack(*program, 0, 0, 0, 0, 0, _NAME, 0, hook))


def _bpf(command: int, attributes: bytes) -> int:
    return call("bpf", command, attributes, len(attributes))


def _is_refused(table: Table) -> bool:
    """Whether an address that must not be reached can't be: until 5.16 a kernel may have sorted sockets by class
    (net_cls) and not by cgroup. A datagram socket sends nothing when it connects."""
    address = next((each for each in ("0.0.0.0", "127.0.0.1", "240.0.0.1") if not verdict(table, ip_address(each))), "")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((address, 1))
        except OSError as error:
            return error.errno == errno.EPERM
    return not address
