"""Workspaces and the files in them, without a session; and workspaces as archives.

Contents of single files pass through `files.py`. An archive is tar or tar.zst, streamed both ways: the sandbox of the
workspace packs and unpacks it, and nothing is kept on the way. A key with a label sees only workspaces that carry the
label (`Exchange.workspaces`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

import attrs

from runner.wire.protocol import ListFiles, Listing, Pack
from sandkasten.api.http.errors import Answer, json_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.json import Body
from sandkasten.api.http.key_scope import own_labels
from sandkasten.api.resources.fields import (
    MAX_FILES,
    MAX_LIST,
    TOP,
    ArchiveFormat,
    FilesLimit,
    LabelPair,
    Labels,
    ListLimit,
    NameCursor,
    PathInWorkspace,
    QuotaBytes,
    QuotaFiles,
    WorkspaceId,
    encode_cursor,
    read_query,
    read_request,
    spell_path,
)
from sandkasten.api.resources.file_archives import (
    UnpackedBody,
    check_type,
    forward,
    head_of,
    send_archive,
)
from sandkasten.api.resources.file_entries import FIRST_PAGE, EntryBody
from sandkasten.api.resources.sessions import DoneBody
from sandkasten.errors import Conflict, InvalidRequest
from sandkasten.model.workspace import (
    Workspace,
    WorkspacePatch,
    WorkspaceQuota,
    WorkspaceSpec,
    WorkspaceUsage,
)

_SAME_QUOTA = QuotaBytes(0)
"""The default of a field that takes null, too: null would take the quota away."""

DEFAULT_LIST = ListLimit(1000)
_ALL_FILES = FilesLimit(MAX_FILES)
_ITSELF = PathInWorkspace(TOP)
_TAR, _COMPRESSED = ArchiveFormat("tar"), ArchiveFormat("tar.zst")

# Requests -------------------------------------------------------------------------------------------------------------


@attrs.frozen
class WorkspaceRequest:
    """A workspace to create."""

    id: WorkspaceId
    labels: Labels | None = None
    quota_bytes: QuotaBytes | None = None
    quota_files: QuotaFiles | None = None


@attrs.frozen
class WorkspacePutRequest:
    """A workspace to create under the id in the path, or to change."""

    labels: Labels | None = None
    quota_bytes: QuotaBytes | None = None
    quota_files: QuotaFiles | None = None


@attrs.frozen
class WorkspacePatchRequest:
    """A change of a workspace."""

    labels: Labels | None = None
    quota_bytes: QuotaBytes | None = _SAME_QUOTA


@attrs.frozen
class WorkspacesQuery:
    """The query of a list of workspaces. `label` is `NAME=VALUE`."""

    label: LabelPair | None = None
    limit: ListLimit = DEFAULT_LIST
    cursor: NameCursor = FIRST_PAGE
    usage: bool = False


@attrs.frozen
class WorkspaceQuery:
    """The query of one workspace."""

    usage: bool = False


@attrs.frozen
class DeleteQuery:
    """The query of a workspace's end."""

    force: bool = False


@attrs.frozen
class FilesQuery:
    """The query of a directory's entries; an empty path and `/` are the workspace itself."""

    path: PathInWorkspace = _ITSELF
    limit: FilesLimit = _ALL_FILES
    cursor: NameCursor = FIRST_PAGE


@attrs.frozen
class ExportQuery:
    """The query of an archive of the whole workspace."""

    format: ArchiveFormat = _COMPRESSED


@attrs.frozen
class DownloadQuery:
    """The query of an archive of a file or directory."""

    path: PathInWorkspace = _ITSELF
    format: ArchiveFormat = _TAR


@attrs.frozen
class ImportQuery:
    """The query of an import; with `replace` the archive takes the place of all files."""

    replace: bool = False


# Answers --------------------------------------------------------------------------------------------------------------


@attrs.frozen
class WorkspaceBody(Body):
    """A workspace."""

    id: str
    created_at: datetime
    last_used: datetime
    labels: Mapping[str, str]
    session_count: int
    active_session_count: int
    has_directory: bool
    quota_bytes: int | None
    quota_files: int | None
    usage: WorkspaceUsage | None = None

    @classmethod
    def of(cls, workspace: Workspace) -> WorkspaceBody:
        """Return a workspace as clients see it."""
        quota = workspace.quota
        return cls.take(
            workspace,
            quota_bytes=None if quota is None else quota.size_bytes,
            quota_files=None if quota is None else quota.files,
        )


@attrs.frozen
class WorkspacesBody(Body):
    """A page of workspaces; without `next_cursor` the last one."""

    workspaces: Sequence[WorkspaceBody]
    next_cursor: str | None = None


@attrs.frozen
class FilesBody(Body):
    """A page of a directory's entries; without `next_cursor` the last one."""

    path: str
    entries: Sequence[EntryBody]
    next_cursor: str | None = None


# Workspaces -------------------------------------------------------------------------------------------------------


async def list_workspaces(exchange: Exchange) -> Answer:
    """List workspaces in the order of their ids; with `usage` also what they take on disk."""
    query = read_query(exchange, WorkspacesQuery)
    limit, wanted = query.limit, query.label
    found: list[Workspace] = []
    after, is_more = str(query.cursor), True
    while is_more and len(found) <= limit:
        page = await exchange.workspaces.workspaces(after=after, limit=limit + 1)
        is_more = len(page) > limit
        after = page[-1].id if page else after
        found += [each for each in page if _has(each, wanted)]
    shown = found[:limit]
    if query.usage and shown:
        measured = {
            each.id: each
            for each in await exchange.workspaces.workspaces(
                after=_before(shown[0].id), limit=len(shown) if wanted is None else MAX_LIST, measure=True
            )
        }
        shown = [measured.get(each.id, each) for each in shown]
    cursor = encode_cursor(shown[-1].id) if len(found) > limit else None
    return json_answer(WorkspacesBody([WorkspaceBody.of(each) for each in shown], cursor))


async def create(exchange: Exchange) -> Answer:
    """Create a workspace."""
    request = await read_request(exchange, WorkspaceRequest)
    spec = WorkspaceSpec(own_labels(exchange.key, request.labels or {}), _quota(request))
    return json_answer(WorkspaceBody.of(await exchange.workspaces.make_workspace(request.id, spec)), status=201)


async def put(exchange: Exchange) -> Answer:
    """Create a workspace, or give the one that is there these labels."""
    request = await read_request(exchange, WorkspacePutRequest)
    labels = own_labels(exchange.key, request.labels or {})
    try:
        made = await exchange.workspaces.make_workspace(exchange.workspace_id, WorkspaceSpec(labels, _quota(request)))
    except Conflict:
        pass
    else:
        return json_answer(WorkspaceBody.of(made), status=201)
    if request.labels is None and request.quota_bytes is None:
        return _answer(await exchange.workspaces.workspace(exchange.workspace_id))
    patch = WorkspacePatch(None if request.labels is None else labels, request.quota_bytes)
    return _answer(await exchange.workspaces.update_workspace(exchange.workspace_id, patch))


async def get(exchange: Exchange) -> Answer:
    """Read a workspace; with `usage` also what it takes on disk."""
    measure = read_query(exchange, WorkspaceQuery).usage
    return _answer(await exchange.workspaces.workspace(exchange.workspace_id, measure=measure))


async def update(exchange: Exchange) -> Answer:
    """Change a workspace's labels or quota."""
    request = await read_request(exchange, WorkspacePatchRequest)
    labels = None if request.labels is None else own_labels(exchange.key, request.labels)
    if request.quota_bytes is None:
        raise Conflict("the quota of a workspace can't be taken away", workspace_id=exchange.workspace_id)
    patch = WorkspacePatch(labels, request.quota_bytes or None)
    return _answer(await exchange.workspaces.update_workspace(exchange.workspace_id, patch))


async def delete(exchange: Exchange) -> Answer:
    """Delete a workspace; with `force` also one that sessions have."""
    await exchange.workspaces.delete_workspace(exchange.workspace_id, force=read_query(exchange, DeleteQuery).force)
    return json_answer(DoneBody())


# Files ----------------------------------------------------------------------------------------------------------------


async def list_files(exchange: Exchange) -> Answer:
    """List a directory, in the order of the names' bytes."""
    query = read_query(exchange, FilesQuery)
    listing = await exchange.files.ask(ListFiles(query.path, query.cursor, query.limit), Listing)
    cursor = encode_cursor(listing.entries[-1].name) if listing.more and listing.entries else None
    return json_answer(FilesBody(spell_path(listing.path), [EntryBody.of(each) for each in listing.entries], cursor))


# Archives -------------------------------------------------------------------------------------------------------------


async def export(exchange: Exchange) -> None:
    """Download the whole workspace as an archive."""
    await send_archive(exchange, Pack(TOP), read_query(exchange, ExportQuery).format, exchange.workspace_id)


async def download(exchange: Exchange) -> None:
    """Download a file or directory as an archive."""
    query = read_query(exchange, DownloadQuery)
    await send_archive(exchange, Pack(query.path), query.format, exchange.workspace_id)


async def import_archive(exchange: Exchange) -> Answer:
    """Unpack an archive into a workspace."""
    check_type(exchange)
    query = read_query(exchange, ImportQuery)
    async with exchange.workspaces.open_unpack(exchange.workspace_id, replace=query.replace) as archive:
        await forward(exchange, await head_of(exchange), archive.send)
        packed = await exchange.until_disconnect(archive.commit)
    return json_answer(UnpackedBody.take(packed, ok=True), status=201)


# Helpers --------------------------------------------------------------------------------------------------------------


def _quota(request: WorkspaceRequest | WorkspacePutRequest) -> WorkspaceQuota | None:
    if request.quota_bytes is None:
        if request.quota_files is not None:
            raise InvalidRequest("the body has bad fields", quota_files="needs quota_bytes")
        return None
    return WorkspaceQuota.of(request.quota_bytes, request.quota_files)


def _has(workspace: Workspace, label: str | None) -> bool:
    name, _, value = (label or "").partition("=")
    return label is None or workspace.labels.get(name) == value


def _before(workspace_id: str) -> str:
    """Return a text that sorts right before an id, since no id ends in `~`."""
    return workspace_id[:-1] + chr(ord(workspace_id[-1]) - 1) + "~"


def _answer(workspace: Workspace) -> Answer:
    return json_answer(WorkspaceBody.of(workspace))
