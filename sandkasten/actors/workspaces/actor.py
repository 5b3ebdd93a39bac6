"""The workspaces actor: the one place that decides who gets a workspace and whether it is made, changed or deleted.

Files lie in nsinit's hands: the actor names workspaces and nothing in them. A directory is a workspace whether or not
there is a record of it (`records.py`), and no record ever makes a directory vanish. Holds are in `holds.py`; access to
the files of a workspace without a session is in `files.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVarTuple, assert_never

import attrs
import trio

from nsinit.wire import protocol
from sandkasten.actors.core import Actor, Ask, Deferred, Ref
from sandkasten.actors.services.directory import SessionDirectory
from sandkasten.actors.services.nsinit import Call, ask_patiently, ask_when_up, call
from sandkasten.actors.services.store import do
from sandkasten.actors.workspaces.files import IDLE_S, FileSandboxes
from sandkasten.actors.workspaces.holds import HAVING, Hold, Holds, Use
from sandkasten.actors.workspaces.records import QuotaPolicy, Register, busy, exists, explain, require_growth
from sandkasten.crash import Crash, Point
from sandkasten.errors import BuildFailed, SandkastenError, WorkspaceNotFound
from sandkasten.host.paths import DataPaths
from sandkasten.links.runner import RunnerLink
from sandkasten.model.lifecycle import ENDED
from sandkasten.model.workspace import (
    EVERYWHERE,
    Within,
    Workspace,
    WorkspacePatch,
    WorkspaceQuota,
    WorkspaceSpec,
    is_within,
)
from sandkasten.store.sessions import SessionRecord, live_sessions_of

Ts = TypeVarTuple("Ts")

log = logging.getLogger(__name__)


# Messages -----------------------------------------------------------------------------------------------------------
#
# To an asker with labels `within`, a workspace that lacks them does not exist: each message raises `WorkspaceNotFound`.


@attrs.frozen
class ListAll(Ask[Sequence[Workspace]]):
    """Every workspace that has a directory or a record, by id."""


@attrs.frozen
class Get(Ask[Workspace]):
    """One workspace. Raises `WorkspaceNotFound`."""

    workspace_id: str
    within: Within = EVERYWHERE


@attrs.frozen
class Make(Ask[Workspace]):
    """Make a workspace. Raises `Conflict` when there is one, unless `may_exist`, and `WorkspaceBusy`."""

    workspace_id: str
    spec: WorkspaceSpec
    may_exist: bool = False
    within: Within = EVERYWHERE


@attrs.frozen
class Change(Ask[Workspace]):
    """Change labels, or raise the quota of a workspace without holders. Raises `WorkspaceBusy`, `LimitInUse`."""

    workspace_id: str
    patch: WorkspacePatch
    within: Within = EVERYWHERE


@attrs.frozen
class Admit(Ask[None]):
    """Decide about a hold that was begun. Raises `WorkspaceBusy`. A claim on a workspace that is not there holds."""

    hold: Hold


@attrs.frozen
class EndClaim(Ask[None]):
    """End a claim, behind all steps in its name; one that was refused as well."""

    claim: Hold


@attrs.frozen
class Released(Ask[None]):
    """Note that a session which had the workspace is gone, or an archive was unpacked in it; what they wrote is synced
    to the disk."""

    workspace_id: str


@attrs.frozen
class Holders(Ask[Sequence[str]]):
    """The ids of the sessions that have the workspace; `""` for a session that is being made and for file access.
    Raises `WorkspaceBusy` when one of the sessions lacks the labels `within`."""

    workspace_id: str
    within: Within = EVERYWHERE


@attrs.frozen
class Remove(Ask[None]):
    """Delete the claimed workspace. Raises `WorkspaceBusy` when it has holders."""

    claim: Hold


@attrs.frozen
class BorrowFiles(Ask[RunnerLink]):
    """A link to the files of a workspace, to be used until `done`. Raises `WorkspaceBusy`, `Capacity`."""

    workspace_id: str
    done: trio.Event
    within: Within = EVERYWHERE


@attrs.frozen
class BorrowDraft(Ask[RunnerLink]):
    """The same for the draft of a claimed workspace."""

    claim: Hold
    done: trio.Event


@attrs.frozen
class EndFileAccess(Ask[None]):
    """End the file sandboxes of a workspace."""

    workspace_id: str


@attrs.frozen
class BeginDraft(Ask[None]):
    """Begin a draft of the claimed workspace. Raises `Conflict` when the workspace exists, unless `replace`, and
    `WorkspaceBusy` when it has holders."""

    claim: Hold
    replace: bool


@attrs.frozen
class Publish(Ask[None]):
    """Make the draft the workspace. Raises `Conflict` when the workspace exists, unless `replace`."""

    claim: Hold
    replace: bool


@attrs.frozen
class DropDraft(Ask[None]):
    """Delete the draft of the claimed workspace, if there is one."""

    claim: Hold


Step = Remove | BorrowDraft | BeginDraft | Publish | DropDraft | EndClaim
"""Steps in the name of a claim: taken in the order in which they were asked for."""

Message = ListAll | Get | Make | Change | Admit | Released | Holders | BorrowFiles | EndFileAccess | Step


# The actor ----------------------------------------------------------------------------------------------------------


class Workspaces(Actor):
    """The actor that admits sessions and requests to workspaces, one decision at a time."""

    def __init__(
        self,
        ref: Ref,
        *,
        store: Ref,
        nsinit: Ref,
        directory: SessionDirectory,
        holds: Holds,
        policy: QuotaPolicy,
        paths: DataPaths,
        new_id: Callable[[], str],
        crash: Crash,
        idle_s: float = IDLE_S,
    ) -> None:
        super().__init__(ref)
        self._store, self._nsinit, self._directory = store, nsinit, directory
        self._holds = holds
        self._register = Register(store=store, nsinit=nsinit, policy=policy)
        self._crash = crash
        self._files = FileSandboxes(
            self._start_task, nsinit=nsinit, directory=directory, paths=paths, new_id=new_id, crash=crash, idle_s=idle_s
        )

    async def on_start(self) -> None:
        self._holds.forget(Use.CLAIM)  # steps in the name of claims ended with the actor before this one

    async def on_stop(self) -> None:
        await self._files.end_all()

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
            case Admit(hold):
                return self.defer(self._admit, hold)
            case Released(workspace_id):
                return self.defer(self._release, workspace_id)
            case Holders(workspace_id, within):
                return self.defer(self._own_holders, workspace_id, within)
            case BorrowFiles():
                return self.defer(self._borrow, message)
            case EndFileAccess(workspace_id):
                return self.defer(self._files.end, workspace_id)
            case Remove() | BorrowDraft() | BeginDraft() | Publish() | DropDraft() | EndClaim():
                return self._defer_step(message)
            case _:
                assert_never(message)

    def _defer_step(self, step: Step) -> Deferred | None:
        """Have a step taken in its turn. Raises `WorkspaceBusy` if the claim was lost in a restart of the actor."""
        if step.claim in self._holds:
            return self.defer(step.claim.next_turn().take, partial(self._take_step, step))
        if isinstance(step, EndClaim):
            return None
        raise busy(step.claim.workspace_id)

    async def _take_step(self, step: Step) -> RunnerLink | None:
        match step:
            case BorrowDraft(claim, done):
                return await self._files.lend((claim.workspace_id, True), done)
            case Remove(claim):
                await self._remove(claim)
            case EndClaim(claim):
                self._holds.end(claim)
            case BeginDraft() | Publish() | DropDraft():
                await self._change_draft(step)
            case _:
                assert_never(step)
        return None

    async def _change_draft(self, step: BeginDraft | Publish | DropDraft) -> None:
        try:
            match step:
                case BeginDraft(claim, replace):
                    await self._begin_draft(claim.workspace_id, replace=replace)
                case Publish(claim, replace):
                    await self._publish(claim, replace=replace)
                case DropDraft(claim):
                    await self._drop_draft(claim.workspace_id)
        except BuildFailed as error:
            raise explain(error, step.claim.workspace_id) from error

    def _start_task(self, work: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> None:
        self._nursery.start_soon(work, *args)

    async def _ask(self, order: Call[protocol.Ok]) -> None:
        await ask_patiently(self._nsinit, order)

    # Who has it -------------------------------------------------------------------------------------------------

    async def _admit(self, hold: Hold) -> None:
        """Decide about a hold by those begun earlier, even if one of these is refused later."""
        workspace_id, within = hold.workspace_id, hold.within
        await self._register.check_claim(workspace_id, within)
        self._require_free_for(hold)
        if hold.use is Use.CLAIM:
            return
        records = await self._records(workspace_id)
        if hold.use.refuses(Use(each.session.options.workspace_mode) for each in records):
            raise busy(workspace_id, [_name(each, within) for each in records])
        await self._register.take_up(workspace_id, within)
        quota = await self._register.quota_of(workspace_id)
        if quota is not None:  # one without a quota is made by the session's build, if there is none
            await self._have_made(workspace_id, quota)

    def _require_free_for(self, hold: Hold) -> None:
        if hold.use.refuses(self._holds.before(hold)):
            raise busy(hold.workspace_id)

    async def _holders(self, workspace_id: str, within: Within = EVERYWHERE) -> Sequence[str]:
        """Return the ids of the sessions that have it, and `""` for each holder that is not told by name."""
        unnamed = self._holds.count(workspace_id, HAVING)  # first: a create's hold ends when its record is there
        return [_name(each, within) for each in await self._records(workspace_id)] + [""] * unnamed

    async def _require_unused(self, workspace_id: str, within: Within = EVERYWHERE) -> None:
        if holders := await self._holders(workspace_id, within):
            raise busy(workspace_id, holders)

    async def _own_holders(self, workspace_id: str, within: Within) -> Sequence[str]:
        if any(not is_within(each.session.labels, within) for each in await self._records(workspace_id)):
            raise busy(workspace_id)
        return await self._holders(workspace_id, within)

    async def _records(self, workspace_id: str) -> Sequence[SessionRecord]:
        """Return the records of the sessions that may have it, without those whose end waits to be written."""
        unwritten = self._directory.unwritten
        records = await self._store.ask_again(do(live_sessions_of, workspace_id))
        return [
            each
            for each in records
            if (latest := unwritten.get(each.session.id)) is None or latest.session.status not in ENDED
        ]

    async def _release(self, workspace_id: str) -> None:
        """Sync and note the time. Makes nothing: the workspace may have been deleted behind its last session."""
        try:
            await self._ask(call(protocol.SyncWorkspace, workspace_id))
        except BuildFailed as error:
            raise explain(error, workspace_id) from error
        await self._register.touch(workspace_id)

    async def _remove(self, claim: Hold) -> None:
        workspace_id = claim.workspace_id
        await self._require_unused(workspace_id, claim.within)
        await self._register.get(workspace_id, claim.within)
        await self._files.end(workspace_id)
        await self._ask(call(protocol.DiscardWorkspace, workspace_id))
        self._crash.passing(Point.WORKSPACE_DISCARDED)
        await self._register.forget(workspace_id)
        log.info("workspace_deleted", extra={"workspace_id": workspace_id})

    # Making one -------------------------------------------------------------------------------------------------

    async def _make(self, message: Make) -> Workspace:
        workspace_id, within = message.workspace_id, message.within
        self._register.require_allowed(None if message.spec.quota is None else message.spec.quota.size_bytes)
        with self._holds.taken(Hold(workspace_id, Use.MAKE, within)) as hold:
            self._require_free_for(hold)
            spec = attrs.evolve(message.spec, labels={**message.spec.labels, **within})
            if message.may_exist:
                was_promised = (await self._register.take_up(workspace_id, within)).quota is not None
            else:
                was_promised = False
                await self._take_name(workspace_id, spec, within)
            quota = await self._register.quota_of(workspace_id)
            self._crash.passing(Point.WORKSPACE_RECORDED)
            refusal: SandkastenError | None = None
            try:
                await self._have_made(workspace_id, quota)
            except SandkastenError as error:
                refusal = error
            if refusal is not None:
                if not was_promised:
                    await self._register.forget_unmade(workspace_id)
                raise refusal
            self._crash.passing(Point.WORKSPACE_MADE)
        return await self._register.get(workspace_id, within)

    async def _have_made(self, workspace_id: str, quota: WorkspaceQuota | None) -> None:
        try:
            await self._ask(call(protocol.MakeWorkspace, workspace_id, quota=_disk(quota)))
        except BuildFailed as error:
            raise explain(error, workspace_id) from error
        await self._register.note_quota(workspace_id, quota)

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
        self._register.require_allowed(patch.quota_bytes)
        if patch.quota_bytes is not None:
            with self._holds.taken(Hold(workspace_id, Use.GROW, within)) as hold:
                self._require_free_for(hold)
                await self._grow(workspace_id, patch.quota_bytes, within)
        return await self._register.change(workspace_id, patch, within)

    async def _grow(self, workspace_id: str, size_bytes: int, within: Within) -> None:
        found = await self._register.get(workspace_id, within)
        require_growth(found, size_bytes)
        if found.quota is not None and found.quota.size_bytes == size_bytes:
            return
        await self._require_unused(workspace_id, within)
        await self._files.end(workspace_id)
        try:
            await self._ask(call(protocol.GrowWorkspace, workspace_id, size_bytes))
        except BuildFailed as error:
            raise explain(error, workspace_id) from error

    # Its files --------------------------------------------------------------------------------------------------

    async def _borrow(self, message: BorrowFiles) -> RunnerLink:
        workspace_id = message.workspace_id
        hold = self._holds.begin(Hold(workspace_id, Use.FILES, message.within))
        try:
            self._require_free_for(hold)
            await self._register.check(workspace_id, message.within)
            link = await self._files.lend((workspace_id, False), message.done)
            # The hold keeps the workspace from becoming another's; it may have become one before.
            await self._register.check(workspace_id, message.within)
        except BaseException:
            self._holds.end(hold)
            raise
        self._start_task(self._end_when_done, hold, message.done)
        return link

    async def _end_when_done(self, hold: Hold, done: trio.Event) -> None:
        try:
            await done.wait()
        finally:
            self._holds.end(hold)

    async def _begin_draft(self, workspace_id: str, *, replace: bool) -> None:
        if not replace and workspace_id in await self._register.names():
            raise exists(workspace_id)
        await self._require_unused(workspace_id)
        await self._drop_draft(workspace_id)
        quota = await self._register.quota_of(workspace_id)
        await self._ask(call(protocol.MakeWorkspace, workspace_id, draft=True, quota=_disk(quota)))

    async def _publish(self, claim: Hold, *, replace: bool) -> None:
        workspace_id = claim.workspace_id
        await self._files.end(workspace_id)
        was_promised = (await self._register.take_up(workspace_id, claim.within)).quota is not None
        quota = await self._register.quota_of(workspace_id)
        refusal: BuildFailed | None = None
        try:
            await ask_when_up(self._nsinit, call(protocol.PublishWorkspace, workspace_id, replace))
            self._crash.passing(Point.WORKSPACE_PUBLISHED)
        except BuildFailed as error:
            refusal = error
        if refusal is not None:
            if not was_promised:
                await self._register.forget_unmade(workspace_id)
            raise refusal
        await self._register.note_quota(workspace_id, quota)

    async def _drop_draft(self, workspace_id: str) -> None:
        await self._files.end(workspace_id)
        await self._ask(call(protocol.DiscardWorkspace, workspace_id, draft=True))


def release_soon(workspaces: Ref, workspace_id: str | None) -> None:
    """Send `Released` for a session that is gone, if it had a workspace, without waiting."""
    if workspace_id is not None:
        try:
            workspaces.tell(Released(workspace_id))
        except SandkastenError as error:
            log.warning("workspace_not_synced", extra={"workspace_id": workspace_id, "error": str(error)})


def _disk(quota: WorkspaceQuota | None) -> protocol.DiskLimits | None:
    return None if quota is None else protocol.DiskLimits(quota.size_bytes, quota.files)


def _name(record: SessionRecord, within: Within) -> str:
    """Return the id of a session, `""` if the labels `within` hide it from the asker."""
    return record.session.id if is_within(record.session.labels, within) else ""
