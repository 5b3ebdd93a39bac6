"""E2B's `/files`: content of files as bodies, streamed both ways at any size.

An upload is a form, whose parts named `file` have the whole path as their file name, or the bytes of one file, maybe as
gzip. Each file is put in place at its end, with the rights of the request's user.
"""

from __future__ import annotations

import posixpath
import zlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import attrs
from werkzeug.sansio.multipart import Epilogue, Field, File

from runner.wire.protocol import FilePart, FilePut, GetFile, PutFile
from sandkasten.api.e2b.context import EnvdRequest, shown
from sandkasten.api.http.errors import Answer, json_answer
from sandkasten.api.resources.fields import read_query
from sandkasten.api.resources.file_contents import ANY_SIZE, BYTES, send_content
from sandkasten.api.resources.files import FORM, Parts
from sandkasten.errors import InvalidRequest
from sandkasten.model.workspace import WRITE_S

_GZIP = 16 + zlib.MAX_WBITS
"""A gzip member, as zlib names the format: inflateInit2 in zlib's manual."""

_PIECE_BYTES = 256 * 1024


@attrs.frozen
class ContentQuery:
    """The query of a file. The signature was checked before; `username` is the user, who may be in a header."""

    path: str | None = None
    username: str | None = None
    signature: str | None = None
    signature_expiration: str | None = None


async def download(request: EnvdRequest) -> None:
    """Read a file."""
    exchange = request.exchange
    path = read_query(exchange, ContentQuery).path
    if path is None:
        raise InvalidRequest("the query has no path", path="is required")
    await exchange.drop_body()
    wanted = GetFile(await request.place(path), head_only=exchange.method == "HEAD", user=request.user)
    async with exchange.files.stream(wanted) as stream:
        head = await stream.head(FilePart)
        await exchange.start(200, (("content-type", BYTES), ("content-length", str(head.count))))
        await exchange.finish(await send_content(exchange, stream, 0 if wanted.head_only else head.count))


async def upload(request: EnvdRequest) -> Answer:
    """Write files; answered once all are in place."""
    exchange = request.exchange
    path = read_query(exchange, ContentQuery).path
    if exchange.media_type == FORM:
        return json_answer(await _take_form(request, path))
    if path is None:
        raise InvalidRequest("a body that is one file needs its path", path="is required")
    if exchange.media_type != BYTES:
        raise InvalidRequest(f"send files as {FORM} or {BYTES}", content_type=exchange.media_type[:100])
    async with aclosing(_body(request)) as pieces:
        return json_answer([await _put(request, path, pieces)])


async def _take_form(request: EnvdRequest, path: str | None) -> Sequence[dict[str, Any]]:
    """Store the files of a form; with `path` there may be one file only."""
    parts = Parts(request.exchange, limit_bytes=ANY_SIZE)
    written: list[dict[str, Any]] = []
    while not isinstance(event := await parts.next(), Epilogue):
        if isinstance(event, File) and event.name == "file":
            if path is not None and written:
                raise InvalidRequest("the form has several files for one path", path="is for one file")
            async with aclosing(_part(parts)) as pieces:
                written.append(await _put(request, path or event.filename, pieces))
        elif isinstance(event, Field | File):
            async with aclosing(_part(parts)) as pieces:
                async for _ in pieces:
                    pass
    if not written:
        raise InvalidRequest("the form has no file", file="is required, with a file name")
    return written


async def _part(parts: Parts) -> AsyncGenerator[bytes, None]:
    is_open = True
    while is_open:
        data = await parts.data()
        is_open = data.more_data
        yield data.data


async def _body(request: EnvdRequest) -> AsyncGenerator[bytes, None]:
    """Yield the body, unpacked if it is gzip; never much more at once than was sent."""
    exchange = request.exchange
    coding = (exchange.header(b"content-encoding") or "identity").strip().lower()
    if coding not in ("identity", "gzip"):
        raise InvalidRequest("the body's coding is not known", content_encoding="must be gzip or identity")
    unpacking = zlib.decompressobj(_GZIP) if coding == "gzip" else None
    while chunk := await exchange.read_chunk(limit_bytes=ANY_SIZE):
        if unpacking is None:
            yield chunk
            continue
        try:
            while chunk and not unpacking.eof:
                yield unpacking.decompress(chunk, _PIECE_BYTES)
                chunk = unpacking.unconsumed_tail
        except zlib.error:
            raise InvalidRequest("the body is no gzip", content_encoding="is gzip") from None
    if unpacking is not None and not unpacking.eof:
        raise InvalidRequest("the gzip in the body is cut off", content_encoding="is gzip")


async def _put(request: EnvdRequest, path: str, pieces: AsyncGenerator[bytes, None]) -> dict[str, Any]:
    place = posixpath.normpath(await request.place(path))
    async with request.exchange.files.stream(PutFile(place, user=request.user), patience_s=WRITE_S) as stream:
        async for piece in pieces:
            if piece and not await stream.send(piece):
                break
        await stream.end(FilePut)
    return {"path": shown(place), "name": shown(posixpath.basename(place)), "type": "file"}
