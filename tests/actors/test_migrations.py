"""Migrations are numbered without a gap, and each is applied once, whole or not at all."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sandkasten.store.database import DatabaseTooNew, migrate, open_database, read_migrations

FIRST = "CREATE TABLE things (id TEXT PRIMARY KEY) STRICT;"
SECOND = "ALTER TABLE things ADD COLUMN size INTEGER NOT NULL DEFAULT 7;"
BROKEN = "INSERT INTO things (id) VALUES ('b'); INSERT INTO things (id) VALUES ('b');"


@pytest.fixture
def database() -> Iterator[sqlite3.Connection]:
    """A database as the first migration leaves it, with a row."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
        migrate(database, {1: FIRST})
        database.execute("INSERT INTO things VALUES ('a')")
        yield database


def _version(database: sqlite3.Connection) -> int:
    return int(database.execute("PRAGMA user_version").fetchone()[0])


def test_numbers_have_no_gap() -> None:
    """A migration is appended, never removed or renumbered."""
    assert sorted(read_migrations()) == list(range(1, len(read_migrations()) + 1))


def test_a_newer_version_keeps_the_rows(database: sqlite3.Connection) -> None:
    """Only what is new is applied, and opening the file again changes nothing."""
    for _ in range(2):
        migrate(database, {1: FIRST, 2: SECOND})
        assert database.execute("SELECT * FROM things").fetchall() == [("a", 7)]
        assert _version(database) == 2


def test_a_migration_that_fails_leaves_the_version_before(database: sqlite3.Connection) -> None:
    """Nothing of it stays, what was applied before it does."""
    with pytest.raises(sqlite3.IntegrityError):
        migrate(database, {1: FIRST, 2: SECOND, 3: BROKEN})
    database.execute("ROLLBACK")  # closing the file does the same
    assert _version(database) == 2
    assert database.execute("SELECT * FROM things").fetchall() == [("a", 7)]


def test_an_older_version_refuses_the_file(database: sqlite3.Connection) -> None:
    """An older version does not know the tables of a newer one."""
    migrate(database, {1: FIRST, 2: SECOND})
    with pytest.raises(DatabaseTooNew):
        migrate(database, {1: FIRST})


def test_readers_and_the_writer_of_a_database_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """A database has a write-ahead log, whichever program made the file."""
    path = tmp_path / "db"
    with closing(open_database(path)) as database:
        assert database.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        database.execute("BEGIN IMMEDIATE")
        with closing(sqlite3.connect(path, timeout=0)) as reader:
            assert reader.execute("SELECT count(*) FROM sessions").fetchone() == (0,)
        database.execute("ROLLBACK")
