"""Lists and properties of files over HTTP: the same routes for sessions and workspaces."""

from __future__ import annotations

import hashlib

import httpx
import pytest

from tests.api.harness import RunningTree, running_front
from tests.api.test_exec import make_session

WORKSPACE = "/v1/workspaces/files"


async def place(running: RunningTree, client: httpx.AsyncClient, kind: str) -> str:
    """Return the URL of a session or of a workspace with the files `a` and `d/b`."""
    url = await make_session(running, client) if kind == "session" else WORKSPACE
    for path in ("a", "d/b"):
        answer = await client.post(f"{url}/fs/write", json={"path": path, "text": path})
        assert answer.status_code == 200, answer.text
    return url


@pytest.mark.parametrize("kind", ["session", "workspace"])
async def test_a_list_is_deep_and_in_pages(kind: str) -> None:
    """Every entry has the path that other requests take, and a cursor leads to the next page."""
    async with running_front() as running, running.client() as client:
        url = await place(running, client, kind)
        found: list[str] = []
        query: dict[str, str | int] = {"depth": 2, "limit": 1, "path": "/" if kind == "workspace" else ""}
        while True:
            page = (await client.get(f"{url}/fs/list", params=query)).json()
            assert page["path"] == "/workspace"
            found += [each["path"] for each in page["entries"]]
            if "next_cursor" not in page:
                break
            query["cursor"] = page["next_cursor"]
        assert found == ["/workspace/a", "/workspace/d", "/workspace/d/b"]


@pytest.mark.parametrize("kind", ["session", "workspace"])
async def test_properties_of_one_and_of_many(kind: str) -> None:
    """A missing file is 404 alone, and null among many."""
    async with running_front() as running, running.client() as client:
        url = await place(running, client, kind)
        entry = (await client.get(f"{url}/fs/stat", params={"path": "b", "cwd": "d"})).json()
        assert (entry["path"], entry["type"], entry["size"]) == ("/workspace/d/b", "file", 3)
        assert {"uid", "gid", "user", "group", "etag", "mode"} <= entry.keys()
        assert (await client.get(f"{url}/fs/stat", params={"path": "x"})).status_code == 404
        answer = await client.post(f"{url}/fs/stat", json={"paths": ["a", "x", "d", "/proc/self"]})
        assert [each and each["type"] for each in answer.json()["entries"]] == ["file", None, "directory", None]


async def test_the_properties_of_what_a_link_leads_to() -> None:
    """A link that leads to no file is 404, not the link's own properties."""
    async with running_front() as running, running.client() as client:
        url = await place(running, client, "session")
        for name, target in (("link", "a"), ("dangling", "x")):
            running.tree.runner.files.path(name).symlink_to(target)
            assert (await client.get(f"{url}/fs/stat", params={"path": name})).json()["type"] == "symlink"
        followed = await client.get(f"{url}/fs/stat", params={"path": "link", "follow": True})
        assert (followed.json()["path"], followed.json()["type"]) == ("/workspace/a", "file")
        for route in ("stat", "view"):
            lost = await client.get(f"{url}/fs/{route}?path=dangling{'&follow=true' if route == 'stat' else ''}")
            assert (lost.status_code, lost.json()["error_code"]) == (404, "FILE_NOT_FOUND")


@pytest.mark.parametrize("kind", ["session", "workspace"])
async def test_a_digest_is_of_the_content(kind: str) -> None:
    """Of the regular file that a path leads to, and only if it is asked for."""
    async with running_front() as running, running.client() as client:
        url = await place(running, client, kind)
        await client.put(f"{url}/fs/file?path=big", content=b"\0" * 3_000_000)
        for path, content in (("d/b", b"d/b"), ("big", b"\0" * 3_000_000)):
            plain = (await client.get(f"{url}/fs/stat", params={"path": path})).json()
            told = (await client.get(f"{url}/fs/stat", params={"path": path, "digest": "sha256"})).json()
            assert told.pop("sha256") == hashlib.sha256(content).hexdigest()
            assert {**told, "etag": ""} == {**plain, "etag": ""}
        for path, digest, status in (("d", "sha256", 409), ("x", "sha256", 404), ("a", "md5", 400)):
            answer = await client.get(f"{url}/fs/stat", params={"path": path, "digest": digest})
            assert answer.status_code == status, answer.text


async def test_the_slash_of_a_workspace_is_the_workspace() -> None:
    """A path that begins with a slash begins there, and so does one that spells the workspace's place."""
    async with running_front() as running, running.client() as client:
        url = await place(running, client, "workspace")
        for path in ("/a", "a", "/workspace/a"):
            assert (await client.get(f"{url}/fs/stat", params={"path": path})).json()["path"] == "/workspace/a"


@pytest.mark.parametrize("query", ["depth=0", "depth=33", "limit=1001", "path=%00zz", "path=%00ff%00", "cursor=!"])
async def test_a_bad_query_is_400(query: str) -> None:
    """Before the sandbox is asked."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        answer = await client.get(f"{url}/fs/list?{query}")
        assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_REQUEST")


@pytest.mark.parametrize("kind", ["session", "workspace"])
async def test_a_tree_is_changed(kind: str) -> None:
    """Made, moved, copied, given a mode, removed; a name that is taken is 409."""
    async with running_front() as running, running.client() as client:
        url = await place(running, client, kind)

        async def post(action: str, **body: object) -> httpx.Response:
            return await client.post(f"{url}/fs/{action}", json=body)

        assert (await post("mkdir", path="x/y", parents=True)).json() == {"ok": True, "path": "/workspace/x/y"}
        assert (await post("mkdir", path="x")).json()["error_code"] == "CONFLICT"
        assert (await post("move", **{"from": "a", "to": "x/a"})).json()["path"] == "/workspace/x/a"
        assert (await post("copy", **{"from": "x", "to": "z"})).status_code == 200
        assert (await post("copy", **{"from": "x", "to": "z"})).status_code == 409
        assert (await post("chmod", path="z/a", mode="0700")).status_code == 200
        assert (await client.get(f"{url}/fs/stat?path=z/a")).json()["mode"] == "0700"
        assert (await client.delete(f"{url}/fs?path=x")).json()["error_code"] == "NOT_EMPTY"
        assert (await client.delete(f"{url}/fs?path=x&recursive=true")).status_code == 200
        listed = (await client.get(f"{url}/fs/list?depth=9")).json()["entries"]
        assert [each["path"].removeprefix("/workspace/") for each in listed] == ["d", "d/b", "z", "z/a", "z/y"]
