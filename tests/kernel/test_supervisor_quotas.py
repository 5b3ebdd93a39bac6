"""Quotas of API keys over real sessions: by who made them, through changes, runs and a restart."""

from __future__ import annotations

import attrs
import pytest
import trio

from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import open_supervisor
from sandkasten.config import Config
from sandkasten.errors import QuotaExceeded
from sandkasten.model import ExecSpec, Limits, ProcessSpec, SessionPatch, SessionSpec, TerminalSpec
from sandkasten.model.keys import Access, Quota
from tests.api.keys import issue
from tests.waiting import until

KEY = issue(Access.WRITE, quota=Quota(sessions=2, memory_mb=400, execs=2)).key
LIMITS = Limits(memory_mb=160, pids=64)


async def refused(supervisor: LocalSupervisor, spec: SessionSpec) -> str:
    with pytest.raises(QuotaExceeded) as caught:
        await supervisor.create(spec)
    return str(caught.value.details["quota"])


async def test_a_key_gets_what_its_quota_says_and_no_more(config: Config) -> None:
    """A quota bounds the sessions of a key, their memory, also when another key changes it, and the runs in them; also
    after a restart.
    """
    mine = SessionSpec(limits=LIMITS, key_id=KEY.id)
    keeping = attrs.evolve(config, sessions_on_stop="keep")
    async with open_supervisor(keeping) as supervisor:
        supervisor.shares.ring.replace([KEY])
        first, second = [await supervisor.create(mine) for _ in range(2)]
        assert await refused(supervisor, mine) == "sessions"
        other = await supervisor.create(SessionSpec(limits=LIMITS))
        assert (first.key_id, other.key_id) == (KEY.id, None)

        with pytest.raises(QuotaExceeded):
            await supervisor.update(first.id, SessionPatch(limits=attrs.evolve(LIMITS, memory_mb=300)))
        assert (await supervisor.get(first.id)).limits.memory_mb == 160
        await supervisor.update(first.id, SessionPatch(limits=attrs.evolve(LIMITS, memory_mb=200)))

        await supervisor.start_process(first.id, ProcessSpec(argv=("sleep", "60"), process_id="p"))
        async with supervisor.open_exec(second.id, ExecSpec("sleep 60")) as running:
            for attempt in (
                supervisor.exec(second.id, ExecSpec("true")),
                supervisor.start_process(first.id, ProcessSpec(argv=("true",))),
                supervisor.open_terminal(second.id, TerminalSpec()).__aenter__(),
            ):
                with pytest.raises(QuotaExceeded):
                    await attempt
            assert (await supervisor.exec(other.id, ExecSpec("echo free"))).output == b"free\n"
            assert supervisor.shares.usage(KEY).execs == 2
            await running.cancel()
            await running.wait_end()
        assert (await supervisor.exec(second.id, ExecSpec("echo room"))).output == b"room\n"

    async with open_supervisor(config) as supervisor:
        supervisor.shares.ring.replace([KEY])
        assert (await supervisor.get(first.id)).key_id == KEY.id
        assert (supervisor.shares.usage(KEY).sessions, supervisor.shares.usage(KEY).memory_mb) == (2, 360)
        assert await refused(supervisor, mine) == "sessions"
        await supervisor.destroy(second.id)

        async def has_room() -> bool:
            return supervisor.shares.usage(KEY).sessions == 1

        await until(has_room)
        assert await refused(supervisor, attrs.evolve(mine, limits=attrs.evolve(LIMITS, memory_mb=201))) == "memory_mb"
        await supervisor.create(attrs.evolve(mine, limits=attrs.evolve(LIMITS, memory_mb=200)))


async def test_creates_at_the_same_time_share_one_quota(supervisor: LocalSupervisor) -> None:
    """Of eight creates at once as many succeed as the quota has; a failed build is given back to the quota."""
    key = attrs.evolve(KEY, quota=Quota(sessions=3))
    supervisor.shares.ring.replace([key])
    made, failed = [], []

    async def create() -> None:
        try:
            made.append(await supervisor.create(SessionSpec(limits=LIMITS, key_id=key.id)))
        except QuotaExceeded as error:
            failed.append(error)

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(create)
    assert (len(made), len(failed)) == (3, 5)
    assert supervisor.shares.usage(key).sessions == 3
