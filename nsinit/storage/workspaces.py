"""The directories of persistent workspaces: made, listed, synced, published, moved out of the way.

A workspace is a directory of `Layout.workspaces`, a draft one of `Layout.drafts`; with a quota it is one of
`Layout.volumes` (see `volumes`), never both. What is in it is foreign and is never opened here. A name changes by one
rename(2), so that at any moment there is the old workspace or the new one. What may wait for the disk runs in a process
of its own; its exit status is the errno it ended with.
Sources: rename(2) RENAME_EXCHANGE, RENAME_NOREPLACE; syncfs(2); fsync(2) on directories.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import os
import stat
from collections.abc import Callable, Generator
from functools import partial

from nsinit.kernel import constants as k
from nsinit.kernel import syscalls
from nsinit.kernel.files import keep_only
from nsinit.kernel.slots import SANDBOX_ID
from nsinit.scheduler import Wait
from nsinit.steps import Crash, StepFailed, failure_of, passing
from nsinit.storage.paths import Layout, sync_directory
from nsinit.storage.volumes import Volumes
from nsinit.wire.protocol import GrowWorkspace, MakeWorkspace
from nsinit.wire.validate import is_workspace_id

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CHORE_S = 25.0
"""Less than the daemon waits for an answer."""
_STAGE = "workspace"

Chore = Generator[Wait, bool, None]


def make(layout: Layout, volumes: Volumes, request: MakeWorkspace, crash: Crash | None) -> Chore:
    """Make a directory, owned on disk by the id that sandbox users map to, or a volume, if there is none.

    Raises:
        StepFailed: `EOPNOTSUPP`, `EXDEV`: see `MakeWorkspace`.
    """
    workspace_id, draft, quota = request.workspace_id, request.draft, request.quota
    path = layout.workspace(workspace_id, draft=draft)
    if volumes.has(workspace_id, draft=draft):
        return
    if draft and volumes.has(workspace_id):
        quota = volumes.quota_of(workspace_id)
    if quota is not None:
        if os.path.lexists(path):
            raise StepFailed(_STAGE, "there is one without a quota", path=path, errno=errno.EXDEV)
        volumes.require()
        yield from _run(path, partial(volumes.make, workspace_id, quota, crash, draft=draft), volumes.kept_fds)
        passing(crash, "nsinit.volume.made")
        return
    try:
        os.mkdir(path, 0o755)
    except FileExistsError:
        _adopt(path)
        return
    except OSError as error:
        raise failure_of(_STAGE, error) from error
    passing(crash, "nsinit.workspace.directory_made")
    _adopt(path)
    if not draft:
        yield from _run(path, lambda: sync_directory(layout.workspaces))
    passing(crash, "nsinit.workspace.made")


def grow(layout: Layout, volumes: Volumes, request: GrowWorkspace, crash: Crash | None) -> Chore:
    """See `GrowWorkspace`. Raises `StepFailed`."""
    path = layout.volume(request.workspace_id)
    work = partial(volumes.grow, request.workspace_id, request.size_bytes, crash)
    yield from _run(path, work, volumes.kept_fds)
    passing(crash, "nsinit.volume.grown")


def listed(layout: Layout, after: str, limit: int) -> tuple[tuple[str, ...], bool]:
    """Return the names of the first workspaces behind `after`, and whether there are more."""
    with os.scandir(layout.workspaces) as plain, os.scandir(layout.volumes) as volumes:
        entries = itertools.chain(plain, volumes)
        names = (each.name for each in entries if each.name > after and is_workspace_id(each.name) and _is_own(each))
        found = heapq.nsmallest(limit + 1, names)
    return tuple(found[:limit]), len(found) > limit


def discard(layout: Layout, workspace_id: str, *, draft: bool, crash: Crash | None = None) -> Chore:
    """Move a directory or volume into the trash, durably; no effect when there is none. Raises `StepFailed`."""
    for path in (layout.workspace(workspace_id, draft=draft), layout.volume(workspace_id, draft=draft)):
        try:
            os.rename(path, _trash_name(layout, workspace_id))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise failure_of(_STAGE, error) from error
        passing(crash, "nsinit.workspace.renamed")
        yield from _run(path, partial(sync_directory, os.path.dirname(path)))
        passing(crash, "nsinit.workspace.discarded")


def discard_drafts(layout: Layout, volumes: Volumes) -> None:
    """Move all drafts, and what was being made, into the trash: nobody remembers what they were for."""
    volumes.discard_copies()
    for directory in (layout.drafts, layout.volume_drafts):
        for name in os.listdir(directory):
            os.rename(f"{directory}/{name}", _trash_name(layout, name[:64]))


def publish(layout: Layout, volumes: Volumes, workspace_id: str, *, replace: bool, crash: Crash | None = None) -> Chore:
    """Make a draft the workspace, once all of it is on the disk; what it replaced goes to the trash.

    Raises:
        StepFailed: `EEXIST`: there is a workspace, and it was not to be replaced; `EXDEV`: only one of both has a
            quota.
    """
    is_volume = volumes.has(workspace_id, draft=True)
    path_of, other = (layout.volume, layout.workspace) if is_volume else (layout.workspace, layout.volume)
    draft, path = path_of(workspace_id, draft=True), path_of(workspace_id)
    trash = _trash_name(layout, workspace_id)
    if os.path.lexists(other(workspace_id)):
        raise StepFailed(_STAGE, "only one of both has a quota", path=path, errno=errno.EXDEV)

    def work() -> None:
        if is_volume:
            volumes.sync(draft)
        _sync_file_system(draft)
        passing(crash, "nsinit.workspace.draft_synced")
        if replace and os.path.lexists(path):
            syscalls.renameat2(draft, path, k.RENAME_EXCHANGE)
            passing(crash, "nsinit.workspace.exchanged")
            os.rename(draft, trash)
        else:
            syscalls.renameat2(draft, path, k.RENAME_NOREPLACE)
        sync_directory(os.path.dirname(path))

    yield from _run(path, work, volumes.kept_fds)
    passing(crash, "nsinit.workspace.published")


def sync(layout: Layout, volumes: Volumes, workspace_id: str) -> Chore:
    """Wait until what was written to a workspace is on the disk. Raises `StepFailed`."""
    if volumes.has(workspace_id):
        path = layout.volume(workspace_id)
        yield from _run(path, partial(volumes.sync, path), volumes.kept_fds)
    else:
        path = layout.workspace(workspace_id)
        yield from _run(path, partial(_sync_file_system, path))


def _adopt(path: str) -> None:
    """See that the top belongs to the sandbox user: a start that was cut short, or an operator, may have left it
    to root."""
    try:
        fd = os.open(path, _DIRECTORY)
        try:
            if os.fstat(fd).st_uid == 0:
                os.fchown(fd, SANDBOX_ID, SANDBOX_ID)
        finally:
            os.close(fd)
    except OSError as error:
        raise failure_of(_STAGE, error) from error


def _is_own(entry: os.DirEntry[str]) -> bool:
    try:
        return stat.S_ISDIR(entry.stat(follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _trash_name(layout: Layout, workspace_id: str) -> str:
    return f"{layout.trash}/{workspace_id}-{os.urandom(8).hex()}"


def _run(path: str, work: Callable[[], None], kept_fds: frozenset[int] = frozenset()) -> Chore:
    """Do what may take long in a process of its own. Raises `StepFailed` with what it ended with."""
    parent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        _end_with(work, kept_fds, parent_pid)
    pidfd = os.pidfd_open(pid)
    try:
        in_time = yield Wait(fd=pidfd, timeout_s=_CHORE_S)
        if not in_time:
            syscalls.pidfd_send_signal(pidfd, 9)
            yield Wait(fd=pidfd)
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    finally:
        os.close(pidfd)
    status = result.si_status if result is not None and result.si_code == os.CLD_EXITED else errno.ETIMEDOUT
    if status:
        raise StepFailed(_STAGE, os.strerror(status).lower(), path=path, errno=status)


def _end_with(work: Callable[[], None], kept_fds: frozenset[int], parent_pid: int) -> None:
    status = errno.EIO
    try:
        syscalls.end_with_parent(parent_pid)  # the next nsinit must not meet work of this one
        keep_only({0, 1, 2, *kept_fds})
        work()
        status = 0
    except (OSError, StepFailed) as error:
        status = error.errno or errno.EIO
    finally:
        os._exit(status)


def _sync_file_system(path: str) -> None:
    fd = os.open(path, _DIRECTORY)
    syscalls.syncfs(fd)
    os.close(fd)
