"""Sessions of an earlier daemon are taken over behind the start, and one that is asked for at once."""

from __future__ import annotations

import sqlite3
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import pytest
import trio
import trio.testing

from nsinit.wire import protocol
from runner.wire.protocol import FILES_VERSION, OLDEST_VERSION, PROTOCOL_VERSION
from sandkasten.actors.core import Ref
from sandkasten.actors.session.birth import AdoptionTurns
from sandkasten.config import Config, ServerSettings
from sandkasten.errors import Capacity, Conflict, SessionExpired
from sandkasten.model import EndReason, ExecSpec, SessionSpec, Status
from sandkasten.store import sessions
from sandkasten.supervisor import Files
from tests.fakes.nsinit import FakeNsinit
from tests.fakes.tree import ScriptedTree, open_scripted
from tests.file_requests import listed, looked_at, written
from tests.ground import in_memory
from tests.waiting import until

SLOW = 4
"""Adoptions that go on at a time while nobody asks."""

COUNT = SLOW + 4


@attrs.define
class Left:
    """Sessions that a stopped daemon left, whose sandboxes nsinit does not hand over before `gates` open."""

    config: Config
    nsinit: FakeNsinit
    ids: list[str]

    @property
    def gates(self) -> dict[str, trio.Event]:
        return self.nsinit.adoption_gates

    def open_gates(self) -> None:
        for gate in self.gates.values():
            gate.set()

    @property
    def adopted(self) -> list[str]:
        """Sessions whose adoption has begun, in order."""
        return [each.session_id for each in self.nsinit.requests if isinstance(each, protocol.Adopt)]

    async def until_adopting(self, count: int) -> None:
        """Wait until so many adoptions have begun."""

        async def has_begun() -> bool:
            return len(self.adopted) >= count

        await until(has_begun)

    async def until_torn_down(self, count: int) -> None:
        """Wait until so many sandboxes are gone."""

        async def are_gone() -> bool:
            return len(self.nsinit.torn_down) >= count

        await until(are_gone)

    @asynccontextmanager
    async def again(self) -> AsyncIterator[ScriptedTree]:
        """Start the next daemon."""
        async with open_scripted(self.config, nsinit=self.nsinit) as tree:
            yield tree


@pytest.fixture
async def left(nursery: trio.Nursery) -> AsyncIterator[Left]:
    with tempfile.TemporaryDirectory(prefix="sandkasten-test-", dir=in_memory()) as directory:
        server = ServerSettings(pool_sandboxes=0, max_sessions=COUNT)
        config = Config(data_dir=Path(directory) / "data", server=server, sessions_on_stop="keep")
        nsinit = FakeNsinit(config.data_dir, {}, nursery)
        async with open_scripted(config, nsinit=nsinit) as tree:
            # The first has the shortest time to live, so that the order of ids is the order of leases.
            made = [await tree.supervisor.create(SessionSpec(ttl_s=1000.0 + number)) for number in range(COUNT)]
        ids = [each.id for each in made]
        nsinit.requests.clear()
        found = Left(config, nsinit, ids)
        found.gates.update({each: trio.Event() for each in ids})
        yield found
        found.open_gates()
        async with open_scripted(attrs.evolve(config, sessions_on_stop="destroy"), nsinit=nsinit):
            pass
        nursery.cancel_scope.cancel()


async def test_a_session_that_is_asked_for_is_adopted_before_its_turn(left: Left) -> None:
    """The first request of a new daemon waits for its own session alone."""
    async with left.again() as tree:
        await left.until_adopting(SLOW)
        assert set(left.adopted) == set(left.ids[:SLOW])
        wanted = left.ids[-1]
        left.gates[wanted].set()
        assert (await tree.supervisor.exec(wanted, ExecSpec(":"))).end.exit_code == 0
        assert set(left.adopted) == {*left.ids[:SLOW], wanted}
        left.open_gates()
        await left.until_adopting(COUNT)
        assert (await tree.supervisor.exec(left.ids[0], ExecSpec(":"))).end.exit_code == 0


async def test_sessions_that_wait_are_listed_found_and_counted(left: Left) -> None:
    """Each is what its record says, and takes its place at admission."""
    async with left.again() as tree:
        listed = await tree.supervisor.list()
        assert {each.id: each.status for each in listed} == dict.fromkeys(left.ids, Status.RUNNING)
        assert (await tree.supervisor.get(left.ids[-1])).status is Status.RUNNING
        assert (await tree.supervisor.capacity()).committed.sessions == COUNT
        with pytest.raises(Capacity) as refused:
            await tree.supervisor.create(SessionSpec())
        assert refused.value.details["bound"] == "server.max_sessions"
        assert await tree.supervisor.sweep() == 0
        assert left.nsinit.torn_down == []
        left.open_gates()


async def test_a_sweep_reads_no_record_of_a_session_that_has_its_actor(
    left: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A minute's sweep beside a thousand sessions costs what their ids do."""
    read: list[object] = []
    of_row = sessions._from_row

    def counted(row: sqlite3.Row) -> sessions.SessionRecord:
        read.append(row)
        return of_row(row)

    monkeypatch.setattr(sessions, "_from_row", counted)
    async with left.again() as tree:
        left.open_gates()
        await left.until_adopting(COUNT)
        assert len(read) >= COUNT
        read.clear()
        assert await tree.supervisor.sweep() == 0
        assert read == []


async def test_a_session_that_waits_can_be_ended(left: Left) -> None:
    """The end is recorded as any other, and no other session waits for it."""
    async with left.again() as tree:
        wanted = left.ids[-1]
        left.gates[wanted].set()
        ended = await tree.supervisor.destroy(wanted)
        assert (ended.status, left.nsinit.torn_down) == (Status.DESTROYED, [wanted])
        left.open_gates()


async def test_a_lease_that_ended_meanwhile_is_not_renewed_by_a_request(
    left: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that waited for the adoption gets the answer of an expired session."""
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 2000.0)
    async with left.again() as tree:
        left.open_gates()
        with pytest.raises(SessionExpired):
            await tree.supervisor.exec(left.ids[-1], ExecSpec(":"))
        await left.until_torn_down(COUNT)
        ended = await tree.supervisor.list(ended=True)
    assert {each.end_reason for each in ended} == {EndReason.IDLE}


async def test_a_daemon_that_stops_before_it_adopted_leaves_everything(left: Left) -> None:
    """The next one finds the runs of a session that was never adopted between."""
    left.open_gates()
    async with left.again() as tree:
        await tree.supervisor.exec(left.ids[-1], ExecSpec("echo x", exec_id="mine"))
    left.nsinit.requests.clear()
    left.gates.update({each: trio.Event() for each in left.ids})
    async with left.again():
        await left.until_adopting(SLOW)
        assert left.ids[-1] not in left.adopted
    left.open_gates()
    async with left.again() as tree:
        infos = await tree.supervisor.execs(left.ids[-1])
        assert [each.exec_id for each in infos] == ["mine"]
    assert left.nsinit.torn_down == []


async def test_turns_are_few_and_those_that_are_called_come_first(nursery: trio.Nursery) -> None:
    """A member of a pool waits for nothing. A session that gives up waiting leaves its turn to others."""
    turns, refs, done = AdoptionTurns(), [Ref(str(number)) for number in range(SLOW + 3)], trio.Event()
    begun: list[Ref] = []
    scopes = {ref: trio.CancelScope() for ref in refs}

    async def adopt(ref: Ref) -> None:
        with scopes[ref]:
            async with turns.turn(ref):
                begun.append(ref)
                await done.wait()

    for ref in refs:
        turns.queue(ref, is_member=ref is refs[0])
        nursery.start_soon(adopt, ref)
    await trio.testing.wait_all_tasks_blocked()
    assert begun == [refs[0]]
    turns.begin()
    await trio.testing.wait_all_tasks_blocked()
    assert set(begun) == set(refs[:SLOW])
    refs[-1]._note_message()
    await trio.testing.wait_all_tasks_blocked()
    assert set(begun) == {*refs[:SLOW], refs[-1]}
    scopes[refs[SLOW]].cancel()
    scopes[refs[0]].cancel()
    scopes[refs[1]].cancel()
    await trio.testing.wait_all_tasks_blocked()
    assert set(begun) == {*refs[:SLOW], refs[-1], refs[SLOW + 1]}
    done.set()


async def test_a_first_request_comes_before_all_that_nobody_waits_for(left: Left) -> None:
    """Requests that waited for the start have the daemon and nsinit for themselves."""
    left.open_gates()
    async with left.again() as tree:
        await tree.supervisor.exec(left.ids[-1], ExecSpec(":"))
        assert left.adopted[0] == left.ids[-1]
        await left.until_adopting(COUNT)


@pytest.mark.parametrize("version", [OLDEST_VERSION, FILES_VERSION - 1, FILES_VERSION, PROTOCOL_VERSION])
async def test_a_pid_1_of_an_earlier_version_still_gives_and_takes_files(nursery: trio.Nursery, version: int) -> None:
    """Whole ones, if it is older than the requests for files; all others are refused then, and say why."""
    with tempfile.TemporaryDirectory(prefix="sandkasten-test-", dir=in_memory()) as directory:
        config = Config(data_dir=Path(directory) / "data", server=ServerSettings(pool_sandboxes=0))
        config = attrs.evolve(config, sessions_on_stop="keep")
        nsinit = FakeNsinit(config.data_dir, {}, nursery)
        async with open_scripted(config, nsinit=nsinit) as tree:
            session_id = (await tree.supervisor.create(SessionSpec())).id
            tree.runner.version = version
        async with open_scripted(config, nsinit=nsinit) as tree:
            files = tree.supervisor.files(session_id)
            assert await written(files, "f", b"0123456789") == "/workspace/f"
            async with files.open_read("f", max_bytes=4) as reader:
                assert (reader.head.size_bytes, reader.head.truncated) == (10, True)
                assert b"".join([piece async for piece in reader]) == b"0123"
            refusals = []
            for ask in (lambda: listed(files), lambda: looked_at(files, "f"), lambda: with_mode(files)):
                try:
                    await ask()
                except Conflict as refused:
                    refusals.append(str(refused))
            is_old = version < FILES_VERSION
            assert refusals == ["this session began before an update of the daemon: it takes and gives whole files"] * (
                3 * is_old
            )
            await tree.supervisor.destroy(session_id)


async def with_mode(files: Files) -> None:
    async with files.open_write("f", mode=0o600) as writer:
        await writer.commit()
