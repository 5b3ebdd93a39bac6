"""Disk limits as a caller of the supervisor meets them: causes, refusals, the machine's own reserve."""

from __future__ import annotations

import os
from pathlib import Path

import attrs
import pytest

from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import open_supervisor
from sandkasten.cli.serve import explain
from sandkasten.config import Config, DiskSettings, ServerSettings
from sandkasten.errors import DiskReserve, InvalidRequest
from sandkasten.model import Cause, ExecSpec, Limits, SessionPatch, SessionSpec

SMALL = Limits(disk_mb=32, disk_inodes=2000)


@pytest.mark.parametrize("is_stateless", [False, True])
async def test_a_full_disk_is_the_cause_wherever_it_was_met(supervisor: LocalSupervisor, is_stateless: bool) -> None:
    """A full home, workspace or `/tmp`, in bytes or in inodes, is the cause of a run in a shell and beside it."""
    session = await supervisor.create(SessionSpec(limits=SMALL))

    async def cause_of(command: str) -> Cause:
        return (await supervisor.exec(session.id, ExecSpec(command, stateless=is_stateless))).end.cause

    for directory in ("/home/sandbox", "/workspace", "/tmp"):
        assert await cause_of(f"head -c 1000000000 /dev/zero > {directory}/big") is Cause.DISK_FULL
        assert await cause_of(f"rm {directory}/big; false") is Cause.EXITED
    many = "mkdir /home/sandbox/many && cd /home/sandbox/many && seq 3000 | xargs touch"
    assert await cause_of(many) is Cause.DISK_FULL
    assert await cause_of("rm -r /home/sandbox/many; false") is Cause.EXITED


async def test_limits_that_no_session_may_have_are_refused(data_dir: Path) -> None:
    """A disk limit above the operator's maximum, or one that is no number: the field is named and nothing is made."""
    config = Config(
        data_dir=data_dir, server=ServerSettings(pool_sandboxes=0), disk=DiskSettings(max_mb=100, max_inodes=5000)
    )
    async with open_supervisor(config) as supervisor:
        for bad in ({"disk_mb": 101}, {"disk_mb": -1}, {"disk_mb": float("nan")}, {"disk_inodes": 5001}):
            with pytest.raises(InvalidRequest):
                await supervisor.create(SessionSpec(limits=attrs.evolve(SMALL, **bad)))
        assert os.listdir(data_dir / "sessions") == []


async def test_no_session_is_made_on_a_disk_that_is_all_but_full(data_dir: Path) -> None:
    """The refusal says how much is free and how much must be; sessions that run go on."""
    space = os.statvfs(data_dir)
    total_mb = space.f_blocks * space.f_frsize >> 20
    config = Config(data_dir=data_dir, server=ServerSettings(pool_sandboxes=0), disk=DiskSettings(reserve_mb=total_mb))
    async with open_supervisor(config) as supervisor:
        with pytest.raises(DiskReserve) as refused:
            await supervisor.create(SessionSpec())
    assert refused.value.details["reserve_mb"] == total_mb
    assert 0 < refused.value.details["free_mb"] < total_mb


async def test_a_disk_mode_that_can_not_be_had_fails_the_start(data_dir: Path) -> None:
    """The sentence names the mode and the reason."""
    config = Config(data_dir=data_dir, server=ServerSettings(pool_sandboxes=0), disk=DiskSettings(mode="btrfs"))
    with pytest.raises(BaseExceptionGroup) as refused:
        async with open_supervisor(config):
            pytest.fail("the daemon started")
    assert "disk.mode btrfs can't be had here: " in (explain(refused.value) or "")


async def test_a_disk_that_can_not_change_is_not_said_to_have_changed(data_dir: Path) -> None:
    """A patch of a disk that can't change is refused as a whole, and the record keeps the limits in force."""
    config = Config(data_dir=data_dir, server=ServerSettings(pool_sandboxes=0), disk=DiskSettings(mode="loop"))
    async with open_supervisor(config) as supervisor:
        session = await supervisor.create(SessionSpec(limits=SMALL))
        with pytest.raises(InvalidRequest, match="keeps its size"):
            await supervisor.update(session.id, SessionPatch(limits=attrs.evolve(SMALL, disk_mb=64, pids=99)))
        with pytest.raises(InvalidRequest, match="out of range"):
            await supervisor.update(session.id, SessionPatch(limits=attrs.evolve(SMALL, disk_mb=2**24)))
        assert (await supervisor.get(session.id)).limits == session.limits
        changed = await supervisor.update(session.id, SessionPatch(limits=attrs.evolve(SMALL, pids=99)))
        assert changed.limits == attrs.evolve(session.limits, pids=99)


async def test_statistics_tell_how_full_the_disk_is(supervisor: LocalSupervisor) -> None:
    """Disk figures in the statistics are the kernel's own counts, out of the session's reach."""
    session = await supervisor.create(SessionSpec(limits=SMALL))
    before = attrs.asdict(await supervisor.stats(session.id))
    await supervisor.exec(session.id, ExecSpec("head -c 10000000 /dev/zero > /home/sandbox/big"))
    after = attrs.asdict(await supervisor.stats(session.id))
    assert 9_000_000 < after["disk_bytes"] - before["disk_bytes"] < 12_000_000
    assert 24 << 20 < after["disk_limit_bytes"] <= 32 << 20
    assert after["disk_inodes"] > before["disk_inodes"] > 0
    assert after["disk_inodes_limit"] <= 2048
