"""The end of a session tells its processes first, and gives them a bounded time."""

from __future__ import annotations

import os
from pathlib import Path

import attrs
import pytest
import trio

from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import open_supervisor
from sandkasten.config import Config, Defaults
from sandkasten.errors import InvalidRequest
from sandkasten.model import ExecSpec, ProcessSpec, Session, SessionSpec, Status, TerminalSpec
from tests.kernel.processes import init_pid
from tests.waiting import patience, until

WORKSPACE = "flushed"
FLUSHES = """
import os, signal, sys, time
def flush(number, frame):
    time.sleep(0.2)
    with open(f"/workspace/{sys.argv[1]}", "w") as file:
        file.write("all of it")
    sys.exit(0)
signal.signal(signal.SIGTERM, flush)
open(f"/tmp/{sys.argv[1]}", "w")
while True:
    time.sleep(1000)
"""
GRACE_MS = 10_000


async def _create(supervisor: LocalSupervisor, grace_ms: int | None = GRACE_MS, ttl_s: float | None = None) -> Session:
    spec = SessionSpec(workspace_id=WORKSPACE, stop_grace_ms=grace_ms, ttl_s=ttl_s)
    session = await supervisor.create(spec)
    await supervisor.exec(session.id, ExecSpec(f"cat > /tmp/flushes.py <<'END'\n{FLUSHES}\nEND"))
    return session


async def _wait_begun(supervisor: LocalSupervisor, session: Session, *names: str) -> None:
    found = " && ".join(f"test -e /tmp/{name}" for name in names)

    async def have_begun() -> bool:
        return (await supervisor.exec(session.id, ExecSpec(found, stateless=True))).end.exit_code == 0

    await until(have_begun)


def _flushed(config: Config) -> set[str]:
    directory = Path(config.data_dir) / "workspaces" / WORKSPACE
    return {each.name for each in directory.rglob("*") if each.is_file() and each.read_text() == "all of it"}


async def test_every_process_is_told_and_may_flush(config: Config, supervisor: LocalSupervisor) -> None:
    """One behind a command, one of a program, one in a terminal, one stopped, and one that left its session and
    lost its parent. The end takes less than its bound; an interactive shell does not hold it up."""
    session = await _create(supervisor)
    run = "python3 /tmp/flushes.py"
    await supervisor.exec(session.id, ExecSpec(f"{run} behind & (setsid {run} detached &) ; {run} stopped & last=$!"))
    await supervisor.start_process(session.id, ProcessSpec(argv=("python3", "/tmp/flushes.py", "program")))
    async with supervisor.open_terminal(session.id, TerminalSpec()) as viewer:
        await viewer.send(f"{run} terminal\n".encode())
        names = ("behind", "detached", "stopped", "program", "terminal")
        await _wait_begun(supervisor, session, *names)
        await supervisor.exec(session.id, ExecSpec("kill -STOP $last"))
        began = trio.current_time()
        ended = await supervisor.destroy(session.id)
    assert ended.status is Status.DESTROYED
    assert trio.current_time() - began < GRACE_MS / 1000 - 1
    assert _flushed(config) == set(names)


async def test_a_process_that_ignores_the_signal_is_killed_when_the_time_is_over(
    config: Config, supervisor: LocalSupervisor
) -> None:
    """Not before; one that ends in good order beside it may finish."""
    session = await _create(supervisor, 700)
    await supervisor.exec(session.id, ExecSpec("trap '' TERM HUP; sleep 1000 & trap - TERM HUP"))
    await supervisor.exec(session.id, ExecSpec("python3 /tmp/flushes.py beside &"))
    await _wait_begun(supervisor, session, "beside")
    pid = init_pid(session)
    began = trio.current_time()
    await supervisor.destroy(session.id)
    assert trio.current_time() - began >= 0.7
    assert not os.path.exists(f"/proc/{pid}")  # noqa: ASYNC240
    assert _flushed(config) == {"beside"}


async def test_a_paused_session_is_told_as_it_goes_on(config: Config, supervisor: LocalSupervisor) -> None:
    """Nothing else happens first: the signals are there when the processes are thawed."""
    session = await _create(supervisor)
    await supervisor.exec(session.id, ExecSpec("python3 /tmp/flushes.py paused &"))
    await _wait_begun(supervisor, session, "paused")
    await supervisor.pause(session.id)
    assert (await supervisor.destroy(session.id)).status is Status.DESTROYED
    assert _flushed(config) == {"paused"}


async def test_a_session_that_expires_tells_its_processes(config: Config, supervisor: LocalSupervisor) -> None:
    """As one that is destroyed does."""
    session = await _create(supervisor, ttl_s=3)
    await supervisor.exec(session.id, ExecSpec("python3 /tmp/flushes.py expired &"))
    await _wait_begun(supervisor, session, "expired")
    with trio.fail_after(patience(20)):
        assert (await supervisor.wait_ended(session.id)).status is Status.EXPIRED
    assert _flushed(config) == {"expired"}


async def test_the_end_of_the_daemon_tells_them_too(config: Config) -> None:
    """The operator's default holds for a session that asks for nothing."""
    config = attrs.evolve(config, defaults=Defaults(stop_grace_ms=GRACE_MS))
    async with open_supervisor(config) as supervisor:
        session = await _create(supervisor, None)
        assert session.options.stop_grace_ms == GRACE_MS
        await supervisor.exec(session.id, ExecSpec("python3 /tmp/flushes.py daemon &"))
        await _wait_begun(supervisor, session, "daemon")
    assert _flushed(config) == {"daemon"}


async def test_a_session_ends_at_once_by_default(config: Config, supervisor: LocalSupervisor) -> None:
    """Nothing is told; more than ten seconds are refused."""
    with pytest.raises(InvalidRequest) as refused:
        await supervisor.create(SessionSpec(stop_grace_ms=10_001))
    assert list(refused.value.details) == ["stop_grace_ms"]
    session = await _create(supervisor, None)
    await supervisor.exec(session.id, ExecSpec("python3 /tmp/flushes.py killed &"))
    await _wait_begun(supervisor, session, "killed")
    await supervisor.destroy(session.id)
    assert _flushed(config) == set()


async def test_a_second_destroy_during_the_grace_waits_for_the_end(supervisor: LocalSupervisor) -> None:
    """Both are answered with the session's final state."""
    session = await _create(supervisor, 500)
    await supervisor.exec(session.id, ExecSpec("trap '' TERM HUP; sleep 1000 & trap - TERM HUP"))
    ended: list[Status] = []

    async def destroy() -> None:
        ended.append((await supervisor.destroy(session.id)).status)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(destroy)
        nursery.start_soon(destroy)
    assert ended == [Status.DESTROYED, Status.DESTROYED]
