"""Edits, views, globs, searches, archives and changes of files over HTTP, in a session and in a workspace."""

from __future__ import annotations

import io
import json
import zipfile

import pytest

from tests.api.harness import KEY, running_front
from tests.api.test_exec import make_session
from tests.api.ws_client import handshake


@pytest.mark.parametrize("kind", ["session", "workspace"])
async def test_files_are_edited_together(kind: str) -> None:
    """All are made and answered with their versions and diffs; a problem names the edit and changes nothing."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client) if kind == "session" else "/v1/workspaces/texts"
        await client.put(f"{url}/fs/file?path=f", content=b"one\ntwo\ntwo\n")
        twice = {"path": "f", "op": "replace", "old": "two", "new": "2"}
        once = {"path": "f", "op": "replace", "old": "one", "new": "1"}
        create = {"path": "d/g", "op": "create", "text": "g"}
        problem = await client.post(f"{url}/fs/edit", json={"edits": [create, twice]})
        assert (problem.status_code, problem.json()["error_code"]) == (409, "AMBIGUOUS")
        assert problem.json()["details"] == {"edit": 1, "path": "f", "lines": [2, 3]}
        absent = await client.post(f"{url}/fs/edit", json={"edits": [{**twice, "old": "x"}]})
        assert (absent.status_code, absent.json()["error_code"]) == (409, "CONFLICT")
        stale = await client.post(f"{url}/fs/edit", json={"edits": [{**once, "if_match": '"x"'}]})
        assert (stale.status_code, stale.json()["error_code"]) == (412, "PRECONDITION_FAILED")
        unnamed = await client.post(f"{url}/fs/edit", json={"edits": [create], "if_match": {"f": "*"}})
        assert (unnamed.status_code, unnamed.json()["details"].keys()) == (400, {"if_match"})
        other = await client.post(f"{url}/fs/edit", json={"edits": [create, once], "if_match": {"f": '"x"'}})
        assert (other.status_code, other.json()["details"]["edit"]) == (412, 1)
        assert (await client.get(f"{url}/fs/file?path=d/g")).status_code == 404
        version = {"f": other.json()["details"]["etag"]}
        made = await client.post(f"{url}/fs/edit", json={"edits": [create, once], "if_match": version})
        assert (made.status_code, [each["path"] for each in made.json()["files"]]) == (200, ["d/g", "f"])
        assert made.json()["files"][1]["diff"].endswith("@@ -1,3 +1,3 @@\n-one\n+1\n two\n two\n")
        assert (await client.get(f"{url}/fs/file?path=f")).content == b"1\ntwo\ntwo\n"


@pytest.mark.parametrize(
    "edits",
    [
        *([], [1], [{"path": "f", "op": "rename"}], [{"path": "f", "op": "delete", "mode": 1}], [{"op": "delete"}]),
        *(
            [{"path": "f", "op": "replace", "old": "", "new": "x"}],
            [{"path": "f", "op": "insert", "line": -1, "text": ""}],
            [{"path": "f", "op": "delete", "if_match": ""}],
            [{"path": "f", "op": "delete", "if_match": "x"}],
        ),
        *([{"path": "f", "op": "replace", "old": "a", "new": "x", "count": 2}], [{"path": "f", "op": "delete"}] * 101),
    ],
)
async def test_what_is_no_edit_is_refused(edits: object) -> None:
    """Fields that an operation does not have, too."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        answer = await client.post(f"{url}/fs/edit", json={"edits": edits})
        assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_REQUEST")


@pytest.mark.parametrize(
    ("route", "body", "field", "nearest"),
    [
        ("write", {"path": "f", "text": "x"}, "mod", "mode"),
        ("edit", {"edits": [{"path": "f", "op": "create", "text": "x"}]}, "if_matches", "if_match"),
        ("mkdir", {"path": "f"}, "parent", "parents"),
        ("uploads", {"path": "f"}, "sha265", "sha256"),
        ("uploads/0/commit", {}, "mode", "has no fields"),
    ],
)
async def test_a_field_that_is_not_honoured_is_refused(
    route: str, body: dict[str, object], field: str, nearest: str
) -> None:
    """A condition, a place or a right would be lost. The nearest known field is named, and nothing is made."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        answer = await client.post(f"{url}/fs/{route}", json={**body, field: "x"})
        assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_REQUEST")
        assert nearest in answer.json()["details"][field]
        assert (await client.get(f"{url}/fs/list")).json()["entries"] == []


async def test_an_edit_takes_as_much_as_a_write() -> None:
    """16 MiB of any text, as the client counts it; more is 413."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        text = "\u20ac" * (5 << 20)
        for more, status in (("", 200), (text, 413)):
            edits = [{"path": f"f{status}", "op": "create", "text": text + more}]
            body = json.dumps({"edits": edits}, ensure_ascii=False).encode()
            answer = await client.post(f"{url}/fs/edit", content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == status, answer.text
        assert (await client.get(f"{url}/fs/file?path=f200")).text == text


async def test_a_rehearsal_makes_no_workspace() -> None:
    """An edit makes the workspace that is not there; with `dry_run` nothing is made."""
    async with running_front() as running, running.client() as client:
        url, edits = "/v1/workspaces/new", [{"path": "f", "op": "create", "text": "x"}]
        answer = await client.post(f"{url}/fs/edit", json={"edits": edits, "dry_run": True})
        assert (answer.status_code, answer.json()["error_code"]) == (404, "WORKSPACE_NOT_FOUND")
        assert (await client.get("/v1/workspaces")).json()["workspaces"] == []
        assert (await client.post(f"{url}/fs/edit", json={"edits": edits})).status_code == 200


async def test_a_view_is_numbered() -> None:
    """Lines of a file, or what is in a directory."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        await client.put(f"{url}/fs/file?path=d/f", content=b"one\ntwo\nthree")
        seen = (await client.get(f"{url}/fs/view?path=d/f&from=2")).json()
        assert (seen["text"], seen["first"], seen["last"], seen["lines"]) == ("     2\ttwo\n     3\tthree\n", 2, 3, 3)
        assert (await client.get(f"{url}/fs/view?path=.")).json()["text"] == "d/\nd/f\n"
        assert (await client.get(f"{url}/fs/view?path=x")).status_code == 404
        assert (await client.get(f"{url}/fs/view?path=d/f&from=3&to=2")).status_code == 400


@pytest.mark.parametrize("kind", ["session", "workspace"])
async def test_paths_are_found_in_pages(kind: str) -> None:
    """Of any depth, in order, each once."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client) if kind == "session" else "/v1/workspaces/found"
        for path in ("d/e/b.py", "d/a.py", "c.txt"):
            assert (await client.put(f"{url}/fs/file?path={path}", content=b"x")).status_code == 201
        wanted = {"pattern": "**/*.py", "limit": 1}
        first = (await client.post(f"{url}/fs/glob", json=wanted)).json()
        assert (first["path"], first["paths"]) == ("/workspace", ["/workspace/d/a.py"])
        second = (await client.post(f"{url}/fs/glob", json={**wanted, "cursor": first["next_cursor"]})).json()
        assert second == {"path": "/workspace", "paths": ["/workspace/d/e/b.py"]}
        assert (await client.post(f"{url}/fs/glob", json={"pattern": "../*"})).status_code == 400
        assert (await client.post(f"{url}/fs/glob", json={"pattern": "*", "path": "no"})).status_code == 404


@pytest.mark.parametrize("kind", ["session", "workspace"])
async def test_lines_are_found(kind: str) -> None:
    """Streamed as lines of JSON, the totals last; a request that can't be met is an error as others."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client) if kind == "session" else "/v1/workspaces/lines"
        await client.put(f"{url}/fs/file?path=d/f.py", content=b"import os\nimport re\n\nos.x\n")
        answer = await client.post(f"{url}/fs/search", json={"pattern": r"^import (\w+)$", "regex": True})
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-ndjson")
        *matches, last = (json.loads(line) for line in answer.text.splitlines())
        assert [(each["line"], each["column"], each["text"]) for each in matches] == [
            (1, 1, "import os"),
            (2, 1, "import re"),
        ]
        assert all(each["path"].endswith("/d/f.py") for each in matches)
        counts = {"matches": 2, "files": 1, "searched": 1, "skipped": 0, "truncated": False, "timed_out": False}
        assert last == {"totals": counts}
        nothing = await client.post(f"{url}/fs/search", json={"pattern": "nothing"})
        assert json.loads(nothing.text)["totals"]["matches"] == 0
        for wrong in ({"pattern": "(", "regex": True}, {"pattern": ""}, {"pattern": "x", "context": 11}):
            refused = await client.post(f"{url}/fs/search", json=wrong)
            assert (refused.status_code, refused.json()["error_code"]) == (400, "INVALID_REQUEST")
        assert (await client.post(f"{url}/fs/search", json={"pattern": "x", "path": "no"})).status_code == 404


@pytest.mark.parametrize("kind", ["session", "workspace"])
@pytest.mark.parametrize("form", ["tar", "tar.zst", "zip"])
async def test_an_archive_goes_out_and_in(kind: str, form: str) -> None:
    """By any of the forms, which is told from the first bytes; errors come before the archive."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client) if kind == "session" else "/v1/workspaces/packed"
        for path in ("d/e/f", "d/g"):
            await client.put(f"{url}/fs/file?path={path}", content=path.encode() * 1000)
        made = await client.get(f"{url}/fs/archive?path=d&format={form}")
        types = {"tar": "application/x-tar", "tar.zst": "application/zstd", "zip": "application/zip"}
        assert (made.status_code, made.headers["content-type"]) == (200, types[form])
        if form == "zip":
            assert zipfile.ZipFile(io.BytesIO(made.content)).testzip() is None
        taken = await client.post(f"{url}/fs/archive?path=back/d", content=made.content)
        assert (taken.status_code, taken.json()) == (201, {"ok": True, "entries": 3, "size_bytes": 8000, "skipped": 0})
        assert (await client.get(f"{url}/fs/file?path=back/d/e/f")).content == b"d/e/f" * 1000
        assert (await client.get(f"{url}/fs/archive?path=no&format={form}")).status_code == 404
        broken = await client.post(f"{url}/fs/archive", content=made.content[: len(made.content) // 2])
        assert (broken.status_code, broken.json()["error_code"]) == (400, "INVALID_REQUEST")
        assert (await client.post(f"{url}/fs/archive", content=b"")).status_code == 400


@pytest.mark.parametrize("kind", ["session", "workspace"])
async def test_changes_are_told_as_events_and_messages(kind: str) -> None:
    """`ready` first, names of any bytes spelled as everywhere, and the end with the watched directory."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client) if kind == "session" else "/v1/workspaces/watched"
        await client.put(f"{url}/fs/file?path=f", content=b"x")
        answer = await client.get(f"{url}/fs/watch?path=.&recursive=true")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream")
        told = [
            {"type": "ready", "path": "/workspace"},
            {"type": "rename", "path": "/workspace/\0ff", "to": "/workspace/b"},
            {"type": "overflow", "path": "/workspace"},
            {"type": "remove", "path": "/workspace"},
        ]
        blocks = [block.split("\n") for block in answer.text.split("\n\n") if block and not block.startswith(":")]
        assert [name.removeprefix("event: ") for name, _ in blocks] == [each["type"] for each in told]
        assert [json.loads(data.removeprefix("data: ")) for _, data in blocks] == told
        assert (await client.get(f"{url}/fs/watch?path=no")).status_code == 404
        async with await running.connect() as stream:
            await stream.send_all(handshake(f"{url}/fs/watch", {"Authorization": f"Bearer {KEY}"}))
            seen = b""
            while b'"remove"' not in seen:
                piece = await stream.receive_some(65536)
                assert piece
                seen += piece
            places = [seen.find(json.dumps(each, separators=(",", ":")).encode()) for each in told]
            assert -1 not in places
            assert places == sorted(places)
