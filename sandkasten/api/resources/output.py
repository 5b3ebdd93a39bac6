"""A run's output by offset: JSON with text or base64, or plain bytes. Never waits for more.

Text is what the bytes say in UTF-8, nothing removed, and offsets count bytes: a character whose end is still missing
is left for the next call.
"""

from __future__ import annotations

import base64
import codecs
from typing import Any

import trio

from sandkasten.api.http.errors import Headers, json_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.resources.fields import query_choice, query_integer
from sandkasten.model import OutputSlice, Stream

DEFAULT_BYTES = 1024 * 1024
MAX_BYTES = 4 * DEFAULT_BYTES
MAX_OFFSET = 2**53
SLICE_BYTES = 64 * 1024
"""How much is decoded before other tasks get a turn."""

_CHARACTER_BYTES = 4
_OCTETS = "application/octet-stream"


async def answer_output(exchange: Exchange, exec_id: str) -> None:
    """Answer with the part of a run's output that the query asks for."""
    wanted = query_choice(exchange, "stream", *Stream)
    encoding = query_choice(exchange, "encoding", "utf-8", "base64") or "utf-8"
    offset = query_integer(exchange, "offset", default=0, low=0, high=MAX_OFFSET)
    limit = query_integer(exchange, "limit", default=DEFAULT_BYTES, high=MAX_BYTES)
    is_plain = _accepts_octets(exchange)
    found = await exchange.supervisor.read_output(
        exchange.session_id,
        exec_id,
        stream=None if wanted is None else Stream(wanted),
        offset=offset,
        limit=limit if is_plain or encoding == "base64" else max(limit, _CHARACTER_BYTES),
    )
    if is_plain:
        await _answer_octets(exchange, found)
    elif encoding == "base64":
        content = base64.b64encode(found.data).decode("ascii")
        await exchange.answer(json_answer({"content_base64": content} | _offsets(found, found.next_offset)))
    else:
        text, held_bytes = await _decode(found)
        await exchange.answer(json_answer({"text": text} | _offsets(found, found.next_offset - held_bytes)))


def _offsets(found: OutputSlice, next_offset: int) -> dict[str, Any]:  # JSON values
    return {
        "offset": found.offset,
        "next_offset": next_offset,
        "first_offset": found.first_offset,
        "total_bytes": found.total_bytes,
        "is_final": found.is_final,
    }


async def _decode(found: OutputSlice) -> tuple[str, int]:
    """Return the text, and how many bytes at the end belong to a character that is not complete yet."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    parts = []
    for start in range(0, len(found.data), SLICE_BYTES):
        parts.append(decoder.decode(found.data[start : start + SLICE_BYTES]))
        await trio.lowlevel.checkpoint()
    held_bytes = 0 if found.is_final else len(decoder.getstate()[0])
    parts.append(decoder.decode(b"", found.is_final))
    return "".join(parts), held_bytes


async def _answer_octets(exchange: Exchange, found: OutputSlice) -> None:
    offsets = _offsets(found, found.next_offset).items()
    headers: Headers = tuple((f"x-{name.replace('_', '-')}", str(value).lower()) for name, value in offsets)
    await exchange.start(200, (("content-type", _OCTETS), ("content-length", str(len(found.data))), *headers))
    await exchange.finish(found.data)


def _accepts_octets(exchange: Exchange) -> bool:
    """Whether the client asks for plain bytes by name (RFC 9110 §12.5.1)."""
    ranges = (exchange.header(b"accept") or "").lower().split(",")
    return _OCTETS in (media_range.partition(";")[0].strip() for media_range in ranges)
