"""Fixtures of kernel tests: a supervisor with a data directory of its own, or a runner in namespaces of its own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from nsinit import spawn
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import open_supervisor
from sandkasten.config import Config, ServerSettings, WorkspaceSettings
from sandkasten.images.catalog import Catalog
from sandkasten.images.host import ensure_host_image
from tests.kernel.harness import Nsinit, data_directory, running
from tests.kernel.runner_harness import SHELLS, Client, Sandbox, open_sandbox
from tests.kernel.seed import planted


@pytest.fixture(scope="session", autouse=True)
def seed() -> Iterator[None]:
    """Start each nsinit of this process from a seed (`tests/kernel/seed.py`)."""
    with planted(spawn.spawn_python) as start, pytest.MonkeyPatch.context() as patch:
        patch.setattr(spawn, "spawn_python", start)
        yield


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """A data directory that is gone afterwards, whatever its files' owners."""
    with tempfile.TemporaryDirectory(prefix="sandkasten-test-") as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image store of a data directory after its first start."""
    directory = tmp_path_factory.mktemp("store")
    ensure_host_image(Catalog(directory))
    return directory / "images"


@pytest.fixture
def config(data_dir: Path, images: Path) -> Config:
    """The defaults, small: no pool sandboxes, so that a test sees what it caused and nothing else. Workspaces without a
    quota are plain directories, so that a test sees their files. The `host` image is there: a new one would take a
    start 0.3 s of computing, and is a link to each file here."""
    _link_tree(images, data_dir / "images")
    return Config(
        data_dir=data_dir, server=ServerSettings(pool_sandboxes=0), workspace=WorkspaceSettings(default_quota_mb=0)
    )


def _link_tree(source: Path, target: Path) -> None:
    for place, directories, files in os.walk(source):
        there = target / os.path.relpath(place, source)
        there.mkdir()
        for name in [*files, *(each for each in directories if os.path.islink(f"{place}/{each}"))]:
            os.link(f"{place}/{name}", there / name, follow_symlinks=False)
        status = os.stat(place)
        os.chown(there, status.st_uid, status.st_gid)
        there.chmod(status.st_mode & 0o7777)


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
