"""What the zygote actor is asked to have done with workspaces as a whole, and how that is said to nsinit.

All of them raise `BuildFailed`, with the errno of `nsinit.wire.protocol`.
"""

from __future__ import annotations

from typing import assert_never

import attrs

from nsinit.wire import protocol
from sandkasten.actors.core import Ask
from sandkasten.model.workspace import WorkspaceQuota


@attrs.frozen
class MakeWorkspace(Ask[None]):
    """Make a workspace, with that quota, or begin a draft of one; raises `BuildFailed`."""

    workspace_id: str
    draft: bool = False
    quota: WorkspaceQuota | None = None


@attrs.frozen
class GrowWorkspace(Ask[None]):
    """Let a workspace with a quota that nobody has be larger; raises `BuildFailed`."""

    workspace_id: str
    size_bytes: int


@attrs.frozen
class AskQuota(Ask["WorkspaceQuota | None"]):
    """What a workspace may hold, by what there is of it; raises `BuildFailed`."""

    workspace_id: str


@attrs.frozen
class DiscardWorkspace(Ask[None]):
    """Take a workspace or draft away for good; raises `BuildFailed`."""

    workspace_id: str
    draft: bool = False


@attrs.frozen
class PublishWorkspace(Ask[None]):
    """Make a draft the workspace; raises `BuildFailed` (`EEXIST`: there is one that is not to be replaced)."""

    workspace_id: str
    replace: bool = False


@attrs.frozen
class SyncWorkspace(Ask[None]):
    """Have what was written on the disk; raises `BuildFailed`."""

    workspace_id: str


WorkspaceOrder = MakeWorkspace | GrowWorkspace | DiscardWorkspace | PublishWorkspace | SyncWorkspace


def workspace_request(order: WorkspaceOrder, seq: int) -> object:
    """Return the request that says it."""
    match order:
        case MakeWorkspace(workspace_id, draft, quota):
            limits = None if quota is None else protocol.DiskLimits(quota.size_bytes, quota.files)
            return protocol.MakeWorkspace(seq, workspace_id, draft, limits)
        case GrowWorkspace(workspace_id, size_bytes):
            return protocol.GrowWorkspace(seq, workspace_id, size_bytes)
        case DiscardWorkspace(workspace_id, draft):
            return protocol.DiscardWorkspace(seq, workspace_id, draft)
        case PublishWorkspace(workspace_id, replace):
            return protocol.PublishWorkspace(seq, workspace_id, replace)
        case SyncWorkspace(workspace_id):
            return protocol.SyncWorkspace(seq, workspace_id)
        case _:
            assert_never(order)
