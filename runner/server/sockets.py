"""The bound on a session's datagram and netlink sockets: PID 1 says yes or no to each such `socket` call.

What waits in these sockets is memory of the kernel that no cgroup is charged for: datagrams begun and not sent
(MSG_MORE), errors, the answers of netlink; up to some 300 KiB a socket. The only bound is their number, which the
kernel does not limit. So the session's filter makes the kernel ask PID 1, and PID 1 counts. The callers that PID 1 let
go on, and that have no socket yet, are not in the count: there are never more of them than processes.

Sources: seccomp_unotify(2) (the answer rests on no memory of the caller's: only the fact that it asks counts);
linux/seccomp.h; net/ipv4/proc.c (`used` counts the sockets of the network namespace), net/core/sock.c (the table of
protocols counts datagram sockets only from their bind on).
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from dataclasses import dataclass
from typing import Final

from runner.loop.loop import READ, EventLoop

_RECEIVE: Final = 0xC0502100
"""SECCOMP_IOCTL_NOTIF_RECV: `struct seccomp_notif`, 80 bytes that must be zero."""

_SEND: Final = 0xC0182101
"""SECCOMP_IOCTL_NOTIF_SEND: `struct seccomp_notif_resp`."""

_NOTICE_BYTES: Final = 80
_ID = struct.Struct("=Q")
_RESPONSE = struct.Struct("=QqiI")
_CONTINUE: Final = 1
"""SECCOMP_USER_NOTIF_FLAG_CONTINUE: the kernel goes on with the call as it stands."""

_CHARGED: Final = (b"UNIX", b"UNIX-STREAM", b"TCP", b"TCPv6")
"""Protocols whose sockets hold only memory that is charged, or limited apart."""
_PAGE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Asked:
    """The descriptor on which the kernel asks; the session's `/proc/net/sockstat` and `protocols`, open; the most
    sockets."""

    questions_fd: int
    sockstat_fd: int
    protocols_fd: int
    most: int


class SocketGate:
    """Answers the kernel's questions."""

    def __init__(self, loop: EventLoop, asked: Asked) -> None:
        self._asked = asked
        loop.watch(asked.questions_fd, READ, self._on_question, lambda _error: None)

    def _on_question(self, _events: int) -> None:
        notice = bytearray(_NOTICE_BYTES)
        try:
            fcntl.ioctl(self._asked.questions_fd, _RECEIVE, notice)
            (number,) = _ID.unpack_from(notice)
            if count_sockets(_read(self._asked.sockstat_fd), _read(self._asked.protocols_fd)) < self._asked.most:
                response = _RESPONSE.pack(number, 0, 0, _CONTINUE)
            else:
                response = _RESPONSE.pack(number, 0, -errno.ENOBUFS, 0)
            fcntl.ioctl(self._asked.questions_fd, _SEND, response)
        except FileNotFoundError:
            pass  # ENOENT: the caller was killed, or took a signal and asks again


def _read(fd: int) -> bytes:
    content = bytearray()
    while page := os.pread(fd, _PAGE_BYTES, len(content)):
        content += page
    return bytes(content)


def count_sockets(sockstat: bytes, protocols: bytes) -> int:
    """Return how many sockets there are but those of `_CHARGED`. A TCP socket neither bound nor connected counts."""
    used = int(sockstat.split(None, 3)[2])  # "sockets: used N"
    lines = (line.split(None, 3) for line in protocols.splitlines()[1:])
    return used - sum(int(fields[2]) for fields in lines if fields[0] in _CHARGED)
