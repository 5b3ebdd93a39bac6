"""One daemon for each file of tests, and the command as a person of this machine has it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cli.command import Command
from tests.e2e.daemon import Daemon, running_daemon
from tests.waiting import patience


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon with a key of its own making, in its data directory."""
    with (
        tempfile.TemporaryDirectory(prefix="sandkasten-test-") as directory,
        running_daemon(Path(directory), SANDKASTEN_API_KEY="") as daemon,
    ):
        daemon.wait_url()
        yield daemon


@pytest.fixture(scope="module")
def command(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """The command of a person with an empty home, that finds the daemon by its data directory."""
    return Command.of(tmp_path_factory.mktemp("home"), daemon.data_dir)


@pytest.fixture
def api(daemon: Daemon) -> Iterator[httpx.Client]:
    """HTTP to the same daemon, for what a test needs beforehand; every session is gone afterwards."""
    headers = {"Authorization": f"Bearer {(daemon.data_dir / 'api-key').read_text().strip()}"}
    with httpx.Client(base_url=daemon.wait_url(), headers=headers, timeout=patience(60.0)) as client:
        yield client
        for each in client.get("/v1/sessions").json():
            client.delete(f"/v1/sessions/{each['id']}")


@pytest.fixture
def session(api: httpx.Client) -> str:
    """The id of a session with a label."""
    return str(api.post("/v1/sessions", json={"labels": {"kind": "shared"}}).json()["id"])
