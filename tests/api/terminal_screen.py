"""A viewer of a terminal over a WebSocket, for tests: it types, sees and hears."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
import trio.testing

from tests.api.harness import RunningTree
from tests.api.ws_client import Talk, make_session, talk
from tests.fakes.runner import Script, ScriptedRun
from tests.waiting import patience


class Screen:
    """One viewer."""

    def __init__(self, talk: Talk, ready: dict[str, Any]) -> None:  # JSON values
        self.talk = talk
        self.ready = ready

    async def type(self, data: bytes) -> None:
        await self.talk.connection.send_message(data)

    async def hear(self) -> dict[str, Any] | bytes:  # JSON values
        with trio.fail_after(patience()):
            message = await self.talk.connection.get_message()
        if isinstance(message, bytes):
            return message
        value: dict[str, Any] = json.loads(message)  # JSON values
        return value

    async def see(self, size: int) -> bytes:
        """Return the next `size` bytes of output."""
        seen = b""
        while len(seen) < size:
            message = await self.hear()
            assert isinstance(message, bytes), message
            seen += message
        return seen

    async def is_quiet(self) -> bool:
        """Whether nothing comes before the answer to a ping."""
        await self.talk.say("ping", data="quiet?")
        return await self.hear() == {"type": "pong", "data": "quiet?"}


@asynccontextmanager
async def screen(running: RunningTree, session_id: str | None = None, query: str = "") -> AsyncIterator[Screen]:
    """Open a terminal, which echoes unless it has another script, and take its `ready`."""
    running.tree.scripts.setdefault("", Script(echo=True))
    session_id = session_id or await make_session(running)
    async with talk(running, f"/v1/sessions/{session_id}/terminal/ws{query}") as client:
        yield Screen(client, await client.hear_text("ready"))


def terminal(running: RunningTree) -> ScriptedRun:
    """Return the newest run."""
    return running.tree.runs[-1]
