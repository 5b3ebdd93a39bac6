"""Bad moments: full disks, dead helpers, callers that leave, stops in the middle. Nothing leaks, nothing is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import trio

from sandkasten.actors.node import recovery
from sandkasten.actors.services.store import do
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import open_supervisor
from sandkasten.config import Config, ConfigError, ServerSettings
from sandkasten.errors import (
    BuildInterrupted,
    Capacity,
    InvalidRequest,
    SandkastenError,
    StoreFailed,
    WorkInterrupted,
)
from sandkasten.model import ExecSpec, Limits, SessionPatch, SessionSpec, Status
from sandkasten.model.lifecycle import Trigger
from sandkasten.store.sessions import put_session
from tests.kernel.processes import init_pids, nsinit_pid
from tests.strategies import make_record
from tests.waiting import until


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 600 KiB."""
    directory = tmp_path / "small"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(directory)], check=True)
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


def _fill(directory: Path) -> Path:
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    return filler


async def test_a_full_database_disk_stops_no_teardown_and_the_state_is_written_later(
    config: Config, small_disk: Path
) -> None:
    """With the database's disk full a teardown is completed; its state is known from memory and written when there is
    room.
    """
    async with open_supervisor(attrs.evolve(config, db_path=small_disk / "test.db")) as supervisor:
        session = await supervisor.create(SessionSpec())
        filler = _fill(small_disk)
        for _ in range(200):  # the journal has room of its own for a while
            try:
                await supervisor.update(session.id, SessionPatch(labels={"a": "b" * 1000}))
            except SandkastenError:
                break
        else:
            pytest.fail("the disk never filled")
        assert (await supervisor.destroy(session.id)).status is Status.DESTROYED
        assert os.listdir(config.data_dir / "run") == []
        assert (await supervisor.get(session.id)).status is Status.DESTROYED
        assert (await supervisor.readiness()).checks["disk"] != "ok"
        filler.unlink()
        await supervisor._reaper.ask(recovery.Sweep())
        assert supervisor._directory.unwritten == {}
        assert (await supervisor.get(session.id)).status is Status.DESTROYED


async def test_what_lies_about_goes_though_the_database_takes_nothing(config: Config, small_disk: Path) -> None:
    """A sweep removes leftovers though its part with the database fails; a session whose end is not written yet is not
    taken for lost.
    """
    async with open_supervisor(attrs.evolve(config, db_path=small_disk / "test.db")) as supervisor:
        session = await supervisor.create(SessionSpec())
        supervisor._directory.unwritten["e" * 24] = make_record("e" * 24, status=Status.EXPIRED)
        _fill(small_disk)
        with contextlib.suppress(SandkastenError):
            while True:
                await supervisor.update(session.id, SessionPatch(labels={"a": "b" * 1000}))
        await supervisor.destroy(session.id)
        (config.data_dir / "sessions" / "foreign").mkdir()
        for _ in range(2):
            with pytest.raises(StoreFailed):
                await supervisor.sweep()
        assert not (config.data_dir / "sessions" / "foreign").exists()
        assert (await supervisor.get(session.id)).status is Status.DESTROYED
        (small_disk / "filler").unlink()
        await supervisor.sweep()
        assert supervisor._directory.unwritten == {}
        assert (await supervisor.get(session.id)).status is Status.DESTROYED


async def test_a_stop_in_the_middle_of_creates_leaves_none_of_them(config: Config) -> None:
    """A stop ends the creates under way and refuses those in the queue; the leak check finds nothing of either."""
    outcomes: list[str] = []

    async def create(supervisor: LocalSupervisor) -> None:
        try:
            outcomes.append((await supervisor.create(SessionSpec())).status)
        except SandkastenError as error:
            outcomes.append(error.code)

    async with trio.open_nursery() as nursery, open_supervisor(config) as supervisor:
        for _ in range(60):
            nursery.start_soon(create, supervisor)

        async def has_begun() -> bool:
            return len(outcomes) >= 3

        await until(has_begun)
    assert len(outcomes) == 60
    assert "CAPACITY" in outcomes
    assert os.listdir(config.data_dir / "sessions") == []
    assert os.listdir(config.data_dir / "run") == []


async def test_a_caller_that_leaves_while_it_waits_for_a_file_does_not_pin_the_session(
    supervisor: LocalSupervisor,
) -> None:
    """An abandoned request counts as no activity: the lease runs out on time."""
    session = await supervisor.create(SessionSpec(ttl_s=0.5))
    for _ in range(5):
        with trio.CancelScope() as scope:
            scope.cancel()
            async with supervisor.files(session.id).open_read("/workspace/x", max_bytes=1):
                pass

    async def has_expired() -> bool:
        return (await supervisor.get(session.id)).status is Status.EXPIRED

    await until(has_expired)


async def test_pool_sandboxes_of_a_dead_fork_server_are_not_used(config: Config) -> None:
    """The first creates after the death of nsinit work like any other, and its pool sandboxes are swept up."""
    async with open_supervisor(attrs.evolve(config, server=ServerSettings(pool_sandboxes=2))) as supervisor:

        async def has_pool_sandboxes() -> bool:
            return len(supervisor._directory.reserved) == 2

        await until(has_pool_sandboxes)
        os.kill(nsinit_pid(), signal.SIGKILL)

        async def is_noticed() -> bool:
            return supervisor._nsinit.incarnation == 2

        await until(is_noticed)
        for _ in range(3):
            assert (await supervisor.create(SessionSpec())).status is Status.RUNNING


async def test_a_create_whose_init_was_killed_may_be_tried_again(config: Config) -> None:
    """A create whose PID 1 was killed fails as retryable and leaves nothing; the same request then works."""
    async with open_supervisor(attrs.evolve(config, server=ServerSettings(pool_sandboxes=1))) as supervisor:

        async def has_pool_sandbox() -> bool:
            return (await supervisor.node()).pool_sandboxes == 1

        await until(has_pool_sandbox)
        for pid in init_pids():
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(BuildInterrupted) as failed:
            await supervisor.create(SessionSpec())
        assert failed.value.retryable
        assert (await supervisor.create(SessionSpec())).status is Status.RUNNING


async def test_a_failed_create_may_be_tried_again_with_its_key(supervisor: LocalSupervisor, data_dir: Path) -> None:
    """A create that failed does not use up its idempotency key; a key whose session was destroyed is answered with that
    end.
    """
    rootfs, hidden = data_dir / "images/host/rootfs", data_dir / "images/host/hidden"
    spec = SessionSpec(idempotency_key="again")
    rootfs.rename(hidden)
    with pytest.raises(SandkastenError):
        await supervisor.create(spec)
    hidden.rename(rootfs)
    session = await supervisor.create(spec)
    assert session.status is Status.RUNNING
    await supervisor.destroy(session.id)
    with pytest.raises(SandkastenError, match="destroyed"):
        await supervisor.create(spec)


async def test_a_restart_does_not_renew_a_lease(config: Config) -> None:
    """A lease that ran out while no daemon was running expires at the next start; the other leases keep their times."""
    keeping = attrs.evolve(config, sessions_on_stop="keep")
    async with open_supervisor(keeping) as supervisor:
        long = await supervisor.create(SessionSpec(ttl_s=600))
        short = await supervisor.create(SessionSpec(ttl_s=0.3))
    async with open_supervisor(config) as supervisor:
        adopted = await supervisor.get(long.id)
        assert adopted.expires_at is not None
        assert long.expires_at is not None
        assert abs((adopted.expires_at - long.expires_at).total_seconds()) < 1

        async def has_expired() -> bool:
            return (await supervisor.get(short.id)).status is Status.EXPIRED

        await until(has_expired)


async def test_a_lost_database_costs_no_workspace_file_and_leaks_no_sandbox(config: Config, data_dir: Path) -> None:
    """A lost database: sandboxes are found by the node's id, which is stored elsewhere too, then reported and ended."""
    keeping = attrs.evolve(config, sessions_on_stop="keep")
    async with open_supervisor(keeping) as supervisor:
        session = await supervisor.create(SessionSpec(workspace_id="precious"))
        await supervisor.exec(session.id, ExecSpec("echo data > file"))
    for name in [name for name in os.listdir(data_dir) if name.startswith("sandkasten.db")]:
        os.unlink(data_dir / name)
    async with open_supervisor(config) as supervisor:

        async def is_reaped() -> bool:
            return not supervisor._directory.owns(session.id) and os.listdir(data_dir / "run") == []

        assert not await is_reaped()  # the first sweep only reports the sandbox
        await supervisor.sweep()
        await until(is_reaped)
    assert (data_dir / "workspaces/precious/file").read_text() == "data\n"


async def test_a_database_that_is_none_is_one_sentence(config: Config, data_dir: Path) -> None:
    """A file that is no database ends the start with one sentence and no traceback."""
    config.db_path.write_bytes(b"this is no database" * 1000)
    with pytest.raises(ConfigError, match="can't be used"):
        async with open_supervisor(config):
            pass


@pytest.mark.parametrize("limits", [Limits(memory_mb=1), Limits(pids=1), Limits(cpu=0), Limits(memory_mb=2**40)])
async def test_limits_that_no_sandbox_can_live_under_are_refused(supervisor: LocalSupervisor, limits: Limits) -> None:
    """Limits below a sandbox's own needs are refused at create and at update, before anything is changed."""
    with pytest.raises(InvalidRequest, match="limits"):
        await supervisor.create(SessionSpec(limits=limits))
    session = await supervisor.create(SessionSpec())
    with pytest.raises(InvalidRequest, match="limits"):
        await supervisor.update(session.id, SessionPatch(limits=limits))


async def test_file_transfers_of_one_session_are_bounded(supervisor: LocalSupervisor) -> None:
    """A session at its bound of file transfers is refused one more, and its commands still run."""
    session = await supervisor.create(SessionSpec())
    await supervisor.exec(session.id, ExecSpec("head -c 10000000 /dev/zero > big"))
    async with trio.open_nursery() as nursery:
        opened: list[int] = []

        async def hold() -> None:
            async with supervisor.files(session.id).open_read("big", max_bytes=10_000_000):
                opened.append(1)
                await trio.sleep_forever()

        for _ in range(32):
            nursery.start_soon(hold)

        async def are_open() -> bool:
            return len(opened) == 32

        await until(are_open)
        with pytest.raises(Capacity):
            async with supervisor.files(session.id).open_read("big", max_bytes=1):
                pass
        result = await supervisor.exec(session.id, ExecSpec("echo fine"))
        assert result.stdout == b"fine\n"
        nursery.cancel_scope.cancel()


async def test_a_file_worker_that_its_user_kills_is_the_sessions_affair(supervisor: LocalSupervisor) -> None:
    """A request for a file, whose worker a command kills, fails with words for its client; the next one works."""
    session = await supervisor.create(SessionSpec())
    files = supervisor.files(session.id)

    async def write(name: str, kill: str) -> None:
        async with files.open_write(name) as writer:
            await writer.send(name.encode())
            await supervisor.exec(session.id, ExecSpec(kill))
            await writer.commit()

    with pytest.raises(WorkInterrupted, match="ended before it answered"):
        await write("half", "kill -9 -1")
    await write("whole", "")
    assert (await supervisor.exec(session.id, ExecSpec("cat *"))).stdout == b"whole"


async def test_a_record_that_was_written_at_last_takes_the_place_of_the_kept_one(supervisor: LocalSupervisor) -> None:
    """A record kept in memory after a refused write never overwrites a later state."""
    begun = make_record("a" * 24, status=Status.DESTROYING, ending=Trigger.EXPIRE)
    await supervisor._store.ask(do(put_session, begun))
    supervisor._directory.unwritten[begun.session.id] = begun
    assert (await supervisor.destroy(begun.session.id)).status is Status.EXPIRED
    assert supervisor._directory.unwritten == {}
    assert (await supervisor.get(begun.session.id)).status is Status.EXPIRED
