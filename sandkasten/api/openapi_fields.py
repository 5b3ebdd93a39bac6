"""JSON Schema of what requests are made of, from the classes that read them and the checks of their fields.

Says no more than is checked, and as much of it as JSON Schema can say: what is counted in bytes or refused for its
meaning (`Fixed`) is told in words by docs/api.md. Sources: JSON Schema 2020-12; OpenAPI 3.1 §4.8.24.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Union, get_args, get_origin, get_type_hints

import attrs

from sandkasten.api.openapi_shapes import Schema, ref
from sandkasten.api.resources import fields
from sandkasten.api.resources.fields import Between, Choice, Matching, check_of

_STRING: Schema = {"type": "string"}
_STRINGS: Schema = {"type": "array", "items": _STRING}

_OF_KIND: Mapping[object, Schema] = {
    fields.Cores: {"type": "number"},
    fields.Base64: {"type": "string", "contentEncoding": "base64"},
    fields.Path: {"type": "string", "minLength": 1, "maxLength": fields.MAX_PATH_BYTES},
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
    fields.Places: {**_STRINGS, "maxItems": fields.MAX_PLACES},
    fields.NoHosts: {"type": "array", "maxItems": 0},
}
"""Kinds whose check is not one of the plain ones."""

_COMMON = ("schemas", "runschemas", "stats")
"""Modules whose classes have names that say enough."""

_OF_TYPE: Mapping[object, Schema] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: _STRING,
    bool: {"type": "boolean"},
    bytes: _STRING,
    object: {},
    type(None): {"type": "null"},
}


def schema_of(kind: object, components: dict[str, Schema]) -> Schema:
    """Return the schema of a field's type: a class, a NewType or a union of them. That of a class goes to `components`,
    under the class's name."""
    if get_origin(kind) in (Union, types.UnionType):
        members = [schema_of(member, components) for member in get_args(kind)]
        return {"anyOf": members}
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
    """Return the schema of what a type is in JSON, whatever is checked besides."""
    origin = get_origin(kind)
    if isinstance(kind, typing.NewType):
        return _plain(kind.__supertype__, components)
    if origin in (tuple, list):
        return {"type": "array", "items": schema_of(get_args(kind)[0], components)}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": schema_of(get_args(kind)[1], components)}
    return dict(_OF_TYPE.get(kind, {}))


def _reference(cls: type, components: dict[str, Schema]) -> Schema:
    name = _component(cls)
    if name not in components:
        components[name] = {}  # it may hold itself
        hints = get_type_hints(cls)
        properties = {_spelled(field.name): schema_of(hints[field.name], components) for field in attrs.fields(cls)}
        required = [_spelled(field.name) for field in attrs.fields(cls) if field.default is attrs.NOTHING]
        components[name] = {"type": "object", "properties": properties}
        if required:
            components[name]["required"] = required
    return ref(name)


def _component(cls: type) -> str:
    """Return a class's name as a component's; that of a class beside its handlers says where."""
    module = cls.__module__.rpartition(".")[2]
    return cls.__name__ if module in _COMMON else f"{module.title()}{cls.__name__}"


def _spelled(name: str) -> str:
    """Return a field's name in JSON: `for_` is `for` there."""
    return name.removesuffix("_")


def _anchored(pattern: str) -> str:
    """Return a pattern that is matched from the start as one that is searched (ECMA-262 knows no `\\Z`)."""
    text = pattern.removeprefix("^").replace(r"\Z", "$")
    return f"^{text}" if text.endswith("$") else f"^(?:{text})"
