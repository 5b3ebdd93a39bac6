"""SQL for sessions: their durable records, and pages of the list of sessions. Synchronous, over an open connection.

A record holds the state that must survive the daemon; whether a sandbox runs is for the kernel to say
(`actors/node/reconcile.py`). Environments and commands of sessions are never stored. A damaged row is set aside when it
is first read.

A page comes from a bounded number of rows: labels are JSON, so no index finds them, and all other work of the database
waits meanwhile.

Sources: sqlite.org/rowvalue.html#scrolling_window_queries, sqlite.org/json1.html#jeach.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime

import attrs

from sandkasten.model import (
    FOREVER_S,
    IMAGE_REFERENCE,
    SESSION_ID,
    WORKSPACE_ID,
    EndReason,
    Limits,
    Pause,
    Session,
    SessionOptions,
    Status,
)
from sandkasten.model.keys import MAKER_ID
from sandkasten.model.lifecycle import IN_KERNEL, Trigger
from sandkasten.model.listing import LabelSelector, Place, SessionQuery, place_of
from sandkasten.model.network import Network, Preview
from sandkasten.store.rows import (
    Column,
    DamagedRow,
    at_most,
    column,
    count_of,
    is_text,
    json_column,
    named,
    part,
    read_row,
    set_aside,
    write_row,
)

_MAX_SPAN_S = 10 * 366 * 86_400.0
_MAX_PID = 2**22
_BOOT_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z")


@attrs.frozen
class KernelIdentity:
    """PID 1 of a sandbox as the kernel knew it: pid, start time in clock ticks, inode of its pid namespace. They
    mean something only within the boot `boot_id`."""

    pid: int
    start_ticks: int
    pid_ns: int
    boot_id: str


@attrs.frozen
class Clocked:
    """The lease by CLOCK_MONOTONIC: at `clock_s` the session had been idle for `idle_s` and there for `age_s`, all
    in seconds. Valid within one boot."""

    clock_s: float
    idle_s: float
    age_s: float


@attrs.frozen
class SessionRecord:
    """A session, and the facts about it that only the daemon needs. `spec_digest`: of the request, where that had an
    idempotency key, and of its settings for a pool's member. `is_busy`: something held off the idle end when the record
    was written. `clocked`: its lease then; None before the lease began."""

    session: Session
    incarnation: int
    spec_digest: str
    idempotency_key: str | None = None
    identity: KernelIdentity | None = None
    is_busy: bool = False
    ending: Trigger | None = None
    ended_at: datetime | None = None
    clocked: Clocked | None = None


def _flag(value: object) -> bool:
    if type(value) is not int or value not in (0, 1):
        raise ValueError("no flag")
    return value == 1


def _span(value: float | None) -> float:
    return FOREVER_S if value is None else _FINITE_SPAN.read(value)


def _text_of(path: str) -> str:
    """Return a path as text: the name of a directory may hold any bytes, SQLite's text may not."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _network(value: object) -> Network:
    """Return the network of a row, none for a row of an earlier version."""
    return _NETWORK.read(value) or Network()


def _previews(value: object) -> Mapping[int, Preview]:
    """Return the previews of a row, none for a row of an earlier version."""
    found: Mapping[str, Preview] = {} if value is None else _PREVIEWS.read(value)
    return {each.port: each for each in found.values()}


_NETWORK = json_column(Network | None)
_PREVIEWS = json_column(Mapping[str, Preview])
_FINITE_SPAN = column(float, at_most(_MAX_SPAN_S))
_SPAN = Column(_span, lambda span_s: None if span_s == FOREVER_S else span_s)

_COLUMNS: Mapping[str, Column] = {
    "id": column(str, named(SESSION_ID)),
    "status": column(Status),
    "image": column(str, named(IMAGE_REFERENCE)),
    "cwd": Column(column(str, is_text).read, _text_of),
    "workspace_id": column(str | None, named(WORKSPACE_ID)),
    "created_at": column(datetime),
    "expires_at": column(datetime | None),
    "last_activity": column(datetime),
    "ended_at": column(datetime | None),
    "ttl_s": _SPAN,
    "max_lifetime_s": _SPAN,
    "limits": json_column(Limits),
    "labels": json_column(Mapping[str, str]),
    "options": json_column(SessionOptions),
    "pause": json_column(Pause | None),
    "acquire_source": column(str, is_text),
    "reason": column(str | None, is_text),
    "ending": column(Trigger | None),
    "end_reason": column(EndReason | None),
    "epoch": column(int),
    "incarnation": column(int),
    "pid": column(int | None, at_most(_MAX_PID)),
    "start_ticks": column(int | None),
    "pid_ns": column(int | None),
    "boot_id": column(str | None, named(_BOOT_ID)),
    "is_busy": Column(_flag, int),
    "idempotency_key": column(str | None, is_text),
    "spec_digest": column(str, is_text),
    "key_id": column(str | None, named(MAKER_ID)),
    "clock_s": column(float | None),
    "idle_s": column(float | None),
    "age_s": column(float | None),
    "network": Column(_network, _NETWORK.write),
    "network_revision": column(int),
    "previews": Column(_previews, lambda found: _PREVIEWS.write({str(port): each for port, each in found.items()})),
}
"""The columns of `sessions`, named as the fields of `Session`, `SessionRecord`, `KernelIdentity` and `Clocked`."""

_SESSION = [each.name for each in attrs.fields(Session) if each.name in _COLUMNS]
_RECORD = [each.name for each in attrs.fields(SessionRecord) if each.name in _COLUMNS]
_IDENTITY = [each.name for each in attrs.fields(KernelIdentity)]
_CLOCKED = [each.name for each in attrs.fields(Clocked)]

_PUT = (
    f"INSERT INTO sessions ({', '.join(_COLUMNS)}) VALUES ({', '.join(':' + name for name in _COLUMNS)}) "
    f"ON CONFLICT (id) DO UPDATE SET {', '.join(f'{name}=excluded.{name}' for name in _COLUMNS if name != 'id')}"
)

_LIVE_LIST = ", ".join(f"'{status}'" for status in sorted(IN_KERNEL))


def put_session(database: sqlite3.Connection, record: SessionRecord) -> None:
    """Insert or replace one record."""
    values = {
        name: getattr(each, name)
        for each in (record.session, record, record.identity, record.clocked)
        if each is not None
        for name in [field.name for field in attrs.fields(type(each))]
    }
    database.execute(_PUT, write_row(values, _COLUMNS))


def delete_session(database: sqlite3.Connection, session_id: str) -> None:
    """Delete the record of a member of a pool: no client was told of the session."""
    database.execute("DELETE FROM sessions WHERE id = ?", (session_id,))


def get_session(database: sqlite3.Connection, session_id: str) -> SessionRecord | None:
    """Return the record of that id, live or ended."""
    return _first(select_sessions(database, "WHERE id = ?", session_id))


def client_session(database: sqlite3.Connection, session_id: str) -> SessionRecord | None:
    """Return the record of that id, unless it is an unclaimed member of a pool: no client may find that."""
    record = get_session(database, session_id)
    return None if record is None or record.session.status is Status.POOL_IDLE else record


def find_by_key(database: sqlite3.Connection, idempotency_key: str) -> SessionRecord | None:
    """Return the record that was made with that idempotency key."""
    return _first(select_sessions(database, "WHERE idempotency_key = ?", idempotency_key))


def live_sessions(database: sqlite3.Connection, besides: Collection[str] = ()) -> Sequence[SessionRecord]:
    """Return every record whose status says that something of it may exist, but for the ids in `besides`."""
    others = "id NOT IN (SELECT value FROM json_each(?))"
    return select_sessions(database, f"WHERE status IN ({_LIVE_LIST}) AND {others}", json.dumps(list(besides)))


def live_sessions_of(database: sqlite3.Connection, workspace_id: str) -> Sequence[SessionRecord]:
    """Return the live ones of `live_sessions` that have a workspace."""
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
    """Return whether the operator has drained the node."""
    return node_value(database, "drained", "0") == "1"


def write_drained(database: sqlite3.Connection, drained: bool) -> None:
    """Note that the node is drained, or is not, over restarts."""
    sql = "INSERT INTO node (key, value) VALUES ('drained', ?) ON CONFLICT (key) DO UPDATE SET value=excluded.value"
    database.execute(sql, (str(int(drained)),))


def next_incarnation(database: sqlite3.Connection) -> int:
    """Count this start of the daemon and return the number."""
    number = count_of(node_value(database, "incarnation", "0")) + 1
    database.execute("UPDATE node SET value = ? WHERE key = 'incarnation'", (str(number),))
    return number


def select_sessions(database: sqlite3.Connection, condition: str, *values: object) -> list[SessionRecord]:
    """Return the records of the sound rows that a condition selects; set the damaged ones aside."""
    records = []
    for row in database.execute(f"SELECT rowid, * FROM sessions {condition}", values).fetchall():
        try:
            records.append(_from_row(row))
        except DamagedRow as error:
            set_aside(database, row, error)
    return records


def _first(records: Sequence[SessionRecord]) -> SessionRecord | None:
    return records[0] if records else None


def _from_row(row: sqlite3.Row) -> SessionRecord:
    """Return the record of a row. Raises `DamagedRow`."""
    values = read_row(row, _COLUMNS)
    return SessionRecord(
        session=Session(**{name: values[name] for name in _SESSION}),
        identity=part(KernelIdentity, {name: values[name] for name in _IDENTITY}),
        clocked=part(Clocked, {name: values[name] for name in _CLOCKED}),
        **{name: values[name] for name in _RECORD},
    )


# Pages of the list --------------------------------------------------------------------------------------------------

MAX_LOOKED_AT = 5000
"""Rows whose labels are examined for one page."""


@attrs.frozen
class Recorded:
    """Records for a page, one more than asked for if there are more. Rows behind `seen_to` were not examined; None
    if all were."""

    records: Sequence[SessionRecord]
    seen_to: Place | None = None


def find_sessions(database: sqlite3.Connection, query: SessionQuery) -> Recorded:
    """Return the records that a query asks for, newest first."""
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
"""Selects a damaged row as well: reading it sets it aside, and it must not spoil the query."""


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
