"""What a sandbox's death is put down to: counters of a directory as a cgroup has them, and a process that dies."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from nsinit.protocol import Identity
from sandkasten.actors.actor import Ref
from sandkasten.actors.sandbox_watch import SandboxWatch
from sandkasten.actors.zygote import Sandbox
from sandkasten.runtime.cgroup_stats import CgroupStats
from sandkasten.runtime.fds import OwnedFd

ID = "a" * 24


@pytest.fixture
def init() -> Iterator[subprocess.Popen[bytes]]:
    """In the place of PID 1."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


async def _ignore() -> None:
    """Nobody has to hear of the death."""


@pytest.mark.parametrize(
    ("before", "at_last", "is_memory"),
    [(0, 0, False), (0, 1, True), (3, 3, False), (3, 4, True), (0, -1, False), (-1, 0, False), (-1, 2, True)],
)
async def test_a_death_is_for_want_of_memory_if_the_kernel_killed_since(
    tmp_path: Path, init: subprocess.Popen[bytes], *, before: int, at_last: int, is_memory: bool
) -> None:
    """Kills that were known when the sandbox was taken over were survived; an unknown count explains nothing."""
    (tmp_path / ID).mkdir()
    (tmp_path / ID / "memory.events").write_text(f"low 0\noom 1\noom_kill {before}\n")
    stats = CgroupStats({"unified": str(tmp_path), "memory": str(tmp_path)}, ID)
    watch = SandboxWatch(ID, Ref("zygote"), stats)
    try:
        identity = Identity(init.pid, 1, 1, 0)
        watch.hold(Sandbox(identity, OwnedFd(os.pidfd_open(init.pid)), "none", None, {}))
        assert not watch.ran_out_of_memory(at_last)
        init.kill()
        with trio.fail_after(10):
            await watch.watch_init(_ignore)
        assert watch.ran_out_of_memory(at_last) is is_memory
    finally:
        watch.close()
        stats.close()
