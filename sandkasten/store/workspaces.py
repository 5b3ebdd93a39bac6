"""SQL for workspaces: the facts known of each beside its files. Synchronous, over an open connection.

No row is needed to reach a file. A lost row costs labels and times: a directory without a row gets a new one when it is
found. A damaged row is deleted when it is read.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Mapping, Sequence
from datetime import datetime

import attrs

from sandkasten.model import WORKSPACE_ID
from sandkasten.model.lifecycle import LIVE
from sandkasten.model.workspace import Within, WorkspacePatch, WorkspaceQuota, is_within
from sandkasten.store.rows import Column, DamagedRow, column, json_column, named, part, read_row, write_row

log = logging.getLogger(__name__)

_LIVE_LIST = ", ".join(f"'{status}'" for status in sorted(LIVE))

_COLUMNS: Mapping[str, Column] = {
    "id": column(str, named(WORKSPACE_ID)),
    "created_at": column(datetime),
    "last_used": column(datetime),
    "labels": json_column(Mapping[str, str]),
    "quota_bytes": column(int | None, bool),
    "quota_files": column(int | None, bool),
}
_PUT = (
    f"INSERT OR REPLACE INTO workspaces ({', '.join(_COLUMNS)}) VALUES ({', '.join(':' + name for name in _COLUMNS)})"
)


@attrs.frozen
class WorkspaceRecord:
    """The row of a workspace."""

    id: str
    created_at: datetime
    last_used: datetime
    labels: Mapping[str, str] = attrs.field(factory=dict)
    quota: WorkspaceQuota | None = None


@attrs.frozen
class Count:
    """Number of sessions that had a workspace, and of those that may have it now."""

    known: int = 0
    live: int = 0


def put_workspace(database: sqlite3.Connection, record: WorkspaceRecord) -> None:
    """Insert or replace one record."""
    quota = record.quota
    limits = {} if quota is None else {"quota_bytes": quota.size_bytes, "quota_files": quota.files}
    database.execute(_PUT, write_row({**attrs.asdict(record, recurse=False), **limits}, _COLUMNS))


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


def note_quota(database: sqlite3.Connection, workspace_id: str, quota: WorkspaceQuota) -> None:
    """Write a quota into the record of that id, unless the record has one."""
    database.execute(
        "UPDATE workspaces SET quota_bytes = ?, quota_files = ? WHERE id = ? AND quota_bytes IS NULL",
        (quota.size_bytes, quota.files, workspace_id),
    )


def get_workspace(database: sqlite3.Connection, workspace_id: str) -> WorkspaceRecord | None:
    """Return the row of a workspace; None if there is none."""
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
        except DamagedRow as error:
            database.execute("DELETE FROM workspaces WHERE rowid = ?", (row["rowid"],))
            log.error("damaged_workspace_record", extra={"row": row["rowid"], "reason": str(error)})
    return records


def _from_row(row: sqlite3.Row) -> WorkspaceRecord:
    """Return the record of a row. Raises `DamagedRow`: damage must not look like no quota."""
    found = read_row(row, _COLUMNS)
    quota = part(WorkspaceQuota, {"size_bytes": found.pop("quota_bytes"), "files": found.pop("quota_files")})
    return WorkspaceRecord(quota=quota, **found)
