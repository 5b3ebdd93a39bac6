"""SQL for workspaces: what is known of each beside its files. Synchronous functions over an open connection.

A row is never needed to reach a file and its loss costs labels and times only: whoever finds a directory without a row
makes one. A damaged row is removed when it is read.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import attrs

from sandkasten.model import WORKSPACE_ID
from sandkasten.model.lifecycle import LIVE
from sandkasten.model.workspace import Within, WorkspacePatch, WorkspaceQuota, is_within

log = logging.getLogger(__name__)

_LIVE_LIST = ", ".join(f"'{status}'" for status in sorted(LIVE))
_MAX_MOMENT_S = 253_402_300_799.0
_MAX_LABELS = 64 * 1024


@attrs.frozen
class WorkspaceRecord:
    """What is remembered of a workspace."""

    id: str
    created_at: datetime
    last_used: datetime
    labels: Mapping[str, str] = attrs.field(factory=dict)
    quota: WorkspaceQuota | None = None


@attrs.frozen
class Count:
    """How many sessions had a workspace, and how many of them may have it now."""

    known: int = 0
    live: int = 0


def put_workspace(database: sqlite3.Connection, record: WorkspaceRecord) -> None:
    """Insert or replace one record."""
    times = record.created_at.timestamp(), record.last_used.timestamp()
    quota = (None, None) if record.quota is None else (record.quota.size_bytes, record.quota.files)
    database.execute(
        "INSERT OR REPLACE INTO workspaces (id, created_at, last_used, labels, quota_bytes, quota_files) "
        "VALUES (?, ?, ?, ?, ?, ?)",
        (record.id, *times, json.dumps(dict(record.labels)), *quota),
    )


def touch_workspace(database: sqlite3.Connection, workspace_id: str, now: datetime) -> None:
    """Note that a workspace was in use, if there is a record of it."""
    database.execute("UPDATE workspaces SET last_used = ? WHERE id = ?", (now.timestamp(), workspace_id))


def adopt_workspace(
    database: sqlite3.Connection,
    workspace_id: str,
    now: datetime,
    labels: Mapping[str, str],
    quota: WorkspaceQuota | None,
) -> WorkspaceRecord:
    """Note that a workspace is in use; where there is no record make one with these labels and this quota. Return the
    record."""
    touch_workspace(database, workspace_id, now)
    if (found := get_workspace(database, workspace_id)) is not None:
        return found
    record = WorkspaceRecord(workspace_id, now, now, dict(labels), quota)
    put_workspace(database, record)
    return record


def change_workspace(database: sqlite3.Connection, workspace_id: str, patch: WorkspacePatch, within: Within) -> bool:
    """Change the record of that id, if it has the labels `within`; return whether there is such a one."""
    found = get_workspace(database, workspace_id)
    if found is None or not is_within(found.labels, within):
        return False
    labels = found.labels if patch.labels is None else dict(patch.labels)
    quota = found.quota
    if quota is not None and patch.quota_bytes is not None:
        quota = attrs.evolve(quota, size_bytes=patch.quota_bytes)
    put_workspace(database, attrs.evolve(found, labels=labels, quota=quota))
    return True


def get_workspace(database: sqlite3.Connection, workspace_id: str) -> WorkspaceRecord | None:
    """Return the record of that id."""
    found = _select(database, "WHERE id = ?", workspace_id)
    return found[0] if found else None


def list_workspaces(database: sqlite3.Connection, *, after: str, limit: int) -> Sequence[WorkspaceRecord]:
    """Return records in the order of their ids."""
    return _select(database, "WHERE id > ? ORDER BY id LIMIT ?", after, limit)


def forget_workspace(database: sqlite3.Connection, workspace_id: str) -> None:
    """Delete the record of that id, if there is one."""
    database.execute("DELETE FROM workspaces WHERE id = ?", (workspace_id,))


def count_sessions(database: sqlite3.Connection) -> Mapping[str, Count]:
    """Return by workspace how many sessions had it."""
    query = (
        f"SELECT workspace_id, COUNT(*) AS known, SUM(status IN ({_LIVE_LIST})) AS live FROM sessions "
        "WHERE workspace_id IS NOT NULL GROUP BY workspace_id"
    )
    return {row["workspace_id"]: Count(row["known"], row["live"]) for row in database.execute(query)}


def _select(database: sqlite3.Connection, condition: str, *values: object) -> list[WorkspaceRecord]:
    records = []
    for row in database.execute(f"SELECT rowid, * FROM workspaces {condition}", values).fetchall():
        try:
            records.append(_from_row(row))
        except (ValueError, TypeError, OverflowError):
            database.execute("DELETE FROM workspaces WHERE rowid = ?", (row["rowid"],))
            log.error("damaged_workspace_record", extra={"row": row["rowid"]})
    return records


def _from_row(row: sqlite3.Row) -> WorkspaceRecord:
    """Raises ValueError, TypeError or OverflowError unless the row is one that could have been written."""
    if not isinstance(row["id"], str) or not WORKSPACE_ID.match(row["id"]) or len(row["labels"]) > _MAX_LABELS:
        raise ValueError("no workspace")
    labels = json.loads(row["labels"])
    if not isinstance(labels, dict) or not all(isinstance(each, str) for each in labels.values()):
        raise ValueError("no labels")
    quota = _quota(row["quota_bytes"], row["quota_files"])
    return WorkspaceRecord(row["id"], _moment(row["created_at"]), _moment(row["last_used"]), labels, quota)


def _quota(size_bytes: object, files: object) -> WorkspaceQuota | None:
    """Damage must not look like no quota."""
    if size_bytes is None and files is None:
        return None
    if not isinstance(size_bytes, int) or not isinstance(files, int) or size_bytes <= 0 or files <= 0:
        raise ValueError("no quota")
    return WorkspaceQuota(size_bytes, files)


def _moment(seconds: float) -> datetime:
    if not 0 <= seconds <= _MAX_MOMENT_S:
        raise ValueError("no moment")
    return datetime.fromtimestamp(seconds, UTC)
