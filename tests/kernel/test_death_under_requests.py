"""PID 1 is killed while requests are under way in its sandbox: whatever they are, all are told the same truth."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from sandkasten.actors.node import sessions
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import open_supervisor
from sandkasten.config import Config
from sandkasten.errors import Capacity, SandkastenError, SessionExpired
from sandkasten.model import (
    ExecSpec,
    OnDisconnect,
    ProcessSpec,
    Session,
    SessionPatch,
    SessionSpec,
    ShellSpec,
    TerminalSize,
    TerminalSpec,
    WaitFor,
)
from tests.file_requests import listed, looked_at, removed
from tests.kernel.processes import init_pid, init_pids, stop_serving
from tests.waiting import patience, until

MANY_BYTES = 1 << 20
"""More than the sockets on the way hold."""

Stop = Callable[[], None]
Request = Callable[[LocalSupervisor, str, Stop], Awaitable[object]]
"""Makes a request in a session. It calls `Stop` when all is prepared: PID 1 answers nothing from then on."""


async def _write(supervisor: LocalSupervisor, session_id: str, stop: Stop) -> None:
    async with supervisor.files(session_id).open_write("half") as writer:
        await writer.send(b"x")
        stop()
        await writer.send(bytes(MANY_BYTES))


async def _commit(supervisor: LocalSupervisor, session_id: str, stop: Stop) -> None:
    async with supervisor.files(session_id).open_write("whole") as writer:
        stop()
        await writer.commit()


async def _read(supervisor: LocalSupervisor, session_id: str, stop: Stop) -> None:
    await supervisor.exec(session_id, ExecSpec(f"head -c {2 * MANY_BYTES} /dev/zero >big"))
    async with supervisor.files(session_id).open_read("big", max_bytes=2 * MANY_BYTES) as reader:
        stop()
        async for _ in reader:
            pass


async def _begin_read(supervisor: LocalSupervisor, session_id: str, stop: Stop) -> None:
    stop()
    async with supervisor.files(session_id).open_read("/etc/passwd", max_bytes=1):
        pass


async def _command(supervisor: LocalSupervisor, session_id: str, stop: Stop) -> None:
    stop()
    await supervisor.exec(session_id, ExecSpec("true"))


async def _process(supervisor: LocalSupervisor, session_id: str, stop: Stop) -> None:
    stop()
    await supervisor.start_process(session_id, ProcessSpec(argv=("true",)))


async def _stdin(supervisor: LocalSupervisor, session_id: str, stop: Stop) -> None:
    run = await supervisor.start_process(session_id, ProcessSpec(argv=("sleep", "1000")))
    stop()
    await supervisor.send_stdin(session_id, run.exec_id, bytes(MANY_BYTES))


async def _signal(supervisor: LocalSupervisor, session_id: str, stop: Stop) -> None:
    run = await supervisor.start_process(session_id, ProcessSpec(argv=("sleep", "1000")))
    stop()
    await supervisor.signal_exec(session_id, run.exec_id, signal.SIGWINCH)


async def _resize(supervisor: LocalSupervisor, session_id: str, stop: Stop) -> None:
    run = await supervisor.start_process(session_id, ProcessSpec(argv=("sleep", "1000"), terminal=TerminalSize()))
    stop()
    await supervisor.resize_exec(session_id, run.exec_id, TerminalSize(90, 20))


async def _open_shell(supervisor: LocalSupervisor, session_id: str, stop: Stop) -> None:
    stop()
    await supervisor.open_shell(session_id, ShellSpec("other"))


async def _close_shell(supervisor: LocalSupervisor, session_id: str, stop: Stop) -> None:
    await supervisor.open_shell(session_id, ShellSpec("other"))
    stop()
    await supervisor.close_shell(session_id, "other")


async def _change_env(supervisor: LocalSupervisor, session_id: str, stop: Stop) -> None:
    stop()
    await supervisor.update(session_id, SessionPatch(env={"A": "b"}))


async def _take_over(supervisor: LocalSupervisor, session_id: str, stop: Stop) -> None:
    async with supervisor.open_terminal(session_id, TerminalSpec(shell="default")) as viewer:
        stop()
        await viewer.take_over()


async def _running(supervisor: LocalSupervisor, session_id: str, stop: Stop) -> object:
    async with supervisor.open_exec(session_id, ExecSpec("echo on; sleep 1000")) as run:
        await anext(aiter(run))
        stop()
        return (await run.wait_end()).cause


async def _cancelled(supervisor: LocalSupervisor, session_id: str, stop: Stop) -> object:
    detached = supervisor.open_exec(session_id, ExecSpec("sleep 1000", exec_id="a"), on_disconnect=OnDisconnect.DETACH)
    async with detached:
        stop()
    end = (await supervisor.cancel_exec(session_id, "a")).end
    return end and end.cause


async def _waited_for(supervisor: LocalSupervisor, session_id: str, stop: Stop) -> object:
    run = await supervisor.start_process(session_id, ProcessSpec(argv=("sleep", "1000")))
    stop()
    waited = await supervisor.wait_process(session_id, run.exec_id, WaitFor(exit=True), timeout_s=60)
    return waited.run.end and waited.run.end.cause


async def _terminal(supervisor: LocalSupervisor, session_id: str, stop: Stop) -> object:
    async with supervisor.open_terminal(session_id, TerminalSpec()) as viewer:
        screen = aiter(viewer)
        await anext(screen)
        stop()
        async for _ in screen:
            pass
        return (await viewer.wait_end()).cause


NOTHING_BEGUN: tuple[Request, ...] = (
    *(_write, _commit, _read, _begin_read),
    *(_command, _process, _stdin, _signal, _resize),
    *(_open_shell, _close_shell, _change_env, _take_over),
)
HAS_BEGUN: tuple[Request, ...] = (_running, _cancelled, _waited_for, _terminal)


async def _outcome(request: Request, supervisor: LocalSupervisor, session_id: str, stop: Stop) -> str:
    try:
        return str(await request(supervisor, session_id, stop))
    except SessionExpired as error:
        return f"{error.details['status']}: {error.details['reason']}"
    except SandkastenError as error:
        return repr(error)


async def test_every_kind_of_request_is_told_that_the_session_has_ended(supervisor: LocalSupervisor) -> None:
    """Requests under way when PID 1 is killed fail with the session's end, not with an internal error; runs end with
    the sandbox. PID 1 is stopped first, so that each request is under way.
    """
    outcomes: dict[str, str] = {}
    stopped: dict[str, int] = {}

    async def make(request: Request, session: Session) -> None:
        pid = init_pid(session)

        def stop() -> None:
            stop_serving(pid)
            stopped[request.__name__] = pid

        outcomes[request.__name__] = await _outcome(request, supervisor, session.id, stop)

    with trio.fail_after(patience(60)):
        async with trio.open_nursery() as nursery:
            for request in (*NOTHING_BEGUN, *HAS_BEGUN):
                nursery.start_soon(make, request, await supervisor.create(SessionSpec()))
            while len(stopped) < len(NOTHING_BEGUN) + len(HAS_BEGUN):
                await trio.testing.wait_all_tasks_blocked(0.05)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert outcomes == {}
            for pid in stopped.values():
                os.kill(pid, signal.SIGKILL)
    told = dict.fromkeys([each.__name__ for each in NOTHING_BEGUN], "destroying: its init process ended")
    ended = dict.fromkeys([each.__name__ for each in HAS_BEGUN], "sandbox_died")
    assert outcomes == told | ended


async def test_a_file_that_the_end_of_the_daemon_cuts_off_may_be_asked_for_again(config: Config) -> None:
    """A file transfer cut off by the daemon's end fails as retryable, as the session goes on, and not as an ended
    session.
    """
    async with open_supervisor(config) as supervisor:
        session = await supervisor.create(SessionSpec())

        async def write() -> None:
            async with supervisor.files(session.id).open_write("half") as writer:
                await writer.send(b"x")
                await supervisor._sessions.ask(sessions.LeaveAll())
                await writer.commit()

        with pytest.raises(Capacity):
            await write()


async def test_a_workspace_whose_helper_is_killed_is_reached_by_another_one(supervisor: LocalSupervisor) -> None:
    """Each request under way may be made again, and then it works."""

    async def read() -> bytes:
        async with supervisor.workspace_files("files").open_read("file", max_bytes=MANY_BYTES) as reader:
            return b"".join([piece async for piece in reader])

    async with supervisor.workspace_files("files", make=True).open_write("file") as writer:
        await writer.send(b"kept")
        await writer.commit()
    (pid,) = init_pids()
    stop_serving(pid)
    requests: tuple[Callable[[], Awaitable[object]], ...] = (
        read,
        lambda: listed(supervisor.workspace_files("files")),
        lambda: looked_at(supervisor.workspace_files("files"), "file"),
        lambda: removed(supervisor.workspace_files("files"), "file"),
    )
    outcomes: list[type[Exception]] = []

    async def make(request: Callable[[], Awaitable[object]]) -> None:
        with pytest.raises(SandkastenError) as failed:
            await request()
        outcomes.append(failed.type)

    async with trio.open_nursery() as nursery:
        for request in requests:
            nursery.start_soon(make, request)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert outcomes == []
        os.kill(pid, signal.SIGKILL)
    assert outcomes == [Capacity] * len(requests)

    async def can_be_read() -> bool:
        with contextlib.suppress(Capacity):  # the end of the helper may not be known yet
            return await read() == b"kept"
        return False

    await until(can_be_read)
