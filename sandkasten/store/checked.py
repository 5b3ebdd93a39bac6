"""Judges a stored row before anything is made of it, and sets a damaged one aside. Synchronous; makes no record.

A row is believed only when each field could have been written by this program: right type, in range, a name where a
name belongs. A pid of a row is compared with what the kernel shows and never acted on (`reconcile.py`), and paths are
built from ids, so that the check of ids is what keeps a damaged file from naming other directories. Whatever runs under
the id of a damaged row is then nobody's and swept as such; workspaces are kept.
"""

from __future__ import annotations

import json
import logging
import re
import sqlite3
import time
from collections.abc import Callable, Mapping

import attrs

from sandkasten.model import IMAGE_NAME, SESSION_ID, WORKSPACE_ID, EndReason, Limits, Pause, SessionOptions, Status
from sandkasten.model.keys import MAKER_ID
from sandkasten.model.lifecycle import Event

log = logging.getLogger(__name__)

KEPT_ROWS = 256
"""So many damaged rows are kept, the newest."""
_MAX_CONTENT = 16 * 1024
_MAX_TEXT = 64 * 1024
_MAX_OPTIONS = 4 * 1024 * 1024
"""More than two lists of 64 paths, each as long as a path may be and escaped."""
_MAX_MOMENT_S = 253_402_300_799.0
"""The last second of the year 9999, where `datetime` ends."""
_MAX_SPAN_S = 10 * 366 * 86_400.0
_MAX_COUNT = 2**63 - 1
_MAX_PID = 2**22
_BOOT_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z")


_TABLE = """
CREATE TABLE IF NOT EXISTS damaged (
    number   INTEGER PRIMARY KEY,
    found_at REAL NOT NULL,      -- seconds since the epoch, UTC
    reason   TEXT NOT NULL,
    content  TEXT NOT NULL       -- the row, as text
) STRICT
"""
"""Made when it is first needed: most databases never have one."""


class DamagedRow(ValueError):
    """A row that this program did not write; the message names the field, never its content."""


def check_session(row: sqlite3.Row) -> None:
    """Raise `DamagedRow` unless every field of a row of `sessions` is one that could have been written."""
    for name, check in _CHECKS.items():
        if not check(row[name]):
            raise DamagedRow(f"{name} is none")
    for names in _TOGETHER:
        if len({row[name] is None for name in names}) != 1:
            raise DamagedRow(f"{', '.join(names)} don't go together")


def set_aside(database: sqlite3.Connection, row: sqlite3.Row, error: Exception) -> None:
    """Move a row of `sessions` (selected with its `rowid`) to `damaged`, in the caller's transaction."""
    content = json.dumps({name: row[name] for name in row.keys()}, default=repr)  # noqa: SIM118 - a Row is no mapping
    database.execute(_TABLE)
    database.execute(
        "INSERT INTO damaged (found_at, reason, content) VALUES (?, ?, ?)",
        (time.time(), str(error), content[:_MAX_CONTENT]),
    )
    database.execute("DELETE FROM sessions WHERE rowid = ?", (row["rowid"],))
    database.execute("DELETE FROM damaged WHERE number <= (SELECT MAX(number) FROM damaged) - ?", (KEPT_ROWS,))
    log.error("damaged_record", extra={"row": row["rowid"], "reason": str(error)})


def count_of(text: str | None, *, limit: int = 2**47) -> int:
    """Return a stored counter; 0 when there is none or it is damaged."""
    if text is None or re.fullmatch(r"[0-9]{1,15}", text) is None:
        return 0
    return number if (number := int(text)) < limit else 0


def _or_none(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or check(value)


def _text(value: object) -> bool:
    """Text that is UTF-8 and not absurdly long."""
    return isinstance(value, str) and len(value) <= _MAX_TEXT and not re.search("[\ud800-\udfff]", value)


def _name(pattern: re.Pattern[str]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and pattern.match(value) is not None


def _one_of(values: type[Status] | type[Event] | type[EndReason]) -> Callable[[object], bool]:
    known = {str(value) for value in values}
    return lambda value: isinstance(value, str) and value in known


def _number(low: float, high: float) -> Callable[[object], bool]:
    """A number in range, which NaN is not."""
    return lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def _count(high: int = _MAX_COUNT) -> Callable[[object], bool]:
    return lambda value: isinstance(value, int) and 0 <= value <= high


def _limits(value: object) -> bool:
    limits = _object(value)
    if limits is None or not limits.keys() <= _LIMITS.keys():
        return False
    return all(_LIMITS[name](value) for name, value in limits.items())


def _options(value: object) -> bool:
    options = _object(value)
    return options is not None and options.keys() <= _OPTIONS and len(str(value)) <= _MAX_OPTIONS


def _pause(value: object) -> bool:
    pause = _object(value)
    if pause is None or pause.keys() != _PAUSE or not _MOMENT(pause["since"]):
        return False
    return all(isinstance(pause[name], bool) for name in _PAUSE - {"since"})


def _labels(value: object) -> bool:
    labels = _object(value)
    return labels is not None and all(isinstance(each, str) for each in labels.values())


def _object(value: object) -> Mapping[str, object] | None:
    """Return a JSON object, None for anything else."""
    try:
        found = json.loads(value) if isinstance(value, str) else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


_AMOUNT = _number(0, _MAX_COUNT)
_LIMITS = {each.name: _or_none(_AMOUNT) if each.default is None else _AMOUNT for each in attrs.fields(Limits)}
_OPTIONS = {field.name for field in attrs.fields(SessionOptions)}
_PAUSE = {field.name for field in attrs.fields(Pause)}
_MOMENT, _SPAN = _number(0, _MAX_MOMENT_S), _number(0, _MAX_SPAN_S)

_CHECKS: Mapping[str, Callable[[object], bool]] = {
    "id": _name(SESSION_ID),
    "status": _one_of(Status),
    "image": _name(IMAGE_NAME),
    "cwd": _text,
    "workspace_id": _or_none(_name(WORKSPACE_ID)),
    "created_at": _MOMENT,
    "expires_at": _or_none(_MOMENT),
    "last_activity": _MOMENT,
    "ended_at": _or_none(_MOMENT),
    "ttl_s": _or_none(_SPAN),
    "max_lifetime_s": _or_none(_SPAN),
    "limits": _limits,
    "labels": _labels,
    "options": _options,
    "pause": _or_none(_pause),
    "acquire_source": _text,
    "reason": _or_none(_text),
    "ending": _or_none(_one_of(Event)),
    "end_reason": _or_none(_one_of(EndReason)),
    "epoch": _count(),
    "incarnation": _count(),
    "pid": _or_none(_count(_MAX_PID)),
    "start_ticks": _or_none(_count()),
    "pid_ns": _or_none(_count()),
    "boot_id": _or_none(_name(_BOOT_ID)),
    "is_busy": _count(1),
    "idempotency_key": _or_none(_text),
    "spec_digest": _text,
    "key_id": _or_none(_name(MAKER_ID)),
    "clock_s": _or_none(_number(0, _MAX_COUNT)),
    "idle_s": _or_none(_number(0, _MAX_COUNT)),
    "age_s": _or_none(_number(0, _MAX_COUNT)),
}
_TOGETHER = (("pid", "start_ticks", "pid_ns"), ("clock_s", "idle_s", "age_s"))
