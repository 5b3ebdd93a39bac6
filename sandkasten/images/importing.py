"""Import an image from a tar archive: unpack it in a jail, check it, give it its name.

This process never reads a byte of the archive. An nsinit of its own, beside a running daemon's or without one, gets the
open archive and the name of the draft, and has it unpacked in a process that sees only the new image
(`nsinit/tools/unpack.py`). A failed import leaves nothing; when `unpack` returns, with or without an error, no process
that it started runs any more. Blocking: call it from a thread.
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
from sandkasten.crash import Crash, Point
from sandkasten.images import rootfs
from sandkasten.images.catalog import Catalog, Image, now
from sandkasten.model.errors import InvalidImage, NsinitLost

MAX_MEMBERS = 2_000_000
MAX_BYTES = 64 * 1024**3
_END_S = 10.0
_PIECE_BYTES = 65536


def import_tar(
    catalog: Catalog,
    name: str,
    tar: Path,
    *,
    max_members: int = MAX_MEMBERS,
    max_bytes: int = MAX_BYTES,
    crash: Crash | None = None,
) -> tuple[Image, Unpacked]:
    """Make image `name` of a tar file; return the image and nsinit's counts of its members.

    Raises:
        InvalidImage: the name is malformed or taken, the archive can't be unpacked, or it holds no usable root.
        NsinitLost: nsinit died.
        OSError: the archive can't be opened.
    """
    crash = crash or Crash()
    with catalog.building(name) as directory:
        crash.passing(Point.IMPORT_BEGUN)
        if catalog.rootfs_path(name).exists():
            raise InvalidImage(f"there is an image {name!r} already", image=name)
        with tar.open("rb") as file:
            counts = unpack(directory, file.fileno(), max_members=max_members, max_bytes=max_bytes)
        crash.passing(Point.IMPORT_UNPACKED)
        problems = rootfs.find_problems(str(directory / "rootfs"))
        if problems:
            raise InvalidImage(f"{tar.name} holds no usable image: {'; '.join(problems)}", image=name)
        crash.passing(Point.IMPORT_CHECKED)
        image = Image(
            name=name,
            kind="rootfs",
            created_at=now(),
            source=tar.name,
            members=counts.members,
            size_bytes=counts.size_bytes,
        )
        published = catalog.publish(directory, image)
        crash.passing(Point.IMPORT_PUBLISHED)
        return published, counts


def unpack(draft: Path, archive_fd: int, *, max_members: int, max_bytes: int) -> Unpacked:
    """Unpack an archive into `draft`, which `Catalog.building` made.

    Raises:
        InvalidImage: the archive can't be unpacked.
        NsinitLost: nsinit died.
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
            raise NsinitLost("the fork server died during the unpacking of the archive")


def _decode(data: bytes) -> object:
    try:
        return ANSWERS.decode(data)
    except ProtocolError:
        return None


@contextlib.contextmanager
def _nsinit() -> Iterator[socket.socket]:
    """Start an nsinit; when the block is left, nsinit and every process that it started have ended."""
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
    """Wait until every process has closed the log, which all of them down to the jail inherit."""
    deadline = time.monotonic() + _END_S
    while select.select([log_fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not os.read(log_fd, _PIECE_BYTES):
            break
    else:
        os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid is still nsinit's
    os.waitpid(pid, 0)
