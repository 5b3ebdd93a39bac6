"""A client of the API's WebSockets on trio-websocket: it opens, says, and takes apart what comes."""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio
from trio_websocket import ConnectionClosed, WebSocketConnection, wrap_client_stream

from sandkasten.api.websocket.exec_messages import HEADER, MORE
from sandkasten.model import SessionSpec
from tests.api.harness import KEY, PATIENCE_S, Running, RunningTree, read_to_end, read_until
from tests.fakes.runner import Script, ScriptedRun
from tests.waiting import patience

UPGRADE = {
    "Host": "localhost",
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    "Sec-WebSocket-Version": "13",
}
BEARER = {"Authorization": f"Bearer {KEY}"}


def handshake(path: str, headers: dict[str, str] | None = None) -> bytes:
    """Return an upgrade request."""
    fields = UPGRADE | (BEARER if headers is None else headers)
    return f"GET {path} HTTP/1.1\r\n".encode() + b"".join(f"{k}: {v}\r\n".encode() for k, v in fields.items()) + b"\r\n"


def client_frame(opcode: int, payload: bytes, *, is_final: bool = True) -> bytes:
    """Return a frame masked with zeros (RFC 6455 §5.2)."""
    first = (0x80 if is_final else 0) | opcode
    if len(payload) < 126:
        return struct.pack("!BB4x", first, 0x80 | len(payload)) + payload
    if len(payload) < 65536:
        return struct.pack("!BBH4x", first, 0x80 | 126, len(payload)) + payload
    return struct.pack("!BBQ4x", first, 0x80 | 127, len(payload)) + payload


async def close_code(stream: trio.SocketStream) -> int:
    """Read to the end and return the code of the close frame, the last one (RFC 6455 §5.5.1)."""
    received = await read_to_end(stream)
    start = received.rindex(b"\x88")
    return int(struct.unpack_from("!H", received, start + 2)[0])


@attrs.frozen
class Chunk:
    """A binary frame that came. `more`: another part of the same piece follows."""

    channel: int
    tag: int
    sequence: int
    data: bytes
    more: bool = False


Message = dict[str, Any] | Chunk  # JSON values


class Talk:
    """One connection. What it waits for must come within `PATIENCE_S`."""

    def __init__(self, connection: WebSocketConnection) -> None:
        self.connection = connection

    async def say(self, kind: str, /, **fields: Any) -> None:  # JSON values
        await self.connection.send_message(json.dumps({"type": kind} | fields))

    async def feed(self, channel: int, data: bytes) -> None:
        """Send input."""
        await self.connection.send_message(HEADER.pack(channel, 0, 0) + data)

    async def hear(self) -> Message:
        """Return the next message."""
        with trio.fail_after(patience()):
            message = await self.connection.get_message()
        if isinstance(message, str):
            value: dict[str, Any] = json.loads(message)  # JSON values
            return value
        channel, tag, sequence = HEADER.unpack_from(message)
        return Chunk(channel, tag & ~MORE, sequence, bytes(message[HEADER.size :]), bool(tag & MORE))

    async def hear_text(self, kind: str) -> dict[str, Any]:  # JSON values
        """Return the next message, which must be of this type."""
        message = await self.hear()
        assert isinstance(message, dict), message
        assert message["type"] == kind, message
        return message

    async def hear_until(self, kind: str, channel: int | None = None) -> list[Message]:
        """Return what comes up to and with a message of this type, on a channel if one is named."""
        heard: list[Message] = []
        while True:
            heard.append(await self.hear())
            last = heard[-1]
            if isinstance(last, dict) and last["type"] == kind and channel in (None, last.get("id")):
                return heard

    async def run(self, channel: int, cmd: str, **fields: Any) -> list[Message]:  # JSON values
        """Start a command, and return what is heard of it to its end."""
        await self.say("start", id=channel, cmd=cmd, **fields)
        return await self.hear_until("exit", channel)

    async def hear_close(self) -> tuple[int, str]:
        """Wait until the server has closed; return its code and reason. What comes before is dropped."""
        with trio.fail_after(patience()):
            try:
                while True:
                    await self.connection.get_message()
            except ConnectionClosed:
                reason = self.connection.closed
                assert reason is not None
                return reason.code, reason.reason or ""


def output_of(messages: list[Message], tag: int = 1) -> bytes:
    """Return the bytes of a stream."""
    return b"".join(each.data for each in messages if isinstance(each, Chunk) and each.tag == tag)


@asynccontextmanager
async def talk(
    running: Running,
    path: str,
    *,
    key: str | None = KEY,
    headers: dict[str, str] | None = None,
    subprotocols: tuple[str, ...] = (),
) -> AsyncIterator[Talk]:
    """Open a WebSocket. `key` None: no `Authorization` header."""
    fields = (headers or {}) | ({} if key is None else {"Authorization": f"Bearer {key}"})
    async with await running.connect() as stream, trio.open_nursery() as nursery:
        with trio.fail_after(patience()):
            connection = await wrap_client_stream(
                nursery,
                stream,
                f"127.0.0.1:{running.port}",
                path,
                subprotocols=subprotocols,
                extra_headers=[(name.encode(), value.encode()) for name, value in fields.items()],
                message_queue_size=0,
                max_message_size=2**30,
            )
        yield Talk(connection)
        with trio.move_on_after(patience(PATIENCE_S)):
            await connection.aclose()
        nursery.cancel_scope.cancel()


async def make_session(running: RunningTree) -> str:
    """Return the id of a fresh session."""
    return (await running.supervisor.create(SessionSpec())).id


@asynccontextmanager
async def exec_talk(running: RunningTree, session_id: str | None = None, **options: Any) -> AsyncIterator[Talk]:
    """Open an exec WebSocket, of a fresh session unless one is named, and take its `hello`. `options` as for `talk`."""
    session_id = session_id or await make_session(running)
    async with talk(running, f"/v1/sessions/{session_id}/exec/ws", **options) as client:
        await client.hear_text("hello")
        yield client


async def started(running: RunningTree, client: Talk, channel: int = 1, **fields: Any) -> ScriptedRun:  # JSON values
    """Start a command that waits to be told to end, and for no other command, and return it."""
    running.tree.scripts.setdefault("wait", Script(hold=trio.Event()))
    await client.say("start", id=channel, cmd="wait", **{"mode": "stateless"} | fields)
    await client.hear_text("started")
    return running.tree.runs[-1]


async def is_quiet(client: Talk) -> bool:
    """Whether a ping is answered by its pong and nothing comes before it."""
    await client.say("ping", data="quiet?")
    message = await client.hear()
    return isinstance(message, dict) and message["type"] == "pong"


def last(messages: list[Message]) -> dict[str, Any]:  # JSON values
    """Return the last message, which is text."""
    message = messages[-1]
    assert isinstance(message, dict)
    return message


async def opened(running: RunningTree, stream: trio.SocketStream) -> None:
    """Shake hands and read `hello`."""
    await stream.send_all(handshake(f"/v1/sessions/{await make_session(running)}/exec/ws"))
    await read_until(stream, b'"hello"')
