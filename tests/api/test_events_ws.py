"""Events over a WebSocket: the same ones, cursors between them, and nothing to say for the client."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio_websocket

from sandkasten.api.websocket.events import SUBPROTOCOL
from sandkasten.model import EventType
from tests.api.event_front import running_front
from tests.api.harness import KEY
from tests.waiting import until


async def messages(connection: trio_websocket.WebSocketConnection, count: int) -> list[dict[str, Any]]:  # JSON values
    return [json.loads(await connection.get_message()) for _ in range(count)]


async def close_code_of(connection: trio_websocket.WebSocketConnection) -> int | None:
    with pytest.raises(trio_websocket.ConnectionClosed) as closed:
        await connection.get_message()
    assert closed.value.reason is not None
    return closed.value.reason.code


async def test_a_websocket_gets_a_cursor_and_then_the_same_events() -> None:
    """Message by message what the event stream has as data."""
    async with running_front() as front:
        session_id = await front.session()
        async with (
            front.follow(session_id=session_id) as stream,
            front.websocket(session_id=session_id, subprotocols=[SUBPROTOCOL]) as connection,
        ):
            assert connection.subprotocol == SUBPROTOCOL
            assert await messages(connection, 1) == [{"type": "cursor", "cursor": front.journal.head}]
            await stream.next()
            front.emit(1)
            front.emit(2, 3, session_id=session_id)
            assert await messages(connection, 2) == await stream.events(2)


async def test_a_websocket_reads_on_from_a_cursor_and_filters() -> None:
    """With the same query."""
    async with running_front() as front:
        for kind in EventType:
            front.journal.emit(kind, "a" * 24)
        async with front.websocket("?cursor=0&types=oom,session.lost") as connection:
            assert [each["type"] for each in await messages(connection, 3)] == ["cursor", "session.lost", "oom"]


async def test_a_websocket_learns_of_the_cursor_in_silence() -> None:
    """Only when there is a new one."""
    async with running_front(ping_interval_s=0.05) as front, front.websocket("?types=oom") as connection:
        await messages(connection, 1)
        front.emit(1, 2)
        assert await messages(connection, 1) == [{"type": "cursor", "cursor": front.journal.head}]
        front.journal.emit(EventType.OOM, "a" * 24)
        assert (await messages(connection, 1))[0]["type"] == "oom"


async def test_an_ended_session_can_be_looked_at_over_a_websocket() -> None:
    """Unlike its commands."""
    async with running_front() as front:
        session_id = await front.session()
        await front.running.tree.nsinit.kill(session_id)
        await front.running.supervisor.wait_ended(session_id)
        async with front.websocket("?cursor=0", session_id=session_id) as connection:
            assert [each["type"] for each in await messages(connection, 3)][1:] == [
                "session.created",
                "session.crashed",
            ]


@pytest.mark.parametrize(
    ("query", "code", "error_code"),
    [
        ("?cursor=1", 4400, "INVALID_REQUEST"),
        ("?types=x", 4400, "INVALID_REQUEST"),
        ("?cursor=%s", 4410, "CURSOR_GONE"),
    ],
)
async def test_a_websocket_is_told_what_is_wrong_and_closed(query: str, code: int, error_code: str) -> None:
    """The reason is told once the client has shown its key."""
    async with running_front(memory_events=8, kept=10) as front:
        first = front.journal.head
        for number in range(40):
            front.emit(number)
            await front.flush()
        async with front.websocket(query.replace("%s", first), extra_headers=[]) as connection:
            await connection.send_message(json.dumps({"type": "auth", "key": KEY}))
            error = (await messages(connection, 1))[0]
            assert (error["type"], error["error_code"]) == ("error", error_code)
            assert await close_code_of(connection) == code
        assert front.journal.readers == 0


@pytest.mark.parametrize("message", ["{}", b"\x00", "x" * 100_000])
async def test_a_websocket_that_talks_is_closed(message: str | bytes) -> None:
    """There is nothing to say here."""
    async with running_front() as front:
        async with front.websocket() as connection:
            await messages(connection, 1)
            await connection.send_message(message)
            assert await close_code_of(connection) == 4400
        await until(front.no_reader_is_left)


async def test_a_websocket_that_leaves_frees_its_place() -> None:
    """In good order or not."""
    async with running_front() as front:
        async with front.websocket() as connection:
            await messages(connection, 1)
        await until(front.no_reader_is_left)
        async with front.websocket() as connection:
            await messages(connection, 1)
            await connection._stream.aclose()
        await until(front.no_reader_is_left)
