"""Workspaces for which nobody asked a quota: they get the default one, and older ones without keep working."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import attrs
import pytest

from sandkasten import errors
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import open_supervisor
from sandkasten.config import Config, Defaults, DiskSettings, ServerSettings, WorkspaceSettings
from sandkasten.model import ExecSpec, SessionSpec
from sandkasten.model.workspace import WorkspacePatch, WorkspaceQuota, WorkspaceSpec
from sandkasten.security.posture import check_workspaces
from tests.file_requests import packed, unpacked, written
from tests.kernel.test_workspace_quota import MIB

QUOTA = WorkspaceQuota.of(32 * MIB)
FILL = """python3 -c '
import os
fd = os.open("/workspace/big", os.O_CREAT | os.O_WRONLY)
for start in range(64):
    os.posix_fallocate(fd, start << 20, 1 << 20)
'"""


@pytest.fixture
def config(data_dir: Path) -> Config:
    """A node whose workspaces get 32 MiB, the disk limit of its sessions, and at most 64."""
    return Config(
        data_dir=data_dir,
        server=ServerSettings(pool_sandboxes=0),
        defaults=Defaults(disk_limit_mb=32),
        disk=DiskSettings(max_mb=64),
    )


@pytest.fixture
async def supervisor(config: Config) -> AsyncIterator[LocalSupervisor]:
    async with open_supervisor(config) as opened:
        yield opened


def free_bytes(config: Config) -> int:
    space = os.statvfs(config.data_dir)
    return space.f_bfree * space.f_frsize


async def test_a_session_can_fill_its_workspace_and_not_the_disk(supervisor: LocalSupervisor, config: Config) -> None:
    """A workspace that comes with its first session takes no more of the host's disk than the default quota."""
    session = await supervisor.create(SessionSpec(workspace_id="new"))
    before = free_bytes(config)
    result = await supervisor.exec(session.id, ExecSpec(FILL))
    assert b"No space left" in result.stderr
    assert before - free_bytes(config) < 40 * MIB
    assert (await supervisor.workspace("new")).quota == QUOTA
    assert os.listdir(config.data_dir / "workspaces") == []


async def test_every_way_of_making_one_gives_the_quota(supervisor: LocalSupervisor, config: Config) -> None:
    """A workspace made by a request, by a file or by an archive has the quota, on record and on disk."""
    await supervisor.make_workspace("asked", WorkspaceSpec())
    await written(supervisor.workspace_files("written", make=True), "f", b"text")
    archive, _ = await packed(supervisor.workspace_files("written"))
    await unpacked(supervisor, "imported", archive)
    found = {each.id: each.quota for each in await supervisor.workspaces()}
    assert found == dict.fromkeys(("asked", "imported", "written"), QUOTA)
    assert sorted(os.listdir(config.data_dir / "volumes")) == sorted(found)
    grown = await supervisor.update_workspace("imported", WorkspacePatch(quota_bytes=64 * MIB))
    assert grown.quota is not None
    with pytest.raises(errors.InvalidRequest, match="too large"):
        await supervisor.update_workspace("imported", WorkspacePatch(quota_bytes=65 * MIB))
    with pytest.raises(errors.InvalidRequest, match="too large"):
        await supervisor.make_workspace("larger", WorkspaceSpec(quota=WorkspaceQuota.of(65 * MIB)))


async def test_an_older_workspace_keeps_its_files_and_is_told(config: Config) -> None:
    """A workspace from a time without quotas stays as it is, files and all, and the operator is told; when its files
    are gone it is made anew with the quota."""
    older = attrs.evolve(config, workspace=WorkspaceSettings(default_quota_mb=0))
    async with open_supervisor(older) as supervisor:
        session = await supervisor.create(SessionSpec(workspace_id="older"))
        await supervisor.exec(session.id, ExecSpec("echo kept > f"))
    assert not list(check_workspaces(older))
    assert [each.id for each in check_workspaces(config)] == ["workspaces.no-quota"]
    async with open_supervisor(config) as supervisor:
        session = await supervisor.create(SessionSpec(workspace_id="older"))
        result = await supervisor.exec(session.id, ExecSpec("cat f"))
        assert (result.stdout, (await supervisor.workspace("older")).quota) == (b"kept\n", None)
        archive, _ = await packed(supervisor.workspace_files("older"))
        await supervisor.destroy(session.id)
        await unpacked(supervisor, "older", archive, replace=True)
        await supervisor.delete_workspace("older")
        await supervisor.make_workspace("older", WorkspaceSpec())
        assert (await supervisor.workspace("older")).quota == QUOTA
        assert not list(check_workspaces(config))


async def test_a_quota_on_disk_comes_back_on_record(config: Config) -> None:
    """A daemon that ended between the making of a workspace and its record finds the quota again at the next use."""
    async with open_supervisor(config) as supervisor:
        await supervisor.make_workspace("new", WorkspaceSpec())
    with closing(sqlite3.connect(config.db_path)) as database, database:
        database.execute("UPDATE workspaces SET quota_bytes = NULL, quota_files = NULL")
    async with open_supervisor(config) as supervisor:
        await supervisor.create(SessionSpec(workspace_id="new"))
        assert (await supervisor.workspace("new")).quota is not None
