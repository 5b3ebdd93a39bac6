"""The one job of an nsinit that is not started: have an archive unpacked into the draft of an image.

Owns the checks of the request, the way to the draft, and the life of the unpacker: a fresh program that jails itself
(`tools/unpack.py`), since no process with all privileges should read a byte of an archive. The unpacker ends with
nsinit, and nsinit ends when the other end of the channel hangs up.
Sources: posix_spawn(3), openat2(2) RESOLVE_NO_SYMLINKS, flock(2).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
from collections.abc import Iterator

from nsinit.kernel import constants as k
from nsinit.kernel import syscalls
from nsinit.kernel.capabilities import IMPORT_CAPABILITIES, keep_only, read_last_capability
from nsinit.spawn import spawn_unpacker
from nsinit.steps import StepFailed, Steps
from nsinit.storage.paths import Layout, check_owner_of
from nsinit.wire import verdict
from nsinit.wire.launching import Grant
from nsinit.wire.protocol import ANSWERS, Failed, Unpacked, UnpackImage
from nsinit.wire.validate import InvalidName, check_unpack

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY


def serve(channel: socket.socket, request: UnpackImage, fds: list[int], grant: Grant | None) -> None:
    """Have the archive unpacked and answer, unless the other end hangs up before. `fds` came with the request and are
    closed."""
    answer: Unpacked | Failed | None
    try:
        answer = _import(channel, request, fds, grant)
    except StepFailed as error:
        answer = Failed(request.seq, error.stage, error.path, error.errno, str(error)[: verdict.MAX_TEXT])
    finally:
        for fd in fds:
            os.close(fd)
    if answer is not None:
        with contextlib.suppress(OSError):
            channel.sendall(ANSWERS.encode(answer))


def _import(channel: socket.socket, request: UnpackImage, fds: list[int], grant: Grant | None) -> Unpacked | None:
    steps = Steps()
    with steps.step("validate"):
        if grant is not None:
            raise InvalidName("only root may have an archive unpacked")
        check_unpack(request)
        if len(fds) != 1:
            raise InvalidName("an archive comes as one descriptor")
    with steps.step("capabilities"):
        syscalls.unshare(k.CLONE_NEWNET | k.CLONE_NEWIPC | k.CLONE_NEWUTS)
        keep_only(IMPORT_CAPABILITIES, read_last_capability())
    with contextlib.ExitStack() as stack:
        with steps.step("draft"):
            root_fd = stack.enter_context(_draft(Layout(request.data_dir).image_draft(request.draft_name)))
        with steps.step("unpack"):
            said = _unpack(channel, fds[0], root_fd, str(request.max_members), str(request.max_bytes))
            if said is None:
                return None
            counts = verdict.read(said, max_members=request.max_members, max_bytes=request.max_bytes)
    return Unpacked(request.seq, *counts)


@contextlib.contextmanager
def _draft(path: str) -> Iterator[int]:
    """Open the root directory of a draft, and keep a sweep from the draft meanwhile.

    No link is on the way there, and every directory on it below the data directory is root's: no other user could have
    put it there, or put another in its place after this check, which is by descriptor.
    """
    fds: list[int] = []
    try:
        for each in (os.path.dirname(path), path, f"{path}/rootfs"):
            at_fd, name = (fds[-1], os.path.basename(each)) if fds else (k.AT_FDCWD, each)
            fds.append(syscalls.openat2(at_fd, name, _DIRECTORY, resolve=k.RESOLVE_NO_SYMLINKS))
            check_owner_of(fds[-1], each)
        _images_fd, draft_fd, root_fd = fds
        fcntl.flock(draft_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.listdir(root_fd):
            raise InvalidName("a draft is empty")
        yield root_fd
    finally:
        for fd in fds:
            os.close(fd)


def _unpack(channel: socket.socket, archive_fd: int, root_fd: int, *limits: str) -> bytes | None:
    """Return the unpacker's verdict, None when the other end of the channel hung up; either way the
    unpacker is gone."""
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    try:
        try:
            pid = spawn_unpacker(archive_fd, write_fd, root_fd, str(os.getpid()), *limits)
        finally:
            os.close(write_fd)
        try:
            return _listen(channel, read_fd)
        finally:
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so it exists; the jail goes with it
            while os.read(read_fd, verdict.MAX_VERDICT_BYTES):
                pass  # the end of this pipe is that of the jail
            os.waitpid(pid, 0)
    finally:
        os.close(read_fd)


def _listen(channel: socket.socket, read_fd: int) -> bytes | None:
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    poll.register(read_fd, select.POLLIN)
    said = b""
    while True:
        if any(fd == channel.fileno() for fd, _ in poll.poll()):
            return None
        piece = os.read(read_fd, verdict.MAX_VERDICT_BYTES)
        said += piece
        if not piece or len(said) > verdict.MAX_VERDICT_BYTES:
            return said
