"""Multipart uploads: exact, streamed, bounded, and safe whatever a form contains."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import httpx
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from sandkasten.api.resources.files import safe_name
from sandkasten.errors import InvalidRequest
from tests.api.harness import KEY, RunningTree, parse_answer, read_to_end, running_front, send_and_read
from tests.api.test_exec import make_session
from tests.api.test_files import MIB, stored

BOUNDARY = "frontier"


def part(name: str, content: bytes, filename: str | None = None) -> bytes:
    """Return one part with its opening boundary."""
    disposition = f'Content-Disposition: form-data; name="{name}"'
    if filename is not None:
        disposition += f'; filename="{filename}"'
    return f"--{BOUNDARY}\r\n{disposition}\r\n\r\n".encode() + content + b"\r\n"


def form(*parts: bytes) -> bytes:
    """Return a whole form."""
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


async def post(
    client: httpx.AsyncClient, url: str, body: bytes, *, kind: str = f"multipart/form-data; boundary={BOUNDARY}"
) -> httpx.Response:
    """Post a hand-made form."""
    return await client.post(f"{url}/fs/upload", content=body, headers={"Content-Type": kind})


def head(url: str, headers: str) -> bytes:
    """Return the head of an upload."""
    return (
        f"POST {url}/fs/upload HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\n{headers}\r\n\r\n"
    ).encode()


@pytest.mark.parametrize("directory", ["/workspace/data", "data", "data/", "./data"])
async def test_an_upload_as_published_clients_send_it(directory: str) -> None:
    """The field before the file, a relative or absolute directory; bytes are exact."""
    content = bytes(range(256)) * 1000 + b"\r\n--front\r\n"
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        answer = await client.post(f"{url}/fs/upload", data={"path": directory}, files={"file": ("a.bin", content)})
        assert (answer.status_code, answer.json()) == (200, {"ok": True, "paths": ["/workspace/data/a.bin"]})
        assert stored(running) == {"/workspace/data/a.bin": content}


@pytest.mark.parametrize("directory", ["", "/", "/workspace", "."])
async def test_the_root_of_a_workspace_has_many_names(directory: str) -> None:
    """An empty path is one of them, as in a list."""
    async with running_front() as running, running.client() as client:
        url = "/v1/workspaces/ws"
        answer = await client.post(f"{url}/fs/upload", data={"path": directory}, files={"file": ("a", b"1")})
        assert (answer.status_code, answer.json()) == (200, {"ok": True, "paths": ["a"]})
        (entry,) = (await client.get(f"{url}/fs", params={"path": directory})).json()["entries"]
        assert entry["name"] == "a"


async def test_without_a_directory_files_land_in_the_workspace() -> None:
    """Several files, under either name, empty ones too."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        files = [("files", ("a", b"1")), ("files", ("b", b"")), ("file", ("ü.txt", b"3"))]
        answer = await client.post(f"{url}/fs/upload", files=files)
        assert answer.json()["paths"] == ["/workspace/a", "/workspace/b", "/workspace/ü.txt"]
        assert stored(running) == {"/workspace/a": b"1", "/workspace/b": b"", "/workspace/ü.txt": b"3"}


@pytest.mark.parametrize("name", ["mode", "user", "cwd", "n" * 300])
async def test_a_field_that_means_nothing_is_refused(name: str) -> None:
    """A file would have another mode or owner than was asked for, or be in another place."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        answer = await post(client, url, form(part(name, b"x"), part("file", b"1", "a")))
        assert (answer.status_code, list(answer.json()["details"])) == (400, [name[:64]])
        assert stored(running) == {}


async def test_the_directory_may_come_after_the_files() -> None:
    """Forms have the order their maker chose; files before and after the field go to the same place."""
    big = bytes(range(251)) * 2000
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        body = form(
            part("file", big, "a"),
            part("file", b"2", "b"),
            part("path", b"sub"),
            part("file", b"3", "c"),
        )
        answer = await post(client, url, body)
        assert answer.json()["paths"] == ["/workspace/sub/a", "/workspace/sub/b", "/workspace/sub/c"]
        assert stored(running) == {"/workspace/sub/a": big, "/workspace/sub/b": b"2", "/workspace/sub/c": b"3"}


async def test_early_files_wait_in_the_configured_spool(tmp_path: Path) -> None:
    """Nothing of the files is left there."""
    async with running_front(spool_dir=tmp_path) as running, running.client() as client:
        url = await make_session(running, client)
        body = form(part("file", b"x" * 300_000, "a"), part("path", b"sub"))
        assert (await post(client, url, body)).status_code == 200
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("filename", "name"),
    [
        ("../../etc/passwd", "passwd"),
        ("/etc/passwd", "passwd"),
        ("C:\\dir\\a.txt", "a.txt"),
        (".hidden", ".hidden"),
        ("a b", "a b"),
    ],
)
async def test_only_the_last_component_of_a_file_name_counts(filename: str, name: str) -> None:
    """RFC 7578 §4.2: a receiver must not trust the path."""
    assert safe_name(filename) == name
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        body = form(part("path", b"sub"), part("file", b"x", filename.replace("\\", "\\\\")))
        assert (await post(client, url, body)).json()["paths"] == [f"/workspace/sub/{name}"]


@settings(deadline=None)
@given(st.text(max_size=20))
def test_a_safe_name_is_one_component(filename: str) -> None:
    """A safe name is one component, whatever name the client sent."""
    try:
        name = safe_name(filename)
    except InvalidRequest:
        return
    assert name not in ("", ".", "..")
    assert "/" not in name
    assert "\0" not in name


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nonsense",
        form(),
        form(part("path", b"sub")),
        form(part("file", b"x")),
        form(part("file", b"x", "")),
        form(part("file", b"x", "..")),
        form(part("file", b"x", "a/")),
        form(part("file", b"x", "n" * 300)),
        form(part("path", b""), part("file", b"x", "a")),
        form(part("path", b"a\0b"), part("file", b"x", "a")),
        form(part("path", b"\xff"), part("file", b"x", "a")),
        form(part("path", b"p" * 5000), part("file", b"x", "a")),
        form(part("file", b"x", "a"))[:-10],
        part("file", b"x", "a"),
        f"--{BOUNDARY}\r\nX: y\r\n\r\nx\r\n--{BOUNDARY}--\r\n".encode(),
        f"--{BOUNDARY}\r\n".encode() + b"X: " + b"y" * 600_000,
        form(*[part("path", b"sub") for _ in range(300)], part("file", b"x", "a")),
        form(part("file", b"x", "a")) + b"epilogue" * 100_000,
    ],
)
async def test_a_bad_form_is_400(body: bytes) -> None:
    """Never 500, and nothing is stored from a form without a usable file."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        answer = await post(client, url, body)
        assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_REQUEST")


@pytest.mark.parametrize(
    "kind",
    [
        "",
        "application/json",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "multipart/form-data; boundary=\xe9",
    ],
)
async def test_another_content_type_is_400(kind: str) -> None:
    """A form needs a boundary."""
    async with running_front() as running:
        async with running.client() as client:
            url = await make_session(running, client)
        data = head(url, "Content-Length: 1").replace(
            f"multipart/form-data; boundary={BOUNDARY}".encode(), kind.encode("latin-1")
        )
        assert (await send_and_read(running, data + b"x")).startswith(b"HTTP/1.1 400")


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=300), st.binary(max_size=60))
def test_any_bytes_are_a_form_or_a_typed_refusal(body: bytes, tail: bytes) -> None:
    """The decoder below has assertions of its own; none of them gets out."""

    async def check() -> None:
        async with running_front() as running, running.client() as client:
            url = await make_session(running, client)
            for data in (body, part("file", body, "a") + tail, form(part("file", body, "a"), tail)):
                assert (await post(client, url, data)).status_code in (200, 400)

    trio.run(check)


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_an_upload_over_the_limit_is_413_and_closed(is_chunked: bool) -> None:
    """Declared or not; the answer arrives although the client is still sending."""
    async with running_front(max_upload_bytes=100_000) as running:
        async with running.client() as client:
            url = await make_session(running, client)
        opening = part("path", b"sub") + part("file", b"", "a")[:-2]
        async with await running.connect() as connection:
            if is_chunked:
                await connection.send_all(head(url, "Transfer-Encoding: chunked"))
                await connection.send_all(b"%x\r\n" % len(opening) + opening + b"\r\n")
                pieces = [b"10000\r\n" + bytes(0x10000) + b"\r\n"] * 3
            else:
                await connection.send_all(head(url, "Content-Length: 100000000") + opening)
                pieces = [bytes(65_536)] * 8
            for piece in pieces:
                await connection.send_all(piece)
            status, fields, body = parse_answer(await read_to_end(connection))
        assert (status, fields["connection"]) == (413, "close")
        assert b"max_body_bytes" in body
        assert stored(running) == {}


async def send_large(running: RunningTree, url: str, size: int, sent: list[int]) -> httpx.Response:
    """Upload `size` zeros piece by piece, noting what was handed to the socket."""
    opening = part("path", b"sub") + part("file", b"", "big")[:-2]
    closing = f"\r\n--{BOUNDARY}--\r\n".encode()
    async with await running.connect() as connection:
        total = len(opening) + size + len(closing)
        await connection.send_all(head(url, f"Content-Length: {total}\r\nConnection: close") + opening)
        piece = bytes(64 * 1024)
        while sent[0] < size:
            await connection.send_all(piece)
            sent[0] += len(piece)
        await connection.send_all(closing)
        status, _, body = parse_answer(await read_to_end(connection))
        return httpx.Response(status, content=body)


async def test_a_slow_sandbox_slows_the_client_down() -> None:
    """While the writer is stuck, what the daemon takes in is bounded; then everything arrives."""
    size = 64 * MIB
    sent = [0]
    answers: list[httpx.Response] = []
    async with running_front() as running:
        async with running.client() as client:
            url = await make_session(running, client)
        files = running.tree.runner.files
        files.is_keeping, files.write_gate = False, trio.Event()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        async def upload() -> None:
            answers.append(await send_large(running, url, size, sent))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(upload)
            await trio.testing.wait_all_tasks_blocked(0.1)
            assert sent[0] < 20 * MIB  # two kernel socket buffers, and ten pieces in the server
            assert files.bytes_written == 0
            assert await running.is_alive()
            files.write_gate.set()
        assert answers[0].status_code == 200
        assert files.bytes_written == size
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20 * 1024


async def test_a_client_that_leaves_during_an_upload_leaves_no_file() -> None:
    """The writer's context is left without commit."""
    async with running_front() as running:
        async with running.client() as client:
            url = await make_session(running, client)
        connection = await running.connect()
        await connection.send_all(
            head(url, "Content-Length: 100000") + part("path", b"s") + part("file", b"x" * 500, "a")
        )
        await connection.aclose()
        assert await running.is_alive()
        assert await running.stop() < 0.25
        assert stored(running) == {}
