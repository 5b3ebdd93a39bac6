"""Server-sent events, spelled for the parsers that are out there. Sans-I/O: values in, whole events out.

One value returned is one event and is written at once: a published parser forgets the event's name between two reads.
`data` is one line of ASCII, since another splits lines at U+0085, U+2028, VT and FF. An `id` says that all output up
to that sequence number has been sent; none comes twice. A chunk event has at most 4 KiB.

Source: HTML Living Standard §9.2.6 (interpreting an event stream).
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator, Mapping

from sandkasten.api.errors import Headers
from sandkasten.model import Stream

SSE_HEADERS: Headers = (
    ("content-type", "text/event-stream"),
    ("cache-control", "no-cache"),
    ("x-accel-buffering", "no"),
)

MAX_EVENT_BYTES = 4096
_MAX_LITERAL = MAX_EVENT_BYTES - 256  # the rest of a chunk event: names, timestamp, id
_BASE64_BYTES = _MAX_LITERAL // 4 * 3 - 3

PING = b": ping\n\n"


def event(name: str, data: Mapping[str, object]) -> bytes:
    """Return one event."""
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode("ascii")


def text_events(stream: Stream, text: str, sequence: int | None) -> Iterator[bytes]:
    """Return `text` as chunk events; the last of them carries `sequence`, if there is one."""
    return _chunk_events(stream, list(_literals(text)), sequence)


def base64_events(stream: Stream, data: bytes, sequence: int | None) -> Iterator[bytes]:
    """Return `data` as chunk events, each one decodable alone."""
    starts = range(0, len(data), _BASE64_BYTES)
    literals = [f'"{base64.b64encode(data[start : start + _BASE64_BYTES]).decode("ascii")}"' for start in starts]
    return _chunk_events(stream, literals, sequence)


def _chunk_events(stream: Stream, literals: list[str], sequence: int | None) -> Iterator[bytes]:
    now_ms = int(time.time() * 1000)
    for index, literal in enumerate(literals, start=1):
        number = f"id: {sequence}\n" if sequence is not None and index == len(literals) else ""
        data = f'{{"chunk":{literal},"timestamp":{now_ms},"stream":"{stream.value}"}}'
        yield f"event: chunk\n{number}data: {data}\n\n".encode("ascii")


def _literals(text: str, size: int = _MAX_LITERAL) -> Iterator[str]:
    """Return `text` as JSON strings of bounded length that split no character."""
    for start in range(0, len(text), size):
        literal = json.dumps(text[start : start + size])
        if len(literal) <= _MAX_LITERAL:
            yield literal
        else:
            yield from _literals(text[start : start + size], size // 2)
