"""A supervisor on the real kernel, with a data directory of its own."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import open_supervisor
from sandkasten.config import Config, Server


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """A data directory that is gone afterwards, whatever its files' owners."""
    with tempfile.TemporaryDirectory(prefix="sandkasten-test-") as directory:
        yield Path(directory)


@pytest.fixture
def config(data_dir: Path) -> Config:
    """The defaults, small: no blank vessels, so that a test sees what it caused and nothing else."""
    return Config(data_dir=data_dir, server=Server(vessels=0))


@pytest.fixture
async def supervisor(config: Config) -> AsyncIterator[LocalSupervisor]:
    async with open_supervisor(config) as opened:
        yield opened
