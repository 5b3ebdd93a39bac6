"""Content of a file as the body: exact both ways, in parts, by version, and never whole in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from tests.api.harness import running_front
from tests.api.test_exec import make_session

CONTENT = bytes(range(256)) * 1000


async def settled(client: httpx.AsyncClient, url: str, path: str = "f") -> str:
    """Return the strong version of a file that was written just now."""
    while True:
        etag = (await client.head(f"{url}/fs/file", params={"path": path})).headers["etag"]
        if not etag.startswith("W/"):
            return str(etag)


@pytest.mark.parametrize("kind", ["session", "workspace"])
@pytest.mark.parametrize("size", [0, 1, 70_000, 3_000_000])
async def test_content_is_exact(kind: str, size: int) -> None:
    """Nothing, a byte, several pieces; 201 for a new file, 200 for one that is replaced."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client) if kind == "session" else "/v1/workspaces/files"
        content = (CONTENT * (size // len(CONTENT) + 1))[:size]
        for status in (201, 200):
            put = await client.put(f"{url}/fs/file", params={"path": "d/f"}, content=content)
            assert (put.status_code, put.json()["size"], put.json()["path"]) == (status, size, "/workspace/d/f")
        got = await client.get(f"{url}/fs/file", params={"path": "d/f"})
        assert (got.status_code, got.content, got.headers["content-length"]) == (200, content, str(size))
        head = await client.head(f"{url}/fs/file", params={"path": "d/f"})
        assert (head.content, head.headers["content-length"]) == (b"", str(size))


@pytest.mark.parametrize(
    ("header", "status", "part", "told"),
    [
        ("bytes=0-9", 206, slice(0, 10), "bytes 0-9/256000"),
        ("bytes=255990-", 206, slice(255_990, None), "bytes 255990-255999/256000"),
        ("bytes=-5", 206, slice(-5, None), "bytes 255995-255999/256000"),
        ("bytes=-999999", 206, slice(None), "bytes 0-255999/256000"),
        ("bytes=10-999999", 206, slice(10, None), "bytes 10-255999/256000"),
        ("bytes=0-1,4-5", 200, slice(None), None),
        ("bytes=9-1", 200, slice(None), None),
        ("lines=1-2", 200, slice(None), None),
        ("bytes=256000-", 416, None, "bytes */256000"),
        ("bytes=-0", 416, None, "bytes */256000"),
    ],
)
async def test_a_part(header: str, status: int, part: slice | None, told: str | None) -> None:
    """One range; several, or what is none, mean the whole file."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        await client.put(f"{url}/fs/file?path=f", content=CONTENT)
        got = await client.get(f"{url}/fs/file?path=f", headers={"Range": header})
        assert (got.status_code, got.headers.get("content-range")) == (status, told)
        if part is not None:
            assert got.content == CONTENT[part]
        else:
            assert got.json()["error_code"] == "RANGE_NOT_SATISFIABLE"


async def test_what_a_client_has_is_not_sent() -> None:
    """304 for the same version; a part only of the version that the client has the rest of."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        await client.put(f"{url}/fs/file?path=f", content=CONTENT)
        etag = await settled(client, url)
        same = await client.get(f"{url}/fs/file?path=f", headers={"If-None-Match": f'"x", {etag}'})
        assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", etag)
        headers = {"Range": "bytes=0-0", "If-Range": etag}
        assert (await client.get(f"{url}/fs/file?path=f", headers=headers)).status_code == 206
        await client.put(f"{url}/fs/file?path=f", content=b"other")
        assert (await client.get(f"{url}/fs/file?path=f", headers=headers)).content == b"other"
        assert (await client.get(f"{url}/fs/file?path=f", headers={"If-None-Match": etag})).status_code == 200


async def test_a_write_is_for_a_version() -> None:
    """412 names the present one, and nothing was changed; `If-None-Match: *` makes a file and replaces none."""
    async with running_front() as running, running.client() as client:
        url = f"{await make_session(running, client)}"
        path = f"{url}/fs/file?path=f"
        refused = await client.put(path, content=b"x", headers={"If-Match": "*"})
        assert (refused.status_code, refused.json()["details"]) == (412, {"etag": ""})
        made = await client.put(path, content=b"one", headers={"If-None-Match": "*"})
        assert made.status_code == 201
        refused = await client.put(path, content=b"x", headers={"If-None-Match": "*"})
        assert (refused.status_code, refused.json()["error_code"]) == (412, "PRECONDITION_FAILED")
        etag = await settled(client, url)
        twice = [("If-Match", '"x"'), ("If-Match", etag)]
        assert (await client.put(path, content=b"two", headers=twice)).status_code == 200
        refused = await client.put(path, content=b"three", headers=twice)
        assert refused.status_code == 412
        assert refused.json()["details"]["etag"].removeprefix("W/") == await settled(client, url)
        assert (await client.get(path)).content == b"two"


async def test_a_mode_is_set_and_kept() -> None:
    """A new file gets 0644 or what was asked for; a replaced one keeps its own."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        modes = []
        for query in ("path=a", "path=a&mode=0750", "path=a", "path=b&mode=600"):
            await client.put(f"{url}/fs/file?{query}", content=b"")
            path = query.partition("&")[0]
            modes.append((await client.get(f"{url}/fs/stat?{path}")).json()["mode"])
        assert modes == ["0644", "0750", "0750", "0600"]


@pytest.mark.parametrize(
    ("method", "query", "headers"),
    [
        ("PUT", "path=f&mode=9", []),
        ("PUT", "path=f", [("If-Match", "unquoted")]),
        ("PUT", "path=f", [("If-Match", "")]),
        ("PUT", "path=f", [("If-Match", ",")]),
        ("PUT", "path=f", [("If-None-Match", '"x"')]),
        ("PUT", "path=f", [("If-None-Match", "*")] * 2),
        ("GET", "path=f", [("If-None-Match", '"x" y')]),
        ("GET", "", []),
    ],
)
async def test_a_request_that_makes_no_sense_is_400(method: str, query: str, headers: list[tuple[str, str]]) -> None:
    """Before anything is changed: a condition that names no version is not taken for none."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        answer = await client.request(method, f"{url}/fs/file?{query}", headers=headers)
        assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_REQUEST")


async def test_a_client_that_leaves_early_leaves_the_old_file() -> None:
    """Half of a body changes nothing."""

    async def half() -> AsyncIterator[bytes]:
        yield b"new"
        raise ConnectionResetError

    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        await client.put(f"{url}/fs/file?path=f", content=b"old")
        with pytest.raises(ConnectionResetError):
            await client.put(f"{url}/fs/file?path=f", content=half())
        assert (await client.get(f"{url}/fs/file?path=f")).content == b"old"
        listed = (await client.get(f"{url}/fs/list")).json()["entries"]
        assert [each["name"] for each in listed] == ["f"]
