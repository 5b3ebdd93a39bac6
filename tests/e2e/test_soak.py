"""The short form of the soak: kills of everything, and then nothing is lost or left. `make soak` is the long one.
And a file as large as a disk image."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx

from tests.e2e.daemon import Daemon
from tests.e2e.test_files import send_and_fetch
from tests.waiting import patience

ROOT = Path(__file__).parents[2]
_PATIENCE_S = 300.0


def test_a_short_soak_loses_and_leaves_nothing(tmp_path: Path) -> None:
    """PID 1s, shells, the fork server, its builders and the daemon are killed while sessions work; bytes that were
    confirmed stay, shells keep their state, every session is adopted, and the machine is as it was."""
    report = tmp_path / "report.md"
    done = subprocess.run(
        [sys.executable, "-m", "bench.soak", "--short", "--report", str(report)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience(_PATIENCE_S),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = report.read_text()
    helpers = "a builder", "a cgroup maker", "a cgroup emptier"
    for victim in ("PID 1 of a session", "a shell", "the fork server", *helpers, "the daemon"):
        assert f"- killed: {victim}: " in said
    assert "- tasks of the daemon's event loop: " in said


def test_a_file_of_five_gibibytes_whose_connection_breaks_arrives_whole(daemon: Daemon, client: httpx.Client) -> None:
    """Memory stays within the bounds of a file of 384 MiB."""
    mebibytes = 5 * 1024
    session = client.post("/v1/sessions", json={"limits": {"disk_mb": mebibytes + 64}}).json()["id"]
    send_and_fetch(daemon, client, f"/v1/sessions/{session}/fs", mebibytes)
