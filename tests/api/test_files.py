"""Files over HTTP: contents exact, large ones never whole in memory, errors typed."""

from __future__ import annotations

import base64
import resource

import httpx
import pytest
import trio

from tests.api.harness import RunningTree, read_until, request_bytes, running_front
from tests.api.test_exec import make_session
from tests.waiting import patience

MIB = 1024 * 1024


async def write(running: RunningTree, client: httpx.AsyncClient, **body: str) -> httpx.Response:
    """Write a file into a new session."""
    return await client.post(f"{await make_session(running, client)}/fs/write", json=body)


def stored(running: RunningTree) -> dict[str, bytes]:
    """Return the files of all sessions by path."""
    return dict(file for runner in running.tree.runners.values() for file in runner.files.content().items())


@pytest.mark.parametrize(
    ("body", "content"),
    [
        ({"text": "hällo\n"}, "hällo\n".encode()),
        ({"text": ""}, b""),
        ({"content_base64": base64.b64encode(bytes(range(256))).decode()}, bytes(range(256))),
        ({"content_base64": ""}, b""),
        ({"text": "x" * 200_000}, b"x" * 200_000),
    ],
)
async def test_what_is_written_is_exact(body: dict[str, str], content: bytes) -> None:
    """Text, bytes, nothing, and more than one piece."""
    async with running_front() as running, running.client() as client:
        answer = await write(running, client, path="dir/a", **body)
        assert (answer.status_code, answer.json()["ok"]) == (200, True)
        assert stored(running) == {"/workspace/dir/a": content}


async def test_a_write_gives_the_mode_that_is_asked_for() -> None:
    """A mode that is none is refused."""
    async with running_front() as running, running.client() as client:
        answer = await write(running, client, path="bin/a", text="#!/bin/sh\n", mode="750")
        assert (answer.status_code, answer.json()) == (200, {"ok": True, "path": "/workspace/bin/a"})
        (runner,) = running.tree.runners.values()
        assert runner.files.path("bin/a").stat().st_mode & 0o7777 == 0o750
        refused = await write(running, client, path="a", text="", mode="rwx")
        assert (refused.status_code, refused.json()["error_code"]) == (400, "INVALID_REQUEST")


async def test_a_relative_path_is_under_the_directory_that_is_named() -> None:
    """As for the other requests for files; a user that is none is refused."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        written = await client.post(f"{url}/fs/write", json={"path": "a", "cwd": "/workspace/d", "text": "x"})
        assert (written.status_code, written.json()["path"]) == (200, "/workspace/d/a")
        answer = await client.get(f"{url}/fs/read", params={"path": "a", "cwd": "d"})
        assert (answer.json()["path"], answer.json()["content_base64"]) == ("/workspace/d/a", "eA==")
        for refused in (
            await client.post(f"{url}/fs/write", json={"path": "a", "user": "", "text": ""}),
            await client.get(f"{url}/fs/read", params={"path": "a", "user": "a b"}),
        ):
            assert (refused.status_code, refused.json()["error_code"]) == (400, "INVALID_REQUEST")


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/proc/self/environ", 409, "NOT_A_FILE"),
        ("../../proc/self/environ", 409, "NOT_A_FILE"),
        ("/etc/passwd", 404, "FILE_NOT_FOUND"),
        ("/workspace", 409, "IS_DIRECTORY"),
        ("missing", 404, "FILE_NOT_FOUND"),
        ("", 400, "INVALID_REQUEST"),
        ("a%00b", 400, "INVALID_REQUEST"),
        ("%ff", 400, "INVALID_REQUEST"),
        ("a" * 5000, 400, "INVALID_REQUEST"),
    ],
)
async def test_a_bad_path_is_a_typed_error(path: str, status: int, code: str) -> None:
    """Before anything of the file is sent."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        answer = await client.get(f"{url}/fs/read?path={path}")
        assert (answer.status_code, answer.json()["error_code"]) == (status, code)


@pytest.mark.parametrize("path", ["/workspace", "/tmp/", "."])
async def test_writing_to_a_directory_is_a_typed_error(path: str) -> None:
    """Nothing is stored."""
    async with running_front() as running, running.client() as client:
        answer = await write(running, client, path=path, text="x")
        assert (answer.status_code, answer.json()["error_code"]) == (409, "IS_DIRECTORY")
        assert stored(running) == {}


@pytest.mark.parametrize(
    "query", ["", "max_bytes=5", "path=a&max_bytes=0", "path=a&max_bytes=x", "path=a&max_bytes=104857601"]
)
async def test_a_bad_read_query_is_400(query: str) -> None:
    """The path is required, the limit is an integer up to 100 MiB."""
    async with running_front() as running, running.client() as client:
        answer = await client.get(f"{await make_session(running, client)}/fs/read?{query}")
        assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_REQUEST")


@pytest.mark.parametrize("size", [0, 1, 2, 3, 65_535, 65_536, 65_537, 131_072, 200_000])
async def test_what_is_read_is_exact(size: int) -> None:
    """Base64 groups are not broken where pieces meet."""
    content = bytes(number * 7 % 256 for number in range(size))
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        await client.post(
            f"{url}/fs/write", json={"path": "/tmp/a", "content_base64": base64.b64encode(content).decode()}
        )
        answer = await client.get(f"{url}/fs/read", params={"path": "/tmp/a"})
        assert answer.headers["content-type"] == "application/json"
        assert answer.json() == {
            "path": "/tmp/a",
            "truncated": False,
            "content_base64": base64.b64encode(content).decode(),
        }


async def test_a_read_stops_at_max_bytes_and_says_so() -> None:
    """10 MiB if nothing is asked for."""
    async with running_front(default_read_bytes=10) as running, running.client() as client:
        url = await make_session(running, client)
        await client.post(f"{url}/fs/write", json={"path": "a", "text": "0123456789abcdef"})
        for query, content in (("", b"0123456789"), ("&max_bytes=3", b"012"), ("&max_bytes=16", b"0123456789abcdef")):
            answer = (await client.get(f"{url}/fs/read?path=a{query}")).json()
            assert base64.b64decode(answer["content_base64"]) == content
            assert answer["truncated"] == (len(content) < 16)


async def test_a_large_file_is_read_in_bounded_memory() -> None:
    """100 MiB pass through without being held."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        with running.tree.runner.files.path("big").open("wb") as file:
            file.truncate(100 * MIB)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        received = 0
        async with client.stream("GET", f"{url}/fs/read?path=big&max_bytes={100 * MIB}") as answer:
            async for piece in answer.aiter_raw():
                received += len(piece)
        assert received > 100 * MIB * 4 // 3
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30 * 1024


async def test_a_reader_that_leaves_ends_the_read() -> None:
    """The next request is served at once; nothing goes on in the background."""
    async with running_front() as running:
        async with running.client() as client:
            url = await make_session(running, client)
        with running.tree.runner.files.path("big").open("wb") as file:
            file.truncate(100 * MIB)
        connection = await running.connect()
        await connection.send_all(request_bytes("GET", f"{url}/fs/read?path=big&max_bytes={100 * MIB}"))
        await read_until(connection, b"content_base64")
        await connection.aclose()
        assert await running.is_alive()
        assert await running.stop() < 0.25


async def test_a_write_over_the_json_limit_is_413() -> None:
    """The old file stays."""
    async with running_front(max_json_bytes=1000) as running, running.client() as client:
        answer = await write(running, client, path="a", text="x" * 2000)
        assert (answer.status_code, answer.json()["error_code"]) == (413, "TOO_LARGE")
        assert stored(running) == {}


async def test_a_client_that_leaves_during_a_write_leaves_the_old_file() -> None:
    """Half a body is no write."""
    async with running_front() as running:
        async with running.client() as client:
            url = await make_session(running, client)
        connection = await running.connect()
        whole = request_bytes("POST", f"{url}/fs/write", body=b'{"path": "a", "text": "new"}')
        await connection.send_all(whole[:-10])
        await connection.aclose()
        with trio.fail_after(patience()):
            assert await running.is_alive()
        assert stored(running) == {}
