"""For whom the current task works and what it is about: what every log line and event of it can say.

Owns the two context variables; formats nothing. A task inherits them from the one that started it, and an actor takes
the origin over from each message, so that a request is known by its id wherever it is served.

Trace contexts: which distributed trace a request belongs to, read from `traceparent` and written back. Pure.

The daemon records no spans of its own: it takes part in a trace by naming it in its log lines, its events and its
answers, so that whoever does record finds them. What is malformed or absent is answered with a trace of our own, never
with an error (W3C Trace Context §2.2, §3.2, §4.3; `traceresponse` after Trace Context Level 2 §2.4).
"""

from __future__ import annotations

import re
import secrets
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
        """What names this place to others: the value of `traceresponse` here, of `traceparent` further down."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"


def begin(traceparent: str | None) -> Trace:
    """Return our place in the trace that a `traceparent` names, or in a new one when it is absent or malformed."""
    found = None if traceparent is None or len(traceparent) > _MAX_CHARS else _FIELDS.match(traceparent)
    fresh = secrets.token_hex(_TRACE_BYTES + _SPAN_BYTES)
    trace_id, span_id = fresh[: 2 * _TRACE_BYTES], fresh[2 * _TRACE_BYTES :]
    if found is None or not _is_valid(found):
        return Trace(trace_id, span_id)
    return Trace(found["trace"], span_id, int(found["flags"], 16) & _KNOWN_FLAGS, found["parent"])


def _is_valid(found: re.Match[str]) -> bool:
    """Whether it is no invalid version and no id is all zeros; what follows the flags is for versions after 00."""
    is_version = found["version"] != _FORBIDDEN_VERSION and (found["more"] is None or found["version"] != "00")
    return is_version and bool(found["trace"].strip("0")) and bool(found["parent"].strip("0"))


@attrs.frozen
class Origin:
    """The request behind some work, and who made it; all None for what the daemon does by itself.

    `key_id` names the API key and is not the key.
    """

    request_id: str | None = None
    trace: Trace | None = None
    key_id: str | None = None


NOBODY = Origin()

origin: ContextVar[Origin] = ContextVar("origin", default=NOBODY)
session_id: ContextVar[str | None] = ContextVar("session_id", default=None)


def set_key(key_id: str | None) -> None:
    """The request at hand was made with this key."""
    origin.set(attrs.evolve(origin.get(), key_id=key_id))
