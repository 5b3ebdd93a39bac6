"""A PID 1 that turned hostile: what it may send the daemon, and what must come of it.

The attack puts a listener where the runner's socket was, as a runner under foreign control would be. A violation must
be a typed error for the caller and the end of that session; every other session goes on.
Sources: runner/protocol.py (what is allowed), CWE-20, CWE-400, CWE-502.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from runner.protocol import MAX_FRAME_BYTES, Kind, encode_frame, encode_header
from sandkasten.errors import RunnerLost, RunnerProtocolError, SandkastenError
from sandkasten.model import ExecSpec, Status
from sandkasten.runtime.paths import RUNNER_SOCKET, DataPaths
from sandkasten.security.field import Field
from sandkasten.security.probes.attempt import Answers, Attempt, attempt

_END_S = 10.0

REPLIES: Mapping[str, tuple[str, str, bytes]] = {
    "random": ("random bytes", "CWE-20", bytes(range(256)) * 4),
    "oversized": ("a frame larger than any may be", "CWE-400", encode_header(Kind.STDOUT, MAX_FRAME_BYTES + 1)),
    "request": ("a kind of message only the daemon sends", "CWE-20", encode_frame(Kind.REQUEST, b"{}")),
    "no-json": ("a reply that is no JSON", "CWE-20", encode_frame(Kind.REPLY, b"\xff{")),
    "other-reply": (
        "the reply of another request",
        "CWE-20",
        encode_frame(Kind.REPLY, b'{"type":"Done","path":"/x"}'),
    ),
    "nested": ("deeply nested JSON", "CWE-674", encode_frame(Kind.REPLY, b"[" * 100_000)),
    "surrogate": (
        "a directory that is no text",
        "CWE-20",
        encode_frame(
            Kind.REPLY,
            b'{"type":"ExecReply","exec_id":"x","exit_code":0,"signal":null,"cause":"exited","cwd":"\\ud800",'
            b'"duration_us":1,"shell_restarted":false}',
        ),
    ),
    "huge-number": (
        "a number out of every range",
        "CWE-190",
        encode_frame(
            Kind.REPLY,
            b'{"type":"ExecReply","exec_id":"x","exit_code":0,"signal":null,"cause":"exited","cwd":"/",'
            b'"duration_us":1' + b"0" * 400 + b',"shell_restarted":false}',
        ),
    ),
    "wrong-types": (
        "fields of the wrong types",
        "CWE-843",
        encode_frame(Kind.STARTED, b'{"type":"Started","exec_id":7}'),
    ),
}
"""What a hostile runner says, by name: in words, the weakness it stands for, the bytes."""


@asynccontextmanager
async def impostor(path: Path, said: bytes) -> AsyncIterator[None]:
    """Listen where the runner did, and answer every request with `said`."""
    with _listen_instead(path) as plain:
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(plain))

        async def reply(stream: trio.SocketStream) -> None:
            await stream.receive_some(65536)
            await stream.send_all(said)
            await trio.sleep_forever()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, reply, [listener])
            yield
            nursery.cancel_scope.cancel()


def _listen_instead(path: Path) -> socket.socket:
    """Bind beneath a descriptor of the directory: a long path does not fit into a socket address."""
    path.unlink()
    directory_fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    plain = socket.socket(socket.AF_UNIX)
    try:
        plain.bind(f"/proc/self/fd/{directory_fd}/{path.name}")
        plain.listen()
    except OSError:
        plain.close()
        raise
    finally:
        os.close(directory_fd)
    return plain


async def _say(field: Field, said: bytes) -> Answers:
    async with field.session() as victim:
        async with field.supervisor.open_exec(victim, ExecSpec("sleep 60")):  # takes the connection that is open
            place = DataPaths(field.config.data_dir).run_dir(victim) / RUNNER_SOCKET
            async with impostor(place, said):
                caller = await _ask(field, victim)
                session = await _wait_crashed(field, victim)
        return {"caller": caller, "session": session, "witness": await field.ask_witness()}


async def _ask(field: Field, victim: str) -> str:
    try:
        result = await field.supervisor.exec(victim, ExecSpec("true"))
    except (RunnerProtocolError, RunnerLost) as error:
        return type(error).__name__
    except SandkastenError as error:
        return f"{type(error).__name__}: {error}"
    return f"believed it: status {result.end.exit_code}"


async def _wait_crashed(field: Field, victim: str) -> str:
    with trio.move_on_after(_END_S * field.patience):
        return str((await field.supervisor.wait_ended(victim)).status)
    return "lives on"


def _attempt(name: str, what: str, stands_for: str, said: bytes) -> Attempt:
    async def run(field: Field) -> Answers:
        return await _say(field, said)

    expected = ("RunnerProtocolError", str(Status.CRASHED), "answers")
    return attempt(f"runner.{name}", f"answer the daemon with {what}", stands_for, expected, users=("",))(run)


RUNNER = tuple(_attempt(name, *each) for name, each in REPLIES.items())
