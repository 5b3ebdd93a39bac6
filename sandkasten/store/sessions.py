"""SQL for sessions: the durable record of each one. Synchronous functions over an open connection.

A record holds what must survive the daemon; the kernel stays the truth about what runs (`reconcile.py`). It never
holds a session's environment or commands. A damaged row is set aside when it is first read, and then is no more.

SQL for lists of sessions: one page, from a bounded number of rows. Synchronous functions over an open connection.

Labels are JSON, so no index helps to find them: rows are looked at in the order of the list, and how many is bounded,
since all other work of the database waits meanwhile.
Sources: sqlite.org/rowvalue.html#scrolling_window_queries, sqlite.org/json1.html#jeach.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import attrs

from sandkasten.model import FOREVER_S, EndReason, Limits, Pause, Session, SessionOptions, Status
from sandkasten.model.lifecycle import LIVE, Event
from sandkasten.model.listing import LabelSelector, Place, SessionQuery, place_of
from sandkasten.store.checked import check_session, count_of, set_aside


@attrs.frozen
class KernelIdentity:
    """PID 1 of the session as the kernel knew it: pid, start time in clock ticks, inode of its pid namespace; all three
    mean something within one boot only. `boot_id` None: written by a version that did not know it."""

    pid: int
    start_ticks: int
    pid_ns: int
    boot_id: str | None = None


@attrs.frozen
class Clocked:
    """How long a session had been idle and there, in seconds, when the clock that nobody sets (`time.monotonic()`) was
    at `clock_s`; means something within one boot only."""

    clock_s: float
    idle_s: float
    age_s: float


@attrs.frozen
class SessionRecord:
    """A session and what only the daemon needs to know of it. `is_busy`: something held its idle end off when this
    was written; `clocked`: where its lease stood then, None if a version that did not know it has written this."""

    session: Session
    incarnation: int
    spec_digest: str
    idempotency_key: str | None = None
    identity: KernelIdentity | None = None
    is_busy: bool = False
    ending: Event | None = None
    ended_at: datetime | None = None
    clocked: Clocked | None = None


_COLUMNS = (
    *("id", "status", "image", "cwd", "workspace_id", "created_at", "expires_at", "last_activity", "ended_at"),
    *("ttl_s", "max_lifetime_s", "limits", "labels", "options", "pause", "acquire_source", "reason", "ending"),
    *("end_reason", "epoch", "incarnation", "pid", "start_ticks", "pid_ns", "boot_id", "is_busy", "idempotency_key"),
    *("spec_digest", "key_id", "clock_s", "idle_s", "age_s"),
)

_PUT = (
    f"INSERT INTO sessions ({', '.join(_COLUMNS)}) VALUES ({', '.join(':' + name for name in _COLUMNS)}) "
    f"ON CONFLICT (id) DO UPDATE SET {', '.join(f'{name}=excluded.{name}' for name in _COLUMNS[1:])}"
)

_LIVE_LIST = ", ".join(f"'{status}'" for status in sorted(LIVE))


def put_session(database: sqlite3.Connection, record: SessionRecord) -> None:
    """Insert or replace one record."""
    database.execute(_PUT, _to_row(record))


def get_session(database: sqlite3.Connection, session_id: str) -> SessionRecord | None:
    """Return the record of that id, live or ended."""
    return _first(select_sessions(database, "WHERE id = ?", session_id))


def find_by_key(database: sqlite3.Connection, idempotency_key: str) -> SessionRecord | None:
    """Return the record that was made with that idempotency key."""
    return _first(select_sessions(database, "WHERE idempotency_key = ?", idempotency_key))


def live_sessions(database: sqlite3.Connection) -> Sequence[SessionRecord]:
    """Return every record whose status says that something of it may exist."""
    return select_sessions(database, f"WHERE status IN ({_LIVE_LIST})")


def live_sessions_of(database: sqlite3.Connection, workspace_id: str) -> Sequence[SessionRecord]:
    """Return those of them that have a workspace."""
    return select_sessions(database, f"WHERE workspace_id = ? AND status IN ({_LIVE_LIST})", workspace_id)


def forget_ended(database: sqlite3.Connection, *, before: datetime, limit: int) -> int:
    """Delete the records of up to `limit` sessions that ended before that moment; return how many."""
    old = f"SELECT rowid FROM sessions WHERE ended_at < ? AND status NOT IN ({_LIVE_LIST}) ORDER BY ended_at LIMIT ?"
    query = f"DELETE FROM sessions WHERE rowid IN ({old})"
    return database.execute(query, (before.timestamp(), limit)).rowcount


def node_value(database: sqlite3.Connection, key: str, default: str) -> str:
    """Return the node's value for `key`, storing `default` when there is none."""
    database.execute("INSERT OR IGNORE INTO node (key, value) VALUES (?, ?)", (key, default))
    value: str = database.execute("SELECT value FROM node WHERE key = ?", (key,)).fetchone()[0]
    return value


def read_drained(database: sqlite3.Connection) -> bool:
    """Return whether the operator has the node take no new sessions."""
    return node_value(database, "drained", "0") == "1"


def write_drained(database: sqlite3.Connection, drained: bool) -> None:
    """Keep that over restarts."""
    sql = "INSERT INTO node (key, value) VALUES ('drained', ?) ON CONFLICT (key) DO UPDATE SET value=excluded.value"
    database.execute(sql, (str(int(drained)),))


def next_incarnation(database: sqlite3.Connection) -> int:
    """Count this start of the daemon and return the number."""
    number = count_of(node_value(database, "incarnation", "0")) + 1
    database.execute("UPDATE node SET value = ? WHERE key = 'incarnation'", (str(number),))
    return number


def select_sessions(database: sqlite3.Connection, condition: str, *values: object) -> list[SessionRecord]:
    """Return the records of the sound rows among those that a condition selects, and set the others aside."""
    records = []
    for row in database.execute(f"SELECT rowid, * FROM sessions {condition}", values).fetchall():
        try:
            check_session(row)
            records.append(_from_row(row))
        except (ValueError, TypeError, OverflowError) as error:
            set_aside(database, row, error)
    return records


def _first(records: Sequence[SessionRecord]) -> SessionRecord | None:
    return records[0] if records else None


def _to_row(record: SessionRecord) -> dict[str, object]:
    session, identity, clocked = record.session, record.identity, record.clocked
    return {
        "id": session.id,
        "status": session.status,
        "image": session.image,
        # A directory name may hold any bytes; SQLite text may not.
        "cwd": session.cwd.encode("utf-8", "surrogateescape").decode("utf-8", "replace"),
        "workspace_id": session.workspace_id,
        "created_at": session.created_at.timestamp(),
        "expires_at": session.expires_at.timestamp() if session.expires_at else None,
        "last_activity": session.last_activity.timestamp(),
        "ended_at": record.ended_at.timestamp() if record.ended_at else None,
        "ttl_s": _or_null(session.ttl_s),
        "max_lifetime_s": _or_null(session.max_lifetime_s),
        "limits": json.dumps(attrs.asdict(session.limits)),
        "labels": json.dumps(dict(session.labels)),
        "options": json.dumps(attrs.asdict(session.options)),
        "pause": None if session.pause is None else json.dumps(attrs.asdict(session.pause), default=datetime.timestamp),
        "acquire_source": session.acquire_source,
        "reason": session.reason,
        "ending": record.ending,
        "end_reason": session.end_reason,
        "epoch": session.epoch,
        "incarnation": record.incarnation,
        "pid": identity.pid if identity else None,
        "start_ticks": identity.start_ticks if identity else None,
        "pid_ns": identity.pid_ns if identity else None,
        "boot_id": identity.boot_id if identity else None,
        "is_busy": int(record.is_busy),
        "idempotency_key": record.idempotency_key,
        "spec_digest": record.spec_digest,
        "key_id": session.key_id,
        "clock_s": clocked.clock_s if clocked else None,
        "idle_s": clocked.idle_s if clocked else None,
        "age_s": clocked.age_s if clocked else None,
    }


def _from_row(row: sqlite3.Row) -> SessionRecord:
    session = Session(
        id=row["id"],
        image=row["image"],
        status=Status(row["status"]),
        cwd=row["cwd"],
        created_at=_moment(row["created_at"]),
        expires_at=_moment(row["expires_at"]) if row["expires_at"] is not None else None,
        last_activity=_moment(row["last_activity"]),
        ttl_s=_or_forever(row["ttl_s"]),
        max_lifetime_s=_or_forever(row["max_lifetime_s"]),
        limits=Limits(**json.loads(row["limits"])),
        workspace_id=row["workspace_id"],
        labels=json.loads(row["labels"]),
        options=SessionOptions(**json.loads(row["options"])),
        pause=None if row["pause"] is None else _pause(json.loads(row["pause"])),
        acquire_source=row["acquire_source"],
        reason=row["reason"],
        end_reason=EndReason(row["end_reason"]) if row["end_reason"] else None,
        epoch=row["epoch"],
        key_id=row["key_id"],
    )
    identity = None
    if row["pid"] is not None:
        identity = KernelIdentity(row["pid"], row["start_ticks"], row["pid_ns"], row["boot_id"])
    return SessionRecord(
        session=session,
        incarnation=row["incarnation"],
        spec_digest=row["spec_digest"],
        idempotency_key=row["idempotency_key"],
        identity=identity,
        is_busy=bool(row["is_busy"]),
        ending=Event(row["ending"]) if row["ending"] else None,
        ended_at=_moment(row["ended_at"]) if row["ended_at"] is not None else None,
        clocked=None if row["clock_s"] is None else Clocked(row["clock_s"], row["idle_s"], row["age_s"]),
    )


def _pause(values: dict[str, Any]) -> Pause:  # JSON values
    return Pause(**{**values, "since": _moment(values["since"])})


def _or_null(span_s: float) -> float | None:
    return None if span_s == FOREVER_S else span_s


def _or_forever(span_s: float | None) -> float:
    return FOREVER_S if span_s is None else span_s


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


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
