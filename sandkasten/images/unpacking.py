"""Has an archive unpacked by an nsinit of our own, which lives for that: beside a running daemon's, or without one.

Never reads a byte of the archive. nsinit gets it open, and the name of the draft to unpack it in. When this returns,
with or without an error, nothing that it started runs any more. Blocking: call it from a thread.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from nsinit.spawn import spawn_nsinit
from nsinit.wire.protocol import ANSWERS, MAX_DATAGRAM_BYTES, REQUESTS, Failed, ProtocolError, Unpacked, UnpackImage
from sandkasten.model.errors import InvalidImage, ZygoteLost

_END_S = 10.0
_PIECE_BYTES = 65536


def unpack(draft: Path, archive_fd: int, *, max_members: int, max_bytes: int) -> Unpacked:
    """Unpack an archive into `draft`, which `Catalog.building` made.

    Raises:
        InvalidImage: it can't be unpacked.
        ZygoteLost: nsinit died.
    """
    data_dir = os.path.realpath(draft.parent.parent)
    request = UnpackImage(1, data_dir, draft.name, max_members, max_bytes)
    with _nsinit() as channel:
        try:
            socket.send_fds(channel, [REQUESTS.encode(request)], [archive_fd])
            data = channel.recv(MAX_DATAGRAM_BYTES)
        except ConnectionError:
            data = b""
    match _decode(data):
        case Unpacked() as unpacked:
            return unpacked
        case Failed(message=message):
            raise InvalidImage(f"the archive can't be unpacked: {message}")
        case _:
            raise ZygoteLost("the fork server died while it had the archive unpacked")


def _decode(data: bytes) -> object:
    try:
        return ANSWERS.decode(data)
    except ProtocolError:
        return None


@contextlib.contextmanager
def _nsinit() -> Iterator[socket.socket]:
    """Start an nsinit; when the block is left, it is gone, and all that it started."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    log_fd, their_log_fd = os.pipe2(os.O_CLOEXEC)
    try:
        with ours:
            try:
                pid = spawn_nsinit(theirs.fileno(), their_log_fd)
            finally:
                theirs.close()
                os.close(their_log_fd)
            try:
                yield ours
            finally:
                ours.close()
                _wait_end(pid, log_fd)
    finally:
        os.close(log_fd)


def _wait_end(pid: int, log_fd: int) -> None:
    """Wait until nobody has the log any more, which every process down to the jail inherits."""
    deadline = time.monotonic() + _END_S
    while select.select([log_fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not os.read(log_fd, _PIECE_BYTES):
            break
    else:
        os.kill(pid, signal.SIGKILL)  # not reaped yet, so it exists
    os.waitpid(pid, 0)
