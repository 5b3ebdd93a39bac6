"""Sessions, runs and pauses of the whole tree over scripted sandboxes: deaths, refusals, time standing still, restarts.

Each is a claim about the daemon alone: what it asks of nsinit and of PID 1, and what callers are told.
"""

from __future__ import annotations

import errno
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from nsinit.wire import protocol
from runner.wire import protocol as runner_protocol
from sandkasten import errors
from sandkasten.actors.node.sessions import Refuse
from sandkasten.config import Config, ServerSettings
from sandkasten.model import (
    Cause,
    EndReason,
    ExecSpec,
    ExecState,
    OnDisconnect,
    PauseSpec,
    SessionSpec,
    Status,
    Stream,
)
from tests.fakes.nsinit import FakeNsinit
from tests.fakes.runner import Script
from tests.fakes.tree import ScriptedTree, open_scripted
from tests.ground import in_memory
from tests.waiting import patience, until

FOREVER = "sleep 1000"


@pytest.fixture
async def tree() -> AsyncIterator[ScriptedTree]:
    async with open_scripted() as opened:
        opened.scripts[FOREVER] = Script([(Stream.STDOUT, b"begun\n")], hold=trio.Event())
        yield opened


@pytest.fixture
async def session_id(tree: ScriptedTree) -> str:
    return (await tree.supervisor.create(SessionSpec())).id


def asked(tree: ScriptedTree, kind: type) -> list[object]:
    """Return the requests of a kind that nsinit got."""
    return [request for request in tree.nsinit.requests if isinstance(request, kind)]


async def test_a_death_of_the_sandbox_is_told_to_all_who_wait(tree: ScriptedTree, session_id: str) -> None:
    """The run and the session have ended; nsinit tears down the remains."""
    async with tree.supervisor.open_exec(session_id, ExecSpec(FOREVER)) as stream:
        with trio.fail_after(patience()):
            assert (await anext(aiter(stream))).data == b"begun\n"
            await tree.nsinit.kill(session_id)
            end = await stream.wait_end()
            ended = await tree.supervisor.wait_ended(session_id)
    assert end.cause is Cause.SANDBOX_DIED
    assert (ended.status, ended.end_reason) == (Status.CRASHED, EndReason.CRASHED)
    assert tree.nsinit.torn_down == [session_id]


async def test_a_runner_that_breaks_the_protocol_ends_its_session(tree: ScriptedTree, session_id: str) -> None:
    """No other session ends."""
    other = await tree.supervisor.create(SessionSpec())
    tree.scripts["hostile"] = Script(breaks_protocol=True)
    with trio.fail_after(patience()), pytest.raises(errors.SandkastenError):
        await tree.supervisor.exec(session_id, ExecSpec("hostile"))
    with trio.fail_after(patience()):
        ended = await tree.supervisor.wait_ended(session_id)
    assert ended.status is Status.CRASHED
    assert (await tree.supervisor.exec(other.id, ExecSpec("true"))).end.exit_code == 0


async def test_a_build_that_fails_leaves_no_session(tree: ScriptedTree) -> None:
    """The next create goes well."""
    tree.nsinit.refusals[protocol.Build] = protocol.Failed(0, "mount", "/x", errno.ENOMEM, "no")
    with pytest.raises(errors.SandkastenError):
        await tree.supervisor.create(SessionSpec())
    assert await tree.supervisor.list() == []
    assert (await tree.supervisor.create(SessionSpec())).status is Status.RUNNING


async def test_a_pause_freezes_and_its_end_tells_how_long(tree: ScriptedTree, session_id: str) -> None:
    """nsinit freezes the processes, and again if asked again; PID 1 is told what its time limits missed."""
    await tree.supervisor.pause(session_id)
    assert (await tree.supervisor.pause(session_id)).status is Status.PAUSED
    assert tree.nsinit.frozen == {session_id}
    await trio.sleep(0.05)
    assert (await tree.supervisor.resume(session_id)).status is Status.RUNNING
    assert tree.nsinit.frozen == set()
    assert [getattr(each, "frozen", None) for each in asked(tree, protocol.SetFrozen)] == [True, True, False]
    thawed = [each for each in tree.runners[session_id].requests if isinstance(each, runner_protocol.Thawed)]
    assert [each.frozen_ms >= 50 for each in thawed] == [True]


@pytest.mark.parametrize("wakes", [True, False])
async def test_a_command_for_a_paused_session_wakes_it_or_is_refused(
    tree: ScriptedTree, session_id: str, wakes: bool
) -> None:
    """As the pause said."""
    await tree.supervisor.pause(session_id, PauseSpec(auto_resume=wakes))
    if wakes:
        assert (await tree.supervisor.exec(session_id, ExecSpec("true"))).end.exit_code == 0
    else:
        with pytest.raises(errors.SandkastenError):
            await tree.supervisor.exec(session_id, ExecSpec("true"))
    status = (await tree.supervisor.get(session_id)).status
    assert status is (Status.RUNNING if wakes else Status.PAUSED)
    assert tree.nsinit.frozen == (set() if wakes else {session_id})


async def test_a_freezer_that_fails_leaves_the_session_running(tree: ScriptedTree, session_id: str) -> None:
    """The caller is told; commands go on."""
    tree.nsinit.refusals[protocol.SetFrozen] = protocol.Failed(0, "freeze", "", errno.ETIMEDOUT, "not all stopped")
    with pytest.raises(errors.SandkastenError):
        await tree.supervisor.pause(session_id)
    assert (await tree.supervisor.get(session_id)).status is Status.RUNNING
    assert (await tree.supervisor.exec(session_id, ExecSpec("true"))).end.exit_code == 0


async def test_commands_of_one_shell_run_in_turn(tree: ScriptedTree, session_id: str) -> None:
    """The second is queued until the first has ended, and can be cancelled before its turn."""
    ends: list[Cause] = []

    async def run(exec_id: str) -> None:
        ends.append((await tree.supervisor.exec(session_id, ExecSpec(FOREVER, exec_id=exec_id))).end.cause)

    async def is_queued() -> bool:
        return [each.state for each in await tree.supervisor.execs(session_id)] == [ExecState.RUNNING, ExecState.QUEUED]

    async def has_ended() -> bool:
        return bool(ends)

    with trio.fail_after(patience()):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, "first")
            await tree.run_opened.wait()
            nursery.start_soon(run, "second")
            await until(is_queued)
            await tree.supervisor.cancel_exec(session_id, "second")
            await until(has_ended)
            tree.runs[0].finish()
    assert ends == [Cause.CANCELLED, Cause.EXITED]


async def test_a_run_outlives_its_daemon() -> None:
    """The next daemon adopts the session and goes on with the run behind the output that is known."""
    with tempfile.TemporaryDirectory(prefix="sandkasten-test-", dir=in_memory()) as directory:
        config = Config(
            data_dir=Path(directory) / "data", server=ServerSettings(pool_sandboxes=0), sessions_on_stop="keep"
        )
        async with trio.open_nursery() as nursery:
            nsinit = FakeNsinit(config.data_dir, {}, nursery)
            nsinit.scripts[FOREVER] = Script([(Stream.STDOUT, b"begun\n")], hold=trio.Event())
            async with open_scripted(config, nsinit=nsinit) as tree:
                session = await tree.supervisor.create(SessionSpec())
                spec = ExecSpec(FOREVER, exec_id="e-1")
                async with tree.supervisor.open_exec(session.id, spec, on_disconnect=OnDisconnect.DETACH) as stream:
                    assert (await anext(aiter(stream))).data == b"begun\n"
            (run,) = nsinit.runs
            assert not run.cancelled.is_set()
            run.write(Stream.STDOUT, b"meanwhile\n")
            async with open_scripted(config, nsinit=nsinit) as tree:
                run.finish(exit_code=7)
                result = await tree.supervisor.exec(session.id, spec)
                assert (result.end.exit_code, result.stdout) == (7, b"begun\nmeanwhile\n")
                assert nsinit.torn_down == []
                await tree.supervisor.destroy(session.id)
            nursery.cancel_scope.cancel()


async def test_a_create_waits_for_a_catalogue_that_restarts(tree: ScriptedTree) -> None:
    """A message that nobody knows is a bug, which ends the actor of the images; the next create meets none."""
    images = tree.supervisor._images
    images.tell(Refuse())
    while images.is_alive:
        await trio.lowlevel.checkpoint()
    with trio.fail_after(patience()):
        assert (await tree.supervisor.create(SessionSpec())).status is Status.RUNNING
