"""Claims of pool members over scripted sandboxes: what a repeat, a bug, a kill, a dead member or a node without room
leaves behind."""

from __future__ import annotations

import time
from typing import Any

import pytest
import trio

from nsinit.wire import protocol
from sandkasten.actors.node import session_pools
from sandkasten.actors.services import store
from sandkasten.actors.session.actor import SessionActor
from sandkasten.actors.session.birth import hand_over
from sandkasten.config import DiskSettings, ServerSettings
from sandkasten.model import EventType, SessionSpec, Status
from sandkasten.model.keys import Access, Quota
from sandkasten.store.database import ping
from sandkasten.store.sessions import put_session
from tests.actors.test_session_pools import EVERYTHING, idle, open_pool, pool_in, pool_of, rows, until_ready
from tests.api.keys import issue
from tests.fakes.tree import open_scripted
from tests.waiting import patience, until


async def test_no_record_says_running_of_a_frozen_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that is killed during a claim leaves a member, or a session that runs."""
    monkeypatch.setattr(session_pools, "FREEZE_AFTER_S", 0.05)
    async with open_pool(1) as tree:
        (member,) = await idle(tree)
        do, seen = tree.nsinit._do, list[str]()

        async def look(request: Any, fds: Any) -> object:
            if isinstance(request, protocol.SetFrozen) and not request.frozen:
                await trio.sleep(0.1)
                seen.append(rows(tree)[member])
            return await do(request, fds)

        async def is_frozen() -> bool:
            return tree.nsinit.frozen == {member}

        await until(is_frozen)
        monkeypatch.setattr(tree.nsinit, "_do", look)
        assert (await tree.supervisor.create(EVERYTHING)).id == member
        assert seen == [Status.POOL_IDLE]


@pytest.mark.parametrize("env", [{}, {"A": "1"}], ids=["no variables", "variables"])
async def test_a_member_has_no_way_out_before_its_record_runs(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon that adopts it would hand it out with the way of a client that was never told of it."""
    async with open_pool(1) as tree:
        seen = list[str]()

        def put_late(*args: Any) -> Any:
            time.sleep(0.05)
            return put_session(*args)

        async def look(actor: SessionActor) -> None:
            seen.append(rows(tree)[actor.session_id])

        monkeypatch.setattr("sandkasten.actors.session.record.put_session", put_late)
        monkeypatch.setattr(SessionActor, "open_way", look)
        assert (await tree.supervisor.create(SessionSpec(env=env))).acquire_source == "pool"
        assert seen == ["running"]


async def test_a_bug_in_a_claim_costs_a_member_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next member gets the create, and its idempotency key; of the other one nobody is told."""
    async with open_pool(2) as tree:
        members = await idle(tree)
        tried = list[object]()

        async def fail_once(link: Any, env: Any) -> None:
            tried.append(link)
            if len(tried) == 1:
                await trio.sleep(0.05)  # the record is written meanwhile
                raise ValueError("a bug")
            await hand_over(link, env)

        monkeypatch.setattr("sandkasten.actors.session.pooled.hand_over", fail_once)
        async with tree.supervisor.events(after="0") as events:
            session = await tree.supervisor.create(SessionSpec(idempotency_key="k"))
            assert session.id in members
            assert (await tree.supervisor.create(SessionSpec(idempotency_key="k"))).id == session.id

            async def is_gone() -> bool:
                return len(tree.nsinit.torn_down) == 1 and rows(tree).keys() & members == {session.id}

            await until(is_gone)
            await tree.supervisor.destroy(session.id)
            told = []
            with trio.fail_after(patience()):
                async for event in events:
                    told.append((event.type, event.session_id))
                    if event.type is EventType.SESSION_DESTROYED:
                        break
        assert told == [(EventType.SESSION_CREATED, session.id), (EventType.SESSION_DESTROYED, session.id)]


@pytest.mark.parametrize("is_down", [False, True], ids=["ends under the write", "is down"])
async def test_a_claim_waits_for_a_store_that_restarts(is_down: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart costs no member."""
    async with open_pool(1) as tree:
        (member,) = await idle(tree)
        transact, tries, writer = store._transact, list[object](), tree.supervisor._store

        def fail_once(*args: Any) -> Any:
            tries.append(args)
            if len(tries) == 1:
                raise ValueError("a bug")
            return transact(*args)

        monkeypatch.setattr(store, "_transact", fail_once)
        if is_down:
            writer.tell(store.do(ping))
            while writer.is_alive:
                await trio.lowlevel.checkpoint()
        assert (await tree.supervisor.create(EVERYTHING)).id == member
        assert (writer.incarnation, rows(tree)[member]) == (2, Status.RUNNING)


async def test_a_bug_in_a_pool_costs_no_session_and_no_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pools that follow take over what is there."""
    async with open_pool(2) as tree:
        members, look, looks = await idle(tree), session_pools.SessionPool._look, list[object]()

        async def fail_once(pool: session_pools.SessionPool) -> None:
            looks.append(pool)
            if len(looks) == 1:
                raise ValueError("a bug")
            await look(pool)

        monkeypatch.setattr(session_pools.SessionPool, "_look", fail_once)
        claimed = await tree.supervisor.create(EVERYTHING)

        async def has_begun_anew() -> bool:
            return len(looks) > 1

        await until(has_begun_anew)
        await until_ready(tree, 2)
        assert (await tree.supervisor.get(claimed.id)).status is Status.RUNNING
        assert members == sorted({*await idle(tree), claimed.id} & {*members})
        assert tree.nsinit.torn_down == []


async def test_a_dead_member_takes_no_share_of_the_key_that_it_was_for() -> None:
    """The one session that the key may have is the next member."""
    key = issue(Access.WRITE, quota=Quota(sessions=1)).key
    async with open_pool(2) as tree:
        tree.supervisor.shares.ring.replace([key])
        tree.runners[list(tree.runners)[-1]].is_silent = True
        session = await tree.supervisor.create(SessionSpec(key_id=key.id))
        assert (session.acquire_source, tree.supervisor.shares.usage(key).sessions) == ("pool", 1)


async def test_a_disk_without_room_is_no_failure_of_a_pool() -> None:
    """No member takes of the reserve."""
    async with open_scripted(pool=pool_of(1), disk=DiskSettings(reserve_mb=10**9)) as tree:
        await trio.sleep(0.3)
        pool = await pool_in(tree)
        assert (pool.state, pool.ready, pool.refill_failures, rows(tree)) == ("filling", 0, 0, {})


async def test_a_full_node_is_tried_for_members_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause costs no processor time."""
    async with open_pool(3, server=ServerSettings(pool_sandboxes=0, max_sessions=3)) as tree:
        for _ in range(3):
            await tree.supervisor.create(SessionSpec(user="root"))
        looks, look = list[object](), session_pools.SessionPool._look

        async def count(pool: session_pools.SessionPool) -> None:
            looks.append(pool)
            await look(pool)

        monkeypatch.setattr(session_pools.SessionPool, "_look", count)
        await trio.sleep(0.5)
        assert (await pool_in(tree)).ready == 0
        assert len(looks) < 5


async def test_the_same_idempotency_key_gets_the_same_session() -> None:
    """Also at once."""
    async with open_pool(2) as tree:
        spec = SessionSpec(idempotency_key="k")
        made = []

        async def create() -> None:
            made.append((await tree.supervisor.create(spec)).id)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(create)
            nursery.start_soon(create)
        await create()
        assert len(set(made)) == 1
        assert (await pool_in(tree)).claims == 1
