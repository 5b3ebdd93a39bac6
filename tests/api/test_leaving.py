"""Clients that leave in the middle: what ends with them, and what the log says of it, which is nothing."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct

import pytest
import trio
import trio.testing

from sandkasten.api.http.guard import Receive, Scope, Send
from sandkasten.model import SessionSpec
from tests.api.harness import (
    PATIENCE_S,
    parse_answer,
    read_to_end,
    request_bytes,
    running_app,
    running_front,
    send_and_read,
)
from tests.api.test_front import Gate
from tests.api.ws_client import UPGRADE, handshake
from tests.fakes.runner import Script
from tests.waiting import patience, until


async def test_a_reset_during_a_json_request_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """The libraries between wrap what the answer's writing raises; it is still only a client that left."""

    async def is_over() -> bool:
        return any(record.message == "request" for record in caplog.records)

    async with running_front() as running:
        gate = Gate(running)
        with caplog.at_level(logging.INFO, "sandkasten"):
            stream = await running.connect()
            await stream.send_all(request_bytes("POST", "/v1/sessions", body=b"{}"))
            await gate.entered.wait()
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await stream.aclose()
            await trio.testing.wait_all_tasks_blocked(0.02)
            gate.opened.set()
            await until(is_over)
        assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    ("method", "rest", "body"),
    [
        ("GET", "list", b""),
        ("POST", "glob", b'{"pattern": "*"}'),
        ("GET", "view?path=f", b""),
        ("POST", "copy", b'{"from": "f", "to": "g"}'),
        ("POST", "edit", b'{"edits": [{"path": "f", "op": "delete"}]}'),
        ("DELETE", "?path=f", b""),
        ("POST", "archive", b"no tar archive"),
    ],
)
async def test_a_request_for_files_ends_with_its_client(
    caplog: pytest.LogCaptureFixture, method: str, rest: str, body: bytes
) -> None:
    """Nobody waits for the list of a tree that takes long, or is told that a copy was made."""

    async def is_over() -> bool:
        return any(record.message == "request" for record in caplog.records)

    async with running_front() as running:
        session = await running.supervisor.create(SessionSpec())
        running.tree.runner.files.gate = trio.Event()
        with caplog.at_level(logging.INFO, "sandkasten"):
            stream = await running.connect()
            path = f"/v1/sessions/{session.id}/fs/{rest}".replace("/?", "?")
            await stream.send_all(request_bytes(method, path, body=body))
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert not await is_over()
            await stream.aclose()
            await until(is_over)


async def test_a_client_that_ends_its_side_within_its_body_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """The refusal of what it announced and that of what came of it may meet on the socket."""
    announced = b"POST /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1025\r\n\r\n"
    async with running_front() as running:
        with caplog.at_level(logging.WARNING, "sandkasten"):
            for _ in range(20):
                await send_and_read(running, announced)
        assert caplog.records == []


@pytest.mark.parametrize("rest", ["exec", "exec/stream"])
async def test_who_ends_its_side_while_its_command_runs_has_left(rest: str) -> None:
    """From here that looks the same as a socket that was closed, and a command must not go on for nobody."""
    async with running_front() as running, await running.connect() as stream:
        session = await running.supervisor.create(SessionSpec())
        running.tree.scripts["a"] = Script(hold=trio.Event())
        body = b'{"cmd":"a","on_disconnect":"cancel"}'
        await stream.send_all(request_bytes("POST", f"/v1/sessions/{session.id}/{rest}", body=body))
        await running.tree.run_opened.wait()
        await stream.send_eof()
        with trio.fail_after(patience()):
            await running.tree.runs[0].cancelled.wait()
        assert b"exit_code" not in await read_to_end(stream)


async def test_who_ends_its_side_is_still_answered_where_nothing_is_waited_for() -> None:
    """By both halves."""
    async with running_front() as running:
        session = await running.supervisor.create(SessionSpec())
        for path in (f"/v1/sessions/{session.id}", f"/v1/sessions/{session.id}/execs"):
            async with await running.connect() as stream:
                await stream.send_all(request_bytes("GET", path))
                await stream.send_eof()
                assert parse_answer(await read_to_end(stream))[0] == 200


@pytest.mark.parametrize(
    ("headers", "status"), [({"Authorization": "Bearer wrong"}, 401), ({"Origin": "http://evil.example"}, 403)]
)
async def test_a_refused_handshake_says_that_the_connection_ends(headers: dict[str, str], status: int) -> None:
    """A proxy must not send another request on it."""
    async with running_front() as running, await running.connect() as stream:
        await stream.send_all(handshake("/v1/events", headers))
        got, fields, _ = parse_answer(await read_to_end(stream))
        assert (got, fields["connection"]) == (status, "close")


async def test_a_handshake_of_another_version_is_told_the_spoken_one() -> None:
    """RFC 6455 §4.2.2."""
    async with running_front() as running, await running.connect() as stream:
        fields = UPGRADE | {"Sec-WebSocket-Version": "12"}
        head = "GET /v1/events HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        await stream.send_all(head.encode() + b"\r\n")
        status, answered, _ = parse_answer(await read_to_end(stream))
        assert (status, answered["connection"], answered["sec-websocket-version"]) == (400, "close", "13")


async def test_an_early_answer_to_more_than_was_taken_in_ends_the_connection() -> None:
    """Also when all that lies between protocol and application is full of a body that nobody reads: the client is
    answered while it is still sending, and nothing of the connection stays."""
    is_full = trio.Event()
    left: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await is_full.wait()
        await send({"type": "http.response.start", "status": 413, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body", "body": b"too much", "more_body": False})
        left.append(scope["path"])

    async with running_app(app) as running, await running.connect() as stream, trio.open_nursery() as nursery:

        async def pour() -> None:
            await stream.send_all(b"POST /a HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n")
            with contextlib.suppress(trio.BrokenResourceError):
                while True:
                    await stream.send_all(bytes(1 << 20))

        nursery.start_soon(pour)
        await trio.testing.wait_all_tasks_blocked(0.05)
        is_full.set()
        answer = await read_to_end(stream)
        assert answer.startswith(b"HTTP/1.1 413")
        assert b"too much" in answer

        async def has_left() -> bool:
            return left == ["/a"]

        await until(has_left)
        assert await running.stop() < PATIENCE_S
