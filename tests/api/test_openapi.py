"""`GET /openapi.json`: valid, of all routes and no others, and true of the requests and answers it describes."""

from __future__ import annotations

import inspect
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from jsonschema import Draft202012Validator

from sandkasten.api.http.guard import Message, Receive, Scope, Send
from sandkasten.api.http.json import Body
from sandkasten.api.http.routing import Route, RouteKind
from sandkasten.api.http.websocket import Opcode, encode_frame
from sandkasten.api.openapi import JSON, Components, operation_id
from sandkasten.api.resources import fields, file_contents, run_output, sessions
from sandkasten.api.routes import TABLE
from sandkasten.config import PoolSettings, PoolSize, PreviewSettings
from sandkasten.images.layers import describe
from sandkasten.model import SessionSpec, SessionStats
from sandkasten.model.image import ImageConfig
from tests.api.described import DOCUMENT, Described
from tests.api.harness import RunningTree, read_until, request_bytes, running_front
from tests.fakes.runner import Script

DOCS = Path(__file__).parents[2] / "docs"
ONLY_WEBSOCKETS = {
    path
    for path, methods in DOCUMENT["paths"].items()
    if all("101" in operation["responses"] and "200" not in operation["responses"] for operation in methods.values())
}
SIZE = {"cols": 90, "rows": 25}
UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}
OPERATIONS_BY_ID = {
    operation["operationId"]: (path, method, operation)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
}


async def test_it_is_a_valid_description_and_needs_a_key() -> None:
    """By the standard's own schema; over HTTP it is the same document."""
    from openapi_spec_validator import validate  # which no other lane needs

    validate(DOCUMENT)
    async with running_front() as running, running.client() as client:
        answer = await client.get("/openapi.json")
        assert answer.headers["content-type"] == "application/json"
        served = answer.json()
        assert (served["openapi"], served["paths"]) == ("3.1.1", DOCUMENT["paths"])
        assert (await client.get("/openapi.json", headers={"Authorization": "Bearer wrong"})).status_code == 401


def test_every_operation_has_an_id_of_its_own() -> None:
    """Generators of clients name methods after it."""
    assert len(OPERATIONS_BY_ID) == sum(len(methods) for methods in DOCUMENT["paths"].values())


@pytest.mark.parametrize("route", [route for route in TABLE.routes if route.body is not None], ids=operation_id)
def test_the_examples_of_a_body_are_taken(route: Route) -> None:
    """A body with fields has examples, which its class reads whole and its schema accepts."""
    assert route.body is not None
    taken = DOCUMENT["paths"][route.path][route.method.lower()]["requestBody"]["content"][JSON]
    examples = [each["value"] for each in taken.get("examples", {}).values()]
    assert bool(examples) == bool(attrs.fields(route.body))
    for example in examples:
        fields.parse(example, route.body)
        assert not fields.ignored_fields(example, route.body)
        Draft202012Validator({**taken["schema"], "components": DOCUMENT["components"]}).validate(example)


async def test_what_is_described_is_served() -> None:
    """No described route is unknown, WebSockets included, and a method that is not described is refused there."""
    async with running_front() as running, running.client() as client:
        for path, methods in DOCUMENT["paths"].items():
            filled = re.sub(r"\{\w+\}", "0123456789abcdef01234567", path)
            for method, operation in methods.items():
                if "200" not in operation["responses"] and "101" in operation["responses"]:
                    assert "SESSION_NOT_FOUND" in await _upgrade(running, filled), path
                    continue
                async with client.stream(method.upper(), filled) as answer:
                    assert answer.status_code != 405, path
                    if answer.status_code == 404 and method != "head":
                        await answer.aread()
                        assert answer.json()["error_code"] != "NOT_FOUND", path
            if path not in ONLY_WEBSOCKETS:
                assert (await client.request("OPTIONS", filled)).status_code == 405, path


async def _upgrade(running: RunningTree, path: str) -> str:
    """Ask for a WebSocket and return the refusal."""
    async with await running.connect() as stream:
        await stream.send_all(request_bytes("GET", path, headers=UPGRADE))
        return (await read_until(stream, b"}")).decode()


def test_what_is_served_is_described() -> None:
    """Every method of every path, from all tables."""
    described = {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert {(route.method, route.path) for route in TABLE.routes} == described


def test_every_route_says_what_it_answers() -> None:
    """JSON by a class, anything else by its media type; and each operation has a summary, a sentence."""
    for route in TABLE.routes:
        if route.kind is not RouteKind.WEBSOCKET:
            assert route.answer is not None or route.answer_type, route.path
        summary = DOCUMENT["paths"][route.path][route.method.lower()]["summary"]
        assert re.fullmatch(r"[A-Z].*\.", summary), (route.path, summary)


def test_the_documents_name_routes_that_are_described() -> None:
    """Every `METHOD /path` of docs/*.md, whatever its variables are called there."""
    shapes = {(method.upper(), _shape(path)) for path, methods in DOCUMENT["paths"].items() for method in methods}
    named = set()
    for page in DOCS.glob("*.md"):
        for method, path in re.findall(r"`(GET|POST|PUT|PATCH|DELETE) ((?:/|…)[^`\s?]*)", page.read_text()):
            named.add((method, _shape(path.replace("…", "/v1/sessions/{id}"))))
    assert len(named) > 30
    assert named - shapes == set()


def _shape(path: str) -> str:
    return re.sub(r"\{\w+\}", "{}", path)


def test_handlers_read_what_their_routes_name() -> None:
    """A handler that reads a body or a query names its class in the code, and its route in the table names the same."""
    seen = 0
    for route in TABLE.routes:
        readers = (("read_request", route.body), ("read_query", route.query), ("read_head", route.head))
        for reader, named in readers:
            read = re.search(rf"{reader}\(exchange, (\w+)", inspect.getsource(route.handler))
            if read is not None:
                assert named is not None, (route.path, reader)
                assert named.__name__ == read[1], (route.path, reader)
                seen += 1
    assert seen >= 30


def test_members_that_are_always_there_are_required() -> None:
    """Classes of the model are spelled whole, so all their fields are required; of a body a None may be left out."""
    components = Components()
    assert components.schema_of(SessionStats) == {"$ref": "#/components/schemas/SessionStats"}
    assert set(components.schemas["SessionStats"]["required"]) == {field.name for field in attrs.fields(SessionStats)}

    @attrs.frozen
    class ExampleBody(Body):
        always: int | None
        often: int = 3
        seldom: int | None = None

    components.schema_of(ExampleBody)
    assert components.schemas["Example"]["required"] == ["always", "often"]
    assert components.schemas["Example"]["properties"]["seldom"] == {"type": "integer"}


def answer(status: int, body: bytes, *headers: tuple[bytes, bytes]) -> list[Message]:
    """Return an answer in JSON, unless the headers say otherwise."""
    given = dict([(b"content-type", b"application/json"), *headers])
    start = {"type": "http.response.start", "status": status, "headers": list(given.items())}
    return [start, {"type": "http.response.body", "body": body}]


def error(code: str) -> bytes:
    return b'{"error_code": "%s", "message": "m", "retryable": false, "request_id": null}' % code.encode()


EVENTS = (b"content-type", b"text/event-stream")


@pytest.mark.parametrize(
    ("path", "said", "problem"),
    [
        ("/healthz", answer(200, b'{"status": "ok"}'), ""),
        ("/healthz", answer(200, b'{"status": "ok", "more": 1}'), "'more' was unexpected"),
        ("/healthz", answer(200, b'{"status": "ill"}'), "'ill' is not one of"),
        ("/healthz", answer(200, b"ok", (b"content-type", b"text/html")), "as 'text/html'"),
        ("/healthz", answer(200, b'{"status": "ok"}', (b"x-new", b"1")), "x-new"),
        ("/healthz", answer(418, b"{}"), "status 418"),
        ("/v1/sessions/0123456789abcdef", answer(404, error("SESSION_NOT_FOUND")), ""),
        ("/v1/sessions/0123456789abcdef", answer(404, error("SHELL_NOT_FOUND")), "'SHELL_NOT_FOUND' is not one of"),
        ("/v1/events", answer(200, b'event: error\ndata: {"error": "e"}\n\n', EVENTS), "required property"),
        ("/v1/events", answer(200, b"event: new\ndata: {}\n\n", EVENTS), "message new"),
        ("/nowhere", answer(418, b"{}"), ""),
    ],
)
async def test_what_is_not_described_is_a_problem(path: str, said: Sequence[Message], problem: str) -> None:
    """Of a status, a media type, a header, a member, an error code and an event; what is described is none."""
    assert_told(await spoken(path, said), problem)


@pytest.mark.parametrize(
    ("text", "problem"),
    [(b'{"type":"pong"}', ""), (b'{"type":"pong","data":1}', "string"), (b'{"type":"x"}', "message x")],
)
async def test_messages_of_a_websocket_are_held_against_the_description_too(text: bytes, problem: str) -> None:
    """However their frames are cut."""
    frame = encode_frame(Opcode.TEXT, text)
    said: list[Message] = [
        {"type": "websocket.accept"},
        *({"type": "websocket.send", "frames": bytes([byte])} for byte in frame),
    ]
    assert_told(await spoken("/v1/sessions/0123456789abcdef/exec/ws", said), problem)


def assert_told(front: Described, problem: str) -> None:
    assert bool(front.problems) == bool(problem)
    assert problem in " ".join(front.problems)


async def spoken(path: str, said: Sequence[Message]) -> Described:
    """Let an application say that at a path."""

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        for message in said:
            await send(message)

    async def drop(_message: Message) -> None:
        await trio.lowlevel.checkpoint()

    kind = "websocket" if "websocket" in said[0]["type"] else "http"
    front = Described(app, most_times=10**9)
    await front({"type": kind, "method": "GET", "raw_path": path.encode(), "headers": []}, trio.sleep_forever, drop)
    return front


async def test_answers_are_as_described() -> None:
    """Of every route that answers with JSON; `running_front` compares them."""
    pool = PoolSettings(enabled=True, images={"python": PoolSize(1)})
    preview = PreviewSettings("127.0.0.1:0")
    async with running_front(pool=pool, preview=preview) as running, running.client() as client:
        running.tree.scripts["echo x"] = Script()
        running.tree.scripts["top"] = Script(echo=True, ignores=frozenset({10}))
        process = {"cmd": "top", "process_id": "p", "tty": {"cols": 80, "rows": 24}}
        made = await client.post("/v1/sessions", json={"labels": {"a": "b"}})
        path, space = f"/v1/sessions/{made.json()['id']}", "/v1/workspaces/ws"
        requests: tuple[tuple[str, str, object], ...] = (
            *(("GET", f"/{name}", None) for name in ("healthz", "readyz", "openapi.json", "v1/node", "v1/pools")),
            *(("GET", f"/v1/{name}", None) for name in ("system", "sessions", "keys")),
            *(("POST", f"/v1/node/{name}", None) for name in ("drain", "undrain")),
            ("POST", "/v1/secrets", {"name": "key", "value": "a value of a test", "hosts": ["a.example"]}),
            ("GET", "/v1/secrets", None),
            ("DELETE", "/v1/secrets/key", None),
            ("GET", path, None),
            ("PATCH", path, {"labels": {}}),
            ("POST", f"{path}/exec", {"cmd": "echo x", "exec_id": "e"}),
            ("POST", f"{path}/execs/e/cancel", None),
            ("POST", f"{path}/execs/e/wait", {"for": "exit"}),
            ("POST", f"{path}/shells", {"name": "s"}),
            ("POST", f"{path}/processes", process),
            *(
                ("POST", f"{path}/{of}/p/{action}", json)
                for of in ("execs", "processes")
                for action, json in (("signal", {"signal": 10}), ("stdin", {"text": "x"}), ("resize", SIZE))
            ),
            *(
                ("GET", f"{path}/{name}", None)
                for name in ("stats", "usage", "diagnostics", "ports", "network", "egress")
            ),
            ("POST", f"{path}/previews", {"port": 8000}),
            ("GET", f"{path}/previews", None),
            ("DELETE", f"{path}/previews/8000", None),
            *(("GET", f"{path}/{name}", None) for name in ("execs", "execs/e", "execs/e/output")),
            *(("GET", f"{path}/{name}", None) for name in ("shells", "processes", "processes/p", "processes/p/logs")),
            ("DELETE", f"{path}/shells/s", None),
            ("POST", f"{path}/processes/p/kill", None),
            ("DELETE", f"{path}/processes/p", None),
            ("POST", f"{path}/processes/p/wait", {"for": "exit"}),
            *_file_requests(path),
            ("DELETE", f"{path}/fs?path=d&recursive=true", None),
            ("POST", f"{path}/pause", None),
            ("POST", f"{path}/resume", None),
            ("DELETE", path, None),
            ("POST", "/v1/workspaces", {"id": "ws"}),
            ("GET", "/v1/workspaces?usage=true", None),
            ("GET", space, None),
            ("PUT", space, {"labels": {}}),
            ("PUT", "/v1/workspaces/new", None),
            ("PATCH", space, {"labels": {}}),
            *_file_requests(space),
            ("GET", f"{space}/fs", None),
            ("DELETE", f"{space}/fs?path=f", None),
            ("DELETE", space, None),
        )
        assert (await client.post("/v1/images/import?name=z", content=b"none")).is_success
        pull = await client.post("/v1/images/pull", json={"reference": "127.0.0.1:1/x"})
        for method in ("GET", "DELETE"):
            assert (await client.request(method, f"/v1/jobs/{pull.json()['job_id']}")).is_success
        image = running.supervisor._config.data_dir / "images" / "x"
        image.mkdir()
        (image / "meta.json").write_bytes(describe([], ImageConfig(), "", "", "", []))
        shutil.copytree(image, image.parent / "y")
        requests += (("DELETE", "/v1/images?name=x", None), ("POST", "/v1/images/prune", {"dry_run": True}))
        requests += (("DELETE", "/v1/images/y", None),)
        looks = [("GET", f"/v1/{name}", None) for name in ("jobs", "images", "images?name=host", "images/host")]
        for method, url, json in (*requests, *looks):
            assert (await client.request(method, url, json=json)).is_success, url
        form: dict[str, Any] = {"files": {"file": ("f", b"x")}}
        session = await running.supervisor.create(SessionSpec())
        assert (await client.post("/v1/workspaces/other/import", content=bytes(1024))).is_success
        for top in (f"/v1/sessions/{session.id}", "/v1/workspaces/other"):
            assert (await client.post(f"{top}/fs/archive", content=bytes(1024))).is_success
            assert (await client.post(f"{top}/fs/upload", **form)).is_success
            for end in ("POST", "DELETE"):
                begun = await client.post(f"{top}/fs/uploads", json={"path": "f"})
                upload = f"{top}/fs/uploads/{begun.json()['upload_id']}"
                assert (await client.get(upload)).is_success
                assert (await client.patch(upload, content=b"x", headers={"Upload-Offset": "0"})).is_success
                assert (await client.request(end, f"{upload}/commit" if end == "POST" else upload)).is_success
        answered = {name for name, status, _ in running.described.seen if status < 300}
    assert {
        name
        for name, (path, _, operation) in OPERATIONS_BY_ID.items()
        if path not in ("/mcp", "/v1/sessions/{id}/commit")  # tests/mcp and tests/e2e/test_pulls.py have these
        and any("application/json" in answer.get("content", ()) for answer in operation["responses"].values())
    } <= answered


def _file_requests(top: str) -> Sequence[tuple[str, str, Any]]:
    """Return a request for each of the routes that sessions and workspaces share, with a file `f` there."""
    return (
        ("POST", f"{top}/fs/write", {"path": "f", "text": "t"}),
        ("GET", f"{top}/fs/read?path=f", None),
        ("PUT", f"{top}/fs/file?path=f", None),
        ("POST", f"{top}/fs/mkdir", {"path": "d", "parents": True}),
        ("POST", f"{top}/fs/copy", {"from": "f", "to": "d/c"}),
        ("POST", f"{top}/fs/move", {"from": "d/c", "to": "c"}),
        ("POST", f"{top}/fs/chmod", {"path": "c", "mode": "600"}),
        ("POST", f"{top}/fs/chown", {"path": "c"}),
        ("GET", f"{top}/fs/list", None),
        ("GET", f"{top}/fs/stat?path=f", None),
        ("POST", f"{top}/fs/glob", {"pattern": "**/f"}),
        ("GET", f"{top}/fs/view?path=f", None),
        ("POST", f"{top}/fs/edit", {"edits": [{"op": "create", "path": "e", "text": "t"}]}),
        ("POST", f"{top}/fs/stat", {"paths": ["f", "x"]}),
    )


EXACT = {fields.FileMode, fields.Edits, fields.Fixed, run_output.OutputPosition}
"""Kinds with checks of their own that JSON Schema can say."""

TEXTS = {
    run_output.PreferredWait,
    *(run_output.OutputPosition, run_output.LastPosition, sessions.ListCursor, fields.EventTypes),
    *(file_contents.ByteRange, file_contents.ETags),
}
"""Kinds that no body has."""

PROBES: tuple[object, ...] = (
    *(None, True, False, -1, 0, 1, 2, 15, 16, 63, 64, 65, 999, 1000, 1001, 1023, 1024, 65_535, 65_536, 86_400, 86_401),
    *(2**20, 2**20 + 1, 2**32, 2**53, 2**53 + 1, 0.5, "", "a", "bash", "none", "a b", "x" * 200, "proxy", "exit", "\n"),
    *(
        [],
        ["a"],
        [1],
        {},
        {"a": "b"},
        {"a": 1},
        {"f": '"v"'},
        "0755",
        '"v"',
        "12~0d~",
        "bytes=0-1",
        "*",
        "f" * 64,
        "a=b",
        "all",
        "oom",
    ),
    *([{"op": "delete", "path": "f"}], [{"op": "create", "path": "f"}], [{"op": "insert", "path": "f", "line": 0}]),
    *([{"op": "replace", "path": "f", "old": "", "new": ""}], [{"op": "patch", "path": "f", "patch": "p", "more": 1}]),
)


@pytest.mark.parametrize(
    "kind",
    sorted((kind for kind in fields._CHECKS if hasattr(kind, "__supertype__")), key=str),
)
def test_what_a_field_accepts_its_schema_accepts(kind: Any) -> None:
    """Numbers, choices and patterns that a field refuses are refused by the schema, too. Texts are all that a query and
    a head have."""
    schema = Components().schema_of(kind)
    validator, check = Draft202012Validator(schema), fields.check_of(kind)
    is_exact = isinstance(check, fields.Between | fields.Choice | fields.Matching) or kind in EXACT
    for probe in PROBES:
        if isinstance(probe, str) or kind not in TEXTS:
            spelled = str(probe).split(",") if isinstance(check, fields.CommaList) else probe
            described = validator.is_valid(spelled)
            assert described or not _accepts(check, probe), probe
            assert described == _accepts(check, probe) or not is_exact, probe


def _accepts(check: Callable[[object], object] | None, probe: object) -> bool:
    assert check is not None
    try:
        check(probe)
    except ValueError:
        return False
    return True
