"""Attacks by a hostile PID 1: messages to the daemon that break the protocol.

The attack puts a listener in place of the runner's socket, as a runner under foreign control would. A violation must be
a typed error for the caller and the end of that session; every other session goes on.

Sources: runner/wire/protocol.py (the allowed messages), CWE-20, CWE-400, CWE-502.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from runner.wire.protocol import CHUNK_BYTES, MAX_FRAME_BYTES, Kind, encode_frame, encode_header
from sandkasten.errors import RunnerLost, RunnerProtocolError, SandkastenError
from sandkasten.host.paths import RUNNER_SOCKET, DataPaths
from sandkasten.model import EventType, ExecSpec, Status
from sandkasten.security.attacks.field import Field, put
from sandkasten.security.probes.attempt import Answers, Attempt, attempt, collect

_END_S = 10.0
_FLOOD_S = 1.0
_MAX_READ_BYTES = 1 << 20
_MOST_PORT_EVENTS = 240
"""The bound that docs/events.md promises for a minute."""
_SENT_DESCRIPTORS = 200

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
"""Messages of a hostile runner by name: a description, the weakness, the bytes."""

_HEAD = encode_frame(
    Kind.STARTED,
    b'{"type":"FilePart","path":"/workspace/f","size_bytes":9,"mtime_us":0,"etag":"x","result":"whole","offset":0,"count":9}',
)

FILE_REPLIES: Mapping[str, tuple[str, str, bytes, bytes]] = {
    "file-endless": (
        "more of a file than was asked for",
        "CWE-400",
        _HEAD,
        encode_frame(Kind.DATA, bytes(CHUNK_BYTES)),
    ),
    "file-empty": ("a file of empty pieces without end", "CWE-835", _HEAD, encode_frame(Kind.DATA) * 1000),
    "file-large": (
        "a piece of a file larger than any may be",
        "CWE-400",
        _HEAD + encode_frame(Kind.DATA, bytes(2 * MAX_FRAME_BYTES)),
        b"",
    ),
    "file-output": ("output of a command in a file", "CWE-20", _HEAD + encode_frame(Kind.STDOUT, b"x"), b""),
    "file-other": (
        "a directory instead of a file",
        "CWE-843",
        encode_frame(Kind.REPLY, b'{"type":"Listing","path":"/","entries":[],"more":false}'),
        b"",
    ),
}
"""Answers of a hostile runner to a request for a file: the first bytes, then bytes repeated for ever."""

_PORTS = encode_frame(Kind.STARTED, b'{"type":"Started","exec_id":"x"}')
_FLOOD = b"".join(
    encode_frame(Kind.EVENT, b'{"type":"%b","port":%d,"address":"0.0.0.0"}' % (kind, port))
    for port in range(1, 500)
    for kind in (b"PortOpened", b"PortClosed")
)


@asynccontextmanager
async def impostor(
    path: Path, said: bytes, *, again: bytes = b"", only: bytes = b"", fds: Sequence[int] = ()
) -> AsyncIterator[None]:
    """Listen where the runner did, and answer every request with `said`, then with `again` without end.

    Of the requests only those with the bytes `only` in them are answered; with the first byte go copies of `fds`.
    """
    with _listen_instead(path) as plain:
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(plain))

        async def reply(stream: trio.SocketStream) -> None:
            if only not in await stream.receive_some(65536):
                await trio.sleep_forever()
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                sent = await stream.socket.sendmsg([said], rights)
                await stream.send_all(said[sent:])
                while again:
                    await stream.send_all(again)
            except trio.BrokenResourceError:
                pass  # the daemon has closed the connection
            await trio.sleep_forever()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, reply, [listener])
            yield
            nursery.cancel_scope.cancel()


def _listen_instead(path: Path) -> socket.socket:
    """Bind below a descriptor of the directory: a long path does not fit into a socket address."""
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


Asks = Callable[[Field, str], Awaitable[str]]


async def _say(field: Field, asks: Asks, said: bytes, again: bytes = b"", fds: Sequence[int] = ()) -> Answers:
    sleep = ExecSpec("sleep 60")  # takes the connection that is open
    async with field.session() as session_id:
        async with (
            field.supervisor.open_exec(session_id, sleep),
            impostor(_place(field, session_id), said, again=again, fds=fds),
        ):
            caller = await _ask(field, asks, session_id)
            session = await _wait_crashed(field, session_id)
        return {"caller": caller, "session": session, "witness": await field.ask_witness()}


def _place(field: Field, session_id: str) -> Path:
    return DataPaths(field.config.data_dir).run_dir(session_id) / RUNNER_SOCKET


async def _ask(field: Field, asks: Asks, session_id: str) -> str:
    try:
        return f"believed it: {await asks(field, session_id)}"
    except (RunnerProtocolError, RunnerLost) as error:
        return type(error).__name__
    except SandkastenError as error:
        return f"{type(error).__name__}: {error}"


async def _run(field: Field, session_id: str) -> str:
    return f"status {(await field.supervisor.exec(session_id, ExecSpec('true'))).end.exit_code}"


async def _read(field: Field, session_id: str) -> str:
    """Read a file, and give up where the daemon should have: the attempt must not exhaust its own process."""
    size = pieces = 0
    async with field.supervisor.files(session_id).open_read("f", max_bytes=_MAX_READ_BYTES) as reader:
        async for piece in reader:
            size, pieces = size + len(piece), pieces + 1
            if size > 2 * _MAX_READ_BYTES or pieces > 10_000:
                break
    return f"{size} bytes in {pieces} pieces"


async def _wait_crashed(field: Field, session_id: str) -> str:
    with trio.move_on_after(_END_S * field.patience):
        return str((await field.supervisor.wait_ended(session_id)).status)
    return "lives on"


_REFUSED = ("RunnerProtocolError", str(Status.CRASHED), "answers")


def _attempt(name: str, what: str, stands_for: str, asks: Asks, said: bytes, again: bytes = b"") -> Attempt:
    async def run(field: Field) -> Answers:
        return await _say(field, asks, said, again)

    return attempt(f"runner.{name}", f"answer the daemon with {what}", stands_for, _REFUSED, users=("",))(run)


@attempt(
    "runner.descriptors", "fill the daemon's table of descriptors", "CWE-769", (*_REFUSED, "none kept"), users=("",)
)
async def send_descriptors(field: Field) -> Answers:
    """The daemon takes no descriptor from a sandbox, so the kernel closes those that are sent along."""
    held = os.open(field.outside / "secret", os.O_RDONLY | os.O_CLOEXEC)
    try:
        answers = await _say(field, _run, REPLIES["no-json"][2], fds=[held] * _SENT_DESCRIPTORS)
        kept = sum(_leads_to(fd, field.outside / "secret") for fd in os.listdir("/proc/self/fd")) - 1
    finally:
        os.close(held)
    return {**answers, "descriptors": "none kept" if kept == 0 else f"{kept} kept"}


def _leads_to(fd: str, path: Path) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}") == str(path)
    except OSError:
        return False


@attempt("runner.events", "flood the journal with ports", "CWE-770", ("answers", "bounded"), users=("",))
async def flood_events(field: Field) -> Answers:
    """Flood the journal with port events. An open file occupies one connection, so that the ports are watched on
    another.
    """
    async with field.session() as session_id:
        await put(field.supervisor, session_id, "f", bytes(8 * _MAX_READ_BYTES))
        async with (
            field.supervisor.files(session_id).open_read("f", max_bytes=8 * _MAX_READ_BYTES),
            impostor(_place(field, session_id), _PORTS, again=_FLOOD, only=b'"Watch"'),
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(field.supervisor.exec, session_id, ExecSpec("true"))
            await trio.sleep(_FLOOD_S)
            witness = await field.ask_witness()
            nursery.cancel_scope.cancel()
        told = await _count_ports(field, session_id)
    return {"witness": witness, "events": "bounded" if 0 < told <= _MOST_PORT_EVENTS else f"{told} events"}


async def _count_ports(field: Field, session_id: str) -> int:
    count = 0
    with trio.move_on_after(0.5 * field.patience):
        async with field.supervisor.events(session_id=session_id, after="0") as events:
            async for each in events:
                count += each.type in (EventType.PORT_OPENED, EventType.PORT_CLOSED)
    return count


RUNNER = (
    *(_attempt(name, what, stands_for, _run, said) for name, (what, stands_for, said) in REPLIES.items()),
    *(_attempt(name, *each[:2], _read, *each[2:]) for name, each in FILE_REPLIES.items()),
    *collect(globals()),
)
