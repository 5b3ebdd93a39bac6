"""HTTP/1 below the application: answers to bytes that are no HTTP have the usual body and an id, and a request's length
is said once.
"""

from __future__ import annotations

import json
import socket
import sys

import pytest
import trio
import trio.testing

from sandkasten.api.http.guard import Receive, Scope, Send
from tests.api import apps
from tests.api.harness import (
    parse_answer,
    read_to_end,
    read_until,
    request_bytes,
    running_app,
    running_front,
    send_and_read,
)
from tests.api.malformed import MALFORMED
from tests.waiting import patience

REFUSED = {
    "no_host": 400,
    "binary": 400,
    "header_with_space": 400,
    "length_not_a_number": 400,
    "transfer_encoding_unknown": 400,
    "headers_too_large": 413,
    "websocket_without_key": 400,
    "websocket_version_1": 400,
}


@pytest.mark.parametrize(("name", "status"), REFUSED.items())
async def test_malformed_requests_get_the_usual_error(name: str, status: int) -> None:
    """The five keys, the id in the header and in the body, and the end of the connection."""
    async with running_front() as running:
        seen, fields, body = parse_answer(await send_and_read(running, MALFORMED[name]))
    error = json.loads(body)
    assert (seen, fields["content-type"], fields["connection"]) == (status, "application/json", "close")
    assert error["error_code"] == {400: "INVALID_REQUEST", 413: "TOO_LARGE"}[status]
    assert error["details"]
    assert error["request_id"] == fields["x-request-id"] != ""


async def test_each_malformed_request_has_an_id_of_its_own() -> None:
    """A line of the log is found by the request's id."""
    async with running_front() as running:
        answers = [parse_answer(await send_and_read(running, MALFORMED["no_host"])) for _ in range(2)]
    assert answers[0][1]["x-request-id"] != answers[1][1]["x-request-id"]


async def test_a_malformed_head_after_an_answered_one_is_told_apart() -> None:
    """The first answer is whole, and the refusal of what follows a HEAD request has a body."""
    async with running_front() as running:
        head = request_bytes("HEAD", "/healthz")
        answers = await send_and_read(running, head + MALFORMED["no_host"])
    assert answers.startswith(b"HTTP/1.1 200 ")
    status, _, body = parse_answer(answers[answers.rindex(b"HTTP/1.1 ") :])
    assert (status, json.loads(body)["error_code"]) == (400, "INVALID_REQUEST")


async def test_a_malformed_body_of_a_head_request_is_refused_without_one() -> None:
    """An answer to HEAD never has a body (RFC 9110 §9.3.2)."""
    async with running_app(apps.plain) as running:
        head = b"HEAD / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
        answer = await send_and_read(running, head)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.endswith(b"\r\n\r\n")


async def test_what_follows_a_malformed_head_does_not_reset_the_answer_away() -> None:
    """The rest is read for a while, so that the client sees why it was refused."""
    async with running_front() as running, await running.connect() as stream:
        await stream.send_all(MALFORMED["no_host"])
        answer = await read_until(stream, b"}")
        for _ in range(64):
            await stream.send_all(bytes(65_536))
        await stream.send_eof()
        with trio.fail_after(patience()):
            assert await read_to_end(stream) == b""
        assert b"INVALID_REQUEST" in answer


async def test_what_follows_the_last_request_does_not_cut_its_answer() -> None:
    """A client that announced the end and goes on sending still gets the answer it waits for, and only that."""
    asked, release = trio.Event(), trio.Event()

    async def waiting(scope: Scope, receive: Receive, send: Send) -> None:
        asked.set()
        await release.wait()
        await apps.plain(scope, receive, send)

    async with running_app(waiting) as running, await running.connect() as stream:
        await stream.send_all(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\nmore")
        await asked.wait()
        await stream.send_all(b"and more\r\n\r\n")
        await trio.testing.wait_all_tasks_blocked(0.02)
        release.set()
        answer = await read_to_end(stream)
    assert (parse_answer(answer)[0], answer.count(b"HTTP/1.1 ")) == (200, 1)


@pytest.mark.parametrize("path", ["/v1/sessions", "/healthz", "/v1/sessions/0123456789abcdef/exec"])
async def test_a_length_given_twice_is_refused_and_ends_the_connection(path: str) -> None:
    """A proxy in front may have read the other length: no byte that follows is taken for a request."""
    both = {"Content-Length": "5", "Transfer-Encoding": "chunked"}
    smuggled = b"0\r\n\r\n" + request_bytes("GET", "/healthz")
    async with running_front() as running:
        answers = await send_and_read(running, request_bytes("POST", path, headers=both) + smuggled)
        assert (await running.supervisor.list()) == []
    status, fields, body = parse_answer(answers)
    assert (status, fields["connection"], json.loads(body)["error_code"]) == (400, "close", "INVALID_REQUEST")
    assert answers.count(b"HTTP/1.1 ") == 1


_DATA_SEGMENTS_IN = 152
"""Place of `tcpi_data_segs_in` in `struct tcp_info` (linux/tcp.h)."""


def segments_in(stream: trio.SocketStream) -> int:
    """Return how many segments with data have come so far."""
    info = stream.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return int.from_bytes(info[_DATA_SEGMENTS_IN : _DATA_SEGMENTS_IN + 4], sys.byteorder)


@pytest.mark.parametrize(("method", "path"), [("GET", "/healthz"), ("GET", "/v1/sessions"), ("HEAD", "/healthz")])
async def test_an_answer_of_known_length_is_one_write(method: str, path: str) -> None:
    """Head and body share a segment: of the front's own routes, of Quart's, and without a body."""
    async with running_front() as running, await running.connect() as stream:
        for count in range(1, 4):
            await stream.send_all(request_bytes(method, path))
            await read_until(stream, b"\r\n\r\n")
            assert segments_in(stream) == count


async def test_a_head_without_a_body_to_come_is_not_kept_back() -> None:
    """An application that fails between the two shows the client how far it came."""

    async def fail(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        raise RuntimeError("no body")

    async with running_app(fail) as running, await running.connect() as stream:
        await stream.send_all(request_bytes("GET", "/"))
        assert b" 200 " in await read_to_end(stream)
