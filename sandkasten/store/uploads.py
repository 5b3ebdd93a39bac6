"""SQL for uploads: files that come in several requests, by the place they go to. Synchronous, over an open connection.

A row is there before the part file and is deleted behind it, so each part file has a row. A damaged row is deleted when
it is read.
"""

from __future__ import annotations

import logging
import re
import sqlite3
from collections.abc import Mapping, Sequence
from datetime import datetime

import attrs

from sandkasten.model.workspace import MAX_UPLOADS, UPLOAD_S, Upload, UploadSpec
from sandkasten.store.rows import Column, DamagedRow, column, json_column, named, read_row, write_row

log = logging.getLogger(__name__)

UPLOAD_ID = re.compile(r"[0-9a-f]{32}\Z")

_COLUMNS: Mapping[str, Column] = {
    "id": column(str, named(UPLOAD_ID)),
    "begun_at": column(datetime),
    "spec": json_column(UploadSpec),
}


def begin_upload(database: sqlite3.Connection, place: str, upload: Upload) -> bool:
    """Insert a row; return whether there was room for one more at that place, beside those that are not too old."""
    query = "SELECT COUNT(*) FROM uploads WHERE place = ? AND begun_at >= ?"
    count: int = database.execute(query, (place, upload.begun_at.timestamp() - UPLOAD_S)).fetchone()[0]
    if count < MAX_UPLOADS:
        values = {**write_row(attrs.asdict(upload, recurse=False), _COLUMNS), "place": place}
        database.execute("INSERT INTO uploads VALUES (:id, :place, :begun_at, :spec)", values)
    return count < MAX_UPLOADS


def change_upload(database: sqlite3.Connection, upload: Upload) -> None:
    """Replace the spec of a row."""
    values = write_row(attrs.asdict(upload, recurse=False), _COLUMNS)
    database.execute("UPDATE uploads SET spec = :spec WHERE id = :id", values)


def get_upload(database: sqlite3.Connection, place: str, upload_id: str) -> Upload | None:
    """Return the recorded upload of that id at a place; None if there is none."""
    return next((found for _, found in _select(database, "WHERE place = ? AND id = ?", place, upload_id)), None)


def end_upload(database: sqlite3.Connection, upload_id: str) -> None:
    """Delete the row of an upload, if there is one."""
    database.execute("DELETE FROM uploads WHERE id = ?", (upload_id,))


def old_uploads(database: sqlite3.Connection, before: datetime) -> Sequence[tuple[str, Upload]]:
    """Return the uploads that began before a moment, each with its place."""
    return _select(database, "WHERE begun_at < ? ORDER BY begun_at", before.timestamp())


def _select(database: sqlite3.Connection, condition: str, *values: object) -> Sequence[tuple[str, Upload]]:
    found = []
    for row in database.execute(f"SELECT rowid, * FROM uploads {condition}", values).fetchall():
        try:
            found.append((row["place"], Upload(**read_row(row, _COLUMNS))))
        except DamagedRow as error:
            database.execute("DELETE FROM uploads WHERE rowid = ?", (row["rowid"],))
            log.error("damaged_upload_record", extra={"row": row["rowid"], "reason": str(error)})
    return found
