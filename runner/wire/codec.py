"""Strict JSON codec for the frozen dataclasses that cross a trust boundary.

Owns the one rule for turning a message into JSON and back: every field present in the JSON must be a field of the
class, every field without a default must be present, and every value must have exactly the annotated type (a bool is
not an int, an int is not a float). It rejects and never repairs. It does no I/O.

Both wire contracts (`runner.wire.protocol`, `nsinit.wire.protocol`) stand on it; it lives in the lowest trust domain so
that all may import it. Stdlib only: PID 1 of every sandbox carries this module in memory.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import operator
import sys
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

T = TypeVar("T")

_encode_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_decode_json = json.JSONDecoder().decode
_quote = json.encoder.encode_basestring_ascii

_PLAIN = frozenset({str, int, bool, float, types.NoneType})
"""Types whose JSON value is the value itself."""

TAG = "type"
"""The JSON key that names the message class."""


class ProtocolError(Exception):
    """The peer sent bytes that are no message of the contract. The connection is unusable afterwards."""


def _make_message(*, frozen: bool, slots: bool, kw_only: bool = False) -> Callable[[type[T]], type[T]]:
    """The decorator `dataclasses.dataclass` for the classes of messages: with the same result, at a third of the cost.

    The standard one compiles six functions for each class. There are 120 classes, and each start of nsinit, of the
    daemon, and of the programs that try the machine makes all of them: 40 ms of computing. Here only `__init__` is
    compiled; what the others need of a class is its `__dataclass_fields__`.
    """
    assert frozen
    assert slots

    def make(cls: type[T]) -> type[T]:
        made = dataclasses.dataclass(init=False, repr=False, eq=False, slots=True, kw_only=kw_only)(cls)
        for name, function in {"__init__": _init(made), **_SHARED}.items():
            setattr(made, name, function)
        return made

    return make


def _init(cls: type) -> Any:
    """Compile `__init__`; a default of its own, such as a dict, is made for each message."""
    names: dict[str, Any] = {"set_": object.__setattr__, "MISSING": dataclasses.MISSING}
    parameters, keywords, body = ["self"], ["*"], ["pass"]
    for field in dataclasses.fields(cls):
        name = value = field.name
        default = ""
        if field.default_factory is not dataclasses.MISSING:
            names[f"make_{name}"], default = field.default_factory, "=MISSING"
            value = f"make_{name}() if {name} is MISSING else {name}"
        elif field.default is not dataclasses.MISSING:
            names[f"default_{name}"], default = field.default, f"=default_{name}"
        (keywords if field.kw_only else parameters).append(name + default)
        body.append(f"set_(self, {name!r}, {value})")
    if len(keywords) > 1:
        parameters += keywords
    exec(f"def __init__({', '.join(parameters)}):\n {'; '.join(body)}", names)
    return names["__init__"]


def _values(message: Any) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}


def _repr(self: object) -> str:
    return f"{type(self).__qualname__}({', '.join(f'{name}={value!r}' for name, value in _values(self).items())})"


def _eq(self: object, other: object) -> Any:
    return _values(self) == _values(other) if type(other) is type(self) else NotImplemented


def _hash(self: object) -> int:
    return hash(tuple(_values(self).values()))


def _refuse_set(_self: object, name: str, _value: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_del(_self: object, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


_SHARED: Mapping[str, Any] = {
    "__repr__": _repr,
    "__eq__": _eq,
    "__hash__": _hash,
    "__setattr__": _refuse_set,
    "__delattr__": _refuse_del,
}

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    dataclass = _make_message


class Vocabulary:
    """The closed set of message classes one direction of a connection may carry.

    Built once, at import: type hints are resolved here so that decoding needs no look-up later (PID 1 decodes after
    `pivot_root`, when no import can work).
    """

    def __init__(self, *classes: type) -> None:
        self._classes = {cls.__name__: cls for cls in classes}
        for cls in classes:
            _fields(cls)

    @property
    def classes(self) -> tuple[type, ...]:
        """Message classes of the vocabulary."""
        return tuple(self._classes.values())

    def encode(self, message: object) -> bytes:
        """Return `message` as ASCII JSON without fields that have their default. Its class must belong to this
        vocabulary."""
        cls = type(message)
        if self._classes.get(cls.__name__) is not cls:
            raise ProtocolError(f"{cls.__name__} is not a message of this contract")
        parts = [f'{{"{TAG}":"{cls.__name__}"']
        defaults = _default_cache[cls]
        for name, value in zip(_field_cache[cls][0], field_values(message), strict=True):
            if name in defaults and (value is defaults[name] or value == {} == defaults[name]):
                continue
            kind = type(value)  # most are text and numbers, and an encoder made for each message costs more than they
            if kind is str:
                text = _quote(value)
            elif kind is int:
                text = repr(value)
            else:
                text = "true" if value is True else _encode_json(_unstructure(value))
            parts.append(f'"{name}":{text}')
        return (",".join(parts) + "}").encode("ascii")

    def decode(self, data: bytes) -> Any:  # the caller matches on the class
        """Return the message in `data`.

        Raises:
            ProtocolError: not JSON, not an object, an unknown tag, an unknown or missing field, or a wrong type.
        """
        try:
            body = _decode_json(str(data, "utf-8"))
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"not JSON: {type(error).__name__}") from None
        if not isinstance(body, dict):
            raise ProtocolError(f"expected an object, got {type(body).__name__}")
        tag = body.pop(TAG, None)
        cls = self._classes.get(tag) if isinstance(tag, str) else None
        if cls is None:
            raise ProtocolError(f"unknown message {str(tag)[:40]!r}")
        return _structure_dataclass(body, cls, cls.__name__)


def structure(value: object, expected: Any, *, where: str) -> Any:  # `expected` is a type expression
    """Check `value` (as `json.loads` made it) against a type expression and build dataclasses from objects.

    Raises:
        ProtocolError: names the first place (`where`) that does not fit.
    """
    if type(value) is expected:
        return value
    origin = typing.get_origin(expected)
    if origin in (typing.Union, types.UnionType):
        return _structure_union(value, typing.get_args(expected), where)
    if origin is typing.Literal:
        if any(value == choice and type(value) is type(choice) for choice in typing.get_args(expected)):
            return value
        raise ProtocolError(f"{where}: not one of {typing.get_args(expected)}")
    if origin is tuple:
        item = typing.get_args(expected)[0]
        if not isinstance(value, list):
            raise ProtocolError(f"{where}: expected a list, got {type(value).__name__}")
        return tuple(structure(each, item, where=f"{where}[{index}]") for index, each in enumerate(value))
    if origin in (dict, Mapping):
        item = typing.get_args(expected)[1]
        if not isinstance(value, dict):
            raise ProtocolError(f"{where}: expected an object, got {type(value).__name__}")
        return {key: structure(each, item, where=f"{where}.{key}") for key, each in value.items()}
    if dataclasses.is_dataclass(expected):
        return _structure_dataclass(value, typing.cast(type, expected), where)
    raise ProtocolError(f"{where}: expected {expected.__name__}, got {type(value).__name__}")


_field_cache: dict[type, tuple[dict[str, Any], frozenset[str]]] = {}
_default_cache: dict[type, dict[str, Any]] = {}
_plain_cache: dict[type, dict[str, frozenset[object]]] = {}
"""For each field the types whose values fit as they are."""

_getter_cache: dict[type, Callable[[Any], tuple[Any, ...]]] = {}


def _fields(cls: type) -> tuple[dict[str, Any], frozenset[str]]:
    """Return ({field: type expression}, required fields) of a dataclass, resolving nested ones too."""
    if cls not in _field_cache:
        hints = _hints(cls)
        required = frozenset(
            field.name
            for field in dataclasses.fields(cls)
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        _default_cache[cls] = {
            field.name: {} if field.default_factory is dict else field.default
            for field in dataclasses.fields(cls)
            if field.default is not dataclasses.MISSING or field.default_factory is dict
        }
        _plain_cache[cls] = {name: _plain_types(hint) for name, hint in hints.items()}
        _field_cache[cls] = ({field.name: hints[field.name] for field in dataclasses.fields(cls)}, required)
        _getter_cache[cls] = _getter(tuple(_field_cache[cls][0]))
        for hint in _field_cache[cls][0].values():
            for nested in (hint, *typing.get_args(hint)):
                if dataclasses.is_dataclass(nested):
                    _fields(typing.cast(type, nested))
    return _field_cache[cls]


def field_values(message: Any) -> tuple[Any, ...]:
    """Return the values of a message's fields, in their order. Its class must belong to a vocabulary."""
    return _getter_cache[type(message)](message)


def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda message: tuple(getattr(message, name) for name in names)


def _plain_types(hint: Any) -> frozenset[object]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return _PLAIN.intersection(typing.get_args(hint) if is_union else (hint,))


def _hints(cls: type) -> dict[str, Any]:
    """Return the type expressions of a dataclass, as `typing.get_type_hints` does, but each text of a module once."""
    found = {}
    for base in reversed(cls.__mro__):
        for name, text in inspect.get_annotations(base).items():
            if name in cls.__dataclass_fields__:  # type: ignore[attr-defined]
                found[name] = _type_in(base.__module__, text)
    return found


@cache
def _type_in(module: str, text: str) -> Any:
    return eval(text, vars(sys.modules[module]))


def _structure_dataclass(value: object, cls: type, where: str) -> Any:
    if not isinstance(value, dict):
        raise ProtocolError(f"{where}: expected an object, got {type(value).__name__}")
    hints, required = _fields(cls)
    if not (value.keys() <= hints.keys() and required <= value.keys()):
        unknown, missing = value.keys() - hints.keys(), required - value.keys()
        raise ProtocolError(f"{where}: unknown {sorted(unknown)[:5]}, missing {sorted(missing)[:5]}")
    plain = _plain_cache[cls]
    arguments = {
        name: each if type(each) in plain[name] else structure(each, hints[name], where=f"{where}.{name}")
        for name, each in value.items()
    }
    return cls(**arguments)


def _structure_union(value: object, choices: tuple[Any, ...], where: str) -> Any:
    if value is None:
        if type(None) in choices:
            return None
        raise ProtocolError(f"{where}: null")
    error = ProtocolError(f"{where}: no fitting type")
    for choice in choices:
        if choice is not type(None):
            try:
                return structure(value, choice, where=where)
            except ProtocolError as refused:
                error = refused
    raise error


def _unstructure(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: _unstructure(getattr(value, name)) for name in _fields(type(value))[0]}
    if isinstance(value, tuple | list):
        return [_unstructure(each) for each in value]
    if isinstance(value, dict):
        return {key: _unstructure(each) for key, each in value.items()}
    return value
