"""What the workspaces actor can be asked."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import trio

from sandkasten.actors.core import Ask
from sandkasten.actors.workspaces.holds import Attachment
from sandkasten.links.runner import RunnerLink
from sandkasten.model.workspace import EVERYWHERE, Within, Workspace, WorkspacePatch, WorkspaceSpec


@attrs.frozen
class Admit(Ask[None]):
    """Decide about a claim that is among the `Attachments`; raises `WorkspaceBusy`."""

    attachment: Attachment


@attrs.frozen
class Released(Ask[None]):
    """A session that had the workspace is gone: have what it wrote on the disk."""

    workspace_id: str


@attrs.frozen
class ListAll(Ask[Sequence[Workspace]]):
    """Every workspace there is or is a record of, by id."""


@attrs.frozen
class Get(Ask[Workspace]):
    """Raises `WorkspaceNotFound`; so does all that follows, for a workspace that lacks the labels `within`."""

    workspace_id: str
    within: Within = EVERYWHERE


@attrs.frozen
class Make(Ask[Workspace]):
    """Make a workspace; raises `Conflict` when there is one, unless `may_exist`."""

    workspace_id: str
    spec: WorkspaceSpec
    may_exist: bool = False
    within: Within = EVERYWHERE


@attrs.frozen
class Change(Ask[Workspace]):
    workspace_id: str
    patch: WorkspacePatch
    within: Within = EVERYWHERE


@attrs.frozen
class Claim(Ask[None]):
    """Let nobody attach or make the workspace from now on, until `Unclaim`. Raises `WorkspaceBusy` when somebody else
    claimed it or just makes it. `token` tells claims apart, so that one that was given up in between can be taken
    back, and so can one that was refused. That the workspace is not there is no reason to refuse."""

    workspace_id: str
    token: object
    within: Within = EVERYWHERE


@attrs.frozen
class Unclaim(Ask[None]):
    """Take a claim back, behind all that was asked for in its name; no effect if it was refused."""

    workspace_id: str
    token: object


@attrs.frozen
class Holders(Ask[Sequence[str]]):
    """The sessions that have the workspace, `""` for one that is being made or for files that are transferred. Raises
    `WorkspaceBusy` when one of them lacks the labels `within`."""

    workspace_id: str
    within: Within = EVERYWHERE


@attrs.frozen
class Remove(Ask[None]):
    """Delete a claimed workspace that nobody has. Raises `WorkspaceBusy`, `WorkspaceNotFound`."""

    workspace_id: str
    within: Within = EVERYWHERE


@attrs.frozen
class EndHelpers(Ask[None]):
    """End what reads and writes files of the workspace without a session."""

    workspace_id: str


@attrs.frozen
class Borrow(Ask[RunnerLink]):
    """A link to the files of a workspace (or draft), to be used until `done`."""

    workspace_id: str
    done: trio.Event
    draft: bool = False
    within: Within = EVERYWHERE


@attrs.frozen
class Begin(Ask[None]):
    """Begin a draft of a claimed workspace. Raises `Conflict` when the workspace exists, unless `replace`, and
    `WorkspaceBusy` when somebody has it."""

    workspace_id: str
    replace: bool


@attrs.frozen
class Publish(Ask[None]):
    """Make the draft the workspace."""

    workspace_id: str
    replace: bool
    within: Within = EVERYWHERE


@attrs.frozen
class DropDraft(Ask[None]):
    workspace_id: str


Life = Admit | Released | Claim | Unclaim | Holders | Remove
Files = EndHelpers | Borrow | Begin | Publish | DropDraft
Message = Life | Files | ListAll | Get | Make | Change
