"""What it means to a caller that something could not be done with a workspace."""

from __future__ import annotations

import errno
from collections.abc import Sequence

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
from sandkasten.model.workspace import Workspace

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
