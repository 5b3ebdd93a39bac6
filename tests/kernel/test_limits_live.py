"""Limits that change while something runs, in whichever cgroup mode runs here and in v1 alone: all of them or none."""

from __future__ import annotations

import errno
import select
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nsinit.cgroup import limits as limit_files
from nsinit.cgroup.session import SessionCgroup
from nsinit.cgroup.tree import Tree
from nsinit.wire.protocol import Failed, Limits, Ok, Ready, SetLimits
from sandkasten.counters.cgroup import CgroupStats
from tests.kernel.harness import (
    FORK_UNTIL_REFUSED,
    PATIENCE_S,
    ROOMY,
    Nsinit,
    Sandbox,
    data_directory,
    host_plan,
    running,
    wait_until,
)
from tests.kernel.test_cgroups_v1 import why_no_v1, without_v2
from tests.waiting import patience

FILES = (
    *("memory.max", "memory.swap.max", "cpu.max", "pids.max"),
    *("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "cpu.cfs_period_us", "cpu.cfs_quota_us"),
)
START = replace(ROOMY, memory_bytes=160 << 20, cpu_quota_us=100_000)
HOLD = 'python3 -c \'held = bytearray(96 << 20); open("/tmp/held", "w"); import signal; signal.pause()\' &'


@pytest.fixture(params=["as it is", "v1 alone"])
def server(request: pytest.FixtureRequest) -> Iterator[Nsinit]:
    if request.param == "v1 alone" and (reason := why_no_v1()):
        pytest.skip(reason)
    wrapper = without_v2() if request.param == "v1 alone" else ()
    with data_directory() as data_dir, running(data_dir, wrapper=wrapper) as nsinit:
        yield nsinit


def _cgroup(server: Nsinit, box: Sandbox) -> SessionCgroup:
    assert isinstance(server.ready, Ready)
    return SessionCgroup(Tree(server.ready.cgroup_mode, server.ready.cgroup_dirs), box.session_id)


def _in_force(server: Nsinit, box: Sandbox) -> dict[str, str]:
    paths = {Path(directory, name) for directory in _cgroup(server, box).directories for name in FILES}
    return {path.name: path.read_text().strip() for path in paths if path.exists()}


def _change(server: Nsinit, box: Sandbox, limits: Limits) -> Any:
    return server.ask(SetLimits, session_id=box.session_id, limits=limits)[0]


def _hold(server: Nsinit, box: Sandbox) -> None:
    box.run(HOLD)
    memory = {"v2": "memory.current"}.get(_cgroup(server, box).tree.mode, "memory.usage_in_bytes")
    path = Path(_cgroup(server, box).directory("memory"), memory)
    wait_until(lambda: int(path.read_text()) > 96 << 20, "the memory is held")


def test_a_limit_below_what_is_in_use_is_refused_and_nothing_changes(server: Nsinit) -> None:
    """A memory limit below the use is refused with all limits of the same request; nothing is killed; a limit above the
    use is taken.
    """
    box = server.build(host_plan(limits=START))
    _hold(server, box)
    before = _in_force(server, box)
    answer = _change(server, box, Limits(memory_bytes=48 << 20, pids=20, cpu_quota_us=30_000))
    assert isinstance(answer, Failed), answer
    assert (answer.stage, answer.errno) == ("set limits", errno.EBUSY)
    assert _in_force(server, box) == before
    assert box.run("pgrep -c python3").out == "1\n"
    assert isinstance(_change(server, box, Limits(memory_bytes=140 << 20, pids=20, cpu_quota_us=30_000)), Ok)
    after = _in_force(server, box)
    changed = {name for name in after if after[name] != before[name]}
    assert changed == before.keys() - {"cpu.cfs_period_us", "memory.swap.max"}
    assert box.teardown().oom_kills == 0


def test_files_that_were_only_read_and_written_make_room(server: Nsinit) -> None:
    """Pages of files that the kernel can reclaim do not make a lower limit refused."""
    box = server.build(host_plan(limits=START))
    box.run("head -c 100000000 /dev/zero > ~/big; sync ~/big; cat ~/big > /dev/null")
    answer = _change(server, box, replace(START, memory_bytes=48 << 20))
    assert isinstance(answer, Ok), answer
    assert box.run("stat -c %s ~/big").out == "100000000\n"
    assert box.teardown().oom_kills == 0


def test_a_change_that_takes_too_long_is_given_up_and_undone(server: Nsinit) -> None:
    """A change whose deadline has passed is undone, however far the writing process came."""
    box = server.build(host_plan(limits=START))
    before = _in_force(server, box)
    work = limit_files.lower(_cgroup(server, box), Limits(memory_bytes=48 << 20, pids=20, cpu_quota_us=30_000))
    next(work)
    work.send(False)
    with pytest.raises(TimeoutError):
        work.send(True)
    assert _in_force(server, box) == before
    box.teardown()


def test_raising_lets_go_what_was_held_back(server: Nsinit) -> None:
    """A loop that was throttled runs on while it is being raised, and forks that were refused work."""
    box = server.build(host_plan(limits=replace(START, pids=16, cpu_quota_us=20_000)))
    assert isinstance(server.ready, Ready)
    stats = CgroupStats(server.ready.cgroup_dirs, box.session_id)
    box.run("while [ ! -e /tmp/stop ]; do :; done & :")
    wait_until(lambda: (stats.read_all().cpu_throttled_usec or 0) > 0, "the loop was throttled")
    assert isinstance(_change(server, box, replace(START, pids=16, cpu_quota_us=400_000)), Ok)
    before = stats.read_all()
    wait_until(lambda: stats.read_usage().cpu_usec > (before.cpu_usage_usec or 0) + 300_000, "the loop runs")
    assert box.run("touch /tmp/stop").code == 0
    assert box.python(FORK_UNTIL_REFUSED) == "EAGAIN True"
    assert isinstance(_change(server, box, replace(START, pids=64, cpu_quota_us=400_000)), Ok)
    assert box.python(FORK_UNTIL_REFUSED) == "EAGAIN False"
    after = stats.read_all()
    assert (after.cpu_throttled or 0) - (before.cpu_throttled or 0) <= 2
    assert (after.cpu_periods or 0) >= (after.cpu_throttled or 0) > 0
    assert after.pids_peak is None or after.pids_peak == 64
    assert (after.pids_limit, after.cpu_limit) == (64, 4.0)
    stats.close()
    box.teardown()


def _fake(directory: Path, **files: str) -> SessionCgroup:
    """A v2 cgroup of plain files, for what the kernel at hand may not have."""
    (directory / "s").mkdir()
    usual = {"memory.max": "max", "memory.current": "0", "memory.stat": "", "cpu.max": "max 100000", "pids.max": "max"}
    for name, text in {**usual, **files}.items():
        (directory / "s" / name).write_text(text + "\n")
    return SessionCgroup(Tree("v2", dict.fromkeys(("memory", "cpu", "pids", "unified"), str(directory))), "s")


def _run(change: Callable[[], Any]) -> None:
    for _ in change():
        raise AssertionError("nothing to wait for")


def test_v2_refuses_what_it_would_have_to_kill_for(tmp_path: Path) -> None:
    """A limit that the kernel could only keep by killing is refused; memory that it can reclaim does not count."""
    cgroup = _fake(
        tmp_path, **{"memory.max": str(256 << 20), "memory.current": str(200 << 20)},
        **{"memory.stat": f"anon 1\ninactive_file {60 << 20}\nactive_file {30 << 20}\nslab_reclaimable {10 << 20}"},
    )  # fmt: skip
    with pytest.raises(OSError, match="uses more memory") as refused:
        _run(lambda: limit_files.lower(cgroup, replace(ROOMY, memory_bytes=(100 << 20) - 1)))
    assert refused.value.errno == errno.EBUSY
    work = limit_files.lower(cgroup, replace(ROOMY, memory_bytes=100 << 20))
    wait = next(work)
    assert wait.fd is not None
    assert select.select([wait.fd], [], [], patience(PATIENCE_S))[0]
    with pytest.raises(StopIteration):
        work.send(True)
    assert (tmp_path / "s/memory.max").read_text().split() == [str(100 << 20)]


def test_what_was_written_before_a_refusal_is_written_back(tmp_path: Path) -> None:
    """The second file refuses, and the first is as it was."""
    cgroup = _fake(tmp_path, **{"memory.max": str(32 << 20)})
    (tmp_path / "s/cpu.max").unlink()
    (tmp_path / "s/cpu.max").symlink_to("/proc/self/oom_score_adj")  # refuses with EINVAL what is no small number
    before = (tmp_path / "s/memory.max").read_text().split()
    with pytest.raises(OSError) as refused:
        limit_files.raise_to(cgroup, replace(ROOMY, memory_bytes=48 << 20))
    assert refused.value.errno == errno.EINVAL
    assert (tmp_path / "s/memory.max").read_text().split() == before
    assert (tmp_path / "s/pids.max").read_text() == "max\n"
