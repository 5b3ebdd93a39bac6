"""The real front over a real journal, for one test, and a reader of event streams that sees every write."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import attrs
import pytest
import trio
import trio_websocket

from sandkasten.actors import tree
from sandkasten.actors.services.events import Flush
from sandkasten.config.values import EventsSettings
from sandkasten.journal.ring import Journal
from sandkasten.model import EventType, SessionSpec
from tests.api import harness
from tests.api.harness import KEY, read_until, request_bytes
from tests.waiting import patience


@attrs.frozen
class Front:
    """A server, and the journal behind it."""

    running: harness.RunningTree

    @property
    def journal(self) -> Journal:
        return self.running.supervisor._journal

    def emit(self, *numbers: int, session_id: str = "a" * 24) -> None:
        for number in numbers:
            self.journal.emit(EventType.PORT_OPENED, session_id, port=number, address="::")

    async def flush(self) -> None:
        await self.running.supervisor._writer.ask(Flush())

    async def session(self) -> str:
        return (await self.running.supervisor.create(SessionSpec())).id

    async def no_reader_is_left(self) -> bool:
        return self.journal.readers == 0

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
async def running_front(*, memory_events: int = 8192, kept: int = 100_000, **changes: Any) -> AsyncIterator[Front]:
    """Serve the real front over the daemon's tree, whose journal has this many events in memory and in the database;
    `changes` are settings.
    """
    with attrs.validators.disabled():  # fewer than a daemon may be told to keep
        events = EventsSettings(keep=kept)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "Journal", partial(Journal, memory_events=memory_events))
        async with harness.running_front(events=events, **changes) as running:
            yield Front(running)
