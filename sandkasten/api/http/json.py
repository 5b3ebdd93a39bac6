"""JSON on the wire: answers and messages made from attrs classes, bodies of requests read back.

`encode_json` spells every answer. Classes of answers derive from `Body`; classes of the model are spelled whole.
Text from a sandbox may hold lone surrogates, which JSON has no spelling for: each becomes U+FFFD.

`check_value_count` bounds what parsing costs, since nothing interrupts a parse: 16 MiB of text in one value take 30 ms,
16 MiB of empty arrays more than a second. Strings and the signs that begin or part values are counted (RFC 8259 §2);
nothing else is checked.
"""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, ClassVar, Self

import attrs
import cattrs
import orjson
import trio
from cattrs.gen import make_dict_unstructure_fn

from sandkasten.errors import InvalidRequest
from sandkasten.log import rfc3339

_SURROGATE = re.compile("[\ud800-\udfff]")


class Body:
    """Base of the attrs classes that answers are made of. A field with the default None is left out when it is None;
    a field without a default is always there, and may be null. `gives` names headers that come with the body."""

    __slots__ = ()
    gives: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def take(cls, source: object, /, **others: Any) -> Self:  # others: fields of the class
        """Return a body of `others`, and of the attributes of `source` that have the names of the other fields."""
        names, values = _taken(cls, frozenset(others))  # type: ignore[arg-type]  # a class is hashable
        return cls(**dict(zip(names, values(source), strict=True)), **others)


@functools.cache
def _taken(cls: type[Any], others: frozenset[str]) -> tuple[tuple[str, ...], Callable[[object], tuple[Any, ...]]]:
    """Return the names of the fields but `others`, and what gets the attributes of these names."""
    names = tuple(field.name for field in attrs.fields(cls) if field.name not in others)
    if len(names) > 1:
        return names, operator.attrgetter(*names)
    return names, lambda source: tuple(getattr(source, name) for name in names)


def is_optional(field: attrs.Attribute[Any]) -> bool:  # Any: of whatever type
    """Return whether a field of a `Body` may be left out."""
    return field.default is None


def to_plain(value: object) -> Any:  # JSON values
    """Return a value as dicts, lists, text and numbers: attrs objects by their fields, times as RFC 3339."""
    return _converter.unstructure(value)


def _object_hook(cls: type[Any]) -> Callable[[object], Mapping[str, object]]:
    spell: Callable[[object], dict[str, object]] = make_dict_unstructure_fn(
        cls, _converter, _cattrs_use_linecache=False
    )
    is_body = issubclass(cls, Body)
    optional = [field.name for field in attrs.fields(cls) if is_body and is_optional(field)]

    def spell_body(value: object) -> Mapping[str, object]:
        members = spell(value)
        for name in optional:  # cattrs can leave members out, too, but spells all optional ones last
            if members[name] is None:
                del members[name]
        return members

    return spell_body if optional else spell


_converter = cattrs.Converter()
_converter.register_unstructure_hook(datetime, rfc3339)
_converter.register_unstructure_hook_factory(attrs.has, _object_hook)


def scrub(text: str) -> str:
    """Return text with lone surrogates (bytes of a file name that are not UTF-8, PEP 383) replaced by U+FFFD."""
    return _SURROGATE.sub("\ufffd", text)


def encode_json(value: object) -> bytes:
    """Return `value` as JSON, whatever text a sandbox put into `value`."""
    try:
        return orjson.dumps(value, default=to_plain)
    except orjson.JSONEncodeError:
        return orjson.dumps(_scrub_all(to_plain(value)))


def encode_ascii(value: object) -> bytes:
    """Return the same as one line of ASCII: some readers end a line at U+0085, U+2028, VT or FF."""
    encoded = encode_json(value)
    return encoded if encoded.isascii() else json.dumps(orjson.loads(encoded), separators=(",", ":")).encode("ascii")


def decode_object(body: bytes) -> dict[str, Any]:  # JSON values
    """Return the JSON object in a request body; an empty body is an empty object.

    Raises:
        InvalidRequest: the body is not JSON, not UTF-8, or not an object.
    """
    if not body:
        return {}
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest("the request body is not valid JSON", body=str(error)) from None
    if not isinstance(value, dict):
        raise InvalidRequest("the request body is not a JSON object", body="must be an object")
    return value


def _scrub_all(value: object) -> object:
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, dict):
        return {scrub(str(key)): _scrub_all(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_scrub_all(member) for member in value]
    return value


MAX_VALUES = 128 * 1024
"""Values in one body; no sensible request has a tenth as many."""

SLICE_BYTES = 64 * 1024
SLICES_AT_ONCE = 256
"""Slices counted before other tasks get a turn; those between strings are short."""

_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)


async def check_value_count(body: bytes) -> None:
    """Refuse a JSON text with too many values.

    Raises:
        InvalidRequest: the text has more than `MAX_VALUES`.
    """
    if len(body) <= MAX_VALUES:
        return
    count = seen_bytes = 0
    for turn, (values, size) in enumerate(_slices(body)):
        count += values
        seen_bytes += size
        if count > MAX_VALUES:
            raise InvalidRequest(f"the request body has more than {MAX_VALUES} values", body="has too many values")
        if seen_bytes >= SLICE_BYTES or turn % SLICES_AT_ONCE == 0:
            seen_bytes = 0
            await trio.lowlevel.checkpoint()


def _slices(body: bytes) -> Iterator[tuple[int, int]]:
    """Yield for each part of the text, within or between strings, how many values begin in the part and its size."""
    position, is_string = 0, False
    while position < len(body):
        end = min(position + SLICE_BYTES, len(body))
        stop = _end_of_string(body, position, end) if is_string else body.find(b'"', position, end)
        values = 0
        if not is_string:
            stop = end if stop < 0 else stop
            values = sum(body.count(sign, position, stop) for sign in (b",", b"[", b"{"))
        if is_quote := body.startswith(b'"', stop):
            values += not is_string
            is_string = not is_string
        yield values, stop - position
        position = stop + is_quote


def _end_of_string(body: bytes, position: int, end: int) -> int:
    """Return the position of the string's closing quote, or how far its text goes before `end`, which may cut an
    escape."""
    found = _IN_STRING.match(body, position, end)
    stop = position if found is None else found.end()
    return stop if stop > position or body.startswith(b'"', stop) else position + 1
