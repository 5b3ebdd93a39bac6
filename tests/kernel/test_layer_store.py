"""The store of layers without an nsinit around it: what it makes of records, drafts and neighbours."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import TypeVar

import pytest

from nsinit.scheduler import Job, Scheduler, Wait
from nsinit.storage.layers import LayerDirectory
from nsinit.storage.paths import Layout
from nsinit.wire.verdict import Counts, Unpacked

pytestmark = [pytest.mark.kernel, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]

T = TypeVar("T")
HEX = "1" * 64
DIGEST = f"sha256:{HEX}"


@pytest.fixture
def store(tmp_path: Path) -> LayerDirectory:
    layout = Layout(str(tmp_path))
    layout.make_store()
    return LayerDirectory(layout)


def done(work: Generator[Wait, bool, T]) -> T:
    """Run a job to its end, and return its result."""
    results: list[T] = []
    scheduler = Scheduler()

    def job() -> Job:
        results.append((yield from work))

    scheduler.spawn(job())
    while scheduler.jobs:
        scheduler.round()
    scheduler.close()
    return results[0]


def keep_one(store: LayerDirectory) -> None:
    """Put an empty layer into the store, whose top somebody has opened to all."""
    draft = store.make_draft()
    os.chown(draft.files_fd, 1234, 1234)
    os.chmod(draft.files_fd, 0o777)
    done(store.keep(draft, Unpacked(Counts(0, 0, 0), HEX, (), ())))
    draft.close()


def test_the_top_of_a_layer_is_closed_whatever_the_unpacker_has_done(store: LayerDirectory) -> None:
    """A layer gets its name with a top that is root's, and closed to all others."""
    keep_one(store)
    found = os.stat(store.layout.layer_files(DIGEST))
    assert (found.st_uid, found.st_gid, found.st_mode & 0o7777) == (0, 0, 0o700)
