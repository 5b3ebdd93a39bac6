"""Reads the database without touching it, whether a daemon works with it or none does, by a copy.

What is copied is brought to this version's schema, the original is not. Beside a daemon SQLite makes the copy; without
one the files are copied, since even a reader of a database in WAL mode writes beside it.
Sources: sqlite.org/backup.html; sqlite.org/wal.html, "Read-Only Databases".
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sandkasten.store.database import open_database

_BUSY_S = 5.0


@contextlib.contextmanager
def open_snapshot(path: Path, *, is_in_use: bool) -> Iterator[sqlite3.Connection | None]:
    """Yield a connection to a copy of the database, None if there is no database. Blocking.

    Raises:
        sqlite3.Error, DatabaseTooNew, OSError: it can't be read.
    """
    if not path.exists():
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="sandkasten-") as directory:
        copy = Path(directory) / "copy.db"
        if is_in_use:
            _back_up(path, copy)
        else:
            _copy_files(path, copy)
        with contextlib.closing(open_database(copy)) as database:
            yield database


def _back_up(path: Path, copy: Path) -> None:
    source = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=_BUSY_S)
    with contextlib.closing(source), contextlib.closing(sqlite3.connect(copy)) as target:
        source.backup(target)


def _copy_files(path: Path, copy: Path) -> None:
    shutil.copyfile(path, copy)
    if os.path.exists(f"{path}-wal"):
        shutil.copyfile(f"{path}-wal", f"{copy}-wal")
