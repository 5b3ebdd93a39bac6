"""Workspaces and what lies in them, without a session: JSON in, one question to the supervisor, JSON out.

Contents of files pass through `files.py` and `upload.py`, archives through `archives.py`. A key that is confined to a
label has the workspaces that carry it, and there are no others (`Exchange.workspaces`).

Workspaces as archives, out and in: tar or tar.zst, streamed both ways. Raw ASGI; nothing is kept on the way.

What is in an archive is no business of this module: it is packed and unpacked in the sandbox of the workspace.
"""

from __future__ import annotations

import base64
import binascii
import os
from datetime import UTC, datetime
from typing import Any

import attrs

from sandkasten.api.http.errors import Answer, json_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.json import scrub
from sandkasten.api.http.key_scope import own_labels
from sandkasten.api.http.zstandard import MAGIC
from sandkasten.api.resources import schemas
from sandkasten.api.resources.fields import (
    Labels,
    QuotaBytes,
    QuotaFiles,
    WorkspaceId,
    bad_query,
    check_path,
    query_choice,
    query_flag,
    query_integer,
)
from sandkasten.log import rfc3339
from sandkasten.model.errors import Conflict, InvalidRequest
from sandkasten.model.workspace import FileInfo, Workspace, WorkspacePatch, WorkspaceQuota, WorkspaceSpec
from sandkasten.supervisor import ArchiveWriter

_SAME_QUOTA = QuotaBytes(0)
"""Absent; null would take a quota away."""
_BYTES_PER_FILE = 8192
DEFAULT_LIST, MAX_LIST = 1000, 10_000
MAX_FILES = 1000
TOP = "/workspace"


@attrs.frozen
class CreateRequest:
    id: WorkspaceId
    labels: Labels | None = None
    quota_bytes: QuotaBytes | None = None
    quota_files: QuotaFiles | None = None


@attrs.frozen
class PutRequest:
    labels: Labels | None = None
    quota_bytes: QuotaBytes | None = None
    quota_files: QuotaFiles | None = None


@attrs.frozen
class ChangeRequest:
    labels: Labels | None = None
    quota_bytes: QuotaBytes | None = _SAME_QUOTA


# Workspaces -------------------------------------------------------------------------------------------------------


async def list_workspaces(exchange: Exchange) -> Answer:
    """GET /v1/workspaces?label=&limit=&cursor=&usage="""
    limit = query_integer(exchange, "limit", default=DEFAULT_LIST, high=MAX_LIST)
    wanted, measures = _label(exchange), query_flag(exchange, "usage")
    found: list[Workspace] = []
    after, is_more = _cursor(exchange), True
    while is_more and len(found) <= limit:
        page = await exchange.workspaces.workspaces(after=after, limit=limit + 1)
        is_more = len(page) > limit
        after = page[-1].id if page else after
        found += [each for each in page if _has(each, wanted)]
    shown = found[:limit]
    if measures and shown:
        measured = {
            each.id: each
            for each in await exchange.workspaces.workspaces(
                after=_before(shown[0].id), limit=len(shown) if wanted is None else MAX_LIST, measure=True
            )
        }
        shown = [measured.get(each.id, each) for each in shown]
    answer: dict[str, Any] = {"workspaces": [workspace_view(each) for each in shown]}
    if len(found) > limit:
        answer["next_cursor"] = _encode(os.fsencode(shown[-1].id))
    return json_answer(answer)


async def create(exchange: Exchange) -> Answer:
    """POST /v1/workspaces"""
    request = schemas.parse(await exchange.read_json_body(), CreateRequest)
    spec = WorkspaceSpec(own_labels(exchange.key, request.labels or {}), _quota(request))
    return json_answer(workspace_view(await exchange.workspaces.make_workspace(request.id, spec)), status=201)


async def put(exchange: Exchange) -> Answer:
    """PUT /v1/workspaces/{id}; make it, or give the one that is there these labels."""
    request = schemas.parse(await exchange.read_json_body(), PutRequest)
    labels = own_labels(exchange.key, request.labels or {})
    try:
        made = await exchange.workspaces.make_workspace(exchange.workspace_id, WorkspaceSpec(labels, _quota(request)))
    except Conflict:
        pass
    else:
        return json_answer(workspace_view(made), status=201)
    if request.labels is None and request.quota_bytes is None:
        return json_answer(workspace_view(await exchange.workspaces.workspace(exchange.workspace_id)))
    patch = WorkspacePatch(None if request.labels is None else labels, request.quota_bytes)
    return json_answer(workspace_view(await exchange.workspaces.update_workspace(exchange.workspace_id, patch)))


async def get(exchange: Exchange) -> Answer:
    """GET /v1/workspaces/{id}?usage="""
    measures = query_flag(exchange, "usage")
    return json_answer(workspace_view(await exchange.workspaces.workspace(exchange.workspace_id, measure=measures)))


async def update(exchange: Exchange) -> Answer:
    """PATCH /v1/workspaces/{id}"""
    request = schemas.parse(await exchange.read_json_body(), ChangeRequest)
    labels = None if request.labels is None else own_labels(exchange.key, request.labels)
    if request.quota_bytes is None:
        raise Conflict("the quota of a workspace can't be taken away", workspace_id=exchange.workspace_id)
    patch = WorkspacePatch(labels, request.quota_bytes or None)
    return json_answer(workspace_view(await exchange.workspaces.update_workspace(exchange.workspace_id, patch)))


async def delete(exchange: Exchange) -> Answer:
    """DELETE /v1/workspaces/{id}?force="""
    await exchange.workspaces.delete_workspace(exchange.workspace_id, force=query_flag(exchange, "force"))
    return json_answer({"ok": True})


# Files ------------------------------------------------------------------------------------------------------------


async def list_files(exchange: Exchange) -> None:
    """GET /v1/workspaces/{id}/fs?path=&limit=&cursor="""
    limit = query_integer(exchange, "limit", default=MAX_FILES, high=MAX_FILES)
    listing = await exchange.workspaces.list_files(
        exchange.workspace_id, query_path(exchange), after=_cursor(exchange), limit=limit
    )
    answer: dict[str, Any] = {"path": scrub(listing.path), "entries": [file_view(each) for each in listing.entries]}
    if listing.more and listing.entries:
        answer["next_cursor"] = _encode(os.fsencode(listing.entries[-1].name))
    await exchange.answer(json_answer(answer))


async def stat(exchange: Exchange) -> None:
    """GET /v1/workspaces/{id}/fs/stat?path="""
    found = await exchange.workspaces.stat_file(exchange.workspace_id, query_path(exchange))
    await exchange.answer(json_answer({**file_view(found), "path": scrub(found.path)}))


async def remove(exchange: Exchange) -> None:
    """DELETE /v1/workspaces/{id}/fs?path=&recursive="""
    path = await exchange.workspaces.remove_file(
        exchange.workspace_id, query_path(exchange, is_required=True), recursive=query_flag(exchange, "recursive")
    )
    await exchange.answer(json_answer({"ok": True, "path": scrub(path)}))


def query_path(exchange: Exchange, *, is_required: bool = False) -> str:
    """Return the path in the query; none, an empty one and `/` mean the workspace itself. Raises `InvalidRequest`."""
    text = exchange.query.get("path", "")
    if text in ("", "/"):
        if is_required:
            raise bad_query("path", "is required")
        return TOP
    try:
        return check_path(text)
    except ValueError as error:
        raise bad_query("path", str(error)) from None


# Views ------------------------------------------------------------------------------------------------------------


def workspace_view(workspace: Workspace) -> dict[str, Any]:  # JSON values
    """Return a workspace as clients see it."""
    view = {
        "id": workspace.id,
        "created_at": rfc3339(workspace.created_at),
        "last_used": rfc3339(workspace.last_used),
        "labels": dict(workspace.labels),
        "session_count": workspace.session_count,
        "active_session_count": workspace.active_session_count,
        "has_directory": workspace.has_directory,
        "quota_bytes": None if workspace.quota is None else workspace.quota.size_bytes,
        "quota_files": None if workspace.quota is None else workspace.quota.files,
    }
    if workspace.usage is not None:
        usage = attrs.asdict(workspace.usage) | {"measured_at": rfc3339(workspace.usage.measured_at)}
        return view | {"usage": usage}
    return view


def file_view(file: FileInfo) -> dict[str, Any]:  # JSON values
    """Return a file as clients see it; a name that is not UTF-8 comes as its bytes, too."""
    name = scrub(file.name)
    view = {
        "name": name,
        "is_dir": file.kind == "directory",
        "type": file.kind,
        "size": file.size_bytes,
        "mode": f"{file.mode:04o}",
        "owner": file.owner,
        "modified_at": _moment(file.modified_us),
    }
    if file.kind == "symlink":
        view["target"] = scrub(file.target)
    if name != file.name:
        view["name_base64"] = base64.b64encode(os.fsencode(file.name)).decode("ascii")
    return view


def _quota(request: CreateRequest | PutRequest) -> WorkspaceQuota | None:
    if request.quota_bytes is None:
        if request.quota_files is not None:
            raise InvalidRequest("the body has bad fields", quota_files="needs quota_bytes")
        return None
    return WorkspaceQuota(request.quota_bytes, request.quota_files or request.quota_bytes // _BYTES_PER_FILE)


def _moment(microseconds: int) -> str | None:
    """Whoever wrote the file chose its time: one that no calendar has is none."""
    try:
        return rfc3339(datetime.fromtimestamp(microseconds / 10**6, UTC))
    except (ValueError, OverflowError, OSError):
        return None


def _label(exchange: Exchange) -> tuple[str, str] | None:
    text = exchange.query.get("label")
    if text is None:
        return None
    name, sign, value = text.partition("=")
    if not name or not sign:
        raise bad_query("label", "must be NAME=VALUE")
    return name, value


def _has(workspace: Workspace, label: tuple[str, str] | None) -> bool:
    return label is None or workspace.labels.get(label[0]) == label[1]


def _cursor(exchange: Exchange) -> str:
    text = exchange.query.get("cursor", "")
    try:
        return os.fsdecode(base64.b64decode(text, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError):
        raise bad_query("cursor", "is none of this server's") from None


def _encode(name: bytes) -> str:
    return base64.urlsafe_b64encode(name).decode("ascii")


def _before(workspace_id: str) -> str:
    """Return what sorts right before an id, as no id ends in a sign."""
    return workspace_id[:-1] + chr(ord(workspace_id[-1]) - 1) + "~"


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
