"""The size of the machine as a session is told of it: the texts, and the choice of processors."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from nsinit.sandbox.views import DIRECTORY, MachineSize, rewrite, write
from nsinit.server.processors import Processors, bind
from nsinit.wire.protocol import Limits

MEMINFO = b"MemTotal:       24684444 kB", b"Cached:          1464816 kB", b"HugePages_Total:       3"
CPUINFO = b"processor\t: 0\nmodel\t: a", b"processor\t: 1\nmodel\t: b", b"Hardware\t: board"
CALM = (b"cpu  0 0 0 40 0", b"cpu0 0 0 0 10 0", b"cpu1 0 0 0 30 0", b"intr 0", b"btime 17")
SIZE = MachineSize((*MEMINFO, b"Hugepagesize:       2048 kB"), CPUINFO, CALM)


def test_the_views_say_what_the_limits_allow() -> None:
    """All of the memory is free, and a processor that programs do not run on is not there."""
    views = SIZE.views(64 << 20, {1})
    assert views["meminfo"].splitlines() == [
        b"MemTotal:          65536 kB",
        b"Cached:                0 kB",
        b"HugePages_Total:       0",
        b"Hugepagesize:       2048 kB",
    ]
    assert views["cpuinfo"] == b"processor\t: 1\nmodel\t: b\n\nHardware\t: board\n\n"
    assert views["stat"] == b"cpu  0 0 0 30 0\ncpu1 0 0 0 30 0\nintr 0\nbtime 17\n"
    assert (views["online"], SIZE.views(1, {2, 0, 1})["online"]) == (b"1\n", b"0,1,2\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="files of root's")
def test_only_the_files_that_were_made_are_written_again(tmp_path: Path) -> None:
    """Neither a file of somebody else in that place, nor what a link there points to."""
    (tmp_path / DIRECTORY).mkdir(parents=True)
    root_fd = os.open(tmp_path, os.O_PATH)
    view = tmp_path / DIRECTORY / "meminfo"
    try:
        write(root_fd, {"meminfo": b"long enough"})
        rewrite(root_fd, {"meminfo": b"short"})
        assert view.read_bytes() == b"short"
        os.chown(view, 1000, 1000)
        with pytest.raises(PermissionError):
            rewrite(root_fd, {"meminfo": b"other"})
        view.unlink()
        view.symlink_to("victim")
        (view.parent / "victim").write_bytes(b"untouched")
        with pytest.raises(OSError, match="symbolic links"):
            rewrite(root_fd, {"meminfo": b"other"})
        assert (view.parent / "victim").read_bytes() == b"untouched"
    finally:
        os.close(root_fd)


def test_a_process_is_bound_and_one_that_has_ended_is_fine() -> None:
    """As the session's own PID 1 may have."""
    one = frozenset(sorted(os.sched_getaffinity(0))[:1])
    with subprocess.Popen(["sleep", "1000"]) as process:
        bind(process.pid, one)
        assert os.sched_getaffinity(process.pid) == one
        process.kill()
    bind(process.pid, one)


def _limits(cores: float) -> Limits:
    return Limits(1 << 20, 8, int(cores * 100_000), 100_000)


def test_sessions_spread_over_the_processors() -> None:
    """Each gets as many as its limit fills, rounded up, of those with the fewest sessions; the end of a session makes
    room."""
    processors = Processors(frozenset(range(4)))
    assert [sorted(processors.take(name, _limits(0.5))) for name in "abcd"] == [[0], [1], [2], [3]]
    processors.forget("c")
    assert processors.take("e", _limits(1)) == {2}
    assert processors.take("f", _limits(100)) == {0, 1, 2, 3}
    assert processors.of("c") == frozenset()


def test_a_change_of_the_limit_keeps_what_it_can() -> None:
    """Fewer or more of the same processors; the same number is the same processors."""
    processors = Processors(frozenset(range(4)))
    processors.note("busy", frozenset({0, 1}))
    assert processors.take("a", _limits(1)) == {2}
    assert processors.take("a", _limits(0.1)) == {2}
    assert processors.take("a", _limits(1.5)) == {2, 3}
    assert len(processors.take("a", _limits(1)) & {2, 3}) == 1
