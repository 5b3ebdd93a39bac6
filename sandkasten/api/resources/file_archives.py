"""Archives of files of a session or workspace, both ways: tar, tar compressed with zstd, and zip.

Archives are made and unpacked inside, in a file worker. Zip and its compression are there, too. Zstandard alone is
here, over bytes that are not looked into: the runner imports the standard library only, which has none before Python
3.14. `Zstandard` bounds its threads, windows and pieces.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Literal

import attrs

from runner.wire.protocol import Pack, Packed, Unpack
from sandkasten.api.http.errors import Answer, json_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.json import Body
from sandkasten.api.http.zstandard import MAGIC
from sandkasten.api.resources.fields import FileArchiveFormat, FileId, FilePath, read_query
from sandkasten.api.resources.file_entries import HERE, Placed
from sandkasten.errors import InvalidRequest
from sandkasten.model.workspace import MAX_UNPACKED, WRITE_S
from sandkasten.supervisor import FileStream

TYPES = {"tar": "application/x-tar", "tar.zst": "application/zstd", "zip": "application/zip"}
_TAKEN = frozenset({*TYPES.values(), "application/octet-stream"})
_ZIPS = (b"PK\x03\x04", b"PK\x05\x06")
"""First bytes of a zip archive: of its first file, or of its table if it has none."""
_TAR = FileArchiveFormat("tar")


@attrs.frozen(kw_only=True)
class PackQuery(Placed):
    """The query of an archive of a directory."""

    path: FilePath = HERE
    format: FileArchiveFormat = _TAR


@attrs.frozen(kw_only=True)
class UnpackQuery(Placed):
    """The query of an archive to unpack below a directory. `uid` and `gid` are the owners of what is made, which only
    root may choose."""

    path: FilePath = HERE
    uid: FileId | None = None
    gid: FileId | None = None


@attrs.frozen
class UnpackedBody(Body):
    """An archive was unpacked; `skipped` members are of kinds that are not made."""

    ok: Literal[True]
    entries: int
    size_bytes: int
    skipped: int


async def pack(exchange: Exchange) -> None:
    """Download a directory as an archive."""
    query = read_query(exchange, PackQuery)
    kind: Literal["tar", "zip"] = "zip" if query.format == "zip" else "tar"
    await send_archive(exchange, Pack(query.at(query.path), kind, user=query.user), query.format, "files")


async def send_archive(exchange: Exchange, request: Pack, kind: str, name: str) -> None:
    """Send an archive of a kind, whose file is to have a name."""
    await exchange.drop_body()
    await exchange.until_disconnect(lambda: _send(exchange, request, kind, name))


async def _send(exchange: Exchange, request: Pack, kind: str, name: str) -> None:
    async with exchange.files.stream(request, patience_s=WRITE_S) as stream:
        first = await anext(stream, None)
        if first is None:  # an archive has an end at the least
            await stream.answer(Packed)
        disposition = f'attachment; filename="{name}.{kind}"'
        await exchange.start(200, (("content-type", TYPES[kind]), ("content-disposition", disposition)))
        if exchange.method == "HEAD":
            await exchange.finish()
            return
        last = b""
        async with aclosing(_all(first or b"", stream)) as pieces:
            if kind == "tar.zst":
                last = await exchange.zstandard.compress(pieces, exchange.write)
            else:
                async for piece in pieces:
                    await exchange.write(piece)
        await stream.answer(Packed)
        await exchange.finish(last)


async def _all(first: bytes, rest: FileStream) -> AsyncGenerator[bytes, None]:
    yield first
    async for piece in rest:
        yield piece


async def unpack(exchange: Exchange) -> Answer:
    """Unpack an archive below a directory, which is made if it is missing."""
    check_type(exchange)
    query = read_query(exchange, UnpackQuery)
    head = await head_of(exchange)
    request = Unpack(
        MAX_UNPACKED,
        exchange.settings.max_import_bytes,
        query.at(query.path),
        "zip" if head.startswith(_ZIPS) else "tar",
        owner=-1 if query.uid is None else query.uid,
        group=-1 if query.gid is None else query.gid,
        user=query.user,
    )
    async with exchange.made_files().stream(request, patience_s=WRITE_S) as stream:
        await forward(exchange, head, stream.send)
        packed = await exchange.until_disconnect(lambda: stream.end(Packed))
    return json_answer(UnpackedBody.take(packed, ok=True), status=201)


def check_type(exchange: Exchange) -> None:
    """Refuse a body that a web page could send unasked. Raises `InvalidRequest`."""
    if exchange.settings.api_key is None and exchange.media_type not in _TAKEN:
        raise InvalidRequest("without an API key an archive must say so", content_type=exchange.media_type)


async def head_of(exchange: Exchange) -> bytes:
    """Return the beginning of an archive, long enough to tell its kind. Raises `InvalidRequest`: there is none."""
    head = b""
    while len(head) < len(MAGIC) and (
        chunk := await exchange.read_chunk(limit_bytes=exchange.settings.max_upload_bytes)
    ):
        head += chunk
    if not head:
        raise InvalidRequest("there is no archive", body="is empty")
    return head


async def forward(exchange: Exchange, head: bytes, send: Callable[[bytes], Awaitable[object]]) -> None:
    """Send an archive that begins with `head` on, decompressed if it is compressed with zstd."""
    limit_bytes = exchange.settings.max_upload_bytes
    if not head.startswith(MAGIC):
        await send(head)
        while chunk := await exchange.read_chunk(limit_bytes=limit_bytes):
            await send(chunk)
        return
    decompressor = exchange.zstandard.decompressor()
    await decompressor.feed(head, send)
    while chunk := await exchange.read_chunk(limit_bytes=limit_bytes):
        await decompressor.feed(chunk, send)
    decompressor.finish()
