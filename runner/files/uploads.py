"""Files that come in several requests, each of which may be cut: appended to a part file, then put in place. May block.

The part file lies beside its target, so that it takes its place in one step; its size is how much has come. All that is
known of an upload besides is told by each request, so none is remembered here. A part file belongs to one request at a
time (flock(2)). Runs in a file worker as the user of the request.

Sources: flock(2); open(2) (O_APPEND, O_NOFOLLOW); rename(2).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import RawIOBase

from runner.files.contents import MAX_MODE, check_writable, compare, held, present, put_in_place
from runner.files.paths import FileTarget, Resolver, mode_of_file, parent_of, refusal
from runner.files.tree import Check, etag_of, never_ends
from runner.loop.context import Refused
from runner.wire.protocol import (
    MAX_FRAME_BYTES,
    AppendUpload,
    BeginUpload,
    CommitUpload,
    Done,
    DropUpload,
    FilePut,
    LookUpload,
    Unmatched,
    UploadState,
)

_ID = re.compile(r"[0-9a-f]{32}\Z")
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_HASH_BYTES = 1024 * 1024


def begin(request: BeginUpload, resolver: Resolver) -> UploadState:
    """Make the part file, unless the file to be written could not be replaced."""
    try:
        target = resolver.target_for_writing(resolver.encode(request.path))
        try:
            check_writable(target)
            os.close(os.open(_part_name(request.upload_id), _NEW, 0o600, dir_fd=target.directory_fd))
        finally:
            os.close(target.directory_fd)
    except OSError as error:
        raise refusal(error, request.path) from None
    return UploadState(os.fsdecode(target.path), 0)


def append(request: AppendUpload, resolver: Resolver, source: RawIOBase) -> UploadState:
    """Append what comes. Each piece is in the file before the next one is read."""
    with _target_of(request.path, resolver) as target, _part(request.upload_id, target) as fd:
        path, size = os.fsdecode(target.path), os.fstat(fd).st_size
        if size != request.offset:
            return UploadState(path, size, "offset")
        while chunk := source.read(MAX_FRAME_BYTES):
            data = memoryview(chunk)[: request.max_bytes - size]
            is_cut = len(data) < len(chunk)
            size += len(data)
            while data:
                data = data[os.write(fd, data) :]
            if is_cut:
                return UploadState(path, size, "too_much")
        return UploadState(path, size)


def look(request: LookUpload, resolver: Resolver) -> UploadState:
    """Return how much has come."""
    with _target_of(request.path, resolver) as target:
        status = os.stat(_part_name(request.upload_id), dir_fd=target.directory_fd, follow_symlinks=False)
        return UploadState(os.fsdecode(target.path), status.st_size)


def commit(request: CommitUpload, resolver: Resolver, check: Check) -> FilePut | Unmatched | UploadState:
    """Put the part file in place if it is what was announced, and the present file of the right version."""
    if request.mode is not None and not 0 <= request.mode <= MAX_MODE:
        raise Refused("BAD_REQUEST", "no such mode")
    with _target_of(request.path, resolver) as target, _part(request.upload_id, target) as fd:
        size = os.fstat(fd).st_size
        if request.size_bytes is not None and size != request.size_bytes:
            return UploadState(os.fsdecode(target.path), size, "size")
        if request.sha256 and digest_of(fd, check) != request.sha256:
            return UploadState(os.fsdecode(target.path), size, "digest")
        name = _part_name(request.upload_id)
        with held(target, must=bool(request.if_match)):
            if (unmatched := compare(request, target)) is not None:
                return unmatched
            check_writable(target)
            try:
                done = put_in_place(
                    fd, name, target, syncs=request.sync, mode=request.mode, create_only=request.create_only
                )
            except FileExistsError:
                return Unmatched(present(target))
        return FilePut(done.path, etag_of(os.fstat(fd)), size, created=target.mode is None)


def drop(request: DropUpload, resolver: Resolver) -> Done:
    """Remove the part file. A request that appends to it goes on in a file without a name."""
    with _target_of(request.path, resolver) as target:
        try:
            os.unlink(_part_name(request.upload_id), dir_fd=target.directory_fd)
        except FileNotFoundError:
            pass
        return Done(os.fsdecode(target.path))


@contextmanager
def _target_of(path: str, resolver: Resolver) -> Iterator[FileTarget]:
    """Find the file to be written by its resolved path. No directory is made; one that is gone took the part along."""
    with parent_of(path, resolver) as (directory_fd, name, real):
        yield FileTarget(directory_fd, real, name, mode_of_file(name, directory_fd))


def _part_name(upload_id: str) -> bytes:
    if not _ID.match(upload_id):
        raise Refused("BAD_REQUEST", "no id of an upload")
    return f".sandkasten-{upload_id}.part".encode()


@contextmanager
def _part(upload_id: str, target: FileTarget) -> Iterator[int]:
    """Open a part file for this request alone."""
    fd = os.open(_part_name(upload_id), _OPEN, dir_fd=target.directory_fd)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:  # a command has put another file there
            raise Refused("NOT_A_FILE", "the part file was replaced")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK:
                raise
            raise Refused("EXISTS", "another request is at this upload") from None
        yield fd
    finally:
        os.close(fd)


def digest_of(fd: int, check: Check = never_ends) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    digest, offset = hashlib.sha256(), 0
    while chunk := os.pread(fd, _HASH_BYTES, offset):
        digest.update(chunk)
        offset += len(chunk)
        check()
    return digest.hexdigest()
