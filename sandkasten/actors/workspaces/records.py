"""Records of workspaces: for which askers a workspace exists, and the errors that name workspaces.

`Register` puts together the record of a workspace and its directory, for the workspaces actor. For an asker with a
label, a workspace without that label does not exist. Records carry the labels, so a record is written before a
directory is made, and never over another asker's: whoever comes second finds the first record. A directory without a
record has no labels.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import attrs

from nsinit.wire.protocol import AskQuota
from sandkasten.actors.core import Ref
from sandkasten.actors.services.nsinit import ask_patiently, call
from sandkasten.actors.services.nsinit import list_workspaces as list_directories
from sandkasten.actors.services.store import do
from sandkasten.errors import (
    BuildFailed,
    Conflict,
    DiskFull,
    InvalidRequest,
    LimitInUse,
    SandkastenError,
    WorkspaceBusy,
    WorkspaceNotFound,
)
from sandkasten.model.workspace import Within, Workspace, WorkspacePatch, WorkspaceQuota, WorkspaceSpec, is_within
from sandkasten.store.workspaces import (
    Count,
    WorkspaceRecord,
    adopt_workspace,
    change_workspace,
    count_sessions,
    forget_workspace,
    get_workspace,
    list_workspaces,
    note_quota,
    put_workspace,
    touch_workspace,
)

log = logging.getLogger(__name__)

_MAX_ROWS = 100_000
_NAMED_HOLDERS = 20
_MOVE = "make another one with a quota, export this one, and import it there with replace=true"


@attrs.frozen
class QuotaPolicy:
    """Quotas of workspaces: `default` for one that is made without (None: no limit), and the largest in bytes."""

    default: WorkspaceQuota | None
    max_bytes: int


class Register:
    """Records and directories of workspaces."""

    def __init__(self, *, store: Ref, nsinit: Ref, policy: QuotaPolicy) -> None:
        self._store, self._nsinit, self._policy = store, nsinit, policy

    async def names(self) -> frozenset[str]:
        """Return the workspaces that have a directory."""
        return frozenset(await list_directories(self._nsinit))

    async def list(self) -> Sequence[Workspace]:
        """Return every workspace, by id."""
        names = await self.names()
        rows = await self._store.ask_again(do(list_workspaces, after="", limit=_MAX_ROWS))
        records = {each.id: each for each in rows}
        for found in sorted(names - records.keys()):
            records[found] = await self._remember(found)
        counts = await self._store.ask_again(do(count_sessions))
        return [_view(records[each], names, counts) for each in sorted(records)]

    async def get(self, workspace_id: str, within: Within) -> Workspace:
        """Return a workspace. Raises `WorkspaceNotFound`."""
        names = await self.names()
        record = await self._find(workspace_id, names, within)
        if record is None:
            raise not_found(workspace_id)
        return _view(record, names, await self._store.ask_again(do(count_sessions)))

    async def check(self, workspace_id: str, within: Within, *, may_be_new: bool = False) -> None:
        """Raise `WorkspaceNotFound` unless the workspace exists for the asker, or exists for no one and
        `may_be_new`."""
        if within and await self._find(workspace_id, None, within) is None and not may_be_new:
            raise not_found(workspace_id)

    async def check_claim(self, workspace_id: str, within: Within) -> None:
        """Raise `WorkspaceNotFound` if the workspace exists for other askers only."""
        await self.check(workspace_id, within, may_be_new=True)

    async def take_up(
        self, workspace_id: str, within: Within, labels: Mapping[str, str] | None = None
    ) -> WorkspaceRecord:
        """Note that the workspace is in use. A name without a record becomes the asker's. Raises
        `WorkspaceNotFound`."""
        await self.check_claim(workspace_id, within)
        record = await self._adopt(workspace_id, {**(labels or {}), **within})
        if not is_within(record.labels, within):
            raise not_found(workspace_id)
        return record

    async def put_new(self, workspace_id: str, spec: WorkspaceSpec) -> None:
        """Write the record of a new workspace over one that an earlier workspace of that name left."""
        now = datetime.now(UTC)
        record = WorkspaceRecord(workspace_id, now, now, dict(spec.labels), spec.quota)
        await self._store.ask_again(do(put_workspace, record))

    async def change(self, workspace_id: str, patch: WorkspacePatch, within: Within) -> Workspace:
        """Change the record of a workspace that exists for the asker. Raises `WorkspaceNotFound`."""
        await self.get(workspace_id, within)
        if not await self._store.ask_again(do(change_workspace, workspace_id, patch, within)):
            raise not_found(workspace_id)
        return await self.get(workspace_id, within)

    async def quota_of(self, workspace_id: str) -> WorkspaceQuota | None:
        """Return the quota on record, else the one on the disk, else the one that the workspace is to be made with.
        None: no limit."""
        record = await self._store.ask_again(do(get_workspace, workspace_id))
        if record is not None and record.quota is not None:
            return record.quota
        # Files that are there without a quota keep their place: an image can't be put around them.
        return await self._quota_on_disk(workspace_id) if workspace_id in await self.names() else self._policy.default

    async def note_quota(self, workspace_id: str, quota: WorkspaceQuota | None) -> None:
        """Write the quota that a workspace was made with into a record without one."""
        if quota is not None:
            await self._store.ask_again(do(note_quota, workspace_id, quota))

    def require_allowed(self, size_bytes: int | None) -> None:
        """Raise `InvalidRequest` for a quota larger than this node gives."""
        if size_bytes is not None and size_bytes > self._policy.max_bytes:
            raise InvalidRequest("the quota is too large", quota_bytes=f"at most {self._policy.max_bytes}")

    async def touch(self, workspace_id: str) -> None:
        """Note that the workspace was in use, if there is a record of it."""
        await self._store.ask_again(do(touch_workspace, workspace_id, datetime.now(UTC)))

    async def forget(self, workspace_id: str) -> None:
        """Delete the record."""
        await self._store.ask_again(do(forget_workspace, workspace_id))

    async def forget_unmade(self, workspace_id: str) -> None:
        """Delete the record of a workspace that could not be made."""
        if workspace_id not in await self.names():
            await self.forget(workspace_id)

    async def _find(self, workspace_id: str, names: frozenset[str] | None, within: Within) -> WorkspaceRecord | None:
        """Return the record; None if there is neither a record nor a directory. A directory without a record gets one.
        Raises `WorkspaceNotFound`: the workspace is hidden from the asker."""
        record = await self._store.ask_again(do(get_workspace, workspace_id))
        if record is None:
            if workspace_id not in (await self.names() if names is None else names):
                return None
            record = await self._remember(workspace_id)
        if not is_within(record.labels, within):
            raise not_found(workspace_id)
        return record

    async def _remember(self, workspace_id: str) -> WorkspaceRecord:
        log.info("workspace_found", extra={"workspace_id": workspace_id})
        return await self._adopt(workspace_id, {})

    async def _adopt(self, workspace_id: str, labels: Mapping[str, str]) -> WorkspaceRecord:
        """Note that the workspace is in use. A new record gets the quota that the directory has on the disk, since
        the database that knew the quota may have been lost."""
        known = await self._store.ask_again(do(get_workspace, workspace_id))
        quota = None if known else await self._quota_on_disk(workspace_id)
        return await self._store.ask_again(do(adopt_workspace, workspace_id, datetime.now(UTC), labels, quota))

    async def _quota_on_disk(self, workspace_id: str) -> WorkspaceQuota | None:
        found = (await ask_patiently(self._nsinit, call(AskQuota, workspace_id))).quota
        return None if found is None else WorkspaceQuota(found.size_bytes, found.inodes)


def _view(record: WorkspaceRecord, names: frozenset[str], counts: Mapping[str, Count]) -> Workspace:
    count = counts.get(record.id, Count())
    return Workspace(
        id=record.id,
        created_at=record.created_at,
        last_used=record.last_used,
        labels=record.labels,
        session_count=count.known,
        active_session_count=count.live,
        has_directory=record.id in names,
        quota=record.quota,
    )


# Errors --------------------------------------------------------------------------------------------------------------


def require_growth(workspace: Workspace, size_bytes: int) -> None:
    """Raise unless a workspace can have a quota of that size.

    Raises:
        Conflict: it was made without a quota.
        LimitInUse: it may hold more now.
    """
    if workspace.quota is None:
        raise Conflict(f"it was made without a quota and can't be given one; {_MOVE}", workspace_id=workspace.id)
    if size_bytes < workspace.quota.size_bytes:
        raise LimitInUse(
            "the quota of a workspace can't be made smaller",
            quota_bytes=workspace.quota.size_bytes,
            requested=size_bytes,
        )


def explain(error: BuildFailed, workspace_id: str) -> SandkastenError:
    """Translate a refusal of nsinit into the error of the asker."""
    match error.errno:
        case errno.EEXIST:
            return exists(workspace_id)
        case errno.EXDEV:
            return Conflict("its files are not where its quota says", workspace_id=workspace_id)
        case errno.ENOSPC | errno.EDQUOT:
            return DiskFull("no room for the workspace", workspace_id=workspace_id)
        case errno.EOPNOTSUPP:
            return InvalidRequest(
                "this node can't give a workspace a quota; workspace.default_quota_mb: 0 allows workspaces without",
                quota_bytes=str(error),
            )
        case errno.EBUSY:
            return busy(workspace_id)
        case errno.ENOENT:
            return not_found(workspace_id)
        case _:
            return error


def exists(workspace_id: str) -> Conflict:
    return Conflict(f"there is a workspace {workspace_id!r} already", workspace_id=workspace_id)


def not_found(workspace_id: str) -> WorkspaceNotFound:
    return WorkspaceNotFound(f"there is no workspace {workspace_id!r}", workspace_id=workspace_id)


def busy(workspace_id: str, holders: Sequence[str] = ()) -> WorkspaceBusy:
    """Return the error for a workspace in use. `holders` are the ids of the sessions that have it, `""` for those
    that may not be named."""
    sessions = [each for each in holders if each][:_NAMED_HOLDERS]
    return WorkspaceBusy(f"workspace {workspace_id!r} is in use", workspace_id=workspace_id, sessions=sessions)
