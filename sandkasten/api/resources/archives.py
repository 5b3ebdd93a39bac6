"""Workspaces as archives, out and in: tar or tar.zst, streamed both ways. Raw ASGI; nothing is kept on the way.

What is in an archive is no business of this module: it is packed and unpacked in the sandbox of the workspace.
"""

from __future__ import annotations

import attrs

from sandkasten.api.http.errors import json_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.zstandard import MAGIC
from sandkasten.api.resources.query import query_choice, query_flag
from sandkasten.api.resources.workspaces import TOP, query_path
from sandkasten.model.errors import InvalidRequest
from sandkasten.supervisor_workspaces import ArchiveWriter

_TYPES = {"tar": "application/x-tar", "tar.zst": "application/zstd"}
_IMPORTED = frozenset({*_TYPES.values(), "application/octet-stream"})


async def export(exchange: Exchange) -> None:
    """GET /v1/workspaces/{id}/export?format="""
    await _download(exchange, TOP, query_choice(exchange, "format", *_TYPES) or "tar.zst")


async def download(exchange: Exchange) -> None:
    """GET /v1/workspaces/{id}/fs/download?path=&format="""
    await _download(exchange, query_path(exchange), query_choice(exchange, "format", *_TYPES) or "tar")


async def _download(exchange: Exchange, path: str, kind: str) -> None:
    await exchange.read_body(limit_bytes=exchange.settings.max_request_bytes)  # a GET's body means nothing
    await exchange.until_disconnect(lambda: _send(exchange, path, kind))


async def _send(exchange: Exchange, path: str, kind: str) -> None:
    async with exchange.workspaces.open_pack(exchange.workspace_id, path) as archive:
        name = f'attachment; filename="{exchange.workspace_id}.{kind}"'
        await exchange.start(200, (("content-type", _TYPES[kind]), ("content-disposition", name)))
        if exchange.method == "HEAD":
            await exchange.finish()
        elif kind == "tar":
            async for piece in archive:
                await exchange.write(piece)
            await exchange.finish()
        else:
            await exchange.finish(await exchange.zstandard.compress(aiter(archive), exchange.write))


async def import_archive(exchange: Exchange) -> None:
    """POST /v1/workspaces/{id}/import?replace="""
    if exchange.settings.api_key is None and exchange.media_type not in _IMPORTED:  # no web page can send that unasked
        raise InvalidRequest("without an API key an archive must say so", content_type=exchange.media_type)
    replaces = query_flag(exchange, "replace")
    async with exchange.workspaces.open_unpack(exchange.workspace_id, replace=replaces) as archive:
        await _receive(exchange, archive)
        packed = await archive.commit()
    await exchange.answer(json_answer({"ok": True, **attrs.asdict(packed)}, status=201))


async def _receive(exchange: Exchange, archive: ArchiveWriter) -> None:
    limit_bytes = exchange.settings.max_upload_bytes
    head = b""
    while len(head) < len(MAGIC) and (chunk := await exchange.read_chunk(limit_bytes=limit_bytes)):
        head += chunk
    if not head:
        raise InvalidRequest("there is no archive", body="is empty")
    if not head.startswith(MAGIC):
        await archive.send(head)
        while chunk := await exchange.read_chunk(limit_bytes=limit_bytes):
            await archive.send(chunk)
        return
    decompressor = exchange.zstandard.decompressor()
    await decompressor.feed(head, archive.send)
    while chunk := await exchange.read_chunk(limit_bytes=limit_bytes):
        await decompressor.feed(chunk, archive.send)
    decompressor.finish()
