"""Rules for every request: ids, keys, sizes, methods, errors. Over real sockets."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from sandkasten import errors
from sandkasten.api.http.auth import is_loopback_host
from sandkasten.model import Session, SessionSpec
from tests.api.harness import (
    KEY,
    RunningTree,
    parse_answer,
    read_to_end,
    read_until,
    request_bytes,
    running_front,
    send_and_read,
)
from tests.waiting import patience

ROUTES = [
    ("GET", "/readyz"),
    ("GET", "/v1/system"),
    ("GET", "/v1/node"),
    ("GET", "/v1/sessions"),
    ("POST", "/v1/sessions"),
    ("GET", "/v1/sessions/0123456789abcdef"),
    ("DELETE", "/v1/sessions/0123456789abcdef"),
    ("PATCH", "/v1/sessions/0123456789abcdef"),
    ("GET", "/v1/sessions/0123456789abcdef/stats"),
    ("POST", "/v1/sessions/0123456789abcdef/exec"),
    ("POST", "/v1/sessions/0123456789abcdef/exec/stream"),
    ("GET", "/v1/sessions/0123456789abcdef/fs/read?path=a"),
    ("POST", "/v1/sessions/0123456789abcdef/fs/write"),
    ("POST", "/v1/sessions/0123456789abcdef/fs/upload"),
    ("GET", "/nowhere"),
]


async def ask(running: RunningTree, method: str, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """One request on a connection of its own, with exactly these headers besides `Host`."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    fields = {"Host": "localhost", "Connection": "close"} | named
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    async with await running.connect() as stream:
        await stream.send_all(head.encode("latin-1") + b"\r\n")
        return parse_answer(await read_to_end(stream))


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_every_route_but_healthz_wants_the_key(method: str, path: str) -> None:
    """Without one, with a wrong one, with another scheme: 401 in the one error shape, with a request id."""
    async with running_front() as running:
        for authorization in (None, "Bearer wrong", f"Bearer {KEY}x", f"Basic {KEY}", KEY, "Bearer", "Bearer \xff"):
            headers = {} if authorization is None else {"Authorization": authorization}
            status, fields, body = await ask(running, method, path, **headers)
            error = json.loads(body)
            assert (status, error["error_code"]) == (401, "UNAUTHORIZED")
            assert fields["x-request-id"] == error["request_id"]
            assert fields["www-authenticate"] == "Bearer"
        assert (await running.supervisor.list()) == []


@pytest.mark.parametrize(
    ("path", "field", "nearest"),
    [
        ("/v1/sessions?statsu=running", "statsu", "status"),
        ("/v1/events?types=x&curser=3", "curser", "cursor"),
        ("/v1/node?verbose=1", "verbose", "has no fields"),
    ],
)
async def test_a_query_with_an_unknown_field_is_refused(path: str, field: str, nearest: str) -> None:
    """A filter that nobody applies would list too much. The nearest known field is named."""
    async with running_front() as running, running.client() as client:
        answer = await client.get(path)
        assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_REQUEST")
        assert nearest in answer.json()["details"][field]
        assert (await client.get("/healthz?probe=1")).status_code == 200


async def test_fields_that_mean_nothing_are_named_in_the_answer(caplog: pytest.LogCaptureFixture) -> None:
    """In a header and in the request's log line, from both ways of being served; hostile names stay in their place."""
    async with running_front() as running, running.client() as client:
        caplog.set_level("INFO")
        body = {"lables": {}, "limits": {"gpu": 1}, "a\r\nb\ud800".encode("utf-8", "replace").decode(): 1}
        made = await client.post("/v1/sessions", json=body)
        assert made.status_code == 201
        assert made.headers["sandkasten-ignored"] == "lables, limits.gpu, a%0D%0Ab%3F"
        logged: list[str] = []
        with trio.fail_after(patience()):
            while not logged:  # the line is written behind the answer
                await trio.sleep(0.01)
                logged = [vars(record)["ignored"] for record in caplog.records if "ignored" in vars(record)]
        assert logged == ["lables, limits.gpu, a\r\nb?"]
        url = f"/v1/sessions/{made.json()['id']}"
        long = await client.patch(url, json={"x" * 300_000: 1})
        assert (long.status_code, long.headers["sandkasten-ignored"]) == (200, "x" * 64)
        changed = await client.patch(url, json={"ttl": 5, "": {}})
        assert (changed.status_code, changed.headers["sandkasten-ignored"]) == (200, "ttl,")
        assert "sandkasten-ignored" not in (await client.patch(url, json={"ttl_seconds": 60})).headers


async def test_healthz_is_public_and_says_nothing_else() -> None:
    """`/healthz` answers without a key and under any host name."""
    async with running_front() as running:
        status, fields, body = await ask(running, "GET", "/healthz", Host="example.com")
        assert (status, json.loads(body)) == (200, {"status": "ok"})
        assert fields["content-type"] == "application/json"


async def test_the_scheme_is_case_insensitive_and_spaces_are_forgiven() -> None:
    """RFC 9110 §11.1; some clients write `bearer`."""
    async with running_front() as running:
        status, _, _ = await ask(running, "GET", "/v1/sessions", Authorization=f"bearer  {KEY} ")
        assert status == 200


async def test_two_authorization_headers_are_refused() -> None:
    """Two headers leave open which of them counts; the server does not guess."""
    async with running_front() as running:
        data = request_bytes("GET", "/v1/sessions").replace(
            b"\r\n\r\n", f"\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()
        )
        assert (await send_and_read(running, data)).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize("given", ["abc-123", "a" * 128, "with space", "{}~!"])
async def test_a_fit_request_id_is_echoed(given: str) -> None:
    """In the header of both halves' answers and in error bodies."""
    async with running_front() as running:
        for path in ("/healthz", "/nowhere", "/v1/sessions/0123456789abcdef/exec"):
            _, fields, body = await ask(running, "GET", path, Authorization=f"Bearer {KEY}", X_Request_ID=given)
            assert fields["x-request-id"] == given
            assert json.loads(body).get("request_id", given) == given


@pytest.mark.parametrize("given", ["a" * 129, "caf\xe9", "tab\there"])
async def test_an_unfit_request_id_is_replaced(given: str) -> None:
    """Too long, not ASCII, not printable: it would end up in logs."""
    async with running_front() as running:
        _, fields, _ = await ask(running, "GET", "/healthz", X_Request_ID=given)
        assert re.fullmatch("[0-9a-f]{16}", fields["x-request-id"])


async def test_made_request_ids_differ() -> None:
    """Also on one connection."""
    async with running_front() as running, running.client() as client:
        ids = {(await client.get("/healthz")).headers["x-request-id"] for _ in range(3)}
        assert len(ids) == 3


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "allow"),
    [
        ("GET", "/", 404, "NOT_FOUND", None),
        ("GET", "/v1/sessions/", 404, "SESSION_NOT_FOUND", None),
        ("GET", "//v1/sessions", 404, "NOT_FOUND", None),
        ("GET", "/v1/sessions/not-an-id", 404, "SESSION_NOT_FOUND", None),
        ("POST", "/v1/sessions/..%2f..%2fetc/exec", 404, "SESSION_NOT_FOUND", None),
        ("GET", "/v1/sessions/0123456789abcdef/nothing", 404, "NOT_FOUND", None),
        ("GET", "/v1/sessions/0123456789abcdef/fs", 405, "METHOD_NOT_ALLOWED", "DELETE"),
        ("PUT", "/v1/sessions", 405, "METHOD_NOT_ALLOWED", "GET, HEAD, POST"),
        ("OPTIONS", "/v1/sessions", 405, "METHOD_NOT_ALLOWED", "GET, HEAD, POST"),
        ("TRACE", "/healthz", 405, "METHOD_NOT_ALLOWED", "GET, HEAD"),
        ("BREW", "/healthz", 405, "METHOD_NOT_ALLOWED", "GET, HEAD"),
        ("GET", "/v1/sessions/0123456789abcdef/exec", 405, "METHOD_NOT_ALLOWED", "POST"),
        ("OPTIONS", "/v1/sessions/0123456789abcdef/fs/read", 405, "METHOD_NOT_ALLOWED", "GET, HEAD"),
    ],
)
async def test_unknown_urls_and_methods_are_typed_errors(
    method: str, path: str, status: int, code: str, allow: str | None
) -> None:
    """The same shape from both halves, with `Allow` where RFC 9110 §15.5.6 wants it."""
    async with running_front() as running:
        got, fields, body = await ask(running, method, path, Authorization=f"Bearer {KEY}")
        error = json.loads(body)
        assert (got, error["error_code"], fields.get("allow")) == (status, code, allow)
        assert error["request_id"] == fields["x-request-id"]
        assert error["retryable"] is False


async def test_head_answers_like_get_without_a_body() -> None:
    """In both halves."""
    async with running_front() as running, running.client() as client:
        session = (await client.post("/v1/sessions")).json()["id"]
        running.tree.runner.files.path("a").write_bytes(b"x")
        for path in ("/healthz", "/v1/sessions", f"/v1/sessions/{session}/fs/read?path=a"):
            answer = await client.head(path)
            assert (answer.status_code, answer.content) == (200, b"")


async def test_the_absolute_form_of_a_target_works() -> None:
    """RFC 9112 §3.2.2: a server must accept it."""
    async with running_front() as running:
        status, _, _ = await ask(running, "GET", "http://localhost/healthz")
        assert status == 200


async def test_a_head_over_the_limit_is_too_large() -> None:
    """A head is refused also when it arrives in one segment, and when it is many small headers; the limits are told."""
    async with running_front() as running:
        for headers in ({"X-Big": "a" * 20_000}, {f"X-{number}": "y" for number in range(120)}):
            data = request_bytes("GET", "/healthz", headers=headers | {"Connection": "close"})
            status, _, body = parse_answer(await send_and_read(running, data))
            assert (status, json.loads(body)["error_code"]) == (413, "TOO_LARGE")
            assert json.loads(body)["details"] == {"max_head_bytes": 16_384, "max_headers": 100}


async def test_a_long_url_is_too_large() -> None:
    """The target counts as part of the head."""
    async with running_front() as running:
        data = request_bytes("GET", "/v1/sessions?x=" + "a" * 17_000, headers={"Connection": "close"})
        assert (await send_and_read(running, data)).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("path", ["/v1/sessions", "/v1/sessions/0123456789abcdef/exec"])
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_over_the_limit_is_413(path: str, is_chunked: bool) -> None:
    """Declared or streamed, in both halves; the connection is closed and the answer survives the unread rest."""
    async with running_front(max_json_bytes=1000) as running, await running.connect() as stream:
        if is_chunked:
            piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
            head = request_bytes("POST", path, headers={"Transfer-Encoding": "chunked"})
            await stream.send_all(head + piece)
        else:
            await stream.send_all(request_bytes("POST", path, headers={"Content-Length": "200000"}))
        answer = await read_until(stream, b"}")
        await stream.send_all(b" " * 65_536)
        status, fields, body = parse_answer(answer + await read_to_end(stream))
        assert (status, fields["connection"]) == (413, "close")
        assert json.loads(body)["details"] == {"max_body_bytes": 1000}


async def test_a_body_that_does_not_come_is_given_up() -> None:
    """A client that announces a body and stays silent holds its connection for the read timeout only."""
    async with running_front(read_timeout_s=0.1) as running, await running.connect() as stream:
        await stream.send_all(request_bytes("POST", "/v1/sessions", headers={"Content-Length": "10"}) + b"{")
        status, _, body = parse_answer(await read_to_end(stream))
        assert (status, json.loads(body)["error_code"]) == (400, "INVALID_REQUEST")


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b"null", b'"x"', b"1", b"\xff", b"{'a': 1}", b'{"a": NaN}', b"[" * 5000, b'{"a": "\\ud800"}']
)
@pytest.mark.parametrize("path", ["/v1/sessions", "/v1/sessions/0123456789abcdef/exec"])
async def test_a_body_that_is_no_json_object_is_400(path: str, body: bytes) -> None:
    """Never 500, whatever is wrong with it."""
    async with running_front() as running, running.client() as client:
        answer = await client.post(path, content=body)
        assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_REQUEST")
        assert "body" in answer.json()["details"]


async def test_with_a_key_the_content_type_does_not_matter() -> None:
    """curl -d sends a form's type; the published behaviour is to parse JSON all the same."""
    async with running_front() as running, running.client() as client:
        for kind in ("application/x-www-form-urlencoded", "text/plain", ""):
            answer = await client.post("/v1/sessions", content=b"{}", headers={"Content-Type": kind})
            assert answer.status_code == 201
        answer = await client.get("/v1/sessions", headers={"Content-Type": "application/json"})
        assert answer.status_code == 200


def failing(error: Exception) -> Callable[[SessionSpec], Awaitable[Session]]:
    """Return a create that fails."""

    async def create(spec: SessionSpec) -> Session:
        await trio.lowlevel.checkpoint()
        raise error

    return create


@pytest.mark.parametrize("error", [RuntimeError("secret path /root/x"), errors.StoreFailed("secret path /root/x")])
async def test_a_bug_and_an_internal_failure_show_nothing_inside(
    error: Exception, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """500 without the message; the log has it, with the request id the client got."""
    async with running_front() as running, running.client() as client:
        monkeypatch.setattr(running.supervisor, "create", failing(error))
        with caplog.at_level(logging.ERROR, "sandkasten"):
            answer = await client.post("/v1/sessions")
        assert (answer.status_code, answer.json()["error_code"]) == (500, "INTERNAL_ERROR")
        assert "secret" not in answer.text
        assert "secret path /root/x" in caplog.text
        monkeypatch.undo()
        assert (await client.post("/v1/sessions")).status_code == 201


async def test_capacity_says_when_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """503, `Retry-After`, and retryable."""
    async with running_front() as running, running.client() as client:
        full = errors.Capacity("the node is full", retry_after_s=7)
        monkeypatch.setattr(running.supervisor, "create", failing(full))
        answer = await client.post("/v1/sessions")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
        assert answer.json()["retryable"] is True


class Gate:
    """A create that waits."""

    def __init__(self, running: RunningTree) -> None:
        self.entered, self.opened = trio.Event(), trio.Event()
        self._create = running.supervisor.create
        running.supervisor.create = self  # type: ignore[method-assign]

    async def __call__(self, spec: SessionSpec) -> Session:
        self.entered.set()
        await self.opened.wait()
        return await self._create(spec)


async def test_a_client_that_leaves_during_a_json_request_harms_nobody() -> None:
    """The request goes on without it, and the stop ends it."""
    async with running_front() as running:
        gate = Gate(running)
        stream = await running.connect()
        await stream.send_all(request_bytes("POST", "/v1/sessions", body=b"{}"))
        await gate.entered.wait()
        await stream.aclose()
        assert await running.is_alive()
        assert await running.stop() < 1


async def test_a_client_that_only_ended_its_own_side_gets_its_answer() -> None:
    """Some clients shut down their writing half after the request (RFC 9112 §9.6)."""
    async with running_front() as running, await running.connect() as stream:
        gate = Gate(running)
        await stream.send_all(request_bytes("POST", "/v1/sessions", body=b"{}"))
        await stream.send_eof()
        await gate.entered.wait()
        await trio.testing.wait_all_tasks_blocked()
        gate.opened.set()
        status, _, body = parse_answer(await read_to_end(stream))
        assert (status, json.loads(body)["status"]) == (201, "running")


async def test_a_websocket_is_refused_with_an_answer() -> None:
    """401 without the key, 404 with it; there is no WebSocket route."""
    upgrade = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Version": "13",
    }
    async with running_front() as running:
        for key, status in (("wrong", 401), (KEY, 404)):
            data = request_bytes("GET", "/v1/x", headers=upgrade | {"Authorization": f"Bearer {key}"})
            async with await running.connect() as stream:
                await stream.send_all(data)
                got, fields, body = parse_answer(await read_to_end(stream))
            assert got == status
            assert json.loads(body)["request_id"] == fields["x-request-id"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "127.0.0.1:8080"}, 200),
        ({"Host": "[::1]:8080"}, 200),
        ({"Host": "LOCALHOST"}, 200),
        ({"Host": "localhost:8080", "Origin": "http://localhost:8080"}, 200),
        ({"Host": "evil.example"}, 401),
        ({"Host": "localhost.evil.example"}, 401),
        ({"Host": "127.0.0.1.evil.example"}, 401),
        ({"Host": "192.168.0.1"}, 401),
        ({"Host": ""}, 401),
        ({"Origin": "http://evil.example"}, 401),
        ({"Origin": "null"}, 401),
        ({"Host": "localhost:8080", "Origin": "http://localhost:3000"}, 401),
        ({"Sec-Fetch-Site": "cross-site"}, 401),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
    ],
)
async def test_without_a_key_a_web_page_can_not_drive_the_daemon(headers: dict[str, str], status: int) -> None:
    """Rebound names, foreign origins and foreign sites are refused; local clients are not."""
    async with running_front(api_key=None) as running:
        got, _, _ = await ask(running, "GET", "/v1/sessions", **headers)
        assert got == status


async def test_without_a_key_bodies_must_be_json() -> None:
    """Bodies that a page may post across origins without asking (forms, plain text) are refused."""
    async with running_front(api_key=None) as running, running.client() as client:
        for kind, status in (("text/plain", 400), ("", 400), ("application/json; charset=utf-8", 201)):
            answer = await client.post("/v1/sessions", content=b"{}", headers={"Content-Type": kind})
            assert answer.status_code == status
        assert (await client.post("/v1/sessions")).status_code == 201


@pytest.mark.parametrize("host", ["localhost:", "127.9.9.9", "[::1]", "[::1]:80"])
def test_loopback_hosts(host: str) -> None:
    """All of 127/8 is loopback."""
    assert is_loopback_host(host)


@pytest.mark.parametrize("host", ["localhost:x", "[::1", "a", "", ":80", "0.0.0.0", "127.1"])
def test_other_hosts(host: str) -> None:
    """A host that does not parse is not loopback."""
    assert not is_loopback_host(host)
