"""Rows and records: each column's type and bounds, read strictly by cattrs and written by it.

A row is believed only when each field could have been written by this program: right type, in range, a name where a
name belongs. Damage in the file must not become a path or a pid: paths are built from ids, so the check of ids keeps a
damaged file from naming other directories, and a pid is compared with what the kernel shows and never acted on
(`actors/node/reconcile.py`). A damaged row of `sessions` is moved to the table `damaged`, for people. Whatever still
runs under its id is then an unknown session and removed as such; workspaces stay.
"""

from __future__ import annotations

import enum
import json
import logging
import operator
import re
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import attrs
from cattrs import Converter

log = logging.getLogger(__name__)

KEPT_ROWS = 256
"""Damaged rows that are kept, the newest."""

_MAX_CONTENT = 16 * 1024
_MAX_TEXT = 64 * 1024
_MAX_JSON = 4 * 1024 * 1024
"""More than two lists of 64 paths, each as long as a path may be and escaped."""
_MAX_MOMENT_S = 253_402_300_799.0
"""The last second of the year 9999, where `datetime` ends."""
_MAX_NUMBER = 2**63 - 1

_TABLE = """
CREATE TABLE IF NOT EXISTS damaged (
    number   INTEGER PRIMARY KEY,
    found_at REAL NOT NULL,      -- seconds since the epoch, UTC
    reason   TEXT NOT NULL,
    content  TEXT NOT NULL       -- the row, as text
) STRICT
"""
"""Table of damaged rows, made when the first one is found: most databases never have one."""


class DamagedRow(ValueError):
    """A row that this program did not write; the message names the column, never its content."""


def _structure_number(value: object, kind: type) -> object:
    """Return an amount, never below zero. A bool is no number, an int does for a float, and NaN is not in range."""
    if type(value) not in (kind, int) or not 0 <= value <= _MAX_NUMBER:  # type: ignore[operator]
        raise ValueError("no such number")
    return value


def _structure_exactly(value: object, kind: type) -> object:
    if type(value) is not kind:
        raise TypeError(f"no {kind.__name__}")
    return value


def _structure_moment(value: object, _kind: type) -> datetime:
    if type(value) not in (int, float) or not 0 <= value <= _MAX_MOMENT_S:  # type: ignore[operator]
        raise ValueError("no moment")
    return datetime.fromtimestamp(value, UTC)  # type: ignore[arg-type]  # a number


def _structure_strings(value: object, _kind: type) -> Sequence[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise TypeError("no list of strings")
    return value


def _structure_labels(value: object, _kind: type) -> Mapping[str, str]:
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise TypeError("no mapping of strings")
    return value


# cattrs would convert: these hooks refuse instead.
_converter = Converter(detailed_validation=False, forbid_extra_keys=True)
_converter.register_structure_hook(int, _structure_number)
_converter.register_structure_hook(float, _structure_number)
_converter.register_structure_hook(str, _structure_exactly)
_converter.register_structure_hook(bool, _structure_exactly)
_converter.register_structure_hook(enum.StrEnum, lambda value, kind: kind(value))
_converter.register_structure_hook(datetime, _structure_moment)
_converter.register_structure_hook_func(partial(operator.eq, Sequence[str]), _structure_strings)
_converter.register_structure_hook_func(partial(operator.eq, Mapping[str, str]), _structure_labels)
_converter.register_unstructure_hook(datetime, datetime.timestamp)


@attrs.frozen
class Column:
    """One column: `read` makes a value of what SQLite gives, or raises; `write` is its inverse."""

    read: Callable[[Any], Any]
    write: Callable[[Any], Any]


def column(kind: Any, allows: Callable[[Any], bool] = lambda _: True) -> Column:  # a type expression
    """Return a column of `kind` whose values, unless null, fulfil `allows`."""

    structure, unstructure = _converter.get_structure_hook(kind), _converter.get_unstructure_hook(kind)

    def read(value: object) -> object:
        found = structure(value, kind)
        if found is not None and not allows(found):
            raise ValueError("out of bounds")
        return found

    return Column(read, unstructure)


def json_column(kind: Any) -> Column:  # a type expression
    """Return a column of JSON objects that is null for None."""

    structure, unstructure = _converter.get_structure_hook(kind), _converter.get_unstructure_hook(kind)

    def read(value: object) -> object:
        if value is not None:
            if not isinstance(value, str) or len(value) > _MAX_JSON:
                raise ValueError("no JSON")
            value = json.loads(value)
            if not isinstance(value, dict):
                raise TypeError("no object")
        return structure(value, kind)

    def write(value: object) -> str | None:
        return None if value is None else json.dumps(unstructure(value))

    return Column(read, write)


def named(pattern: re.Pattern[str]) -> Callable[[str], bool]:
    """Return the check that a string is a name."""
    return lambda value: pattern.match(value) is not None


def at_most(high: float) -> Callable[[float], bool]:
    """Return the check that a number is not larger."""
    return lambda value: value <= high


def is_text(value: str) -> bool:
    """Whether a string is UTF-8 and not absurdly long."""
    return len(value) <= _MAX_TEXT and not re.search("[\ud800-\udfff]", value)


def read_row(row: sqlite3.Row, columns: Mapping[str, Column]) -> dict[str, Any]:
    """Return the values of a row. Raises `DamagedRow`."""
    values = {}
    for name, each in columns.items():
        try:
            values[name] = each.read(row[name])
        except Exception as error:  # noqa: BLE001 - whatever a damaged file makes a parser raise
            raise DamagedRow(f"{name} is none ({type(error).__name__})") from None
    return values


def write_row(values: Mapping[str, object], columns: Mapping[str, Column]) -> dict[str, object]:
    """Return what is to be stored; null for what `values` lacks."""
    return {name: each.write(values.get(name)) for name, each in columns.items()}


def part(kind: Callable[..., Any], values: Mapping[str, Any]) -> Any:  # an instance of `kind`
    """Return the value that some columns make together, None if all are null. Raises `DamagedRow`."""
    nulls = [value is None for value in values.values()]
    if any(nulls) and not all(nulls):
        raise DamagedRow(f"{', '.join(values)} don't go together")
    return None if any(nulls) else kind(**values)


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
