"""The grammar of fuzzed messages: bytes become a valid message, spoiled here and there. Owns no parser and no property.

Every decision is taken from the bytes given, so that the same bytes make the same message whoever chooses them:
hypothesis, which can shrink them, atheris, which mutates what reached new code, or a random generator.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from runner.wire.codec import TAG

T = TypeVar("T")

TEXTS = (
    *(
        "",
        "x",
        "default",
        "/",
        "/workspace/a",
        "../../etc/passwd",
        "0123456789abcdef",
        "host",
        "p-1",
        "bash",
        "node-0001",
    ),
    *(
        "a\0b",
        "\ud800",
        "\udcff",
        "\u2028",
        "\x1b[2J",
        "é" * 40,
        "x" * 9000,
        "%2e%2e%2f",
        "-1",
        "NaN",
        "auto",
        "1000:1000",
    ),
)
NUMBERS = (0, 1, -1, 2, 7, 9, 64, 80, 137, 1000, 4096, 65_536, 2**31 - 1, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**40)
SWAPS: tuple[Any, ...] = (None, True, False, 0, -1, 1.5, 1e308, "", "x", [], [[]], {}, {"a": {}}, *NUMBERS)
DEPTH = 3
_MAX_ITEMS = 3


class Choices:
    """Decisions read off `data`; when it is used up, every further one is the first alternative."""

    def __init__(self, data: bytes) -> None:
        self._data, self._position = data, 0

    def number(self, below: int) -> int:
        """Return one of 0 … below-1."""
        width = max(1, (below.bit_length() + 7) // 8)
        piece = self._data[self._position : self._position + width]
        self._position += width
        return int.from_bytes(piece, "big") % below

    def pick(self, options: Sequence[T]) -> T:
        return options[self.number(len(options))]

    def one_in(self, count: int) -> bool:
        """Return True about once in `count` times, and never without data."""
        return self.number(count) == count - 1

    def blob(self, most: int) -> bytes:
        size = self.number(most + 1)
        piece = self._data[self._position : self._position + size]
        self._position += size
        return piece

    @property
    def is_over(self) -> bool:
        return self._position >= len(self._data)


def value(choices: Choices, expected: Any, depth: int = DEPTH) -> Any:
    """Return the JSON form of some value of a type expression."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        return value(choices, choices.pick(arguments), depth)
    if origin is typing.Literal:
        return choices.pick(arguments)
    if origin is tuple:
        return [value(choices, arguments[0], depth - 1) for _ in range(choices.number(_MAX_ITEMS) if depth else 0)]
    if origin in (dict, Mapping):
        count = choices.number(_MAX_ITEMS) if depth else 0
        return {choices.pick(TEXTS): value(choices, arguments[1], depth - 1) for _ in range(count)}
    if dataclasses.is_dataclass(expected):
        return fields(choices, typing.cast(type, expected), depth - 1)
    return _plain(choices, expected)


def _plain(choices: Choices, expected: Any) -> str | int | float | bool | None:
    if expected is str:
        return choices.pick(TEXTS)
    if expected is bool:
        return bool(choices.number(2))
    if expected is int:
        return choices.pick(NUMBERS)
    assert expected in (float, types.NoneType), expected
    return choices.number(1000) / 7 if expected is float else None


def fields(choices: Choices, cls: type, depth: int = DEPTH) -> dict[str, Any]:
    """Return the JSON object of some instance of a dataclass."""
    hints = typing.get_type_hints(cls)
    return {field.name: value(choices, hints[field.name], depth) for field in dataclasses.fields(cls)}


def message(choices: Choices, classes: Sequence[type]) -> dict[str, Any]:
    """Return the JSON object of some message of a vocabulary's classes."""
    cls = choices.pick(classes)
    return {TAG: cls.__name__, **fields(choices, cls)}


def spoil(choices: Choices, body: Any) -> Any:
    """Return a JSON value that differs from `body` in one place, or not at all."""
    if isinstance(body, dict) and body and not choices.one_in(24):
        names = [name for name in sorted(body) if name != TAG or len(body) == 1 or choices.one_in(8)]
        name = choices.pick(names)
        match choices.number(5):
            case 0:
                return {key: each for key, each in body.items() if key != name}
            case 1:
                return body | {choices.pick(TEXTS): choices.pick(SWAPS)}
            case 2:
                return body | {name: choices.pick(SWAPS)}
            case 3:
                return body | {name: choices.pick(TEXTS)}
            case _:
                return body | {name: spoil(choices, body[name])}
    if isinstance(body, list) and body and not choices.one_in(4):
        index = choices.number(len(body))
        return [*body[:index], spoil(choices, body[index]), *body[index + 1 :], *body[: choices.number(2)]]
    return choices.pick(SWAPS)


def encode(choices: Choices, body: Any) -> bytes:
    """Return `body` as JSON, its bytes spoiled now and then."""
    text = json.dumps(body, ensure_ascii=bool(choices.number(4)), separators=(",", ":"))
    data = text.encode("utf-8", "surrogatepass")
    return damage(choices, data) if choices.one_in(8) else data


def damage(choices: Choices, data: bytes) -> bytes:
    """Return bytes that differ from `data` in one place: cut, doubled, replaced, put in, nested, or repeated."""
    at = choices.number(len(data) + 1)
    match choices.number(6):
        case 0:
            return data[:at]
        case 1:
            return data + data[at:]
        case 2:
            return data[:at] + choices.blob(8) + data[at + 1 :]
        case 3:
            return data[:at] + choices.blob(16) + data[at:]
        case 4:
            return b"[" * 5000 + data
        case _:
            return data[:at] + b"9" * 400 + data[at:]


def spoiled_json(choices: Choices, body: Any) -> bytes:
    """Return a JSON text made of a valid body: untouched, or spoiled up to three times."""
    for _ in range(choices.number(4)):
        body = spoil(choices, body)
    return encode(choices, body)


def cut(choices: Choices, data: bytes) -> list[bytes]:
    """Return `data` in pieces, as a socket may hand it over."""
    pieces = []
    while data and not choices.is_over:
        size = choices.pick((1, 2, 5, 7, 64, 1000, 70_000))
        pieces.append(data[:size])
        data = data[size:]
    return [*pieces, data] if data else pieces
