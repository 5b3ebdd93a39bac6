"""SQL for lists of sessions: one page, from a bounded number of rows. Synchronous functions over an open connection.

Labels are JSON, so no index helps to find them: rows are looked at in the order of the list, and how many is bounded,
since all other work of the database waits meanwhile.
Sources: sqlite.org/rowvalue.html#scrolling_window_queries, sqlite.org/json1.html#jeach.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import attrs

from sandkasten.model import Status
from sandkasten.model.listing import LabelSelector, Place, SessionQuery, place_of
from sandkasten.store.sessions import SessionRecord, select_sessions

MAX_LOOKED_AT = 5000
"""Rows that are looked at for their labels in one go."""


@attrs.frozen
class Recorded:
    """What of the database belongs on a page, one more than is asked for if there is more. `seen_to`: behind this place
    nothing was looked at; None if all was."""

    records: Sequence[SessionRecord]
    seen_to: Place | None = None


def find_sessions(database: sqlite3.Connection, query: SessionQuery) -> Recorded:
    """Return what a query asks for, newest first."""
    where, values = _where(query)
    if not query.labels:
        return Recorded(_select(database, where, values, limit=query.limit + 1))
    edge = _select(database, where, values, limit=1, offset=MAX_LOOKED_AT - 1)
    seen_to = place_of(edge[0].session) if edge else None
    if seen_to is not None:
        where, values = f"{where} AND (created_at, id) >= (?, ?)", [*values, *_key(seen_to)]
    where = " AND ".join([where, *(_CASE.format(_has(label)) for label in query.labels)])
    values = [*values, *(value for label in query.labels for value in (label.name, label.value) if value is not None)]
    return Recorded(_select(database, where, values, limit=query.limit + 1), seen_to)


_CASE = "CASE WHEN json_valid(labels) THEN EXISTS (SELECT 1 FROM json_each(labels) WHERE {}) ELSE 1 END"
"""A damaged row is selected as well: it is found to be one when it is read, and must not spoil the others."""


def _has(label: LabelSelector) -> str:
    return "key = ?" if label.value is None else "key = ? AND value = ?"


def _where(query: SessionQuery) -> tuple[str, list[object]]:
    conditions, values = ["1"], list[object]()
    if query.statuses != frozenset(Status):
        conditions.append(f"status IN ({', '.join('?' * len(query.statuses))})")
        values += sorted(query.statuses)
    if query.after is not None:
        conditions.append("(created_at, id) < (?, ?)")
        values += _key(query.after)
    return " AND ".join(conditions), values


def _key(place: Place) -> tuple[float, str]:
    return place.created_at.timestamp(), place.id


def _select(
    database: sqlite3.Connection, where: str, values: Sequence[object], *, limit: int, offset: int = 0
) -> list[SessionRecord]:
    condition = f"WHERE {where} ORDER BY created_at DESC, id DESC LIMIT ? OFFSET ?"
    return select_sessions(database, condition, *values, limit, offset)
