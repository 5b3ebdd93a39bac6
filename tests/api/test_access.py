"""Rights of each kind of key, over every route there is."""

from __future__ import annotations

import re

import attrs
import pytest

from sandkasten.api.http.routing import RouteKind
from sandkasten.api.routes import SESSIONS, TABLE, WORKSPACES
from sandkasten.model import SessionSpec, Status
from tests.api.harness import RunningTree, read_until, request_bytes, running_front
from tests.api.keys import ADMIN, CONFINED, CONFINED_READ, ISSUED, READ, WRITE, Issued
from tests.api.ws_client import client_frame, close_code, handshake

_LOOKS_AT_FILES = ("fs/stat", "fs/glob", "fs/search")
LOOKING_POSTS = {
    "/mcp",
    "execs/{exec_id}/wait",
    "processes/{exec_id}/wait",
    *_LOOKS_AT_FILES,
    *(f"{WORKSPACES}/{{id}}/{each}" for each in _LOOKS_AT_FILES),
}
"""Routes that only look, though their parameters come in the body of a POST, or that ask the key for each step."""

ADMINISTRATION = {"/v1/node/drain", "/v1/node/undrain", "/v1/keys", "/v1/secrets", "/v1/secrets/{name}"}
ADMINISTRATION |= {"commit"}  # of a session, to the node's images
ADMINISTRATION |= {route.path for route in TABLE.routes if route.path.startswith(("/v1/images", "/v1/jobs"))}
ABOUT_IMAGES = {"/v1/images", "/v1/images/{name}"}
"""Images, which everybody may look at; `test_images` asks which."""
ABOUT_THE_NODE = {"/readyz", "/v1/system", "/v1/node", "/v1/pools", "/metrics"} | ADMINISTRATION
ABOUT_WORKSPACES = {route.path for route in TABLE.routes if route.path.startswith(WORKSPACES)}
ABOUT_NO_SESSION = {"/healthz", "/openapi.json", "/mcp", SESSIONS, "/v1/events"} | ABOUT_THE_NODE | ABOUT_WORKSPACES
"""Of those about workspaces, `test_confined_workspaces` asks whose they are."""
_PARAMETER = re.compile(r"\{\w+\}")
_BENEATH = f"{SESSIONS}/{{id}}"


@attrs.frozen
class Request:
    """One method of one route; `pattern` is what follows the session's id, or a whole path."""

    method: str
    pattern: str

    @property
    def looks(self) -> bool:
        return self.method in ("GET", "HEAD") or self.pattern in LOOKING_POSTS

    @property
    def administers(self) -> bool:
        return self.pattern in ADMINISTRATION and not self.looks_at_images

    @property
    def looks_at_images(self) -> bool:
        return self.looks and self.pattern in ABOUT_IMAGES

    def path(self, session_id: str) -> str:
        filled = _PARAMETER.sub("xx", self.pattern)
        return filled if filled.startswith("/") else f"{SESSIONS}/{session_id}/{filled}".rstrip("/")


def all_requests() -> list[Request]:
    """Return every method of every HTTP route."""
    return [
        Request(method, _pattern(route.path))
        for route in TABLE.routes
        if route.kind is not RouteKind.WEBSOCKET
        for method in (("GET", "HEAD") if route.method == "GET" else (route.method,))
    ]


def _pattern(path: str) -> str:
    """Return what follows the session's id, or the whole path."""
    return path.removeprefix(_BENEATH).removeprefix("/") if path.startswith(_BENEATH) else path


async def make_session(running: RunningTree, **labels: str) -> str:
    """Return the id of a session with these labels, a new one unless one of them runs."""
    running.ring.replace([each.key for each in ISSUED])
    await running.supervisor.undrain()
    found = (each.id for each in await running.supervisor.list(status=Status.RUNNING) if each.labels == labels)
    return next(found, None) or (await running.supervisor.create(SessionSpec(labels=labels))).id


async def refusal(running: RunningTree, issued: Issued, request: Request, session_id: str) -> tuple[int, str] | None:
    """Return how a request was refused for want of a right or a reachable session, None if it was not."""
    path = request.path(session_id)
    async with (
        running.client(token=issued.token) as client,
        client.stream(request.method, path, json={} if request.method in ("POST", "PATCH") else None) as answer,
    ):
        if answer.status_code not in (401, 403, 404):
            return None
        if request.method == "HEAD":
            return answer.status_code, ""
        await answer.aread()
        code = answer.json()["error_code"]
        return (answer.status_code, code) if code in ("UNAUTHORIZED", "FORBIDDEN", "SESSION_NOT_FOUND") else None


def forbidden(request: Request) -> tuple[int, str]:
    return (403, "") if request.method == "HEAD" else (403, "FORBIDDEN")


def not_found(request: Request) -> tuple[int, str]:
    return (404, "") if request.method == "HEAD" else (404, "SESSION_NOT_FOUND")


async def test_every_route_asks_the_key_for_what_it_needs() -> None:
    """All routes: a read-only key looks, a write key acts, and an admin key does all."""
    async with running_front() as running:
        for request in all_requests():
            for issued in (READ, WRITE, ADMIN):
                session_id = await make_session(running, team="b")
                may = request.looks or issued is not READ or request.pattern == "/healthz"
                may = may and (issued is ADMIN or not request.administers)
                seen = await refusal(running, issued, request, session_id)
                if may and seen is not None and seen[1] == "" and request.method == "HEAD":
                    seen = None  # of a run that there is not
                assert seen == (None if may else forbidden(request)), (request, issued.key.access)


async def test_a_confined_key_finds_nothing_of_others_on_any_route() -> None:
    """All routes: sessions without its label do not exist, the node is not its business, and it only looks if it may
    no more than look."""
    async with running_front() as running:
        foreign = await make_session(running, team="b")
        for request in all_requests():
            for issued in (CONFINED, CONFINED_READ):
                seen = await refusal(running, issued, request, foreign)
                if request.pattern == "/healthz" or request.looks_at_images:
                    assert seen is None
                elif request.pattern in ABOUT_THE_NODE or (issued is CONFINED_READ and not request.looks):
                    assert seen == forbidden(request), (request, issued.key)
                elif request.pattern in ABOUT_NO_SESSION:
                    assert seen is None or (request.method == "HEAD" and request.pattern in ABOUT_WORKSPACES), request
                else:
                    assert seen == not_found(request), (request, issued.key)


async def test_a_confined_key_works_in_its_own_sessions() -> None:
    """Requests that are refused for others' sessions are served for a session that carries the label."""
    async with running_front() as running:
        for request in all_requests():
            if request.pattern in ABOUT_NO_SESSION or request.method == "HEAD":
                continue
            own = await make_session(running, team="a", more="yes")
            assert await refusal(running, CONFINED, request, own) is None, request


async def test_the_answer_for_others_sessions_is_that_for_none() -> None:
    """Not a byte tells them apart, but for the ids that were asked for."""
    async with running_front() as running, running.client(token=CONFINED.token) as client:
        foreign, missing = await make_session(running, team="b"), "f" * 24
        answers = []
        for session_id in (foreign, missing):
            answer = await client.get(f"{SESSIONS}/{session_id}", headers={"X-Request-ID": "same"})
            answers.append((answer.status_code, answer.text.replace(session_id, "ID"), sorted(answer.headers)))
        assert answers[0] == answers[1]


async def test_a_confined_key_lists_and_makes_only_what_is_its_own() -> None:
    """The label is put on what it makes, kept on what it changes, and filters what it lists."""
    async with running_front() as running, running.client(token=CONFINED.token) as client:
        await make_session(running, team="b")
        made = (await client.post(SESSIONS, json={"labels": {"more": "yes"}})).json()
        assert made["labels"] == {"more": "yes", "team": "a"}
        assert [each["id"] for each in (await client.get(f"{SESSIONS}?limit=1")).json()] == [made["id"]]
        changed = await client.patch(f"{SESSIONS}/{made['id']}", json={"labels": {"other": "x"}})
        assert changed.json()["labels"] == {"other": "x", "team": "a"}
        for answer in (
            await client.post(SESSIONS, json={"labels": {"team": "b"}}),
            await client.patch(f"{SESSIONS}/{made['id']}", json={"labels": {"team": "b"}}),
        ):
            assert (answer.status_code, answer.json()["error_code"]) == (403, "FORBIDDEN")
        assert len(await running.supervisor.list()) == 2


async def test_a_confined_key_hears_only_of_its_own_sessions() -> None:
    """Over server-sent events, those that are kept included."""
    async with running_front() as running:
        async with running.supervisor.events() as events:
            start = events.cursor
        foreign, own = await make_session(running, team="b"), await make_session(running, team="a")
        await running.supervisor.destroy(foreign)
        await running.supervisor.destroy(own)
        head = {"Authorization": f"Bearer {CONFINED.token}"}
        async with await running.connect() as stream:
            await stream.send_all(request_bytes("GET", f"/v1/events?cursor={start}", headers=head))
            heard = (await read_until(stream, b"event: session.destroyed\ndata: ")).decode()
        assert (own in heard, foreign in heard) == (True, False)


async def test_idempotency_keys_of_two_keys_do_not_meet() -> None:
    """Each API key has its own; those of the configured key are as they were before there were others."""
    async with running_front() as running:
        running.ring.replace([each.key for each in ISSUED])
        ids = []
        for options in ({"token": WRITE.token}, {"token": ADMIN.token}, {}):
            async with running.client(**options) as client:
                made = [await client.post(SESSIONS, headers={"Idempotency-Key": "once"}) for _ in range(2)]
                assert made[0].json()["id"] == made[1].json()["id"]
                ids.append(made[0].json()["id"])
        assert len(set(ids)) == 3
        again = await running.supervisor.create(SessionSpec(idempotency_key="once", key_id="configured"))
        sessions = [await running.supervisor.get(each) for each in ids]
        assert ([each.key_id for each in sessions], again.id) == ([WRITE.key.id, ADMIN.key.id, "configured"], ids[2])


# WebSockets ---------------------------------------------------------------------------------------------------------


def websocket_paths(session_id: str) -> dict[str, str]:
    """Return every WebSocket by its pattern."""
    paths = [route.path for route in TABLE.routes if route.kind is RouteKind.WEBSOCKET]
    return {_pattern(path): path.replace("{id}", session_id) for path in paths}


@pytest.mark.parametrize(
    ("issued", "session", "expected"),
    [
        (READ, "foreign", {"exec/ws": 403, "terminal/ws": 403, "events": 101, "fs/watch": 101, "/v1/events": 101}),
        (WRITE, "foreign", {"exec/ws": 101, "terminal/ws": 101, "events": 101, "fs/watch": 101, "/v1/events": 101}),
        (CONFINED, "foreign", {"exec/ws": 404, "terminal/ws": 404, "events": 404, "fs/watch": 404, "/v1/events": 101}),
        (CONFINED, "own", {"exec/ws": 101, "terminal/ws": 101, "events": 101, "fs/watch": 101, "/v1/events": 101}),
        (CONFINED_READ, "own", {"exec/ws": 403, "terminal/ws": 403, "events": 101, "fs/watch": 101, "/v1/events": 101}),
    ],
)
async def test_websockets_ask_as_well_by_header_and_by_first_message(
    issued: Issued, session: str, expected: dict[str, int]
) -> None:
    """Every WebSocket, with the key in either place: the handshake's status, or a close code of 4000 more."""
    async with running_front() as running:
        session_id = await make_session(running, team="a" if session == "own" else "b")
        paths = websocket_paths(session_id)
        expected = expected | {f"{WORKSPACES}/{{id}}/fs/watch": 101}  # whose it is, is told behind the handshake
        assert paths.keys() == expected.keys()
        for pattern, path in paths.items():
            assert await status_of_handshake(running, path, issued.token) == expected[pattern]
            if expected[pattern] != 101:
                assert await close_after_message(running, path, issued.token) == 4000 + expected[pattern]


async def status_of_handshake(running: RunningTree, path: str, token: str) -> int:
    async with await running.connect() as stream:
        await stream.send_all(handshake(path, {"Authorization": f"Bearer {token}"}))
        return int((await stream.receive_some(4096)).split(b" ")[1])


async def close_after_message(running: RunningTree, path: str, token: str) -> int:
    async with await running.connect() as stream:
        await stream.send_all(handshake(path, {}) + client_frame(1, f'{{"type":"auth","key":"{token}"}}'.encode()))
        return await close_code(stream)
