"""Content of one file as the body itself: streamed both ways at any size, in parts, and by version.

Neither end holds more than a few pieces. Versions are those that `file_entries.py` lists. A write takes place in one
step, at its end; a client that leaves before leaves the old file.

Sources: RFC 9110 §8.8.3 (ETag), §13.1 (conditions), §14 (ranges).
"""

from __future__ import annotations

import re
from email.utils import formatdate
from typing import ClassVar, NewType

import attrs

from runner.wire.protocol import Done, FilePart, FilePut, GetFile, PutFile, Unmatched
from sandkasten.api.http.errors import Answer, Headers, json_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.json import Body
from sandkasten.api.resources.fields import (
    ETAG,
    Choice,
    FileMode,
    FilePath,
    add_kinds,
    read_head,
    read_query,
    spell_path,
)
from sandkasten.api.resources.file_entries import Placed
from sandkasten.errors import (
    PreconditionFailed,
    RangeNotSatisfiable,
    RunnerProtocolError,
    WorkInterrupted,
)
from sandkasten.model.workspace import WRITE_S
from sandkasten.supervisor import FileStream

BYTES = "application/octet-stream"
ANY_SIZE = 1 << 60
"""The session's disk is the bound."""
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})\Z")
_MAX_ETAGS = 64

ByteRange = NewType("ByteRange", tuple[int | None, int | None])
ETags = NewType("ETags", tuple[str, ...])
NoFile = NewType("NoFile", str)
_NO_ETAGS = ETags(())


def _byte_range(value: object) -> tuple[int | None, int | None]:
    """Return the first and the last byte of the one range that is asked for; nothing for several, or for other units:
    then the whole file is the answer."""
    found = _RANGE.match(str(value))
    start, end = (int(each) if each else None for each in found.groups()) if found else (None, None)
    return (None, None) if start is not None and end is not None and end < start else (start, end)


def _etags(value: object) -> tuple[str, ...]:
    text = str(value)
    found = tuple(ETAG.findall(text))
    if not 0 < len(found) <= _MAX_ETAGS or ETAG.sub("", text).strip(", \t"):
        raise ValueError("must be ETags, or *")
    return found


add_kinds({ByteRange: _byte_range, ETags: _etags, NoFile: Choice(("*",))})


@attrs.frozen(kw_only=True)
class GetQuery(Placed):
    """The query of a file's content."""

    path: FilePath


@attrs.frozen(kw_only=True)
class PutQuery(Placed):
    """The query of a file to write. `mode` is octal; without it the file keeps its mode, and a new one gets 0644."""

    path: FilePath
    mode: FileMode | None = None


@attrs.frozen
class GetHead:
    """The part of a file that is asked for, and the versions that the client has."""

    range: ByteRange | None = None
    if_range: str = ""
    if_none_match: ETags = _NO_ETAGS


@attrs.frozen
class WriteHead:
    """The versions that a file to be written must have, or `*` that there must be none."""

    if_match: ETags = _NO_ETAGS
    if_none_match: NoFile | None = None


@attrs.frozen
class PutBody(Body):
    """A file was written; `path` is resolved."""

    gives: ClassVar[tuple[str, ...]] = ("etag",)
    path: str
    etag: str
    size: int


async def get(exchange: Exchange) -> None:
    """Read a file, or with `Range` a part."""
    query = read_query(exchange, GetQuery)
    asked = read_head(exchange, GetHead)
    start, end = asked.range or (None, None)
    request = GetFile(
        query.at(query.path),
        start=start,
        end=end,
        if_none_match=asked.if_none_match,
        if_range=asked.if_range,
        head_only=exchange.method == "HEAD",
        user=query.user,
    )
    await exchange.drop_body()
    # No task looks for a client that leaves: the next write finds out, and the sandbox gives its pieces at once.
    async with exchange.files.stream(request) as stream:
        head = await stream.head(FilePart)
        if head.result == "unsatisfiable":
            raise RangeNotSatisfiable("the part begins behind the end of the file", size=head.size_bytes)
        status, headers = _head_of(head)
        await exchange.start(status, headers)
        await exchange.finish(await send_content(exchange, stream, 0 if request.head_only else head.count))


async def send_content(exchange: Exchange, stream: FileStream, count: int) -> bytes:
    """Send a file's content, `count` bytes, and return the last piece of it."""
    last = b""
    async for piece in stream:
        count -= len(piece)
        if count < 0:
            raise RunnerProtocolError("more of a file than was announced")
        if last:
            await exchange.write(last)
        last = piece
    await stream.answer(Done)
    if count:
        raise WorkInterrupted("the file became shorter while it was read")
    return last


def _head_of(head: FilePart) -> tuple[int, Headers]:
    headers: Headers = (("etag", head.etag), ("accept-ranges", "bytes"))
    if head.result == "unchanged":
        return 304, headers
    headers = (("content-type", BYTES), ("content-length", str(head.count)), *headers)
    if 0 <= head.mtime_us < 1 << 52:  # years that a date can have
        headers = (*headers, ("last-modified", formatdate(head.mtime_us // 10**6, usegmt=True)))
    if head.result == "whole":
        return 200, headers
    last = head.offset + head.count - 1
    return 206, (*headers, ("content-range", f"bytes {head.offset}-{last}/{head.size_bytes}"))


async def put(exchange: Exchange) -> Answer:
    """Write a file from the body, replacing one that is there; missing directories are made."""
    query = read_query(exchange, PutQuery)
    conditions = read_head(exchange, WriteHead)
    request = PutFile(
        query.at(query.path),
        query.mode,
        if_match=conditions.if_match,
        create_only=conditions.if_none_match is not None,
        user=query.user,
    )
    async with exchange.made_files().stream(request, patience_s=WRITE_S) as stream:
        await receive_into(exchange, stream)
        done: FilePut | Unmatched = await stream.end((FilePut, Unmatched))
    return put_answer(done)


async def receive_into(exchange: Exchange, stream: FileStream) -> None:
    """Send the body into the sandbox; the rest of it is not read once the sandbox has answered."""
    while chunk := await exchange.read_chunk(limit_bytes=ANY_SIZE):
        if not await stream.send(chunk):
            return


def put_answer(done: FilePut | Unmatched) -> Answer:
    """Return the answer to a write. Raises `PreconditionFailed`."""
    if isinstance(done, Unmatched):
        raise PreconditionFailed("the file is of another version", etag=done.etag)
    body = PutBody(spell_path(done.path), done.etag, done.size_bytes)
    return json_answer(body, status=201 if done.created else 200, headers=(("etag", done.etag),))
