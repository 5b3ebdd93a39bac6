"""Read and write files in a session, or in a workspace without one. Raw ASGI: contents pass through in pieces.

Paths are handed on as they are: only the sandbox's own view of its filesystem decides what they mean.
"""

from __future__ import annotations

import base64
from contextlib import AbstractAsyncContextManager

from sandkasten.api.http.errors import json_answer
from sandkasten.api.http.exchange import JSON, Exchange
from sandkasten.api.http.json import encode_json, scrub
from sandkasten.api.resources.fields import check_path
from sandkasten.api.resources.query import query_integer
from sandkasten.api.resources.schemas import WriteRequest, parse
from sandkasten.model.errors import InvalidRequest
from sandkasten.supervisor import FileReader, FileWriter

PIECE_BYTES = 64 * 1024


async def write(exchange: Exchange) -> None:
    """POST /v1/sessions/{id}/fs/write, /v1/workspaces/{id}/fs/write"""
    body = await exchange.read_json_body(limit_bytes=exchange.settings.max_json_bytes)
    request = parse(body, WriteRequest)
    content = memoryview(request.content)
    async with open_write(exchange, request.path) as writer:
        for start in range(0, len(content), PIECE_BYTES):
            await writer.send(bytes(content[start : start + PIECE_BYTES]))
        path = await writer.commit()
    await exchange.answer(json_answer({"ok": True, "path": scrub(path)}))


async def read(exchange: Exchange) -> None:
    """GET /v1/sessions/{id}/fs/read?path=&max_bytes=, /v1/workspaces/{id}/fs/read?…"""
    settings = exchange.settings
    path = _query_path(exchange)
    max_bytes = query_integer(exchange, "max_bytes", default=settings.default_read_bytes, high=settings.max_read_bytes)
    await exchange.read_body(limit_bytes=settings.max_request_bytes)  # a GET's body means nothing
    await exchange.until_disconnect(lambda: _send_file(exchange, path, max_bytes))


def open_write(exchange: Exchange, path: str) -> AbstractAsyncContextManager[FileWriter]:
    """Replace a file of the session or workspace that the request is about."""
    if exchange.workspace_id:
        return exchange.workspaces.open_workspace_write(exchange.workspace_id, path)
    return exchange.supervisor.open_write(exchange.session_id, path)


def _open_read(exchange: Exchange, path: str, max_bytes: int) -> AbstractAsyncContextManager[FileReader]:
    if exchange.workspace_id:
        return exchange.workspaces.open_workspace_read(exchange.workspace_id, path, max_bytes=max_bytes)
    return exchange.supervisor.open_read(exchange.session_id, path, max_bytes=max_bytes)


def _query_path(exchange: Exchange) -> str:
    if "path" not in exchange.query:
        raise InvalidRequest("the query has bad fields", path="is required")
    try:
        return check_path(exchange.query["path"])
    except ValueError as error:
        raise InvalidRequest("the query has bad fields", path=str(error)) from None


async def _send_file(exchange: Exchange, path: str, max_bytes: int) -> None:
    async with _open_read(exchange, path, max_bytes) as reader:
        await exchange.start(200, (JSON,))
        head = {"path": scrub(reader.head.path), "truncated": reader.head.truncated}
        await exchange.write(encode_json(head)[:-1] + b',"content_base64":"')
        rest = b""
        if exchange.method != "HEAD":
            async for piece in reader:
                # Only whole groups of three bytes: padding belongs to the end alone (RFC 4648 §4).
                data = rest + piece
                whole = len(data) - len(data) % 3
                rest = data[whole:]
                if whole:
                    await exchange.write(base64.b64encode(data[:whole]))
    await exchange.finish(base64.b64encode(rest) + b'"}')
