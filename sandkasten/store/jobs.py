"""SQL for jobs on images. Synchronous, over an open connection.

A row is there before the job's first byte, so a job that a crash broke off is found and told as failed. A damaged row
is deleted when it is read.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Mapping, Sequence
from datetime import datetime

import attrs

from sandkasten.model.job import INTERRUPTED, JOB_ID, KEPT_JOBS, MAX_JOBS, ImageJob, JobError, JobKind, JobState
from sandkasten.store.rows import Column, DamagedRow, column, json_column, named, read_row, write_row

log = logging.getLogger(__name__)

_COLUMNS: Mapping[str, Column] = {
    "id": column(str, named(JOB_ID)),
    "kind": column(JobKind),
    "state": column(JobState),
    "reference": column(str),
    "name": column(str),
    "platform": column(str),
    "created_at": column(datetime),
    "ended_at": column(datetime | None),
    "digest": column(str | None),
    "error": json_column(JobError | None),
}
_NAMES = ", ".join(_COLUMNS)


@attrs.frozen
class BegunJob:
    """A job as it was begun with an idempotency key; `replaces` is a part of the request."""

    job: ImageJob
    replaces: bool


def begin_job(database: sqlite3.Connection, job: ImageJob, key: str | None, *, replaces: bool) -> BegunJob | bool:
    """Insert a job, unless its key has one: then return that. Otherwise return whether there was room for one more."""
    if key is not None:
        row = database.execute("SELECT rowid, * FROM image_jobs WHERE idempotency_key = ?", (key,)).fetchone()
        if row is not None and (found := _read(database, row)) is not None:
            return BegunJob(found, bool(row["replaces"]))
    count: int = database.execute("SELECT COUNT(*) FROM image_jobs WHERE ended_at IS NULL").fetchone()[0]
    if count >= MAX_JOBS:
        return False
    values = {**_values(job), "key": key, "replaces": replaces}
    places = ", ".join(f":{name}" for name in _COLUMNS)
    database.execute(
        f"INSERT INTO image_jobs ({_NAMES}, idempotency_key, replaces) VALUES ({places}, :key, :replaces)", values
    )
    database.execute(
        "DELETE FROM image_jobs WHERE ended_at IS NOT NULL AND id NOT IN "
        "(SELECT id FROM image_jobs WHERE ended_at IS NOT NULL ORDER BY created_at DESC LIMIT ?)",
        (KEPT_JOBS,),
    )
    return True


def change_job(database: sqlite3.Connection, job: ImageJob) -> None:
    """Write what changed of a job."""
    names = ("state", "ended_at", "digest", "error")
    changes = ", ".join(f"{name} = :{name}" for name in names)
    database.execute(f"UPDATE image_jobs SET {changes} WHERE id = :id", _values(job))


def get_job(database: sqlite3.Connection, job_id: str) -> ImageJob | None:
    """Return the recorded job of that id; None if there is none."""
    row = database.execute("SELECT rowid, * FROM image_jobs WHERE id = ?", (job_id,)).fetchone()
    return None if row is None else _read(database, row)


def list_jobs(database: sqlite3.Connection, limit: int) -> Sequence[ImageJob]:
    """Return jobs, newest first."""
    rows = database.execute("SELECT rowid, * FROM image_jobs ORDER BY created_at DESC, id LIMIT ?", (limit,)).fetchall()
    return [job for row in rows if (job := _read(database, row)) is not None]


def interrupt_jobs(database: sqlite3.Connection, moment: datetime) -> int:
    """Have every job that no end is known of have failed; return their number."""
    error = _COLUMNS["error"].write(INTERRUPTED)
    values = (JobState.FAILED, moment.timestamp(), error)
    done = database.execute("UPDATE image_jobs SET state = ?, ended_at = ?, error = ? WHERE ended_at IS NULL", values)
    return done.rowcount


def _values(job: ImageJob) -> dict[str, object]:
    fields = attrs.asdict(job, recurse=False, filter=lambda field, _: field.name in _COLUMNS)
    return dict(write_row(fields, _COLUMNS))


def _read(database: sqlite3.Connection, row: sqlite3.Row) -> ImageJob | None:
    try:
        return ImageJob(**read_row(row, _COLUMNS))
    except DamagedRow as error:
        database.execute("DELETE FROM image_jobs WHERE rowid = ?", (row["rowid"],))
        log.error("damaged_job_record", extra={"row": row["rowid"], "reason": str(error)})
        return None
