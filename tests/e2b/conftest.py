"""An environment with E2B's SDKs as published, and one daemon that serves E2B's API."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.daemon import KEY, Daemon, running_daemon
from tests.waiting import patience

ROOT = Path(__file__).parents[2]
SDKS = ROOT / os.environ.get("E2B_SDKS", ".venv-e2b")
PROGRAMS = Path(__file__).parent / "programs"
_SECONDS = 60

Scenarios = dict[str, Any]
"""Results of a program's scenarios, JSON values, by their names."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with (
        tempfile.TemporaryDirectory(prefix="sandkasten-test-") as directory,
        running_daemon(
            Path(directory), SANDKASTEN_E2B_ENABLED="true", SANDKASTEN_PREVIEW_LISTEN="127.0.0.1:0"
        ) as daemon,
        daemon.client() as client,
    ):
        # The process of the ways out begins with the first session that has one, and lasts as long as its daemon.
        first = client.post("/v1/sessions", json={"network": "open"}).json()["id"]
        client.delete(f"/v1/sessions/{first}")
        yield daemon


@pytest.fixture(scope="module")
def run(daemon: Daemon) -> Callable[..., Scenarios]:
    """Runs a program of scenarios in a language with the published SDK; they leave no sandbox."""

    def run(language: str, program: str = "scenarios") -> Scenarios:
        python = SDKS / "bin/python"
        node = shutil.which("node")
        if not (SDKS / ".installed").exists() or (
            language == "javascript" and not (SDKS / "node_modules/e2b").exists()
        ):
            pytest.skip("needs E2B's SDKs: `make .venv-e2b/.installed`, with npm for JavaScript's")
        command = {
            "python": [str(python), str(PROGRAMS / f"{program}.py"), "sync"],
            "python, async": [str(python), str(PROGRAMS / f"{program}.py"), "async"],
            "javascript": [str(node), str(PROGRAMS / f"{program}.cjs")],
        }[language]
        url = daemon.wait_url()
        ours = ("E2B", "PYTHON", "NODE", "SANDKASTEN")
        variables = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        variables |= {"E2B_API_URL": url, "E2B_SANDBOX_URL": url, "E2B_API_KEY": KEY, "NO_PROXY": "127.0.0.1"}
        variables["NODE_PATH"] = str(SDKS / "node_modules")
        done = subprocess.run(
            command,
            env=variables,
            cwd=daemon.data_dir,
            capture_output=True,
            text=True,
            timeout=patience(_SECONDS),
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        with daemon.client() as client:
            assert client.get("/v1/sessions").json() == []
        return {value["name"]: value["value"] for value in map(json.loads, done.stdout.splitlines())}

    return run
