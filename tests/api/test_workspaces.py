"""Workspaces over HTTP: the routes of the published clients, pages, labels, archives that are never whole in memory."""

from __future__ import annotations

import base64
import io
import json
import tarfile
from pathlib import Path
from typing import IO, cast

import httpx
import pytest
import trio
from backports.zstd import ZstdCompressor, compress, decompress

from sandkasten.actors.workspaces.files import FileSandboxes, LocalFileStream
from sandkasten.crash import Crash
from sandkasten.host.paths import DataPaths
from tests.api.harness import running_front

TOP = "/v1/workspaces"
MIB = 1024 * 1024


async def error_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error_code"]


async def test_the_routes_of_the_published_clients() -> None:
    """List, write, upload, list files, read, delete, with the fields that they look at."""
    async with running_front() as running, running.client() as client:
        assert (await client.get(TOP)).json() == {"workspaces": []}
        for path in ("/a/b.txt", "a/b.txt"):
            written = await client.post(f"{TOP}/user-1/fs/write", json={"path": path, "text": "hi"})
            assert written.json() == {"ok": True, "path": "/workspace/a/b.txt"}
        sent = await client.post(f"{TOP}/user-1/fs/upload", files={"file": ("c.bin", b"\0")}, data={"path": "up"})
        assert sent.json() == {"ok": True, "paths": ["up/c.bin"]}
        entries = (await client.get(f"{TOP}/user-1/fs", params={"path": "/"})).json()["entries"]
        assert [(each["name"], each["is_dir"]) for each in entries] == [("a", True), ("up", True)]
        for path in ("/a/b.txt", "a/b.txt"):
            read = (await client.get(f"{TOP}/user-1/fs/read", params={"path": path})).json()
            assert read == {"path": "/workspace/a/b.txt", "content_base64": "aGk=", "truncated": False}
        (listed,) = (await client.get(TOP)).json()["workspaces"]
        assert (listed["id"], listed["session_count"], listed["active_session_count"]) == ("user-1", 0, 0)
        assert (await client.delete(f"{TOP}/user-1")).json() == {"ok": True}
        assert await error_of(await client.delete(f"{TOP}/user-1")) == (404, "WORKSPACE_NOT_FOUND")


async def test_workspaces_are_made_labelled_and_listed_in_pages() -> None:
    """POST once, PUT as often as one likes, PATCH; a label filters; each comes once whatever the page's size."""
    async with running_front() as running, running.client() as client:
        assert (await client.post(TOP, json={"id": "w-0", "labels": {"odd": "no"}})).status_code == 201
        assert await error_of(await client.post(TOP, json={"id": "w-0"})) == (409, "CONFLICT")
        assert await error_of(await client.post(TOP, json={"id": "-no-"})) == (400, "INVALID_REQUEST")
        for number in range(1, 6):
            labels = {"odd": "yes" if number % 2 else "no"}
            assert (await client.put(f"{TOP}/w-{number}", json={"labels": labels})).status_code == 201
        assert (await client.put(f"{TOP}/w-1", json={})).json()["labels"] == {"odd": "yes"}
        assert (await client.patch(f"{TOP}/w-5", json={"labels": {}})).json()["labels"] == {}
        for query, expected in ({}, [0, 1, 2, 3, 4, 5]), ({"label": "odd=no"}, [0, 2, 4]):
            for limit in (1, 2, 3, 10):
                seen: list[int] = []
                cursor: str | None = ""
                while cursor is not None:
                    page = (await client.get(TOP, params={**query, "cursor": cursor, "limit": limit})).json()
                    seen += [int(each["id"][2:]) for each in page["workspaces"]]
                    cursor = page.get("next_cursor")
                assert seen == expected
        measured = (await client.get(TOP, params={"usage": "true", "limit": 2})).json()["workspaces"]
        assert [each["usage"]["files"] for each in measured] == [0, 0]
        for bad in ({"label": "odd"}, {"cursor": "!"}, {"limit": "0"}, {"usage": "maybe"}):
            assert await error_of(await client.get(TOP, params=bad)) == (400, "INVALID_REQUEST")


async def test_files_are_listed_in_pages_looked_at_and_removed() -> None:
    """With a cursor from page to page; a directory with something in it goes only on demand."""
    async with running_front() as running, running.client() as client:
        for number in range(5):
            await client.post(f"{TOP}/ws/fs/write", json={"path": f"d/f{number}", "text": "x"})
        seen: list[str] = []
        cursor: str | None = ""
        while cursor is not None:
            page = (await client.get(f"{TOP}/ws/fs", params={"path": "d", "limit": 2, "cursor": cursor})).json()
            seen += [each["name"] for each in page["entries"]]
            cursor = page.get("next_cursor")
        assert seen == [f"f{number}" for number in range(5)]
        looked = (await client.get(f"{TOP}/ws/fs/stat", params={"path": "d/f1"})).json()
        assert (looked["path"], looked["type"], looked["size"], looked["mode"]) == (
            "/workspace/d/f1",
            "file",
            1,
            "0644",
        )
        assert await error_of(await client.delete(f"{TOP}/ws/fs")) == (400, "INVALID_REQUEST")
        assert await error_of(await client.delete(f"{TOP}/ws/fs", params={"path": "d"})) == (409, "NOT_EMPTY")
        gone = await client.delete(f"{TOP}/ws/fs", params={"path": "d", "recursive": "true"})
        assert gone.json() == {"ok": True, "path": "/workspace/d"}
        for path, expected in {"..": (400, "PATH_OUTSIDE"), "no": (404, "FILE_NOT_FOUND")}.items():
            assert await error_of(await client.get(f"{TOP}/ws/fs", params={"path": path})) == expected
        for name in ("none", "x", "A-b", "..", "a%2Fb"):
            assert (await client.get(f"{TOP}/{name}/fs")).status_code == 404


async def test_a_workspace_in_use_is_refused_unless_forced() -> None:
    """409 with a code of its own."""
    async with running_front() as running, running.client() as client:
        session = (await client.post("/v1/sessions", json={"workspace_id": "ws"})).json()
        assert await error_of(await client.delete(f"{TOP}/ws")) == (409, "WORKSPACE_BUSY")
        assert (await client.delete(f"{TOP}/ws", params={"force": "true"})).json() == {"ok": True}
        assert (await client.get(f"/v1/sessions/{session['id']}")).json()["status"] == "destroyed"


async def test_a_quota_is_given_when_it_is_made_and_only_grows() -> None:
    """By POST and PUT; a number of files of its own, or one by the size; never taken away, never without bytes. One
    that nobody asked for is as large as a session's disk."""
    mib = 1 << 20
    async with running_front() as running, running.client() as client:
        made = (await client.post(TOP, json={"id": "w-1", "quota_bytes": 64 * mib, "quota_files": 1000})).json()
        assert (made["quota_bytes"], made["quota_files"]) == (64 * mib, 1000)
        made = (await client.put(f"{TOP}/w-2", json={"quota_bytes": 64 * mib})).json()
        assert (made["quota_bytes"], made["quota_files"]) == (64 * mib, 8192)
        grown = (await client.patch(f"{TOP}/w-1", json={"quota_bytes": 128 * mib})).json()
        assert (grown["quota_bytes"], grown["quota_files"]) == (128 * mib, 1000)
        assert (await client.patch(f"{TOP}/w-1", json={"labels": {"a": "b"}})).json()["quota_bytes"] == 128 * mib
        assert await error_of(await client.patch(f"{TOP}/w-1", json={"quota_bytes": None})) == (409, "CONFLICT")
        unasked = (await client.post(TOP, json={"id": "w-3"})).json()
        assert (unasked["quota_bytes"], unasked["quota_files"]) == (2048 * mib, 262_144)
        for bad in ({"quota_files": 1000}, {"quota_bytes": 1}, {"quota_bytes": "1G"}):
            assert await error_of(await client.post(TOP, json={"id": "w-4", **bad})) == (400, "INVALID_REQUEST")
        assert (await client.get(f"{TOP}/w-4")).status_code == 404


def archive(data: bytes) -> bytes:
    """Return an archive of one file."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as file:
        member = tarfile.TarInfo("d/f")
        member.size = len(data)
        file.addfile(member, io.BytesIO(data))
    return packed.getvalue()


def content_of(packed: bytes) -> bytes:
    """Return the content of the file of `archive`."""
    with tarfile.open(fileobj=io.BytesIO(packed)) as file, cast(IO[bytes], file.extractfile("d/f")) as member:
        return member.read()


def unpacked(top: Path) -> dict[str, bytes]:
    """Return the files below a directory."""
    return {str(each.relative_to(top)): each.read_bytes() for each in top.rglob("*") if each.is_file()}


async def send(client: httpx.AsyncClient, name: str, body: bytes) -> httpx.Response:
    return await client.post(f"{TOP}/{name}/import", content=body, headers={"content-type": "application/zstd"})


async def test_archives_go_out_and_in_compressed_or_not() -> None:
    """Content that was sent is unpacked unchanged: plain, compressed, in several frames; and comes back either way."""
    data = bytes(range(256)) * 8192
    content = archive(data)
    frames = compress(content[:MIB]) + compress(content[MIB:])
    async with running_front() as running, running.client() as client:
        for name, body in (("plain", content), ("packed", compress(content)), ("frames", frames)):
            answer = await send(client, name, body)
            assert (answer.status_code, answer.json()["ok"]) == (201, True)
            assert unpacked(running.tree.nsinit.workspace(name)) == {"d/f": data}
        exported = await client.get(f"{TOP}/plain/export")
        assert (exported.headers["content-type"], content_of(decompress(exported.content))) == (
            "application/zstd",
            data,
        )
        plain = await client.get(f"{TOP}/plain/fs/download", params={"path": "/"})
        assert (plain.headers["content-type"], content_of(plain.content)) == ("application/x-tar", data)
        assert 'filename="plain.tar"' in plain.headers["content-disposition"]
        assert (await client.head(f"{TOP}/plain/export")).status_code == 200
        assert await error_of(await send(client, "plain", content)) == (409, "CONFLICT")


@pytest.mark.parametrize("kind", ["cut", "garbage behind", "garbage inside", "huge window", "empty"])
async def test_what_is_no_archive_makes_nothing(kind: str) -> None:
    """Broken compression is refused before anything is there."""
    packed = compress(b"x" * MIB)
    bodies = {
        "cut": packed[:-5],
        "garbage behind": packed + b"garbage",
        "garbage inside": packed[:10] + b"\xff" * 100 + packed[10:],
        "huge window": bytes.fromhex("28b52ffd00c8") + bytes(50),
        "empty": b"",
    }
    async with running_front() as running, running.client() as client:
        assert await error_of(await send(client, "bad", bodies[kind])) == (400, "INVALID_REQUEST")
        assert (await client.get(TOP)).json() == {"workspaces": []}


async def test_a_bomb_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty bytes that hold a mebibyte, hundreds of times: never more than a piece of it is in memory at once."""
    pieces: list[int] = []
    forward = LocalFileStream.send

    async def watched(self: LocalFileStream, data: bytes) -> bool:
        pieces.append(len(data))
        return await forward(self, data)

    monkeypatch.setattr(LocalFileStream, "send", watched)
    async with running_front() as running, running.client() as client:
        compressor = ZstdCompressor(level=19)
        bomb = b"".join(compressor.compress(bytes(MIB)) for _ in range(64)) + compressor.flush()
        assert (await send(client, "bomb", bomb)).status_code == 201
    assert len(bomb) < 16 * 1024
    assert (sum(pieces), max(pieces) <= 256 * 1024) == (64 * MIB, True)


async def test_without_a_key_an_archive_must_say_so() -> None:
    """A web page can't send that type across origins unasked."""
    async with running_front(api_key=None) as running, running.client(headers={"Authorization": ""}) as client:
        refused = await client.post(f"{TOP}/ws-1/import", content=b"x", headers={"content-type": "text/plain"})
        assert await error_of(refused) == (400, "INVALID_REQUEST")
        assert (await send(client, "ws-1", archive(b"x"))).status_code == 201


async def test_names_that_are_no_text_have_their_bytes() -> None:
    """As base64, beside a readable spelling."""
    async with running_front() as running, running.client() as client:
        await client.put(f"{TOP}/ws", json={})
        (running.tree.nsinit.workspace("ws") / "\udcff").touch()
        (entry,) = json.loads((await client.get(f"{TOP}/ws/fs")).content)["entries"]
        assert (entry["name"], base64.b64decode(entry["name_base64"])) == ("\ufffd", b"\xff")


async def test_file_sandboxes_are_ended_twice_at_once() -> None:
    """Each waits for those that are there; one that the other has ended is no error."""
    async with running_front() as running, trio.open_nursery() as nursery:
        tree = running.supervisor
        sandboxes = FileSandboxes(
            nursery.start_soon,
            nsinit=tree._nsinit,
            directory=tree._directory,
            paths=DataPaths(tree._config.data_dir),
            new_id=tree._node.new_session_id,
            crash=Crash(),
        )
        async with running.client() as client:
            assert (await client.post(TOP, json={"id": "work-1"})).status_code == 201
        (tree._config.data_dir / "drafts/work-1").mkdir()
        for is_draft in (False, True):
            await sandboxes.lend(("work-1", is_draft), trio.Event())
        async with trio.open_nursery() as ends:
            ends.start_soon(sandboxes.end, "work-1")
            ends.start_soon(sandboxes.end, "work-1")
        assert len(set(running.tree.nsinit.torn_down)) == 2
        nursery.cancel_scope.cancel()
