"""A PID 1 that turned hostile: whatever bytes it sends, the session is crashed and the daemon goes on."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from runner.protocol import MAX_FRAME_BYTES, Kind, encode_frame, encode_header
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.errors import RunnerProtocolError, SandkastenError
from sandkasten.model import ExecSpec, SessionSpec, Status
from tests.waiting import until

GARBAGE = {
    "random bytes": bytes(range(256)) * 4,
    "an oversized frame": encode_header(Kind.STDOUT, MAX_FRAME_BYTES + 1),
    "a kind only the daemon sends": encode_frame(Kind.REQUEST, b"{}"),
    "a reply that is no JSON": encode_frame(Kind.REPLY, b"\xff{"),
    "a reply of another request": encode_frame(Kind.REPLY, b'{"type":"Done","path":"/x"}'),
    "deeply nested JSON": encode_frame(Kind.REPLY, b"[" * 100_000),
    "a directory that is no text": encode_frame(
        Kind.REPLY,
        b'{"type":"ExecReply","exec_id":"x","exit_code":0,"signal":null,"cause":"exited","cwd":"\\ud800",'
        b'"duration_us":1,"shell_restarted":false}',
    ),
    "a number out of range": encode_frame(
        Kind.REPLY,
        b'{"type":"ExecReply","exec_id":"x","exit_code":0,"signal":null,"cause":"exited","cwd":"/",'
        b'"duration_us":1' + b"0" * 400 + b',"shell_restarted":false}',
    ),
    "wrong types": encode_frame(Kind.STARTED, b'{"type":"Started","exec_id":7}'),
}


@contextmanager
def _impostor(path: Path) -> Iterator[trio.SocketListener]:
    """Listen where the runner did."""
    path.unlink()
    with socket.socket(socket.AF_UNIX) as plain:
        plain.bind(str(path))
        plain.listen()
        yield trio.SocketListener(trio.socket.from_stdlib_socket(plain))


@pytest.mark.parametrize("name", GARBAGE)
async def test_garbage_crashes_the_session_and_nothing_else(
    supervisor: LocalSupervisor, data_dir: Path, nursery: trio.Nursery, name: str
) -> None:
    """The command fails typed, the session ends with the reason, another session works."""
    victim, witness = await supervisor.create(SessionSpec()), await supervisor.create(SessionSpec())
    async with supervisor.open_exec(victim.id, ExecSpec("sleep 60")):  # takes the connection that is open
        with _impostor(data_dir / "run" / victim.id / "r.sock") as listener:

            async def answer(stream: trio.SocketStream) -> None:
                await stream.receive_some(65536)
                await stream.send_all(GARBAGE[name])
                await trio.sleep_forever()

            nursery.start_soon(trio.serve_listeners, answer, [listener])
            with pytest.raises(SandkastenError) as refused:
                await supervisor.exec(victim.id, ExecSpec("true"))
            assert isinstance(refused.value, RunnerProtocolError)

        async def has_crashed() -> bool:
            return (await supervisor.get(victim.id)).status is Status.CRASHED

        await until(has_crashed)
        ended = await supervisor.get(victim.id)
        nursery.cancel_scope.cancel()
        assert ended.reason is not None
        assert ended.reason.startswith("its init broke the protocol")
    result = await supervisor.exec(witness.id, ExecSpec("echo fine"))
    assert result.stdout == b"fine\n"
