"""Paths to what answers there."""

from __future__ import annotations

import pytest

from sandkasten.api.http.auth import OPEN
from sandkasten.api.http.routing import Route, RouteKind, RouteTable, Target, parse_target
from tests.api.harness import running_front
from tests.fakes.runner import Script


async def _answer(_exchange: object) -> None:
    pass


def route(path: str, method: str = "GET", kind: RouteKind = RouteKind.RAW) -> Route:
    return Route(kind=kind, method=method, path=path, handler=_answer, needs=OPEN)


def test_segments_are_decoded_one_by_one() -> None:
    """An encoded slash stays inside its segment."""
    table = RouteTable(map(route, ("/a", "/a/{x}", "/a/{x}/b", "/c/d")))
    found = {
        "a": ("/a", {}),
        "a/b": ("/a/{x}", {"x": "b"}),
        "a/%2Fx%3F": ("/a/{x}", {"x": "/x?"}),
        "a/{x}/b": ("/a/{x}/b", {"x": "{x}"}),
        "%63/%64": ("/c/d", {}),
        "c%2Fd": None,
        "a/": None,
        "a//b": None,
        "a/x/c": None,
        "": None,
        "a/x/b/": None,
    }
    for path, wanted in found.items():
        target = parse_target(b"/" + path.encode(), host=None)
        assert target is not None
        at = table.find(target.segments)
        assert (None if at is None else (at.methods["GET"].path, at.params)) == wanted, path


@pytest.mark.parametrize(
    ("raw_path", "path"),
    [
        ("/", "/"),
        ("/a/b", "/a/b"),
        ("/%61/b", "/a/b"),
        ("/a/", "/a/"),
        ("/../a", "/../a"),
        ("/%2e%2e/a", "/../a"),
        ("/a\\b", "/a\\b"),
        ("/a%3Fb", "/a?b"),
        ("http://localhost:80/a", "/a"),
        ("HTTPS://LOCALHOST:80/a", "/a"),
        ("http://localhost:80", "/"),
    ],
)
def test_a_target_has_one_path(raw_path: str, path: str) -> None:
    """In either form; nothing in it is resolved."""
    target = parse_target(raw_path.encode(), host="localhost:80")
    assert target is not None
    assert target.path == path


@pytest.mark.parametrize(
    "raw_path",
    [
        "",
        "*",
        "a",
        "localhost:80",
        "\\a",
        "/%ff",
        "/\xff",
        "ftp://localhost:80/a",
        "http:/a",
        "http:///a",
        "http://localhost/a",
        "http://localhost:80%2Fa/b",
        "http://me@localhost:80/a",
        "http://localhost:80\\a",
        "http://localhost:80#/a",
    ],
)
def test_what_is_no_target_goes_nowhere(raw_path: str) -> None:
    """An absolute form is one only with the authority that `Host` has, spelled plainly."""
    assert parse_target(raw_path.encode("latin-1"), host="localhost:80") is None
    assert parse_target(b"http://localhost:80/a", host=None) is None


def test_what_others_could_take_for_another_path_is_none() -> None:
    """Joined, an encoded slash would part two segments; libraries drop the first of two slashes."""
    for raw_path, segments in ((b"/v1%2Fevents", ("v1/events",)), (b"//a", ("", "a")), (b"//", ("", ""))):
        target = parse_target(raw_path, host=None)
        assert target == Target.of(segments)
        assert target.path is None


@pytest.mark.parametrize("patterns", [("a/{x}", "a/b"), ("a/{x}", "a/{y}"), ("{x}/b", "a/{y}")])
def test_a_table_in_which_a_path_means_two_things_can_not_be_made(patterns: tuple[str, str]) -> None:
    """Order never decides."""
    with pytest.raises(ValueError):
        RouteTable(route(f"/{pattern}") for pattern in patterns)


def test_a_literal_and_an_open_segment_share_a_path_by_their_methods() -> None:
    """Each request means one route: `a/b` may be a name that is looked at, and an order."""
    table = RouteTable([route("/a/{x}"), route("/a/b", "POST"), route("/a/{x}", "DELETE"), route("/a/{x}/c")])
    for segments, methods in ((("a", "b"), "GET, HEAD, DELETE, POST"), (("a", "d"), "GET, HEAD, DELETE")):
        found = table.find(segments)
        assert found is not None
        assert (found.allow, found.params) == (methods, {"x": segments[1]})
    assert table.find(("a", "")) is None
    assert table.find(("a", "b", "c")) is None


@pytest.mark.parametrize("kind", RouteKind)
def test_a_method_of_a_path_is_declared_once(kind: RouteKind) -> None:
    """HEAD comes with GET; a WebSocket may stand beside both."""
    with pytest.raises(ValueError):
        RouteTable([route("/a", kind=kind), route("/a", kind=kind)])
    with pytest.raises(ValueError):
        RouteTable([route("/a"), route("/a", "HEAD")])
    found = RouteTable([route("/a", kind=RouteKind.WEBSOCKET), route("/a", "POST"), route("/a")]).find(("a",))
    assert found is not None
    assert (found.allow, found.websocket) == ("POST, GET, HEAD", route("/a", kind=RouteKind.WEBSOCKET))


async def test_an_id_with_a_line_break_is_one_that_is_not_there() -> None:
    """A name of any characters is looked up: its absence is told, and is no failure of the daemon."""
    async with running_front() as running, running.client() as client:
        previews = f"/v1/sessions/{(await client.post('/v1/sessions')).json()['id']}/previews"
        answers = [await client.delete(f"{previews}/{each}") for each in ("a%0Ab", "%0A", "a%0D", "a%0A")]
        assert {(each.status_code, each.json()["error_code"]) for each in answers} == {(404, "PREVIEW_NOT_FOUND")}


async def test_an_id_with_slashes_names_its_run() -> None:
    """Any visible ASCII may be in it."""
    exec_id = "a/b?c=%41&d#e{f}"
    async with running_front() as running, running.client() as client:
        url = f"/v1/sessions/{(await client.post('/v1/sessions')).json()['id']}"
        running.tree.scripts["a"] = Script()
        await client.post(f"{url}/exec", json={"cmd": "a", "exec_id": exec_id})
        answer = await client.get(f"{url}/execs/a%2Fb%3Fc=%2541&d%23e%7Bf%7D")
        assert (answer.status_code, answer.json()["exec_id"]) == (200, exec_id)
        assert (await client.get(f"{url}/execs/%ff")).json()["error_code"] == "NOT_FOUND"


@pytest.mark.parametrize(
    ("method", "rest", "allowed"),
    [
        ("GET", "exec", "POST"),
        ("POST", "execs", "GET, HEAD"),
        ("DELETE", "execs/x", "GET, HEAD"),
        ("POST", "execs/x/stream", "GET, HEAD"),
        ("PUT", "events", "GET, HEAD"),
        ("PUT", "shells", "GET, HEAD, POST"),
        ("GET", "shells/x", "DELETE"),
        ("PATCH", "processes/x", "GET, HEAD, DELETE"),
        ("GET", "processes/x/wait", "POST"),
    ],
)
async def test_another_method_is_405_with_those_that_are_allowed(method: str, rest: str, allowed: str) -> None:
    """Whether or not there is such a thing."""
    async with running_front() as running, running.client() as client:
        answer = await client.request(method, f"/v1/sessions/0123456789abcdef/{rest}")
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


@pytest.mark.parametrize("rest", ["execs/x/y", "execs//output", "processes/x/cancel", "shells/x/y", "ports/1", "exec/"])
async def test_what_is_not_there_is_404(rest: str) -> None:
    """As plain JSON."""
    async with running_front() as running, running.client() as client:
        answer = await client.get(f"/v1/sessions/0123456789abcdef/{rest}")
        assert (answer.status_code, answer.json()["error_code"]) == (404, "NOT_FOUND")


async def test_a_head_is_a_get_without_a_body() -> None:
    """On the routes that are read."""
    async with running_front() as running, running.client() as client:
        url = f"/v1/sessions/{(await client.post('/v1/sessions')).json()['id']}"
        for rest in ("execs", "shells", "processes", "ports"):
            answer = await client.head(f"{url}/{rest}")
            assert (answer.status_code, answer.content) == (200, b"")
            assert int(answer.headers["content-length"]) > 2


async def test_a_head_of_a_stream_ends_at_once_with_the_status_of_the_get() -> None:
    """Whether or not what it would stream ever ends."""
    async with running_front() as running, running.client() as client:
        url = f"/v1/sessions/{(await client.post('/v1/sessions')).json()['id']}"
        await client.post(f"{url}/processes", json={"cmd": "a", "process_id": "p"})
        for path in (
            "/v1/events",
            f"{url}/events",
            f"{url}/execs/p/stream",
            f"{url}/processes/p/logs?follow=true",
        ):
            answer = await client.head(path)
            assert (answer.status_code, answer.content) == (200, b"")
            assert answer.headers["content-type"] == "text/event-stream"
        assert (await client.head(f"{url}/processes/p/logs")).status_code == 200
        for path in (f"{url}/execs/q/stream", f"{url}/processes/q/logs", "/v1/sessions/0123456789abcdef/events"):
            assert (await client.head(path)).status_code == 404
