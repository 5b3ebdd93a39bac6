"""All persistent workspaces of the node: who may have one, what is remembered of each, helpers for their files.

The one place that decides about attaching and deleting. A session holds its workspace by its record, from before the
sandbox is built until after it is gone; creates under way are in `Attachments`; both together are asked before anybody
gets a workspace alone or takes it away. Files lie in nsinit's hands: this actor names workspaces and nothing in them.
A directory is a workspace whether or not there is a record of it, and no record ever makes one vanish.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVarTuple, assert_never

import attrs

from nsinit.wire import protocol
from sandkasten.actors.core import Actor, Ask, Deferred, Ref
from sandkasten.actors.services.directory import SessionDirectory
from sandkasten.actors.services.nsinit import ask_patiently, ask_when_up, call
from sandkasten.actors.services.store import do
from sandkasten.actors.workspaces.helpers import IDLE_S, Helpers
from sandkasten.actors.workspaces.holds import Attachment, Attachments, Claims
from sandkasten.actors.workspaces.messages import (
    Admit,
    Begin,
    Borrow,
    Change,
    Claim,
    DropDraft,
    EndHelpers,
    Get,
    Holders,
    Life,
    ListAll,
    Make,
    Message,
    Publish,
    Released,
    Remove,
    Unclaim,
)
from sandkasten.actors.workspaces.records import Register, busy, exists, explain, require_growth
from sandkasten.crash import Crash, Point
from sandkasten.host.paths import DataPaths
from sandkasten.links.runner import RunnerLink
from sandkasten.model.errors import BuildFailed, SandkastenError, WorkspaceNotFound
from sandkasten.model.lifecycle import ENDED
from sandkasten.model.workspace import (
    EVERYWHERE,
    Within,
    Workspace,
    WorkspaceMode,
    WorkspaceQuota,
    WorkspaceSpec,
    is_within,
)
from sandkasten.store.sessions import SessionRecord, live_sessions_of

Ts = TypeVarTuple("Ts")

log = logging.getLogger(__name__)


class Workspaces(Actor):
    """See the module's docstring."""

    def __init__(
        self,
        ref: Ref,
        *,
        store: Ref,
        zygote: Ref,
        directory: SessionDirectory,
        attachments: Attachments,
        paths: DataPaths,
        new_id: Callable[[], str],
        crash: Crash,
        idle_s: float = IDLE_S,
    ) -> None:
        super().__init__(ref)
        self._store, self._zygote, self._directory = store, zygote, directory
        self._attachments = attachments
        self._claimed = Claims()
        self._making: list[str] = []
        self._register = Register(store=store, zygote=zygote)
        self._crash = crash
        self._helpers = Helpers(
            self, zygote=zygote, directory=directory, paths=paths, new_id=new_id, crash=crash, idle_s=idle_s
        )

    async def on_stop(self) -> None:
        await self._helpers.end_all()

    def start_task(self, work: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> None:
        self._nursery.start_soon(work, *args)

    async def handle(self, message: Message) -> Any:
        match message:
            case ListAll():
                return self.defer(self._register.list)
            case Get(workspace_id, within):
                return self.defer(self._register.get, workspace_id, within)
            case Make():
                return self.defer(self._make, message)
            case Change():
                return self.defer(self._change, message)
            case EndHelpers(workspace_id):
                return self.defer(self._helpers.end, workspace_id)
            case Borrow(workspace_id, done, draft=True):
                return self._defer_in_turn(workspace_id, self._helpers.lend, (workspace_id, True), done)
            case Borrow():
                return self.defer(self._borrow, message)
            case Begin() | Publish() | DropDraft():
                return self._defer_in_turn(message.workspace_id, self._draft, message)
            case _:
                return self._handle_life(message)

    def _handle_life(self, message: Life) -> Any:
        match message:
            case Admit(attachment):
                return self.defer(self._admit, attachment)
            case Released(workspace_id):
                return self.defer(self._release, workspace_id)
            case Claim(workspace_id, token, within):
                if workspace_id in self._claimed or workspace_id in self._making:
                    raise busy(workspace_id)
                self._claimed.begin(workspace_id, token)
                return self.defer(self._register.check_claim, workspace_id, within)
            case Unclaim(workspace_id, token):
                if not self._claimed.is_of(workspace_id, token):
                    return None
                return self._defer_in_turn(workspace_id, self._unclaim, workspace_id, token)
            case Holders(workspace_id, within):
                return self.defer(self._own_holders, workspace_id, within)
            case Remove(workspace_id, within):
                return self._defer_in_turn(workspace_id, self._remove, workspace_id, within)
            case _:
                assert_never(message)

    def _defer_in_turn(self, workspace_id: str, work: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> Deferred:
        """Have done what is asked for in the name of a claim. Raises `WorkspaceBusy` without one."""
        turn = self._claimed.queue(workspace_id)
        if turn is None:
            raise busy(workspace_id)
        return self.defer(turn.take, partial(work, *args))

    async def _unclaim(self, workspace_id: str, token: object) -> None:
        self._claimed.end(workspace_id, token)

    # Who has it -------------------------------------------------------------------------------------------------

    async def _admit(self, attachment: Attachment) -> None:
        """Decide by who came earlier: records, and claims that were there before this one, even if they fail later."""
        workspace_id, is_alone = attachment.workspace_id, attachment.mode is WorkspaceMode.EXCLUSIVE
        await self._register.check_claim(workspace_id, attachment.within)
        if workspace_id in self._claimed:
            raise busy(workspace_id)
        earlier = self._attachments.before(attachment)
        records = await self._records(workspace_id)
        modes = [each.mode for each in earlier] + [_mode_of(each) for each in records]
        if modes if is_alone else WorkspaceMode.EXCLUSIVE in modes:
            raise busy(workspace_id, [_name(each, attachment.within) for each in records])
        record = await self._register.take_up(workspace_id, attachment.within)
        if record.quota is not None:  # whoever builds the session makes one without, if there is none
            await self._have_made(workspace_id, record.quota)

    async def _holders(self, workspace_id: str, within: Within = EVERYWHERE) -> Sequence[str]:
        """Return who has it, `""` for those who are not told by name."""
        unseen = [""] * (len(self._attachments.of(workspace_id)) + self._helpers.is_used(workspace_id))
        return [_name(each, within) for each in await self._records(workspace_id)] + unseen

    async def _own_holders(self, workspace_id: str, within: Within) -> Sequence[str]:
        if any(not is_within(each.session.labels, within) for each in await self._records(workspace_id)):
            raise busy(workspace_id)
        return await self._holders(workspace_id, within)

    async def _records(self, workspace_id: str) -> Sequence[SessionRecord]:
        """Return the records of sessions that may have it; one whose end was not written yet has not."""
        unwritten = self._directory.unwritten
        records = await self._store.ask_again(do(live_sessions_of, workspace_id))
        return [
            each
            for each in records
            if (latest := unwritten.get(each.session.id)) is None or latest.session.status not in ENDED
        ]

    async def _release(self, workspace_id: str) -> None:
        """Nothing is made anew here: the workspace may have been deleted behind its last session."""
        await ask_patiently(self._zygote, call(protocol.SyncWorkspace, workspace_id))
        await self._register.touch(workspace_id)

    async def _remove(self, workspace_id: str, within: Within) -> None:
        if holders := await self._holders(workspace_id, within):
            raise busy(workspace_id, holders)
        await self._register.get(workspace_id, within)
        await self._helpers.end(workspace_id)
        await ask_patiently(self._zygote, call(protocol.DiscardWorkspace, workspace_id))
        self._crash.passing(Point.WORKSPACE_DISCARDED)
        await self._register.forget(workspace_id)
        log.info("workspace_deleted", extra={"workspace_id": workspace_id})

    # Making one -------------------------------------------------------------------------------------------------

    async def _make(self, message: Make) -> Workspace:
        workspace_id, within = message.workspace_id, message.within
        if workspace_id in self._claimed:
            raise busy(workspace_id)
        self._making.append(workspace_id)
        try:
            spec = attrs.evolve(message.spec, labels={**message.spec.labels, **within})
            if message.may_exist:
                quota = (await self._register.take_up(workspace_id, within)).quota
            else:
                quota = spec.quota
                await self._take_name(workspace_id, spec, within)
            self._crash.passing(Point.WORKSPACE_RECORDED)
            try:
                await self._have_made(workspace_id, quota)
            except SandkastenError:
                if quota is None or not message.may_exist:  # a quota that was promised before stays one
                    await self._register.forget_unmade(workspace_id)
                raise
            self._crash.passing(Point.WORKSPACE_MADE)
        finally:
            self._making.remove(workspace_id)
        return await self._register.get(workspace_id, within)

    async def _have_made(self, workspace_id: str, quota: WorkspaceQuota | None) -> None:
        try:
            await self._ask(call(protocol.MakeWorkspace, workspace_id, quota=_disk(quota)))
        except BuildFailed as error:
            raise explain(error, workspace_id) from error

    async def _take_name(self, workspace_id: str, spec: WorkspaceSpec, within: Within) -> None:
        if workspace_id in await self._register.names():
            raise exists(workspace_id)
        try:
            await self._register.take_up(workspace_id, within, spec.labels)
        except WorkspaceNotFound:
            raise exists(workspace_id) from None
        await self._register.put_new(workspace_id, spec)

    async def _change(self, message: Change) -> Workspace:
        workspace_id, patch, within = message.workspace_id, message.patch, message.within
        if patch.quota_bytes is not None:
            if workspace_id in self._making:
                raise busy(workspace_id)
            self._making.append(workspace_id)  # nobody claims it meanwhile
            try:
                await self._grow(workspace_id, patch.quota_bytes, within)
            finally:
                self._making.remove(workspace_id)
        return await self._register.change(workspace_id, patch, within)

    async def _grow(self, workspace_id: str, size_bytes: int, within: Within) -> None:
        found = await self._register.get(workspace_id, within)
        require_growth(found, size_bytes)
        if found.quota is not None and found.quota.size_bytes == size_bytes:
            return
        if holders := await self._holders(workspace_id, within):
            raise busy(workspace_id, holders)
        await self._helpers.end(workspace_id)
        try:
            await self._ask(call(protocol.GrowWorkspace, workspace_id, size_bytes))
        except BuildFailed as error:
            raise explain(error, workspace_id) from error

    # Its files --------------------------------------------------------------------------------------------------

    async def _borrow(self, message: Borrow) -> RunnerLink:
        if message.workspace_id in self._claimed:
            raise busy(message.workspace_id)
        await self._register.check(message.workspace_id, message.within)
        link = await self._helpers.lend((message.workspace_id, False), message.done)
        await self._register.check(message.workspace_id, message.within)  # a loan is what keeps it from being another's
        return link

    async def _draft(self, message: Begin | Publish | DropDraft) -> None:
        workspace_id = message.workspace_id
        try:
            match message:
                case Begin(replace=replace):
                    await self._check_free(workspace_id, replace=replace)
                    await self._helpers.end(workspace_id)
                    await self._ask(call(protocol.DiscardWorkspace, workspace_id, draft=True))
                    quota = await self._register.quota_of(workspace_id)
                    await self._ask(call(protocol.MakeWorkspace, workspace_id, draft=True, quota=_disk(quota)))
                case Publish(replace=replace, within=within):
                    await self._helpers.end(workspace_id)
                    await self._register.take_up(workspace_id, within)
                    await self._publish(workspace_id, replace=replace)
                case DropDraft():
                    await self._helpers.end(workspace_id)
                    await self._ask(call(protocol.DiscardWorkspace, workspace_id, draft=True))
        except BuildFailed as error:
            raise explain(error, workspace_id) from error

    async def _publish(self, workspace_id: str, *, replace: bool) -> None:
        try:
            await ask_when_up(self._zygote, call(protocol.PublishWorkspace, workspace_id, replace))
            self._crash.passing(Point.WORKSPACE_PUBLISHED)
        except BuildFailed:
            if await self._register.quota_of(workspace_id) is None:
                await self._register.forget_unmade(workspace_id)
            raise

    async def _check_free(self, workspace_id: str, *, replace: bool) -> None:
        if not replace and workspace_id in await self._register.names():
            raise exists(workspace_id)
        if holders := await self._holders(workspace_id):
            raise busy(workspace_id, holders)

    async def _ask(self, message: Ask[protocol.Ok]) -> None:
        await ask_patiently(self._zygote, message)


def release_soon(workspaces: Ref, workspace_id: str | None) -> None:
    """Say that a session is gone which may have had a workspace; for those who can't wait."""
    if workspace_id is not None:
        try:
            workspaces.tell(Released(workspace_id))
        except SandkastenError as error:
            log.warning("workspace_not_synced", extra={"workspace_id": workspace_id, "error": str(error)})


def _disk(quota: WorkspaceQuota | None) -> protocol.DiskLimits | None:
    return None if quota is None else protocol.DiskLimits(quota.size_bytes, quota.files)


def _mode_of(record: SessionRecord) -> str:
    return record.session.options.workspace_mode


def _name(record: SessionRecord, within: Within) -> str:
    """Return the id of a session, if it exists for who asks."""
    return record.session.id if is_within(record.session.labels, within) else ""
