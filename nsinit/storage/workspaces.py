"""The directories of persistent workspaces: made, listed, synced, published, moved out of the way.

A workspace is a directory of `Layout.workspaces`, a draft one of `Layout.drafts`; with a quota it is one of
`Layout.volumes` (see `volumes`), never both. Files in a workspace are foreign and never opened here. A name changes by
one rename(2), so that at any moment there is the old workspace or the new one. Work that may wait for the disk is a
chore (`chores`).
Sources: rename(2) RENAME_EXCHANGE, RENAME_NOREPLACE; syncfs(2); fsync(2) on directories.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import os
import stat
from dataclasses import dataclass
from functools import partial

from nsinit.kernel import constants as k
from nsinit.kernel import syscalls
from nsinit.kernel.slots import SANDBOX_ID
from nsinit.steps import Crash, StepFailed, failure_of, passing
from nsinit.storage.chores import Chore, run_chore
from nsinit.storage.paths import Layout, sync_directory
from nsinit.storage.volumes import Volumes
from nsinit.wire.protocol import DiscardWorkspace, GrowWorkspace, MakeWorkspace, PublishWorkspace, SyncWorkspace
from nsinit.wire.validate import is_workspace_id

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_STAGE = "workspace"


@dataclass(frozen=True, slots=True)
class Workspaces:
    """The workspaces of one data directory. `crash`: where the process is to end, if a test asked for that."""

    layout: Layout
    volumes: Volumes
    crash: Crash | None = None

    def make(self, request: MakeWorkspace) -> Chore:
        """Make a directory, owned on disk by the id that sandbox users map to, or a volume, if there is none.

        Raises:
            StepFailed: `EOPNOTSUPP`, `EXDEV`: see `MakeWorkspace`.
        """
        workspace_id, draft, quota = request.workspace_id, request.draft, request.quota
        path = self.layout.workspace(workspace_id, draft=draft)
        if self.volumes.has(workspace_id, draft=draft):
            return
        if draft and self.volumes.has(workspace_id):
            quota = self.volumes.quota_of(workspace_id)
        if quota is not None:
            if os.path.lexists(path):
                raise StepFailed(_STAGE, "there is one without a quota", path=path, errno=errno.EXDEV)
            self.volumes.require()
            make = partial(self.volumes.make, workspace_id, quota, self.crash, draft=draft)
            yield from run_chore(_STAGE, path, make, self.volumes.kept_fds)
            passing(self.crash, "nsinit.volume.made")
            return
        try:
            os.mkdir(path, 0o755)
        except FileExistsError:
            _adopt(path)
            return
        except OSError as error:
            raise failure_of(_STAGE, error) from error
        passing(self.crash, "nsinit.workspace.directory_made")
        _adopt(path)
        if not draft:
            yield from run_chore(_STAGE, path, lambda: sync_directory(self.layout.workspaces))
        passing(self.crash, "nsinit.workspace.made")

    def grow(self, request: GrowWorkspace) -> Chore:
        """Make a volume larger; see `GrowWorkspace`. Raises `StepFailed`."""
        path = self.layout.volume(request.workspace_id)
        grow = partial(self.volumes.grow, request.workspace_id, request.size_bytes, self.crash)
        yield from run_chore(_STAGE, path, grow, self.volumes.kept_fds)
        passing(self.crash, "nsinit.volume.grown")

    def listed(self, after: str, limit: int) -> tuple[tuple[str, ...], bool]:
        """Return the names of the first workspaces behind `after`, and whether there are more."""
        with os.scandir(self.layout.workspaces) as plain, os.scandir(self.layout.volumes) as volumes:
            entries = itertools.chain(plain, volumes)
            names = (e.name for e in entries if e.name > after and is_workspace_id(e.name) and _is_directory(e))
            found = heapq.nsmallest(limit + 1, names)
        return tuple(found[:limit]), len(found) > limit

    def discard(self, request: DiscardWorkspace) -> Chore:
        """Move a directory or volume into the trash, durably; no effect when there is none. Raises `StepFailed`."""
        workspace_id, draft = request.workspace_id, request.draft
        for path in (
            self.layout.workspace(workspace_id, draft=draft),
            self.layout.volume(workspace_id, draft=draft),
        ):
            try:
                os.rename(path, self._trash_name(workspace_id))
            except FileNotFoundError:
                continue
            except OSError as error:
                raise failure_of(_STAGE, error) from error
            passing(self.crash, "nsinit.workspace.renamed")
            yield from run_chore(_STAGE, path, partial(sync_directory, os.path.dirname(path)))
            passing(self.crash, "nsinit.workspace.discarded")

    def discard_drafts(self) -> None:
        """Move all drafts, and volumes in the making, into the trash: an nsinit that starts continues none of them."""
        self.volumes.discard_copies()
        for directory in (self.layout.drafts, self.layout.volume_drafts):
            for name in os.listdir(directory):
                os.rename(f"{directory}/{name}", self._trash_name(name[:64]))

    def publish(self, request: PublishWorkspace) -> Chore:
        """Make a draft the workspace, once all of it is on the disk; a workspace that it replaces goes to the trash.

        Raises:
            StepFailed: `EEXIST`: there is a workspace, and it was not to be replaced; `EXDEV`: only one of both has a
                quota.
        """
        layout, volumes, workspace_id = self.layout, self.volumes, request.workspace_id
        is_volume = volumes.has(workspace_id, draft=True)
        path_of, other = (layout.volume, layout.workspace) if is_volume else (layout.workspace, layout.volume)
        draft, path = path_of(workspace_id, draft=True), path_of(workspace_id)
        trash = self._trash_name(workspace_id)
        if os.path.lexists(other(workspace_id)):
            raise StepFailed(_STAGE, "only one of both has a quota", path=path, errno=errno.EXDEV)

        def publish() -> None:
            if is_volume:
                volumes.sync(draft)
            _sync_file_system(draft)
            passing(self.crash, "nsinit.workspace.draft_synced")
            if request.replace and os.path.lexists(path):
                # RENAME_EXCHANGE: at no moment is there no workspace of that name.
                syscalls.renameat2(draft, path, k.RENAME_EXCHANGE)
                passing(self.crash, "nsinit.workspace.exchanged")
                os.rename(draft, trash)
            else:
                syscalls.renameat2(draft, path, k.RENAME_NOREPLACE)
            # The rename is durable only when the directory is: fsync(2), NOTES.
            sync_directory(os.path.dirname(path))

        yield from run_chore(_STAGE, path, publish, volumes.kept_fds)
        passing(self.crash, "nsinit.workspace.published")

    def sync(self, request: SyncWorkspace) -> Chore:
        """Wait until everything that was written to a workspace is on the disk. Raises `StepFailed`."""
        workspace_id = request.workspace_id
        if self.volumes.has(workspace_id):
            path = self.layout.volume(workspace_id)
            yield from run_chore(_STAGE, path, partial(self.volumes.sync, path), self.volumes.kept_fds)
        else:
            path = self.layout.workspace(workspace_id)
            yield from run_chore(_STAGE, path, partial(_sync_file_system, path))

    def _trash_name(self, name: str) -> str:
        return f"{self.layout.trash}/{name}-{os.urandom(8).hex()}"


def _adopt(path: str) -> None:
    """Give the top directory to the sandbox user if it is root's: a start that was cut short, or an operator, may have
    left it."""
    try:
        fd = os.open(path, _DIRECTORY)
        try:
            if os.fstat(fd).st_uid == 0:
                os.fchown(fd, SANDBOX_ID, SANDBOX_ID)
        finally:
            os.close(fd)
    except OSError as error:
        raise failure_of(_STAGE, error) from error


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return stat.S_ISDIR(entry.stat(follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _sync_file_system(path: str) -> None:
    fd = os.open(path, _DIRECTORY)
    syscalls.syncfs(fd)
    os.close(fd)
