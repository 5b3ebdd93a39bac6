"""Whether an error says that the database is of no use any more, or only that something can't be written now.

Sources: sqlite.org/rescode.html; statvfs(3).
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

_PRIMARY = 0xFF
"""The bits of a result code that say what kind it is."""

_BROKEN = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM})
_BROKEN_UNLESS_FULL = frozenset({sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN})
"""What a disk without room for the log or its index leads to, as well as one that fails."""

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
