"""Workspaces as seen by a key that is confined to a label, over every route about them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import attrs
import httpx
import pytest

from sandkasten.errors import Conflict
from sandkasten.model.workspace import UploadSpec, WorkspaceSpec
from tests.api.harness import RunningTree, running_front
from tests.api.keys import ADMIN, CONFINED, CONFINED_READ, ISSUED
from tests.api.test_access import ABOUT_WORKSPACES, Request, all_requests

TOP = "/v1/workspaces"
ONE_WORKSPACE = [each for each in all_requests() if each.pattern in ABOUT_WORKSPACES - {TOP}]
EMPTY = bytes(1024)
"""Archive without files."""

FOREIGN, OWN = WorkspaceSpec({"team": "b"}), WorkspaceSpec({"team": "a"})


async def ask(client: httpx.AsyncClient, request: Request, workspace_id: str) -> httpx.Response:
    """Send a request that is right but for whose workspace it may be about."""
    pattern = request.pattern.removeprefix(f"{TOP}/{{id}}").removeprefix("/")
    options: dict[str, Any] = {}
    match request.method, pattern:
        case "POST", "fs/write":
            options = {"json": {"path": "f", "text": "x"}}
        case "POST", "fs/upload":
            options = {"files": {"file": ("f", b"x")}}
        case "POST", "fs/mkdir":
            options = {"json": {"path": "new"}}
        case "POST", "fs/move" | "fs/copy":
            options = {"json": {"from": "f", "to": "g", "overwrite": True}}
        case "POST", "fs/chmod":
            options = {"json": {"path": "f", "mode": "0600"}}
        case "POST", "fs/chown":
            options = {"json": {"path": "f"}}
        case "POST", "fs/stat":
            options = {"json": {"paths": ["f"]}}
        case "POST", "fs/glob":
            options = {"json": {"pattern": "**"}}
        case "POST", "fs/search":
            options = {"json": {"pattern": "x"}}
        case "POST", "fs/edit":
            options = {"json": {"edits": [{"op": "create", "path": "edited", "text": "x"}]}}
        case "POST", "fs/archive":
            options = {"content": EMPTY}
        case "POST", "import":
            options = {"content": EMPTY, "params": {"replace": "true"}}
        case "POST", "fs/uploads":
            options = {"json": {"path": "f"}}
        case "PATCH", _ if pattern.startswith("fs/uploads"):
            options = {"content": b"x", "headers": {"Upload-Offset": "0"}}
        case _, _ if pattern.startswith("fs/uploads"):
            pass
        case "PUT", "fs/file":
            options = {"content": b"x", "params": {"path": "f"}}
        case "PUT" | "PATCH", _:
            options = {"json": {}}
        case _, _ if pattern.startswith("fs"):
            is_directory = (
                pattern in ("fs", "fs/list", "fs/download", "fs/archive", "fs/watch") and request.method != "DELETE"
            )
            options = {"params": {"path": "" if is_directory else "f"}}
    return await client.request(request.method, f"{TOP}/{workspace_id}/{pattern}".rstrip("/"), **options)


async def prepare(running: RunningTree, **workspaces: WorkspaceSpec) -> None:
    """Make the workspaces that there are not, each with a file."""
    running.ring.replace([each.key for each in ISSUED])
    for name, spec in workspaces.items():
        with suppress(Conflict):
            await running.supervisor.make_workspace(name, spec)
        (running.tree.nsinit.workspace(name) / "f").write_bytes(b"kept")


async def with_upload(running: RunningTree, request: Request, workspace_id: str) -> Request:
    """Return the same request, of an upload that has begun if it names one."""
    if "{upload_id}" not in request.pattern:
        return request
    upload = await running.supervisor.workspace_files(workspace_id).begin_upload(UploadSpec("f"))
    return attrs.evolve(request, pattern=request.pattern.replace("{upload_id}", upload.id))


@pytest.mark.parametrize("spec", [FOREIGN, WorkspaceSpec()])
async def test_a_workspace_without_the_label_does_not_exist(spec: WorkspaceSpec) -> None:
    """All routes: one with another value, or with no labels, is 404 as one that is not there, and stays as it was."""
    assert len(ONE_WORKSPACE) >= 14
    async with running_front() as running, running.client(token=CONFINED.token) as client:
        await prepare(running, theirs=spec)
        for request in ONE_WORKSPACE:
            answer = await ask(client, request, "theirs")
            assert answer.status_code == 404, request
            if request.method != "HEAD":
                assert answer.json()["error_code"] == "WORKSPACE_NOT_FOUND", request
        top = running.tree.nsinit.workspace("theirs")
        assert [(each.name, each.read_bytes()) for each in top.iterdir()] == [("f", b"kept")]
        assert (await running.supervisor.workspace("theirs")).labels == spec.labels
        assert (await client.get(TOP)).json()["workspaces"] == []


async def test_a_confined_key_works_in_its_own_workspaces() -> None:
    """All routes are served with one that carries the label; one that only looks, looks."""
    async with running_front() as running:
        for request in ONE_WORKSPACE:
            await prepare(running, mine=OWN)
            async with running.client(token=CONFINED.token) as client:
                made = await with_upload(running, request, "mine")
                assert (await ask(client, made, "mine")).status_code in (200, 201), request
            await prepare(running, mine=OWN)
            async with running.client(token=CONFINED_READ.token) as client:
                made = await with_upload(running, request, "mine")
                assert (await ask(client, made, "mine")).status_code == (200 if request.looks else 403), request


async def test_what_a_confined_key_makes_carries_its_label() -> None:
    """By POST, PUT, by writing a file or importing; it can't be taken off or changed, nor a taken name be had."""
    async with running_front() as running, running.client(token=CONFINED.token) as client:
        await prepare(running, theirs=FOREIGN)
        assert (await client.post(TOP, json={"id": "w1", "labels": {"more": "x"}})).status_code == 201
        assert (await client.put(f"{TOP}/w2", json={})).status_code == 201
        assert (await client.post(f"{TOP}/w3/fs/write", json={"path": "f", "text": "x"})).status_code == 200
        assert (await client.post(f"{TOP}/w4/import", content=EMPTY)).status_code == 201
        assert (await client.patch(f"{TOP}/w1", json={"labels": {}})).json()["labels"] == {"team": "a"}
        listed = (await client.get(TOP)).json()["workspaces"]
        assert [(each["id"], each["labels"]) for each in listed] == [(f"w{n}", {"team": "a"}) for n in (1, 2, 3, 4)]
        wrong = {"labels": {"team": "b"}}
        for answer in (
            await client.post(TOP, json={"id": "w5", **wrong}),
            await client.put(f"{TOP}/w5", json=wrong),
            await client.patch(f"{TOP}/w1", json=wrong),
        ):
            assert (answer.status_code, answer.json()["error_code"]) == (403, "FORBIDDEN")
        assert (await client.post(TOP, json={"id": "theirs"})).status_code == 409
        assert not running.tree.nsinit.workspace("w5").exists()


async def test_a_session_of_a_confined_key_gets_workspaces_with_its_label() -> None:
    """Others do not exist for it, and one that is new carries the label; other keys get any."""
    async with running_front() as running:
        await prepare(running, theirs=FOREIGN, mine=OWN)
        for issued, expected in ((CONFINED, {"theirs": 404, "mine": 201, "new": 201}), (ADMIN, {"theirs": 201})):
            async with running.client(token=issued.token) as client:
                for name, status in expected.items():
                    answer = await client.post("/v1/sessions", json={"workspace_id": name})
                    assert answer.status_code == status, name
        assert (await running.supervisor.workspace("new")).labels == {"team": "a"}
