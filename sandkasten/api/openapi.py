"""`GET /openapi.json`: the HTTP interface as an OpenAPI 3.1 document, from the tables that serve it.

A route is in it because it is in the URL table; its words are what follows a semicolon in the first line of its
handler's docstring, its body the class that reads it, its query what the docstring's URL names, its key what it needs.
`OPERATIONS` adds what none of these says. WebSockets, which OpenAPI has no words for, are GET operations with `101`.

Source: OpenAPI Specification 3.1.1.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import attrs

from sandkasten.api.http.auth import Needs, Reach
from sandkasten.api.http.errors import STATUS, Answer, json_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.openapi_fields import schema_of
from sandkasten.api.openapi_shapes import SHAPES, Schema, ref
from sandkasten.api.resources import events, execs, files, keys, node, processes, sessions, workspaces
from sandkasten.api.resources import node as health
from sandkasten.api.resources import node as metrics
from sandkasten.api.resources import processes as shells
from sandkasten.api.resources import runs as commands
from sandkasten.api.resources import workspaces as archives
from sandkasten.api.resources.files import upload
from sandkasten.api.resources.runschemas import (
    CancelRequest,
    ProcessRequest,
    ShellRequest,
    SignalRequest,
    StdinRequest,
    WaitRequest,
)
from sandkasten.api.resources.schemas import (
    CreateRequest,
    ExecRequest,
    PatchRequest,
    PauseRequest,
    TerminalRequest,
    WriteRequest,
)
from sandkasten.model import SessionStats

_EVENTS = "text/event-stream"
_SEGMENT = re.compile(r"\{(\w+)\}")
_QUERY = re.compile(r"(?<=[?&])(\w+)=")
_OF_BODY: Mapping[str, Schema] = {"multipart/form-data": {"type": "object"}}
"""Of bodies that are no JSON; other ones are bytes."""

_SWITCHED: Mapping[str, object] = {"101": {"description": "a WebSocket; its messages are in docs/websocket.md"}}
Handler = Callable[..., Any]  # each table has a type of its own


@attrs.frozen
class Operation:
    """What a handler takes and gives. `answer` is the name of a shape or a class; `media` of what is no JSON."""

    answer: str | type | None = None
    body: type | None = None
    status: int = 200
    media: str = "application/json"
    body_media: str = "application/json"


OPERATIONS: Mapping[Handler, Operation] = {
    health.healthz: Operation("Health"),
    health.readyz: Operation("Readiness"),
    metrics.metrics: Operation(media="text/plain"),
    node.system: Operation("System"),
    node.node: Operation("Node"),
    node.drain: Operation("Node"),
    node.undrain: Operation("Node"),
    sessions.create: Operation("Session", CreateRequest, 201),
    sessions.list_sessions: Operation("Sessions"),
    sessions.get: Operation("Session"),
    sessions.update: Operation("Session", PatchRequest),
    sessions.destroy: Operation("Done"),
    sessions.stats: Operation(SessionStats),
    sessions.diagnostics: Operation("Diagnosis"),
    sessions.pause: Operation("Session", PauseRequest),
    sessions.resume: Operation("Session"),
    commands.run: Operation("ExecResult", ExecRequest),
    commands.stream: Operation(body=ExecRequest, media=_EVENTS),
    execs.list_runs: Operation("Runs"),
    execs.get: Operation("Run"),
    execs.output: Operation("Output"),
    execs.stream: Operation(media=_EVENTS),
    execs.send_signal: Operation("Done", SignalRequest),
    execs.cancel: Operation("Run", CancelRequest),
    execs.send_stdin: Operation("Done", StdinRequest),
    execs.resize: Operation("Done", TerminalRequest),
    shells.list_shells: Operation("Shells"),
    shells.open_shell: Operation("Shell", ShellRequest, 201),
    shells.close_shell: Operation("Done"),
    processes.start: Operation("Process", ProcessRequest, 201),
    processes.list_processes: Operation("Processes"),
    processes.get: Operation("Process"),
    processes.logs: Operation("Output"),
    processes.send_stdin: Operation("Done", StdinRequest),
    processes.send_signal: Operation("Done", SignalRequest),
    processes.resize: Operation("Done", TerminalRequest),
    processes.kill: Operation("Process"),
    processes.wait: Operation("Waited", WaitRequest),
    processes.ports: Operation("Ports"),
    events.stream: Operation(media=_EVENTS),
    files.read: Operation("File"),
    files.write: Operation("Written", WriteRequest),
    upload: Operation("Uploaded", body_media="multipart/form-data"),
    workspaces.list_workspaces: Operation("Workspaces"),
    workspaces.create: Operation("Workspace", workspaces.CreateRequest, 201),
    workspaces.get: Operation("Workspace"),
    workspaces.put: Operation("Workspace", workspaces.PutRequest),
    workspaces.update: Operation("Workspace", workspaces.ChangeRequest),
    workspaces.delete: Operation("Done"),
    workspaces.list_files: Operation("Files"),
    workspaces.stat: Operation("FileInfo"),
    workspaces.remove: Operation("Written"),
    archives.download: Operation(media="application/x-tar"),
    archives.export: Operation(media="application/zstd"),
    archives.import_archive: Operation("Imported", status=201, body_media="application/zstd"),
    keys.list_keys: Operation("Keys"),
}
"""A route whose handler is not here is described by the tables alone, and answers with some JSON object."""


@attrs.frozen
class Route:
    """One method of one path, from whichever table."""

    method: str
    path: str
    handler: Handler
    needs: Needs
    is_websocket: bool = False


async def openapi(_exchange: Exchange) -> Answer:
    """GET /openapi.json; this description of the interface."""
    return json_answer(_document())


@functools.cache
def _document() -> dict[str, Any]:  # JSON values
    from sandkasten.api.described import every_route  # the tables name the handler above

    return document(every_route(), version("sandkasten-runtime"))


def document(routes: tuple[Route, ...], installed: str) -> dict[str, Any]:  # JSON values
    """Return the whole description. Pure."""
    schemas: dict[str, Schema] = {name: dict(shape) for name, shape in SHAPES.items()}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        method = "get" if route.is_websocket else route.method.lower()
        operations = paths.setdefault(route.path, {})
        if method in operations:  # also a WebSocket
            operations[method]["responses"] |= _SWITCHED
        else:
            operations[method] = _operation(route, schemas)
    return {
        "openapi": "3.1.1",
        "info": {"title": "Sandkasten", "version": installed, "license": {"name": "MIT", "identifier": "MIT"}},
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "responses": {"Error": {"description": "what went wrong", "content": _json(ref("Error"))}},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "x-error-codes": {error.code: status for error, status in sorted(STATUS.items(), key=lambda row: row[0].code)},
    }


def _operation(route: Route, schemas: dict[str, Schema]) -> dict[str, Any]:  # JSON values
    found = OPERATIONS.get(route.handler, Operation())
    line = (route.handler.__doc__ or "").strip().partition("\n")[0]
    parameters = [_parameter(name, "path") for name in _SEGMENT.findall(route.path)]
    parameters += [_parameter(name, "query") for name in _QUERY.findall(line)]
    made: dict[str, Any] = {
        "operationId": f"{route.method.lower()}{re.sub(r'[^a-z]+', '_', route.path.lower()).rstrip('_')}",
        "summary": line.partition("; ")[2].rstrip(".") or f"{route.method} {route.path}",
        "responses": {} if route.is_websocket else {str(found.status): _answer(route, found, schemas)},
    }
    if route.is_websocket:
        made["responses"] |= _SWITCHED
    made["responses"]["default"] = {"$ref": "#/components/responses/Error"}
    if parameters:
        made["parameters"] = parameters
    if route.needs.reach is Reach.PUBLIC:
        made["security"] = []
    else:
        made["x-needs"] = {"access": route.needs.access.name.lower(), "reach": route.needs.reach.name.lower()}
    if found.body is not None:
        body = schema_of(found.body, schemas)
        made["requestBody"] = {"content": {found.body_media: {"schema": body}}}
    elif found.body_media != "application/json":
        made["requestBody"] = {"content": {found.body_media: {"schema": _OF_BODY.get(found.body_media, {})}}}
    return made


def _answer(route: Route, found: Operation, schemas: dict[str, Schema]) -> dict[str, Any]:  # JSON values
    answer: dict[str, Any] = {"description": "what was asked for"}
    if route.method == "HEAD":
        return answer
    if isinstance(found.answer, type):
        return answer | {"content": _json(schema_of(found.answer, schemas))}
    if found.answer in SHAPES:
        return answer | {"content": _json(ref(str(found.answer)))}
    if found.media != "application/json":
        return answer | {"content": {found.media: {"schema": {"type": "string"}}}}
    return answer | {"content": _json({"type": "object"})}


def _parameter(name: str, place: str) -> dict[str, Any]:  # JSON values
    return {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}


def _json(schema: Schema) -> dict[str, Any]:  # JSON values
    return {"application/json": {"schema": schema}}
