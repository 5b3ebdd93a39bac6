"""The supervisor's interface to persistent workspaces.

`tree.LocalSupervisor` inherits it. Runs in the caller's task: it asks the workspaces actor, and gives back a link or a
claim when its context is left.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import attrs
import trio

from runner.wire.protocol import Packed, Unpack
from sandkasten.actors.core import Ref
from sandkasten.actors.workspaces import actor as messages
from sandkasten.actors.workspaces.files import LocalFiles, LocalFileStream
from sandkasten.actors.workspaces.holds import Hold, Holds, Use
from sandkasten.actors.workspaces.uploads import WORKSPACE_PLACE
from sandkasten.admission import budget
from sandkasten.config import MIB, Config
from sandkasten.errors import (
    Capacity,
    InvalidRequest,
    RunnerLost,
    RunnerProtocolError,
    SandkastenError,
    WorkspaceBusy,
    WorkspaceNotFound,
)
from sandkasten.links.runner import RunnerLink
from sandkasten.model import WORKSPACE_ID, Session
from sandkasten.model.workspace import (
    EVERYWHERE,
    MAX_UNPACKED,
    WRITE_S,
    Within,
    Workspace,
    WorkspacePatch,
    WorkspaceSpec,
    WorkspaceUsage,
    is_within,
)
from sandkasten.supervisor import WorkspaceSupervisor

log = logging.getLogger(__name__)

_USAGE_AGE_S = 30.0
_MEASURING = 2
_MEASURE_ALL_S = 10.0
_MAX_KEPT_USAGES = 1000
_FORCE_S = 30.0
_FORCE_PAUSE_S = 0.05
_CLEANUP_S = 10.0


class WorkOfWorkspaces:
    """The part of `supervisor.Supervisor` about workspaces. The heir brings the fields and `destroy`."""

    _config: Config
    _store: Ref
    _workspaces: Ref
    _holds: Holds
    _usages: dict[str, tuple[float, WorkspaceUsage]]
    _within: Within = EVERYWHERE

    def workspaces_within(self, within: Within) -> WorkspaceSupervisor:
        return WorkspacesWithin(self, within)

    async def destroy(self, session_id: str) -> Session:
        """See `Supervisor.destroy`."""
        raise NotImplementedError

    async def workspaces(self, *, after: str = "", limit: int = 1000, measure: bool = False) -> Sequence[Workspace]:
        self._require_enabled()
        every = await self._workspaces.ask_again(messages.ListAll())
        found = [each for each in every if each.id > after and is_within(each.labels, self._within)][:limit]
        return await self._measure_all(found) if measure else found

    async def workspace(self, workspace_id: str, *, measure: bool = False) -> Workspace:
        self._check(workspace_id)
        found = await self._workspaces.ask_again(messages.Get(workspace_id, self._within))
        return await self._measured(found) if measure else found

    async def make_workspace(self, workspace_id: str, spec: WorkspaceSpec) -> Workspace:
        self._check_new(workspace_id)
        return await self._workspaces.ask(messages.Make(workspace_id, spec, within=self._within))

    async def update_workspace(self, workspace_id: str, patch: WorkspacePatch) -> Workspace:
        self._check(workspace_id)
        return await self._workspaces.ask_again(messages.Change(workspace_id, patch, self._within))

    async def delete_workspace(self, workspace_id: str, *, force: bool = False) -> None:
        self._check(workspace_id)
        async with self._claimed(workspace_id) as claim:
            if force:
                await self._end_holders(workspace_id)
            await self._workspaces.ask(messages.Remove(claim))
            self._usages.pop(workspace_id, None)

    async def _end_holders(self, workspace_id: str) -> None:
        """End every session that has the workspace. The claim keeps new ones away."""
        give_up_at = trio.current_time() + _FORCE_S
        await self._workspaces.ask(messages.Holders(workspace_id, self._within))
        await self._workspaces.ask(messages.EndFileAccess(workspace_id))
        while holders := await self._workspaces.ask(messages.Holders(workspace_id, self._within)):
            if trio.current_time() > give_up_at:
                raise WorkspaceBusy("its sessions don't end", workspace_id=workspace_id)
            for session_id in filter(None, holders):
                try:
                    await self.destroy(session_id)
                except SandkastenError as error:
                    log.info("holder_not_ended", extra={"session_id": session_id, "error": str(error)})
            await trio.sleep(_FORCE_PAUSE_S)  # one that is being made gets an id first

    @asynccontextmanager
    async def _claimed(self, workspace_id: str) -> AsyncIterator[Hold]:
        claim = self._holds.begin(Hold(workspace_id, Use.CLAIM, self._within))
        try:
            await self._workspaces.ask(messages.Admit(claim))
        except BaseException:
            self._holds.end(claim)  # no step was taken in its name; the actor may be too busy to be told of the end
            raise
        try:
            yield claim
        finally:
            with trio.move_on_after(_CLEANUP_S, shield=True):
                await self._workspaces.ask_again(messages.EndClaim(claim))

    # Files ------------------------------------------------------------------------------------------------------

    def workspace_files(self, workspace_id: str, *, make: bool = False) -> LocalFiles:
        return LocalFiles(
            lambda _lasting: self._made_files(workspace_id) if make else self._files(workspace_id),
            self._store,
            f"{WORKSPACE_PLACE}{workspace_id}",
            sync=partial(self._workspaces.ask, messages.Released(workspace_id)),
        )

    @asynccontextmanager
    async def _made_files(self, workspace_id: str) -> AsyncIterator[RunnerLink]:
        self._check_new(workspace_id)
        make = messages.Make(workspace_id, WorkspaceSpec(), may_exist=True, within=self._within)
        await self._workspaces.ask(make)
        async with self._files(workspace_id) as link:
            yield link

    @asynccontextmanager
    async def _files(self, workspace_id: str, *, draft_of: Hold | None = None) -> AsyncIterator[RunnerLink]:
        """Borrow a link to the files of a workspace, or to those of the draft of a claim."""
        self._check(workspace_id)
        done = trio.Event()
        borrow = (
            messages.BorrowFiles(workspace_id, done, self._within)
            if draft_of is None
            else messages.BorrowDraft(draft_of, done)
        )
        hostile: RunnerProtocolError | None = None
        try:
            yield await self._workspaces.ask(borrow)
        except RunnerLost as error:
            raise Capacity("what reached the workspace's files has ended; ask again") from error
        except RunnerProtocolError as error:
            hostile = error
        finally:
            done.set()
        if hostile is not None:
            await self._workspaces.ask(messages.EndFileAccess(workspace_id))  # the next request gets another sandbox
            raise hostile

    # Archives ---------------------------------------------------------------------------------------------------

    def open_unpack(
        self, workspace_id: str, *, replace: bool = False
    ) -> AbstractAsyncContextManager[LocalArchiveWriter]:
        return self._open_unpack(workspace_id, replace)

    @asynccontextmanager
    async def _open_unpack(self, workspace_id: str, replace: bool) -> AsyncIterator[LocalArchiveWriter]:
        self._check_new(workspace_id)
        request = Unpack(MAX_UNPACKED, self._config.workspace.max_import_mb * MIB)
        async with self._claimed(workspace_id) as claim:
            draft = LocalFiles(lambda _lasting: self._files(workspace_id, draft_of=claim), self._store, "")
            try:
                await self._workspaces.ask(messages.BeginDraft(claim, replace))
                async with draft.stream(request, patience_s=WRITE_S) as stream:
                    yield LocalArchiveWriter(stream, messages.Publish(claim, replace), self._workspaces)
            finally:
                self._usages.pop(workspace_id, None)
                with trio.move_on_after(_CLEANUP_S, shield=True):
                    await self._workspaces.ask(messages.DropDraft(claim))

    # Sizes ------------------------------------------------------------------------------------------------------

    async def _measure_all(self, found: Sequence[Workspace]) -> Sequence[Workspace]:
        """Measure as many workspaces as there is time for; the others are returned without a size."""
        measured: dict[str, Workspace] = {}
        limiter = trio.CapacityLimiter(_MEASURING)

        async def measure(workspace: Workspace) -> None:
            async with limiter:
                try:
                    measured[workspace.id] = await self._measured(workspace)
                except SandkastenError as error:
                    log.info("workspace_not_measured", extra={"workspace_id": workspace.id, "error": str(error)})

        with trio.move_on_after(_MEASURE_ALL_S):
            async with trio.open_nursery() as nursery:
                for each in found:
                    nursery.start_soon(measure, each)
        return [measured.get(each.id, each) for each in found]

    async def _measured(self, workspace: Workspace) -> Workspace:
        kept = self._usages.get(workspace.id)
        if kept is None or trio.current_time() - kept[0] > _USAGE_AGE_S:
            kept = trio.current_time(), await self.workspace_files(workspace.id).measure()
            if len(self._usages) >= _MAX_KEPT_USAGES:
                self._usages.clear()
            self._usages[workspace.id] = kept
        return attrs.evolve(workspace, usage=kept[1])

    def _check(self, workspace_id: str) -> None:
        self._require_enabled()
        if not WORKSPACE_ID.match(workspace_id):
            raise WorkspaceNotFound("there is no such workspace", workspace_id=workspace_id[:64])

    def _check_new(self, workspace_id: str) -> None:
        self._require_enabled()
        if not WORKSPACE_ID.match(workspace_id):
            raise InvalidRequest("malformed workspace id", workspace_id="2 to 64 of a-z 0-9 . _ - (ends a-z 0-9)")
        budget.check(self._config.data_dir, self._config.disk)

    def _require_enabled(self) -> None:
        if not self._config.workspace.enabled:
            raise InvalidRequest("workspaces are switched off", workspace_id="not available")


class WorkspacesWithin(WorkOfWorkspaces):
    """The same for an asker to whom only workspaces with certain labels exist."""

    def __init__(self, node: WorkOfWorkspaces, within: Within) -> None:
        self._config, self._store, self._workspaces = node._config, node._store, node._workspaces
        self._holds, self._usages = node._holds, node._usages
        self._node, self._within = node, within

    async def destroy(self, session_id: str) -> Session:
        return await self._node.destroy(session_id)


class LocalArchiveWriter:
    """Implements `supervisor.ArchiveWriter`."""

    def __init__(self, stream: LocalFileStream, publish: messages.Publish, workspaces: Ref) -> None:
        self._stream, self._publish, self._workspaces = stream, publish, workspaces

    async def send(self, data: bytes) -> bool:
        return await self._stream.send(data)

    async def commit(self) -> Packed:
        packed = await self._stream.end(Packed)
        await self._workspaces.ask(self._publish)
        return packed
