"""Holds everything that the front says against its own description: statuses, error codes, bodies, headers, events and
messages. `running_front` puts each front behind it, so every test of the API is a test of `/openapi.json` as well.

Whatever is not described is a problem: a status, an error code, a header, a member of a body, an event, a message. The
bodies of an answer are compared a few times for each operation and status, since comparing costs a millisecond.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import httpx
from jsonschema import Draft202012Validator

from sandkasten.api.app import read_target
from sandkasten.api.http.guard import App, Message, Receive, Scope, Send
from sandkasten.api.http.websocket import Opcode
from sandkasten.api.openapi import JSON, WEBSOCKET, document
from sandkasten.api.routes import TABLE

DOCUMENT = document(TABLE.routes, "1.0")
ALWAYS = frozenset(
    {"content-type", "content-length", "connection", "x-request-id", "traceresponse", "x-content-type-options"}
)
ALWAYS_KNOWN = ALWAYS | {"sandkasten-ignored", "cache-control", "x-accel-buffering", "allow"}
"""Headers that the description names once, for all operations, and those of any stream."""

OF_THE_SERVER = frozenset({b"date", b"transfer-encoding"})
"""Headers that the server adds to what the front says."""

_MOST_BYTES = 64 * 1024
"""Longest JSON body that is compared."""

EVENTS, LINES = "text/event-stream", "application/x-ndjson"

Operation = Mapping[str, Any]  # JSON values


@functools.cache
def _strict_components() -> dict[str, Any]:  # JSON values
    """Return the components, to which a member that is not described is an error, but for parts of a diagnosis."""
    components = copy.deepcopy(DOCUMENT["components"])
    for name, schema in components["schemas"].items():
        if "properties" in schema and "$ref" not in schema:
            schema["additionalProperties"] = name == "Diagnosis"
        if "data" in schema.get("properties", {}) and "$ref" in schema:  # of an event
            schema["properties"]["data"]["additionalProperties"] = False
    return dict(components)


@functools.cache
def _validator(schema: str) -> Draft202012Validator:
    return Draft202012Validator({**json.loads(schema), "components": _strict_components()})


def faults_of(value: object, schema: Mapping[str, Any]) -> list[str]:
    """Return where a JSON value is not as a schema of the description says, or has members that are not described."""
    errors = _validator(json.dumps(schema)).iter_errors(value)
    return [f"{error.json_path}: {error.message[:300]}" for error in errors]


def response_of(operation: Operation, status: int) -> Mapping[str, Any] | None:
    """Return an operation's description of a status, references followed."""
    found: Mapping[str, Any] | None = operation["responses"].get(str(status))
    if found is not None and "$ref" in found:
        found = DOCUMENT["components"]["responses"][found["$ref"].rpartition("/")[2]]
    return found


@attrs.define
class Described:
    """An application in front of another one. `seen` counts the answers by operation, status and error code."""

    app: App
    most_times: int = 10
    problems: list[str] = attrs.field(factory=list)
    seen: Counter[tuple[str, int, str]] = attrs.field(factory=Counter)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation = _operation(scope)
        if operation is None:
            await self.app(scope, receive, send)
            return
        said = _Said(self, operation, is_head=scope.get("method") == "HEAD")

        async def checked(message: Message) -> None:
            said.take(message)
            await send(message)

        await self.app(scope, receive, checked)

    def note(self, operation: Operation, problem: str) -> None:
        self.problems.append(f"{operation['operationId']}: {problem}")


def assert_described(response: httpx.Response) -> None:
    """Hold the head of an answer against the description, and the body of an error; a hook of httpx's clients."""
    request = response.request
    host = (b"host", request.headers["host"].encode())
    scope = {
        "type": "http",
        "method": request.method,
        "raw_path": request.url.raw_path.partition(b"?")[0],
        "headers": [host],
    }
    if (operation := _operation(scope)) is not None:
        front = Described(_nobody)
        said = _Said(front, operation, is_head=request.method == "HEAD")
        headers = [(name.lower(), value) for name, value in response.headers.raw if name.lower() not in OF_THE_SERVER]
        said.take({"type": "http.response.start", "status": response.status_code, "headers": headers})
        if response.is_error:
            said.take({"type": "http.response.body", "body": response.read()})
        assert front.problems == [], front.problems


async def _nobody(_scope: Scope, _receive: Receive, _send: Send) -> None:
    """Answer nothing."""


_compared: Counter[tuple[object, ...]] = Counter()
"""Numbers of comparisons in this process, by operation, status and code."""


def _operation(scope: Scope) -> Operation | None:
    """Return the operation that a request is for, None where there is none, and for `/mcp`, whose protocol tells."""
    target = read_target(scope)
    found = None if target is None else TABLE.find(target.segments)
    if target is None or found is None or target.path == "/mcp":
        return None
    if scope["type"] == WEBSOCKET:
        route = found.websocket
    else:
        route = found.methods.get(str(scope["method"])) or (found.websocket if scope["method"] == "GET" else None)
    return None if route is None else DOCUMENT["paths"][route.path][route.method.lower()]


class _Said:
    """The answer to one request."""

    def __init__(self, front: Described, operation: Operation, *, is_head: bool) -> None:
        self._front, self._operation, self._is_head = front, operation, is_head
        self._status, self._kind = 0, ""
        self._body, self._is_cut = bytearray(), False

    def take(self, message: Message) -> None:
        match message["type"]:
            case "http.response.start" | "websocket.http.response.start":
                self._begin(
                    message["status"], {bytes(name).decode(): bytes(value) for name, value in message["headers"]}
                )
            case "http.response.body" | "websocket.http.response.body":
                self._go_on(bytes(message.get("body", b"")))
                if not message.get("more_body", False):
                    self._end()
            case "websocket.accept":
                self._front.seen[self._operation["operationId"], 101, ""] += 1
            case "websocket.send":
                self._body += message["frames"]
                for opcode, payload in _frames(self._body):
                    if opcode == Opcode.TEXT:
                        value = json.loads(payload)
                        self._hear(WEBSOCKET, value["type"], value)

    def _begin(self, status: int, headers: Mapping[str, bytes]) -> None:
        self._status = status
        self._kind = headers.get("content-type", b"").decode().partition(";")[0]
        described = response_of(self._operation, status)
        if described is None:
            self._problem(f"status {status} is not described")
            return
        if self._kind not in described.get("content", {"": None}) and not (self._is_head and self._kind == ""):
            self._problem(f"{status} as {self._kind!r} is not described")
        known = {name.lower() for name in described.get("headers", {})} | ALWAYS_KNOWN
        if extra := headers.keys() - known:
            self._problem(f"headers {sorted(extra)} of {status} are not described")

    def _go_on(self, data: bytes) -> None:
        self._body += data if self._kind in (JSON, EVENTS, LINES) and not self._is_cut else b""
        if self._kind == JSON:
            self._is_cut = len(self._body) > _MOST_BYTES
        elif self._kind == EVENTS:
            for block in _parts(self._body, b"\n\n"):
                fields = dict(line.split(b": ", 1) for line in block.split(b"\n") if line[:1] != b":")
                if b"data" in fields:
                    self._hear(EVENTS, fields[b"event"].decode(), json.loads(fields[b"data"]))
        elif self._kind == LINES:
            for line in _parts(self._body, b"\n"):
                value = json.loads(line)
                name = next((name for name, sign in _SIGNS.items() if sign in value), "match")
                self._hear(LINES, name, value)

    def _end(self) -> None:
        body = bytes(self._body)
        described = response_of(self._operation, self._status)
        code = ""
        if self._kind == JSON and body and not self._is_cut and not self._is_head:
            value = json.loads(body)
            code = value.get("error_code", "") if isinstance(value, dict) else ""
            if described is not None and JSON in described["content"]:
                self._compare(value, described["content"][JSON]["schema"], self._status, code)
        self._front.seen[self._operation["operationId"], self._status, code] += 1

    def _hear(self, medium: str, name: str, value: object) -> None:
        schema = self._operation["x-messages"][medium]["server"].get(name)
        if schema is None:
            self._problem(f"the message {name} is not described")
        else:
            self._compare(value, schema, medium, name)

    def _compare(self, value: object, schema: Mapping[str, Any], *key: object) -> None:
        place = self._operation["operationId"], *key
        _compared[place] += 1
        if _compared[place] <= self._front.most_times:
            for fault in faults_of(value, schema):
                self._problem(f"{key}: {fault}")

    def _problem(self, text: str) -> None:
        self._front.note(self._operation, text)


_SIGNS = {"totals": "totals", "error": "error_code"}
"""Signs of the lines of a search that are no match."""


def _parts(received: bytearray, end: bytes) -> Iterator[bytes]:
    """Yield the whole parts at the beginning of what came, and remove them."""
    while (size := received.find(end)) >= 0:
        yield bytes(received[:size])
        del received[: size + len(end)]


def _frames(received: bytearray) -> Iterator[tuple[int, bytes]]:
    """Yield the whole frames of a server at the beginning of what came, and remove them (RFC 6455 §5.2)."""
    while len(received) >= 2:
        size, start = received[1], 2
        if size > 125:
            start = 4 if size == 126 else 10
            if len(received) < start:
                return
            (size,) = struct.unpack("!H" if start == 4 else "!Q", received[2:start])
        if len(received) < start + size:
            return
        yield received[0] & 0x0F, bytes(received[start : start + size])
        del received[: start + size]


def missing_of(component: str, cls: Any) -> set[str]:  # a dataclass
    """Return the differences of a client's dataclass from the component that it is made of: `name` for a member of the
    component that the class has no field for, `+name` for a field that is no member, `name=` for a field that must be
    given although the member may be absent."""
    schema = DOCUMENT["components"]["schemas"][component]
    given = {
        each.name.removesuffix("_"): each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
        for each in dataclasses.fields(cls)
    }
    members = {name: name in schema.get("required", ()) for name in schema["properties"]}
    must = {f"{name}=" for name in members.keys() & given.keys() if given[name] and not members[name]}
    return (members.keys() - given.keys()) | {f"+{name}" for name in given.keys() - members.keys()} | must
