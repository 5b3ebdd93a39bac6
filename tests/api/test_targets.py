"""No spelling of a request's target is let in without the key, or without one from a web page, whatever it names."""

from __future__ import annotations

import json
import logging
from urllib.parse import quote

import pytest

from sandkasten.model import SessionSpec
from tests.api.harness import KEY, RunningTree, parse_answer, read_to_end, running_front
from tests.api.ws_client import UPGRADE, client_frame, close_code
from tests.waiting import until

SESSION = "/v1/sessions/{id}"
REQUESTS = [
    ("GET", "/readyz"),
    ("GET", "/v1/system"),
    ("GET", "/v1/node"),
    ("GET", "/v1/sessions"),
    ("POST", "/v1/sessions"),
    ("GET", SESSION),
    ("DELETE", SESSION),
    ("GET", f"{SESSION}/stats"),
    ("POST", f"{SESSION}/exec"),
    ("POST", f"{SESSION}/exec/stream"),
    ("GET", f"{SESSION}/execs"),
    ("HEAD", f"{SESSION}/execs"),
    ("POST", f"{SESSION}/processes"),
    ("GET", f"{SESSION}/fs/read?path=a"),
    ("POST", f"{SESSION}/fs/write"),
    ("POST", f"{SESSION}/fs/upload"),
    ("GET", f"{SESSION}/events"),
    ("GET", "/v1/events"),
    ("GET", "/nowhere"),
]
WEBSOCKETS = ["/v1/events", f"{SESSION}/exec/ws", f"{SESSION}/terminal/ws", f"{SESSION}/events", "/nowhere"]

SPELLINGS = [
    "{path}",
    "http://localhost{path}",
    "http://localhost/healthz/..{path}",
    "http://localhost/healthz%3F{path}",
    "http://h%2Fhealthz%3F{path}",
    "http://h%2Fhealthz%23{path}",
    "https://localhost%2Fhealthz%3F{path}",
    "http://localhost#/healthz#{path}",
    "http://healthz@localhost{path}",
    "http://localhost%2Fhealthz@localhost{path}",
    "http:/healthz{path}",
    "http:///healthz{path}",
    "http:\\\\localhost{path}",
    "HTTP://LOCALHOST{path}",
    "ftp://localhost/healthz{path}",
    "/{path}",
    "//healthz{path}",
    "//healthz%3F{path}",
    "/healthz/..{path}",
    "/healthz/%2e%2e{path}",
    "/healthz%2f%2e%2e{path}",
    "/.{path}",
    "/healthz{path}",
    "/healthz;{path}",
    "/healthz%3F{path}",
    "/healthz%23{path}",
    "/healthz#{path}",
    "/healthz%00{path}",
    "/healthz\\..{path}",
    "\\healthz{path}",
    "healthz{path}",
    "{encoded}",
    "{whole}",
    "/healthz{whole}",
    "http://localhost",
    "http://localhost?/healthz{path}",
    "?/healthz{path}",
    "*",
    "localhost:80",
]


def spell(spelling: str, path: str) -> str:
    """Return a target; `encoded` has all but slashes percent-encoded, `whole` slashes, too."""
    path, _, query = path.partition("?")
    encoded = "".join(sign if sign in "/-" else f"%{ord(sign):02x}" for sign in path)
    target = spelling.format(path=path, encoded=encoded, whole="/" + quote(path[1:], safe=""))
    return f"{target}?{query}" if query else target


async def ask(running: RunningTree, method: str, target: str, headers: dict[str, str]) -> int:
    """Return the status of a request on a connection of its own."""
    fields = {"Host": "localhost", "Connection": "close", "Content-Type": "application/json"} | headers
    body = b'{"cmd": "id"}' if method == "POST" else b""
    head = f"{method} {target} HTTP/1.1\r\nContent-Length: {len(body)}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    async with await running.connect() as stream:
        await stream.send_all(head.encode() + b"\r\n" + body)
        return int((await read_to_end(stream)).split(b" ", 2)[1])


async def shake_hands(running: RunningTree, target: str, headers: dict[str, str]) -> tuple[int, int]:
    """Return the status of a handshake, and the close code that the first message leads to."""
    head = f"GET {target} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in (UPGRADE | headers).items())
    async with await running.connect() as stream:
        await stream.send_all(head.encode() + b"\r\n")
        status = int((await stream.receive_some(4096)).split(b" ", 2)[1])
        if status != 101:
            return status, 0
        await stream.send_all(client_frame(1, b'{"type": "start", "id": 1, "cmd": "id"}'))
        return status, await close_code(stream)


@pytest.mark.parametrize("spelling", SPELLINGS)
async def test_without_the_key_no_spelling_of_a_target_gets_further(spelling: str) -> None:
    """401 from every route; a WebSocket without a word of a key is heard, and only to get it."""
    async with running_front() as running:
        session = await running.supervisor.create(SessionSpec())
        for method, path in REQUESTS:
            assert await ask(running, method, spell(spelling, path.format(id=session.id)), {}) == 401, path
        for path in WEBSOCKETS:
            target = spell(spelling, path.format(id=session.id))
            assert await shake_hands(running, target, {"Authorization": "Bearer wrong"}) == (401, 0), path
            assert await shake_hands(running, target, {}) in ((401, 0), (101, 4401)), path
        assert running.tree.runs == []
        assert len(await running.supervisor.list()) == 1


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "http://evil.example"}])
async def test_without_a_configured_key_no_spelling_lets_a_web_page_in(spelling: str, headers: dict[str, str]) -> None:
    """The target's own word for the host does not count instead of `Host`."""
    async with running_front(api_key=None) as running:
        session = await running.supervisor.create(SessionSpec())
        for method, path in REQUESTS:
            assert await ask(running, method, spell(spelling, path.format(id=session.id)), headers) == 401, path
        for path in WEBSOCKETS:
            assert await shake_hands(running, spell(spelling, path.format(id=session.id)), headers) == (401, 0), path
        assert running.tree.runs == []


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("/healthz", 200),
        ("/%68ealthz", 200),
        ("http://localhost/healthz", 200),
        ("/healthz?/v1/sessions", 200),
        ("http://other/healthz", 401),
        ("//healthz", 401),
        ("/healthz/", 401),
    ],
)
async def test_the_public_path_is_one_path(target: str, status: int) -> None:
    """With a query or without, in the form that proxies use, and nothing beneath it."""
    async with running_front() as running:
        assert await ask(running, "GET", target, {}) == status


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://localhost{path}/execs", 200),
        ("http://localhost{path}", 200),
        ("http://elsewhere{path}", 404),
        ("http://me@localhost{path}", 404),
        ("http://h%2Fhealthz%3F{path}/execs", 404),
        ("/{path}", 404),
        ("/%76%31/sessions?limit=1", 200),
        ("/v1%2Fsessions", 404),
        ("/v1%2Fevents", 404),
    ],
)
async def test_with_the_key_a_target_means_what_it_says(target: str, status: int) -> None:
    """The absolute form is answered for the host that was asked; other spellings name nothing."""
    async with running_front() as running:
        session = await running.supervisor.create(SessionSpec())
        path = f"/v1/sessions/{session.id}"
        assert await ask(running, "GET", target.format(path=path), {"Authorization": f"Bearer {KEY}"}) == status


async def test_the_log_names_the_path_that_was_served(caplog: pytest.LogCaptureFixture) -> None:
    """A path is logged as it was served, however it was spelled. A target that is no path is logged as it came."""

    def paths() -> list[str]:
        return [record.__dict__["path"] for record in caplog.records if record.message == "request"]

    async def is_logged() -> bool:
        return len(paths()) == count

    async with running_front() as running:
        with caplog.at_level(logging.DEBUG, "sandkasten"):
            targets = ("http://localhost/v1/sessions", "/v1/%73essions", "http://h%2Fhealthz%3F/v1/sessions")
            for count, target in enumerate(targets, start=1):  # noqa: B007 - is_logged reads it
                await ask(running, "GET", target, {})
                await until(is_logged)
    assert paths() == ["/v1/sessions", "/v1/sessions", "http://h%2Fhealthz%3F/v1/sessions"]


@pytest.mark.parametrize("is_chunked", [True, False])
async def test_a_public_path_reads_no_body(is_chunked: bool) -> None:
    """Nobody fills memory before they have shown the key: the answer comes before the body, and ends the
    connection."""
    begun = "Transfer-Encoding: chunked\r\n\r\n401\r\n" if is_chunked else "Content-Length: 1025\r\n\r\n"
    data = f"GET /healthz HTTP/1.1\r\nHost: localhost\r\n{begun}"
    async with running_front() as running, await running.connect() as stream:
        await stream.send_all(data.encode())
        status, fields, body = parse_answer(await read_to_end(stream))
        assert (status, fields["connection"]) == (200, "close")
        assert json.loads(body) == {"status": "ok"}
