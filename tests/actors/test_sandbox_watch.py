"""Causes of a sandbox's death, from counters of a directory as a cgroup has them, and a process that dies."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from nsinit.wire.protocol import FindOomKills, Identity, OomKills
from sandkasten.actors.core import Actor, Ref
from sandkasten.actors.services.nsinit import Call, Sandbox
from sandkasten.actors.session.watch import SandboxWatch
from sandkasten.counters.cgroup import CgroupStats
from sandkasten.links.fds import OwnedFd, wait_ended
from tests.waiting import patience

ID = "a" * 24


@pytest.fixture
def init() -> Iterator[subprocess.Popen[bytes]]:
    """In the place of PID 1."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


another_init = init


async def _ignore() -> None:
    """Nobody has to hear of the death."""


@pytest.mark.parametrize(
    ("before", "at_last", "is_memory"),
    [(0, 0, False), (0, 1, True), (3, 3, False), (3, 4, True), (0, -1, False), (-1, 0, False), (-1, 2, True)],
)
async def test_a_death_is_for_want_of_memory_if_the_kernel_killed_since(
    tmp_path: Path, init: subprocess.Popen[bytes], *, before: int, at_last: int, is_memory: bool
) -> None:
    """Kills that were known when the sandbox was taken over were survived; an unknown count explains nothing. Here
    nobody has a log of the kernel that would know more."""
    assert await _is_memory(tmp_path, init, Ref("nsinit"), before=before, at_last=at_last) is is_memory


class _Log(Actor):
    """In the place of what asks nsinit for the kernel's log."""

    def __init__(self, ref: Ref, told: OomKills) -> None:
        super().__init__(ref)
        self._told = told

    async def handle(self, message: Call[OomKills]) -> OomKills:
        assert message.request == FindOomKills(0, ID)
        return self._told


@pytest.mark.parametrize(
    ("kills", "is_init_named", "is_memory"), [(2, False, False), (2, True, True), (1, False, True), (0, False, True)]
)
async def test_the_kernels_log_says_whom_it_killed(
    tmp_path: Path, init: subprocess.Popen[bytes], *, kills: int, is_init_named: bool, is_memory: bool
) -> None:
    """A death from outside right after a command ran out of memory is not put down to that. Of a kill that the log does
    not tell of, the time still does."""
    pids = (init.pid + 1, *([init.pid] if is_init_named else [])) if kills else ()
    ref = Ref("nsinit")
    async with trio.open_nursery() as nursery:
        await nursery.start(_Log(ref, OomKills(1, "python3", 0.1, kills, pids)).run)
        assert await _is_memory(tmp_path, init, ref, before=0, at_last=2) is is_memory
        nursery.cancel_scope.cancel()


async def _is_memory(place: Path, init: subprocess.Popen[bytes], nsinit: Ref, *, before: int, at_last: int) -> bool:
    (place / ID).mkdir()
    (place / ID / "memory.events").write_text(f"low 0\noom 1\noom_kill {before}\n")
    stats = CgroupStats({"unified": str(place), "memory": str(place)}, ID)
    watch = SandboxWatch(ID, nsinit, stats)
    try:
        identity = Identity(init.pid, 1, 1, 0)
        watch.hold(Sandbox(identity, OwnedFd(os.pidfd_open(init.pid)), "none", None, {}))
        assert not await watch.ran_out_of_memory(at_last)
        init.kill()
        with trio.fail_after(patience(10)):
            await watch.watch_init(_ignore)
        return await watch.ran_out_of_memory(at_last)
    finally:
        watch.close()
        stats.close()


async def test_an_end_is_not_taken_for_that_of_the_process_whose_pidfd_has_the_number_now(
    init: subprocess.Popen[bytes], another_init: subprocess.Popen[bytes]
) -> None:
    """A pidfd was waited for and closed here, and somebody else has the same open file. Then its process ends."""
    theirs = OwnedFd(os.pidfd_open(another_init.pid))
    closed = OwnedFd(os.dup(theirs.fileno()))
    with trio.move_on_after(0.01):
        await wait_ended(closed)
    number = closed.fileno()
    closed.close()
    with theirs, OwnedFd(os.pidfd_open(init.pid)) as pidfd, trio.fail_after(patience()):
        assert pidfd.fileno() == number
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_ended, pidfd)
            await trio.testing.wait_all_tasks_blocked()
            another_init.kill()
            another_init.wait()  # POLLHUP comes when it is reaped
            await trio.sleep(0.05)
            assert len(nursery.child_tasks) == 1
            init.kill()
