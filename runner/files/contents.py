"""Contents of files: parts read by version, and files that take their place in one step. May block.

Runs in a file worker as the user of the request. A file is opened only after its kind was checked on the descriptor.

Sources: open(2) (O_TMPFILE), linkat(2), rename(2) (atomic replacement), proc_pid_fd(5) (reopening a checked O_PATH
descriptor); flock(2); RFC 9110 §13.1 (conditions), §14.1 (ranges).
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import RawIOBase
from typing import Literal

from runner.files.paths import FileTarget, Resolver, open_regular, refusal, status_of
from runner.files.tree import READ, etag_of
from runner.loop.context import Refused
from runner.wire.protocol import (
    CHUNK_BYTES,
    MAX_FRAME_BYTES,
    CommitUpload,
    Done,
    FilePart,
    FilePut,
    GetFile,
    PutFile,
    Unmatched,
)

_NEW_FILE_MODE = 0o644
MAX_MODE = 0o7777
_FREE, _LOCKED = -1, -2
_LOCK_S, _LOCK_PAUSE_S = 2.0, 0.002
"""Requests hold a lock for a moment, and with `sync` until the file is on the disk."""
_Result = Literal["whole", "part", "unchanged", "unsatisfiable"]
_Start = Callable[[object], None]
SendPart = Callable[[int, int, int], None]
"""Sends as many bytes as the third says of a descriptor, from the offset that the second is."""


def open_part(request: GetFile, resolver: Resolver) -> tuple[int, FilePart]:
    """Return the descriptor, the caller's, of the file that a request wants, and what is to be sent of it.

    Raises:
        Refused
    """
    fd, real = open_regular(request.path, resolver)
    status = os.fstat(fd)
    etag = etag_of(status)
    offset, count, result = part_of(request, status.st_size, etag)
    mtime_us = status.st_mtime_ns // 1000
    return fd, FilePart(os.fsdecode(real), status.st_size, mtime_us, etag, result, offset, count)


def part_of(request: GetFile, size: int, etag: str) -> tuple[int, int, _Result]:
    """Return offset, length and kind of the part of a file that a request wants."""
    if is_one_of(etag, request.if_none_match):
        return 0, 0, "unchanged"
    start, end = request.start, request.end
    if (start is None and end is None) or (request.if_range and not _is_same(etag, request.if_range)):
        return 0, size, "whole"
    if start is None:
        start, end = max(size - max(end or 0, 0), 0), size - 1
    last = size - 1 if end is None else min(end, size - 1)
    if not 0 <= start <= last:
        return 0, 0, "unsatisfiable"
    return start, last - start + 1, "part"


def is_one_of(etag: str, wanted: tuple[str, ...]) -> bool:
    """Return whether a version is among others; a weak one equals the strong one of the same state of the file."""
    return "*" in wanted or etag.removeprefix("W/") in {each.removeprefix("W/") for each in wanted}


def _is_same(etag: str, wanted: str) -> bool:
    """Return whether two versions are equal and strong: parts of two weak ones may not belong together."""
    return etag == wanted and not etag.startswith("W/")


def get(request: GetFile, resolver: Resolver, out: RawIOBase, send_part: SendPart | None, start: _Start) -> Done:
    """Send a file, or a part. Work of a file worker."""
    fd, head = open_part(request, resolver)
    try:
        start(head)
        offset, left = head.offset, 0 if request.head_only else head.count
        while left:
            count = min(left, MAX_FRAME_BYTES)
            if send_part is not None and count >= CHUNK_BYTES and offset + count <= os.fstat(fd).st_size:
                send_part(fd, offset, count)
            elif piece := os.pread(fd, count, offset):
                count = len(piece)
                out.write(piece)
            else:
                break
            offset, left = offset + count, left - count
    finally:
        os.close(fd)
    return Done(head.path)


def put(request: PutFile, resolver: Resolver, source: RawIOBase, passing: Callable[[str], None]) -> FilePut | Unmatched:
    """Replace a file with what comes, unless it is of another version. Work of a file worker."""
    if request.mode is not None and not 0 <= request.mode <= MAX_MODE:
        raise Refused("BAD_REQUEST", "no such mode")
    temporary = temporary_name(os.getpid())
    try:
        target = resolver.target_for_writing(resolver.encode(request.path))
    except OSError as error:
        raise refusal(error, request.path) from None
    try:
        if (unmatched := compare(request, target)) is not None:
            return unmatched
        check_writable(target)
        fd = open_new(target.directory_fd, temporary)
        passing("runner.files.opened")
        try:
            size = _receive(source, fd)
            passing("runner.files.received")
            with held(target, must=bool(request.if_match)):
                if (unmatched := compare(request, target)) is not None:  # once more: all that came took its time
                    return unmatched
                try:
                    path = put_in_place(
                        fd, temporary, target, syncs=request.sync, mode=request.mode, create_only=request.create_only
                    ).path
                except FileExistsError:
                    return Unmatched(present(target))
            passing("runner.files.placed")
            return FilePut(path, etag_of(os.fstat(fd)), size, created=target.mode is None)
        finally:
            if os.fstat(fd).st_nlink:
                drop(temporary, target.directory_fd)
            os.close(fd)
    except OSError as error:
        raise refusal(error, request.path) from None
    finally:
        os.close(target.directory_fd)


def drop(temporary: bytes, directory_fd: int) -> None:
    """Remove a temporary file that is there still."""
    try:
        os.unlink(temporary, dir_fd=directory_fd)
    except FileNotFoundError:  # it has another name by now
        pass


def _receive(source: RawIOBase, fd: int) -> int:
    size = 0
    while chunk := source.read(MAX_FRAME_BYTES):
        size += len(chunk)
        data = memoryview(chunk)
        while data:
            data = data[os.write(fd, data) :]
    return size


def compare(request: PutFile | CommitUpload, target: FileTarget) -> Unmatched | None:
    """Return the version of the present file if it is not the one that the request is for."""
    if not (request.if_match or request.create_only):
        return None
    etag = present(target)
    is_right = not etag if request.create_only else bool(etag) and is_one_of(etag, request.if_match)
    return None if is_right else Unmatched(etag)


@contextmanager
def held(target: FileTarget, *, must: bool) -> Iterator[None]:
    """Keep other requests from replacing the present file in the block: each has a lock on it when it does. A command
    may have one for as long as it likes.

    Raises:
        Refused: EXISTS, there was no lock to be had, and there `must` be one.
    """
    give_up_at = time.monotonic() + _LOCK_S
    fd = _locked(target)
    try:
        while fd == _LOCKED:
            if time.monotonic() > give_up_at:
                if must:
                    raise Refused("EXISTS", "another process has locked the file")
                break
            time.sleep(_LOCK_PAUSE_S)
            fd = _locked(target)
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def _locked(target: FileTarget) -> int:
    """Return a descriptor of the present file with a lock on it; `_LOCKED` if another process has that, `_FREE` for no
    file, or for one that the user may neither read nor write."""
    fd = _FREE
    for flags in (READ, READ | os.O_WRONLY):
        try:
            fd = os.open(target.name, flags, dir_fd=target.directory_fd)
            break
        except OSError:
            continue
    if fd == _FREE:
        return fd
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = status_of(target.name, target.directory_fd)
        if status is not None and os.path.samestat(status, os.fstat(fd)):
            return fd
    except BlockingIOError:
        pass
    os.close(fd)  # another one's, or not the present file any more
    return _LOCKED


def present(target: FileTarget) -> str:
    """Return the version of the present file, empty if there is none."""
    status = status_of(target.name, target.directory_fd)
    return etag_of(status) if status else ""


def temporary_name(number: int) -> bytes:
    """Return a name for a file beside its target. Random: a workspace is shared by sandboxes whose numbers all begin at
    1, and may hold what a killed one left."""
    return b".sandkasten-%d-%s.part" % (number, os.urandom(8).hex().encode("ascii"))


def open_new(directory_fd: int, temporary: bytes, access: int = os.O_WRONLY) -> int:
    """Open a new file without a name. If the worker is killed before the file is whole, nothing is left. Where the file
    system can't do that, the file has the temporary name. By default it can't be read: the session's file rules may let
    the user write there, and no more."""
    try:
        return os.open(".", access | os.O_TMPFILE | os.O_CLOEXEC, 0o600, dir_fd=directory_fd)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
    flags = access | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(temporary, flags, 0o600, dir_fd=directory_fd)


def put_in_place(
    fd: int, temporary: bytes, target: FileTarget, *, syncs: bool, mode: int | None = None, create_only: bool = False
) -> Done:
    """Give the new file its mode and its name; with `syncs` wait until both are on the disk.

    Raises:
        FileExistsError: with `create_only`, another file has the name.
    """
    old = _NEW_FILE_MODE if target.mode is None else target.mode
    os.fchmod(fd, old if mode is None else mode)
    if syncs:
        os.fsync(fd)
    _name(fd, temporary, target, create_only=create_only)
    if syncs:
        sync_name(fd, target)
    return Done(os.fsdecode(target.path))


def sync_name(fd: int, target: FileTarget) -> None:
    """Wait until a file's name, which it was given or has lost just now, is on the disk."""
    try:
        directory_fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=target.directory_fd)
    except PermissionError:  # a directory that can be written and not read
        # sync(2) has no effect here. The rename changed the inode, so its change of name is written with the inode.
        os.fsync(fd)
    else:
        os.fsync(directory_fd)
        os.close(directory_fd)


def _name(fd: int, temporary: bytes, target: FileTarget, *, create_only: bool) -> None:
    """Let the file take its place in one step. Only rename(2) replaces, and it starts from a name."""
    directory_fd = target.directory_fd
    is_nameless = os.fstat(fd).st_nlink == 0
    path = b"/proc/self/fd/%d" % fd if is_nameless else temporary
    if create_only:
        os.link(path, target.name, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
        if not is_nameless:
            os.unlink(temporary, dir_fd=directory_fd)
        return
    if is_nameless:
        if target.mode is None:
            try:
                os.link(path, target.name, dst_dir_fd=directory_fd)
            except FileExistsError:  # another file took the name just now
                pass
            else:
                return
        os.link(path, temporary, dst_dir_fd=directory_fd)
    os.rename(temporary, target.name, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)


def check_writable(target: FileTarget) -> None:
    """Refuse to replace a file that its own mode protects; rename(2) would replace it."""
    if target.mode is None:
        return
    try:
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
        os.close(os.open(target.name, flags, dir_fd=target.directory_fd))
    except OSError as error:
        if error.errno != errno.ETXTBSY:  # a running program may be replaced
            raise
