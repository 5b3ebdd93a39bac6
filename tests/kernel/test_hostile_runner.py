"""A PID 1 that turned hostile: whatever bytes it sends, the session is crashed and the daemon goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandkasten.actors.tree import LocalSupervisor
from sandkasten.model import ExecSpec, SessionSpec, Status
from sandkasten.model.errors import RunnerProtocolError, SandkastenError
from sandkasten.security.attacks.runner import FILE_REPLIES, REPLIES, impostor
from tests.waiting import until


@pytest.mark.parametrize("name", REPLIES)
async def test_garbage_crashes_the_session_and_nothing_else(
    supervisor: LocalSupervisor, data_dir: Path, name: str
) -> None:
    """The command fails typed, the session ends with the reason, another session works."""
    victim, witness = await supervisor.create(SessionSpec()), await supervisor.create(SessionSpec())
    async with supervisor.open_exec(victim.id, ExecSpec("sleep 60")):  # takes the connection that is open
        async with impostor(data_dir / "run" / victim.id / "r.sock", REPLIES[name][2]):
            with pytest.raises(SandkastenError) as refused:
                await supervisor.exec(victim.id, ExecSpec("true"))
            assert isinstance(refused.value, RunnerProtocolError)

        async def has_crashed() -> bool:
            return (await supervisor.get(victim.id)).status is Status.CRASHED

        await until(has_crashed)
        ended = await supervisor.get(victim.id)
        assert ended.reason is not None
        assert ended.reason.startswith("its init broke the protocol")
    result = await supervisor.exec(witness.id, ExecSpec("echo fine"))
    assert result.stdout == b"fine\n"


@pytest.mark.parametrize("name", FILE_REPLIES)
async def test_of_a_file_comes_no_more_than_was_asked_for(
    supervisor: LocalSupervisor, data_dir: Path, name: str
) -> None:
    """A runner that lies about a file: the read ends, with no more bytes than asked for, and the session crashes."""
    victim = await supervisor.create(SessionSpec())
    said, again = FILE_REPLIES[name][2:]
    size = 0

    async def read() -> None:
        nonlocal size
        async with supervisor.open_read(victim.id, "f", max_bytes=100_000) as reader:
            async for piece in reader:
                size += len(piece)

    async with supervisor.open_exec(victim.id, ExecSpec("sleep 60")):  # takes the connection that is open
        async with impostor(data_dir / "run" / victim.id / "r.sock", said, again=again):
            with pytest.raises(RunnerProtocolError):
                await read()
        assert size <= 100_000
        assert (await supervisor.wait_ended(victim.id)).status is Status.CRASHED
