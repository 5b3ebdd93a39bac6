"""Procedures of docs/operations.md for a daemon that is down, carried out as they are written there."""

from __future__ import annotations

import re
import signal
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import httpx

from tests.e2e.daemon import running_daemon
from tests.waiting import patience

TEXT = (Path(__file__).parents[2] / "docs/operations.md").read_text()
LATER = 40


def commands(kind: str, of: str) -> str:
    """Return the lines of the blocks of a kind in a section, as a shell takes them."""
    section = TEXT.partition(f"## {of}\n")[2].partition("\n## ")[0]
    blocks = re.findall(rf"^```{kind}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).splitlines()
    return "\n".join(line.removeprefix("$ ") for line in lines if kind != "console" or line.startswith("$ "))


def do(script: str, data_dir: Path) -> str:
    script = script.replace(".sandkasten/", f"{data_dir}/")
    return subprocess.run(
        ["bash", "-e", "-c", script], check=True, capture_output=True, text=True, timeout=patience(60)
    ).stdout


def labels(client: httpx.Client) -> dict[str, dict[str, str]]:
    return {each["id"]: each["labels"] for each in client.get("/v1/workspaces").json()["workspaces"]}


def test_a_backup_that_is_restored_is_what_was_backed_up(data_dir: Path) -> None:
    """A backup of a killed daemon's data, whose last writes lie beside the database, restores it; workspace files stay
    as they are.
    """
    no_images = {"SANDKASTEN_WORKSPACE_DEFAULT_QUOTA_MB": "0"}  # an image has a journal of 64 MiB
    with running_daemon(data_dir, **no_images) as daemon, daemon.client() as client:
        assert client.put("/v1/workspaces/kept", json={"labels": {"of": "backup"}}).status_code == 201
        assert do(commands("console", "Back up"), data_dir) == "ok\n"
        assert (data_dir / "backup.db").stat().st_mode & 0o077 == 0
        client.patch("/v1/workspaces/kept", json={"labels": {"of": "later"}})
        for number in range(LATER):
            made = client.put(f"/v1/workspaces/later-{number}", json={"labels": {"n": "x" * 100}})
            assert made.status_code == 201, made.text
        written = client.post("/v1/workspaces/kept/fs/write", json={"path": "f", "text": "later"})
        assert written.status_code == 200
        session = client.post("/v1/sessions", json={}).json()["id"]
        daemon.process.kill()
        daemon.process.wait()
    assert (data_dir / "sandkasten.db-wal").stat().st_size > 0
    do(commands("sh", "Back up"), data_dir)
    with running_daemon(data_dir, **no_images) as daemon, daemon.client() as client:
        found = labels(client)
        assert found == {"kept": {"of": "backup"}} | {f"later-{number}": {} for number in range(LATER)}
        read = client.get("/v1/workspaces/kept/fs/read", params={"path": "f"}).json()
        assert read["content_base64"] == "bGF0ZXI="
        assert client.get(f"/v1/sessions/{session}").status_code == 404
        assert daemon.stop() == 0
    with closing(sqlite3.connect(data_dir / "sandkasten.db")) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_restart_says_how_many_sessions_came_along(data_dir: Path) -> None:
    """A daemon stopped and started as by a service manager adopts its sessions, and the log says how many."""
    with running_daemon(data_dir) as daemon, daemon.client() as client:
        for _ in range(2):
            assert client.post("/v1/sessions", json={}).status_code == 201
        assert daemon.stop(signal.SIGTERM) == 0
    with running_daemon(data_dir) as daemon, daemon.client() as client:
        daemon.wait_log(r'"event": "?reconciled"?.*"adopted": ?2')
        assert len(client.get("/v1/sessions").json()) == 2
