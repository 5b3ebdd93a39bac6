"""Opens the SQLite database: WAL, busy timeout, numbered migrations. Synchronous; knows nothing of trio or sessions.

Sources: sqlite.org/wal.html, sqlite.org/pragma.html#pragma_user_version. `synchronous=NORMAL` in WAL mode survives a
crash of the process at any instruction; a power cut may lose the last transactions but never corrupts, and what is
lost then is found again in the kernel, which is empty after a power cut.
"""

from __future__ import annotations

import re
import sqlite3
from importlib import resources
from pathlib import Path

_MIGRATION = re.compile(r"(\d{4})\.sql\Z")


class DatabaseTooNew(Exception):
    """The file was written by a newer version of this program."""


def open_database(path: Path) -> sqlite3.Connection:
    """Open (or make, mode 0600) the database and bring its schema up to date. The caller closes it.

    Raises:
        DatabaseTooNew: its schema is newer than the migrations at hand.
        sqlite3.Error: not a database, or not writable.
    """
    path.touch(mode=0o600, exist_ok=True)
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        database.row_factory = sqlite3.Row
        database.text_factory = _decode
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=NORMAL")
        database.execute("PRAGMA busy_timeout=5000")
        database.execute("PRAGMA foreign_keys=ON")
        _migrate(database)
    except BaseException:
        database.close()
        raise
    return database


def _decode(text: bytes) -> str:
    """One value that is no UTF-8 must not make a whole table unreadable; `checked.py` finds what this lets through."""
    return text.decode("utf-8", "surrogateescape")


def _migrate(database: sqlite3.Connection) -> None:
    """Apply every migration above `user_version`, each in its own transaction."""
    current: int = database.execute("PRAGMA user_version").fetchone()[0]
    migrations = _migrations()
    if current > max(migrations):
        raise DatabaseTooNew(f"schema {current} is newer than {max(migrations)}")
    for number in sorted(number for number in migrations if number > current):
        database.executescript(f"BEGIN;\n{migrations[number]}\nPRAGMA user_version={number};\nCOMMIT;")


def _migrations() -> dict[int, str]:
    folder = resources.files("sandkasten.store").joinpath("migrations")
    found = {}
    for entry in folder.iterdir():
        match = _MIGRATION.match(entry.name)
        if match:
            found[int(match[1])] = entry.read_text("utf-8")
    return found
