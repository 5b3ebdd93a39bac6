"""Reconciliation at a start: all that the last daemon left is adopted, finished or removed, and nothing of it twice."""

from __future__ import annotations

import os
import sqlite3
import uuid
from contextlib import closing
from pathlib import Path

import attrs
import pytest
import trio

from sandkasten.actors.node.reconcile import HOST_REBOOT
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import open_supervisor
from sandkasten.config import Config
from sandkasten.host.paths import DataPaths
from sandkasten.model import EndReason, ExecSpec, SessionSpec, Status
from tests.waiting import until


@pytest.fixture
def keeping(config: Config) -> Config:
    """A daemon whose stop leaves sessions running."""
    return attrs.evolve(config, sessions_on_stop="keep")


async def test_sessions_of_another_boot_are_lost_and_their_ids_and_slots_are_not_given_twice(
    keeping: Config, config: Config, data_dir: Path
) -> None:
    """A row that names an earlier boot is never adopted, whatever bears its pid; one of this boot is, and a new session
    shares no user id with it."""
    async with open_supervisor(keeping) as supervisor:
        earlier, kept = await supervisor.create(SessionSpec()), await supervisor.create(SessionSpec())
        await supervisor.exec(kept.id, ExecSpec("kept=yes"))
        kept_map = (await supervisor.exec(kept.id, ExecSpec("cat /proc/self/uid_map"))).stdout
    with closing(sqlite3.connect(config.db_path)) as database:
        database.execute("UPDATE sessions SET boot_id = ? WHERE id = ?", (str(uuid.UUID(int=1)), earlier.id))
        database.commit()
    async with open_supervisor(config) as supervisor:

        async def is_lost() -> bool:
            return (await supervisor.get(earlier.id)).status is Status.LOST

        await until(is_lost)
        lost = await supervisor.get(earlier.id)
        assert (lost.reason, lost.end_reason) == (HOST_REBOOT, EndReason.HOST_REBOOT)
        assert not (data_dir / "sessions" / earlier.id).exists()
        assert (await supervisor.exec(kept.id, ExecSpec("echo $kept"))).stdout == b"yes\n"
        made = await supervisor.create(SessionSpec())
        assert made.id not in (earlier.id, kept.id)
        assert (await supervisor.exec(made.id, ExecSpec("cat /proc/self/uid_map"))).stdout != kept_map


def mounts_below(directory: Path) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line.split()[4] for line in lines if line.split()[4].startswith(f"{directory}/")]


async def test_leftovers_are_told_of_and_then_removed_and_sessions_go_on(
    supervisor: LocalSupervisor, data_dir: Path
) -> None:
    """A directory nobody knows, remains of an unknown session and a mount by hand: each by event, log and counter. At
    the second look they are gone, but for the mount and the directory that it is on."""
    session = await supervisor.create(SessionSpec())
    (data_dir / "run" / "foreign").mkdir()
    (data_dir / "sessions" / ("e" * 24)).mkdir()
    behind, point = data_dir / "behind", data_dir / "sessions" / "by-hand"
    for path in (behind, point):
        path.mkdir()
    (behind / "file").write_text("kept")
    await trio.run_process(["mount", "--bind", str(behind), str(point)])
    try:
        async with supervisor.events() as events:
            assert await supervisor.sweep() == 0
            assert (data_dir / "run" / "foreign").exists()
            told = set()
            async for event in events:
                told.add(event.data["kind"])
                if len(told) == 4:
                    break
            assert told == {"session", "run_directory", "session_directory", "mount"}
            assert mounts_below(data_dir) == [str(point)]
            await supervisor.sweep()
            assert mounts_below(data_dir) == [str(point)]
            assert not (data_dir / "run" / "foreign").exists()
            assert not (data_dir / "sessions" / ("e" * 24)).exists()
        assert supervisor.leftovers.found == {"session": 1, "run_directory": 1, "session_directory": 1, "mount": 1}
        assert supervisor.leftovers.removed == {"session": 1, "run_directory": 1}
    finally:
        for left in mounts_below(data_dir):
            await trio.run_process(["umount", left])

    async def is_clean() -> bool:
        await supervisor.sweep()
        return os.listdir(data_dir / "sessions") == [session.id] and not os.listdir(data_dir / "trash")

    await until(is_clean)
    assert (behind / "file").read_text() == "kept"
    assert mounts_below(data_dir) == []
    assert (await supervisor.exec(session.id, ExecSpec("echo alive"))).stdout == b"alive\n"


async def test_unknown_files_of_the_spool_are_told_of_and_removed_and_runs_keep_theirs(
    keeping: Config, config: Config, data_dir: Path
) -> None:
    """At a start at once, also those of an id whose other remains go meanwhile, later at the second look; what is
    written down of a live session's runs is read after it."""
    spool, unknown = DataPaths(data_dir).spool, f"{'e' * 24}.00000001.runs"
    async with open_supervisor(keeping) as supervisor:
        kept = await supervisor.create(SessionSpec())
        ran = await supervisor.exec(kept.id, ExecSpec("echo kept"))
    of_kept = [name for name in os.listdir(spool) if name.startswith(kept.id)]
    assert of_kept
    for name in (unknown, "foreign"):
        (spool / name).write_text("x")
    (data_dir / "sessions" / ("e" * 24)).mkdir()
    async with open_supervisor(config) as supervisor:
        assert supervisor.leftovers.found == {"session": 1, "spool_file": 2}
        assert supervisor.leftovers.removed["spool_file"] == 2
        assert not {unknown, "foreign"} & set(os.listdir(spool))
        assert (await supervisor.get_exec(kept.id, ran.end.exec_id)).end is not None

        async def is_gone() -> bool:
            return supervisor.leftovers.removed["session"] == 1

        await until(is_gone)
        (spool / unknown).write_text("x")
        assert await supervisor.sweep() == 0
        assert (spool / unknown).exists()
        await supervisor.exec(kept.id, ExecSpec("echo more"))
        assert await supervisor.sweep() >= 1
        assert not (spool / unknown).exists()
        assert [name for name in os.listdir(spool) if name.startswith(kept.id)]
        assert supervisor.leftovers.found == {"session": 1, "spool_file": 3}
        assert supervisor.leftovers.removed["spool_file"] == 3
