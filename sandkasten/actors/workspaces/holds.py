"""Which creates of sessions have asked for a workspace and are not done: what no record tells yet.

A plain object, so that leaving is one line that can't fail. The workspaces actor reads it and decides; whoever creates
a session adds to it and takes away. Once a session is made, its record is its hold on the workspace, and that survives
the daemon.

Who has a workspace alone for a while, to delete or replace it, and the order of what is done in a claim's name.

Belongs to the workspaces actor and decides nothing. What was asked for in the name of a claim goes on when whoever
asked has left, so a claim ends behind all of it: until then nobody else gets the workspace.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import attrs
import trio

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


T = TypeVar("T")


@attrs.frozen
class Turn:
    """A place in the order of a claim: after `before`, until `done`."""

    before: trio.Event
    done: trio.Event

    async def take(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do something when its turn has come."""
        try:
            await self.before.wait()
            return await work()
        finally:
            self.done.set()


@attrs.define(eq=False)
class _Claim:
    token: object
    last: trio.Event
    """Set when nothing is under way."""


class Claims:
    """See the module's docstring. `token` tells claims apart."""

    def __init__(self) -> None:
        self._claims: dict[str, _Claim] = {}

    def __contains__(self, workspace_id: str) -> bool:
        return workspace_id in self._claims

    def begin(self, workspace_id: str, token: object) -> None:
        """Let nobody else have a workspace that is not claimed."""
        nothing = trio.Event()
        nothing.set()
        self._claims[workspace_id] = _Claim(token, nothing)

    def is_of(self, workspace_id: str, token: object) -> bool:
        """Whether a workspace is claimed, and by that one."""
        return workspace_id in self._claims and self._claims[workspace_id].token is token

    def end(self, workspace_id: str, token: object) -> None:
        """Let others have it again; no effect if it is somebody else's by now."""
        if self.is_of(workspace_id, token):
            del self._claims[workspace_id]

    def queue(self, workspace_id: str) -> Turn | None:
        """Return the next turn of a claim, to be taken in any case; None if there is no claim."""
        claim = self._claims.get(workspace_id)
        if claim is None:
            return None
        before, claim.last = claim.last, trio.Event()
        return Turn(before, claim.last)
