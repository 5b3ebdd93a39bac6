"""A PID 1 that turned hostile: whatever bytes it sends, the session is crashed and the daemon goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import trio

from sandkasten.actors.runs import driver, run
from sandkasten.actors.session import actor, birth, watch
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.actors.workspaces import files
from sandkasten.errors import FileNotFound, IsADirectory, RunnerProtocolError, SandkastenError
from sandkasten.model import ExecSpec, SessionSpec, Status
from sandkasten.security.attacks.runner import FILE_REPLIES, REPLIES, impostor
from tests.file_requests import looked_at, read, written
from tests.kernel.processes import file_workers, init_pid
from tests.waiting import patience, until


@pytest.mark.parametrize("name", REPLIES)
async def test_garbage_crashes_the_session_and_nothing_else(
    supervisor: LocalSupervisor, data_dir: Path, name: str
) -> None:
    """The command fails typed, the session ends with the reason, another session works."""
    attacked, witness = await supervisor.create(SessionSpec()), await supervisor.create(SessionSpec())
    async with supervisor.open_exec(attacked.id, ExecSpec("sleep 60")):  # takes the connection that is open
        async with impostor(data_dir / "run" / attacked.id / "r.sock", REPLIES[name][2]):
            with pytest.raises(SandkastenError) as refused:
                await supervisor.exec(attacked.id, ExecSpec("true"))
            assert isinstance(refused.value, RunnerProtocolError)

        async def has_crashed() -> bool:
            return (await supervisor.get(attacked.id)).status is Status.CRASHED

        await until(has_crashed)
        ended = await supervisor.get(attacked.id)
        assert ended.reason is not None
        assert ended.reason.startswith("its init broke the protocol")
    result = await supervisor.exec(witness.id, ExecSpec("echo fine"))
    assert result.stdout == b"fine\n"


@pytest.mark.parametrize("name", FILE_REPLIES)
async def test_of_a_file_comes_no_more_than_was_asked_for(
    supervisor: LocalSupervisor, data_dir: Path, name: str
) -> None:
    """A runner that lies about a file: the read ends, with no more bytes than asked for, and the session crashes."""
    attacked = await supervisor.create(SessionSpec())
    said, again = FILE_REPLIES[name][2:]
    size = 0

    async def read() -> None:
        nonlocal size
        async with supervisor.files(attacked.id).open_read("f", max_bytes=100_000) as reader:
            async for piece in reader:
                size += len(piece)

    async with supervisor.open_exec(attacked.id, ExecSpec("sleep 60")):  # takes the connection that is open
        async with impostor(data_dir / "run" / attacked.id / "r.sock", said, again=again):
            with pytest.raises(RunnerProtocolError):
                await read()
        assert size <= 100_000
        assert (await supervisor.wait_ended(attacked.id)).status is Status.CRASHED


@pytest.mark.parametrize("request_kind", ["command", "file"])
async def test_a_pid_1_that_was_stopped_crashes_the_session(
    supervisor: LocalSupervisor, monkeypatch: pytest.MonkeyPatch, request_kind: str
) -> None:
    """A request waits in vain for a PID 1 that does not answer; then the session ends instead of running on for ever,
    and another session works. A PID 1 that answers again in time keeps its session."""
    monkeypatch.setattr(birth, "HELLO_S", patience(0.3))
    monkeypatch.setattr(watch, "_NEWS_S", 0.1)
    monkeypatch.setattr(files, "_ANSWER_S", 0.3)
    monkeypatch.setattr(run, "PATIENCE_S", 0.3)
    monkeypatch.setattr(driver, "PATIENCE_S", 0.3)
    monkeypatch.setattr(driver, "CONTROL_S", 0.3)
    attacked, witness = await supervisor.create(SessionSpec()), await supervisor.create(SessionSpec())
    pid = init_pid(attacked)

    async def ask() -> None:
        if request_kind == "command":
            await supervisor.exec(attacked.id, ExecSpec("true", timeout_ms=100))
        else:
            async with supervisor.files(attacked.id).open_read("/etc/passwd", max_bytes=100):
                pass

    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(SandkastenError):
        await ask()
    os.kill(pid, signal.SIGCONT)
    await until(lambda: answers(supervisor, attacked.id))
    monkeypatch.setattr(actor, "SILENCE_S", 0.5)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(SandkastenError):
        await ask()

    async def has_crashed() -> bool:
        return (await supervisor.get(attacked.id)).status is Status.CRASHED

    await until(has_crashed)
    assert "does not answer" in str((await supervisor.get(attacked.id)).reason)
    assert (await supervisor.exec(witness.id, ExecSpec("echo fine"))).stdout == b"fine\n"


async def test_a_file_worker_that_was_stopped_holds_nobody_up(
    supervisor: LocalSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs of its user can stop it in the middle of an upload: PID 1 has it go on."""
    monkeypatch.setattr(files, "WRITE_S", 0.5)
    attacked = await supervisor.create(SessionSpec())
    writing, pid = supervisor.files(attacked.id), init_pid(attacked)

    async def has_workers() -> bool:
        return bool(file_workers(pid))

    with trio.fail_after(patience()):
        async with writing.open_write("f") as writer:
            await until(has_workers)
            for each in file_workers(pid):
                os.kill(each, signal.SIGSTOP)
            for _ in range(8):
                assert await writer.send(bytes(1 << 20))
            assert await writer.commit() == "/workspace/f"
            assert await writer.commit() == "/workspace/f"
    assert await written(writing, "f", b"whole") == "/workspace/f"


async def test_a_refusal_costs_no_connection_and_no_worker(supervisor: LocalSupervisor) -> None:
    """The worker that refuses a request, even before it has all of the content, answers the next one."""
    session = await supervisor.create(SessionSpec())
    its_files, pid = supervisor.files(session.id), init_pid(session)
    assert await written(its_files, "f", b"x") == "/workspace/f"
    (worker,) = file_workers(pid)
    for _ in range(3):
        with pytest.raises(FileNotFound):
            await looked_at(its_files, "missing")
        with pytest.raises(IsADirectory):
            await written(its_files, "/tmp", bytes(100_000))
    assert await read(its_files, "f") == b"x"
    assert file_workers(pid) == [worker]


async def answers(supervisor: LocalSupervisor, session_id: str) -> bool:
    try:
        return (await supervisor.exec(session_id, ExecSpec("echo here"))).stdout == b"here\n"
    except SandkastenError:
        return False
