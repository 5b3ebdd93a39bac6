"""A database of an older version is brought up to date without losing a session, and says why the ended ones ended."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from importlib import resources
from pathlib import Path

import pytest

from sandkasten.model import FOREVER_S, EndReason, Session
from sandkasten.model.lifecycle import ENDED
from sandkasten.store.database import open_database
from sandkasten.store.sessions import find_by_key, get_session, live_sessions

BEFORE = 5
"""The version before leases could be without end."""

ENDS: dict[str, tuple[str, str | None, str | None, float | None, EndReason | None]] = {
    "a": ("running", None, None, None, None),
    "b": ("destroyed", "destroy", "destroyed by request", None, EndReason.USER),
    "c": ("expired", "expire", "its time to live ran out", None, EndReason.IDLE),
    "d": ("expired", "expire", "its time to live ran out", 1800.0, EndReason.MAX_LIFETIME),
    "e": ("expired", "expire", "its time to live ran out", 9000.0, EndReason.IDLE),
    "f": ("crashed", "died", "its init process ended", None, EndReason.CRASHED),
    "1": ("crashed", "died", "out of memory: its init process ended", None, EndReason.OOM),
    "2": ("crashed", "build_failed", "mount failed", None, EndReason.ERROR),
    "3": ("lost", "not_found", "its processes were gone", None, EndReason.CRASHED),
    "4": ("destroying", "expire", "its time to live ran out", None, EndReason.IDLE),
    "5": ("destroying", "died", "its init process ended", None, EndReason.CRASHED),
}
"""By letter of the id: status, ending, reason, maximum lifetime, and why it ended as the new version says it."""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A database of that version with a session of every kind, all made at 1000 and to expire at 2800."""
    path = tmp_path / "old.db"
    folder = resources.files("sandkasten.store").joinpath("migrations")
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        for number in range(1, BEFORE + 1):
            database.executescript(folder.joinpath(f"{number:04d}.sql").read_text("utf-8"))
        database.execute(f"PRAGMA user_version={BEFORE}")
        for letter, (status, ending, reason, lifetime_s, _) in ENDS.items():
            database.execute(
                "INSERT INTO sessions VALUES"
                " (?, ?, 'python', '/workspace', 'ws', 1000, 2800, 1000, ?, 1800, ?, '{}', '{\"a\": \"b\"}', 'cold',"
                " ?, ?, 3, 1, 7, 8, 9, ?, 'digest', '{}', NULL, NULL)",
                (letter * 24, status, None if ending is None else 2800.0, lifetime_s, reason, ending, f"key {letter}"),
            )
    return path


def _read(path: Path) -> dict[str, Session]:
    with closing(open_database(path)) as database:
        records = {letter: get_session(database, letter * 24) for letter in ENDS}
        assert all(find_by_key(database, f"key {letter}") == record for letter, record in records.items())
        assert {each.session.id[0] for each in live_sessions(database)} == {"a", "4", "5"}
    return {letter: record.session for letter, record in records.items() if record is not None}


def test_old_sessions_are_all_there_and_say_why_they_ended(old: Path) -> None:
    """None is lost, the live ones and the keys are found, and opening it again changes nothing."""
    sessions = _read(old)
    assert {letter: session.end_reason for letter, session in sessions.items()} == {
        letter: ends[-1] for letter, ends in ENDS.items()
    }
    assert all((session.status in ENDED) <= (session.end_reason is not None) for session in sessions.values())
    assert {session.max_lifetime_s for session in sessions.values()} == {FOREVER_S, 1800.0, 9000.0}
    assert all(session.labels == {"a": "b"} and session.epoch == 3 for session in sessions.values())
    assert _read(old) == sessions


def test_readers_and_the_writer_of_a_database_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """It keeps a write-ahead log, whoever made it."""
    path = tmp_path / "db"
    with closing(open_database(path)) as database:
        assert database.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        database.execute("BEGIN IMMEDIATE")
        with closing(sqlite3.connect(path, timeout=0)) as reader:
            assert reader.execute("SELECT count(*) FROM sessions").fetchone() == (0,)
        database.execute("ROLLBACK")
