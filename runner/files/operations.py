"""Operations on files: listing, looking, removing, measuring, packing. Run in a file worker as the sandbox user; may
block.

Paths are resolved by `Resolver`: the kernel decides, and a path that leads outside is refused. From there on everything
goes by descriptors.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from io import BufferedReader, BufferedWriter, RawIOBase
from typing import Any

from runner.files import archive, changes, contents, edit, search, uploads, view, watch, zip_archive
from runner.files.paths import Resolver, directory_of, made_directory_of, open_regular, parent_of, refusal
from runner.files.tree import CLOCK_EVERY, JSON_BYTES, PAGE_BYTES, Check, Names, OrderedWalk, Walk, describe, etag_of
from runner.loop.context import Refused
from runner.loop.kernel import Kernel
from runner.process.users import MAX_FILE_BYTES, names_of
from runner.wire.protocol import (
    CHUNK_BYTES,
    AppendUpload,
    BeginUpload,
    ChangeMode,
    ChangeOwner,
    CommitUpload,
    CopyFile,
    DropUpload,
    EditFiles,
    FileEntry,
    FileRequest,
    FileStats,
    GetFile,
    GlobFiles,
    ListFiles,
    Listing,
    LookUpload,
    MakeDirectory,
    Measure,
    Measured,
    MoveFile,
    Pack,
    Packed,
    PutFile,
    RemoveFile,
    SearchFiles,
    StatFile,
    StatFiles,
    Unpack,
    ViewFile,
    WatchFiles,
)

MAX_LISTED = 1000
MAX_LISTED_DEPTH = 32
_ENTRY_BYTES = 200
_UNREACHED = frozenset({"FILE_NOT_FOUND", "PERMISSION_DENIED", "PATH_OUTSIDE", "NOT_A_FILE", "INVALID_PATH"})
"""Refusals of one path among many, which leave the others as they are."""


@dataclass(frozen=True, slots=True)
class FileWork:
    """Means of a worker: paths, system calls, a head for the client (to be given before any output), the content of the
    request, of which a read returns what has come, and the way of the answer's content. `passing` is called with the
    name of each step that was just done. `check` raises when the client has left; what was begun is then undone.
    `send_part` is the way of a file's content that needs no reading."""

    resolver: Resolver
    kernel: Kernel
    start: Callable[[object], None]
    source: RawIOBase
    out: RawIOBase
    passing: Callable[[str], None]
    check: Check
    send_part: contents.SendPart | None = None

    @property
    def names(self) -> Names:
        """Names of the sandbox's users and groups, as far as the user of the request may read them."""
        return Names(names_of(_account_file("/etc/passwd")), names_of(_account_file("/etc/group"), is_group=True))


def perform(request: FileRequest, work: FileWork) -> object:
    """Perform a request and return the answer.

    Raises:
        Refused, OSError
    """
    return _HANDLERS[type(request)](request, work)


def _account_file(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return b""
    with open(fd, "rb") as file:
        return file.read(MAX_FILE_BYTES) if stat.S_ISREG(os.fstat(fd).st_mode) else b""


def _pack(request: Pack, work: FileWork) -> Packed:
    with (
        directory_of(request.path, work.resolver) as (fd, real),
        BufferedWriter(work.out, CHUNK_BYTES) as out,
    ):
        tree = Walk(fd, real=real)
        if request.kind == "zip":
            archive.check_readable(tree, max_entries=zip_archive.MAX_ENTRIES)
            return zip_archive.pack(tree, out)
        archive.check_readable(tree)
        return archive.pack(tree, out)


def _unpack(request: Unpack, work: FileWork) -> Packed:
    with (
        made_directory_of(request.path, work.resolver) as (fd, real),
        BufferedReader(work.source, CHUNK_BYTES) as source,
    ):
        maker = archive.TreeMaker(fd, real, work.kernel, request, work.check)
        if request.kind == "zip":
            return zip_archive.unpack(fd, source, maker)
        return archive.unpack(source, maker)


def _stat(request: StatFile, work: FileWork) -> FileEntry:
    if not request.digest:
        return _entry_at(request.path, work.resolver, work.names)
    fd, real = open_regular(request.path, work.resolver)
    try:
        entry = describe(fd, os.path.basename(real), os.fstat(fd), path=real, names=work.names)
        digest = uploads.digest_of(fd)
        if etag_of(os.fstat(fd)).removeprefix("W/") != entry.etag.removeprefix("W/"):
            raise Refused("EXISTS", f"the file was changed while it was read: {request.path[:200]}")
    finally:
        os.close(fd)
    return replace(entry, sha256=digest)


def _entry_at(path: str, resolver: Resolver, names: Names) -> FileEntry:
    with parent_of(path, resolver) as (parent_fd, name, real):
        status = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
        return describe(parent_fd, name, status, path=os.path.normpath(os.path.join(real, name)), names=names)


def _stat_many(request: StatFiles, work: FileWork) -> FileStats:
    entries: list[FileEntry | None] = []
    names, room = work.names, PAGE_BYTES
    for path in request.paths:
        try:
            entry = _entry_at(path, work.resolver, names)
            if request.follow and entry.kind == "symlink":
                entry = _followed(path, work.resolver, names)
        except Refused as refused:
            if refused.error.code not in _UNREACHED:
                raise
            entries.append(None)
            continue
        room -= _size_of(entry)
        if room < 0 and entries:
            break
        entries.append(entry)
    return FileStats(tuple(entries))


def _followed(path: str, resolver: Resolver, names: Names) -> FileEntry:
    """Describe what a link leads to, under the name of the path asked for."""
    try:
        fd, real = resolver.open_existing(resolver.encode(path))
    except OSError as error:
        raise refusal(error, path) from None
    try:
        return describe(fd, os.path.basename(real) or b"/", os.fstat(fd), path=real, names=names)
    finally:
        os.close(fd)


def _size_of(entry: FileEntry) -> int:
    """Return an upper bound of an entry's size as JSON."""
    texts = entry.name, entry.target, entry.path, entry.user_name, entry.group_name
    return _ENTRY_BYTES + JSON_BYTES * sum(len(os.fsencode(text)) for text in texts)


def _list(request: ListFiles, work: FileWork) -> Listing:
    limit, depth = min(max(request.limit, 1), MAX_LISTED), min(max(request.depth, 1), MAX_LISTED_DEPTH)
    entries: list[FileEntry] = []
    room, names = PAGE_BYTES, work.names
    wanted = search.Pattern(request.glob) if request.glob else None
    with directory_of(request.path, work.resolver) as (fd, real):
        for path, parent_fd, name in OrderedWalk(real, depth).below(fd, after=os.fsencode(request.after)):
            if wanted is not None and not wanted.matches(path if "/" in request.glob else name):
                continue
            try:
                entry = describe(parent_fd, name, os.stat(name, dir_fd=parent_fd, follow_symlinks=False), names=names)
            except FileNotFoundError:
                continue
            entry = replace(entry, name=os.fsdecode(path))
            room -= _size_of(entry)
            if len(entries) == limit or (room < 0 and entries):
                return Listing(os.fsdecode(real), tuple(entries), more=True)
            entries.append(entry)
    return Listing(os.fsdecode(real), tuple(entries), more=False)


def _measure(request: Measure, work: FileWork) -> Measured:
    entries = files = size = disk = 0
    linked: set[tuple[int, int]] = set()
    give_up_at = time.monotonic() + request.max_ms / 1000
    with directory_of(request.path, work.resolver) as (fd, _):
        walk = Walk(fd, passes_denied=True)
        for found in walk:
            if found.is_left:
                continue
            entries += 1
            if entries > request.max_entries or (entries % CLOCK_EVERY == 0 and time.monotonic() > give_up_at):
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


_HANDLERS: Mapping[type[FileRequest], Callable[[Any, FileWork], object]] = {  # each takes the request of its row
    GetFile: lambda request, work: contents.get(request, work.resolver, work.out, work.send_part, work.start),
    MakeDirectory: lambda request, work: changes.make_directory(request, work.resolver),
    MoveFile: lambda request, work: changes.move(request, work.resolver, work.kernel, work.check),
    CopyFile: lambda request, work: changes.copy(request, work.resolver, work.kernel, work.check),
    ChangeMode: lambda request, work: changes.change_mode(request, work.resolver, work.check),
    ChangeOwner: lambda request, work: changes.change_owner(request, work.resolver, work.check),
    PutFile: lambda request, work: contents.put(request, work.resolver, work.source, work.passing),
    BeginUpload: lambda request, work: uploads.begin(request, work.resolver),
    AppendUpload: lambda request, work: uploads.append(request, work.resolver, work.source),
    LookUpload: lambda request, work: uploads.look(request, work.resolver),
    CommitUpload: lambda request, work: uploads.commit(request, work.resolver, work.check),
    DropUpload: lambda request, work: uploads.drop(request, work.resolver),
    EditFiles: lambda request, work: edit.edit(request, work.resolver, work.source, work.check),
    ViewFile: lambda request, work: view.view(request, work.resolver, work.out),
    WatchFiles: lambda request, work: watch.watch(request, work.resolver, work.kernel, work.start, work.out),
    ListFiles: _list,
    GlobFiles: lambda request, work: search.glob(request, work.resolver),
    SearchFiles: lambda request, work: search.search(request, work.resolver, work.out),
    StatFile: _stat,
    StatFiles: _stat_many,
    RemoveFile: lambda request, work: changes.remove(request, work.resolver, work.check),
    Measure: _measure,
    Pack: _pack,
    Unpack: _unpack,
}
