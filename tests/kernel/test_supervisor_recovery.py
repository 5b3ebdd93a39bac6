"""Recovery of the tree: a part that breaks is restarted, sessions go on, nothing is forgotten."""

from __future__ import annotations

import os
import signal

import attrs
import pytest
import trio

from sandkasten.actors.node import recovery
from sandkasten.actors.services.store import do
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.model import ExecSpec, SessionSpec, Status
from sandkasten.model.lifecycle import Trigger
from sandkasten.store.sessions import put_session
from tests.kernel.processes import nsinit_pid
from tests.strategies import make_record
from tests.waiting import until


@attrs.frozen
class Nonsense:
    """A message no actor knows; handling it is a bug and ends the actor."""


@pytest.mark.parametrize("name", ["_store", "_images", "_sessions", "_reaper"])
async def test_an_actor_that_dies_of_a_bug_is_restarted_and_sessions_go_on(
    supervisor: LocalSupervisor, name: str
) -> None:
    """The sandbox never notices; its shell state is there afterwards, and new sessions can be made."""
    session = await supervisor.create(SessionSpec())
    await supervisor.exec(session.id, ExecSpec("kept=yes"))
    ref = getattr(supervisor, name)
    ref.tell(Nonsense())

    async def works() -> bool:
        with trio.move_on_after(1):
            result = await supervisor.exec(session.id, ExecSpec("echo $kept"))
            return ref.is_alive and result.stdout == b"yes\n"
        return False

    async def is_back() -> bool:
        try:
            return await works()
        except Exception:  # noqa: BLE001 - whatever the moment in between gives, it must pass
            return False

    await until(is_back)
    await supervisor.create(SessionSpec())
    assert (await supervisor.destroy(session.id)).status is Status.DESTROYED


async def test_a_destroy_during_a_restart_of_the_fork_server_waits_for_it(supervisor: LocalSupervisor) -> None:
    """A destroy while nsinit restarts returns the final state, late and without an error."""
    session = await supervisor.create(SessionSpec())
    os.kill(nsinit_pid(), signal.SIGKILL)
    assert (await supervisor.destroy(session.id)).status is Status.DESTROYED


async def test_a_create_during_a_restart_of_the_fork_server_waits_for_it(supervisor: LocalSupervisor) -> None:
    """A create after nsinit's death was noticed is late and not refused."""
    os.kill(nsinit_pid(), signal.SIGKILL)

    async def is_noticed() -> bool:
        return not supervisor._nsinit.is_alive

    await until(is_noticed)
    session = await supervisor.create(SessionSpec())
    assert session.status is Status.RUNNING


async def test_the_reaper_finishes_what_nobody_works_on(supervisor: LocalSupervisor) -> None:
    """The reaper finishes a begun end at once, and a live session's record without an actor after the second look."""
    begun = make_record("a" * 24, status=Status.DESTROYING, ending=Trigger.EXPIRE)
    claimed = make_record("b" * 24, status=Status.RUNNING)
    for record in (begun, claimed):
        await supervisor._store.ask(do(put_session, record))
    await supervisor._reaper.ask(recovery.Sweep())
    assert (await supervisor.get("a" * 24)).status is Status.EXPIRED
    assert (await supervisor.get("b" * 24)).status is Status.RUNNING
    await supervisor._reaper.ask(recovery.Sweep())
    assert (await supervisor.get("b" * 24)).status is Status.LOST


async def test_the_reaper_leaves_live_sessions_alone(supervisor: LocalSupervisor) -> None:
    """The reaper ends no live session, however often it sweeps."""
    session = await supervisor.create(SessionSpec())
    for _ in range(3):
        assert await supervisor.sweep() == 0
    result = await supervisor.exec(session.id, ExecSpec("echo alive"))
    assert result.stdout == b"alive\n"
