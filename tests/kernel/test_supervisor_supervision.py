"""Supervision on a real node: a part that fails costs the sessions that depend on it, and no more."""

from __future__ import annotations

import os
import signal
import sqlite3

import attrs
import pytest
import trio

from sandkasten.actors.core import Ask
from sandkasten.actors.session import record
from sandkasten.actors.session.messages import Activity, Borrow
from sandkasten.actors.supervision import GiveUp
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import open_supervisor
from sandkasten.config import Config
from sandkasten.errors import ActorGone, Capacity, SandkastenError, SessionExpired
from sandkasten.model import ExecSpec, SessionSpec, Status
from tests.actors.test_store_faults import damage
from tests.kernel.processes import nsinit_pid
from tests.waiting import until


@attrs.frozen
class Unheard(Ask[None]):
    """A message that no session knows: whoever handles it runs into a failed assertion, as a bug would."""


async def test_a_bug_in_one_session_costs_that_session_only(
    supervisor: LocalSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session whose actor fails is recorded as crashed, and what ends later changes nothing; other sessions keep
    their shells, new ones work."""
    monkeypatch.setattr(record, "_PERSIST_EVERY_S", 0.0)
    broken = await supervisor.create(SessionSpec())
    other = await supervisor.create(SessionSpec())
    await supervisor.exec(other.id, ExecSpec("kept=yes"))
    entry = supervisor._directory.get(broken.id)
    assert entry is not None
    transfer = Activity()
    await entry.ref.ask(Borrow(transfer))
    with pytest.raises(ActorGone):  # for now: what becomes of the session is not decided yet
        await entry.ref.ask(Unheard())

    async def has_crashed() -> bool:
        return (await supervisor.get(broken.id)).status is Status.CRASHED

    await until(has_crashed)
    transfer.end()
    assert await has_crashed()
    with pytest.raises(SessionExpired):
        await supervisor.exec(broken.id, ExecSpec(":"))
    assert (await supervisor.exec(other.id, ExecSpec("echo $kept"))).stdout == b"yes\n"
    assert (await supervisor.create(SessionSpec())).status is Status.RUNNING
    assert supervisor._sessions.incarnation == 1


async def test_a_fork_server_that_is_killed_in_a_storm_of_creates_fails_some_for_now(
    supervisor: LocalSupervisor,
) -> None:
    """Each create is answered: it runs, or may be repeated. What runs goes on, and the next creates work. The fork
    server is stopped before it is killed, so that a part of the creates surely waits for it."""
    before = await supervisor.create(SessionSpec())
    outcomes: list[SandkastenError | None] = []

    async def create() -> None:
        try:
            await supervisor.create(SessionSpec())
            outcomes.append(None)
        except SandkastenError as error:
            outcomes.append(error)

    async def has_begun() -> bool:
        return (await supervisor.capacity()).sessions.get("creating", 0) > 2

    async def has_one() -> bool:
        return bool(outcomes)

    async with trio.open_nursery() as nursery:
        for _ in range(6):
            nursery.start_soon(create)
        await until(has_one)
        os.kill(nsinit_pid(), signal.SIGSTOP)
        for _ in range(6):
            nursery.start_soon(create)
        await until(has_begun)
        os.kill(nsinit_pid(), signal.SIGKILL)
    failures = [error for error in outcomes if error is not None]
    assert (len(outcomes), 0 < len(failures) < 12) == (12, True)
    assert {(isinstance(error, Capacity), error.retryable) for error in failures} == {(True, True)}
    assert (await supervisor.exec(before.id, ExecSpec("echo on"))).stdout == b"on\n"
    assert (await supervisor.create(SessionSpec())).status is Status.RUNNING
    assert (await supervisor.capacity()).committed.sessions == 2 + 12 - len(failures)


async def test_a_damaged_database_stops_the_tree_and_leaves_sessions_running(config: Config) -> None:
    """A damaged database stops the daemon and leaves sessions running, though a regular stop would end them; the next
    start, with the sound database, adopts them.
    """
    copy = config.db_path.with_name("copy.db")
    with pytest.RaisesGroup(pytest.RaisesExc(GiveUp, match="store: the session database"), flatten_subgroups=True):
        async with open_supervisor(config) as supervisor:
            session = await supervisor.create(SessionSpec())
            await supervisor.exec(session.id, ExecSpec("kept=yes"))
            with sqlite3.connect(config.db_path) as source, sqlite3.connect(copy) as target:
                source.backup(target)
            source.close()
            target.close()
            damage(config.db_path)
            await supervisor.readiness()  # any request that needs the database fails on the damage
            await trio.sleep_forever()
    for suffix in ("-wal", "-shm"):
        config.db_path.with_name(config.db_path.name + suffix).unlink(missing_ok=True)
    copy.rename(config.db_path)
    async with open_supervisor(config) as supervisor:
        assert (await supervisor.exec(session.id, ExecSpec("echo $kept"))).stdout == b"yes\n"
