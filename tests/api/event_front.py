"""The real front over a real journal, for one test, and a reader of event streams that sees every write."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import trio
import trio_websocket

from sandkasten.actors.services.events import EventReader
from sandkasten.api.app import make_app
from sandkasten.model import EventType, SessionSpec
from tests.actors.event_node import EventNode, running_node
from tests.api.harness import KEY, Running, make_settings, read_until, request_bytes, running_app
from tests.fakes.supervisor import FakeSupervisor
from tests.waiting import patience


class JournalSupervisor(FakeSupervisor):
    """Sessions in memory, events from a journal as the real supervisor has it."""

    def __init__(self, node: EventNode) -> None:
        super().__init__()
        self.event_node = node

    def emit(self, kind: EventType, session_id: str, **data: object) -> None:
        self.event_node.journal.emit(kind, session_id, **data)

    @asynccontextmanager
    async def events(  # type: ignore[override]  # the real reader, not the fake's
        self, *, session_id: str | None = None, after: str | None = None
    ) -> AsyncIterator[EventReader]:
        if session_id is not None:
            await self.get(session_id)
        async with self.event_node.reader(session_id, after=after) as reader:
            yield reader


@attrs.frozen
class Front:
    """A server over a journal."""

    running: Running
    supervisor: JournalSupervisor

    @property
    def node(self) -> EventNode:
        return self.supervisor.event_node

    async def session(self) -> str:
        return (await self.supervisor.create(SessionSpec())).id

    async def no_reader_is_left(self) -> bool:
        return self.node.journal.readers == 0

    @asynccontextmanager
    async def follow(
        self, query: str = "", *, session_id: str | None = None, headers: dict[str, str] | None = None
    ) -> AsyncIterator[Blocks]:
        """Open an event stream and read it byte by byte."""
        async with await self.running.connect() as connection:
            await connection.send_all(request_bytes("GET", path_of(session_id) + query, headers=headers))
            head, _, rest = (await read_until(connection, b"\r\n\r\n")).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 "), head
            yield Blocks(connection, head, rest)

    @asynccontextmanager
    async def websocket(
        self, query: str = "", *, session_id: str | None = None, **options: Any
    ) -> AsyncIterator[trio_websocket.WebSocketConnection]:  # options: those of trio_websocket
        url = self.running.url.replace("http", "ws", 1) + path_of(session_id) + query
        options.setdefault("extra_headers", [("Authorization", f"Bearer {KEY}")])
        with trio.fail_after(patience()):
            async with trio_websocket.open_websocket_url(url, **options) as connection:
                yield connection
            await connection._stream.aclose()  # it forgets to when the server closed first


class Blocks:
    """The blocks of an event stream as they come: each is one HTTP chunk, so one write."""

    def __init__(self, connection: trio.SocketStream, head: bytes, rest: bytes) -> None:
        self.connection, self.head, self._buffer = connection, head, rest

    async def next(self) -> bytes:
        """Return the next block, `b""` at the end of the answer."""
        with trio.fail_after(patience()):
            while True:
                size, mark, rest = self._buffer.partition(b"\r\n")
                if mark and len(rest) >= int(size, 16) + 2:
                    self._buffer = rest[int(size, 16) + 2 :]
                    return rest[: int(size, 16)]
                data = await self.connection.receive_some(64 * 1024)
                assert data, "closed in the middle"
                self._buffer += data

    async def fields(self) -> dict[str, str]:
        """Return the next block's fields; a comment is the field without a name."""
        block = await self.next()
        assert block.endswith(b"\n\n")
        assert block.count(b"\n\n") == 1
        lines = block.decode("ascii").splitlines()
        return dict(line.split(": ", 1) for line in lines if line)

    async def events(self, count: int) -> list[dict[str, Any]]:  # JSON values
        """Return the next events' JSON, pings left out."""
        found: list[dict[str, Any]] = []
        while len(found) < count:
            fields = await self.fields()
            if "data" in fields:
                told = json.loads(fields["data"])
                assert (fields["id"], fields["event"]) == (told["cursor"], told["type"])
                found.append(told)
        return found


def path_of(session_id: str | None) -> str:
    return "/v1/events" if session_id is None else f"/v1/sessions/{session_id}/events"


@asynccontextmanager
async def running_front(
    path: Path, *, memory_events: int = 8192, kept: int = 100_000, **changes: Any
) -> AsyncIterator[Front]:
    """Serve the real front over a journal on `path`; `changes` are settings."""
    async with running_node(path, memory_events=memory_events, kept=kept) as node:
        supervisor = JournalSupervisor(node)
        async with running_app(make_app(supervisor, settings=make_settings(**changes)), **changes) as running:
            yield Front(running, supervisor)
