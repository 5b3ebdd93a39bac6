"""`GET /openapi.json`: valid, of all routes and no others, and true of the requests and answers it describes."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

from sandkasten.api.http.json import Body
from sandkasten.api.http.routing import RouteKind
from sandkasten.api.openapi import document, schema_of
from sandkasten.api.resources import fields
from sandkasten.api.routes import TABLE
from sandkasten.config import PoolSettings, PoolSize
from sandkasten.model import SessionSpec, SessionStats
from tests.api.harness import RunningTree, read_until, request_bytes, running_front
from tests.fakes.runner import Script

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENT = document(TABLE.routes, "1.0")
ONLY_WEBSOCKETS = {
    path
    for path, methods in DOCUMENT["paths"].items()
    if all("101" in operation["responses"] and "200" not in operation["responses"] for operation in methods.values())
}
SIZE = {"cols": 90, "rows": 25}
OWNERS = ("sessions", "workspaces")
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


async def test_what_is_described_is_served() -> None:
    """No described route is unknown, WebSockets included, and a method that is not described is refused there."""
    async with running_front() as running, running.client() as client:
        for path, methods in DOCUMENT["paths"].items():
            filled = re.sub(r"\{\w+\}", "0123456789abcdef01234567", path)
            for method, operation in methods.items():
                if {"101", "default"} >= operation["responses"].keys():
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
            assert (route.answer is None) != (route.answer_type is None), route.path
        summary = DOCUMENT["paths"][route.path][route.method.lower()]["summary"]
        assert re.fullmatch(r"[A-Z].*\.", summary), (route.path, summary)


def test_classes_of_one_name_are_one_class() -> None:
    """A component is named after its class; a second class of that name would be described as the first."""
    seen: dict[str, str] = {}
    for cls in {cls for route in TABLE.routes for cls in (route.body, route.answer) if isinstance(cls, type)}:
        name = schema_of(cls, {}).get("$ref", cls.__name__)
        assert seen.setdefault(name, cls.__module__) == cls.__module__, name


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
        for reader, named in (("read_request", route.body), ("read_query", route.query)):
            read = re.search(rf"{reader}\(exchange, (\w+)", inspect.getsource(route.handler))
            if read is not None:
                assert named is not None, (route.path, reader)
                assert named.__name__ == read[1], (route.path, reader)
                seen += 1
    assert seen >= 30


def test_members_that_are_always_there_are_required() -> None:
    """Classes of the model are spelled whole, so all their fields are required; of a body a None may be left out."""
    components: dict[str, Any] = {}
    plain = schema_of(SessionStats, components)
    assert plain == {"$ref": "#/components/schemas/SessionStats"}
    assert set(components["SessionStats"]["required"]) == {field.name for field in attrs.fields(SessionStats)}

    @attrs.frozen
    class ExampleBody(Body):
        always: int | None
        often: int = 3
        seldom: int | None = None

    schema_of(ExampleBody, components)
    assert components["Example"]["required"] == ["always", "often"]


def check(name: str, answer: httpx.Response) -> None:
    """Hold an answer against the schema that the operation has for it."""
    _, _, operation = OPERATIONS_BY_ID[name]
    assert str(answer.status_code) in operation["responses"], answer.text
    schema = operation["responses"][str(answer.status_code)]["content"]["application/json"]["schema"]
    _validator(schema).validate(answer.json())


def _validator(schema: dict[str, Any]) -> Draft202012Validator:  # JSON values
    """Return a validator to which a member that is not described is an error, but for parts of a diagnosis."""
    components = copy.deepcopy(DOCUMENT["components"])
    for name, component in components["schemas"].items():
        component["additionalProperties"] = name == "Diagnosis"
    return Draft202012Validator({**schema, "components": components})


async def test_answers_are_as_described() -> None:
    """Of every route that answers with JSON, and of errors; members that are not described are found, too."""
    seen = set()
    pool = PoolSettings(enabled=True, images={"python": PoolSize(1)})
    async with running_front(pool=pool) as running, running.client() as client:
        running.tree.scripts["echo x"] = Script()
        running.tree.scripts["top"] = Script(echo=True, ignores=frozenset({10}))
        process = {"cmd": "top", "process_id": "p", "tty": {"cols": 80, "rows": 24}}
        made = await client.post("/v1/sessions", json={"labels": {"a": "b"}})
        path, space = f"/v1/sessions/{made.json()['id']}", "/v1/workspaces/ws"
        check("post_v_sessions", made)
        requests: tuple[tuple[str, str, str, object], ...] = (
            ("get_healthz", "GET", "/healthz", None),
            ("get_readyz", "GET", "/readyz", None),
            ("get_openapi_json", "GET", "/openapi.json", None),
            ("get_v_node", "GET", "/v1/node", None),
            ("get_v_pools", "GET", "/v1/pools", None),
            ("post_v_node_drain", "POST", "/v1/node/drain", None),
            ("post_v_node_undrain", "POST", "/v1/node/undrain", None),
            ("get_v_system", "GET", "/v1/system", None),
            ("get_v_sessions", "GET", "/v1/sessions", None),
            ("get_v_sessions_id", "GET", path, None),
            ("patch_v_sessions_id", "PATCH", path, {"labels": {}}),
            ("get_v_sessions_id_stats", "GET", f"{path}/stats", None),
            ("get_v_sessions_id_diagnostics", "GET", f"{path}/diagnostics", None),
            ("post_v_sessions_id_exec", "POST", f"{path}/exec", {"cmd": "echo x", "exec_id": "e"}),
            ("get_v_sessions_id_execs", "GET", f"{path}/execs", None),
            ("get_v_sessions_id_execs_exec_id", "GET", f"{path}/execs/e", None),
            ("get_v_sessions_id_execs_exec_id_output", "GET", f"{path}/execs/e/output", None),
            ("post_v_sessions_id_execs_exec_id_cancel", "POST", f"{path}/execs/e/cancel", None),
            ("post_v_sessions_id_execs_exec_id_wait", "POST", f"{path}/execs/e/wait", {"for": "exit"}),
            ("post_v_sessions_id_shells", "POST", f"{path}/shells", {"name": "s"}),
            ("get_v_sessions_id_shells", "GET", f"{path}/shells", None),
            ("delete_v_sessions_id_shells_name", "DELETE", f"{path}/shells/s", None),
            ("post_v_sessions_id_processes", "POST", f"{path}/processes", process),
            *(
                (f"post_v_sessions_id_{of}_exec_id_{action}", "POST", f"{path}/{of}/p/{action}", json)
                for of in ("execs", "processes")
                for action, json in (("signal", {"signal": 10}), ("stdin", {"text": "x"}), ("resize", SIZE))
            ),
            ("get_v_sessions_id_processes", "GET", f"{path}/processes", None),
            ("get_v_sessions_id_processes_exec_id", "GET", f"{path}/processes/p", None),
            ("get_v_sessions_id_processes_exec_id_logs", "GET", f"{path}/processes/p/logs", None),
            ("post_v_sessions_id_processes_exec_id_kill", "POST", f"{path}/processes/p/kill", None),
            ("delete_v_sessions_id_processes_exec_id", "DELETE", f"{path}/processes/p", None),
            ("post_v_sessions_id_processes_exec_id_wait", "POST", f"{path}/processes/p/wait", {"for": "exit"}),
            ("get_v_sessions_id_ports", "GET", f"{path}/ports", None),
            ("post_v_sessions_id_fs_write", "POST", f"{path}/fs/write", {"path": "f", "text": "t"}),
            ("get_v_sessions_id_fs_read", "GET", f"{path}/fs/read?path=f", None),
            *_file_requests("sessions", path),
            ("delete_v_sessions_id_fs", "DELETE", f"{path}/fs?path=d&recursive=true", None),
            ("post_v_sessions_id_pause", "POST", f"{path}/pause", None),
            ("post_v_sessions_id_resume", "POST", f"{path}/resume", None),
            ("delete_v_sessions_id", "DELETE", path, None),
            ("get_v_keys", "GET", "/v1/keys", None),
            ("post_v_workspaces", "POST", "/v1/workspaces", {"id": "ws"}),
            ("get_v_workspaces", "GET", "/v1/workspaces?usage=true", None),
            ("get_v_workspaces_id", "GET", space, None),
            ("put_v_workspaces_id", "PUT", space, {"labels": {}}),
            ("put_v_workspaces_id", "PUT", "/v1/workspaces/new", None),
            ("patch_v_workspaces_id", "PATCH", space, {"labels": {}}),
            ("post_v_workspaces_id_fs_write", "POST", f"{space}/fs/write", {"path": "f", "text": "t"}),
            ("get_v_workspaces_id_fs", "GET", f"{space}/fs", None),
            *_file_requests("workspaces", space),
            ("get_v_workspaces_id_fs_read", "GET", f"{space}/fs/read?path=f", None),
            ("delete_v_workspaces_id_fs", "DELETE", f"{space}/fs?path=f", None),
            ("delete_v_workspaces_id", "DELETE", space, None),
        )
        for name, method, url, json in requests:
            check(name, await client.request(method, url, json=json))
            seen.add(name)
        form: dict[str, Any] = {"files": {"file": ("f", b"x")}}
        session = await running.supervisor.create(SessionSpec())
        path = f"/v1/sessions/{session.id}"
        check("post_v_workspaces_id_import", await client.post("/v1/workspaces/other/import", content=bytes(1024)))
        for of, top in (("sessions", path), ("workspaces", "/v1/workspaces/other")):
            check(f"post_v_{of}_id_fs_archive", await client.post(f"{top}/fs/archive", content=bytes(1024)))
            begun = await client.post(f"{top}/fs/uploads", json={"path": "f"})
            check(f"post_v_{of}_id_fs_uploads", begun)
            upload, name = f"{top}/fs/uploads/{begun.json()['upload_id']}", f"v_{of}_id_fs_uploads_upload_id"
            check(f"get_{name}", await client.get(upload))
            check(f"patch_{name}", await client.patch(upload, content=b"x", headers={"Upload-Offset": "0"}))
            check(f"post_{name}_commit", await client.post(f"{upload}/commit"))
            begun = await client.post(f"{top}/fs/uploads", json={"path": "f"})
            check(f"delete_{name}", await client.delete(f"{top}/fs/uploads/{begun.json()['upload_id']}"))
            seen |= {f"post_v_{of}_id_fs_uploads", f"post_{name}_commit"}
            seen |= {f"{method}_{name}" for method in ("get", "patch", "delete")}
        check("post_v_sessions_id_fs_upload", await client.post(f"{path}/fs/upload", **form))
        check("post_v_workspaces_id_fs_upload", await client.post("/v1/workspaces/other/fs/upload", **form))
        error = (await client.get("/v1/sessions/0123456789abcdef")).json()
        _validator({"$ref": "#/components/schemas/Error"}).validate(error)
        assert error["error_code"] in DOCUMENT["x-error-codes"]
    seen |= {"post_v_sessions", "post_v_workspaces_id_import"} | {
        f"post_v_{of}_id_fs_{what}" for of in OWNERS for what in ("upload", "archive")
    }
    answering = {
        name
        for name, (_, _, operation) in OPERATIONS_BY_ID.items()
        if any("application/json" in answer.get("content", ()) for answer in operation["responses"].values())
    }
    assert answering == seen


def _file_requests(of: str, top: str) -> Sequence[tuple[str, str, str, Any]]:
    """Return a request for each of the routes that sessions and workspaces share, with a file `f` there."""
    return (
        (f"put_v_{of}_id_fs_file", "PUT", f"{top}/fs/file?path=f", None),
        (f"post_v_{of}_id_fs_mkdir", "POST", f"{top}/fs/mkdir", {"path": "d", "parents": True}),
        (f"post_v_{of}_id_fs_copy", "POST", f"{top}/fs/copy", {"from": "f", "to": "d/c"}),
        (f"post_v_{of}_id_fs_move", "POST", f"{top}/fs/move", {"from": "d/c", "to": "c"}),
        (f"post_v_{of}_id_fs_chmod", "POST", f"{top}/fs/chmod", {"path": "c", "mode": "600"}),
        (f"post_v_{of}_id_fs_chown", "POST", f"{top}/fs/chown", {"path": "c"}),
        (f"get_v_{of}_id_fs_list", "GET", f"{top}/fs/list", None),
        (f"get_v_{of}_id_fs_stat", "GET", f"{top}/fs/stat?path=f", None),
        (f"post_v_{of}_id_fs_glob", "POST", f"{top}/fs/glob", {"pattern": "**/f"}),
        (f"get_v_{of}_id_fs_view", "GET", f"{top}/fs/view?path=f", None),
        (f"post_v_{of}_id_fs_edit", "POST", f"{top}/fs/edit", {"edits": [{"op": "create", "path": "e", "text": "t"}]}),
        (f"post_v_{of}_id_fs_stat", "POST", f"{top}/fs/stat", {"paths": ["f", "x"]}),
    )


PROBES: tuple[object, ...] = (
    *(None, True, False, -1, 0, 1, 2, 15, 16, 63, 64, 65, 999, 1000, 1001, 1023, 1024, 65_535, 65_536, 86_400, 86_401),
    *(2**20, 2**20 + 1, 2**32, 2**53, 2**53 + 1, 0.5, "", "a", "bash", "none", "a b", "x" * 200, "proxy", "exit", "\n"),
    *([], ["a"], [1], {}, {"a": "b"}, {"a": 1}),
)


@pytest.mark.parametrize("kind", [kind for kind in vars(fields).values() if hasattr(kind, "__supertype__")])
def test_what_a_field_accepts_its_schema_accepts(kind: Any) -> None:
    """Numbers, choices and patterns that a field refuses are refused by the schema, too."""
    schema = schema_of(kind, {})
    validator = Draft202012Validator(schema)
    is_exact = isinstance(fields.check_of(kind), fields.Between | fields.Choice | fields.Matching)
    for probe in PROBES:
        accepts = _accepts(fields.check_of(kind), probe)
        described = validator.is_valid(probe)
        assert described or not accepts, probe
        assert accepts == described or not is_exact, probe


def _accepts(check: Callable[[object], object] | None, probe: object) -> bool:
    assert check is not None
    try:
        check(probe)
    except ValueError:
        return False
    return True
