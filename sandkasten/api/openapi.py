"""The HTTP interface as an OpenAPI 3.1 document, from the table of routes and the classes that it names.

Requests and answers are described by the attrs classes that read and spell them, field by field. A schema says no more
than is checked, and as much of that as JSON Schema can say: a bound in bytes, or fields that exclude each other, are
told in words by docs/api.md. The summary of an operation is the first line of its handler's docstring. A WebSocket,
which OpenAPI has no words for, is a GET operation with `101`. What is said over it, or in a stream, is `x-messages`: by
media type or `websocket`, the schema of each message by its name.

Names are for ever, since generators of clients use them: an operation's id comes from its method and path, a component
is named after its class. docs/reference.py keeps a list of both, and makes docs/api-reference.md.

Sources: OpenAPI Specification 3.1.1 (§4.8.24 on schemas); JSON Schema 2020-12.
"""

from __future__ import annotations

import enum
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import attrs

from egress import brokering
from egress.policy import MAX_RULES
from runner.wire.protocol import MAX_EDITS
from sandkasten import errors
from sandkasten.api.examples import EXAMPLES
from sandkasten.api.http.auth import Reach
from sandkasten.api.http.errors import INTERNAL_CODE, INTERNAL_MESSAGE, STATUS, ErrorBody
from sandkasten.api.http.json import Body, is_optional
from sandkasten.api.http.routing import Messages, Route, RouteKind
from sandkasten.api.resources import fields, file_contents, file_texts, network, run_output, secrets, sessions
from sandkasten.api.resources.events import EventBody
from sandkasten.api.resources.fields import Between, Choice, CommaList, Matching, check_of, is_strict
from sandkasten.api.websocket.messages import MAX_PING_CHARS, PingText
from sandkasten.errors import SandkastenError
from sandkasten.journal.fields import COMMON_FIELDS, EVENT_FIELDS, FIELD_TYPES
from sandkasten.model import LIMIT_BOUNDS, EventType
from sandkasten.model.keys import Access
from sandkasten.model.network import MAX_SESSION_SECRETS

Schema = dict[str, Any]  # JSON values

JSON = "application/json"
WEBSOCKET = "websocket"
_SEGMENT = re.compile(r"\{(\w+)\}")
_TEXT: Schema = {"schema": {"type": "string"}}
_INFO = (
    "Every GET has a HEAD. Every answer has `X-Request-ID` and `traceresponse`. Unknown fields of a body are ignored, "
    "and named in `Sandkasten-Ignored`; those of a query, or of a request for files, are refused. docs/api.md says all "
    "of it in words."
)

# The document ---------------------------------------------------------------------------------------------------------


def document(routes: Iterable[Route], installed: str) -> dict[str, Any]:  # JSON values
    """Return the description of all routes; `installed` is the version of this package. Pure; takes some 30 ms."""
    made = Components()
    made.schema_of(ErrorBody)
    paths: dict[str, dict[str, Any]] = {}

    def place(route: Route) -> tuple[str, str]:
        return route.path, route.method

    for (path, method), served in groupby(sorted(routes, key=place), key=place):
        paths.setdefault(path, {})[method.lower()] = _operation(tuple(served), made)
    return {
        "openapi": "3.1.1",
        "info": {
            "title": "Sandkasten",
            "version": installed,
            "description": _INFO,
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(made.schemas.items())),
            "responses": dict(sorted(made.responses.items())),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "x-error-codes": {
            error.code: {"status": status, "meaning": _meaning(error.code)}
            for error, status in sorted(STATUS.items(), key=lambda row: row[0].code)
        },
    }


def errors_of(route: Route) -> frozenset[type[SandkastenError]]:
    """Return the errors that a route can answer with: its own, and those that follow from its kind and its needs."""
    found: set[type[SandkastenError]] = {*route.errors, errors.InvalidRequest, errors.TooLarge, SandkastenError}
    if route.needs.reach is Reach.PUBLIC:
        return frozenset(found)
    found |= {errors.Unauthorized, errors.QuotaExceeded, errors.Capacity}
    if route.needs.access > Access.READ or route.needs.reach is Reach.NODE:
        found.add(errors.Forbidden)
    if route.needs.reach is Reach.SESSION:
        found.add(errors.SessionNotFound)
    elif _SEGMENT.search(route.path):
        found.add(errors.WorkspaceNotFound)
    if route.kind is RouteKind.WEBSOCKET:
        found.add(errors.PermissionDenied)
        if route.needs.reach is Reach.SESSION and route.needs_live_session:
            found.add(errors.SessionExpired)
    elif route.method != "GET":
        found.add(errors.DiskFull)
    return frozenset(found)


def operation_id(route: Route) -> str:
    """Return the id of a route: its method and the words of its path, in the singular where a name follows."""
    parts = route.path.removeprefix("/v1").split("/")[1:]
    words = [
        _singular(word) if following.startswith("{") else word
        for word, following in zip(parts, [*parts[1:], ""], strict=True)
        if not word.startswith("{")
    ]
    return "_".join([route.method.lower(), *(word.replace(".", "_") for word in words)])


def _singular(word: str) -> str:
    return word.removesuffix("es") if word == "processes" else word.removesuffix("s")


def _operation(served: Sequence[Route], made: Components) -> dict[str, Any]:  # JSON values
    """Return what is at one method of one path: a route, a WebSocket, or both."""
    route = served[0] if served[0].kind is not RouteKind.WEBSOCKET else served[-1]
    described: dict[str, Any] = {
        "operationId": operation_id(route),
        "tags": [_tag(route)],
        "summary": (inspect.getdoc(route.handler) or "").partition("\n")[0],
    }
    if parameters := list(_parameters(route, made)):
        described["parameters"] = parameters
    if route.body is not None:
        is_needed = any(field.default is attrs.NOTHING for field in attrs.fields(route.body))
        content = {"schema": made.schema_of(route.body)}
        if examples := EXAMPLES.get(route.body):
            content["examples"] = {str(number): {"value": each} for number, each in enumerate(examples, 1)}
        described["requestBody"] = {"required": is_needed, "content": {JSON: content}}
    elif route.body_type:
        content = {kind: {"schema": _OF_BODY.get(kind, {})} for kind in route.body_type}
        described["requestBody"] = {"required": True, "content": content}
    described["responses"] = _responses(served, made)
    if route.needs.reach is Reach.PUBLIC:
        described["security"] = []
    else:
        described["x-needs"] = {"access": route.needs.access.name.lower(), "reach": route.needs.reach.name.lower()}
    if said := {_medium(each): _messages(each.messages, made) for each in served if each.messages is not None}:
        described["x-messages"] = said
    return described


def _tag(route: Route) -> str:
    words = set(route.path.split("/"))
    if words & {"fs", "export", "import"}:
        return "files"
    if words & {"exec", "execs", "processes", "shells", "terminal", "ports"}:
        return "runs"
    return next((word for word in ("events", "sessions", "workspaces") if word in words), "node")


def _responses(served: Sequence[Route], made: Components) -> dict[str, Any]:  # JSON values
    found: dict[str, Any] = {}
    codes: dict[int, set[str]] = {}
    is_plain = False
    for route in served:
        for error in errors_of(route):
            codes.setdefault(STATUS.get(error, 500), set()).add(error.code)
        if route.kind is RouteKind.WEBSOCKET:
            found["101"] = {"description": "a WebSocket, with the messages of x-messages"}
            continue
        is_plain = True
        gives = (*route.gives, *(getattr(route.answer, "gives", ())))
        headers = {"headers": {_header(name): _TEXT for name in gives}} if gives else {}
        content = {kind: _TEXT if kind.startswith("text/") else {"schema": {}} for kind in route.answer_type}
        if route.answer is not None:
            content = {JSON: {"schema": made.schema_of(route.answer)}} | content
        for status in route.statuses:
            body = {} if status == 304 else {"content": dict(content)}
            found[str(status)] = {"description": _DONE.get(status, "done"), **headers, **body}
    if not is_plain:  # without an upgrade there is nothing
        codes[404].add(errors.RouteNotFound.code)
    for status, each in codes.items():
        refused = made.response_of(status, each)
        if (done := found.get(str(status))) is None:
            found[str(status)] = refused
        else:
            schemas = [done["content"][JSON]["schema"], _error_schema(each)]
            done["content"][JSON] = {"schema": {"anyOf": schemas}}
    return dict(sorted(found.items()))


_DONE: Mapping[int, str] = {
    201: "made",
    206: "the part that was asked for",
    304: "the client has this version",
    503: "not ready, or refused",
}

_PATHS: Schema = {"type": "array", "items": {"type": "string", "contentMediaType": "application/octet-stream"}}
_OF_BODY: Mapping[str, Schema] = {
    "multipart/form-data": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "file": _PATHS, "files": _PATHS},
        "additionalProperties": False,
    }
}


def _parameters(route: Route, made: Components) -> Iterator[dict[str, Any]]:  # JSON values
    for name in _SEGMENT.findall(route.path):
        yield {"name": name, "in": "path", "required": True, "schema": made.schema_of(_segment_kind(route, name))}
    for place, cls in (("query", route.query), ("header", route.head)):
        hints = {} if cls is None else get_type_hints(cls)
        for field in () if cls is None else attrs.fields(cls):
            kind = _without_none(hints[field.name])
            name = _spelled(field.name) if place == "query" else _header(field.name.replace("_", "-"))
            is_needed = field.default is attrs.NOTHING
            parameter = {"name": name, "in": place, "required": is_needed, "schema": made.with_default(kind, field)}
            if isinstance(check_of(kind), CommaList):
                parameter["explode"] = False
            yield parameter


def _header(name: str) -> str:
    return name.title().replace("Etag", "ETag").replace("Event-Id", "Event-ID")


def _segment_kind(route: Route, name: str) -> object:
    """Return the kind of an open segment of a path; `id` is a session's or a workspace's."""
    if name == "id":
        return fields.SessionId if route.needs.reach is Reach.SESSION else fields.WorkspaceId
    return {"exec_id": fields.ExecId, "name": fields.ShellName}.get(name, str)


def _medium(route: Route) -> str:
    return WEBSOCKET if route.kind is RouteKind.WEBSOCKET else route.answer_type[-1]


def _messages(said: Messages, made: Components) -> dict[str, Any]:  # JSON values
    described: dict[str, Any] = {"server": {name: made.schema_of(kind) for name, kind in said.server.items()}}
    if said.protocols:
        described["client"] = {name: made.schema_of(kind) for name, kind in said.client.items()}
        described["protocols"] = list(said.protocols)
    if said.binary is not None:
        described["binary"] = said.binary
    return described


def _error_schema(codes: Iterable[str]) -> Schema:
    return {"$ref": "#/components/schemas/Error", "properties": {"error_code": {"enum": sorted(codes)}}}


def _meaning(code: str) -> str:
    """Return what a code says of a request, in words."""
    if code == INTERNAL_CODE:
        return INTERNAL_MESSAGE
    return _prose(next(error for error in STATUS if error.code == code))


def _prose(cls: type) -> str:
    """Return a class's own docstring in one line."""
    return " ".join((inspect.cleandoc(cls.__doc__ or "")).split())


_ERROR_HEADERS: Mapping[int, str] = {
    401: "WWW-Authenticate",
    416: "Content-Range",
    429: "Retry-After",
    503: "Retry-After",
}

# Schemas --------------------------------------------------------------------------------------------------------------

_STRING: Schema = {"type": "string"}
_STRINGS: Schema = {"type": "array", "items": _STRING}


def _anchored(pattern: str) -> str:
    """Return a pattern that is matched from the start as one that is searched (ECMA-262 knows no `\\Z`)."""
    text = pattern.removeprefix("^").replace(r"\Z", "$")
    return f"^{text}" if text.endswith("$") else f"^(?:{text})"


def _of_check(check: Callable[[object], object] | None) -> Schema | None:
    match check:
        case Between(low, high):
            return {"type": "integer", "minimum": low, "maximum": high}
        case Choice(offered):
            return {"type": "string", "enum": list(offered)}
        case Matching(pattern):
            return {"type": "string", "pattern": _anchored(pattern.pattern)}
        case CommaList(members):
            return {"type": "array", "items": {"enum": [member.value for member in members]}, "minItems": 1}
    return None


_EDIT_FIELDS: Mapping[object, Schema] = {
    fields.file_path: {"type": "string", "maxLength": fields.MAX_PATH_BYTES},
    fields.some_text: {"type": "string", "minLength": 1},
    fields.edit_count: {"enum": [1, "all"]},
}


def _edit_forms() -> Iterator[Schema]:
    """Yield the form of each kind of edit."""
    for op, checks in fields.EDITS.items():
        properties = {name: _EDIT_FIELDS.get(check) or _of_check(check) or _STRING for name, check in checks.items()}
        yield {
            "type": "object",
            "properties": {"op": {"const": op}, **properties},
            "required": ["op", *(name for name in checks if name not in fields.MAY_LACK)],
            "additionalProperties": False,
        }


_SECRET_NAME: Schema = {"type": "string", "pattern": _anchored(brokering.SECRET_NAME.pattern)}
_SECRET: Schema = {
    "type": "object",
    "properties": {"secret": _SECRET_NAME},
    "required": ["secret"],
    "additionalProperties": False,
}
_POSITION = _anchored(run_output.POSITION.pattern)
_LOW_CORES, _HIGH_CORES = LIMIT_BOUNDS["cpu"]

_OF_KIND: Mapping[object, Schema] = {
    fields.Cores: {"type": "number", "minimum": _LOW_CORES, "maximum": _HIGH_CORES},
    fields.Base64: {"type": "string", "contentEncoding": "base64"},
    fields.Path: {"type": "string", "minLength": 1, "maxLength": fields.MAX_PATH_BYTES},
    fields.NamedPath: {"type": "string", "minLength": 1, "maxLength": fields.MAX_PATH_BYTES},
    fields.PathInWorkspace: {"type": "string", "maxLength": fields.MAX_PATH_BYTES},
    fields.FilePath: {"type": "string", "maxLength": fields.MAX_PATH_BYTES},
    fields.Paths: {**_STRINGS, "minItems": 1, "maxItems": fields.MAX_PATHS},
    fields.Glob: {"type": "string", "maxLength": fields.MAX_PATH_BYTES},
    fields.FileMode: {"type": "string", "pattern": _anchored(fields.MODE.pattern)},
    fields.Pattern: {"type": "string", "minLength": 1, "maxLength": fields.MAX_PATTERN_CHARS},
    fields.Environment: {"type": "object", "additionalProperties": _STRING, "maxProperties": fields.MAX_ENV_NAMES},
    network.SessionEnvironment: {
        "type": "object",
        "additionalProperties": {"anyOf": [_STRING, _SECRET]},
        "maxProperties": fields.MAX_ENV_NAMES,
    },
    network.SessionEnvironmentPatch: {
        "type": "object",
        "additionalProperties": {"anyOf": [{"type": ["string", "null"]}, _SECRET]},
        "maxProperties": fields.MAX_ENV_NAMES,
    },
    network.SecretNames: {
        "type": "array",
        "items": _SECRET_NAME,
        "maxItems": MAX_SESSION_SECRETS,
    },
    secrets.SecretValue: {
        "type": "string",
        "minLength": brokering.VALUE_CHARS[0],
        "maxLength": brokering.VALUE_CHARS[1],
        "pattern": f"^(?:{brokering.PRINTABLE.pattern})$",
    },
    secrets.SecretHosts: {**_STRINGS, "minItems": 1, "maxItems": brokering.MAX_HOSTS},
    secrets.Placeholder: {
        "type": "string",
        "minLength": brokering.PLACEHOLDER_CHARS[0],
        "maxLength": brokering.PLACEHOLDER_CHARS[1],
        "pattern": f"^(?:{brokering.VISIBLE.pattern})$",
    },
    fields.Labels: {
        "type": "object",
        "additionalProperties": {"type": "string", "maxLength": fields.MAX_LABEL_CHARS},
        "maxProperties": fields.MAX_LABELS,
    },
    fields.Stdin: {"anyOf": [_STRING, {"const": True}]},
    fields.SignalNumber: {"anyOf": [{"type": "integer", "minimum": 1, "maximum": fields.MAX_SIGNAL}, _STRING]},
    fields.Argv: {**_STRINGS, "minItems": 1, "maxItems": fields.MAX_ARGUMENTS},
    fields.Words: {**_STRINGS, "maxItems": fields.MAX_ARGUMENTS},
    fields.OutputFields: {"type": "array", "items": {"enum": list(fields.OUTPUT_FIELDS)}, "uniqueItems": True},
    fields.Places: {**_STRINGS, "maxItems": fields.MAX_PLACES},
    network.Rules: {
        **_STRINGS,
        "items": {"type": "string", "maxLength": network.MAX_RULE_CHARS},
        "maxItems": MAX_RULES,
    },
    fields.Fixed: {"not": {}},
    fields.NameCursor: _STRING,
    fields.Edits: {
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_EDITS,
        "items": {"oneOf": list(_edit_forms())},
    },
    file_texts.Versions: {
        "type": "object",
        "additionalProperties": _of_check(fields.one_etag),
        "maxProperties": MAX_EDITS,
    },
    sessions.ListCursor: _STRING,
    run_output.OutputPosition: {"type": "string", "pattern": _POSITION},
    run_output.LastPosition: {"type": "string", "pattern": f"^$|{_POSITION}"},
    run_output.PreferredWait: _STRING,
    file_contents.ByteRange: _STRING,
    file_contents.ETags: {"type": "string", "pattern": rf"^[, \t]*(?:(?:{fields.ETAG.pattern})[, \t]*)+$"},
    PingText: {"type": "string", "maxLength": MAX_PING_CHARS},
}
"""Kinds of field whose check is not one of the plain ones."""

_OF_TYPE: Mapping[object, Schema] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: _STRING,
    bool: {"type": "boolean"},
    bytes: _STRING,
    dict: {"type": "object"},
    datetime: {"type": "string", "format": "date-time"},
    type(None): {"type": "null"},
}


class Components:
    """The components that schemas refer to, made when they are first referred to."""

    def __init__(self) -> None:
        self.schemas: dict[str, Schema] = {}
        self.responses: dict[str, Any] = {}  # JSON values
        self._classes: dict[str, object] = {}

    def schema_of(self, kind: object) -> Schema:
        """Return the schema of a type of field, of an attrs class by reference."""
        if get_origin(kind) in (Union, types.UnionType):
            return {"anyOf": [self.schema_of(member) for member in get_args(kind)]}
        if get_origin(kind) is Literal:
            return {"enum": list(get_args(kind))}
        if kind in _OF_KIND:
            return dict(_OF_KIND[kind])
        if isinstance(kind, EventType):
            return self._reference(f"{kind.value.title().replace('.', '')}Event", kind, lambda: self._event(kind))
        if isinstance(kind, type) and attrs.has(kind):
            cls = kind
            schema = self._reference(_component(cls), cls, lambda: self._object(cls))
            short = getattr(cls, "short", None)
            if short is None:
                return schema
            return {"anyOf": [schema, self.schema_of(_without_none(get_type_hints(cls)[short]))]}
        return (None if kind is int else _of_check(check_of(kind))) or self._plain(kind)

    def with_default(self, kind: object, field: attrs.Attribute[Any]) -> Schema:  # Any: of whatever type
        """Return the schema of a field of a request, with the field's default. One that could not be sent stands for a
        setting, and is not told."""
        value = field.default
        schema = self.schema_of(kind)
        if value is None or value is attrs.NOTHING or isinstance(value, attrs.Factory):  # type: ignore[arg-type]  # a class
            return schema
        value = list(value) if isinstance(value, tuple) else value
        value = value if isinstance(value, str | int | list) else str(value)
        try:
            (check_of(_without_none(kind)) or str)(value)
        except ValueError:
            return schema
        return schema | {"default": value} if value not in ("", []) else schema

    def response_of(self, status: int, codes: Iterable[str]) -> Schema:
        """Return the answer with one of these errors, by reference."""
        ordered = sorted(codes)
        name = "-".join(ordered)
        if name not in self.responses:
            told = {
                "description": " ".join(f"`{code}`: {_meaning(code)}" for code in ordered),
                "content": {JSON: {"schema": _error_schema(ordered)}},
            }
            header = _ERROR_HEADERS.get(status)
            self.responses[name] = told if header is None else told | {"headers": {header: _TEXT}}
        return {"$ref": f"#/components/responses/{name}"}

    def _reference(self, name: str, kind: object, make: Callable[[], Schema]) -> Schema:
        if self._classes.setdefault(name, kind) is not kind:
            raise ValueError(f"two components named {name}")
        if name not in self.schemas:
            self.schemas[name] = {}  # the class may hold itself
            self.schemas[name] = make()
        return {"$ref": f"#/components/schemas/{name}"}

    def _object(self, cls: type) -> Schema:
        hints = get_type_hints(cls)
        properties: dict[str, Schema] = {}
        required = []
        if isinstance(kind := getattr(cls, "kind", None), str):  # of a message; a field of that name is none
            properties["type"] = {"const": kind}
            required.append("type")
        for field in attrs.fields(cls):
            name, hint = _spelled(field.name), hints[field.name]
            if issubclass(cls, Body):
                properties[name] = self.schema_of(_without_none(hint) if is_optional(field) else hint)
                is_there = not is_optional(field)
            elif cls.__module__.startswith(_MODEL):
                properties[name], is_there = self.schema_of(hint), True
            else:
                properties[name], is_there = self.with_default(hint, field), field.default is attrs.NOTHING
            if is_there:
                required.append(name)
        for alias, name in getattr(cls, "aliases", {}).items():
            properties[alias] = properties[name] | {"deprecated": True}
        if (carried := getattr(cls, "carries", None)) is not None:
            others = self._object(carried.cls)["properties"]
            properties |= {name: schema for name, schema in others.items() if name not in carried.without}
        return {
            "type": "object",
            "description": re.sub(r"\bNone\b", "null", _prose(cls)),
            "properties": properties,
            **({"required": required} if required else {}),
            **({"additionalProperties": False} if is_strict(cls) else {}),
        }

    def _event(self, kind: EventType) -> Schema:
        names = sorted(EVENT_FIELDS[kind] | COMMON_FIELDS)
        data = {"type": "object", "properties": {name: self._plain(FIELD_TYPES[name]) for name in names}}
        return {**self.schema_of(EventBody), "properties": {"type": {"const": kind.value}, "data": data}}

    def _plain(self, kind: object) -> Schema:
        """Return the schema of a type's form in JSON, whatever is checked besides."""
        origin = get_origin(kind)
        if isinstance(kind, typing.NewType):
            return self._plain(kind.__supertype__)
        if isinstance(kind, type) and issubclass(kind, enum.StrEnum):
            return {"type": "string", "enum": [member.value for member in kind]}
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return {"type": "object", "additionalProperties": self.schema_of(get_args(kind)[1])}
        if isinstance(origin, type) and issubclass(origin, Sequence):
            return {"type": "array", "items": self.schema_of(get_args(kind)[0])}
        return dict(_OF_TYPE.get(kind, {}))


_MODEL = "sandkasten.model"
"""Classes of the model stand in answers only, and are spelled whole."""


def _component(cls: type) -> str:
    """Return a class's name as a component's. Names that several resources have for their requests get the
    resource's."""
    name = cls.__name__.removesuffix("Body") if issubclass(cls, Body) else cls.__name__
    module = cls.__module__.rpartition(".")[2]
    return f"{module.title()}{name}" if module == "workspaces" and cls.__name__.endswith("Request") else name


def _spelled(name: str) -> str:
    """Return a field's name in JSON: `for_` is spelled `for`."""
    return name.removesuffix("_")


def _without_none(kind: object) -> object:
    """Return a type without None as one of its alternatives."""
    if get_origin(kind) not in (Union, types.UnionType):
        return kind
    members = tuple(member for member in get_args(kind) if member is not type(None))
    return Union[members]  # noqa: UP007 - members in a tuple
