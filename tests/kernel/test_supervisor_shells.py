"""Named shells on the real kernel: each its own directory, variables and process tree, beside the default one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import attrs
import pytest
import trio

from sandkasten.actors.node import creating
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import open_supervisor
from sandkasten.config import Config
from sandkasten.errors import (
    Capacity,
    Conflict,
    InvalidRequest,
    SandboxError,
    SandkastenError,
    SessionExpired,
    ShellFailed,
    ShellNotFound,
)
from sandkasten.model import Cause, ExecResult, ExecSpec, FileRules, SessionSpec, ShellSpec, Status
from tests.waiting import patience, until

NAMES = ("default", "second")
_LIMIT_MS = 500
"""Time that a ruined shell is given: it is waited out, whatever the limit."""


@pytest.fixture
async def session_id(supervisor: LocalSupervisor) -> str:
    return (await supervisor.create(SessionSpec(env={"SHARED": "yes"}))).id


async def test_shells_share_files_and_nothing_else(supervisor: LocalSupervisor, session_id: str) -> None:
    """Directory, variables and functions of one are unknown to the other; the session's variables are in both."""
    opened = await supervisor.open_shell(session_id, ShellSpec("second", cwd="/tmp", env={"OWN": "1"}))
    assert (opened.name, opened.cwd) == ("second", "/tmp")
    await supervisor.exec(session_id, ExecSpec("first=1; f() { echo f; }; echo data > file"))
    second = await supervisor.exec(
        session_id, ExecSpec("pwd; echo $SHARED $OWN ${first-none}; type f; cat /workspace/file", shell="second")
    )
    assert second.stdout == b"/tmp\nyes 1 none\ndata\n"
    default = await supervisor.exec(session_id, ExecSpec("echo ${OWN-none}"))
    assert default.stdout == b"none\n"
    assert [shell.name for shell in await supervisor.shells(session_id)] == ["default", "second"]


@pytest.mark.parametrize(
    ("spec", "is_program_run"),
    [
        (SessionSpec(env={"SHELLOPTS": "noexec"}), True),
        (SessionSpec(shell="sh", env={"OPTIND": "none"}), True),
        (SessionSpec(filesystem=FileRules(readable=())), False),
        (SessionSpec(user="root"), True),
    ],
    ids=["noexec", "OPTIND", "nothing readable", "removed"],
)
async def test_a_shell_that_can_not_be_had_is_told_of(
    supervisor: LocalSupervisor, spec: SessionSpec, is_program_run: bool
) -> None:
    """A session whose settings or commands keep its shell from starting: each command fails typed; requests without a
    shell work.
    """
    session = await supervisor.create(spec)
    if spec.user == "root":
        await supervisor.exec(session.id, ExecSpec("rm /bin/*sh /usr/bin/*sh; exit"))
    for _ in range(2):
        with pytest.raises(ShellFailed, match="the shell cannot be started"):
            await supervisor.exec(session.id, ExecSpec("echo hi"))
    program = await supervisor.exec(session.id, ExecSpec(argv=("echo", "hi")))
    assert (program.stdout == b"hi\n") is is_program_run
    async with supervisor.files(session.id).open_write("file") as writer:
        await writer.send(b"x")
        assert await writer.commit() == "/workspace/file"


@pytest.mark.parametrize(
    "ruin",
    [
        "rm -rf /run/*",
        "rm -rf /run/sandkasten/*; : >/run/sandkasten/1",
        "chmod 0 /",
        "chmod 0 /run",
        "chmod 0 /; sleep 1000",
    ],
)
async def test_a_root_that_ruins_what_shells_need_is_answered(supervisor: LocalSupervisor, ruin: str) -> None:
    """Commands and new shells end or are refused when root has ruined the files that shells need, and no request hangs;
    the session can be used without shells, and ends.
    """
    session = await supervisor.create(SessionSpec(user="root"))
    await supervisor.open_shell(session.id, ShellSpec("second"))
    with trio.fail_after(patience(20)):
        for script in (ruin, "echo hi", "cat"):
            with contextlib.suppress(SandboxError):
                await supervisor.exec(session.id, ExecSpec(script, timeout_ms=_LIMIT_MS, cwd="/"))
            with contextlib.suppress(SandboxError):
                await supervisor.exec(session.id, ExecSpec(script, timeout_ms=_LIMIT_MS, shell="second", stdin=b"x"))
        with contextlib.suppress(SandboxError):
            await supervisor.open_shell(session.id, ShellSpec("third"))
        assert (await supervisor.exec(session.id, ExecSpec(argv=("true",)))).end.exit_code == 0
        await supervisor.close_shell(session.id, "second")
        assert "second" not in [shell.name for shell in await supervisor.shells(session.id)]
        assert (await supervisor.get(session.id)).status is Status.RUNNING
        await supervisor.destroy(session.id)


FIRST = ExecSpec("echo $A >>log; cat log")
GO = ExecSpec(argv=("touch", "/tmp/go"))


async def _create_slow(supervisor: LocalSupervisor) -> str:
    """Make a session without a shell. The one that its first command starts waits for `GO`."""
    env = {"A": "1", "BASH_ENV": "$(until [ -e /tmp/go ]; do sleep 0.01; done)"}
    return (await supervisor.create(SessionSpec(env=env))).id


async def _begin_first(supervisor: LocalSupervisor, session_id: str, nursery: trio.Nursery) -> list[object]:
    """Run `FIRST`, and return when its shell is being started. The list is going to have what became of it."""
    outcome = list[object]()

    async def run() -> None:
        try:
            outcome.append(await supervisor.exec(session_id, FIRST))
        except SandkastenError as error:
            outcome.append(type(error))

    async def is_being_started() -> bool:
        return ((await supervisor.stats(session_id)).pids or 0) > 1

    nursery.start_soon(run)
    await until(is_being_started)
    return outcome


@contextlib.asynccontextmanager
async def _first_shell_starting(supervisor: LocalSupervisor) -> AsyncIterator[tuple[str, list[object]]]:
    """Make a session whose first shell is being started; behind the block the list has what became of `FIRST`."""
    session_id = await _create_slow(supervisor)
    async with trio.open_nursery() as nursery:
        yield session_id, await _begin_first(supervisor, session_id, nursery)


def _is_first(result: object) -> bool:
    assert isinstance(result, ExecResult), result
    return (result.stdout, result.end.exit_code, result.end.shell_restarted) == (b"1\n", 0, False)


async def test_a_session_that_never_had_a_shell_gets_one_of_the_next_daemon(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first command starts the shell, with the session's variables, and replaces none."""
    monkeypatch.setattr(creating, "_UNUSED_SHELL_MS", 0)
    async with open_supervisor(attrs.evolve(config, sessions_on_stop="keep")) as supervisor:
        session_id = await _create_slow(supervisor)
        await supervisor.exec(session_id, GO)
    async with open_supervisor(config) as supervisor:
        assert (await supervisor.stats(session_id)).pids == 1
        assert [shell.name for shell in await supervisor.shells(session_id)] == ["default"]
        assert _is_first(await supervisor.exec(session_id, FIRST))


async def test_a_session_may_be_paused_while_its_first_shell_starts(
    supervisor: LocalSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command waits, and runs when the session goes on."""
    monkeypatch.setattr(creating, "_UNUSED_SHELL_MS", 0)
    async with _first_shell_starting(supervisor) as (session_id, outcome):
        await supervisor.pause(session_id)
        await supervisor.exec(session_id, GO)  # which resumes it
    assert _is_first(outcome.pop())


async def test_a_daemon_may_end_while_a_first_shell_starts(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command never runs, as its caller is told, and the next one has that shell."""
    monkeypatch.setattr(creating, "_UNUSED_SHELL_MS", 0)
    keeping = attrs.evolve(config, sessions_on_stop="keep")
    async with trio.open_nursery() as nursery, open_supervisor(keeping) as supervisor:
        session_id = await _create_slow(supervisor)
        outcome = await _begin_first(supervisor, session_id, nursery)
    (result,) = outcome
    assert isinstance(result, ExecResult)
    assert result.end.cause is Cause.DAEMON_RESTARTED
    async with open_supervisor(config) as supervisor:
        await supervisor.exec(session_id, GO)
        assert _is_first(await supervisor.exec(session_id, FIRST))


async def test_a_session_may_end_while_its_first_shell_starts(
    supervisor: LocalSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command is told."""
    monkeypatch.setattr(creating, "_UNUSED_SHELL_MS", 0)
    async with _first_shell_starting(supervisor) as (session_id, outcome):
        await supervisor.destroy(session_id)
    assert outcome == [SessionExpired]


async def test_closing_a_shell_that_root_hides_ends_its_commands(supervisor: LocalSupervisor) -> None:
    """The running and the waiting command of a shell end with it, though `/` is closed to PID 1."""
    session = await supervisor.create(SessionSpec(user="root"))
    await supervisor.open_shell(session.id, ShellSpec("second"))
    causes: list[Cause] = []

    async def wait_turn() -> None:
        causes.append((await supervisor.exec(session.id, ExecSpec("echo hi", shell="second"))).end.cause)

    async def is_waiting() -> bool:
        return len((await supervisor.shells(session.id))[1].queued) == 1

    with trio.fail_after(patience(5)):
        spec = ExecSpec("chmod 0 /; echo closed; sleep 1000", shell="second")
        async with supervisor.open_exec(session.id, spec) as running, trio.open_nursery() as nursery:
            await anext(aiter(running))
            nursery.start_soon(wait_turn)
            await until(is_waiting)
            await supervisor.close_shell(session.id, "second")
            causes.append((await running.wait_end()).cause)
    assert causes == [Cause.CANCELLED, Cause.CANCELLED]


@pytest.mark.parametrize("program", [False, True])
@pytest.mark.parametrize("by", ["cancel", "time"])
async def test_what_root_hides_is_ended_and_what_waits_behind_it_runs(
    supervisor: LocalSupervisor, by: str, program: bool
) -> None:
    """With `/` closed to PID 1 a cancel and a time limit still end a command, a program and the daemons that they have
    started, and the next command of the shell has its turn.
    """
    session = await supervisor.create(SessionSpec(user="root"))
    script = "chmod 0 /; setsid sleep 4321 & echo closed; sleep 1234"
    limit_ms = 60_000 if by == "cancel" else 500
    spec = (
        ExecSpec(argv=("sh", "-c", script), exec_id="one", timeout_ms=limit_ms)
        if program
        else ExecSpec(script, exec_id="one", timeout_ms=limit_ms)
    )
    said: list[bytes] = []

    async def wait_turn() -> None:
        said.append((await supervisor.exec(session.id, ExecSpec("echo next"))).stdout)

    with trio.fail_after(patience(5)):
        async with supervisor.open_exec(session.id, spec) as running, trio.open_nursery() as nursery:
            await anext(aiter(running))
            nursery.start_soon(wait_turn)
            if by == "cancel":
                await supervisor.cancel_exec(session.id, "one")
            assert (await running.wait_end()).cause is (Cause.CANCELLED if by == "cancel" else Cause.TIMED_OUT)
        assert said == [b"next\n"]
        left = await supervisor.exec(session.id, ExecSpec("ps -C sleep -o args="))
    assert left.stdout == b""


async def test_shells_share_the_network(supervisor: LocalSupervisor, session_id: str) -> None:
    """A server in one shell is reached from the other shell, on the session's own loopback."""
    await supervisor.open_shell(session_id, ShellSpec("second"))
    await supervisor.exec(session_id, ExecSpec("mkfifo up"))
    serve = "s = socket.create_server(('127.0.0.1', 8199)); open('up', 'w').close(); s.accept()[0].sendall(b'served')"
    ask = "print(socket.create_connection(('127.0.0.1', 8199)).recv(9).decode())"
    await supervisor.exec(
        session_id, ExecSpec(f'python3 -c "import socket; {serve}" >/dev/null 2>&1 &', shell="second")
    )
    asked = await supervisor.exec(session_id, ExecSpec(f'cat up; python3 -c "import socket; {ask}"'))
    assert asked.output == b"served\n"
    spaces = [await supervisor.exec(session_id, ExecSpec("readlink /proc/self/ns/net", shell=name)) for name in NAMES]
    assert spaces[0].stdout == spaces[1].stdout != b""


async def test_shells_run_beside_each_other(supervisor: LocalSupervisor, session_id: str) -> None:
    """A command in one waits for a command in the other: both are running."""
    await supervisor.open_shell(session_id, ShellSpec("second"))
    await supervisor.exec(session_id, ExecSpec("mkfifo pipe"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.exec, session_id, ExecSpec("cat pipe > got"))
        with trio.fail_after(patience(10)):
            await supervisor.exec(session_id, ExecSpec("echo through > pipe", shell="second"))
    assert (await supervisor.exec(session_id, ExecSpec("cat got"))).output == b"through\n"


async def test_a_busy_shell_shows_what_it_runs(supervisor: LocalSupervisor, session_id: str) -> None:
    """The list of shells names the running command and the queued ones."""
    async with supervisor.open_exec(session_id, ExecSpec("echo working; sleep 60", exec_id="one")) as stream:
        await anext(aiter(stream))
        (shell,) = await supervisor.shells(session_id)
        assert shell.running is not None
        assert (shell.running.exec_id, shell.running.last_line, shell.queued) == ("one", "working", ())


async def test_closing_a_shell_ends_all_it_started(supervisor: LocalSupervisor, session_id: str) -> None:
    """Closing a shell ends its command, its jobs and its daemons; processes of another shell stay."""
    await supervisor.open_shell(session_id, ShellSpec("second"))
    await supervisor.exec(session_id, ExecSpec("sleep 1001 & setsid sleep 1002 >/dev/null 2>&1 &", shell="second"))
    await supervisor.exec(session_id, ExecSpec("sleep 1003 &"))
    async with trio.open_nursery() as nursery:
        causes: list[Cause] = []

        async def run() -> None:
            causes.append((await supervisor.exec(session_id, ExecSpec("sleep 1004", shell="second"))).end.cause)

        nursery.start_soon(run)

        async def is_running() -> bool:
            return (await supervisor.shells(session_id))[1].running is not None

        await until(is_running)
        await supervisor.close_shell(session_id, "second")
    assert causes == [Cause.CANCELLED]
    left = await supervisor.exec(session_id, ExecSpec("pgrep -a sleep | cut -d' ' -f2-"))
    assert left.output == b"sleep 1003\n"
    with pytest.raises(ShellNotFound):
        await supervisor.exec(session_id, ExecSpec("echo", shell="second"))


async def test_a_time_limit_in_one_shell_leaves_the_other_s_orphans(
    supervisor: LocalSupervisor, session_id: str
) -> None:
    """An orphan of one shell that began meanwhile is not blamed on the other's command."""
    await supervisor.open_shell(session_id, ShellSpec("second"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.exec, session_id, ExecSpec("sleep 60", timeout_ms=800))

        async def is_running() -> bool:
            return (await supervisor.shells(session_id))[0].running is not None

        await until(is_running)
        await supervisor.exec(session_id, ExecSpec("(setsid sleep 1005 >/dev/null 2>&1 &)", shell="second"))
        await supervisor.exec(session_id, ExecSpec("kill -9 $$", shell="second"))
    left = await supervisor.exec(session_id, ExecSpec("pgrep -a sleep | cut -d' ' -f2-"))
    assert left.output == b"sleep 1005\n"


async def test_names_of_shells_are_checked(supervisor: LocalSupervisor, session_id: str) -> None:
    """A shell's name that is taken, malformed or unknown is refused, and so is closing the default shell."""
    with pytest.raises(Conflict):
        await supervisor.open_shell(session_id, ShellSpec("default"))
    with pytest.raises(InvalidRequest):
        await supervisor.open_shell(session_id, ShellSpec("../x"))
    with pytest.raises(InvalidRequest):
        await supervisor.open_shell(session_id, ShellSpec("second", cwd="/nowhere"))
    with pytest.raises(ShellNotFound):
        await supervisor.close_shell(session_id, "second")
    with pytest.raises(InvalidRequest):
        await supervisor.close_shell(session_id, "default")


async def test_the_number_of_shells_is_bounded(supervisor: LocalSupervisor, session_id: str) -> None:
    """One more is refused, and closing one makes room."""
    for number in range(15):
        await supervisor.open_shell(session_id, ShellSpec(f"s{number}"))
    with pytest.raises(Capacity):
        await supervisor.open_shell(session_id, ShellSpec("more"))
    await supervisor.close_shell(session_id, "s3")
    await supervisor.open_shell(session_id, ShellSpec("more"))
