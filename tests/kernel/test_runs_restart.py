"""Runs over a restart of the daemon, where a stop in this process is enough: e2e/test_runs_survive.py kills it."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import trio

from runner.wire import protocol
from runner.wire.protocol import HelloReply, Kind, RunEntry, RunList, encode_frame
from sandkasten.actors.runs.persistence import LOAN_BYTES, RunPersistence
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import open_supervisor
from sandkasten.config import Config
from sandkasten.errors import ExecGone, ExecNotFound, ShuttingDown
from sandkasten.model import (
    Cause,
    ExecSpec,
    ExecState,
    OnDisconnect,
    PauseSpec,
    SessionSpec,
    ShellSpec,
    Status,
    Stream,
    TerminalSpec,
)
from sandkasten.output.records import Seal, facts_to_json
from sandkasten.security.attacks.runner import impostor
from tests.unit.test_output_disk import FACTS
from tests.waiting import until

WAITING = ExecSpec("echo one; until [ -e /tmp/go ]; do sleep 0.02; done; echo two; exit 4", exec_id="waiting")
GO = ExecSpec(argv=("touch", "/tmp/go"))


@pytest.fixture
def keeping(config: Config) -> Config:
    return attrs.evolve(config, sessions_on_stop="keep")


async def begin(supervisor: LocalSupervisor, session_id: str, spec: ExecSpec) -> None:
    """Begin a run that goes on without us, and see its first output."""
    async with supervisor.open_exec(session_id, spec, on_disconnect=OnDisconnect.DETACH) as stream:
        await anext(aiter(stream))


async def wait_ended(supervisor: LocalSupervisor, session_id: str, exec_id: str) -> Cause:
    async with supervisor.attach_exec(session_id, exec_id) as stream:
        return (await stream.wait_end()).cause


async def test_a_stopped_daemon_refuses_those_who_wait_and_leaves_runs_alone(config: Config, keeping: Config) -> None:
    """A caller that waits for a run is refused, as the run has no end yet; its repeat joins the run at the next daemon
    and gets all of it.
    """
    refused: list[Exception] = []
    async with trio.open_nursery() as nursery, open_supervisor(keeping) as supervisor:
        session = await supervisor.create(SessionSpec())
        await begin(supervisor, session.id, WAITING)

        async def wait() -> None:
            try:
                await supervisor.exec(session.id, WAITING)
            except ShuttingDown as error:
                refused.append(error)

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked(0.01)
    assert len(refused) == 1
    async with open_supervisor(config) as supervisor:
        info = await supervisor.get_exec(session.id, "waiting")
        assert (info.state, info.stdout_bytes) == (ExecState.RUNNING, 4)
        await supervisor.exec(session.id, GO)
        result = await supervisor.exec(session.id, WAITING)
        assert (result.end.exit_code, result.stdout) == (4, b"one\ntwo\n")


async def test_a_named_shell_still_has_its_cpu_time(config: Config, keeping: Config) -> None:
    """CPU time of a named shell's command that went on meanwhile, and of its next one, is known; the default shell's is
    not counted.
    """
    burn = "python3 -c 'import time\nwhile time.process_time() < 0.2: pass'"
    async with open_supervisor(keeping) as supervisor:
        session = await supervisor.create(SessionSpec())
        await supervisor.open_shell(session.id, ShellSpec("two"))
        await begin(supervisor, session.id, attrs.evolve(WAITING, shell="two"))
        await supervisor.exec(session.id, ExecSpec(burn))
    async with open_supervisor(config) as supervisor:
        await supervisor.exec(session.id, ExecSpec(f"{burn}; touch /tmp/go"))
        async with supervisor.attach_exec(session.id, "waiting") as stream:
            assert (await stream.wait_end()).usage.cpu_ms >= 0
        assert (await supervisor.exec(session.id, ExecSpec(burn, shell="two"))).end.usage.cpu_ms >= 190


async def test_a_terminal_is_joined_again(config: Config, keeping: Config) -> None:
    """A terminal joined after a restart shows its earlier screen, and input reaches the same shell."""
    async with open_supervisor(keeping) as supervisor:
        session = await supervisor.create(SessionSpec())
        async with supervisor.open_terminal(session.id, TerminalSpec()) as viewer:
            terminal_id = viewer.terminal_id
            await viewer.send(b"X=kept; echo $((6*7))\n")
            seen = b""
            while b"42" not in seen:
                seen += await anext(aiter(viewer))
    async with (
        open_supervisor(config) as supervisor,
        supervisor.open_terminal(session.id, TerminalSpec(terminal_id=terminal_id)) as viewer,
    ):
        await viewer.send(b"echo is $X\n")
        seen = b""
        while b"is kept" not in seen:
            seen += await anext(aiter(viewer))
        assert seen.index(b"42") < seen.index(b"is kept")


async def test_a_paused_session_has_its_runs_again_when_it_goes_on(config: Config, keeping: Config) -> None:
    """Runs of a paused session are seen as running and do not resume it; after the resume they go on."""
    async with open_supervisor(keeping) as supervisor:
        session = await supervisor.create(SessionSpec())
        await begin(supervisor, session.id, WAITING)
        await supervisor.pause(session.id, PauseSpec())
    async with open_supervisor(config) as supervisor:
        (info,) = await supervisor.execs(session.id)
        assert (info.state, info.stdout_bytes) == (ExecState.RUNNING, 4)
        assert (await supervisor.get(session.id)).status is Status.PAUSED
        await supervisor.exec(session.id, GO)
        assert await wait_ended(supervisor, session.id, "waiting") is Cause.EXITED


async def test_output_of_a_short_run_is_not_written_and_comes_back_from_its_init(
    config: Config, keeping: Config, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a short run is written and its output is not: the next daemon gets the same output from PID 1."""
    spec = ExecSpec("echo first; echo second >&2; echo third; exit 3", exec_id="short")

    async def is_in_files(wanted: bytes) -> bool:
        return any(wanted in path.read_bytes() for path in (data_dir / "spool").iterdir())

    write = RunPersistence.write

    async def write_unless_killed(self: RunPersistence, *, is_last: bool = False) -> None:
        if not is_last and not self._active:  # what a run has said by a write in its midst is written, short or not
            await write(self)

    monkeypatch.setattr(RunPersistence, "write", write_unless_killed)
    async with open_supervisor(keeping) as supervisor:
        session = await supervisor.create(SessionSpec())
        result = await supervisor.exec(session.id, spec)
        await until(lambda: is_in_files(b'"exit_code":3'))
        before = await supervisor.get_exec(session.id, "short")
    assert not await is_in_files(b"first\n")
    for _ in range(2):
        async with open_supervisor(keeping) as supervisor:
            assert await supervisor.get_exec(session.id, "short") == before
            assert await supervisor.exec(session.id, spec) == result
    monkeypatch.undo()
    async with open_supervisor(keeping) as supervisor:
        await supervisor.pause(session.id, PauseSpec())
    assert await is_in_files(b"first\n")
    async with open_supervisor(config) as supervisor:
        assert (await supervisor.read_output(session.id, "short", stream=Stream.STDOUT)).data == b"first\nthird\n"
        assert (await supervisor.get(session.id)).status is Status.PAUSED


async def test_damaged_records_cost_what_was_in_them(config: Config, keeping: Config, data_dir: Path) -> None:
    """A run that goes on is found by its ticket, with the output that PID 1 has; one that ended there is unknown."""
    async with open_supervisor(keeping) as supervisor:
        session = await supervisor.create(SessionSpec())
        await supervisor.exec(session.id, ExecSpec(f"head -c {2 * LOAN_BYTES} /dev/zero", exec_id="ended"))
        await until(lambda: is_forgotten(supervisor, session.id))
        await begin(supervisor, session.id, WAITING)
    for path in (data_dir / "spool").glob("*.runs"):
        content = bytearray(path.read_bytes())
        content[20] ^= 0xFF
        path.write_bytes(content)
    async with open_supervisor(config) as supervisor:
        with pytest.raises(ExecNotFound):
            await supervisor.get_exec(session.id, "ended")
        await supervisor.exec(session.id, GO)
        assert await wait_ended(supervisor, session.id, "waiting") is Cause.EXITED
        assert (await supervisor.read_output(session.id, "waiting")).data == b"one\ntwo\n"


async def is_forgotten(supervisor: LocalSupervisor, session_id: str) -> bool:
    """Tell whether all ended runs are written down and PID 1 was told to forget them."""
    entry = supervisor._directory.get(session_id)
    assert entry is not None
    link = entry.ref
    return link.is_alive and await _is_listed_empty(supervisor, session_id)


async def _is_listed_empty(supervisor: LocalSupervisor, session_id: str) -> bool:
    async with supervisor._loan(session_id) as link, link.connection() as connection:
        await connection.send_request(protocol.ListRuns())
        answer = await connection.receive_answer()
    assert isinstance(answer, RunList)
    return all(not run.has_ended for run in answer.runs)


async def test_output_that_was_lost_is_said_to_be_gone(config: Config, keeping: Config, data_dir: Path) -> None:
    """Output that PID 1 has dropped and the file has lost is reported as gone; the run's end stays true."""
    size = protocol.KEPT_RUN_BYTES + 2_000_000
    flood = f"head -c {size} /dev/zero; echo one; until [ -e /tmp/go ]; do sleep 0.02; done; echo two; exit 4"
    async with open_supervisor(keeping) as supervisor:
        session = await supervisor.create(SessionSpec())
        spec = ExecSpec(flood, exec_id="flood", stateless=True)
        async with supervisor.open_exec(session.id, spec, on_disconnect=OnDisconnect.DETACH) as stream:
            got = 0
            async for piece in stream:
                got += len(piece.data)
                if got == size + 4:
                    break
            last = piece.sequence
    for path in (data_dir / "spool").iterdir():
        path.unlink()
    async with open_supervisor(config) as supervisor:
        await supervisor.exec(session.id, GO)
        assert await wait_ended_again(supervisor, session.id, "flood", last) == 4
        info = await supervisor.get_exec(session.id, "flood")
        assert info.stdout_bytes == size + 8
        with pytest.raises(ExecGone):
            await supervisor.read_output(session.id, "flood")
        tail = await supervisor.read_output(session.id, "flood", offset=size)
        assert tail.data == b"one\ntwo\n"


async def wait_ended_again(supervisor: LocalSupervisor, session_id: str, exec_id: str, after: int) -> int:
    """Wait for the end of a run as a reader that has read up to a piece; piece numbers from before the restart still
    hold.
    """

    async def has_ended() -> bool:
        return (await supervisor.get_exec(session_id, exec_id)).state is ExecState.ENDED

    await until(has_ended)
    info = await supervisor.get_exec(session_id, exec_id)
    assert info.last_sequence > after
    assert info.end is not None
    return info.end.exit_code


def listing(*entries: RunEntry) -> bytes:
    """Return the messages of a runner that answers the first two requests of an adoption."""
    answers = (HelloReply("/bin/bash", "/workspace", version=protocol.PROTOCOL_VERSION), RunList(entries, more=False))
    return b"".join(encode_frame(Kind.REPLY, protocol.ANSWERS.encode(answer)) for answer in answers)


async def test_a_hostile_init_makes_up_no_runs(config: Config, keeping: Config, data_dir: Path) -> None:
    """Ids that a runner lists without a ticket of ours, or with another run's, belong to no run; an ended run does not
    run again.
    """
    async with open_supervisor(keeping) as supervisor:
        session = await supervisor.create(SessionSpec())
        result = await supervisor.exec(session.id, ExecSpec("exit 3", exec_id="ended"))
    stranger = Seal(b"x" * 32, session.id).ticket(facts_to_json(attrs.evolve(FACTS, exec_id="forged")))
    entries = [
        RunEntry(number, exec_id, ticket, has_begun=True, has_ended=False, input_ended=True)
        for number, (exec_id, ticket) in enumerate([("none", ""), ("forged", stranger), ("ended", "")], 1)
    ]
    async with (
        impostor(data_dir / "run" / session.id / "r.sock", listing(*entries)),
        open_supervisor(config) as supervisor,
    ):
        (info,) = await supervisor.execs(session.id)
        assert (info.exec_id, info.end) == ("ended", result.end)


@pytest.mark.parametrize(("first", "second"), [((1, "a"), (1, "b")), ((2, "a"), (1, "b")), ((1, "a"), (2, "a"))])
async def test_an_impossible_list_crashes_the_session(
    config: Config, keeping: Config, data_dir: Path, first: tuple[int, str], second: tuple[int, str]
) -> None:
    """An impossible list of runs crashes the session, like any other breach of the protocol."""
    async with open_supervisor(keeping) as supervisor:
        session = await supervisor.create(SessionSpec())
    entries = [
        RunEntry(number, exec_id, "", has_begun=True, has_ended=False, input_ended=True)
        for number, exec_id in (first, second)
    ]
    async with (
        impostor(data_dir / "run" / session.id / "r.sock", listing(*entries)),
        open_supervisor(config) as supervisor,
    ):
        assert (await supervisor.wait_ended(session.id)).status is Status.CRASHED
