"""The HTTP interface as an OpenAPI 3.1 document, from the table of routes and the classes that it names.

Requests and answers are described by the attrs classes that read and spell them, field by field. A schema says no more
than is checked, and as much of that as JSON Schema can say: a bound in bytes, or a field that is refused for its
meaning (`Fixed`), is told in words by docs/api.md. The summary of an operation is the first line of its handler's
docstring. A WebSocket, which OpenAPI has no words for, is a GET operation with `101`.

Sources: OpenAPI Specification 3.1.1 (§4.8.24 on schemas); JSON Schema 2020-12.
"""

from __future__ import annotations

import enum
import inspect
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import attrs

from sandkasten.api.http.auth import Reach
from sandkasten.api.http.errors import STATUS, ErrorBody
from sandkasten.api.http.json import Body, is_optional
from sandkasten.api.http.routing import Route, RouteKind
from sandkasten.api.resources import fields
from sandkasten.api.resources.fields import Between, Choice, Matching, check_of, plain_kind

Schema = dict[str, Any]  # JSON values

JSON = "application/json"
_SEGMENT = re.compile(r"\{(\w+)\}")
_SWITCHED: Mapping[str, object] = {"101": {"description": "a WebSocket; its messages are in docs/websocket.md"}}

# The document ---------------------------------------------------------------------------------------------------------


def document(routes: Iterable[Route], installed: str) -> dict[str, Any]:  # JSON values
    """Return the description of all routes; `installed` is the version of this package. Pure."""
    schemas: dict[str, Schema] = {}
    error = schema_of(ErrorBody, schemas)
    paths: dict[str, dict[str, Any]] = {}
    for route in sorted(routes, key=lambda route: route.kind is RouteKind.WEBSOCKET):
        method = route.method.lower()
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
            "responses": {"Error": {"description": "what went wrong", "content": _content(JSON, error)}},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "x-error-codes": {error.code: status for error, status in sorted(STATUS.items(), key=lambda row: row[0].code)},
    }


def _operation(route: Route, schemas: dict[str, Schema]) -> dict[str, Any]:  # JSON values
    made: dict[str, Any] = {
        "operationId": f"{route.method.lower()}{re.sub(r'[^a-z]+', '_', route.path.lower()).rstrip('_')}",
        "summary": (inspect.getdoc(route.handler) or "").partition("\n")[0],
        "responses": _responses(route, schemas),
    }
    if parameters := [*_path_parameters(route), *_query_parameters(route)]:
        made["parameters"] = parameters
    if route.needs.reach is Reach.PUBLIC:
        made["security"] = []
    else:
        made["x-needs"] = {"access": route.needs.access.name.lower(), "reach": route.needs.reach.name.lower()}
    if route.body is not None:
        made["requestBody"] = {"content": _content(JSON, schema_of(route.body, schemas))}
    elif route.body_type is not None:
        made["requestBody"] = {"content": _content(route.body_type, _of_body(route.body_type))}
    return made


def _responses(route: Route, schemas: dict[str, Schema]) -> dict[str, Any]:  # JSON values
    error = {"default": {"$ref": "#/components/responses/Error"}}
    if route.kind is RouteKind.WEBSOCKET:
        return {**_SWITCHED, **error}
    if route.answer_type is not None:
        content = _content(route.answer_type, {"type": "string"})
    else:
        content = _content(JSON, schema_of(route.answer, schemas))
    return {str(status): {"description": "the answer", "content": content} for status in route.statuses} | error


def _of_body(media_type: str) -> Schema:
    """Return the schema of a body that is not JSON: a form, or bytes."""
    return {"type": "object"} if media_type == "multipart/form-data" else {}


def _path_parameters(route: Route) -> list[dict[str, Any]]:  # JSON values
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _SEGMENT.findall(route.path)
    ]


def _query_parameters(route: Route) -> list[dict[str, Any]]:  # JSON values
    if route.query is None:
        return []
    hints = get_type_hints(route.query)
    return [
        {
            "name": field.name,
            "in": "query",
            "required": field.default is attrs.NOTHING,
            "schema": schema_of(plain_kind(hints[field.name]), {}),
        }
        for field in attrs.fields(route.query)
    ]


def _content(media_type: str, schema: Schema) -> dict[str, Any]:  # JSON values
    return {media_type: {"schema": schema}}


# Schemas --------------------------------------------------------------------------------------------------------------

_STRING: Schema = {"type": "string"}
_STRINGS: Schema = {"type": "array", "items": _STRING}

_OF_KIND: Mapping[object, Schema] = {
    fields.Cores: {"type": "number"},
    fields.Base64: {"type": "string", "contentEncoding": "base64"},
    fields.Path: {"type": "string", "minLength": 1, "maxLength": fields.MAX_PATH_BYTES},
    fields.PathInWorkspace: {"type": "string", "maxLength": fields.MAX_PATH_BYTES},
    fields.Pattern: {"type": "string", "minLength": 1, "maxLength": fields.MAX_PATTERN_CHARS},
    fields.Environment: {"type": "object", "additionalProperties": _STRING, "maxProperties": fields.MAX_ENV_NAMES},
    fields.EnvironmentPatch: {
        "type": "object",
        "additionalProperties": {"type": ["string", "null"]},
        "maxProperties": fields.MAX_ENV_NAMES,
    },
    fields.Labels: {
        "type": "object",
        "additionalProperties": {"type": "string", "maxLength": fields.MAX_LABEL_CHARS},
        "maxProperties": fields.MAX_LABELS,
    },
    fields.Stdin: {"anyOf": [_STRING, {"const": True}]},
    fields.SignalNumber: {"anyOf": [{"type": "integer", "minimum": 1, "maximum": fields.MAX_SIGNAL}, _STRING]},
    fields.Argv: {**_STRINGS, "minItems": 1, "maxItems": fields.MAX_ARGUMENTS},
    fields.OutputFields: {"type": "array", "items": {"enum": list(fields.OUTPUT_FIELDS)}, "uniqueItems": True},
    fields.Places: {**_STRINGS, "maxItems": fields.MAX_PLACES},
    fields.NoHosts: {"type": "array", "maxItems": 0},
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


def schema_of(kind: object, components: dict[str, Schema]) -> Schema:
    """Return the schema of a type of field. The schema of an attrs class goes to `components`, under the class's
    name."""
    if get_origin(kind) in (Union, types.UnionType):
        return {"anyOf": [schema_of(member, components) for member in get_args(kind)]}
    if get_origin(kind) is Literal:
        return {"const": get_args(kind)[0]}
    if kind in _OF_KIND:
        return dict(_OF_KIND[kind])
    if isinstance(kind, type) and attrs.has(kind):
        return _reference(kind, components)
    match check_of(kind):
        case Between(low, high):
            return {"type": "integer", "minimum": low, "maximum": high}
        case Choice(offered):
            return {"type": "string", "enum": list(offered)}
        case Matching(pattern):
            return {"type": "string", "pattern": _anchored(pattern.pattern)}
    return _plain(kind, components)


def _plain(kind: object, components: dict[str, Schema]) -> Schema:
    """Return the schema of a type's form in JSON, whatever is checked besides."""
    origin = get_origin(kind)
    if isinstance(kind, typing.NewType):
        return _plain(kind.__supertype__, components)
    if isinstance(kind, type) and issubclass(kind, enum.StrEnum):
        return {"type": "string", "enum": [member.value for member in kind]}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": schema_of(get_args(kind)[1], components)}
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return {"type": "array", "items": schema_of(get_args(kind)[0], components)}
    return dict(_OF_TYPE.get(kind, {}))


def _reference(cls: type, components: dict[str, Schema]) -> Schema:
    name = _component(cls)
    if name not in components:
        components[name] = {}  # the class may hold itself
        hints = get_type_hints(cls)
        members = attrs.fields(cls)
        properties = {_spelled(field.name): schema_of(hints[field.name], components) for field in members}
        required = [_spelled(field.name) for field in members if _is_required(cls, field)]
        components[name] = {"type": "object", "properties": properties}
        if required:
            components[name]["required"] = required
    return {"$ref": f"#/components/schemas/{name}"}


def _is_required(cls: type, field: attrs.Attribute[Any]) -> bool:  # Any: of whatever type
    """Return whether a member is always there: in a request one without a default, in an answer all but those that are
    left out."""
    if issubclass(cls, Body):
        return not is_optional(field)
    return field.default is attrs.NOTHING or cls.__module__.startswith(_MODEL)


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


def _anchored(pattern: str) -> str:
    """Return a pattern that is matched from the start as one that is searched (ECMA-262 knows no `\\Z`)."""
    text = pattern.removeprefix("^").replace(r"\Z", "$")
    return f"^{text}" if text.endswith("$") else f"^(?:{text})"
