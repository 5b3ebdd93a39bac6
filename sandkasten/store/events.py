"""SQL for the journal of events: append, read from a cursor on, purge the oldest. Synchronous, over an open connection.

Cursors are made by `journal/ring.py`; here they are text whose order is that of the events. The *floor* is the newest
cursor behind which every event is kept; it only ever rises. A damaged row is deleted when it is read.
"""

from __future__ import annotations

import logging
import re
import sqlite3
from collections.abc import Sequence
from datetime import UTC, datetime

import attrs
import orjson

from sandkasten.model import SESSION_ID, Event, EventType
from sandkasten.store.rows import count_of

log = logging.getLogger(__name__)

_CURSOR = re.compile(r"[0-9a-f-]{1,25}\Z")
_EPOCH_KEY = "events_epoch"
_FLOOR_KEY = "events_floor"

_APPEND = "INSERT OR IGNORE INTO events (cursor, time_ms, type, session_id, data) VALUES (?, ?, ?, ?, ?)"
_RAISE_FLOOR = (
    "INSERT INTO node (key, value) VALUES (?, ?) "
    "ON CONFLICT (key) DO UPDATE SET value = excluded.value WHERE excluded.value > value"
)


@attrs.frozen
class JournalState:
    """The journal at a start: the epoch of new cursors, the floor (None: no event was ever written), the number of
    rows."""

    epoch: int
    floor: str | None
    rows: int


@attrs.frozen
class EventPage:
    """Events in order, and the floor at the time of reading."""

    events: Sequence[Event]
    floor: str


@attrs.frozen
class Purged:
    """The number of deleted rows, and the floor afterwards."""

    rows: int
    floor: str


def open_journal(database: sqlite3.Connection, *, now_ms: int) -> JournalState:
    """Take the next epoch, and forget a damaged floor. The epoch is above the clock and above the last epoch, so
    that none is used twice: neither after the file was lost, nor after the clock was set back."""
    epoch = max(count_of(_node_value(database, _EPOCH_KEY)) + 1, now_ms)
    database.execute("INSERT OR REPLACE INTO node (key, value) VALUES (?, ?)", (_EPOCH_KEY, str(epoch)))
    rows: int = database.execute("SELECT COUNT(*) FROM events").fetchone()[0]
    floor = _node_value(database, _FLOOR_KEY)
    if floor is not None and not _CURSOR.match(floor):
        database.execute("DELETE FROM node WHERE key = ?", (_FLOOR_KEY,))
        floor = None
    return JournalState(epoch, floor, rows)


def append_events(database: sqlite3.Connection, events: Sequence[Event], *, floor: str | None) -> int:
    """Write events and, if given, a higher floor; return the number of new events. Events that are there already
    stay: a batch may be written again."""
    before = database.total_changes
    database.executemany(_APPEND, [_to_row(event) for event in events])
    added = database.total_changes - before
    if floor is not None:
        database.execute(_RAISE_FLOOR, (_FLOOR_KEY, floor))
    return added


def read_events(
    database: sqlite3.Connection, *, after: str, upto: str, session_id: str | None, limit: int
) -> EventPage:
    """Return the first `limit` events behind `after`, none behind `upto`, of one session or of all."""
    where, values = "cursor > ? AND cursor <= ?", [after, upto]
    if session_id is not None:
        where, values = f"session_id = ? AND {where}", [session_id, *values]
    query = f"SELECT * FROM events WHERE {where} ORDER BY cursor LIMIT ?"
    while True:  # each round removes a row at least
        rows = database.execute(query, (*values, limit)).fetchall()
        events = [_event_or_none(database, row) for row in rows]
        if None not in events:
            return EventPage([each for each in events if each], _node_value(database, _FLOOR_KEY) or "")


def last_events(database: sqlite3.Connection, *, session_id: str, limit: int) -> Sequence[Event]:
    """Return the newest sound events of a session, newest first."""
    rows = database.execute(
        "SELECT * FROM events WHERE session_id = ? ORDER BY cursor DESC LIMIT ?", (session_id, limit)
    ).fetchall()
    events = [_event_or_none(database, row) for row in rows]
    return [event for event in events if event is not None]


def purge_events(database: sqlite3.Connection, *, oldest: int) -> Purged:
    """Delete the `oldest` rows, and raise the floor to the last of them."""
    row = database.execute("SELECT cursor FROM events ORDER BY cursor LIMIT 1 OFFSET ?", (oldest - 1,)).fetchone()
    rows = 0
    if row is not None:
        rows = database.execute("DELETE FROM events WHERE cursor <= ?", (row["cursor"],)).rowcount
        database.execute(_RAISE_FLOOR, (_FLOOR_KEY, row["cursor"]))
    return Purged(rows, _node_value(database, _FLOOR_KEY) or "")


def _node_value(database: sqlite3.Connection, key: str) -> str | None:
    row = database.execute("SELECT value FROM node WHERE key = ?", (key,)).fetchone()
    return None if row is None else str(row["value"])


def _to_row(event: Event) -> tuple[str, int, str, str, str]:
    time_ms = round(event.time.timestamp() * 1000)
    return event.cursor, time_ms, event.type.value, event.session_id, orjson.dumps(event.data).decode()


def _event_or_none(database: sqlite3.Connection, row: sqlite3.Row) -> Event | None:
    """Return the event of a row; delete a damaged row and return None."""
    try:
        return _from_row(row)
    except (ValueError, OverflowError, OSError):
        database.execute("DELETE FROM events WHERE cursor = ?", (row["cursor"],))
        log.error("damaged_event")
        return None


def _from_row(row: sqlite3.Row) -> Event:
    """Return the event of a row. Raises `ValueError`, `OverflowError` or `OSError` if `_to_row` could not have made
    it."""
    data = orjson.loads(row["data"])
    if not _CURSOR.match(row["cursor"]) or not SESSION_ID.match(row["session_id"]) or not isinstance(data, dict):
        raise ValueError("no event")
    time = datetime.fromtimestamp(row["time_ms"] / 1000, UTC)
    return Event(row["cursor"], time, EventType(row["type"]), row["session_id"], data)
