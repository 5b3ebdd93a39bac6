"""The way in to a WebSocket, its limits, and its ends: what holds whatever is said on it."""

from __future__ import annotations

import json
import logging
import struct
from typing import NoReturn

import pytest
import trio

from sandkasten.api.http.websocket import PINGS_UNANSWERED
from sandkasten.api.websocket import handshake as websocket
from sandkasten.model import OnDisconnect, SessionSpec, Stream
from tests.api.apps import Endless
from tests.api.harness import (
    KEY,
    RunningTree,
    parse_answer,
    read_to_end,
    read_until,
    running_app,
    running_front,
)
from tests.api.ws_client import BEARER, client_frame, close_code, exec_talk, handshake, make_session, opened, talk
from tests.fakes.runner import Script
from tests.waiting import patience, until

EXEC = "/v1/sessions/{}/exec/ws"


async def refused(running: RunningTree, path: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
    """Return status and error code of a handshake that is refused."""
    async with await running.connect() as stream:
        await stream.send_all(handshake(path, headers))
        status, fields, body = parse_answer(await read_to_end(stream))
    error = json.loads(body)
    assert error["request_id"] == fields["x-request-id"]
    return status, error["error_code"]


# The way in -------------------------------------------------------------------------------------------------------


async def test_a_key_in_the_header_opens_the_connection() -> None:
    """The first thing that comes is `hello`, with the session and the limits."""
    async with running_front() as running:
        session_id = await make_session(running)
        async with talk(running, EXEC.format(session_id)) as client:
            hello = await client.hear_text("hello")
    assert (hello["protocol"], hello["session_id"]) == ("sandkasten.exec.v1", session_id)
    assert hello["limits"]["message_bytes"] == 1024 * 1024


async def test_refusals_come_before_the_connection_is_accepted() -> None:
    """A wrong key, an unknown URL, an unknown session, an ended one: the handshake gets the usual error."""
    async with running_front() as running:
        session_id = await make_session(running)
        ended = (await running.supervisor.create(SessionSpec())).id
        await running.supervisor.destroy(ended)
        wrong = {"Authorization": "Bearer wrong"}
        assert await refused(running, EXEC.format(session_id), wrong) == (401, "UNAUTHORIZED")
        assert await refused(running, "/v1/no/ws", wrong) == (401, "UNAUTHORIZED")
        assert await refused(running, "/v1/no/ws") == (404, "NOT_FOUND")
        assert await refused(running, "/v1/no/ws", {}) == (401, "UNAUTHORIZED")
        assert await refused(running, EXEC.format("0123456789abcdef")) == (404, "SESSION_NOT_FOUND")
        assert await refused(running, EXEC.format("no-id")) == (404, "SESSION_NOT_FOUND")
        assert await refused(running, EXEC.format(ended)) == (410, "SESSION_EXPIRED")


async def test_the_key_may_come_as_the_first_message() -> None:
    """Browsers can't set headers; nothing is answered before it."""
    async with running_front() as running, talk(running, EXEC.format(await make_session(running)), key=None) as client:
        await client.say("auth", key=KEY)
        await client.hear_text("hello")
        await client.say("ping", data="x")
        assert (await client.hear_text("pong"))["data"] == "x"


@pytest.mark.parametrize(
    "message",
    [
        '{"type":"auth","key":"wrong"}',
        '{"type":"auth"}',
        '{"type":"auth","key":7}',
        '{"type":"ping"}',
        '{"type":"auth","key":"' + "x" * 5000 + '"}',
        "no json",
        "[]",
        "",
        b"",
        b"\x00\x01",
    ],
)
async def test_any_other_first_message_is_refused(message: str | bytes) -> None:
    """An error that says no more than that, and 4401."""
    async with running_front() as running, talk(running, EXEC.format(await make_session(running)), key=None) as client:
        await client.connection.send_message(message)
        error = await client.hear_text("error")
        assert error["error_code"] == "UNAUTHORIZED"
        assert (await client.hear_close())[0] == 4401


async def test_a_key_that_does_not_come_in_time_is_not_waited_for() -> None:
    """4401 as well."""
    async with running_front(websocket_auth_s=0.05) as running:
        path = EXEC.format(await make_session(running))
        async with talk(running, path, key=None) as client:
            assert (await client.hear_close())[0] == 4401


async def test_sessions_are_told_apart_only_for_whoever_has_the_key() -> None:
    """Without a header an unknown session opens like a known one; the key's owner gets 4404 and 4410."""
    async with running_front() as running:
        ended = (await running.supervisor.create(SessionSpec())).id
        await running.supervisor.destroy(ended)
        for session_id, code in (("0123456789abcdef", 4404), ("no-id", 4404), (ended, 4410)):
            async with talk(running, EXEC.format(session_id), key=None) as client:
                await client.say("auth", key=KEY)
                assert (await client.hear_close())[0] == code


async def test_connections_without_a_proof_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is turned away; one that has shown the key or has left makes room."""
    monkeypatch.setattr(websocket, "MAX_UNPROVEN", 2)
    async with running_front() as running:
        path = EXEC.format(await make_session(running))
        async with talk(running, path, key=None) as first, talk(running, path, key=None):
            assert await refused(running, path, {}) == (503, "CAPACITY")
            await first.say("auth", key=KEY)
            await first.hear_text("hello")
            async with talk(running, path, key=None) as third:
                await third.say("auth", key=KEY)
                await third.hear_text("hello")

        async def has_room() -> bool:
            async with await running.connect() as stream:
                await stream.send_all(handshake(path, {}))
                return b" 101 " in await read_until(stream, b"\r\n\r\n")

        await until(has_room)


ORIGINS = [
    ({}, 101),
    ({"Origin": "http://localhost"}, 101),
    ({"Origin": "https://localhost"}, 101),
    ({"Origin": "https://app.example"}, 101),
    ({"Origin": "http://app.example"}, 403),
    ({"Origin": "https://app.example.evil.example"}, 403),
    ({"Origin": "https://evil.example"}, 403),
    ({"Origin": "http://localhost:81"}, 403),
    ({"Origin": "null"}, 403),
]


@pytest.mark.parametrize(("headers", "status"), ORIGINS)
@pytest.mark.parametrize("proof", [BEARER, {}])
async def test_pages_of_other_origins_must_be_allowed(
    headers: dict[str, str], status: int, proof: dict[str, str]
) -> None:
    """Whether the key is in a header or still to come: a page that is not allowed does not get that far."""
    async with running_front(allowed_origins=("https://app.example",)) as running, await running.connect() as stream:
        await stream.send_all(handshake(EXEC.format(await make_session(running)), proof | headers))
        answer = await read_until(stream, b"\r\n\r\n")
    assert int(answer.split()[1]) == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 101),
        ({"Origin": "http://localhost"}, 101),
        ({"Host": "evil.example"}, 401),
        ({"Origin": "http://evil.example"}, 401),
        ({"Sec-Fetch-Site": "cross-site"}, 401),
    ],
)
async def test_without_a_configured_key_only_local_pages_get_in(headers: dict[str, str], status: int) -> None:
    """As for every other request of such a server."""
    async with running_front(api_key=None) as running, await running.connect() as stream:
        await stream.send_all(handshake(EXEC.format(await make_session(running)), headers))
        answer = await read_until(stream, b"\r\n\r\n")
    assert int(answer.split()[1]) == status


@pytest.mark.parametrize(("api_key", "key"), [(None, None), (KEY, KEY)])
async def test_a_proof_that_nobody_asked_for_is_passed_over(api_key: str | None, key: str | None) -> None:
    """A client need not know whether it is needed; later it is an unknown message."""
    async with (
        running_front(api_key=api_key) as running,
        talk(running, EXEC.format(await make_session(running)), key=key) as client,
    ):
        await client.hear_text("hello")
        await client.say("auth", key="whatever")
        await client.say("ping")
        await client.hear_text("pong")
        await client.say("auth", key="whatever")
        assert (await client.hear_close())[0] == 4400


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [((), None), (("sandkasten.exec.v1",), "sandkasten.exec.v1"), (("x", "sandkasten.exec.v1"), "sandkasten.exec.v1")],
)
async def test_the_subprotocol_is_ours_or_none(offered: tuple[str, ...], chosen: str | None) -> None:
    """A client that names none is served as well."""
    async with running_front() as running, exec_talk(running, subprotocols=offered) as client:
        assert client.connection.subprotocol == chosen


async def test_a_client_of_another_subprotocol_is_refused() -> None:
    """A client of another subprotocol would not understand a word."""
    async with running_front() as running:
        path = EXEC.format(await make_session(running))
        async with talk(running, path, subprotocols=("sandkasten.exec.v2",)) as client:
            assert await client.hear_close() == (4406, "only sandkasten.exec.v1 is spoken here")


async def test_messages_are_never_compressed() -> None:
    """An offer of permessage-deflate is not taken up: a small message could then become a gigabyte."""
    offer = {"Sec-WebSocket-Extensions": "permessage-deflate; client_max_window_bits, permessage-deflate"}
    async with running_front() as running, await running.connect() as stream:
        await stream.send_all(handshake(EXEC.format(await make_session(running)), BEARER | offer))
        answer = await read_until(stream, b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 101")
        assert b"sec-websocket-extensions" not in answer.lower()
        await stream.send_all(struct.pack("!BB4x", 0xC1, 0x80))  # RSV1: compressed
        assert await close_code(stream) == 1002


# Time -------------------------------------------------------------------------------------------------------------


async def test_a_silent_connection_is_pinged_and_in_the_end_given_up() -> None:
    """A peer that is gone without a word does not hold its runs for ever; one that answers stays."""
    async with (
        running_front(websocket_ping_s=0.05) as running,
        await running.connect() as silent,
        exec_talk(running) as client,
    ):
        await opened(running, silent)
        assert (await read_to_end(silent)).count(b"\x89\x00") == PINGS_UNANSWERED
        await client.say("ping")
        await client.hear_text("pong")


async def test_a_quiet_connection_outlives_the_keep_alive_timeout() -> None:
    """The keep-alive timeout is for connections between two requests; a WebSocket is in the middle of its only one."""
    quick = {"keep_alive_timeout_s": 0.05, "websocket_ping_s": 0.1}
    async with running_front(**quick) as running, await running.connect() as stream:
        await opened(running, stream)
        await read_until(stream, b"\x89\x00")
        await stream.send_all(client_frame(1, b'{"type":"ping"}'))
        await read_until(stream, b'"pong"')


async def test_the_end_of_the_server_is_announced() -> None:
    """1001 to everybody, also to who has not shown the key; the stop waits for nobody."""
    async with running_front(graceful_timeout_s=5.0) as running:
        path = EXEC.format(await make_session(running))
        async with talk(running, path, key=None) as unproven, exec_talk(running) as client:
            running.tree.scripts["wait"] = Script(hold=trio.Event())
            await client.say("start", id=1, cmd="wait")
            await client.hear_text("started")
            took_s = await running.stop()
            assert await client.hear_close() == (1001, "the daemon is stopping")
            assert (await unproven.hear_close())[0] == 1001
    assert took_s < patience(2.5)


async def test_the_end_is_announced_to_whoever_is_being_sent_to() -> None:
    """The close frame is the last one, behind whole messages, although the sender is stopped by it."""
    async with (
        running_app(Endless(bytes(1000)), graceful_timeout_s=5.0) as running,
        await running.connect() as stream,
        trio.open_nursery() as nursery,
    ):
        await stream.send_all(handshake("/ws"))
        await read_until(stream, b"\r\n\r\n")
        nursery.start_soon(running.stop)
        assert await close_code(stream) == 1001


async def test_a_client_that_does_not_read_is_cut_off() -> None:
    """After the write deadline; its run is treated as it wished, and the server goes on."""
    async with running_front(write_timeout_s=0.3) as running:
        running.tree.scripts["yes"] = Script([(Stream.STDOUT, bytes(64 * 1024))], repeat=10_000)
        session_id = await make_session(running)
        async with await running.connect(receive_buffer=4096) as stream:
            await stream.send_all(handshake(EXEC.format(session_id)))
            start = {"type": "start", "id": 1, "cmd": "yes", "credit": 2**24, "on_disconnect": OnDisconnect.CANCEL}
            await stream.send_all(client_frame(1, json.dumps(start).encode()))
            with trio.fail_after(patience()):
                await running.tree.run_opened.wait()
                await running.tree.runs[0].cancelled.wait()
        assert running.tree.runs[0].pieces_taken < 200
        assert await running.is_alive()


async def test_a_bug_closes_with_1011_and_tells_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log has the traceback under the connection's request id."""

    def fail(*_args: object, **_options: object) -> NoReturn:
        raise RuntimeError("secret inside")

    async with running_front() as running:
        monkeypatch.setattr(running.supervisor, "open_exec", fail)
        async with exec_talk(running) as client:
            await client.say("start", id=1, cmd="bug")
            heard = await client.hear_until("error")
            assert (await client.hear_close())[0] == 1011
        assert await running.is_alive()
    assert "secret" not in json.dumps(heard[-1])
    assert "secret inside" in caplog.text


async def test_each_connection_leaves_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """The line has the connection's path, the code of its close and its duration; the request's id was in the
    handshake's answer.
    """
    caplog.set_level(logging.INFO)
    async with running_front() as running:
        async with exec_talk(running) as client:
            names = {name.lower(): value for name, value in client.connection.handshake_headers}
            assert len(names[b"x-request-id"]) == 16

        async def is_logged() -> bool:
            return any(record.message == "websocket" for record in caplog.records)

        await until(is_logged)
    lines = [record.__dict__ for record in caplog.records if record.message == "websocket"]
    assert [(line["status"], line["close_code"]) for line in lines] == [(101, 1000)]
    assert lines[0]["path"].endswith("/exec/ws")
