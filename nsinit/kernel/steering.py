"""The program that steers connections, and the calls of bpf(2) that load it: a map of sockets, the program, a link.

The program is asked when a packet looks for a socket of its network namespace (`sk_lookup`), before the kernel looks
among those that listen. It assigns TCP to any address but the namespace's own to one listener, DNS to one UDP socket,
and drops other UDP, which its sender is told at once (ECONNREFUSED). It fails closed: a slot of the map without a
socket is a drop, and the last copy of the link's descriptor takes the program along.
The assembler stands in `egress/barrier.py` as well: the trust domains share no code.
Sources: bpf(2); linux/bpf.h; Documentation/bpf/{prog_sk_lookup,map_sockmap,standardization/instruction-set}.rst.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct

from nsinit.kernel import constants as k
from nsinit.kernel import syscalls

TCP_SLOT, UDP_SLOT = 0, 1
DNS_PORT = 53
PROXY_PORT = 3128
"""Ports of the namespace's own address that are steered, too."""

_MAP_CREATE = struct.Struct("=5I")
_MAP_UPDATE = struct.Struct("=I4x3Q")
_PROG_LOAD = struct.Struct("=IIQQIIQII16sII")
_LINK_CREATE = _PROG_ATTACH = struct.Struct("=4I")
"""Beginnings of `union bpf_attr`; the kernel takes the rest for 0."""
_INSTRUCTION = struct.Struct("=BBhi")

_FAMILY, _PROTOCOL, _LOCAL_IP4, _LOCAL_PORT = 8, 12, 40, 60
"""Places in `struct bpf_sk_lookup`: of a packet that comes in, "local" is its destination. The address is in network
order, the port in the machine's."""
_SK_DROP, _SK_PASS = 0, 1
_MAP_LOOKUP_ELEM, _SK_RELEASE, _SK_ASSIGN = 1, 86, 124
"""Numbers of helper functions."""
_LOAD, _STORE, _MOVE, _MOVE_VALUE, _ADD_VALUE, _AND_VALUE = 0x61, 0x63, 0xBF, 0xB7, 0x07, 0x57
_CALL, _EXIT, _JUMP, _JUMP_EQUAL, _JUMP_UNEQUAL, _LOAD_64 = 0x85, 0x95, 0x05, 0x15, 0x55, 0x18
_JUMP_UNEQUAL_32 = 0x56
"""Compares the lower halves of registers, so that no sign of the value counts."""
_PSEUDO_MAP_FD = 1
_FRAME = 10
"""The register with the end of the program's stack."""
_LICENCE = ctypes.create_string_buffer(b"MIT")
_NAME = b"sandkasten_out"

Line = tuple[int, int, int, "int | str", int] | str
"""An instruction: code, target register, source register, offset (or the label that it jumps to), value. A text is a
label."""


def _lines(map_fd: int, own_address: int) -> tuple[Line, ...]:
    return (
        (_MOVE, 6, 1, 0, 0),  # the packet's facts, which calls leave alone
        (_LOAD, 2, 6, _FAMILY, 0),
        (_JUMP_UNEQUAL, 2, 0, "pass", socket.AF_INET),
        (_LOAD, 3, 6, _LOCAL_IP4, 0),
        (_MOVE, 4, 3, 0, 0),
        (_AND_VALUE, 4, 0, 0, 0xFF),  # the first byte of an address, on a machine that has the lowest one first
        (_JUMP_EQUAL, 4, 0, "pass", 127),
        (_LOAD, 5, 6, _LOCAL_PORT, 0),
        (_JUMP_UNEQUAL_32, 3, 0, "foreign", own_address),
        (_JUMP_EQUAL, 5, 0, "foreign", DNS_PORT),
        (_JUMP_EQUAL, 5, 0, "foreign", PROXY_PORT),
        (_JUMP, 0, 0, "pass", 0),
        "foreign",
        (_MOVE_VALUE, 7, 0, 0, TCP_SLOT),
        (_LOAD, 2, 6, _PROTOCOL, 0),
        (_JUMP_EQUAL, 2, 0, "assign", socket.IPPROTO_TCP),
        (_JUMP_UNEQUAL, 5, 0, "drop", DNS_PORT),
        (_MOVE_VALUE, 7, 0, 0, UDP_SLOT),
        "assign",
        (_STORE, _FRAME, 7, -4, 0),
        (_LOAD_64, 1, _PSEUDO_MAP_FD, 0, map_fd),
        (0, 0, 0, 0, 0),  # the upper half of the value above
        (_MOVE, 2, _FRAME, 0, 0),
        (_ADD_VALUE, 2, 0, 0, -4),
        (_CALL, 0, 0, 0, _MAP_LOOKUP_ELEM),
        (_JUMP_EQUAL, 0, 0, "drop", 0),
        (_MOVE, 7, 0, 0, 0),
        (_MOVE, 1, 6, 0, 0),
        (_MOVE, 2, 7, 0, 0),
        (_MOVE_VALUE, 3, 0, 0, 0),
        (_CALL, 0, 0, 0, _SK_ASSIGN),
        (_MOVE, 8, 0, 0, 0),
        (_MOVE, 1, 7, 0, 0),
        (_CALL, 0, 0, 0, _SK_RELEASE),
        (_JUMP_UNEQUAL, 8, 0, "drop", 0),
        "pass",
        (_MOVE_VALUE, 0, 0, 0, _SK_PASS),
        (_EXIT, 0, 0, 0, 0),
        "drop",
        (_MOVE_VALUE, 0, 0, 0, _SK_DROP),
        (_EXIT, 0, 0, 0, 0),
    )


def steering_program(map_fd: int, own_address: bytes) -> bytes:
    """Return the instructions; `own_address` has the four bytes of the namespace's own address."""
    (number,) = struct.unpack("=i", own_address)
    places: dict[str, int] = {}
    instructions: list[tuple[int, int, int, int | str, int]] = []
    for line in _lines(map_fd, number):
        if isinstance(line, str):
            places[line] = len(instructions)
        else:
            instructions.append(line)
    return b"".join(
        _INSTRUCTION.pack(code, target | source << 4, offset if isinstance(offset, int) else places[offset] - at, value)
        for at, (code, target, source, offset, value) in enumerate(instructions, start=1)
    )


def make_socket_map(*sockets: socket.socket) -> int:
    """Return a map with these sockets in its slots, in their order. A socket that is closed leaves its slot."""
    map_fd = syscalls.bpf(k.BPF_MAP_CREATE, _MAP_CREATE.pack(k.BPF_MAP_TYPE_SOCKMAP, 4, 4, len(sockets), 0))
    for slot, each in enumerate(sockets):
        key, value = ctypes.c_uint32(slot), ctypes.c_uint32(each.fileno())
        addresses = ctypes.addressof(key), ctypes.addressof(value)
        syscalls.bpf(k.BPF_MAP_UPDATE_ELEM, _MAP_UPDATE.pack(map_fd, *addresses, 0))
    return map_fd


def load_steering(map_fd: int, own_address: bytes) -> int:
    """Load the program and return its descriptor."""
    try:
        return _load(k.BPF_PROG_TYPE_SK_LOOKUP, k.BPF_SK_LOOKUP, steering_program(map_fd, own_address))
    except OSError as error:
        if error.errno == errno.EINVAL:
            error.strerror = "this kernel has no sk_lookup programs"
        raise


def _load(kind: int, place: int, code: bytes) -> int:
    buffer = ctypes.create_string_buffer(code, len(code))
    program = kind, len(code) // _INSTRUCTION.size, ctypes.addressof(buffer), ctypes.addressof(_LICENCE)
    return syscalls.bpf(k.BPF_PROG_LOAD, _PROG_LOAD.pack(*program, 0, 0, 0, 0, 0, _NAME, 0, place))


def refuse_connections(cgroup_fd: int) -> None:
    """Let no process of a v2 cgroup connect over IPv4: what the egress process has done to itself, in short, for a
    trial. It lasts as long as the cgroup."""
    refuse = _INSTRUCTION.pack(_MOVE_VALUE, 0, 0, 0) + _INSTRUCTION.pack(_EXIT, 0, 0, 0)
    program_fd = _load(k.BPF_PROG_TYPE_CGROUP_SOCK_ADDR, k.BPF_CGROUP_INET4_CONNECT, refuse)
    try:
        attributes = _PROG_ATTACH.pack(cgroup_fd, program_fd, k.BPF_CGROUP_INET4_CONNECT, 0)
        syscalls.bpf(k.BPF_PROG_ATTACH, attributes)
    finally:
        os.close(program_fd)


def link_to_network(program_fd: int, netns_fd: int) -> int:
    """Have a network namespace ask the program; it does so until the last copy of the returned descriptor is closed."""
    return syscalls.bpf(k.BPF_LINK_CREATE, _LINK_CREATE.pack(program_fd, netns_fd, k.BPF_SK_LOOKUP, 0))
