"""Workspaces for somebody with a label, on the real kernel: what has another label is not there, whatever is asked."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

import pytest
import trio

from sandkasten import errors
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.config import Config
from sandkasten.model import SessionSpec
from sandkasten.model.workspace import WorkspacePatch, WorkspaceSpec
from sandkasten.supervisor import WorkspaceSupervisor
from tests import file_requests
from tests.file_requests import listed, looked_at, packed, removed, unpacked, written

A, B = {"team": "a"}, {"team": "b"}
WORKSPACE = "ws"


async def write(workspaces: WorkspaceSupervisor, content: bytes) -> None:
    await written(workspaces.workspace_files(WORKSPACE, make=True), "f", content)


async def read(workspaces: WorkspaceSupervisor) -> bytes:
    return await file_requests.read(workspaces.workspace_files(WORKSPACE), "f")


async def test_what_has_another_label_is_not_there(supervisor: LocalSupervisor) -> None:
    """A workspace with another label is not found by reading, writing, listing, measuring, changing, deleting, by
    archives in either direction, or by a session that asks for it.
    """
    ours, theirs = supervisor.workspaces_within(A), supervisor.workspaces_within(B)
    await write(ours, b"kept")
    archive, _ = await packed(ours.workspace_files(WORKSPACE))
    attempts: list[Callable[[], Awaitable[object]]] = [
        lambda: read(theirs),
        lambda: write(theirs, b"lost"),
        lambda: listed(theirs.workspace_files(WORKSPACE)),
        lambda: looked_at(theirs.workspace_files(WORKSPACE), "f"),
        lambda: removed(theirs.workspace_files(WORKSPACE), "f"),
        lambda: theirs.workspace(WORKSPACE, measure=True),
        lambda: theirs.update_workspace(WORKSPACE, WorkspacePatch(B)),
        lambda: theirs.delete_workspace(WORKSPACE, force=True),
        lambda: packed(theirs.workspace_files(WORKSPACE)),
        lambda: unpacked(theirs, WORKSPACE, archive, replace=True),
        lambda: unpacked(theirs, WORKSPACE, archive, replace=False),
        lambda: supervisor.create(SessionSpec(workspace_id=WORKSPACE, workspace_within=B)),
    ]
    for attempt in attempts:
        with pytest.raises(errors.WorkspaceNotFound):
            await attempt()
    with pytest.raises(errors.Conflict):
        await theirs.make_workspace(WORKSPACE, WorkspaceSpec())
    assert (await theirs.workspaces(), [each.id for each in await ours.workspaces()]) == ([], [WORKSPACE])
    assert (await read(ours), (await ours.workspace(WORKSPACE)).labels) == (b"kept", A)


async def test_a_session_makes_its_workspace_with_the_label(supervisor: LocalSupervisor) -> None:
    """A workspace made by a confined session gets the label; holders without the label are neither named nor ended by
    force.
    """
    ours = supervisor.workspaces_within(A)
    session = await supervisor.create(SessionSpec(workspace_id=WORKSPACE, workspace_within=A, labels=A))
    assert (await ours.workspace(WORKSPACE)).labels == A
    other = await supervisor.create(SessionSpec(workspace_id=WORKSPACE))
    with pytest.raises(errors.WorkspaceBusy) as refused:
        await ours.delete_workspace(WORKSPACE)
    assert refused.value.details["sessions"] == [session.id]
    with pytest.raises(errors.WorkspaceBusy):
        await ours.delete_workspace(WORKSPACE, force=True)
    assert {each.id for each in await supervisor.list()} == {session.id, other.id}
    await supervisor.destroy(other.id)
    await ours.delete_workspace(WORKSPACE, force=True)
    assert (await supervisor.list(), await supervisor.workspaces()) == ([], [])


async def test_a_directory_without_a_record_is_nobodys(supervisor: LocalSupervisor, config: Config) -> None:
    """A workspace directory without a record has no labels: no caller confined to a label reaches or takes it."""
    os.mkdir(config.data_dir / "workspaces" / WORKSPACE)
    ours = supervisor.workspaces_within(A)
    for attempt in (lambda: write(ours, b"x"), lambda: ours.update_workspace(WORKSPACE, WorkspacePatch(A))):
        with pytest.raises(errors.WorkspaceNotFound):
            await attempt()
    with pytest.raises(errors.WorkspaceNotFound):
        await supervisor.create(SessionSpec(workspace_id=WORKSPACE, workspace_within=A))
    assert (await supervisor.workspace(WORKSPACE)).labels == {}


async def test_of_two_who_want_a_name_at_once_one_gets_it(supervisor: LocalSupervisor) -> None:
    """The second of two callers with different labels who make one workspace at once is refused and sees nothing."""
    outcomes: list[str] = []

    async def take(labels: dict[str, str]) -> None:
        try:
            await write(supervisor.workspaces_within(labels), labels["team"].encode())
        except errors.WorkspaceNotFound:
            outcomes.append("refused")
        else:
            outcomes.append(labels["team"])

    async with trio.open_nursery() as nursery:
        for labels in (A, B):
            nursery.start_soon(take, labels)
    (winner,) = set(outcomes) - {"refused"}
    assert sorted(outcomes) == sorted([winner, "refused"])
    assert (await supervisor.workspace(WORKSPACE)).labels == {"team": winner}
    assert await read(supervisor) == winner.encode()
