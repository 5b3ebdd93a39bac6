"""JSON bytes of values that may carry text from a sandbox, and request bodies read from JSON. No schema.

How many values a JSON text has, before it is parsed: a bound on what parsing costs, since nothing interrupts it.

16 MiB of text in one value are parsed in 30 ms, 16 MiB of empty arrays in more than a second. Counted are strings and
the signs that begin or part values (RFC 8259 §2); nothing is checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import orjson
import trio

from sandkasten.model.errors import InvalidRequest

_SURROGATE = re.compile("[\ud800-\udfff]")


def scrub(text: str) -> str:
    """Replace lone surrogates (bytes of a file name that are not UTF-8, PEP 383) by U+FFFD."""
    return _SURROGATE.sub("\ufffd", text)


def encode_json(value: object) -> bytes:
    """Return `value` as JSON; it never fails on text, whatever a sandbox put into it."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return orjson.dumps(_scrub_all(value))


def decode_object(body: bytes) -> dict[str, Any]:  # JSON values
    """Return the JSON object in a request body; no body at all is an empty one.

    Raises:
        InvalidRequest: it is not JSON, not UTF-8, or not an object.
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
"""No request that means something has a tenth of them."""

SLICE_BYTES = 64 * 1024
SLICES_AT_ONCE = 256
"""How many are looked at before other tasks get a turn; between strings they are short ones."""

_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)


async def check_value_count(body: bytes) -> None:
    """Refuse a JSON text with too many values.

    Raises:
        InvalidRequest: it has more than `MAX_VALUES`.
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
    """Return for each part of the text, within or between strings, how many values begin there and its size."""
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
    """Return where the string's quote is, or how far its text goes before `end`, which may cut an escape."""
    found = _IN_STRING.match(body, position, end)
    stop = position if found is None else found.end()
    return stop if stop > position or body.startswith(b'"', stop) else position + 1
