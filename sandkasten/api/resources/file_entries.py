"""Directory entries of a session, or of a workspace without one: lists and properties.

Paths of a session are absolute, or relative to `cwd`, by default `/workspace`. `/` of a workspace is the workspace
itself. A byte of a name that is not UTF-8 is spelled as NUL and two hexadecimal digits in every `path`, both ways: no
name can hold NUL, so the spelling belongs to one path only.
"""

from __future__ import annotations

import base64
import os
import posixpath
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar, Self

import attrs

from runner.wire.protocol import FileEntry, FileStats, ListFiles, Listing, StatFile, StatFiles
from sandkasten.api.http.errors import Answer, json_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.json import Body, scrub
from sandkasten.api.resources.fields import (
    MAX_FILES,
    Depth,
    DigestName,
    FilePath,
    FilesLimit,
    Glob,
    NameCursor,
    Paths,
    User,
    encode_cursor,
    read_query,
    read_request,
    spell_path,
)
from sandkasten.errors import FileNotFound, RunnerProtocolError

HERE = FilePath(".")
FIRST_PAGE = NameCursor("")
_ALL = FilesLimit(MAX_FILES)
_ONE = Depth(1)
_ANY = Glob("")
_LIST_S = 600.0
"""Until a page of a list is found, or a digest: a pattern that little fits may take a walk through everything."""

# Requests -------------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Placed:
    """Fields of every request for files: `user` of the sandbox who performs it, by default the session's; `cwd`, where
    relative paths begin. A field that is not honoured is refused: it could be a condition or a place."""

    strict: ClassVar[bool] = True
    user: User | None = None
    cwd: FilePath = HERE

    def at(self, path: str) -> str:
        """Return a path of the request as the sandbox is asked for it."""
        return path if self.cwd == HERE else posixpath.join(self.cwd, path)


@attrs.frozen(kw_only=True)
class ListQuery(Placed):
    """The query of a list of files. `glob` is of names, or of paths below the directory if it has a `/`."""

    path: FilePath = HERE
    depth: Depth = _ONE
    limit: FilesLimit = _ALL
    cursor: NameCursor = FIRST_PAGE
    glob: Glob = _ANY


@attrs.frozen(kw_only=True)
class StatQuery(Placed):
    """The query of one file's properties; `follow`: of what a link leads to; `digest`: of the regular file that the
    path leads to, with a digest of its content."""

    path: FilePath = HERE
    follow: bool = False
    digest: DigestName | None = None


@attrs.frozen(kw_only=True)
class StatRequest(Placed):
    """Files whose properties are wanted."""

    paths: Paths
    follow: bool = False


# Answers --------------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class EntryBody(Body):
    """A directory entry. `name_base64` is there for a name that is not UTF-8; `modified_at` is null for a time that no
    calendar has."""

    name: str
    is_dir: bool
    type: str
    size: int
    mode: str
    owner: int
    modified_at: datetime | None
    target: str | None = None
    name_base64: str | None = None

    @classmethod
    def of(cls, entry: FileEntry, **others: Any) -> Self:  # others: fields of the subclass
        """Return an entry as clients see it."""
        name = posixpath.basename(entry.name) or "/"
        return cls(
            name=name,
            is_dir=entry.kind == "directory",
            type=entry.kind,
            size=entry.size_bytes,
            mode=f"{entry.mode:04o}",
            owner=entry.owner,
            modified_at=_moment(entry.mtime_us),
            target=entry.target if entry.kind == "symlink" else None,
            name_base64=None if scrub(name) == name else base64.b64encode(os.fsencode(name)).decode("ascii"),
            **others,
        )


@attrs.frozen(kw_only=True)
class FileInfoBody(EntryBody):
    """An entry with its resolved path, the ids and names of its user and group (null: the image names none), the
    version of its content, and the digest if it was asked for."""

    path: str
    uid: int
    gid: int
    user: str | None
    group: str | None
    etag: str
    sha256: str | None = None

    @classmethod
    def of_entry(cls, entry: FileEntry, path: str) -> FileInfoBody:
        """Return an entry as clients see it."""
        return cls.of(
            entry,
            path=spell_path(path),
            uid=entry.owner,
            gid=entry.group,
            user=entry.user_name or None,
            group=entry.group_name or None,
            etag=entry.etag,
            sha256=entry.sha256 or None,
        )


@attrs.frozen
class ListBody(Body):
    """A page of files in the order of the bytes of their paths; without `next_cursor` the last one."""

    path: str
    entries: Sequence[FileInfoBody]
    next_cursor: str | None = None


@attrs.frozen
class StatsBody(Body):
    """Properties in the order of the paths; null where no file can be reached."""

    entries: Sequence[FileInfoBody | None]


# Handlers -------------------------------------------------------------------------------------------------------------


async def list_files(exchange: Exchange) -> Answer:
    """List the files below a directory; with `depth` also those of its directories."""
    query = read_query(exchange, ListQuery)
    request = ListFiles(
        query.at(query.path),
        after=query.cursor,
        limit=query.limit,
        depth=query.depth,
        glob=query.glob,
        user=query.user,
    )
    listing = await exchange.until_disconnect(lambda: exchange.files.ask(request, Listing, patience_s=_LIST_S))
    entries = [FileInfoBody.of_entry(each, posixpath.join(listing.path, each.name)) for each in listing.entries]
    cursor = encode_cursor(listing.entries[-1].name) if listing.more and listing.entries else None
    return json_answer(ListBody(spell_path(listing.path), entries, cursor))


async def stat(exchange: Exchange) -> Answer:
    """Read the type, size, mode, owner, time and version of a file."""
    query = read_query(exchange, StatQuery)
    path = query.at(query.path)
    if query.digest:
        request = StatFile(path, digest=True, user=query.user)
        read = await exchange.until_disconnect(lambda: exchange.files.ask(request, FileEntry, patience_s=_LIST_S))
        return json_answer(FileInfoBody.of_entry(read, read.path))
    if query.follow:
        (entry,) = await entries_at(exchange, (path,), follow=True, user=query.user)
        if entry is not None:
            return json_answer(FileInfoBody.of_entry(entry, entry.path))
    entry = await exchange.files.ask(StatFile(path, user=query.user), FileEntry)
    if query.follow:
        raise FileNotFound(f"the link leads to no file: {spell_path(query.path)[:200]}")
    return json_answer(FileInfoBody.of_entry(entry, entry.path))


async def stat_many(exchange: Exchange) -> Answer:
    """Read the properties of many files; null for each that is not there, or can't be reached."""
    request = await read_request(exchange, StatRequest)
    paths = tuple(request.at(path) for path in request.paths)
    found = await entries_at(exchange, paths, follow=request.follow, user=request.user)
    return json_answer(StatsBody([None if each is None else FileInfoBody.of_entry(each, each.path) for each in found]))


async def entries_at(
    exchange: Exchange, paths: tuple[str, ...], *, follow: bool, user: str | None
) -> Sequence[FileEntry | None]:
    """Return the properties of files in the order of their paths, None for each that can't be reached."""
    found: list[FileEntry | None] = []
    while len(found) < len(paths):
        asked = StatFiles(paths[len(found) :], follow, user=user)
        answer = await exchange.files.ask(asked, FileStats)
        if not 0 < len(answer.entries) <= len(asked.paths):
            raise RunnerProtocolError("entries that nobody asked for, or none")
        found += answer.entries
    return found


def _moment(microseconds: int) -> datetime | None:
    """Return a file's time, which its writer chose freely; None if no calendar has it."""
    try:
        return datetime.fromtimestamp(microseconds / 10**6, UTC)
    except (ValueError, OverflowError, OSError):
        return None
