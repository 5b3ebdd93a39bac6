"""JSON bytes of values that may carry text from a sandbox, and request bodies read from JSON. No schema."""

from __future__ import annotations

import re
from typing import Any

import orjson

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
