"""Which creates of sessions have asked for a workspace and are not done: what no record tells yet.

A plain object, so that leaving is one line that can't fail. The workspaces actor reads it and decides; whoever creates
a session adds to it and takes away. Once a session is made, its record is its hold on the workspace, and that survives
the daemon.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from sandkasten.model.workspace import EVERYWHERE, Within, WorkspaceMode


@attrs.frozen(eq=False)
class Attachment:
    """One create's claim on a workspace, from before its session has a record until it is made or has failed."""

    workspace_id: str
    mode: WorkspaceMode
    within: Within = EVERYWHERE


class Attachments:
    """All claims, in their order."""

    def __init__(self) -> None:
        self._pending: dict[Attachment, None] = {}

    def begin(self, workspace_id: str, mode: WorkspaceMode, within: Within = EVERYWHERE) -> Attachment:
        """Add a claim; `end` it, whatever happens."""
        attachment = Attachment(workspace_id, mode, within)
        self._pending[attachment] = None
        return attachment

    def end(self, attachment: Attachment) -> None:
        """Take a claim away."""
        self._pending.pop(attachment, None)

    def before(self, attachment: Attachment) -> Sequence[Attachment]:
        """Return the claims on the same workspace that came earlier."""
        found = []
        for each in self._pending:
            if each is attachment:
                break
            if each.workspace_id == attachment.workspace_id:
                found.append(each)
        return found

    def of(self, workspace_id: str) -> Sequence[Attachment]:
        """Return all claims on a workspace."""
        return [each for each in self._pending if each.workspace_id == workspace_id]
