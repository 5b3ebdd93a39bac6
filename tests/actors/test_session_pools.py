"""Session pools over scripted sandboxes: what a claim costs, who sees a member, how pools are filled, and every way in
which a member is lost."""

from __future__ import annotations

import dataclasses
import math
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from nsinit.wire import protocol
from runner.wire import protocol as runner_protocol
from sandkasten.actors.node import creating, session_pools
from sandkasten.actors.node.session_pools import FIRST_PAUSE_S, MAX_FAILURES, MAX_PAUSE_S, Refill
from sandkasten.actors.node.sessions import Refuse
from sandkasten.config import (
    AdmissionSettings,
    Config,
    Defaults,
    PoolSettings,
    PoolSize,
    SecuritySettings,
    ServerSettings,
    WorkspaceSettings,
)
from sandkasten.errors import Capacity, InvalidImage, QuotaExceeded, SessionExpired, SessionNotFound
from sandkasten.images.catalog import HOST, Catalog, Image, now
from sandkasten.model import EventType, ExecSpec, FileRules, Limits, SessionPatch, SessionSpec, Status
from sandkasten.model.image import ImageConfig
from sandkasten.model.keys import Access, Quota
from sandkasten.model.lifecycle import ENDED, LIVE
from sandkasten.model.listing import SessionQuery
from sandkasten.model.network import Network
from sandkasten.model.node import PoolInfo
from tests.api.keys import issue
from tests.fakes.nsinit import FakeNsinit
from tests.fakes.tree import ScriptedTree, open_scripted
from tests.ground import in_memory
from tests.waiting import patience, until

EVERYTHING = SessionSpec()


def pool_of(size: int, most: int | None = None, **settings: Any) -> PoolSettings:
    return PoolSettings(enabled=True, images={HOST: PoolSize(size, most)}, **settings)


@asynccontextmanager
async def open_pool(size: int, most: int | None = None, **changes: Any) -> AsyncIterator[ScriptedTree]:
    """Run a tree with a full pool."""
    async with open_scripted(**{"pool": pool_of(size, most), **changes}) as tree:
        await until_ready(tree, size)
        yield tree


async def pool_in(tree: ScriptedTree) -> PoolInfo:
    (pool,) = await tree.supervisor.pools()
    return pool


async def until_ready(tree: ScriptedTree, count: int) -> None:
    async def is_ready() -> bool:
        return (await pool_in(tree)).ready == count

    await until(is_ready)


async def until_all_ready(tree: ScriptedTree, *counts: int) -> None:
    async def are_ready() -> bool:
        return [each.ready for each in await tree.supervisor.pools()] == list(counts)

    await until(are_ready)


async def idle(tree: ScriptedTree) -> list[str]:
    """Return the ids of the members."""
    return sorted(each.id for each in await tree.supervisor.list(status=Status.POOL_IDLE))


@attrs.define
class HeldBuilds:
    """Builds of sandboxes that wait for `goes_on`; `begun` are their sessions."""

    begun: list[str] = attrs.field(factory=list)
    has_begun: trio.Event = attrs.field(factory=trio.Event)
    goes_on: trio.Event = attrs.field(factory=trio.Event)


def hold_builds(tree: ScriptedTree, monkeypatch: pytest.MonkeyPatch) -> HeldBuilds:
    """Have nsinit hold every build from now on."""
    do, held = tree.nsinit._do, HeldBuilds()

    async def hold(request: Any, fds: Any) -> object:
        if isinstance(request, protocol.Build):
            held.begun.append(request.plan.session_id)
            held.has_begun.set()
            await held.goes_on.wait()
        return await do(request, fds)

    monkeypatch.setattr(tree.nsinit, "_do", hold)
    return held


def rows(tree: ScriptedTree) -> dict[str, str]:
    """Return the status of every session in the database."""
    with closing(sqlite3.connect(tree.supervisor._config.db_path)) as database:
        return dict(database.execute("SELECT id, status FROM sessions"))


# The policy ---------------------------------------------------------------------------------------------------------


async def test_refills_pause_longer_after_each_failure_and_say_once_that_they_fail(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """1 s, twice as long each time, 60 s from the fifth on. A success begins anew."""
    refill = Refill(PoolSize(3))
    pauses, told = [], []
    for _ in range(2 * MAX_FAILURES):
        told.append(refill.note_failure())
        pauses.append(round(refill.not_before - trio.current_time()))
        await trio.sleep_until(refill.not_before)
    assert pauses == [1, 2, 4, 8] + [MAX_PAUSE_S] * 6
    assert told == [False] * 4 + [True] + [False] * 5
    assert refill.is_failing
    refill.note_made(0.1)
    assert not refill.is_failing
    assert not refill.note_failure()
    assert refill.not_before - trio.current_time() == FIRST_PAUSE_S


@pytest.mark.parametrize(
    ("size", "most", "creates", "made_in_s", "wanted"),
    [
        (2, 10, 0, 1.0, 2),
        (2, 10, 60, 1.0, 3),
        (2, 10, 240, 1.0, 6),
        (2, 10, 60, 3.5, 6),
        (2, 10, 6000, 1.0, 10),
        (2, None, 6000, 1.0, 2),
        (0, 5, 0, 1.0, 0),
        (0, 5, 1, 0.05, 1),
        (3, 3, 10**6, 60.0, 3),
    ],
)
async def test_a_pool_grows_by_the_creates_in_the_time_of_one(
    autojump_clock: trio.testing.MockClock, size: int, most: int | None, creates: int, made_in_s: float, wanted: int
) -> None:
    """Within `size` and `max`, and only for a minute."""
    refill = Refill(PoolSize(size, most))
    refill.note_made(made_in_s)
    for _ in range(creates):
        refill.note_create()
    assert refill.wanted == wanted
    await trio.sleep(61)
    assert refill.wanted == size


# Claims -------------------------------------------------------------------------------------------------------------


async def test_a_claim_writes_one_row_and_asks_pid_1_once_and_nsinit_nothing() -> None:
    """The session has all that its client asked for, and its life begins with the claim."""
    async with open_pool(1) as tree:
        (member,) = await idle(tree)
        await trio.sleep(0.05)
        asked_at = datetime.now(UTC)
        tree.nsinit.requests.clear()
        before = len(tree.runners[member].requests)
        written = tree.supervisor._metrics.store_jobs("ok")._value.get()
        spec = SessionSpec(labels={"a": "b"}, env={"X": "secret"}, ttl_s=77, max_lifetime_s=77.02)
        spec = attrs.evolve(spec, exec_mode="stateless", network=Network(log="denied"))
        session = await tree.supervisor.create(spec)
        assert (session.id, session.status, session.epoch) == (member, Status.RUNNING, 1)
        assert (session.acquire_source, session.acquire_detail) == ("pool", None)
        assert (session.labels, session.ttl_s, session.max_lifetime_s) == ({"a": "b"}, 77, 77.02)
        assert (session.options.exec_mode, session.network.log) == ("stateless", "denied")
        assert min(session.created_at, session.last_activity) >= asked_at
        assert session.expires_at is not None
        assert 77 <= (session.expires_at - asked_at).total_seconds() < 77 + patience()
        assert set(session.timings_ms) == {"pool"}
        assert tree.supervisor._metrics.store_jobs("ok")._value.get() - written == 1
        assert tree.runners[member].requests[before:] == [runner_protocol.SetEnv({"X": "secret"})]
        assert not [
            each
            for each in tree.nsinit.requests
            if not isinstance(each, protocol.FindLeftovers | protocol.CollectLayers)
        ]
        assert rows(tree)[member] == "running"
        assert (await tree.supervisor.get(member)).labels == {"a": "b"}
        assert (await tree.supervisor.exec(member, ExecSpec("true"))).end.exit_code == 0
        await until_ready(tree, 1)
        assert (await pool_in(tree)).claims == 1


async def test_nobody_meets_a_member_before_it_is_claimed() -> None:
    """The id is unknown, no list and no event has it; a list that asks for members has it."""
    async with open_pool(2) as tree:
        supervisor = tree.supervisor
        members = await idle(tree)
        assert len(members) == 2
        assert await supervisor.list() == []
        assert (await supervisor.find(SessionQuery(LIVE | ENDED))).sessions == []
        requests: Sequence[Callable[[str], Any]] = (
            supervisor.get,
            supervisor.destroy,
            supervisor.pause,
            supervisor.resume,
            supervisor.stats,
            supervisor.shells,
            supervisor.wait_ended,
            supervisor.diagnose,
            lambda session_id: supervisor.update(session_id, SessionPatch(ttl_s=5)),
            lambda session_id: supervisor.exec(session_id, ExecSpec("true")),
        )
        for request in requests:
            with pytest.raises(SessionNotFound):
                await request(members[0])
        with pytest.raises(SessionNotFound):
            async with supervisor.events(session_id=members[0], after="0"):
                pass
        async with supervisor.events(after="0") as events:
            session = await supervisor.create(EVERYTHING)
            with trio.fail_after(patience()):
                event = await anext(aiter(events))
        assert (event.type, event.session_id) == (EventType.SESSION_CREATED, session.id)
        assert event.data["acquire_source"] == "pool"


@pytest.mark.parametrize(
    "spec",
    [
        SessionSpec(limits=Limits(memory_mb=64)),
        SessionSpec(workspace_id="mine"),
        SessionSpec(readonly_rootfs=True),
        SessionSpec(shell="sh"),
        SessionSpec(user="root"),
        SessionSpec(account="user"),
        SessionSpec(root_inside=False),
        SessionSpec(filesystem=FileRules(readable=["/usr"])),
        SessionSpec(seccomp="mvp"),
    ],
    ids=lambda spec: next(name for name, value in attrs.asdict(spec).items() if value not in (None, {})),
)
async def test_a_create_that_asks_for_something_else_goes_without(spec: SessionSpec) -> None:
    """Settings that are mounted, limited or started with a member are those of the configuration."""
    async with open_pool(1, security=SecuritySettings(seccomp_allowed=("mvp",))) as tree:
        members = await idle(tree)
        session = await tree.supervisor.create(spec)
        assert (session.acquire_source, session.acquire_detail) == ("cold", "pool_mismatch")
        assert await idle(tree) == members
        assert (await pool_in(tree)).misses == {"pool_mismatch": 1}


async def test_a_pool_with_an_account_serves_creates_that_ask_for_it() -> None:
    """Creates of E2B's API do; others go without."""
    pool = PoolSettings(enabled=True, images={HOST: PoolSize(1, account="user")})
    async with open_pool(1, pool=pool) as tree:
        sources = [(await tree.supervisor.create(SessionSpec(account=each))).acquire_source for each in (None, "user")]
        assert sources == ["cold", "pool"]


async def test_pools_of_one_image_serve_what_each_is_made_for() -> None:
    """By an alias an image has a pool with an account and another without, whatever name a create uses."""
    pool = PoolSettings(enabled=True, images={HOST: PoolSize(1), "python": PoolSize(1, account="user")})
    async with open_scripted(pool=pool) as tree:
        await until_all_ready(tree, 1, 1)
        for image, account in ((HOST, "user"), ("python", None)):
            assert (await tree.supervisor.create(SessionSpec(image=image, account=account))).acquire_source == "pool"


async def test_an_alias_of_the_image_is_served_by_its_pool() -> None:
    """By whatever name; the session has the name that its client used. An image without a pool says nothing of one."""
    async with open_pool(2, default_image="base") as tree:
        catalog = Catalog(tree.supervisor._config.data_dir)
        with catalog.building("other") as directory:
            catalog.publish(directory, Image(name="other", kind="rootfs", created_at=now(), source="nothing"))
        for name in ("python", None):
            session = await tree.supervisor.create(SessionSpec(image=name))
            assert (session.acquire_source, session.image) == ("pool", name or "base")
        session = await tree.supervisor.create(SessionSpec(image="other"))
        assert (session.acquire_source, session.acquire_detail) == ("cold", None)


async def test_a_member_has_the_variables_of_its_image_from_the_start() -> None:
    """A claim brings none but the client's."""
    async with open_scripted(pool=PoolSettings(enabled=True, images={"own": PoolSize(1)})) as tree:
        catalog = Catalog(tree.supervisor._config.data_dir)
        with catalog.building("own") as directory:
            config = ImageConfig(env={"B": "of the image"})
            image = Image(name="own", kind="rootfs", created_at=now(), source="nothing", config=config)
            catalog.publish(directory, image)
        await tree.supervisor.create(EVERYTHING)  # has the pool look for its image
        await until_ready(tree, 1)
        (member,) = await idle(tree)
        session = await tree.supervisor.create(SessionSpec(image="own", env={"A": "1"}))
        runner = tree.runners[session.id]
        assert (session.id, runner.setup.env, runner.env) == (member, {"B": "of the image"}, {"A": "1"})


async def test_a_burst_larger_than_the_pool_is_served_and_the_pool_filled_again() -> None:
    """Each create gets a session of its own."""
    async with open_pool(3) as tree:
        made = []

        async def create() -> None:
            made.append(await tree.supervisor.create(EVERYTHING))

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(create)
        assert len({session.id for session in made}) == 8
        assert sum(session.acquire_source == "pool" for session in made) == 3
        missed = [session.acquire_detail for session in made if session.acquire_source == "cold"]
        assert missed == ["pool_empty"] * 5
        await until_ready(tree, 3)


async def test_a_refill_waits_until_no_create_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a session is built, no member is begun, though its time has come."""
    monkeypatch.setattr(session_pools, "_REST_S", 0.005)
    monkeypatch.setattr(session_pools, "_QUIET_S", 0.005)
    async with open_pool(1) as tree:
        held = hold_builds(tree, monkeypatch)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tree.supervisor.create, SessionSpec(user="root"))
            await held.has_begun.wait()
            assert (await tree.supervisor.create(EVERYTHING)).acquire_source == "pool"
            await trio.sleep(0.1)
            assert len(held.begun) == 1
            held.goes_on.set()
        await until_ready(tree, 1)
        assert len(held.begun) == 2


async def test_a_quota_counts_claimed_members_and_a_refusal_costs_none() -> None:
    """The key that is over its quota gets nothing and has no more made; the member stays for the next create."""
    key = issue(Access.WRITE, quota=Quota(sessions=1)).key
    async with open_pool(2, 4) as tree:
        tree.supervisor.shares.ring.replace([key])
        other = await tree.supervisor.create(SessionSpec(key_id=key.id, user="root"))
        with pytest.raises(QuotaExceeded):
            await tree.supervisor.create(SessionSpec(key_id=key.id))
        pool = await pool_in(tree)
        assert (pool.wanted, pool.ready) == (2, 2)
        await tree.supervisor.destroy(other.id)
        session = await tree.supervisor.create(SessionSpec(key_id=key.id))
        assert (session.acquire_source, session.key_id) == ("pool", key.id)
        await until_ready(tree, 3)
        members = await idle(tree)
        with pytest.raises(QuotaExceeded):
            await tree.supervisor.create(SessionSpec(key_id=key.id))
        assert await idle(tree) == members
        await tree.supervisor.destroy(session.id)
        assert (await tree.supervisor.create(SessionSpec(key_id=key.id))).id in members


# Lost members -------------------------------------------------------------------------------------------------------


async def test_a_member_that_dies_idle_is_replaced_and_leaves_no_trace() -> None:
    """Neither a record nor an event."""
    async with open_pool(1) as tree:
        (member,) = await idle(tree)
        async with tree.supervisor.events(after="0") as events:
            await tree.nsinit.kill(member)

            async def is_replaced() -> bool:
                return len(now := await idle(tree)) == 1 and now != [member]

            await until(is_replaced)
            assert member in tree.nsinit.torn_down
            assert member not in rows(tree)
            session = await tree.supervisor.create(EVERYTHING)
            with trio.fail_after(patience()):
                assert (await anext(aiter(events))).session_id == session.id


async def test_a_catalogue_that_restarts_is_no_failure_of_a_refill() -> None:
    """The member that is missing is made as soon as the image can be asked for again."""
    async with open_pool(1) as tree:
        (member,) = await idle(tree)
        images, failures = tree.supervisor._images, []
        images.tell(Refuse())  # a message that nobody knows is a bug, which ends the actor of the images
        while images.is_alive:
            await trio.lowlevel.checkpoint()
        await tree.nsinit.kill(member)

        async def is_replaced() -> bool:
            pool = await pool_in(tree)
            failures.append((pool.refill_failures, pool.error))
            return pool.refills == 2 and pool.ready == 1

        await until(is_replaced)
        assert set(failures) == {(0, None)}


async def test_a_member_that_does_not_answer_at_hand_out_is_passed_over() -> None:
    """The next one gets the create, and its idempotency key; the silent one is removed."""
    async with open_pool(2) as tree:
        silent = [each for each in tree.runners if tree.runners[each]][-1]  # the newest, which is handed out first
        tree.runners[silent].is_silent = True
        session = await tree.supervisor.create(SessionSpec(idempotency_key="k"))
        assert session.acquire_source == "pool"
        assert session.id != silent
        assert (await tree.supervisor.create(SessionSpec(idempotency_key="k"))).id == session.id

        async def is_gone() -> bool:
            return silent in tree.nsinit.torn_down and silent not in rows(tree)

        await until(is_gone)


async def test_a_create_goes_cold_when_all_members_are_dead() -> None:
    """Silent ones and those whose death nobody has noticed yet."""
    async with open_pool(3) as tree:
        silent = list(tree.runners)
        for each in silent:
            tree.runners[each].is_silent = True
        with trio.fail_after(patience(2.0)):
            session = await tree.supervisor.create(EVERYTHING)
        assert (session.acquire_source, session.acquire_detail) == ("cold", "pool_dead")
        await until_ready(tree, 3)
        assert not set(await idle(tree)) & set(silent)
        assert rows(tree).keys() == {session.id, *await idle(tree)}


async def test_a_death_after_the_claim_is_the_end_of_a_session() -> None:
    """As of any other."""
    async with open_pool(1) as tree:
        session = await tree.supervisor.create(EVERYTHING)
        await tree.nsinit.kill(session.id)
        assert (await tree.supervisor.wait_ended(session.id)).status is Status.CRASHED
        with pytest.raises(SessionExpired):
            await tree.supervisor.exec(session.id, ExecSpec("true"))
        assert rows(tree)[session.id] == "crashed"


async def test_an_image_that_was_replaced_makes_its_members_stale() -> None:
    """No session is made of them any more, and new ones take their place."""
    async with open_pool(2) as tree:
        old = await idle(tree)
        _replace_image(tree)
        session = await tree.supervisor.create(EVERYTHING)
        assert (session.acquire_source, session.acquire_detail) == ("cold", "pool_stale")

        async def is_renewed() -> bool:
            return len(now := await idle(tree)) == 2 and not set(now) & set(old)

        await until(is_renewed)
        assert set(old) <= set(tree.nsinit.torn_down)
        assert (await tree.supervisor.create(EVERYTHING)).acquire_source == "pool"


async def test_an_image_that_was_deleted_ends_its_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool looks now and then, and tells why it is empty."""
    monkeypatch.setattr(session_pools, "LOOK_EVERY_S", 0.05)
    async with open_pool(2) as tree:
        Catalog(tree.supervisor._config.data_dir).delete(HOST)
        await until_ready(tree, 0)
        with pytest.raises(InvalidImage):
            await tree.supervisor.create(EVERYTHING)

        async def is_told() -> bool:
            return (await pool_in(tree)).error is not None

        await until(is_told)

        async def is_forgotten() -> bool:
            return not rows(tree)

        await until(is_forgotten)


async def test_refills_that_fail_for_ever_are_told_once_and_creates_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is failing until a member is made."""
    monkeypatch.setattr(session_pools, "FIRST_PAUSE_S", 0.005)
    monkeypatch.setattr(session_pools, "MAX_PAUSE_S", 0.02)
    refusal = protocol.Failed(0, "overlay root", "", 5, "no")
    build, refuses = FakeNsinit._do, True

    async def refuse(nsinit: FakeNsinit, request: Any, fds: Any) -> object:
        if refuses and isinstance(request, protocol.Build):
            return dataclasses.replace(refusal, seq=request.seq)
        return await build(nsinit, request, fds)

    monkeypatch.setattr(FakeNsinit, "_do", refuse)
    async with open_scripted(pool=pool_of(2), default_image=HOST) as tree:

        async def is_failing() -> bool:
            return (pool := await pool_in(tree)).state == "failing" and pool.refill_failures > 2 * MAX_FAILURES

        async with tree.supervisor.events(after="0") as events:
            await until(is_failing)
            pool = await pool_in(tree)
            assert pool.ready == 0
            assert "overlay root" in str(pool.error)
            refuses = False
            session = await tree.supervisor.create(EVERYTHING)
            told = []
            with trio.fail_after(patience()):
                async for event in events:
                    told.append(event.type)
                    if event.session_id == session.id:
                        break
        assert told == [EventType.POOL_FAILING, EventType.SESSION_CREATED]
        await until_ready(tree, 2)
        assert (await pool_in(tree)).state == "ready"
        assert rows(tree).keys() == {session.id, *await idle(tree)}


# Age, cold, room ----------------------------------------------------------------------------------------------------


async def test_an_old_member_is_replaced_when_its_successor_is_ready() -> None:
    """The pool is never smaller for it."""
    async with open_pool(1, pool=pool_of(1, max_age_seconds=1)) as tree:
        (old,) = await idle(tree)
        sizes = []

        async def is_replaced() -> bool:
            sizes.append((await pool_in(tree)).ready)
            return old in tree.nsinit.torn_down

        async def is_forgotten() -> bool:
            return old not in await idle(tree)

        await until(is_replaced)
        assert min(sizes) == 1
        await until(is_forgotten)


async def test_members_that_wait_are_frozen_and_a_claim_thaws_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen member costs no processor time."""
    monkeypatch.setattr(session_pools, "FREEZE_AFTER_S", 0.05)
    async with open_pool(2) as tree:
        members = set(await idle(tree))

        async def are_frozen() -> bool:
            return tree.nsinit.frozen == members and (await pool_in(tree)).frozen == 2

        await until(are_frozen)
        session = await tree.supervisor.create(EVERYTHING)
        assert (session.acquire_source, session.status) == ("pool", Status.RUNNING)
        assert session.id not in tree.nsinit.frozen
        await tree.nsinit.kill((members - {session.id}).pop())
        await until_ready(tree, 2)


async def test_a_member_that_is_being_built_makes_room_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A create is not refused for what nobody has."""
    async with open_pool(1, server=ServerSettings(pool_sandboxes=0, max_sessions=1)) as tree:
        held = hold_builds(tree, monkeypatch)
        await tree.supervisor.destroy((await tree.supervisor.create(EVERYTHING)).id)
        await held.has_begun.wait()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tree.supervisor.create, SessionSpec(user="root"))
            await trio.sleep(0.05)
            held.goes_on.set()
        assert len(await tree.supervisor.list(status=Status.RUNNING)) == 1
        assert (await pool_in(tree)).refill_failures == 0


async def test_idle_members_make_room_for_creates(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each create that does not fit beside them. No refill takes the room back."""
    server = ServerSettings(pool_sandboxes=0, max_sessions=3)
    async with open_pool(3, server=server) as tree:
        made = [await tree.supervisor.create(SessionSpec(user="root")) for _ in range(3)]
        assert [session.acquire_detail for session in made] == ["pool_mismatch"] * 3
        assert await idle(tree) == []
        with pytest.raises(Capacity, match="all the sessions"):
            await tree.supervisor.create(EVERYTHING)
        await trio.sleep(0.3)
        pool = await pool_in(tree)
        assert (pool.state, pool.ready, pool.refill_failures) == ("filling", 0, 0)
        await tree.supervisor.destroy(made[0].id)
        await until_ready(tree, 1)
        assert (await tree.supervisor.create(EVERYTHING)).acquire_source == "pool"


async def test_a_create_that_would_not_fit_without_members_ends_none() -> None:
    """Two cores of members are ended for a create that fits then, and kept for one that does not."""
    async with open_scripted() as tree:
        cores = (await tree.supervisor.capacity()).totals.cpu
    assert cores is not None
    admission = AdmissionSettings(cpu_overcommit=5 / cores)
    async with open_pool(2, admission=admission) as tree:
        members = await idle(tree)
        await tree.supervisor.create(SessionSpec(limits=Limits(cpu=2.0)))
        with pytest.raises(Capacity) as caught:
            await tree.supervisor.create(SessionSpec(limits=Limits(cpu=3.5)))
        assert caught.value.details["resource"] == "cpu"
        assert await idle(tree) == members
        await tree.supervisor.create(SessionSpec(limits=Limits(cpu=3.0)))
        assert await idle(tree) == []


async def test_a_drained_node_refills_nothing() -> None:
    """Members stay for the time after."""
    async with open_pool(2) as tree:
        await tree.supervisor.drain()
        (member, _) = await idle(tree)
        await tree.nsinit.kill(member)
        await until_ready(tree, 1)
        await trio.sleep(0.4)
        assert ((await pool_in(tree)).state, (await pool_in(tree)).ready) == ("draining", 1)
        with pytest.raises(Capacity):
            await tree.supervisor.create(EVERYTHING)
        await tree.supervisor.undrain()
        await until_ready(tree, 2)


async def test_workspaces_go_cold_even_where_they_are_off() -> None:
    """A create is judged before any member is taken."""
    async with open_pool(1, workspace=WorkspaceSettings(enabled=False)) as tree:
        with pytest.raises(Exception, match="switched off"):
            await tree.supervisor.create(SessionSpec(workspace_id="mine"))
        assert (await pool_in(tree)).ready == 1


# Restarts -----------------------------------------------------------------------------------------------------------


@attrs.frozen
class Restart:
    """A daemon with a pool of three that was stopped; `members` are those it left."""

    config: Config
    nsinit: FakeNsinit
    members: list[str]

    @asynccontextmanager
    async def again(self, **changes: Any) -> AsyncIterator[ScriptedTree]:
        """Start the next daemon, with other settings."""
        async with open_scripted(attrs.evolve(self.config, **changes), nsinit=self.nsinit) as tree:
            yield tree


@pytest.fixture
async def restart(nursery: trio.Nursery) -> AsyncIterator[Restart]:
    with tempfile.TemporaryDirectory(prefix="sandkasten-test-", dir=in_memory()) as directory:
        config = Config(
            data_dir=Path(directory) / "data",
            server=ServerSettings(pool_sandboxes=0),
            sessions_on_stop="keep",
            pool=pool_of(3),
        )
        nsinit = FakeNsinit(config.data_dir, {}, nursery)
        async with open_scripted(config, nsinit=nsinit) as tree:
            await until_ready(tree, 3)
            members = await idle(tree)
        left = Restart(config, nsinit, members)
        yield left
        async with left.again(pool=PoolSettings(), sessions_on_stop="destroy"):
            pass
        nursery.cancel_scope.cancel()


async def test_members_are_adopted_by_the_next_daemon(restart: Restart) -> None:
    """Members are handed out as if nothing had been; what is missing is made."""
    async with restart.again(pool=pool_of(4)) as tree:
        await until_ready(tree, 4)
        assert set(restart.members) < set(await idle(tree))
        assert restart.nsinit.torn_down == []
        made = [await tree.supervisor.create(SessionSpec(env={"A": "1"})) for _ in range(3)]
        assert {each.acquire_source for each in made} == {"pool"}
        assert {each.acquire_detail for each in made} == {None}


async def test_members_that_grew_old_between_two_daemons_are_removed(restart: Restart) -> None:
    """The age of a member counts from when it was made."""
    await trio.sleep(1)
    async with restart.again(pool=pool_of(3, max_age_seconds=1)) as tree:
        await until_ready(tree, 3)
        assert not set(await idle(tree)) & set(restart.members)


async def test_a_member_is_adopted_by_one_pool(restart: Restart) -> None:
    """Where two pools want the same, the other makes its own."""
    pools = PoolSettings(enabled=True, images={HOST: PoolSize(3), "python": PoolSize(2)})
    async with restart.again(pool=pools) as tree:
        await until_all_ready(tree, 3, 2)
        assert set(restart.members) < set(await idle(tree))


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"pool": PoolSettings()}, 0),
        ({"pool": pool_of(1)}, 1),
        ({"pool": pool_of(0, 3)}, 0),
        ({"defaults": Defaults(mem_limit_mb=64, tmp_limit_mb=8, shm_limit_mb=8)}, 0),
    ],
    ids=["off", "smaller", "on demand", "other defaults"],
)
async def test_members_that_nobody_wants_any_more_are_removed(
    restart: Restart, changes: dict[str, Any], kept: int
) -> None:
    """With their records; a session of a client that lived beside them goes on."""
    async with restart.again(**changes) as tree:

        async def is_settled() -> bool:
            left = set(rows(tree)) & set(restart.members)
            return len(left) == kept and len(restart.nsinit.torn_down) == 3 - kept

        await until(is_settled)


async def test_members_of_an_image_that_was_replaced_meanwhile_are_removed(restart: Restart) -> None:
    """The files below them are not those that sessions get."""
    catalog = Catalog(restart.config.data_dir)
    with catalog.building(HOST) as directory:
        image = Image(name=HOST, kind="rootfs", created_at=now(), source="other", fingerprint="other")
        catalog.publish(directory, image, replace=True)
    async with restart.again() as tree:
        await until_ready(tree, 3)
        assert not set(await idle(tree)) & set(restart.members)


async def test_a_member_that_died_between_two_daemons_is_forgotten(restart: Restart) -> None:
    """The record goes, and nobody is told."""
    (dead, *alive) = restart.members
    restart.nsinit._alive.pop(dead)
    async with restart.again() as tree:
        await until_ready(tree, 3)
        assert set(alive) < set(await idle(tree))
        assert dead not in rows(tree)
        async with tree.supervisor.events(after="0") as events:
            session = await tree.supervisor.create(EVERYTHING)
            with trio.fail_after(patience()):
                assert (await anext(aiter(events))).session_id == session.id


async def test_a_member_that_was_given_variables_is_never_a_member_again(restart: Restart) -> None:
    """The daemon died between the message to PID 1 and the record: nobody may get a client's variables."""
    (given, *others) = restart.members
    restart.nsinit.runners[given].env["SECRET"] = "x"
    async with restart.again() as tree:
        await until_ready(tree, 3)
        assert set(others) < set(await idle(tree))

        async def is_gone() -> bool:
            return given in restart.nsinit.torn_down and given not in rows(tree)

        await until(is_gone)


async def test_a_stop_that_ends_sessions_ends_members(restart: Restart) -> None:
    """Nothing is left of them, not even a record."""
    config = attrs.evolve(restart.config, sessions_on_stop="destroy")
    async with open_scripted(config, nsinit=restart.nsinit) as tree:
        await until_ready(tree, 3)
    assert set(restart.members) <= set(restart.nsinit.torn_down)
    assert rows(tree) == {}


def _replace_image(tree: ScriptedTree) -> None:
    catalog = Catalog(tree.supervisor._config.data_dir)
    with catalog.building(HOST) as directory:
        image = Image(name=HOST, kind="rootfs", created_at=now(), source="other", fingerprint="other")
        catalog.publish(directory, image, replace=True)


def test_the_pauses_have_an_end() -> None:
    """Doubling stops at the longest pause."""
    assert FIRST_PAUSE_S * 2 ** (MAX_FAILURES - 2) < MAX_PAUSE_S < math.inf


async def test_a_shell_is_kept_for_those_who_may_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone create has a shell that ends unless it is used, creates in a crowd have none before their first command,
    and a member keeps the one that it has."""
    monkeypatch.setattr(creating, "_PROCESSORS", 2)
    async with open_pool(1) as tree:
        (member,) = tree.runners
        assert tree.runners[member].setup.unused_shell_ms is None
        mismatch = SessionSpec(limits=attrs.evolve(Defaults().limits, memory_mb=100))
        lone = await tree.supervisor.create(mismatch)
        assert tree.runners[lone.id].setup.unused_shell_ms == 10_000
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(tree.supervisor.create, mismatch)
        kept = [tree.runners[each].setup.unused_shell_ms for each in tree.runners if each not in (member, lone.id)]
        assert 0 in kept
        assert set(kept) <= {0, 10_000}
