"""The HTTP front of the field's supervisor, asked without a network: text out of a session as a client gets it.

Speaks ASGI to the real application. The parsers here are strict: bytes that a client's parser might take for more than
one value raise `ValueError`. Sources: asgi.readthedocs.io; HTML Living Standard §9.2.6; RFC 6455 §5.2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import unquote

import attrs
import orjson
import trio

from sandkasten.api.app import make_app
from sandkasten.api.http.guard import Message, Receive, Scope, Send
from sandkasten.api.http.settings import ApiSettings
from sandkasten.security.attacks.field import Field

TEXT, BINARY = 1, 2
_LINE_END = re.compile("\r\n|\n|\r")
_LENGTHS = {126: 2, 127: 8}

Frame = tuple[int, bytes]
"""Opcode and payload of a WebSocket message."""


@attrs.frozen
class HttpAnswer:
    """Status, headers and body of one answer."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


class Front:
    """Client of the field's front, in this process."""

    def __init__(self, field: Field) -> None:
        supervisor, key = field.supervisor, str(field.config.api_key)
        self._app = make_app(supervisor, settings=ApiSettings(api_key=key), shares=supervisor.shares)
        self._headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {key}".encode())]

    async def ask(
        self, method: str, target: str, value: object = None, *, until: Callable[[bytes], bool] | None = None
    ) -> HttpAnswer:
        """Return the answer to a request with a value as its JSON body; of an endless answer, the part until `until`
        held.
        """
        bodies = [b"" if value is None else orjson.dumps(value)]
        heads: list[Message] = []
        heard, has_left = bytearray(), trio.Event()

        async def receive() -> Message:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            await trio.lowlevel.checkpoint()
            if message["type"] == "http.response.start":
                heads.append(message)
                return
            heard.extend(message.get("body", b""))
            if until is not None and until(bytes(heard)):
                has_left.set()

        await self._serve({"type": "http", "http_version": "1.1", "method": method}, target, receive, send)
        return HttpAnswer(heads[0]["status"], tuple(heads[0]["headers"]), bytes(heard))

    async def talk(self, target: str, said: Sequence[object], *, until: Callable[[list[Frame]], bool]) -> list[Frame]:
        """Send these values as JSON over a WebSocket, and return the messages received until `until` held."""
        messages: list[Message] = [{"type": "websocket.connect"}]
        messages += [{"type": "websocket.receive", "text": orjson.dumps(each).decode()} for each in said]
        heard, has_left = bytearray(), trio.Event()

        async def receive() -> Message:
            if messages:
                return messages.pop(0)
            await has_left.wait()
            return {"type": "websocket.disconnect", "code": 1000}

        async def send(message: Message) -> None:
            await trio.lowlevel.checkpoint()
            heard.extend(message.get("frames", b""))
            if message["type"] == "websocket.close" or until(read_frames(bytes(heard))):
                has_left.set()

        await self._serve({"type": "websocket", "http_version": "1.1", "subprotocols": []}, target, receive, send)
        return read_frames(bytes(heard))

    async def _serve(self, kind: dict[str, Any], target: str, receive: Receive, send: Send) -> None:
        path, _, query = target.partition("?")
        scope: Scope = {
            **kind,
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "scheme": "http" if kind["type"] == "http" else "ws",
            "path": unquote(path),
            "raw_path": path.encode("ascii"),
            "query_string": query.encode("ascii"),
            "root_path": "",
            "headers": self._headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "extensions": {},
            "state": {},
        }
        await self._app(scope, receive, send)


def read_events(body: bytes) -> list[dict[str, str]]:
    """Return the events of a stream, each as its fields."""
    events: list[dict[str, str]] = []
    fields: dict[str, str] = {}
    for line in _LINE_END.split(body.decode()):
        if not line:
            if "data" in fields:
                events.append(fields)
            fields = {}
            continue
        name, _, value = line.partition(":")
        if name in fields or name not in ("", "id", "event", "data"):
            raise ValueError(f"a stray field {name!r}")
        if name:
            fields[name] = value.removeprefix(" ")
    return events


def read_frames(data: bytes) -> list[Frame]:
    """Return the messages in a server's bytes; the last one must be complete."""
    frames, place = [], 0
    while place < len(data):
        first, short = data[place : place + 2]
        if first not in (0x80 | TEXT, 0x80 | BINARY) or short > 127:
            raise ValueError(f"a stray frame {first:#04x} {short:#04x}")
        wide = _LENGTHS.get(short, 0)
        start = place + 2 + wide
        length = int.from_bytes(data[place + 2 : start], "big") if wide else short
        place = start + length
        if place > len(data):
            raise ValueError("a frame that was cut")
        frames.append((first & 0x0F, data[start:place]))
    return frames
