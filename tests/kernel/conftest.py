"""Fixtures of kernel tests: a supervisor with a data directory of its own, or a runner in namespaces of its own."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import open_supervisor
from sandkasten.config import Config, ServerSettings, WorkspaceSettings
from tests.archives import lent_tree
from tests.kernel.harness import Nsinit, data_directory, running
from tests.kernel.runner_harness import SHELLS, Client, Sandbox, open_sandbox


@pytest.fixture(scope="session", autouse=True)
def seeded(nsinit_seed: None) -> None:
    """Start each nsinit from a seed."""


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """A data directory that is gone afterwards, whatever its files' owners."""
    with tempfile.TemporaryDirectory(prefix="sandkasten-test-") as directory:
        yield Path(directory)


@pytest.fixture
def config(data_dir: Path, images: Path) -> Iterator[Config]:
    """The defaults, small: no pool sandboxes, so that a test sees what it caused and nothing else. Workspaces without a
    quota are plain directories, so that a test sees their files."""
    with lent_tree(images, data_dir / "images"):
        yield Config(
            data_dir=data_dir, server=ServerSettings(pool_sandboxes=0), workspace=WorkspaceSettings(default_quota_mb=0)
        )


@pytest.fixture
async def supervisor(config: Config) -> AsyncIterator[LocalSupervisor]:
    async with open_supervisor(config) as opened:
        yield opened


@pytest.fixture(scope="module")
def shared() -> Iterator[Nsinit]:
    """One nsinit for all tests of a module: its start is most of what each would cost, the more where all is slow."""
    with data_directory() as data_dir, running(data_dir) as nsinit:
        yield nsinit


@pytest.fixture
def server(shared: Nsinit) -> Iterator[Nsinit]:
    """The shared nsinit, without what other tests left running. Some modules have another one of this name."""
    yield shared
    shared.remove_sandboxes()


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    """A runner that must outlive the test."""
    with open_sandbox() as running:
        yield running
        assert running.is_alive()


@pytest.fixture(params=SHELLS)
def client(request: pytest.FixtureRequest, sandbox: Sandbox) -> Client:
    """A connection to a sandbox whose default shell is each of those there are."""
    return sandbox.shell(request.param)
