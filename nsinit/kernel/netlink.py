"""Requests over netlink: messages, attributes, and the acknowledgement of each.

Owns the wire format, no policy. Sources: netlink(7), rtnetlink(7); linux/netlink.h, linux/rtnetlink.h.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

NETLINK_ROUTE, NETLINK_SOCK_DIAG, NETLINK_NETFILTER = 0, 4, 12
NLM_F_REQUEST, NLM_F_ACK, NLM_F_EXCL, NLM_F_CREATE, NLM_F_DUMP = 0x1, 0x4, 0x200, 0x400, 0x300
NLA_F_NESTED = 0x8000
NLM_F_APPEND = 0x800
RTM_NEWLINK, RTM_DELLINK, RTM_GETLINK = 16, 17, 18
RTM_NEWADDR, RTM_DELADDR, RTM_NEWROUTE, RTM_DELROUTE, RTM_GETROUTE, RTM_NEWNEIGH = 20, 21, 24, 25, 26, 28
HEADER = struct.Struct("=IHHII")

_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_ATTRIBUTE = struct.Struct("=HH")
_STATUS = struct.Struct("=i")
_TIMEOUT = struct.pack("=qq", 2, 0)
"""Two seconds, as `struct timeval`."""
_MAX_BYTES = 64 * 1024
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
"""Sizes of buffers for a process with CAP_NET_ADMIN (socket(7))."""


def message(kind: int, body: bytes, flags: int = 0, *, asks: bool = True) -> bytes:
    """Return a request, one that asks for an acknowledgement unless told otherwise."""
    flags |= NLM_F_REQUEST | (NLM_F_ACK if asks else 0)
    return HEADER.pack(HEADER.size + len(body), kind, flags, 1, 0) + body + bytes(-len(body) % 4)


def attribute(kind: int, value: bytes) -> bytes:
    """Return an attribute of a message."""
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + bytes(-len(value) % 4)


def nested(kind: int, *attributes: bytes) -> bytes:
    """Return an attribute that holds attributes."""
    return attribute(kind | NLA_F_NESTED, b"".join(attributes))


def attributes_of(data: bytes) -> dict[int, bytes]:
    """Return the attributes of a message's rest, by kind; of those of one kind the last."""
    found, start = {}, 0
    while start + _ATTRIBUTE.size <= len(data):
        size, kind = _ATTRIBUTE.unpack_from(data, start)
        if size < _ATTRIBUTE.size:
            break
        found[kind & ~NLA_F_NESTED] = data[start + _ATTRIBUTE.size : start + size]
        start += size + 3 & ~3
    return found


def do(family: int, *requests: bytes) -> None:
    """Have requests carried out, in one datagram. Raises `OSError`: the first that was refused."""
    for status in ask(family, b"".join(requests), len(requests)):
        if status:
            raise OSError(status, os.strerror(status))


def dump(family: int, kind: int, body: bytes) -> Iterator[bytes]:
    """Yield the body of each message of a list. Raises `OSError`."""
    with _open(family) as channel:
        channel.send(message(kind, body, NLM_F_DUMP, asks=False))
        while True:
            answer, start = channel.recv(_MAX_BYTES), 0
            while start + HEADER.size <= len(answer):
                size, found, *_ = HEADER.unpack_from(answer, start)
                if found == _NLMSG_DONE:
                    return
                if found == _NLMSG_ERROR:
                    status = -_STATUS.unpack_from(answer, start + HEADER.size)[0]
                    raise OSError(status, os.strerror(status))
                yield answer[start + HEADER.size : start + size]
                start += size + 3 & ~3


def _open(family: int) -> socket.socket:
    channel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, family)
    # By the kernel's own time limit: with one of Python's the socket would not block, and be polled.
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEOUT)
    return channel


def ask(family: int, requests: bytes, count: int = 1) -> list[int]:
    """Send requests in one datagram; return the errno of each of the `count` that asked for an acknowledgement, 0 where
    it was done. A request is carried out whatever became of the one before. Raises `OSError`."""
    statuses: list[int] = []
    with _open(family) as channel:
        if len(requests) > _MAX_BYTES:  # netlink(7): a datagram, and the answers, beyond the node's net.core limits
            for option in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE):
                channel.setsockopt(socket.SOL_SOCKET, option, len(requests))
        channel.send(requests)
        while len(statuses) < count:
            answer = channel.recv(_MAX_BYTES)
            _size, kind, *_ = HEADER.unpack_from(answer)
            if kind != _NLMSG_ERROR:
                raise OSError(0, f"netlink answered with a message of kind {kind}")
            statuses.append(-_STATUS.unpack_from(answer, HEADER.size)[0])
    return statuses
