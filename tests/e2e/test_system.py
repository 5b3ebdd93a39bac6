"""One source of truth: the start messages, `/v1/system` and `sandkasten doctor` say the same of one machine."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.daemon import SCRIPT, running_daemon
from tests.waiting import patience


@pytest.fixture
def data_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sandkasten-test-") as directory:
        yield Path(directory)


def test_daemon_doctor_and_start_messages_agree(data_dir: Path) -> None:
    """Every check that both made has one verdict, every protection one need, and what is not on was told at start."""
    with running_daemon(data_dir) as daemon:
        with daemon.client() as client:
            system = client.get("/v1/system").raise_for_status().json()
            node = client.get("/v1/node").raise_for_status().json()
        done = subprocess.run(
            [str(SCRIPT), "doctor", "--json", "--data-dir", str(data_dir)],
            capture_output=True,
            text=True,
            timeout=patience(120),
            check=False,
        )
        notes = [line for line in daemon.printed if line.startswith("note: ")]
    doctor = json.loads(done.stdout)
    assert done.returncode == 0, doctor["lacks"]
    made = {check["id"]: (check["verdict"], check["required"]) for check in system["checks"]}
    again = {check["id"]: (check["verdict"], check["required"]) for check in doctor["checks"]}
    assert len(made) > 40
    assert made.items() <= again.items()
    assert system["facts"]["cgroup_mode"] == system["cgroup_mode"]
    needs = [{each["name"]: each["required"] for each in view["protections"]} for view in (system, doctor)]
    assert needs[0] == needs[1]
    for each in system["protections"]:
        told = any(note.startswith(f"note: {each['name']} is ") for note in notes)
        assert (each["name"], told) == (each["name"], each["state"] != "on")
    assert (node["status"], node["images"], node["sessions"]) == ("ready", ["host"], {})
    assert system["limits"]["max_sessions"] >= node["capacity"]["totals"]["sessions"] > 0
