"""What the store is asked about workspaces. Messages of the store actor; it runs the work in its thread."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import assert_never

import attrs

from sandkasten.actors.core import Ask
from sandkasten.model.workspace import Within, WorkspacePatch, WorkspaceQuota
from sandkasten.store import sessions, workspaces
from sandkasten.store.sessions import SessionRecord
from sandkasten.store.workspaces import Count, WorkspaceRecord


@attrs.frozen
class PutWorkspace(Ask[None]):
    """Insert or replace a record."""

    record: WorkspaceRecord


@attrs.frozen
class TouchWorkspace(Ask[None]):
    """Note that a workspace was in use at `now`, if there is a record of it."""

    workspace_id: str
    now: datetime


@attrs.frozen
class AdoptWorkspace(Ask[WorkspaceRecord]):
    """Note that a workspace is in use at `now`; where there is no record, make one with these labels and this quota.
    Answers the record."""

    workspace_id: str
    now: datetime
    labels: Mapping[str, str]
    quota: WorkspaceQuota | None


@attrs.frozen
class ChangeWorkspace(Ask[bool]):
    """Change a record, if it has the labels `within`; answers whether there is such a one."""

    workspace_id: str
    patch: WorkspacePatch
    within: Within


@attrs.frozen
class GetWorkspace(Ask["WorkspaceRecord | None"]):
    workspace_id: str


@attrs.frozen
class ListWorkspaceRows(Ask[Sequence[WorkspaceRecord]]):
    """The first `limit` records behind `after`."""

    after: str
    limit: int


@attrs.frozen
class ForgetWorkspace(Ask[None]):
    workspace_id: str


@attrs.frozen
class CountSessions(Ask[Mapping[str, Count]]):
    """How many sessions had which workspace."""


@attrs.frozen
class HoldersOf(Ask[Sequence[SessionRecord]]):
    """Every session that may have a workspace now, by its record."""

    workspace_id: str


WorkspaceMessage = (
    PutWorkspace
    | TouchWorkspace
    | AdoptWorkspace
    | ChangeWorkspace
    | GetWorkspace
    | ListWorkspaceRows
    | ForgetWorkspace
    | CountSessions
    | HoldersOf
)


def workspace_work_of(message: WorkspaceMessage) -> Callable[[sqlite3.Connection], object]:
    """Return what the message asks for."""
    match message:
        case PutWorkspace(record):
            return lambda database: workspaces.put_workspace(database, record)
        case TouchWorkspace(workspace_id, now):
            return lambda database: workspaces.touch_workspace(database, workspace_id, now)
        case AdoptWorkspace(workspace_id, now, labels, quota):
            return lambda database: workspaces.adopt_workspace(database, workspace_id, now, labels, quota)
        case ChangeWorkspace(workspace_id, patch, within):
            return lambda database: workspaces.change_workspace(database, workspace_id, patch, within)
        case GetWorkspace(workspace_id):
            return lambda database: workspaces.get_workspace(database, workspace_id)
        case ListWorkspaceRows(after, limit):
            return lambda database: workspaces.list_workspaces(database, after=after, limit=limit)
        case ForgetWorkspace(workspace_id):
            return lambda database: workspaces.forget_workspace(database, workspace_id)
        case CountSessions():
            return workspaces.count_sessions
        case HoldersOf(workspace_id):
            return lambda database: sessions.live_sessions_of(database, workspace_id)
        case _:
            assert_never(message)
