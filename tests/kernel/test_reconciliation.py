"""What a start makes of what the last daemon left: adopted, finished or removed, and nothing of it twice."""

from __future__ import annotations

import sqlite3
import uuid
from contextlib import closing
from pathlib import Path

import attrs
import pytest

from sandkasten.app import open_supervisor
from sandkasten.config import Config
from sandkasten.model import EndReason, ExecSpec, SessionSpec, Status
from sandkasten.reconcile import HOST_REBOOT
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
