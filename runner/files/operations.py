"""Operations on files: listing, looking, removing, measuring, packing. Run in a file worker as the sandbox user; may
block.

Paths are resolved by `Resolver`: the kernel decides, and a path that leads outside is refused. From there on everything
goes by descriptors.
"""

from __future__ import annotations

import errno
import heapq
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager

from runner.files import archive
from runner.files.paths import Resolver, refusal
from runner.files.tree import Walk, describe, open_directory
from runner.loop.context import Refused
from runner.loop.kernel import Kernel
from runner.wire.protocol import (
    CHUNK_BYTES,
    Done,
    FileEntry,
    ListFiles,
    Listing,
    Measure,
    Measured,
    Pack,
    RemoveFile,
    StatFile,
    Unpack,
)

Request = ListFiles | StatFile | RemoveFile | Measure | Pack | Unpack

MAX_LISTED = 1000
_LISTING_BYTES = 160 * 1024
"""Well below `MAX_FRAME_BYTES`, as JSON."""
_ENTRY_BYTES = 200
_JSON_BYTES = 6
"""Most that a byte of a name takes as JSON."""
_CLOCK_EVERY = 256


def perform(request: Request, resolver: Resolver, kernel: Kernel, *, input_fd: int, output_fd: int) -> object:
    """Perform a request and return the answer.

    Raises:
        Refused, OSError
    """
    match request:
        case ListFiles():
            return _list(request, resolver)
        case StatFile(path):
            with _parent_of(path, resolver) as (parent_fd, name, real):
                status = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
                return describe(parent_fd, name, status, path=os.path.normpath(os.path.join(real, name)))
        case RemoveFile(path, recursive):
            return _remove(path, resolver, recursive=recursive)
        case Measure():
            return _measure(request, resolver)
        case Pack(path):
            with _directory(path, resolver) as (fd, _), open(output_fd, "wb", CHUNK_BYTES, closefd=False) as out:
                archive.check_readable(fd)
                return archive.pack(fd, out)
        case Unpack(max_entries, max_bytes):
            with _directory(".", resolver) as (fd, _), open(input_fd, "rb", CHUNK_BYTES, closefd=False) as source:
                return archive.unpack(fd, source, kernel, max_entries=max_entries, max_bytes=max_bytes)


@contextmanager
def _directory(path: str, resolver: Resolver) -> Iterator[tuple[int, bytes]]:
    """Open the directory that a path leads to; yield descriptor and real path."""
    try:
        path_fd, real = resolver.open_existing(resolver.encode(path))
    except OSError as error:
        raise refusal(error, path) from None
    try:
        if not stat.S_ISDIR(os.fstat(path_fd).st_mode):
            raise Refused("NOT_A_DIRECTORY", f"no directory: {path[:200]}")
        fd = open_directory(path_fd, b".")
    except OSError as error:
        raise refusal(error, path) from None
    finally:
        os.close(path_fd)
    try:
        yield fd, real
    finally:
        os.close(fd)


@contextmanager
def _parent_of(path: str, resolver: Resolver) -> Iterator[tuple[int, bytes, bytes]]:
    """Open the directory above the file that a path names; yield descriptor, name and real path. The name may be a
    link, which is not followed, and is `.` for a root."""
    encoded = resolver.encode(path).rstrip(b"/")
    directory, name = os.path.split(encoded)
    if resolver.is_root(encoded) or name in (b".", b".."):
        directory, name = encoded, b"."
    try:
        fd, real = resolver.open_existing(directory)
    except OSError as error:
        raise refusal(error, path) from None
    try:
        yield fd, name, real
    except OSError as error:
        raise refusal(error, path) from None
    finally:
        os.close(fd)


def _list(request: ListFiles, resolver: Resolver) -> Listing:
    # Names are read as they come and the first ones behind `after` are kept: a huge directory costs time, not memory.
    after, limit = os.fsencode(request.after), min(max(request.limit, 1), MAX_LISTED)
    with _directory(request.path, resolver) as (fd, real):
        with os.scandir(fd) as found:
            names = (name for each in found if (name := os.fsencode(each.name)) > after)
            first = heapq.nsmallest(limit + 1, names)
        entries: list[FileEntry] = []
        room = _LISTING_BYTES
        for name in first[:limit]:
            try:
                entry = describe(fd, name, os.stat(name, dir_fd=fd, follow_symlinks=False))
            except FileNotFoundError:
                continue
            room -= _ENTRY_BYTES + _JSON_BYTES * (len(name) + len(os.fsencode(entry.target)))
            if room < 0 and entries:
                return Listing(os.fsdecode(real), tuple(entries), more=True)
            entries.append(entry)
        return Listing(os.fsdecode(real), tuple(entries), more=len(first) > limit)


def _remove(path: str, resolver: Resolver, *, recursive: bool) -> Done:
    with _parent_of(path, resolver) as (parent_fd, name, real):
        if name == b".":
            raise Refused("PERMISSION_DENIED", "this directory itself can't be removed by its own name")
        status = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode):
            os.unlink(name, dir_fd=parent_fd)
        else:
            if recursive:
                _empty(open_directory(parent_fd, name))
            _remove_directory(name, parent_fd)
        return Done(os.fsdecode(os.path.join(real, name)))


def _remove_directory(name: bytes, parent_fd: int) -> None:
    try:
        os.rmdir(name, dir_fd=parent_fd)
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            raise Refused("NOT_EMPTY", f"the directory is not empty: {os.fsdecode(name)[:200]}") from None
        raise


def _empty(top_fd: int) -> None:
    """Remove everything below a directory, whose descriptor is closed."""
    try:
        for found in Walk(top_fd):
            if not stat.S_ISDIR(found.status.st_mode):
                os.unlink(found.name, dir_fd=found.parent_fd)
            elif found.is_left:
                _remove_directory(found.name, found.parent_fd)
    finally:
        os.close(top_fd)


def _measure(request: Measure, resolver: Resolver) -> Measured:
    entries = files = size = disk = 0
    linked: set[tuple[int, int]] = set()
    give_up_at = time.monotonic() + request.max_ms / 1000
    with _directory(request.path, resolver) as (fd, _):
        walk = Walk(fd, passes_denied=True)
        for found in walk:
            if found.is_left:
                continue
            entries += 1
            if entries > request.max_entries or (entries % _CLOCK_EVERY == 0 and time.monotonic() > give_up_at):
                return Measured(entries - 1, files, size, disk, complete=False)
            status = found.status
            if status.st_nlink > 1 and stat.S_ISREG(status.st_mode):
                if (status.st_dev, status.st_ino) in linked:
                    continue
                linked.add((status.st_dev, status.st_ino))
            disk += status.st_blocks * 512
            if stat.S_ISREG(status.st_mode):
                files, size = files + 1, size + status.st_size
    return Measured(entries, files, size, disk, complete=walk.denied == 0)
