"""One session from its creation to its end, by HTTP alone, on whatever kernel and cgroup tree this machine has."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import httpx
import pytest

from tests.e2e.daemon import running_daemon

HOG = "python3 -c 'held = [bytearray(1 << 20) for _ in range(400)]'"


def _run(client: httpx.Client, session: str, command: str, **options: object) -> dict[str, object]:
    answer = client.post(f"/v1/sessions/{session}/exec", json={"cmd": command, **options})
    assert answer.status_code == 200, answer.text
    found: dict[str, object] = answer.json()
    return found


@pytest.mark.cgroup_v2
def test_a_session_lives_is_limited_and_leaves_nothing(data_dir: Path) -> None:
    """State, files, an out-of-memory kill that the shell outlives, a timeout that kills, and an end without a trace."""
    with running_daemon(data_dir) as daemon, daemon.client() as client:
        limits = {"memory_mb": 64, "pids": 32}
        session = client.post("/v1/sessions", json={"limits": limits}).json()["id"]
        assert _run(client, session, "cd /tmp; kept=yes; id -u")["output"] == "1000\n"
        assert _run(client, session, "echo $kept; pwd")["output"] == "yes\n/tmp\n"

        content = bytes(range(256)) * 64
        file = {"path": "/workspace/data", "content_base64": base64.b64encode(content).decode()}
        assert client.post(f"/v1/sessions/{session}/fs/write", json=file).json()["ok"] is True
        read = client.get(f"/v1/sessions/{session}/fs/read", params={"path": "/workspace/data"}).json()
        assert (read["content_base64"], read["truncated"]) == (file["content_base64"], False)
        assert _run(client, session, "wc -c </workspace/data")["output"] == f"{len(content)}\n"

        killed = _run(client, session, HOG)
        assert (killed["cause"], killed["victim"]) == ("oom", "python3"), killed
        slow = _run(client, session, "sleep 1000", timeout_ms=300, on_timeout="result")
        assert (slow["cause"], slow["exit_code"]) == ("timed_out", 124), slow
        assert _run(client, session, "echo $kept")["output"] == "yes\n"
        stats = client.get(f"/v1/sessions/{session}/stats").json()
        assert (stats["memory_limit"], stats["oom_kills"]) == (64 << 20, 1), stats

        assert client.delete(f"/v1/sessions/{session}").json() == {"ok": True}
        assert client.get(f"/v1/sessions/{session}").json()["status"] == "destroyed"
        assert daemon.stop() == 0
    for name in ("sessions", "run", "trash"):
        assert os.listdir(data_dir / name) == []
