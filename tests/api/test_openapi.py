"""`GET /openapi.json`: valid, of all routes and no others, and true of the requests and answers it describes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

from sandkasten.api.described import every_route
from sandkasten.api.openapi import OPERATIONS, document, openapi
from sandkasten.api.openapi_fields import schema_of
from sandkasten.api.openapi_shapes import SHAPES
from sandkasten.api.resources import fields
from sandkasten.model import SessionSpec
from tests.api.harness import RunningFake, read_until, request_bytes, running_fake
from tests.fakes.supervisor import Script

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENT = document(every_route(), "1.0")
ONLY_WEBSOCKETS = {
    path
    for path, methods in DOCUMENT["paths"].items()
    if all("101" in operation["responses"] and "200" not in operation["responses"] for operation in methods.values())
}
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
    async with running_fake() as running, running.client() as client:
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
    async with running_fake() as running, running.client() as client:
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


async def _upgrade(running: RunningFake, path: str) -> str:
    """Ask for a WebSocket and return the refusal."""
    async with await running.connect() as stream:
        await stream.send_all(request_bytes("GET", path, headers=UPGRADE))
        return (await read_until(stream, b"}")).decode()


def test_what_is_served_is_described() -> None:
    """Every method of every path, from all tables."""
    described = {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert {(route.method, route.path) for route in every_route()} == described


def test_every_handler_but_its_own_says_what_it_answers() -> None:
    """One that is forgotten would be described as giving some JSON object."""
    assert {route.handler for route in every_route() if not route.is_websocket} - OPERATIONS.keys() == {openapi}


def test_words_about_an_operation_stand_behind_a_semicolon() -> None:
    """A summary is what follows it in the handler's docstring; words behind a colon would be lost."""
    lines = [(handler.__doc__ or "").partition("\n")[0] for handler in OPERATIONS]
    assert [line for line in lines if ": " in line.partition("; ")[0]] == []


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


def test_bodies_are_read_by_the_classes_that_are_named() -> None:
    """A handler that reads a body names its class in the code, and the same one in the table."""
    seen = 0
    for handler, operation in OPERATIONS.items():
        read = re.search(r"parse\([^\n]*?(?:schemas\.)?(\w+Request)\)", inspect.getsource(handler))
        if read is not None:
            assert operation.body is not None, handler
            assert operation.body.__name__ == read[1], handler
            seen += 1
    assert seen >= 8


def check(name: str, answer: httpx.Response) -> None:
    """Hold an answer against the schema that the operation has for it."""
    _, _, operation = OPERATIONS_BY_ID[name]
    assert str(answer.status_code) in operation["responses"], answer.text
    schema = operation["responses"][str(answer.status_code)]["content"]["application/json"]["schema"]
    Draft202012Validator({**schema, "components": DOCUMENT["components"]}).validate(answer.json())


async def test_answers_are_as_described() -> None:
    """Of sessions, runs, shells, processes, files, workspaces, keys, the node, and errors."""
    async with running_fake() as running, running.client() as client:
        running.supervisor.scripts["echo x"] = Script()
        made = await client.post("/v1/sessions", json={"labels": {"a": "b"}})
        check("post_v_sessions", made)
        path = f"/v1/sessions/{made.json()['id']}"
        for name, answer in {
            "get_healthz": await client.get("/healthz"),
            "get_readyz": await client.get("/readyz"),
            "get_v_node": await client.get("/v1/node"),
            "get_v_system": await client.get("/v1/system"),
            "get_v_sessions": await client.get("/v1/sessions"),
            "get_v_sessions_id": await client.get(path),
            "patch_v_sessions_id": await client.patch(path, json={"labels": {}}),
            "get_v_sessions_id_stats": await client.get(f"{path}/stats"),
            "get_v_sessions_id_diagnostics": await client.get(f"{path}/diagnostics"),
            "post_v_sessions_id_exec": await client.post(f"{path}/exec", json={"cmd": "echo x", "exec_id": "e"}),
            "get_v_sessions_id_execs": await client.get(f"{path}/execs"),
            "get_v_sessions_id_execs_exec_id": await client.get(f"{path}/execs/e"),
            "get_v_sessions_id_execs_exec_id_output": await client.get(f"{path}/execs/e/output"),
            "post_v_sessions_id_shells": await client.post(f"{path}/shells", json={"name": "s"}),
            "get_v_sessions_id_shells": await client.get(f"{path}/shells"),
            "delete_v_sessions_id_shells_name": await client.delete(f"{path}/shells/s"),
            "post_v_sessions_id_processes": await client.post(
                f"{path}/processes", json={"cmd": "x", "process_id": "p"}
            ),
            "get_v_sessions_id_processes": await client.get(f"{path}/processes"),
            "get_v_sessions_id_ports": await client.get(f"{path}/ports"),
            "post_v_sessions_id_fs_write": await client.post(f"{path}/fs/write", json={"path": "f", "text": "t"}),
            "get_v_sessions_id_fs_read": await client.get(f"{path}/fs/read?path=f"),
            "post_v_sessions_id_pause": await client.post(f"{path}/pause"),
            "post_v_sessions_id_resume": await client.post(f"{path}/resume"),
            "delete_v_sessions_id": await client.delete(path),
            "get_v_keys": await client.get("/v1/keys"),
            "post_v_workspaces": await client.post("/v1/workspaces", json={"id": "ws"}),
            "post_v_workspaces_id_import": await client.post("/v1/workspaces/other/import", content=b"any"),
        }.items():
            check(name, answer)
        error = (await client.get("/v1/sessions/0123456789abcdef")).json()
        Draft202012Validator(SHAPES["Error"]).validate(error)
        assert error["error_code"] in DOCUMENT["x-error-codes"]
        assert len((await running.supervisor.create(SessionSpec())).id) > 0


PROBES: tuple[object, ...] = (
    *(None, True, False, -1, 0, 1, 2, 15, 16, 63, 64, 65, 999, 1000, 1001, 1023, 1024, 65_535, 65_536, 86_400, 86_401),
    *(2**20, 2**20 + 1, 2**32, 2**53, 2**53 + 1, 0.5, "", "a", "bash", "none", "a b", "x" * 200, "proxy", "exit", "\n"),
    *([], ["a"], [1], {}, {"a": "b"}, {"a": 1}),
)


@pytest.mark.parametrize("kind", [kind for kind in vars(fields).values() if hasattr(kind, "__supertype__")])
def test_what_a_field_accepts_its_schema_accepts(kind: Any) -> None:
    """And of numbers, choices and patterns exactly that: what is refused is described as refused."""
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
