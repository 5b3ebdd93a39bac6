"""Fields of each type of event, and the bounding of their data. Pure.

`EVENT_FIELDS` is the one list of fields; docs/events.md is compared with it, and a field outside the list is not
written. Data goes to disk and to every reader of the journal, so it never holds a command, its output or an
environment. Texts may come from a sandbox (a process names itself), so their length and characters are arbitrary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import orjson

from sandkasten.model import EventType

MAX_DATA_BYTES = 3584
"""Bound of an event's data as ASCII JSON; with the rest of the event it stays under 4 KiB."""

TRACE_ID = "trace_id"
"""Field of any event that a request brought about: the trace the request belongs to."""

KEY_ID = "key_id"
"""Field of any event that a request brought about: the API key of that request, by its public id."""

TRUNCATED = "truncated"
"""Field that is true in data that was cut to fit."""

_END = frozenset({"exec_id", "exit_code", "signal", "cause", "duration_ms", "victim"})
_USAGE = frozenset({"cpu_ms", "peak_memory_bytes", "written_bytes"})
_OUTPUT = frozenset({"stdout_bytes", "stderr_bytes"})

EVENT_FIELDS: Mapping[EventType, frozenset[str]] = MappingProxyType(
    {
        EventType.SESSION_CREATED: frozenset({"image", "workspace_id", "acquire_source", "ttl_s", "expires_at"}),
        EventType.SESSION_PAUSED: frozenset(),
        EventType.SESSION_RESUMED: frozenset(),
        EventType.SESSION_EXPIRING: frozenset({"remaining_s", "end_reason"}),
        EventType.SESSION_EXPIRED: frozenset({"reason", "end_reason"}),
        EventType.SESSION_DESTROYED: frozenset({"reason", "end_reason"}),
        EventType.SESSION_CRASHED: frozenset({"reason", "end_reason"}),
        EventType.SESSION_LOST: frozenset({"reason", "end_reason"}),
        EventType.EXEC_STARTED: frozenset({"exec_id", "shell", "timeout_ms"}),
        EventType.EXEC_ENDED: _END | _USAGE | _OUTPUT | {"shell", "shell_restarted"},
        EventType.PROCESS_STARTED: frozenset({"exec_id", "pid", "keep_alive"}),
        EventType.PROCESS_EXITED: _END | _USAGE | _OUTPUT,
        EventType.TERMINAL_OPENED: frozenset({"exec_id", "shell", "cols", "rows"}),
        EventType.TERMINAL_CLOSED: _END,
        EventType.SHELL_OPENED: frozenset({"shell"}),
        EventType.SHELL_CLOSED: frozenset({"shell"}),
        EventType.PORT_OPENED: frozenset({"port", "address"}),
        EventType.PORT_CLOSED: frozenset({"port", "address"}),
        EventType.NETWORK_CHANGED: frozenset({"mode", "revision"}),
        EventType.EGRESS_ASK: frozenset({"host", "port", "exec_id", "remaining_s"}),
        EventType.EGRESS_DENIED: frozenset({"host", "port", "reason", "count"}),
        EventType.EGRESS_LIMITED: frozenset({"host", "port", "reason", "count"}),
        EventType.EGRESS_RESTARTED: frozenset({"count"}),
        EventType.PREVIEW_OPENED: frozenset({"port", "access", "expires_at", "host_port"}),
        EventType.PREVIEW_CLOSED: frozenset({"port", "reason"}),
        EventType.OOM: frozenset({"victim", "oom_kills"}),
        EventType.POOL_FAILING: frozenset({"image", "failures", "error"}),
        EventType.LEFTOVER_FOUND: frozenset({"kind", "name"}),
        EventType.LEFTOVER_REMOVED: frozenset({"kind", "name"}),
    }
)

COMMON_FIELDS = frozenset({TRACE_ID, KEY_ID, TRUNCATED})
"""Fields that any event may have."""

FIELD_TYPES: Mapping[str, type] = MappingProxyType(
    {
        **dict.fromkeys(
            ("access", "acquire_source", "address", "cause", "end_reason", "error", "exec_id", "expires_at"), str
        ),
        **dict.fromkeys(("host", "image", "kind", "mode", "name", "reason", "shell", "victim", "workspace_id"), str),
        **dict.fromkeys((TRACE_ID, KEY_ID), str),
        **dict.fromkeys(("cols", "cpu_ms", "duration_ms", "exit_code", "failures", "host_port", "oom_kills"), int),
        **dict.fromkeys(("peak_memory_bytes", "pid", "port", "remaining_s", "rows", "signal", "stderr_bytes"), int),
        **dict.fromkeys(("count", "revision", "stdout_bytes", "timeout_ms", "written_bytes"), int),
        **dict.fromkeys(("keep_alive", "shell_restarted", TRUNCATED), bool),
        "ttl_s": float,
    }
)
"""The type of each field, in JSON."""

_SURROGATE = re.compile("[\ud800-\udfff]")
_ASCII_GROWTH = 3
"""Growth of JSON when every character beyond ASCII is escaped: 2 bytes of UTF-8 to 6, 3 to 6, 4 to 12."""
_CUTS = ((1024, 64), (256, 32), (64, 16), (16, 8))
"""Longest text and longest list, try by try."""
_MAX_DEPTH = 4


def bounded_data(fields: Mapping[str, object]) -> dict[str, Any]:  # JSON values
    """Return an event's fields as plain JSON values of bounded size, without fields that are None.

    Never fails: texts are cut, values that are no JSON become text, and if nothing else helps the data is empty but for
    `truncated`.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        encoded = orjson.dumps(given)
        if len(encoded) * _ASCII_GROWTH <= MAX_DATA_BYTES:
            decoded: dict[str, Any] = orjson.loads(encoded)
            return decoded
    except TypeError:  # no JSON, or text with lone surrogates
        pass
    return _cut_to_fit(given)


def _cut_to_fit(given: Mapping[str, object]) -> dict[str, Any]:  # JSON values
    whole = {name: _plain(value, MAX_DATA_BYTES, MAX_DATA_BYTES) for name, value in given.items()}
    if _fits(whole):
        return whole
    for longest_text, longest_list in _CUTS:
        shorter = {name: _plain(value, longest_text, longest_list) for name, value in given.items()} | {TRUNCATED: True}
        if _fits(shorter):
            return shorter
    return {TRUNCATED: True}


def _fits(data: Mapping[str, Any]) -> bool:  # JSON values
    return len(json.dumps(data, separators=(",", ":"))) <= MAX_DATA_BYTES


def _plain(value: object, longest_text: int, longest_list: int, depth: int = 0) -> Any:  # a JSON value
    """Return a value as JSON knows it, with texts and lists cut."""
    match value:
        case None | bool():
            return value
        case int() if abs(value) < 2**63:
            return int(value)
        case float() if abs(value) < float("inf"):
            return float(value)
        case Mapping() if depth < _MAX_DEPTH:
            members = list(value.items())[:longest_list]
            return {
                _text(name, longest_text): _plain(member, longest_text, longest_list, depth + 1)
                for name, member in members
            }
        case list() | tuple() if depth < _MAX_DEPTH:
            return [_plain(member, longest_text, longest_list, depth + 1) for member in value[:longest_list]]
        case _:
            return _text(value, longest_text)


def _text(value: object, longest: int) -> str:
    return _SURROGATE.sub("\ufffd", str(value)[:longest])
