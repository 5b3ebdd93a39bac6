"""Quotas of workspaces through the daemon: enforced with and without a session, in archives, and by changes."""

from __future__ import annotations

import os
import signal

import pytest

from sandkasten import errors
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import open_supervisor
from sandkasten.config import Config
from sandkasten.model import ExecSpec, SessionSpec
from sandkasten.model.workspace import Workspace, WorkspacePatch, WorkspaceQuota, WorkspaceSpec
from tests.file_requests import listed, looked_at, packed, unpacked, written
from tests.kernel.processes import nsinit_pid
from tests.waiting import until

MIB = 1 << 20
QUOTA = WorkspaceQuota(32 * MIB, 500)
ID = "limited"


async def make(supervisor: LocalSupervisor) -> Workspace:
    return await supervisor.make_workspace(ID, WorkspaceSpec({"team": "a"}, QUOTA))


async def write(supervisor: LocalSupervisor, path: str, size_bytes: int) -> None:
    await written(supervisor.workspace_files(ID, make=True), path, bytes(size_bytes))


async def size_of(supervisor: LocalSupervisor, path: str) -> int:
    return (await looked_at(supervisor.workspace_files(ID), path)).size_bytes


async def test_a_quota_holds_with_a_session_and_without(supervisor: LocalSupervisor, config: Config) -> None:
    """Too much is refused through the file API and is no space left in a session; what is there stays as it was, is
    measured, and goes with the workspace."""
    made = await make(supervisor)
    assert (made.quota, made.has_directory) == (QUOTA, True)
    await write(supervisor, "a", 4 * MIB)
    with pytest.raises(errors.DiskFull):
        await write(supervisor, "a", 40 * MIB)
    assert await size_of(supervisor, "a") == 4 * MIB
    session = await supervisor.create(SessionSpec(workspace_id=ID))
    result = await supervisor.exec(session.id, ExecSpec("head -c 40M /dev/zero > b; echo $?; rm b; stat -c %s a"))
    assert result.stdout.decode().splitlines()[-2:] == ["1", str(4 * MIB)]
    assert b"No space left" in result.stderr
    usage = (await supervisor.workspace(ID, measure=True)).usage
    assert usage is not None
    assert (usage.files, usage.size_bytes) == (1, 4 * MIB)
    await supervisor.destroy(session.id)
    await supervisor.delete_workspace(ID)
    assert os.listdir(config.data_dir / "volumes") == []
    assert await supervisor.workspaces() == []


async def test_a_quota_of_files_holds(supervisor: LocalSupervisor) -> None:
    """A quota of files holds for files of any size."""
    await make(supervisor)
    session = await supervisor.create(SessionSpec(workspace_id=ID))
    command = "i=0; while [ $i -lt 1000 ] && : > f$i; do i=$((i+1)); done; [ $i -lt 700 ] && echo full"
    result = await supervisor.exec(session.id, ExecSpec(command))
    assert result.stdout == b"full\n"


async def test_it_is_there_after_nsinit_was_killed(supervisor: LocalSupervisor) -> None:
    """A workspace with a quota comes back after nsinit was killed: the next nsinit mounts the same image, and running
    sessions keep theirs.
    """
    await make(supervisor)
    session = await supervisor.create(SessionSpec(workspace_id=ID))
    await write(supervisor, "a", MIB)
    os.kill(nsinit_pid(), signal.SIGKILL)

    async def is_back() -> bool:
        try:
            return await size_of(supervisor, "a") == MIB
        except errors.SandkastenError:
            return False

    await until(is_back)
    await write(supervisor, "b", MIB)
    result = await supervisor.exec(session.id, ExecSpec("stat -c %s a b"))
    assert result.stdout.decode() == f"{MIB}\n{MIB}\n"


async def test_it_is_changed_by_growing_alone(supervisor: LocalSupervisor) -> None:
    """A quota grows while no session has the workspace; a smaller one, none, or one where there was none is refused
    with a sentence.
    """
    await make(supervisor)
    await write(supervisor, "a", 4 * MIB)
    session = await supervisor.create(SessionSpec(workspace_id=ID))
    larger = WorkspacePatch(quota_bytes=96 * MIB)
    with pytest.raises(errors.WorkspaceBusy):
        await supervisor.update_workspace(ID, larger)
    await supervisor.destroy(session.id)
    changed = await supervisor.update_workspace(ID, larger)
    assert changed.quota == WorkspaceQuota(96 * MIB, QUOTA.files)
    await write(supervisor, "b", 64 * MIB)
    assert await size_of(supervisor, "a") == 4 * MIB
    with pytest.raises(errors.LimitInUse):
        await supervisor.update_workspace(ID, WorkspacePatch(quota_bytes=32 * MIB))
    await supervisor.make_workspace("plain", WorkspaceSpec())
    with pytest.raises(errors.Conflict, match="without a quota"):
        await supervisor.update_workspace("plain", larger)


async def test_archives_come_and_go_within_the_quota(supervisor: LocalSupervisor) -> None:
    """An import that is too much leaves what was there; one that fits replaces it, and the quota stays."""
    await make(supervisor)
    await write(supervisor, "a", 4 * MIB)
    fits, _ = await packed(supervisor.workspace_files(ID))
    await supervisor.make_workspace("plain", WorkspaceSpec())
    await written(supervisor.workspace_files("plain", make=True), "big", bytes(40 * MIB))
    too_much, _ = await packed(supervisor.workspace_files("plain"))
    await write(supervisor, "later", MIB)
    with pytest.raises(errors.DiskFull):
        await unpacked(supervisor, ID, too_much, replace=True)
    assert await size_of(supervisor, "later") == MIB
    await unpacked(supervisor, ID, fits, replace=True)
    assert [each.name for each in (await listed(supervisor.workspace_files(ID))).entries] == ["a"]
    with pytest.raises(errors.DiskFull):
        await write(supervisor, "b", 40 * MIB)
    assert (await supervisor.workspace(ID)).quota == QUOTA


async def test_a_quota_that_is_remembered_is_never_forgotten_on_the_disk(
    supervisor: LocalSupervisor, config: Config
) -> None:
    """A workspace on record whose files are gone is made anew with its quota, by whichever request uses it first."""
    await make(supervisor)
    os.rename(config.data_dir / "volumes" / ID, config.data_dir / "trash" / "lost")
    session = await supervisor.create(SessionSpec(workspace_id=ID))
    assert os.listdir(config.data_dir / "workspaces") == []
    result = await supervisor.exec(session.id, ExecSpec("head -c 40M /dev/zero > b; echo $?"))
    assert result.stdout == b"1\n"


async def test_a_quota_is_known_when_the_database_was_lost(config: Config) -> None:
    """After the database was lost, the quota of a workspace is found again, by the list or by a session, and can be
    raised.
    """
    quota = WorkspaceQuota(16 * MIB, 1024)
    async with open_supervisor(config) as supervisor:
        for name in ("listed", "taken"):
            await supervisor.make_workspace(name, WorkspaceSpec(quota=quota))
        made = await supervisor.workspace("taken")
    config.db_path.unlink()
    async with open_supervisor(config) as supervisor:
        await supervisor.create(SessionSpec(workspace_id="taken"))
        found = await supervisor.workspaces()
        assert [(each.id, each.quota is not None) for each in found] == [("listed", True), ("taken", True)]
        assert all(each.quota.size_bytes == quota.size_bytes for each in found if each.quota)
        assert made.quota is not None
        grown = await supervisor.update_workspace("listed", WorkspacePatch(quota_bytes=32 * MIB))
        assert grown.quota is not None
        assert grown.quota.size_bytes == 32 * MIB


async def test_a_damaged_image_costs_its_workspace_only(supervisor: LocalSupervisor, config: Config) -> None:
    """A damaged image is refused each time it is asked for, by an nsinit that goes on."""
    await supervisor.make_workspace("broken", WorkspaceSpec(quota=WorkspaceQuota(16 * MIB, 1024)))
    image = config.data_dir / "volumes" / "broken" / "image"
    pid = nsinit_pid()
    for damage in (b"", b"\xff" * 4096):
        image.write_bytes(damage)
        with pytest.raises(errors.SandkastenError):
            async with supervisor.open_unpack("broken", replace=True):
                pass
        with pytest.raises(errors.SandkastenError):
            await supervisor.create(SessionSpec(workspace_id="broken"))
    assert nsinit_pid() == pid
    await supervisor.delete_workspace("broken")
