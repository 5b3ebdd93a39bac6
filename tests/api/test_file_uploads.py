"""Uploads: a file that comes in several requests, cut and gone on with, and put in place in one step."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from sandkasten.actors.services.store import do
from sandkasten.actors.workspaces.uploads import sweep_once
from sandkasten.model.workspace import MAX_UPLOADS, UPLOAD_S
from sandkasten.store.sessions import forget_ended
from sandkasten.store.uploads import old_uploads
from tests.api.harness import RunningTree, running_front
from tests.api.test_exec import make_session

CONTENT = bytes(range(256)) * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


async def begin(client: httpx.AsyncClient, url: str, **fields: object) -> str:
    """Begin an upload and return its URL."""
    begun = await client.post(f"{url}/fs/uploads", json={"path": "d/f", **fields})
    assert (begun.status_code, begun.json()["offset"], begun.json()["path"]) == (201, 0, "/workspace/d/f")
    return f"{url}/fs/uploads/{begun.json()['upload_id']}"


async def append(client: httpx.AsyncClient, upload: str, offset: int, content: bytes) -> httpx.Response:
    return await client.patch(upload, content=content, headers={"Upload-Offset": str(offset)})


async def names(client: httpx.AsyncClient, url: str) -> list[str]:
    listed = (await client.get(f"{url}/fs/list", params={"path": "d"})).json()["entries"]
    return [each["name"] for each in listed]


async def make_place(running: RunningTree, client: httpx.AsyncClient, kind: str) -> str:
    return await make_session(running, client) if kind == "session" else "/v1/workspaces/files"


@pytest.mark.parametrize("kind", ["session", "workspace"])
async def test_a_file_comes_in_parts(kind: str) -> None:
    """Nothing is under the file's name before the commit, and nothing is beside it after."""
    async with running_front() as running, running.client() as client:
        url = await make_place(running, client, kind)
        upload = await begin(client, url, size=len(CONTENT), sha256=DIGEST, mode="0750")
        assert (await client.get(f"{url}/fs/file?path=d/f")).status_code == 404
        for start in range(0, len(CONTENT), 100_000):
            sent = await append(client, upload, start, CONTENT[start : start + 100_000])
            assert (sent.status_code, sent.headers["upload-offset"]) == (200, str(sent.json()["offset"]))
        head = await client.head(upload)
        assert (head.status_code, head.headers["upload-offset"]) == (200, str(len(CONTENT)))
        done = await client.post(f"{upload}/commit")
        assert (done.status_code, done.json()["size"], done.json()["path"]) == (201, len(CONTENT), "/workspace/d/f")
        assert (await client.get(f"{url}/fs/file?path=d/f")).content == CONTENT
        assert (await client.get(f"{url}/fs/stat?path=d/f")).json()["mode"] == "0750"
        assert await names(client, url) == ["f"]
        assert (await client.get(upload)).status_code == 404


async def test_an_upload_that_was_cut_goes_on_where_it_was() -> None:
    """The offset tells how much has come; bytes for another place change nothing."""

    async def half() -> AsyncIterator[bytes]:
        yield CONTENT[:1000]
        raise ConnectionResetError

    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        upload = await begin(client, url)
        await append(client, upload, 0, CONTENT[:500])
        with pytest.raises(ConnectionResetError):
            await client.patch(upload, content=half(), headers={"Upload-Offset": "500"})
        offset = (await client.get(upload)).json()["offset"]
        assert 500 <= offset <= 1500
        refused = await append(client, upload, offset + 1, b"x")
        assert (refused.status_code, refused.json()["details"]["offset"]) == (409, offset)
        await append(client, upload, offset, CONTENT[offset:])
        assert (await client.post(f"{upload}/commit")).status_code == 201
        assert (await client.get(f"{url}/fs/file?path=d/f")).content == CONTENT


async def test_only_what_was_announced_is_put_in_place() -> None:
    """Too little, too much and another digest leave the old file, and the upload as it is."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        await client.put(f"{url}/fs/file?path=d/f", content=b"old")
        upload = await begin(client, url, size=4, sha256=hashlib.sha256(b"good").hexdigest())
        await append(client, upload, 0, b"ba")
        short = await client.post(f"{upload}/commit")
        assert (short.status_code, short.json()["details"]) == (409, {"offset": 2, "size": 4})
        long = await append(client, upload, 2, b"dxx")
        assert (long.status_code, long.json()["details"]["offset"]) == (413, 4)
        other = await client.post(f"{upload}/commit")
        assert (other.status_code, list(other.json()["details"])) == (409, ["offset", "sha256"])
        assert (await client.get(f"{url}/fs/file?path=d/f")).content == b"old"
        assert (await client.delete(upload)).status_code == 200
        assert await names(client, url) == ["f"]


async def test_a_commit_is_for_a_version() -> None:
    """As a write: 412 with the present version, and the upload can be committed again."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        upload = await begin(client, url)
        await append(client, upload, 0, b"new")
        assert (await client.post(f"{upload}/commit", headers={"If-Match": "*"})).status_code == 412
        await client.put(f"{url}/fs/file?path=d/f", content=b"old")
        assert (await client.post(f"{upload}/commit", headers={"If-None-Match": "*"})).status_code == 412
        assert (await client.post(f"{upload}/commit", headers={"If-Match": "*"})).status_code == 200
        assert (await client.get(f"{url}/fs/file?path=d/f")).content == b"new"


async def test_uploads_are_bounded() -> None:
    """One that ends, that can't begin, or that nobody may go on with makes room."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        await client.post(f"{url}/fs/mkdir", json={"path": "taken"})
        for _ in range(MAX_UPLOADS + 1):
            assert (await client.post(f"{url}/fs/uploads", json={"path": "taken"})).status_code == 409
        uploads = [await begin(client, url) for _ in range(MAX_UPLOADS)]
        full = await client.post(f"{url}/fs/uploads", json={"path": "d/f"})
        assert (full.status_code, full.json()["error_code"]) == (503, "CAPACITY")
        await client.delete(uploads[0])
        await begin(client, url)
        await running.supervisor._store.ask(do(make_old, uploads[1].rpartition("/")[2]))
        await begin(client, url)


def make_old(database: sqlite3.Connection, upload_id: str) -> None:
    """Have an upload begin a day sooner."""
    database.execute("UPDATE uploads SET begun_at = begun_at - ? WHERE id = ?", (UPLOAD_S + 1, upload_id))


@pytest.mark.parametrize("kind", ["session", "workspace"])
async def test_an_old_upload_is_removed(kind: str) -> None:
    """After a day, with its part file; a younger one stays."""
    async with running_front() as running, running.client() as client:
        url = await make_place(running, client, kind)
        upload = await begin(client, url)
        supervisor, store = running.supervisor, running.supervisor._store
        soon = datetime.now(UTC) + timedelta(seconds=UPLOAD_S - 60)
        await sweep_once(store, supervisor._files_at, soon)
        assert (await client.get(upload)).status_code == 200
        late = datetime.now(UTC) + timedelta(seconds=UPLOAD_S + 60)
        await sweep_once(store, supervisor._files_at, late)
        assert await names(client, url) == []
        assert await store.ask(do(old_uploads, late)) == []
        assert (await client.get(upload)).status_code == 404


@pytest.mark.parametrize("is_forgotten", [False, True])
async def test_what_a_session_left_in_its_workspace_is_removed(is_forgotten: bool) -> None:
    """A part file outlives its session there, and may outlive the session's record."""
    async with running_front() as running, running.client() as client:
        session = (await client.post("/v1/sessions", json={"workspace_id": "ws"})).json()["id"]
        await begin(client, f"/v1/sessions/{session}")
        await client.delete(f"/v1/sessions/{session}")
        store, late = running.supervisor._store, datetime.now(UTC) + timedelta(seconds=UPLOAD_S + 60)
        if is_forgotten:
            assert await store.ask(do(forget_ended, before=late, limit=10)) == 1
        assert len(await names(client, "/v1/workspaces/ws")) == 1
        await sweep_once(store, running.supervisor._files_at, late)
        assert await names(client, "/v1/workspaces/ws") == []
        assert await store.ask(do(old_uploads, late)) == []


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [("", {}, 400), ("", {"Upload-Offset": "-1"}, 400), ("0", {"Upload-Offset": "0"}, 404)],
)
async def test_a_part_that_has_no_place_is_refused(path: str, headers: dict[str, str], status: int) -> None:
    """Without an offset, and for no upload; an upload belongs to its session alone."""
    async with running_front() as running, running.client() as client:
        upload = await begin(client, await make_session(running, client))
        assert (await client.patch(upload + path, content=b"x", headers=headers)).status_code == status
        other = await make_session(running, client)
        foreign = f"{other}/fs/uploads/{upload.rpartition('/')[2]}"
        assert (await client.get(foreign)).status_code == 404
