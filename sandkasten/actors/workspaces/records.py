"""What it means to a caller that something could not be done with a workspace.

What is known of each workspace, put together from its record and its directory, and for whom it exists.

Belongs to the workspaces actor and decides nothing but existence: for somebody with a label, a workspace without it is
none. A record is what carries labels, so one is written before a directory is made, and never over another's: whoever
comes second finds the first one's. A directory that nothing is remembered of has no labels.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from nsinit.wire.protocol import AskQuota
from sandkasten.actors.core import Ref
from sandkasten.actors.services.nsinit import ask_patiently, call
from sandkasten.actors.services.nsinit import list_workspaces as list_directories
from sandkasten.actors.services.store import do
from sandkasten.model.errors import (
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
    put_workspace,
    touch_workspace,
)

_NAMED_HOLDERS = 20
_MOVE = "make another one with a quota, export this one, and import it there with replace=true"


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
    """Return what it means that nsinit could not do it."""
    match error.errno:
        case errno.EEXIST:
            return exists(workspace_id)
        case errno.EXDEV:
            return Conflict("its files are not where its quota says", workspace_id=workspace_id)
        case errno.ENOSPC | errno.EDQUOT:
            return DiskFull("no room for the workspace", workspace_id=workspace_id)
        case errno.EOPNOTSUPP:
            return InvalidRequest("this node can't give a workspace a quota", quota_bytes=str(error))
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
    """`holders`: the sessions that have it, `""` for those who are not told by name."""
    sessions = [each for each in holders if each][:_NAMED_HOLDERS]
    return WorkspaceBusy(f"workspace {workspace_id!r} is in use", workspace_id=workspace_id, sessions=sessions)


log = logging.getLogger(__name__)

_MAX_ROWS = 100_000


class Register:
    """See the module's docstring."""

    def __init__(self, *, store: Ref, zygote: Ref) -> None:
        self._store, self._zygote = store, zygote

    async def names(self) -> frozenset[str]:
        """Return the workspaces that have a directory."""
        return frozenset(await list_directories(self._zygote))

    async def list(self) -> Sequence[Workspace]:
        """Return all of them, by id."""
        names = await self.names()
        rows = await self._store.ask_again(do(list_workspaces, after="", limit=_MAX_ROWS))
        records = {each.id: each for each in rows}
        for found in sorted(names - records.keys()):
            records[found] = await self._remember(found)
        counts = await self._store.ask_again(do(count_sessions))
        return [_view(records[each], names, counts) for each in sorted(records)]

    async def get(self, workspace_id: str, within: Within) -> Workspace:
        """Return one of them. Raises `WorkspaceNotFound`."""
        names = await self.names()
        record = await self._find(workspace_id, names, within)
        if record is None:
            raise not_found(workspace_id)
        return _view(record, names, await self._store.ask_again(do(count_sessions)))

    async def check(self, workspace_id: str, within: Within, *, may_be_new: bool = False) -> None:
        """Raise `WorkspaceNotFound` if it does not exist for who asks, unless it is nobody's and `may_be_new`."""
        if within and await self._find(workspace_id, None, within) is None and not may_be_new:
            raise not_found(workspace_id)

    async def check_claim(self, workspace_id: str, within: Within) -> None:
        """Raise `WorkspaceNotFound` if it is others'."""
        await self.check(workspace_id, within, may_be_new=True)

    async def take_up(
        self, workspace_id: str, within: Within, labels: Mapping[str, str] | None = None
    ) -> WorkspaceRecord:
        """Note that it is in use; a name that is nobody's is its asker's from here. Raises `WorkspaceNotFound`."""
        await self.check_claim(workspace_id, within)
        record = await self._adopt(workspace_id, {**(labels or {}), **within})
        if not is_within(record.labels, within):
            raise not_found(workspace_id)
        return record

    async def put_new(self, workspace_id: str, spec: WorkspaceSpec) -> None:
        """Let the record say what a new workspace begins with, whatever was remembered of an earlier one."""
        now = datetime.now(UTC)
        record = WorkspaceRecord(workspace_id, now, now, dict(spec.labels), spec.quota)
        await self._store.ask_again(do(put_workspace, record))

    async def change(self, workspace_id: str, patch: WorkspacePatch, within: Within) -> Workspace:
        """Change what is remembered of one that exists for who asks. Raises `WorkspaceNotFound`."""
        await self.get(workspace_id, within)
        if not await self._store.ask_again(do(change_workspace, workspace_id, patch, within)):
            raise not_found(workspace_id)
        return await self.get(workspace_id, within)

    async def quota_of(self, workspace_id: str) -> WorkspaceQuota | None:
        """Return what is remembered of its quota."""
        record = await self._store.ask_again(do(get_workspace, workspace_id))
        return None if record is None else record.quota

    async def touch(self, workspace_id: str) -> None:
        """Note that it was in use, if it is still there."""
        await self._store.ask_again(do(touch_workspace, workspace_id, datetime.now(UTC)))

    async def forget(self, workspace_id: str) -> None:
        """Remember nothing of it."""
        await self._store.ask_again(do(forget_workspace, workspace_id))

    async def forget_unmade(self, workspace_id: str) -> None:
        """Remember nothing of one that could not be made."""
        if workspace_id not in await self.names():
            await self.forget(workspace_id)

    async def _find(self, workspace_id: str, names: frozenset[str] | None, within: Within) -> WorkspaceRecord | None:
        """Return what is known of it, None: nobody has it. Raises `WorkspaceNotFound` when others do."""
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
        """Note that it is in use. What is remembered anew has the quota that it has on the disk: the database it was
        remembered in may have been lost."""
        known = await self._store.ask_again(do(get_workspace, workspace_id))
        quota = None if known else await self._quota_on_disk(workspace_id)
        return await self._store.ask_again(do(adopt_workspace, workspace_id, datetime.now(UTC), labels, quota))

    async def _quota_on_disk(self, workspace_id: str) -> WorkspaceQuota | None:
        found = (await ask_patiently(self._zygote, call(AskQuota, workspace_id))).quota
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
