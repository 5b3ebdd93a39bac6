"""Promises of the supervisor about sessions, runs, shells and processes, over scripted sandboxes and over real ones.

A command is given twice: as a script for the PID 1 in this process, and as what does the same in a real shell.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import attrs
import pytest
import trio

from sandkasten import errors
from sandkasten.app import open_supervisor
from sandkasten.config import Config, ServerSettings
from sandkasten.model import (
    Cause,
    ExecKind,
    ExecSpec,
    ExecState,
    Limits,
    OnDisconnect,
    ProcessSpec,
    SessionSpec,
    ShellSpec,
    Stream,
    TerminalSize,
    WaitFor,
)
from sandkasten.model.node import PROTECTIONS, Need
from sandkasten.supervisor import Supervisor
from tests.archives import lent_tree
from tests.fakes.runner import Script
from tests.fakes.tree import open_scripted
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.usefixtures("nsinit_seed")

SIGTERM = 15

BOTH = "echo one; echo two >&2; exit 3"
PARTS = "printf one; sleep 0.05; printf two; sleep 0.05; printf three"
FOREVER = "sleep 1000"
ECHO = "cat"
SERVER = "echo booting; echo ready on 80; exec sleep 1000"

SCRIPTS = {
    BOTH: Script([(Stream.STDOUT, b"one\n"), (Stream.STDERR, b"two\n")], exit_code=3, restarts_shell=True),
    PARTS: Script([(Stream.STDOUT, b"one"), (Stream.STDOUT, b"two"), (Stream.STDOUT, b"three")]),
    FOREVER: Script(hold=trio.Event()),
    ECHO: Script(echo=True),
    SERVER: Script([(Stream.STDOUT, b"booting\nready on 80\n")], hold=trio.Event()),
}


REAL = pytest.param("real", marks=[pytest.mark.kernel, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")])


@pytest.fixture(params=["scripted", REAL])
async def supervisor(request: pytest.FixtureRequest, images: Path) -> AsyncIterator[Supervisor]:
    if request.param == "scripted":
        async with open_scripted() as tree:
            tree.scripts.update(SCRIPTS)
            yield tree.supervisor
        return
    with (
        tempfile.TemporaryDirectory(prefix="sandkasten-test-") as directory,
        lent_tree(images, Path(directory, "images")),
    ):
        async with open_supervisor(Config(data_dir=Path(directory), server=ServerSettings(pool_sandboxes=0))) as real:
            yield real


@pytest.fixture
async def session_id(supervisor: Supervisor) -> str:
    return (await supervisor.create(SessionSpec())).id


async def start_detached(supervisor: Supervisor, session_id: str, spec: ExecSpec) -> str:
    """Begin a run and leave it."""
    async with supervisor.open_exec(session_id, spec, on_disconnect=OnDisconnect.DETACH) as stream:
        return stream.exec_id


async def wait_state(supervisor: Supervisor, session_id: str, exec_id: str, state: ExecState) -> None:
    async def is_there() -> bool:
        return (await supervisor.get_exec(session_id, exec_id)).state is state

    await until(is_there)


async def test_a_result_has_both_streams_and_the_status(supervisor: Supervisor, session_id: str) -> None:
    """A repeat is the same result."""
    spec = ExecSpec(BOTH, exec_id="e-1", timeout_ms=5000)
    result = await supervisor.exec(session_id, spec)
    assert (result.stdout, result.stderr, result.bytes_total, result.truncated) == (b"one\n", b"two\n", 8, False)
    end = result.end
    assert (end.exec_id, end.exit_code, end.cause, end.timeout_ms, end.shell_restarted) == (
        "e-1",
        3,
        Cause.EXITED,
        5000,
        True,
    )
    assert (await supervisor.exec(session_id, spec)).end == end


async def test_an_id_is_one_run(supervisor: Supervisor, session_id: str) -> None:
    """Another command under it is refused, with what became of the first."""
    await supervisor.exec(session_id, ExecSpec(BOTH, exec_id="e-1"))
    with pytest.raises(errors.Conflict) as caught:
        await supervisor.exec(session_id, ExecSpec("true", exec_id="e-1"))
    assert caught.value.details == {"exec_id": "e-1", "status": "ended"}
    assert [run.exec_id for run in await supervisor.execs(session_id)] == ["e-1"]


async def test_pieces_are_numbered_and_can_be_had_again(supervisor: Supervisor, session_id: str) -> None:
    """From any number on."""
    async with supervisor.open_exec(session_id, ExecSpec(PARTS, exec_id="e-1")) as stream:
        assert not stream.is_joined
        pieces = [piece async for piece in stream]
        end = await stream.wait_end()
    assert [piece.sequence for piece in pieces] == list(range(1, len(pieces) + 1))
    assert b"".join(piece.data for piece in pieces) == b"onetwothree"
    async with supervisor.attach_exec(session_id, "e-1", after=1) as stream:
        assert stream.is_joined
        assert [piece async for piece in stream] == pieces[1:]
        assert await stream.wait_end() == end
    info = await supervisor.get_exec(session_id, "e-1")
    assert (info.kind, info.state, info.shell, info.end) == (ExecKind.COMMAND, ExecState.ENDED, "default", end)
    assert (info.first_sequence, info.last_sequence, info.stdout_bytes) == (1, len(pieces), 11)


@pytest.mark.parametrize("how", ["cancel", "detach", "detach later", "attached"])
async def test_leaving_cancels_or_not(supervisor: Supervisor, session_id: str, how: str) -> None:
    """As was said at the start or later on; who attached has no say."""
    spec = ExecSpec(FOREVER, exec_id="e-1")
    when_left = OnDisconnect.DETACH if how in ("detach", "attached") else OnDisconnect.CANCEL
    async with supervisor.open_exec(session_id, spec, on_disconnect=when_left) as stream:
        if how == "detach later":
            stream.detach()
    if how == "attached":
        async with supervisor.open_exec(session_id, spec, on_disconnect=OnDisconnect.CANCEL) as stream:
            assert stream.is_joined
    if how == "cancel":
        await wait_state(supervisor, session_id, "e-1", ExecState.ENDED)
    else:
        assert (await supervisor.get_exec(session_id, "e-1")).state is ExecState.RUNNING
    ended = await supervisor.cancel_exec(session_id, "e-1", now=True)
    assert ended.end is not None
    assert (ended.end.cause, ended.end.exit_code, ended.end.signal) == (Cause.CANCELLED, 130, None)
    assert await supervisor.cancel_exec(session_id, "e-1") == ended


async def test_output_is_had_by_offset(supervisor: Supervisor, session_id: str) -> None:
    """Of one stream or both, past its end nothing."""
    await supervisor.exec(session_id, ExecSpec(BOTH, exec_id="e-1"))

    async def read(stream: Stream | None, offset: int, limit: int) -> tuple[bytes, int, int, bool]:
        part = await supervisor.read_output(session_id, "e-1", stream=stream, offset=offset, limit=limit)
        assert (part.offset, part.first_offset) == (offset, 0)
        return part.data, part.next_offset, part.total_bytes, part.is_final

    assert await read(Stream.STDERR, 1, 100) == (b"wo\n", 4, 4, True)
    assert await read(Stream.STDOUT, 0, 2) == (b"on", 2, 4, False)
    data, *rest = await read(None, 0, 8)
    assert (sorted(data.splitlines()), rest) == ([b"one", b"two"], [8, 8, True])
    assert await read(None, 20, 5) == (b"", 20, 8, True)


async def test_input_is_read_until_it_is_closed(supervisor: Supervisor, session_id: str) -> None:
    """Sent by the owner or by id."""
    async with supervisor.open_exec(session_id, ExecSpec(ECHO, exec_id="e-1", stdin_open=True)) as stream:
        await stream.send_stdin(b"one")
        await supervisor.send_stdin(session_id, "e-1", b"two", close=True)
        assert b"".join([piece.data async for piece in stream]) == b"onetwo"
        assert (await stream.wait_end()).exit_code == 0
    assert (await supervisor.exec(session_id, ExecSpec(ECHO, stdin=b"given"))).stdout == b"given"


async def test_what_a_run_can_not_take_is_refused(supervisor: Supervisor, session_id: str) -> None:
    """Input and a size where there is none; anything once it ended; and what never was."""
    size = TerminalSize(80, 24)
    await start_detached(supervisor, session_id, ExecSpec(FOREVER, exec_id="e-1"))
    with pytest.raises(errors.InvalidRequest):
        await supervisor.send_stdin(session_id, "e-1", b"x")
    with pytest.raises(errors.InvalidRequest):
        await supervisor.resize_exec(session_id, "e-1", size)
    await supervisor.cancel_exec(session_id, "e-1", now=True)
    for exec_id, wanted in (("e-1", errors.ExecEnded), ("e-2", errors.ExecNotFound)):
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda exec_id=exec_id: supervisor.send_stdin(session_id, exec_id, b"x"),  # type: ignore[misc]
            lambda exec_id=exec_id: supervisor.signal_exec(session_id, exec_id, SIGTERM),  # type: ignore[misc]
            lambda exec_id=exec_id: supervisor.resize_exec(session_id, exec_id, size),  # type: ignore[misc]
        ]
        for call in calls:
            with pytest.raises(wanted):
                await call()
    with pytest.raises(errors.ExecNotFound):
        await supervisor.read_output(session_id, "e-2")
    with pytest.raises(errors.ExecNotFound):
        async with supervisor.attach_exec(session_id, "e-2"):
            pass


async def test_a_signal_ends_a_program(supervisor: Supervisor, session_id: str) -> None:
    """With the status that shells give."""
    spec = ExecSpec(argv=("sleep", "1000"), exec_id="e-1")
    async with supervisor.open_exec(session_id, spec) as stream:
        await supervisor.signal_exec(session_id, "e-1", SIGTERM)
        end = await stream.wait_end()
    assert (end.exit_code, end.signal, end.cause) == (128 + SIGTERM, SIGTERM, Cause.SIGNALLED)


async def test_shells_have_names(supervisor: Supervisor, session_id: str) -> None:
    """Each once; the default one is there and stays."""
    opened = await supervisor.open_shell(session_id, ShellSpec("build", cwd="/tmp"))
    assert (opened.name, opened.cwd, opened.running, opened.queued) == ("build", "/tmp", None, ())
    assert [shell.name for shell in await supervisor.shells(session_id)] == ["default", "build"]
    for name in ("build", "default"):
        with pytest.raises(errors.Conflict):
            await supervisor.open_shell(session_id, ShellSpec(name))
    await start_detached(supervisor, session_id, ExecSpec(FOREVER, shell="build", exec_id="e-1"))
    _, build = await supervisor.shells(session_id)
    assert build.running is not None
    assert build.running.exec_id == "e-1"
    await supervisor.close_shell(session_id, "build")
    ended = await supervisor.get_exec(session_id, "e-1")
    assert ended.end is not None
    assert ended.end.cause is Cause.CANCELLED
    with pytest.raises(errors.ShellNotFound):
        await supervisor.exec(session_id, ExecSpec("true", shell="build"))
    with pytest.raises(errors.ShellNotFound):
        await supervisor.close_shell(session_id, "build")
    with pytest.raises(errors.InvalidRequest):
        await supervisor.close_shell(session_id, "default")


async def test_a_process_goes_on_and_is_waited_for(supervisor: Supervisor, session_id: str) -> None:
    """For a line, for a time that is over, for its end."""
    spec = ProcessSpec(SERVER, process_id="p-1")
    info = await supervisor.start_process(session_id, spec)
    assert (info.exec_id, info.kind, info.state, info.shell) == ("p-1", ExecKind.PROCESS, ExecState.RUNNING, None)
    assert (await supervisor.start_process(session_id, spec)).exec_id == "p-1"
    with pytest.raises(errors.Conflict):
        await supervisor.start_process(session_id, ProcessSpec("true", process_id="p-1"))

    async def wait(condition: WaitFor, timeout_s: float = PATIENCE_S) -> tuple[bool, str | None]:
        waited = await supervisor.wait_process(session_id, "p-1", condition, timeout_s=timeout_s)
        return waited.happened, waited.line

    assert await wait(WaitFor(pattern=r"on \d+")) == (True, "ready on 80")
    assert await wait(WaitFor(exit=True), 0.01) == (False, None)
    assert await wait(WaitFor(port=80), 0.01) == (False, None)
    with pytest.raises(errors.InvalidRequest) as caught:
        await wait(WaitFor(pattern="("))
    assert list(caught.value.details) == ["pattern"]
    await supervisor.cancel_exec(session_id, "p-1", now=True)
    assert await wait(WaitFor(exit=True)) == (True, None)
    assert await wait(WaitFor(pattern="never")) == (False, None)


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_session_that_is_not_there_says_so_everywhere(
    supervisor: Supervisor, session_id: str, is_known: bool
) -> None:
    """An ended one is another thing than one that never was."""
    await supervisor.destroy(session_id)
    session, wanted = (session_id, errors.SessionExpired) if is_known else ("0" * 24, errors.SessionNotFound)

    async def enter_exec() -> None:
        async with supervisor.open_exec(session, ExecSpec("true")):
            pass

    calls: list[Callable[[], Awaitable[object]]] = [
        enter_exec,
        lambda: supervisor.exec(session, ExecSpec("true")),
        lambda: supervisor.execs(session),
        lambda: supervisor.get_exec(session, "e-1"),
        lambda: supervisor.read_output(session, "e-1"),
        lambda: supervisor.send_stdin(session, "e-1", b""),
        lambda: supervisor.signal_exec(session, "e-1", SIGTERM),
        lambda: supervisor.cancel_exec(session, "e-1"),
        lambda: supervisor.shells(session),
        lambda: supervisor.open_shell(session, ShellSpec("build")),
        lambda: supervisor.close_shell(session, "build"),
        lambda: supervisor.start_process(session, ProcessSpec("true")),
        lambda: supervisor.ports(session),
    ]
    for call in calls:
        with pytest.raises(wanted):
            await call()


async def test_the_node_counts_its_sessions(supervisor: Supervisor, session_id: str) -> None:
    """Limits of the sessions are summed up. A total that is not known is not made up."""
    node = await supervisor.node()
    limits = (await supervisor.get(session_id)).limits
    assert (node.id, node.status, node.sessions) == (supervisor.node_id, "ready", {"running": 1})
    assert (node.committed.sessions, node.committed.cpu, node.committed.pids) == (1, limits.cpu, limits.pids)
    assert node.committed.memory_bytes == limits.memory_mb * 2**20
    assert "host" in node.images
    assert node.totals.memory_bytes is not None
    assert node.used.memory_bytes is not None
    assert 0 < node.used.memory_bytes < node.totals.memory_bytes
    assert node.started_at <= node.time


async def test_the_system_says_what_is_in_force(supervisor: Supervisor) -> None:
    """Every protection once, those that no sandbox can do without marked so, and the defaults of a create."""
    system = await supervisor.system()
    assert [each.name for each in system.protections] == list(PROTECTIONS)
    essential = {name for name, need in PROTECTIONS.items() if need is Need.ESSENTIAL}
    assert essential <= {each.name for each in system.protections if each.required}
    assert system.defaults["limits"] == attrs.asdict(Limits())
    assert system.cgroup_mode in ("v2", "hybrid", "v1")
    assert system.machine.checks
