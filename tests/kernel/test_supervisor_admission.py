"""Admission on a real node: what does not fit is refused with its figures, and a drained node takes nothing new."""

from __future__ import annotations

import attrs
import pytest
import trio

from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import open_supervisor
from sandkasten.config import AdmissionSettings, Config, ServerSettings
from sandkasten.errors import Capacity, Draining, LimitInUse, SandkastenError
from sandkasten.model import ExecSpec, Limits, SessionPatch, SessionSpec, Status

SMALL = Limits(memory_mb=64, pids=64, disk_mb=64)
TWICE = attrs.evolve(SMALL, memory_mb=128)


async def roomy(supervisor: LocalSupervisor, count: int) -> AdmissionSettings:
    """Return the settings with which `count` small sessions fit, and no more."""
    total = (await supervisor.capacity()).totals.memory_bytes
    assert total is not None
    ratio = (count * SMALL.memory_mb + 32) * 2**20 / total
    return AdmissionSettings(memory_overcommit=ratio)


async def test_the_budget_counts_what_lives_and_nothing_else(config: Config) -> None:
    """A third session is refused at once, and fits when one of the two has ended; failed creates, and changes that the
    daemon or the kernel refuses, take nothing of the budget.
    """
    async with open_supervisor(config) as supervisor:
        admission = await roomy(supervisor, 2)
    async with open_supervisor(attrs.evolve(config, admission=admission)) as supervisor:
        first = await supervisor.create(SessionSpec(limits=SMALL))
        with pytest.raises(SandkastenError):
            await supervisor.create(SessionSpec(limits=SMALL, user="nobody-of-that-name"))
        second = await supervisor.create(SessionSpec(limits=SMALL))
        with pytest.raises(Capacity) as caught:
            await supervisor.create(SessionSpec(limits=SMALL))
        assert caught.value.details["resource"] == "memory_bytes"
        assert caught.value.details["committed"] == 128 * 2**20
        with pytest.raises(Capacity):
            await supervisor.update(first.id, SessionPatch(limits=TWICE))
        await supervisor.exec(second.id, ExecSpec("head -c 20000000 /dev/zero > /dev/shm/full"))
        with pytest.raises(LimitInUse):
            await supervisor.update(second.id, SessionPatch(limits=attrs.evolve(SMALL, memory_mb=16)))
        assert (await supervisor.capacity()).committed.memory_bytes == 128 * 2**20
        await supervisor.destroy(first.id)
        assert (await supervisor.update(second.id, SessionPatch(limits=TWICE))).limits.memory_mb == 128
        with pytest.raises(Capacity):
            await supervisor.create(SessionSpec(limits=SMALL))
        await supervisor.update(second.id, SessionPatch(limits=SMALL))
        await supervisor.create(SessionSpec(limits=SMALL))


async def test_a_storm_of_creates_never_gets_more_than_fits(config: Config) -> None:
    """Creates that are admitted at the same moment never share one place; each refusal names the resource that is used
    up.
    """
    outcomes: list[str] = []
    async with open_supervisor(
        attrs.evolve(config, server=ServerSettings(pool_sandboxes=0, max_sessions=4))
    ) as supervisor:

        async def create() -> None:
            try:
                outcomes.append((await supervisor.create(SessionSpec(limits=SMALL))).status)
            except Capacity as error:
                outcomes.append(error.details["resource"])

        async with trio.open_nursery() as nursery:
            for _ in range(12):
                nursery.start_soon(create)
        found = await supervisor.capacity()
    assert (outcomes.count(Status.RUNNING), outcomes.count("sessions")) == (4, 8)
    assert (found.committed.sessions, found.budget.sessions, found.queued) == (4, 4, 0)


async def test_adopted_sessions_are_counted_though_they_do_not_fit(config: Config) -> None:
    """A restart with a smaller budget ends no session, and admits none until there is room."""
    keeping = attrs.evolve(config, sessions_on_stop="keep")
    async with open_supervisor(keeping) as supervisor:
        kept = await supervisor.create(SessionSpec(limits=TWICE))
        admission = await roomy(supervisor, 1)
    async with open_supervisor(attrs.evolve(config, admission=admission)) as supervisor:
        assert (await supervisor.get(kept.id)).status is Status.RUNNING
        assert (await supervisor.capacity()).committed.memory_bytes == 128 * 2**20
        with pytest.raises(Capacity):
            await supervisor.create(SessionSpec(limits=SMALL))
        await supervisor.destroy(kept.id)
        await supervisor.create(SessionSpec(limits=SMALL))


async def test_a_drained_node_stays_drained_over_a_restart(config: Config) -> None:
    """A drained node serves its running sessions and refuses new ones, also after a restart, until it is undrained."""
    keeping = attrs.evolve(config, sessions_on_stop="keep")
    async with open_supervisor(keeping) as supervisor:
        session = await supervisor.create(SessionSpec(limits=SMALL))
        assert (await supervisor.drain()).status == "draining"
        assert (await supervisor.drain()).status == "draining"
        with pytest.raises(Draining):
            await supervisor.create(SessionSpec(limits=SMALL))
    async with open_supervisor(config) as supervisor:
        with pytest.raises(Draining) as caught:
            await supervisor.create(SessionSpec(limits=SMALL))
        assert (caught.value.retryable, caught.value.retry_after_s) == (True, 30)
        assert (await supervisor.exec(session.id, ExecSpec("echo on"))).stdout == b"on\n"
        assert (await supervisor.undrain()).status == "ready"
        await supervisor.create(SessionSpec(limits=SMALL))
    async with open_supervisor(config) as supervisor:
        assert (await supervisor.capacity()).status == "ready"
