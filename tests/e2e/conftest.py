"""One daemon for the tests that only use it; tests about its own life start theirs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.archives import lent_data_dir
from tests.e2e.daemon import Daemon, running_daemon


@pytest.fixture(scope="session", autouse=True)
def seeded(command_seed: None) -> None:
    """Start daemons and verbs from seeds."""


@pytest.fixture
def data_dir(images: Path) -> Iterator[Path]:
    with lent_data_dir(images) as directory:
        yield directory


@pytest.fixture(scope="module")
def daemon(images: Path) -> Iterator[Daemon]:
    with lent_data_dir(images) as directory, running_daemon(directory) as daemon:
        daemon.wait_url()
        yield daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[httpx.Client]:
    """A client of the shared daemon; every session it made is gone afterwards."""
    with daemon.client() as client:
        yield client
        for session in client.get("/v1/sessions").json():
            client.delete(f"/v1/sessions/{session['id']}")
