"""State that somebody else wrote: what a row says is compared with the kernel and never acted on."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import attrs
import pytest

from nsinit.cgroup.identity import read_identity
from sandkasten.app import open_supervisor
from sandkasten.config import Config
from sandkasten.errors import SessionNotFound
from sandkasten.host.paths import read_boot_id
from sandkasten.model import ExecSpec, SessionSpec, Status
from sandkasten.model.lifecycle import Trigger
from sandkasten.store.database import open_database
from sandkasten.store.sessions import KernelIdentity, put_session
from tests import canary
from tests.strategies import make_record
from tests.waiting import until


@pytest.fixture
def innocent() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this machine that has nothing to do with any session, and must live."""
    process = subprocess.Popen(["/bin/sleep", "1000"], start_new_session=True)
    try:
        yield process
        assert process.poll() is None, "an innocent process was killed"
    finally:
        process.kill()
        process.wait()


def _identity_of(pid: int) -> KernelIdentity:
    found = read_identity(pid)
    return KernelIdentity(found.pid, found.start_ticks, found.pid_ns, read_boot_id())


@pytest.mark.parametrize("is_exact", [True, False], ids=["right start time", "wrong start time"])
@pytest.mark.parametrize("status", [Status.CREATING, Status.RUNNING, Status.DESTROYING])
async def test_a_recycled_pid_in_the_state_kills_nobody(
    config: Config, innocent: subprocess.Popen[bytes], status: Status, is_exact: bool
) -> None:
    """A row that names a foreign living process, even with its own start time: the process is not the session's and
    lives on.
    """
    identity = _identity_of(innocent.pid)
    if not is_exact:
        identity = attrs.evolve(identity, start_ticks=identity.start_ticks - 1)
    ending = Trigger.DESTROY if status is Status.DESTROYING else None
    with closing(open_database(config.db_path)) as database:
        put_session(database, make_record("a" * 24, status=status, identity=identity, ending=ending))
    async with open_supervisor(config) as supervisor:

        async def has_ended() -> bool:
            return (await supervisor.get("a" * 24)).status not in (status, Status.DESTROYING)

        await until(has_ended)
        assert innocent.poll() is None
        await supervisor.sweep()
        await supervisor.sweep()
        assert innocent.poll() is None


async def test_a_living_session_whose_row_names_an_innocent_is_not_adopted(
    config: Config, innocent: subprocess.Popen[bytes]
) -> None:
    """A row that names another process than the sandbox's PID 1: the sandbox ends, the process that the row names
    lives.
    """
    keeping = attrs.evolve(config, sessions_on_stop="keep")
    async with open_supervisor(keeping) as supervisor:
        session = await supervisor.create(SessionSpec())
    identity = _identity_of(innocent.pid)
    with closing(sqlite3.connect(config.db_path)) as database:
        database.execute(
            "UPDATE sessions SET pid = ?, start_ticks = ?, pid_ns = ? WHERE id = ?",
            (identity.pid, identity.start_ticks, identity.pid_ns, session.id),
        )
        database.commit()
    async with open_supervisor(config) as supervisor:

        async def is_lost() -> bool:
            return (await supervisor.get(session.id)).status is Status.LOST

        await until(is_lost)
        assert innocent.poll() is None


CLIMBERS = ("../outside", "../../outside", "{outside}", "..", ".", "outside/../../outside", "a" * 24 + "/../../outside")


async def test_rows_that_name_other_directories_are_set_aside(config: Config, data_dir: Path) -> None:
    """A start over a database full of such rows touches nothing outside, and adopts the sound session among them."""
    keeping = attrs.evolve(config, sessions_on_stop="keep")
    with canary.untouched(data_dir / "outside") as outside:
        async with open_supervisor(keeping) as supervisor:
            session = await supervisor.create(SessionSpec(workspace_id="ws-1"))
            await supervisor.exec(session.id, ExecSpec("kept=yes; echo data > /workspace/file"))
        with closing(open_database(config.db_path)) as database:
            columns = [row["name"] for row in database.execute("PRAGMA table_info(sessions)")]
            others = ", ".join(name for name in columns if name not in ("id", "status"))
            for climber in CLIMBERS:
                for status in ("creating", "running", "destroying", "paused", "root"):
                    path = climber.format(outside=outside)
                    name = path if status == "running" else f"{path}/{status}"
                    database.execute(
                        f"INSERT INTO sessions (id, status, {others}) SELECT ?, ?, {others} FROM sessions WHERE id = ?",
                        (name, status, session.id),
                    )
            database.execute("UPDATE node SET value = '../../../etc' WHERE key = 'node_id'")
            database.execute("UPDATE node SET value = 'many' WHERE key = 'incarnation'")
        async with open_supervisor(config) as supervisor:
            result = await supervisor.exec(session.id, ExecSpec("echo $kept; cat /workspace/file"))
            assert result.stdout == b"yes\ndata\n"
            listed = await supervisor.list(ended=True, limit=1000)
            assert [each.id for each in listed] == [session.id]
            with pytest.raises(SessionNotFound):
                await supervisor.get("../outside")
    with closing(sqlite3.connect(config.db_path)) as database:
        contents = [json.loads(row[0]) for row in database.execute("SELECT content FROM damaged")]
    assert len(contents) == 5 * len(CLIMBERS)


async def test_a_sandbox_whose_row_is_damaged_is_ended_and_its_workspace_kept(config: Config, data_dir: Path) -> None:
    """A sandbox without a readable row belongs to nobody and is ended; its workspace and the files in it stay."""
    keeping = attrs.evolve(config, sessions_on_stop="keep")
    async with open_supervisor(keeping) as supervisor:
        session = await supervisor.create(SessionSpec(workspace_id="ws-1"))
        await supervisor.exec(session.id, ExecSpec("echo data > /workspace/file"))
    with closing(sqlite3.connect(config.db_path)) as database:
        database.execute("UPDATE sessions SET limits = '[]'")
        database.commit()
    async with open_supervisor(config) as supervisor:

        async def is_gone() -> bool:
            return not os.listdir(data_dir / "sessions")

        assert not await is_gone()  # the first sweep only reports the sandbox
        await supervisor.sweep()
        await until(is_gone)
        with pytest.raises(SessionNotFound):
            await supervisor.get(session.id)
        after = await supervisor.create(SessionSpec(workspace_id="ws-1"))
        result = await supervisor.exec(after.id, ExecSpec("cat /workspace/file"))
        assert result.stdout == b"data\n"
