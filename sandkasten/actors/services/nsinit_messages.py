"""What the zygote actor is asked to have done, how it is asked while nsinit may be away, and what it answers with.

What is done with workspaces as a whole is in `workspace_orders.py`.

What the zygote actor is asked to have done with workspaces as a whole, and how that is said to nsinit.

All of them raise `BuildFailed`, with the errno of `nsinit.wire.protocol`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, assert_never

import attrs

from nsinit.wire import protocol
from sandkasten.actors.core import Ask, R, Ref
from sandkasten.links.fds import OwnedFd
from sandkasten.model.errors import ZygoteLost
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


@attrs.frozen
class Node(Ask[protocol.Ready]):
    """What nsinit said when it started: cgroup mode, directories, kernel features."""


@attrs.frozen
class Ping(Ask[None]):
    """Answered when nsinit answers."""


@attrs.frozen
class Prepare(Ask[None]):
    """Make a blank vessel for a session id to come, with the limits and the disk that it will probably want."""

    session_id: str
    limits: protocol.Limits
    disk: protocol.DiskLimits


@attrs.frozen
class Furnish(Ask[None]):
    """Mount the image of a plan in a blank vessel; raises `BuildFailed`, and then there is no vessel any more."""

    plan: protocol.SandboxPlan


@attrs.frozen
class Build(Ask["Sandbox"]):
    """Build a sandbox; raises `BuildFailed` or `BuildInterrupted`."""

    plan: protocol.SandboxPlan


@attrs.frozen
class Attach(Ask["Sandbox"]):
    """Find a running sandbox again; raises `BuildFailed` when there is none."""

    session_id: str


@attrs.frozen
class Teardown(Ask[protocol.TornDown]):
    session_id: str


@attrs.frozen
class Scan(Ask[Sequence[protocol.Found]]):
    """What the kernel and the disk know of sessions."""


@attrs.frozen
class Survey(Ask[Sequence[protocol.Leftover]]):
    """What is nobody's in nsinit's places."""


@attrs.frozen
class RemoveStray(Ask[None]):
    """Remove what a survey found; raises `BuildFailed` when something of it is left."""

    stray: protocol.Leftover


@attrs.frozen
class SetLimits(Ask[None]):
    """Change the limits of a session; raises `BuildFailed` or `BuildInterrupted`."""

    session_id: str
    limits: protocol.Limits


@attrs.frozen
class SetFrozen(Ask[None]):
    """Freeze or thaw a session; raises `BuildFailed` when not all of it would stand still."""

    session_id: str
    frozen: bool


@attrs.frozen
class SetDisk(Ask[None]):
    """Change the disk limits of a session; raises `BuildFailed` (`EOPNOTSUPP` where disks keep their size)."""

    session_id: str
    disk: protocol.DiskLimits


@attrs.frozen
class AskDisk(Ask[protocol.DiskUse]):
    """How full the disk of a running session is; raises `BuildFailed` when nothing of it runs."""

    session_id: str


@attrs.frozen
class ListWorkspaces(Ask[Sequence[str]]):
    """The workspaces that have a directory, by id."""


@attrs.frozen
class MakeGroup(Ask["GroupHandle"]):
    """Make a cgroup of its own for a program or shell of a session; raises `BuildFailed` or `BuildInterrupted`."""

    session_id: str
    name: str


@attrs.frozen
class RemoveGroup(Ask[None]):
    """Remove a group, with `kill` after killing what is in it; raises `BuildFailed` when something in it lives on."""

    session_id: str
    name: str
    kill: bool = False


@attrs.frozen
class FindVictim(Ask[str | None]):
    """Name of the process that the kernel killed in a session for memory just now; None when that can't be known."""

    session_id: str


@attrs.frozen
class FindKills(Ask[protocol.Victim]):
    """All that the kernel's log tells of kills for memory in a session."""

    session_id: str


@attrs.frozen
class GroupHandle:
    """A group that was made, and the descriptor for the sandbox's PID 1 (`membership` says what it is good for: see
    `nsinit.wire.protocol.Grouped`). The receiver owns it, and closes it once it was sent."""

    name: str
    membership: Literal["clone", "join"]
    fd: OwnedFd

    def close_unused(self) -> None:
        """Close the descriptor; for whoever gets the handle and does not keep it. The group stays."""
        self.fd.close()


@attrs.frozen
class Sandbox:
    """A running sandbox. The receiver owns the descriptors."""

    identity: protocol.Identity
    pidfd: OwnedFd
    oom_kind: protocol.EventKind
    oom_fd: OwnedFd | None
    timings_us: dict[str, int]

    def close_unused(self) -> None:
        """Close the descriptors; for whoever gets the sandbox and does not keep it."""
        self.pidfd.close()
        if self.oom_fd is not None:
            self.oom_fd.close()


Message = (
    Node
    | Ping
    | Prepare
    | Furnish
    | Build
    | Attach
    | Teardown
    | Scan
    | Survey
    | RemoveStray
    | SetLimits
    | SetFrozen
    | AskDisk
    | SetDisk
    | ListWorkspaces
    | AskQuota
    | WorkspaceOrder
    | MakeGroup
    | RemoveGroup
    | FindVictim
    | FindKills
)


async def ask_when_up(zygote: Ref, message: Ask[R]) -> R:
    """Wait for an nsinit that is being restarted, then ask once; for requests that may not be repeated."""
    await zygote.ask_again(Node())
    return await zygote.ask(message)


async def ask_patiently(zygote: Ref, message: Ask[R]) -> R:
    """Ask, and ask again while nsinit is being restarted; only for requests that may be repeated."""
    return await zygote.ask_again(message, on=(ZygoteLost,))
