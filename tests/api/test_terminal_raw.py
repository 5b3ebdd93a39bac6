"""A terminal without messages, as xterm.js' attach add-on speaks: it sends strings and bytes, and draws what comes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from runner.wire.protocol import TerminalSize
from sandkasten.api.websocket.terminal_messages import PROTOCOL, RAW_PROTOCOL
from sandkasten.model import ShellSpec, Stream
from tests.api.harness import KEY, RunningTree, running_front
from tests.api.terminal_screen import screen, terminal
from tests.api.ws_client import Talk, make_session, talk
from tests.fakes.runner import Script
from tests.waiting import patience


@asynccontextmanager
async def attached(
    running: RunningTree, query: str = "", *, session_id: str | None = None, key: str | None = KEY
) -> AsyncIterator[Talk]:
    """Open a terminal that echoes, in the raw subprotocol."""
    running.tree.scripts.setdefault("", Script(echo=True))
    session_id = session_id or await make_session(running)
    path = f"/v1/sessions/{session_id}/terminal/ws{query}"
    async with talk(running, path, key=key, subprotocols=(RAW_PROTOCOL,)) as client:
        yield client


async def drawn(client: Talk, size: int) -> bytes:
    """Return the next `size` bytes on the screen; nothing but bytes may come."""
    seen = b""
    while len(seen) < size:
        with trio.fail_after(patience()):
            message = await client.connection.get_message()
        assert isinstance(message, bytes), message
        seen += message
    return seen


@pytest.mark.parametrize("typed", ["ls\r", "1", "ä €", '{"type":"resize","cols":1,"rows":1}', "{", b"\x1b[M \xff"])
async def test_every_frame_is_typed(typed: str | bytes) -> None:
    """Strings, also those that are JSON or one of our messages, and the bytes of a mouse report."""
    async with running_front() as running, attached(running) as client:
        assert client.connection.subprotocol == RAW_PROTOCOL
        data = typed.encode() if isinstance(typed, str) else typed
        await client.connection.send_message(typed)
        assert await drawn(client, len(data)) == data
        assert terminal(running).stdin == data


async def test_the_end_is_the_close_frame_alone() -> None:
    """The last output comes before; no message does."""
    async with running_front() as running, attached(running) as client:
        await client.connection.send_message("x")
        await drawn(client, 1)
        run = terminal(running)
        run.write(Stream.STDOUT, b"logout")
        run.finish(cause="exited", exit_code=7)
        assert await drawn(client, 6) == b"logout"
        assert await client.hear_close() == (1000, "the terminal has ended")


@pytest.mark.parametrize(
    ("query", "said"), [("?window=4096", "window"), ("?take_over=true", "take_over"), ("?cols=0", "cols")]
)
async def test_a_refusal_is_the_close_frame_alone(query: str, said: str) -> None:
    """The reason has the error's text, which a screen does not draw."""
    async with running_front() as running, attached(running, query) as client:
        with trio.fail_after(patience()):
            code, reason = await client.hear_close()
        assert (code, said in reason) == (4400, True), reason


async def test_a_shell_is_taken_over_by_the_query() -> None:
    """The other viewer only watches; its keys are dropped without a word."""
    async with running_front() as running:
        session_id = await make_session(running)
        await running.supervisor.open_shell(session_id, ShellSpec("agent"))
        async with (
            attached(running, "?shell=agent", session_id=session_id) as watcher,
            attached(running, "?shell=agent&take_over=true", session_id=session_id) as taker,
        ):
            await watcher.connection.send_message("dropped")
            await taker.connection.send_message("ls\n")
            assert await drawn(watcher, 3) == await drawn(taker, 3) == b"ls\n"
            assert terminal(running).stdin == b"ls\n"


async def test_a_size_is_set_in_the_query_and_over_http() -> None:
    """The terminal is found among the session's runs."""
    async with running_front() as running:
        session_id = await make_session(running)
        async with attached(running, "?cols=100&rows=30", session_id=session_id) as client:
            await client.connection.send_message("x")
            await drawn(client, 1)
            run = terminal(running)
            path = f"/v1/sessions/{session_id}/execs"
            async with running.client() as http:
                (listed,) = (await http.get(f"{path}?kind=terminal")).json()["execs"]
                done = await http.post(f"{path}/{listed['exec_id']}/resize", json={"cols": 120, "rows": 50})
            assert (done.status_code, listed["exec_id"]) == (200, run.exec_id)
            assert run.sizes[-1] == TerminalSize(120, 50)


async def test_a_page_shows_its_key_before_it_attaches() -> None:
    """The one message of a raw connection, since a page can't set headers; what follows is typed."""
    async with running_front() as running, attached(running, key=None) as client:
        await client.connection.send_message(json.dumps({"type": "auth", "key": KEY}))
        await client.connection.send_message("y")
        assert await drawn(client, 1) == b"y"
    async with running_front() as running, attached(running, key=None) as client:
        await client.connection.send_message("ls\r")
        assert (await client.hear_close())[0] == 4401


async def test_the_first_subprotocol_that_is_known_counts() -> None:
    """A client may offer both kinds; one that offers none gets messages."""
    async with running_front() as running:
        session_id = await make_session(running)
        path = f"/v1/sessions/{session_id}/terminal/ws"
        for offered, chosen in (
            ((PROTOCOL, RAW_PROTOCOL), PROTOCOL),
            (("other", RAW_PROTOCOL, PROTOCOL), RAW_PROTOCOL),
        ):
            async with talk(running, path, subprotocols=offered) as client:
                assert client.connection.subprotocol == chosen
        async with screen(running, session_id) as view:
            assert view.ready["type"] == "ready"
