"""The SQLite file: opening it, its schema, a snapshot of it, and what its errors mean. Synchronous.

WAL with `synchronous=NORMAL` survives a crash of the process at any instruction. A power cut may lose the last
transactions but never corrupts the file, and the sandboxes of lost records went with the power.

The schema grows by numbered migrations (`migrations/0001.sql`, ...), applied above the file's `user_version`. A
migration that was released is never edited: a change is a new number.

A snapshot is a copy that is brought to this version's schema, so that the original is only read. Beside a daemon
SQLite makes the copy; without one the files are copied, since even a reader of a WAL database writes beside it.

Sources: sqlite.org/wal.html, "Read-Only Databases"; sqlite.org/pragma.html#pragma_user_version; sqlite.org/backup.html;
sqlite.org/rescode.html; statvfs(3); FS_IOC_SETFLAGS(2const) FS_NOCOW_FL; walformat.html, "The WAL-Index".
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import sqlite3
import struct
import tempfile
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path

_GET_FLAGS, _SET_FLAGS, _NO_COPY_ON_WRITE = 0x80086601, 0x40086602, 0x00800000
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
    _keep_index_in_place(Path(f"{path}-shm"))
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        database.row_factory = sqlite3.Row
        database.text_factory = _decode
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=NORMAL")
        database.execute("PRAGMA busy_timeout=5000")
        database.execute("PRAGMA foreign_keys=ON")
        migrate(database, read_migrations())
    except BaseException:
        database.close()
        raise
    return database


def _keep_index_in_place(index: Path) -> None:
    """Make the index of the log, which SQLite maps into memory, a file that btrfs writes in place: it gives each page
    that is written a new place otherwise, and a full disk would end the daemon by SIGBUS (tried on Linux 6.18)."""
    try:
        fd = os.open(index, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return  # of a daemon that was killed; or a reader has it
    try:
        with contextlib.suppress(OSError):  # another file system, which has no such flag
            flags = struct.unpack("l", fcntl.ioctl(fd, _GET_FLAGS, bytes(struct.calcsize("l"))))[0]
            fcntl.ioctl(fd, _SET_FLAGS, struct.pack("l", flags | _NO_COPY_ON_WRITE))
    finally:
        os.close(fd)


def _decode(text: bytes) -> str:
    """Return text, whatever its bytes: one value that is no UTF-8 must not make a whole table unreadable. `rows.py`
    refuses the row."""
    return text.decode("utf-8", "surrogateescape")


def migrate(database: sqlite3.Connection, migrations: Mapping[int, str]) -> None:
    """Apply the migrations above the file's `user_version` in order, each in its own transaction.

    Raises:
        DatabaseTooNew: the file's version is above all of them.
    """
    current: int = database.execute("PRAGMA user_version").fetchone()[0]
    if current > max(migrations):
        raise DatabaseTooNew(f"schema {current} is newer than {max(migrations)}")
    for number in sorted(number for number in migrations if number > current):
        database.executescript(f"BEGIN;\n{migrations[number]}\nPRAGMA user_version={number};\nCOMMIT;")


def read_migrations() -> dict[int, str]:
    """Return the SQL of this version's migrations, by number."""
    folder = resources.files("sandkasten.store").joinpath("migrations")
    found = {}
    for entry in folder.iterdir():
        match = _MIGRATION.match(entry.name)
        if match:
            found[int(match[1])] = entry.read_text("utf-8")
    return found


def ping(database: sqlite3.Connection) -> None:
    """Read something; an answer means that the database can be read."""
    database.execute("SELECT 1 FROM node LIMIT 1").fetchone()


# Errors --------------------------------------------------------------------------------------------------------------

_PRIMARY = 0xFF
"""Bits of a result code that name its kind."""

_BROKEN = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM})
_BROKEN_UNLESS_FULL = frozenset({sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN})
"""Kinds that come of a failing disk, but also of one without room for the log or its index."""

_FULL_BYTES = 1024 * 1024


def is_broken(error: BaseException | None, path: Path) -> bool:
    """Whether the database at `path` is damaged, gone, or can't be written for another reason than a full disk."""
    if not isinstance(error, sqlite3.Error):
        return False
    code = _code_of(error)
    return code in _BROKEN or (code in _BROKEN_UNLESS_FULL and not _is_full(path.parent))


def lacks_room(error: BaseException) -> bool:
    """Whether a write failed for want of room."""
    return isinstance(error, sqlite3.Error) and _code_of(error) == sqlite3.SQLITE_FULL


def _code_of(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & _PRIMARY  # errors of the module itself have none


def _is_full(directory: Path) -> bool:
    space = os.statvfs(directory)
    return space.f_bavail * space.f_frsize < _FULL_BYTES


# Snapshots -----------------------------------------------------------------------------------------------------------

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
