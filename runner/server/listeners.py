"""Which TCP ports something in this network namespace listens on, as the kernel says. Parsing is pure.

It must not know who wants to know. Asked by sock_diag, which walks the listening sockets alone (50 us); where the
kernel has no such module, by `/proc/net/tcp`, for which it walks a table sized for the whole machine (2 ms where that
has 262144 buckets). What is no answer of the kernel's is no listener.

Sources: sock_diag(7), netlink(7), include/uapi/linux/inet_diag.h, proc_net_tcp in proc_net(5).
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Iterator

MAX_LISTENERS = 256
"""How many are told; those with the smallest ports, so that the choice is a stable one."""

Listener = tuple[int, str]
"""Port and address."""

_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_ADDRESS_BYTES = {socket.AF_INET: 4, socket.AF_INET6: 16}

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST_DUMP = 0x301
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_TCP_LISTEN = 10
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI48x")
_ANSWER = struct.Struct("=BBxx2s2x16s")
"""Of inet_diag_msg: family, state, source port, source address."""
_MAX_ANSWERS = 64
_ANSWER_BYTES = 32 * 1024

_TABLES = {socket.AF_INET: "/proc/net/tcp", socket.AF_INET6: "/proc/net/tcp6"}
_TABLE_BYTES = 256 * 1024
_PAGE_BYTES = 64 * 1024
_LINE = re.compile(rb" *[0-9]+: ((?:[0-9A-F]{8}){1,4}):([0-9A-F]{4}) [0-9A-F:]+ 0A ")


class NoAnswer(Exception):
    """The kernel answered with an error or not as it is documented."""


def read_listeners() -> frozenset[Listener]:
    """Return what is listened on now; never blocks.

    Raises:
        OSError: the kernel has neither sock_diag nor its table.
    """
    found: set[Listener] = set()
    for family in _FAMILIES:
        try:
            found.update(_ask(family))
        except (OSError, NoAnswer):
            found.update(parse_table(family, read_table(family)))
    return frozenset(sorted(found)[:MAX_LISTENERS])


def encode_request(family: int) -> bytes:
    """Return the request for every listening TCP socket of an address family."""
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 1 << _TCP_LISTEN)
    return _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP, 1, 0) + body


def parse_answer(family: int, data: bytes) -> tuple[list[Listener], bool]:
    """Return the listeners in one datagram, and whether it is the last one.

    Raises:
        NoAnswer
    """
    found: list[Listener] = []
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, kind = _HEADER.unpack_from(data, offset)[:2]
        if length < _HEADER.size or offset + length > len(data) or kind == _NLMSG_ERROR:
            raise NoAnswer
        if kind == _NLMSG_DONE:
            return found, True
        if kind == _SOCK_DIAG_BY_FAMILY and length >= _HEADER.size + _ANSWER.size:
            found += _listener(family, data, offset + _HEADER.size)
        offset += (length + 3) & ~3
    if offset < len(data):
        raise NoAnswer
    return found, False


def parse_table(family: int, content: bytes) -> Iterator[Listener]:
    """Yield the listeners in the content of `/proc/net/tcp` or `tcp6`, whose words are in the machine's byte order."""
    for line in content.split(b"\n"):
        match = _LINE.match(line)
        if match is not None and len(match[1]) == 2 * _ADDRESS_BYTES[socket.AddressFamily(family)]:
            words = (match[1][start : start + 8] for start in range(0, len(match[1]), 8))
            address = b"".join(struct.pack("=I", int(word, 16)) for word in words)
            yield int(match[2], 16), socket.inet_ntop(family, address)


def _listener(family: int, data: bytes, offset: int) -> list[Listener]:
    answered, state, port, address = _ANSWER.unpack_from(data, offset)
    if (answered, state) != (family, _TCP_LISTEN):
        return []
    text = socket.inet_ntop(family, address[: _ADDRESS_BYTES[socket.AddressFamily(family)]])
    return [(int.from_bytes(port, "big"), text)]


def _ask(family: int) -> list[Listener]:
    found: list[Listener] = []
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    with socket.socket(socket.AF_NETLINK, kind, _NETLINK_SOCK_DIAG) as kernel:
        kernel.send(encode_request(family))
        for _ in range(_MAX_ANSWERS):
            more, is_last = parse_answer(family, kernel.recv(_ANSWER_BYTES))
            found += more
            if is_last:
                break
    return found


def read_table(family: int) -> bytes:
    """Return the kernel's table, up to a bound; listeners come first. A read gives a page of it at most."""
    content = bytearray()
    fd = os.open(_TABLES[socket.AddressFamily(family)], os.O_RDONLY | os.O_CLOEXEC)
    try:
        while len(content) < _TABLE_BYTES and (page := os.read(fd, _PAGE_BYTES)):
            content += page
    finally:
        os.close(fd)
    return bytes(content)
