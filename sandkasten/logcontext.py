"""The origin of the current task's work: request, trace, key and session, named in its log lines and events.

Owns two context variables. A task inherits them from the task that started it, and an actor takes the origin over from
each message, so that a request is known by its id wherever it is served.

`Trace` is a request's place in a distributed trace, read from `traceparent` and written back. The daemon records no
spans of its own: it names the trace in log lines, events and answers. A malformed or absent header begins a new trace
and is never an error (W3C Trace Context §2.2, §3.2, §4.3; `traceresponse` after Trace Context Level 2 §2.4).
"""

from __future__ import annotations

import os
import re
from contextvars import ContextVar

import attrs

_FIELDS = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<parent>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?\Z",
    re.ASCII,
)
_FORBIDDEN_VERSION = "ff"
_KNOWN_FLAGS = 0b11
"""Sampled, and that the trace id is random; others are not passed on (§3.2.2.5)."""
_MAX_CHARS = 512
_TRACE_BYTES, _SPAN_BYTES = 16, 8


@attrs.frozen
class Trace:
    """One request's place in a trace: `span_id` is ours, `parent_id` the caller's, None if the trace begins here."""

    trace_id: str
    span_id: str
    flags: int = 0
    parent_id: str | None = None

    @property
    def header(self) -> str:
        """The header that names this place: the value of `traceresponse` here, of `traceparent` further down."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"


def begin(traceparent: str | None) -> Trace:
    """Return our place in the trace that a `traceparent` names, or in a new one when it is absent or malformed."""
    found = None if traceparent is None or len(traceparent) > _MAX_CHARS else _FIELDS.match(traceparent)
    fresh = os.urandom(_TRACE_BYTES + _SPAN_BYTES).hex()
    trace_id, span_id = fresh[: 2 * _TRACE_BYTES], fresh[2 * _TRACE_BYTES :]
    if found is None or not _is_valid(found):
        return Trace(trace_id, span_id)
    return Trace(found["trace"], span_id, int(found["flags"], 16) & _KNOWN_FLAGS, found["parent"])


def _is_valid(found: re.Match[str]) -> bool:
    """Whether the version is valid and no id is all zeros; fields after the flags are for versions after 00."""
    is_version = found["version"] != _FORBIDDEN_VERSION and (found["more"] is None or found["version"] != "00")
    return is_version and bool(found["trace"].strip("0")) and bool(found["parent"].strip("0"))


@attrs.frozen
class Origin:
    """The request behind some work, and the id of its API key; all None for work of the daemon's own."""

    request_id: str | None = None
    trace: Trace | None = None
    key_id: str | None = None


NOBODY = Origin()

origin: ContextVar[Origin] = ContextVar("origin", default=NOBODY)
session_id: ContextVar[str | None] = ContextVar("session_id", default=None)


def set_key(key_id: str | None) -> None:
    """Note the API key of the current request."""
    now = origin.get()
    origin.set(Origin(now.request_id, now.trace, key_id))
