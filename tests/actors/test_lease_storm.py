"""A thousand leases run out within a second: all sessions end, few at a time, and the daemon answers meanwhile."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import attrs
import pytest
import trio

from sandkasten.actors.node.creating import NodeIdentity
from sandkasten.actors.node.sessions import CONCURRENT_EXPIRIES
from sandkasten.actors.supervision import ChildSupervisor
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.config import Config
from sandkasten.host.data_dir import make_data_dir
from sandkasten.host.paths import read_boot_id
from sandkasten.images.catalog import Catalog
from sandkasten.model import EndReason, EventType, Status
from sandkasten.model.listing import SessionQuery
from sandkasten.model.node import Machine
from sandkasten.store.database import open_database
from sandkasten.store.sessions import KernelIdentity, put_session
from tests.api.harness import Steps
from tests.fakes.nsinit import FakeNsinit, identities_of
from tests.ground import in_memory
from tests.strategies import make_record
from tests.waiting import patience

MANY = 1000
SPREAD_S = 1.0
FIRST_S = 6.0
"""When the first lease runs out: about when all sessions are adopted."""

PAUSE_S = 0.01
MAX_SLICE_S = 0.01
MAX_LAG_S = 1.0
PATIENCE_S = 25.0


@pytest.fixture
def data_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sandkasten-test-", dir=in_memory()) as directory:
        yield Path(directory)


def _record_all(config: Config, ids: list[str]) -> None:
    """Write the records of sessions whose leases run out one after the other within a second."""
    identities, boot_id, first_s = identities_of(ids), read_boot_id(), patience(FIRST_S)
    now = datetime.now(UTC)
    with closing(open_database(config.db_path)) as database:
        database.execute("BEGIN")
        for number, session_id in enumerate(ids):
            who = identities[session_id]
            kernel = KernelIdentity(who.pid, who.start_ticks, who.pid_ns, boot_id)
            ttl_s = first_s + SPREAD_S * number / len(ids)
            record = make_record(session_id, identity=kernel, ttl_s=ttl_s, created_at=now)
            expires_at = now + timedelta(seconds=ttl_s)
            session = attrs.evolve(record.session, last_activity=now, expires_at=expires_at)
            put_session(database, attrs.evolve(record, session=session))
        database.execute("COMMIT")


async def _expired(supervisor: LocalSupervisor, count: int, begun: trio.Event) -> None:
    """Wait until so many sessions have expired."""
    async with supervisor.events(after="0") as events:
        async for event in events:
            if event.type is EventType.SESSION_EXPIRED:
                begun.set()
                assert event.data["end_reason"] == "idle"
                count -= 1
            if not count:
                return


async def _longest_slice(supervisor: LocalSupervisor) -> float:
    """Return the longest processor time between two checkpoints while all sessions are listed, as a whole and in pages,
    counted and compared with the kernel, and adopted behind that."""
    steps = Steps()
    gc.disable()  # a full collection belongs to no step
    trio.lowlevel.add_instrument(steps)
    try:
        await trio.lowlevel.checkpoint()  # counted from here on
        assert len(await supervisor.list(limit=MANY)) == MANY
        assert len(await supervisor.list(limit=MANY, ended=True)) == MANY
        half = await supervisor.find(SessionQuery(limit=MANY // 2))
        assert len((await supervisor.find(SessionQuery(after=half.next))).sessions) == MANY // 2
        await supervisor.metrics()
        await supervisor.node()
        await supervisor.sweep()
        await trio.lowlevel.checkpoint()
    finally:
        trio.lowlevel.remove_instrument(steps)
        gc.enable()
    return steps.longest_s


@pytest.mark.slow
async def test_a_thousand_sessions_expire_within_a_second(data_dir: Path) -> None:
    """Each once, as idle, never more at a time than may be; requests are answered meanwhile, without a gap. A list, the
    metrics and a sweep of all of them stop the loop for 10 ms at most."""
    make_data_dir(data_dir)
    config = Config(data_dir=data_dir, sessions_on_stop="keep")
    ids = [f"{number:016x}0badcafe" for number in range(MANY)]
    _record_all(config, ids)
    lags: list[float] = []
    gaps: list[float] = []
    begun = trio.Event()
    async with trio.open_nursery() as outside:
        nsinit = FakeNsinit(data_dir, identities_of(ids), outside)
        async with trio.open_nursery() as nursery:
            node = NodeIdentity("0badcafe", 1, read_boot_id(), b"k" * 32)
            machine = Machine(datetime.now(UTC), [])
            supervisor = LocalSupervisor(
                config, Catalog(data_dir), node, machine=machine, pool_size=0, start_nsinit=nsinit.start
            )
            with trio.fail_after(patience(PATIENCE_S)):
                await nursery.start(ChildSupervisor(supervisor.children()).run)

            longest_s = await _longest_slice(supervisor)

            async def ask_on() -> None:
                await begun.wait()
                while True:
                    began = trio.current_time()
                    await supervisor.get(ids[-1])
                    asked = trio.current_time()
                    lags.append(asked - began)
                    await trio.sleep(PAUSE_S)
                    gaps.append(trio.current_time() - asked - PAUSE_S)

            nursery.start_soon(ask_on)
            with trio.fail_after(patience(PATIENCE_S)):
                await _expired(supervisor, MANY, begun)
            ended = await supervisor.find(SessionQuery(frozenset({Status.EXPIRED}), limit=MANY + 1))
            nursery.cancel_scope.cancel()
        outside.cancel_scope.cancel()
    assert {each.id for each in ended.sessions} == set(ids)
    assert {each.end_reason for each in ended.sessions} == {EndReason.IDLE}
    assert sorted(nsinit.torn_down) == ids
    assert 1 < nsinit.peak <= CONCURRENT_EXPIRIES
    assert longest_s < patience(MAX_SLICE_S)
    assert max(lags) < patience(MAX_LAG_S)
    assert max(gaps) < patience(MAX_LAG_S)
