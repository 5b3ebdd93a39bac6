"""Changes of directory trees: made, moved, copied, removed, with another mode or owner.

All of it happens in the sandbox, with the rights of the request's user; paths are those of `file_entries.py`. It ends
when the client leaves.
"""

from __future__ import annotations

import attrs

from runner.wire.protocol import (
    ChangeMode,
    ChangeOwner,
    CopyFile,
    Done,
    FileRequest,
    MakeDirectory,
    MoveFile,
    RemoveFile,
)
from sandkasten.api.http.errors import Answer, json_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.resources.fields import FileId, FileMode, FilePath, read_query, read_request, spell_path
from sandkasten.api.resources.file_entries import Placed
from sandkasten.api.resources.files import WrittenBody
from sandkasten.model.workspace import WRITE_S

_SAME = FileId(-1)


@attrs.frozen(kw_only=True)
class MakeRequest(Placed):
    """A directory to make. `mode` is octal, by default 0755."""

    path: FilePath
    parents: bool = False
    mode: FileMode | None = None


@attrs.frozen(kw_only=True)
class MoveRequest(Placed):
    """A file or directory, and the name that it, or its copy, is to have."""

    from_: FilePath
    to: FilePath
    overwrite: bool = False


@attrs.frozen(kw_only=True)
class ModeRequest(Placed):
    """A file, and its new mode in octal."""

    path: FilePath
    mode: FileMode
    recursive: bool = False


@attrs.frozen(kw_only=True)
class OwnerRequest(Placed):
    """A file, and its new user and group by number."""

    path: FilePath
    uid: FileId = _SAME
    gid: FileId = _SAME
    recursive: bool = False


@attrs.frozen(kw_only=True)
class RemovalQuery(Placed):
    """The query of a removal."""

    path: FilePath
    recursive: bool = False


async def make_directory(exchange: Exchange) -> Answer:
    """Make a directory, with `parents` also those above it."""
    request = await read_request(exchange, MakeRequest)
    path = request.at(request.path)
    return await _perform(exchange, MakeDirectory(path, request.parents, request.mode, user=request.user))


async def move(exchange: Exchange) -> Answer:
    """Move a file or directory."""
    request = await read_request(exchange, MoveRequest)
    names = request.at(request.from_), request.at(request.to)
    return await _perform(exchange, MoveFile(*names, request.overwrite, user=request.user))


async def copy(exchange: Exchange) -> Answer:
    """Copy a file, or a directory with all that is below it."""
    request = await read_request(exchange, MoveRequest)
    names = request.at(request.from_), request.at(request.to)
    return await _perform(exchange, CopyFile(*names, request.overwrite, user=request.user))


async def remove(exchange: Exchange) -> Answer:
    """Remove a file, or with `recursive` a directory."""
    query = read_query(exchange, RemovalQuery)
    path = query.at(query.path)
    return await _perform(exchange, RemoveFile(path, query.recursive, user=query.user))


async def change_mode(exchange: Exchange) -> Answer:
    """Set the permission bits of a file."""
    request = await read_request(exchange, ModeRequest)
    path = request.at(request.path)
    return await _perform(exchange, ChangeMode(path, request.mode, request.recursive, user=request.user))


async def change_owner(exchange: Exchange) -> Answer:
    """Set the user and the group of a file."""
    request = await read_request(exchange, OwnerRequest)
    path = request.at(request.path)
    return await _perform(exchange, ChangeOwner(path, request.uid, request.gid, request.recursive, user=request.user))


async def _perform(exchange: Exchange, request: FileRequest) -> Answer:
    done = await exchange.until_disconnect(lambda: exchange.files.ask(request, Done, patience_s=WRITE_S))
    return json_answer(WrittenBody(True, spell_path(done.path)))
