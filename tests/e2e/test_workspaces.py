"""Workspaces of a daemon as a process: what a kill of anything, or of everything, leaves of them."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import httpx

from tests.e2e.daemon import Daemon, running_daemon
from tests.leaks import descendants

FILES = "/v1/workspaces/kept/fs"
INIT = "sandkasten-init"


def _read(client: httpx.Client, path: str) -> tuple[int, str]:
    answer = client.get(f"{FILES}/read", params={"path": path})
    return answer.status_code, answer.json().get("content_base64", "")


def _kill_all_sandboxes() -> None:
    for pid, name in descendants(os.getpid()):
        if name == INIT:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _kill(daemon: Daemon) -> None:
    daemon.process.kill()
    daemon.process.wait()


def test_a_killed_daemon_loses_neither_files_nor_who_has_them(data_dir: Path) -> None:
    """kill -9 of the daemon, with a session in the workspace, a transfer just done and uploads begun in the session and
    without one: the next daemon serves the files, goes on with the uploads, knows the session's exclusive hold, and has
    ended the old file helper. After a kill of all sandboxes the files are there.
    """
    with running_daemon(data_dir) as first, first.client() as client:
        spec = {"workspace_id": "kept", "workspace_mode": "exclusive"}
        session = client.post("/v1/sessions", json=spec).json()["id"]
        client.post(f"/v1/sessions/{session}/exec", json={"cmd": "echo inside > inside"})
        assert client.post(f"{FILES}/write", json={"path": "outside", "text": "x"}).status_code == 200
        uploads = {}
        for place in (f"/v1/sessions/{session}/fs", FILES):
            begun = client.post(f"{place}/uploads", json={"path": f"of-{place.split('/')[2]}", "size": 6}).json()
            upload = f"{place}/uploads/{begun['upload_id']}"
            assert client.patch(upload, content=b"abc", headers={"Upload-Offset": "0"}).json()["offset"] == 3
            uploads[upload] = begun["path"]
        _kill(first)
    with running_daemon(data_dir) as second, second.client() as client:
        refused = client.post("/v1/sessions", json={"workspace_id": "kept"})
        assert (refused.status_code, refused.json()["error_code"]) == (409, "WORKSPACE_BUSY")
        assert refused.json()["details"]["sessions"] == [session]
        assert client.delete("/v1/workspaces/kept").status_code == 409
        assert (_read(client, "inside"), _read(client, "outside")) == ((200, "aW5zaWRlCg=="), (200, "eA=="))
        for upload, path in uploads.items():
            assert client.head(upload).headers["upload-offset"] == "3"
            assert client.patch(upload, content=b"def", headers={"Upload-Offset": "3"}).json()["offset"] == 6
            assert client.post(f"{upload}/commit").json()["path"] == path
            assert _read(client, path) == (200, "YWJjZGVm")
        _kill(second)
        _kill_all_sandboxes()
    with running_daemon(data_dir) as third, third.client() as client:
        (found,) = client.get("/v1/workspaces").json()["workspaces"]
        assert (found["id"], found["session_count"], found["active_session_count"]) == ("kept", 1, 0)
        assert _read(client, "inside") == (200, "aW5zaWRlCg==")
        assert client.delete("/v1/workspaces/kept").json() == {"ok": True}
        assert third.stop() == 0
    assert list((data_dir / "workspaces").iterdir()) == []
