"""When a stream of events says something, by the clock: the front is asked directly, with the settings it has."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from sandkasten.api.app import make_app
from sandkasten.api.http.settings import ApiSettings
from sandkasten.model import SessionSpec, Stream
from tests.api.harness import KEY
from tests.fakes.runner import Script
from tests.fakes.tree import ScriptedTree, open_scripted

PATHS = ("exec/stream", "events")
IDLE_S = 0.005
"""Real time in which threads and sockets have done what there was to do."""


@asynccontextmanager
async def open_timed(clock: trio.testing.MockClock) -> AsyncIterator[tuple[ScriptedTree, str]]:
    """Run a tree with a session, where `cmd` goes on for ever. While the context is open time passes only when nothing
    else happens; the tree starts and stops by real time.
    """
    clock.rate = 1
    async with open_scripted() as tree:
        tree.scripts["cmd"] = Script(hold=trio.Event())
        session = await tree.supervisor.create(SessionSpec())
        clock.rate, clock.autojump_threshold = 0, IDLE_S
        try:
            yield tree, session.id
        finally:
            clock.rate, clock.autojump_threshold = 1, math.inf


class Asked:
    """One request to the front, made as a server would; `heard` is each part of the answer and when it came."""

    def __init__(self, tree: ScriptedTree, method: str, path: str, body: dict[str, Any]) -> None:  # JSON values
        self._app = make_app(tree.supervisor, settings=ApiSettings(api_key=KEY), shares=tree.supervisor.shares)
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"authorization", b"Bearer " + KEY.encode())],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self._body = json.dumps(body).encode()
        self._is_read = False
        self.heard: list[tuple[float, bytes]] = []

    async def run(self) -> None:
        await self._app(self._scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:  # an ASGI message
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await trio.sleep_forever()
        raise AssertionError

    async def _send(self, message: Any) -> None:  # an ASGI message
        if message.get("body"):
            self.heard.append((trio.current_time(), message["body"]))


@pytest.mark.parametrize("path", PATHS)
async def test_silence_is_a_ping_every_15_seconds(path: str, mock_clock: trio.testing.MockClock) -> None:
    """Of a command and of a session's events, unless somebody set it otherwise."""
    async with open_timed(mock_clock) as (tree, session_id):
        method = "GET" if path == "events" else "POST"
        asked = Asked(tree, method, f"/v1/sessions/{session_id}/{path}", {"cmd": "cmd"})
        began = trio.current_time()
        with trio.move_on_after(50):
            await asked.run()
    pings = [round(at - began, 3) for at, part in asked.heard if part.startswith(b": ping")]
    assert pings[-3:] == [15, 30, 45]


async def test_output_is_gathered_for_15_milliseconds_at_most(mock_clock: trio.testing.MockClock) -> None:
    """The first output goes out at once. Output that follows within 15 ms goes out together, and never later than
    that.
    """
    async with open_timed(mock_clock) as (tree, session_id), trio.open_nursery() as nursery:
        asked = Asked(tree, "POST", f"/v1/sessions/{session_id}/exec/stream", {"cmd": "cmd"})
        written: list[float] = []
        nursery.start_soon(asked.run)
        await trio.sleep(1)
        for _ in range(100):
            tree.runs[0].write(Stream.STDOUT, b"x")
            written.append(trio.current_time())
            await trio.sleep(0.001)
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    events = [(at, part) for at, part in asked.heard if b"event: chunk" in part]
    sizes = [len(json.loads(part.split(b"data: ")[1].split(b"\n")[0])["chunk"]) for _, part in events]
    assert (sum(sizes), sizes[0], events[0][0]) == (100, 1, written[0])
    assert 6 <= len(events) <= 10
    sent = [at for (at, _), size in zip(events, sizes, strict=True) for _ in range(size)]
    assert max(late - early for late, early in zip(sent, written, strict=True)) <= 0.0151
