"""Pools whose members have a process running, over scripted sandboxes: who gets them, and what the process is told."""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import trio

from sandkasten.actors.node import session_pools
from sandkasten.config import Config, ServerSettings
from sandkasten.images.catalog import HOST
from sandkasten.model import EventType, ExecState, ProcessSpec, SessionSpec, Stream, WarmProcess
from tests.actors.test_session_pools import idle, pool_in, pool_of, rows, until_ready
from tests.fakes.nsinit import FakeNsinit
from tests.fakes.runner import Script
from tests.fakes.tree import ScriptedTree, open_scripted
from tests.ground import in_memory
from tests.waiting import patience, until

PROCESS = WarmProcess(ProcessSpec(command="serve", process_id="warm-1"), ready="^ready$")
MINE = SessionSpec(warm="warm-1")
READY = (Stream.STDOUT, b"ready\n")


@asynccontextmanager
async def open_warm(
    size: int = 1, *, outputs: tuple[tuple[Stream, bytes], ...] = (READY,), **changes: Any
) -> AsyncIterator[ScriptedTree]:
    """Run a tree with a pool of sessions that have the process, which writes `outputs` and goes on."""
    settings = {"pool": pool_of(size), **changes}
    script = Script(outputs, hold=trio.Event())
    async with open_scripted(warm={HOST: PROCESS}, scripts={"serve": script}, **settings) as tree:
        yield tree


async def test_a_create_that_asks_for_it_gets_a_session_with_the_process() -> None:
    """The process is ready before there is a member, learns the variables of the create, and is an ordinary one from
    then on. Events tell of it with the session, and not before. A create that asks for no process gets no such
    member."""
    async with open_warm(outputs=()) as tree:

        async def has_begun() -> bool:
            return len(tree.runs) == 1

        await until(has_begun)
        (run,) = tree.runs
        assert (await pool_in(tree)).ready == 0
        run.write(*READY)
        await until_ready(tree, 1)
        (member,) = await idle(tree)
        other = await tree.supervisor.create(SessionSpec())
        assert (other.acquire_source, other.acquire_detail) == ("cold", "pool_mismatch")
        async with tree.supervisor.events(after="0") as events:
            session = await tree.supervisor.create(attrs.evolve(MINE, env={"A": "é"}))
            told = []
            with trio.fail_after(patience()):
                async for event in events:
                    told.append((event.type, event.session_id))
                    if event.type == EventType.PROCESS_STARTED:
                        break
        assert (session.id, session.acquire_source) == (member, "pool")
        assert told == [
            (EventType.SESSION_CREATED, other.id),
            (EventType.SESSION_CREATED, session.id),
            (EventType.PROCESS_STARTED, session.id),
        ]
        assert json.loads(run.stdin) == {"op": "claim", "env": {"A": "é"}}
        (shown,) = await tree.supervisor.execs(session.id)
        assert (shown.exec_id, shown.state) == ("warm-1", ExecState.RUNNING)
        await tree.supervisor.send_stdin(session.id, "warm-1", b"more")

        async def is_taken() -> bool:
            return run.stdin.endswith(b"more")

        await until(is_taken)


async def test_a_pool_without_the_process_serves_creates_that_would_have_it() -> None:
    """The create begins none."""
    async with open_scripted(pool=pool_of(1)) as tree:
        await until_ready(tree, 1)
        session = await tree.supervisor.create(MINE)
        assert (session.acquire_source, tree.runs) == ("pool", [])


async def test_a_member_ends_with_its_process() -> None:
    """The pool makes another, and no event tells of any of it. Without variables, the process of a claimed member is
    told nothing."""
    async with open_warm(2) as tree:
        await until_ready(tree, 2)
        tree.runs[0].finish()

        async def is_replaced() -> bool:
            return len(tree.runs) == 3 and (await pool_in(tree)).ready == 2

        await until(is_replaced)
        session = await tree.supervisor.create(MINE)
        assert session.acquire_source == "pool"
        assert not any(run.stdin for run in tree.runs)
        async with tree.supervisor.events(after="0") as events:
            with trio.fail_after(patience()):
                assert (await anext(aiter(events))).session_id == session.id


async def test_a_process_that_does_not_become_ready_fails_the_refill(monkeypatch: Any) -> None:
    """The pool says why, tries again more and more seldom, and leaves no session behind."""
    monkeypatch.setattr(session_pools, "FIRST_PAUSE_S", 0.005)
    monkeypatch.setattr(session_pools, "MAX_PAUSE_S", 0.02)
    ends = Script([(Stream.STDERR, b"no module\n")], exit_code=1)
    async with open_scripted(warm={HOST: PROCESS}, scripts={"serve": ends}, pool=pool_of(1)) as tree:

        async def is_failing() -> bool:
            return (await pool_in(tree)).state == "failing"

        await until(is_failing)
        assert "process warm-1 did not become ready: no module" in str((await pool_in(tree)).error)
        assert (await tree.supervisor.create(MINE)).acquire_detail == "pool_empty"
        tree.scripts["serve"] = Script([READY], hold=trio.Event())
        await until_ready(tree, 1)
        assert sorted(rows(tree).values()) == ["pool_idle", "running"]


async def test_a_member_that_is_not_ready_makes_room_for_a_create() -> None:
    """As one that is; this is no failure of the pool."""
    async with open_warm(outputs=(), server=ServerSettings(pool_sandboxes=0, max_sessions=1)) as tree:

        async def has_begun() -> bool:
            return len(tree.runs) == 1

        await until(has_begun)
        session = await tree.supervisor.create(SessionSpec())
        pool = await pool_in(tree)
        assert (session.acquire_source, pool.ready, pool.refill_failures) == ("cold", 0, 0)
        assert rows(tree) == {session.id: "running"}


async def test_the_next_daemon_has_members_with_their_processes(nursery: trio.Nursery) -> None:
    """One whose process was ready is handed out as before; one whose process was about to be is waited for. A process
    of another program, or none at all, and the members are replaced."""
    with tempfile.TemporaryDirectory(prefix="sandkasten-test-", dir=in_memory()) as directory:
        config = Config(
            data_dir=Path(directory) / "data",
            server=ServerSettings(pool_sandboxes=0),
            sessions_on_stop="keep",
            pool=pool_of(2),
        )
        nsinit, script = FakeNsinit(config.data_dir, {}, nursery), Script(hold=trio.Event())
        async with open_scripted(config, nsinit=nsinit, scripts={"serve": script}, warm={HOST: PROCESS}) as tree:

            async def has_begun(count: int) -> bool:
                return len(tree.runs) == count

            await until(lambda: has_begun(1))
            tree.runs[0].write(*READY)
            await until(lambda: has_begun(2))
            members = {each for each, status in rows(tree).items() if status == "pool_idle"}
        async with open_scripted(config, nsinit=nsinit, warm={HOST: PROCESS}) as tree:
            await until_ready(tree, 1)
            tree.runs[1].write(*READY)
            await until_ready(tree, 2)
            assert (set(await idle(tree)), len(tree.runs)) == (members, 2)
            session = await tree.supervisor.create(attrs.evolve(MINE, env={"A": "1"}))
            assert (session.acquire_source, session.id in members) == ("pool", True)
            told = [run for run in tree.runs[:2] if run.stdin]
            assert [json.loads(run.stdin)["env"] for run in told] == [{"A": "1"}]
            (left,) = members - {session.id}
        other = attrs.evolve(PROCESS, spec=attrs.evolve(PROCESS.spec, env={"B": "2"}))
        last = attrs.evolve(config, sessions_on_stop="destroy")
        script = Script([READY], hold=trio.Event())
        async with open_scripted(last, nsinit=nsinit, scripts={"serve": script}, warm={HOST: other}) as tree:
            await until_ready(tree, 2)
            assert left in nsinit.torn_down
        nursery.cancel_scope.cancel()
