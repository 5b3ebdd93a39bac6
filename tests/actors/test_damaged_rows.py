"""A database that somebody else wrote to: a damaged row is set aside, never acted on, and costs no other row."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from sandkasten.actors.core import Ref
from sandkasten.actors.services.store import Store, do
from sandkasten.host.paths import read_boot_id
from sandkasten.model import FOREVER_S, EndReason, Limits, Pause, SessionOptions, Status
from sandkasten.model.lifecycle import Trigger
from sandkasten.model.listing import LabelSelector, SessionQuery
from sandkasten.model.network import Network, NetworkLimits
from sandkasten.store.database import open_database
from sandkasten.store.events import append_events, open_journal, read_events
from sandkasten.store.rows import KEPT_ROWS
from sandkasten.store.sessions import (
    _COLUMNS,
    KernelIdentity,
    SessionRecord,
    find_by_key,
    find_sessions,
    get_session,
    live_sessions,
    put_session,
)
from tests.strategies import make_record

OPTIONAL_LIMITS = [each.name for each in attrs.fields(Limits) if each.default is None]
IDENTITY = KernelIdentity(1, 2, 3, read_boot_id())
DAMAGED, WITNESS = "a" * 24, "b" * 24

DAMAGE: dict[str, tuple[str, object]] = {
    "an id that climbs": ("id", "../../../etc"),
    "an absolute id": ("id", "/etc/passwd"),
    "an empty id": ("id", ""),
    "an id with a line end": ("id", "a" * 24 + "\n"),
    "an id in capitals": ("id", "A" * 24),
    "an image that climbs": ("image", "../../etc"),
    "a workspace that climbs": ("workspace_id", "../.."),
    "an absolute workspace": ("workspace_id", "/"),
    "a negative pid": ("pid", -1),
    "pid 2**63-1": ("pid", 2**63 - 1),
    "a pid without start time": ("start_ticks", None),
    "a negative start time": ("start_ticks", -5),
    "a namespace below zero": ("pid_ns", -1),
    "an end of nothing": ("ending", "explode"),
    "a directory that is no text": ("cwd", b"\xff\xfe"),
    "a moment beyond all time": ("expires_at", 1e300),
    "an infinite moment": ("created_at", float("inf")),
    "a moment before time": ("last_activity", -1.0),
    "an endless lease": ("ttl_s", float("inf")),
    "a negative lease": ("ttl_s", -1.0),
    "an endless life": ("max_lifetime_s", 1e308),
    "limits that are none": ("limits", "no json"),
    "limits of a list": ("limits", "[]"),
    "unknown limits": ("limits", '{"root": 1}'),
    "NaN for memory": ("limits", '{"memory_mb": NaN}'),
    "negative memory": ("limits", '{"memory_mb": -1}'),
    "huge memory": ("limits", '{"memory_mb": 1' + "0" * 400 + "}"),
    "true for pids": ("limits", '{"pids": true}'),
    "deep limits": ("limits", "[" * 100_000),
    "options that are none": ("options", "[1]"),
    "unknown options": ("options", '{"uid": 0}'),
    "a pause without its time": ("pause", '{"auto_resume": true, "stop_lease": false}'),
    "a pause at no time": ("pause", '{"since": NaN, "auto_resume": true, "stop_lease": false}'),
    "labels of numbers": ("labels", '{"a": 1}'),
    "labels of a string": ("labels", '"a"'),
    "a negative epoch": ("epoch", -1),
    "a negative incarnation": ("incarnation", -(2**63)),
    "a network of no mode": ("network", '{"mode": "wide"}'),
    "a network of numbers": ("network", '{"mode": "allow", "allow": [1]}'),
    "a network of a string": ("network", '"open"'),
    "a bound below zero": ("network", '{"mode": "allow", "limits": {"bytes_up": -1}}'),
    "a negative revision": ("network_revision", -1),
    "an end for no reason": ("end_reason", "boredom"),
    "a busyness of two": ("is_busy", 2),
    "a clock without an age": ("clock_s", 1.0),
    "an age before birth": ("age_s", -1.0),
    "a reason of a megabyte": ("reason", "x" * 2**20),
}


@pytest.fixture
async def store(tmp_path: Path, nursery: trio.Nursery) -> Ref:
    ref: Ref = await nursery.start(Store(Ref("store"), tmp_path / "test.db").run)
    for name in (DAMAGED, WITNESS):
        await ref.ask(do(put_session, make_record(name, identity=IDENTITY, idempotency_key=name)))
    return ref


def _damage(path: Path, sql: str, *values: object) -> None:
    """Write to the file behind the store's back, as text whatever the bytes."""
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        assert database.execute(sql, values).rowcount >= 1


def _set_aside(path: Path) -> list[tuple[str, str]]:
    with closing(sqlite3.connect(path)) as database:
        return list(database.execute("SELECT reason, content FROM damaged"))


FULL = attrs.evolve(
    make_record(DAMAGED, idempotency_key="key", max_lifetime_s=1.5, identity=IDENTITY),
    is_busy=True,
    ending=Trigger.EXPIRE,
    ended_at=datetime.fromtimestamp(2e9, UTC),
)


def _with(**fields: Any) -> SessionRecord:
    return attrs.evolve(FULL, session=attrs.evolve(FULL.session, **fields))


@pytest.mark.parametrize(
    "record",
    [
        make_record(DAMAGED),
        FULL,
        _with(limits=Limits(cpu=0.01, disk_inodes=1, **dict.fromkeys(OPTIONAL_LIMITS, 1))),
        _with(pause=Pause(FULL.session.created_at, auto_resume=False, stop_lease=True)),
        _with(ttl_s=FOREVER_S, max_lifetime_s=FOREVER_S, expires_at=None),
        *(_with(end_reason=each) for each in EndReason),
        _with(network=Network("allow", ["@a", "b:1"], ["c"], NetworkLimits(1, 2, 3), "denied"), network_revision=9),
        _with(labels={"a": "é"}, reason="r" * 1000, workspace_id="w-1", cwd="/\udcff\n", epoch=7),
        _with(status=Status.PAUSED, options=SessionOptions(exec_mode="stateless", user="root", seccomp="debug")),
    ],
)
async def test_what_this_program_wrote_is_believed(store: Ref, tmp_path: Path, record: SessionRecord) -> None:
    """Optional fields may be absent or full. A sandbox whose row is not believed would be ended."""
    await store.ask(do(put_session, record))
    found = await store.ask(do(get_session, DAMAGED))
    assert found is not None
    assert attrs.evolve(found.session, cwd="") == attrs.evolve(record.session, cwd="")
    assert _judged(tmp_path / "test.db") == set(_COLUMNS)


def _judged(path: Path) -> set[str]:
    """Return the names of the columns: each has to have a check."""
    with closing(sqlite3.connect(path)) as database:
        return {name for _, name, *_ in database.execute("PRAGMA table_info(sessions)")}


@pytest.mark.parametrize("name", DAMAGE)
async def test_a_damaged_row_is_set_aside_and_the_others_are_read(store: Ref, tmp_path: Path, name: str) -> None:
    """The first query that meets the row removes it for every later one; the row and the reason are kept for people."""
    column, value = DAMAGE[name]
    _damage(
        tmp_path / "test.db", f"UPDATE sessions SET {column} = CAST(? AS {_type(value)}) WHERE id = ?", value, DAMAGED
    )
    assert [each.session.id for each in await store.ask(do(live_sessions))] == [WITNESS]
    assert await _listed(store) == [WITNESS]
    assert await store.ask(do(get_session, DAMAGED)) is None
    assert await store.ask(do(find_by_key, DAMAGED)) is None
    assert await store.ask(do(find_by_key, WITNESS)) is not None
    ((reason, content),) = _set_aside(tmp_path / "test.db")
    assert column in reason or "don't go together" in reason
    assert len(content) <= 16 * 1024


@pytest.mark.parametrize("labels", ["no json", "[" * 100_000, '{"a": 1}', "[1]", '"a"'])
async def test_labels_that_are_none_spoil_no_search(store: Ref, tmp_path: Path, labels: str) -> None:
    """The others are found by theirs, and the damaged row is set aside."""
    await store.ask(do(put_session, make_record(WITNESS, labels={"a": "b"})))
    _damage(tmp_path / "test.db", "UPDATE sessions SET labels = ? WHERE id = ?", labels, DAMAGED)
    for label in (LabelSelector("a", "b"), LabelSelector("a")):
        assert await _listed(store, label) == [WITNESS]
    await store.ask(do(get_session, DAMAGED))
    assert len(_set_aside(tmp_path / "test.db")) == 1


async def _listed(store: Ref, *labels: LabelSelector) -> list[str]:
    found = await store.ask(do(find_sessions, SessionQuery(frozenset(Status), labels)))
    return [each.session.id for each in found.records]


async def test_an_unknown_state_is_no_session(store: Ref, tmp_path: Path) -> None:
    """A session of an unknown state is in no list, is not found by id or key, and can be made anew."""
    _damage(tmp_path / "test.db", "UPDATE sessions SET status = 'root' WHERE id = ?", DAMAGED)
    assert [each.session.id for each in await store.ask(do(live_sessions))] == [WITNESS]
    assert await store.ask(do(get_session, DAMAGED)) is None
    await store.ask(do(put_session, make_record(DAMAGED)))
    assert await store.ask(do(get_session, DAMAGED)) is not None
    assert len(_set_aside(tmp_path / "test.db")) == 1


async def test_what_is_set_aside_is_bounded(store: Ref, tmp_path: Path) -> None:
    """The newest are kept."""
    with closing(open_database(tmp_path / "test.db")) as database:
        columns = [row["name"] for row in database.execute("PRAGMA table_info(sessions)")]
        others = ", ".join(name for name in columns if name not in ("id", "idempotency_key"))
        for number in range(KEPT_ROWS + 5):
            copy = f"SELECT ?, ?, {others} FROM sessions WHERE id = ?"
            database.execute(
                f"INSERT INTO sessions (id, idempotency_key, {others}) {copy}", (f"../{number}", f"k{number}", WITNESS)
            )
    assert len(await store.ask(do(live_sessions))) == 2
    assert len(_set_aside(tmp_path / "test.db")) == KEPT_ROWS


async def test_a_damaged_event_costs_no_other_event(store: Ref, tmp_path: Path) -> None:
    """The damaged event is removed; a reader gets a full page of sound events."""
    state = await store.ask(do(open_journal, now_ms=1))
    await store.ask(do(append_events, [], floor=None))
    rows = [
        ("000000000001-000000000001", 1, "no.such.type", "{}"),
        ("000000000001-000000000002", 2**62, "session.destroyed", "{}"),
        ("000000000001-000000000003", 1, "session.destroyed", "no json"),
        ("000000000001-000000000004", 1, "session.destroyed", "[]"),
        ("000000000001-00000000000x", 1, "session.destroyed", "{}"),
        ("000000000001-000000000009", 1, "session.destroyed", "{}"),
    ]
    for cursor, time_ms, kind, data in rows:
        _damage(tmp_path / "test.db", "INSERT INTO events VALUES (?, ?, ?, ?, ?)", cursor, time_ms, kind, DAMAGED, data)
    page = await store.ask(do(read_events, after="", upto="f", session_id=None, limit=1))
    assert [event.cursor for event in page.events] == ["000000000001-000000000009"]
    assert state.rows == 0


@pytest.mark.parametrize("value", ["", "garbage", "-1", "9" * 40, "1e9", "\u0661"])
async def test_a_damaged_counter_is_begun_anew(store: Ref, tmp_path: Path, value: str) -> None:
    """The epoch of the journal follows the clock then, and stays within its twelve digits."""
    await store.ask(do(open_journal, now_ms=1))
    _damage(tmp_path / "test.db", "UPDATE node SET value = ? WHERE key = 'events_epoch'", value)
    assert (await store.ask(do(open_journal, now_ms=1_700_000_000_000))).epoch == 1_700_000_000_000


async def test_a_damaged_floor_is_forgotten(store: Ref, tmp_path: Path) -> None:
    """A damaged floor would hide every event there will ever be."""
    await store.ask(do(append_events, [], floor="000000000001-000000000001"))
    _damage(tmp_path / "test.db", "UPDATE node SET value = 'zzz' WHERE key = 'events_floor'")
    assert (await store.ask(do(open_journal, now_ms=1))).floor is None
    assert (await store.ask(do(read_events, after="", upto="f", session_id=None, limit=1))).floor == ""


def _type(value: object) -> str:
    match value:
        case None | int():
            return "INTEGER"
        case float():
            return "REAL"
        case _:
            return "TEXT"
