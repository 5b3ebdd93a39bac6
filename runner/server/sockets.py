"""The bound on a session's internet and netlink sockets: PID 1 says yes or no to each such `socket` call.

In datagram and netlink sockets waits memory of the kernel that no cgroup is charged for: datagrams begun and not sent
(MSG_MORE), errors, the answers of netlink; up to some 300 KiB a socket. A TCP socket may take one packet beyond every
limit, up to 64 KiB. The only bound is the number of sockets, which the kernel does not limit. So the session's filter
makes the kernel ask PID 1, and PID 1 counts. The callers that PID 1 let go on, and that have no socket yet, are not in
the count: there are never more of them than processes.

Sources: seccomp_unotify(2) (the answer rests on no memory of the caller's: only the fact that it asks counts);
linux/seccomp.h; net/ipv4/proc.c (`used` counts the sockets of the network namespace), net/core/sock.c (the table of
protocols counts datagram sockets only from their bind on).
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from dataclasses import dataclass
from functools import partial
from typing import Final

from runner.loop.loop import READ, EventLoop

_RECEIVE: Final = 0xC0502100
"""SECCOMP_IOCTL_NOTIF_RECV: `struct seccomp_notif`, 80 bytes that must be zero."""

_SEND: Final = 0xC0182101
"""SECCOMP_IOCTL_NOTIF_SEND: `struct seccomp_notif_resp`."""

_NOTICE_BYTES: Final = 80
_QUESTION = struct.Struct("=Q24xQQ")
"""The question's number; the first two arguments of the call, family and type."""

_RESPONSE = struct.Struct("=QqiI")
_CONTINUE: Final = 1
"""SECCOMP_USER_NOTIF_FLAG_CONTINUE: the kernel goes on with the call as it stands."""

_UNIX: Final = (b"UNIX", b"UNIX-STREAM")
"""Protocols whose sockets hold only memory that is charged."""

_TCP: Final = (b"TCP", b"TCPv6")
_STREAM: Final = 1
_TYPE_BITS: Final = 0xF
_INT_BITS: Final = 0xFFFFFFFF
"""The part of a register that the kernel takes for an `int`."""

_STREAMS_PER_DATAGRAM: Final = 8
_FREE_S: Final = 0.05
"""Time that the kernel may take to free closed sockets (an RCU grace period): a caller without room waits so long."""
_PAGE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Asked:
    """The descriptor on which the kernel asks; the session's `/proc/net/sockstat` and `protocols`, open; the most
    datagram and netlink sockets. Of internet sockets of all types there may be eight times as many. `own`: sockets of
    PID 1's among those that are counted."""

    questions_fd: int
    sockstat_fd: int
    protocols_fd: int
    most: int
    own: int


class SocketGate:
    """Answers the kernel's questions."""

    def __init__(self, loop: EventLoop, asked: Asked) -> None:
        self._loop = loop
        self._asked = asked
        loop.watch(asked.questions_fd, READ, self._on_question, _drop)

    def _on_question(self, _events: int) -> None:
        notice = bytearray(_NOTICE_BYTES)
        try:
            fcntl.ioctl(self._asked.questions_fd, _RECEIVE, notice)
        except FileNotFoundError:
            return  # ENOENT: the caller was killed, or took a signal and asks again
        number, family, kind = _QUESTION.unpack_from(notice)
        is_stream = family & _INT_BITS != socket.AF_NETLINK and kind & _TYPE_BITS == _STREAM
        if self._has_room(is_stream=is_stream):
            self._answer(number, allow=True)
        else:
            again = partial(self._ask_again, number, is_stream)
            self._loop.call_later(_FREE_S, again, _drop)

    def _ask_again(self, number: int, is_stream: bool) -> None:
        self._answer(number, allow=self._has_room(is_stream=is_stream))

    def _answer(self, number: int, *, allow: bool) -> None:
        response = (0, _CONTINUE) if allow else (-errno.ENOBUFS, 0)
        try:
            fcntl.ioctl(self._asked.questions_fd, _SEND, _RESPONSE.pack(number, 0, *response))
        except FileNotFoundError:
            pass  # ENOENT: as above

    def _has_room(self, *, is_stream: bool) -> bool:
        asked = self._asked
        all_of_them, datagrams = count_sockets(_read(asked.sockstat_fd), _read(asked.protocols_fd))
        has_place = all_of_them - asked.own < _STREAMS_PER_DATAGRAM * asked.most
        return has_place and (is_stream or datagrams - asked.own < asked.most)


def _drop(_error: Exception) -> None:
    """Leave a question unanswered whose answer fails: the caller waits until it is killed."""


def _read(fd: int) -> bytes:
    content = bytearray()
    while page := os.pread(fd, _PAGE_BYTES, len(content)):
        content += page
    return bytes(content)


def count_sockets(sockstat: bytes, protocols: bytes) -> tuple[int, int]:
    """Return how many sockets there are but for Unix sockets; and but for TCP's, too, if bound or connected."""
    used = int(sockstat.split(None, 3)[2])  # "sockets: used N"
    fields = [line.split(None, 3) for line in protocols.splitlines()[1:]]
    unix, tcp = (sum(int(each[2]) for each in fields if each[0] in names) for names in (_UNIX, _TCP))
    return used - unix, used - unix - tcp
