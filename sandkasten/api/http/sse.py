"""Server-sent events, spelled for the published parsers. Sans-I/O: values in, whole events out.

Each value returned is one event and is written at once: one published parser forgets the event's name between two
reads. `data` is one line of ASCII, since another parser splits lines at U+0085, U+2028, VT and FF. A chunk event has at
most 4 KiB; its `id` is a `Position` of `run_output.py`.

Source: HTML Living Standard §9.2.6 (interpreting an event stream).
"""

from __future__ import annotations

import base64
import itertools
import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from sandkasten.api.http.errors import ErrorBody, Headers, error_body
from sandkasten.api.http.json import Body, encode_ascii, to_plain
from sandkasten.errors import SandkastenError
from sandkasten.model import Stream

SSE_HEADERS: Headers = (
    ("content-type", "text/event-stream"),
    ("cache-control", "no-cache"),
    ("x-accel-buffering", "no"),
)

MAX_EVENT_BYTES = 4096
_MAX_LITERAL = MAX_EVENT_BYTES - 320  # the rest of a chunk event: names, timestamp, id
_BASE64_BYTES = _MAX_LITERAL // 4 * 3 - 3

MAX_CWD_LITERAL = 2048
"""Room for a directory in the event of an end; the other fields of that event take less than 1500 bytes."""

MAX_DENIED_LITERAL = 512
"""Room for refusals of the way out in the event of an end."""

PING = b": ping\n\n"

_WAIT = re.compile(r"(?:^|[,;])[ \t]*wait[ \t]*=[ \t]*\"?([0-9]{1,3})\"?[ \t]*(?=[,;]|$)", re.IGNORECASE)


def preferred_wait(value: object) -> int | None:
    """Return the seconds for which the `Prefer` header of a client waits for an answer (RFC 7240 §4.3), None if it
    says nothing of it: other preferences are none of ours, and not refused (§2)."""
    found = _WAIT.search(str(value))
    return int(found[1]) if found else None


def event(name: str, data: Mapping[str, object]) -> bytes:
    """Return one event; text from a sandbox becomes ASCII that every parser takes."""
    return b"event: %b\ndata: %b\n\n" % (name.encode("ascii"), encode_ascii(data))


@attrs.frozen(kw_only=True)
class ErrorEvent(ErrorBody):
    """An error that ends the stream. `error` repeats the message for older clients."""

    error: str


def error_event(error: SandkastenError) -> bytes:
    """Return an error as the event that ends a stream."""
    body = error_body(error)
    return event("error", to_plain(ErrorEvent(**attrs.asdict(body, recurse=False), error=body.message)))


@attrs.frozen
class ChunkEvent(Body):
    """Output of a run, as text or base64; `timestamp` is in milliseconds since 1970, the event's id a place in the
    output."""

    chunk: str
    timestamp: int
    stream: Stream


def short_end(end: dict[str, Any]) -> dict[str, Any]:  # JSON values
    """Return the fields of a run's end as an event has them: the first refusals that fit, and a directory cut to fit;
    `cwd_truncated` says so."""
    if denied := end.get("egress_denied"):
        sizes = itertools.accumulate(len(json.dumps(each)) + 2 for each in denied)
        end = end | {"egress_denied": denied[: sum(size <= MAX_DENIED_LITERAL for size in sizes)]}
    cwd = str(end["cwd"])
    if len(json.dumps(cwd)) <= MAX_CWD_LITERAL:
        return end
    sizes = itertools.accumulate(len(json.dumps(character)) - 2 for character in cwd[:MAX_CWD_LITERAL])
    fitting = sum(size <= MAX_CWD_LITERAL - 2 for size in sizes)
    return end | {"cwd": cwd[:fitting], "cwd_truncated": True}


def chunk_event(stream: Stream, literal: str, position: str) -> bytes:
    """Return a `ChunkEvent`: `literal` is the chunk's JSON, `position` the id behind which a client can go on."""
    data = f'{{"chunk":{literal},"timestamp":{int(time.time() * 1000)},"stream":"{stream.value}"}}'
    return f"event: chunk\nid: {position}\ndata: {data}\n\n".encode("ascii")


def text_literals(text: str, size: int = _MAX_LITERAL) -> Iterator[tuple[str, int]]:
    """Yield `text` as JSON strings of bounded length that split no character, each with its number of characters."""
    for start in range(0, len(text), size):
        part = text[start : start + size]
        literal = json.dumps(part)
        if len(literal) <= _MAX_LITERAL:
            yield literal, len(part)
        else:
            yield from text_literals(part, size // 2)


def base64_literals(data: bytes) -> Iterator[tuple[str, int]]:
    """Yield `data` as JSON strings of bounded length, each decodable alone, each with its number of bytes."""
    for start in range(0, len(data), _BASE64_BYTES):
        part = data[start : start + _BASE64_BYTES]
        yield f'"{base64.b64encode(part).decode("ascii")}"', len(part)
