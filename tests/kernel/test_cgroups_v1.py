"""A machine with cgroup v1 alone: nsinit starts where no v2 hierarchy is mounted, and all that limits do still holds.

The mount is missing in nsinit's own mount namespace only, so nothing changes for the machine.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from nsinit.cgroup.tree import REQUIRED
from nsinit.kernel.mountinfo import Mount, parse_mountinfo
from nsinit.wire.protocol import (
    Adopt,
    Adopted,
    Failed,
    FindOomKills,
    MakeRunCgroup,
    Ok,
    Ready,
    RemoveRunCgroup,
    RunCgroupMade,
)
from runner.wire.protocol import BirthCgroup, ExecReply, RunProgram
from sandkasten.counters.cgroup import CgroupStats
from tests.kernel.harness import (
    FORK_UNTIL_REFUSED,
    PATIENCE_S,
    ROOMY,
    Nsinit,
    check_counters,
    check_freezing,
    data_directory,
    host_plan,
    running,
    wait_until,
)
from tests.waiting import patience

SMALL = replace(ROOMY, memory_bytes=48 << 20)
HOG = "held = [bytearray(1 << 20) for _ in range(400)]"
_HIDE = 'while [ "$1" != -- ]; do /usr/bin/umount "$1" || exit 1; shift; done; shift; exec "$@"'


def _mounts() -> tuple[Mount, ...]:
    return parse_mountinfo(Path("/proc/self/mountinfo").read_text())


def why_no_v1() -> str | None:
    v1 = {name for mount in _mounts() if mount.fstype == "cgroup" for name in mount.super_options}
    missing = [name for name in REQUIRED if name not in v1]
    if missing:
        return f"no v1 hierarchy for {', '.join(missing)} is mounted"
    tools = [name for name in ("unshare", "umount") if shutil.which(name, path="/usr/bin") is None]
    return f"needs {', '.join(tools)}" if tools else None


pytestmark = pytest.mark.skipif(why_no_v1() is not None, reason=why_no_v1() or "")


def without_v2() -> tuple[str, ...]:
    points = [mount.point for mount in reversed(_mounts()) if mount.fstype == "cgroup2"]
    return "/usr/bin/unshare", "-m", "--propagation", "private", "/bin/sh", "-c", _HIDE, "sh", *points, "--"


@pytest.fixture
def server() -> Iterator[Nsinit]:
    with data_directory() as data_dir, running(data_dir, wrapper=without_v2()) as nsinit:
        yield nsinit


def _directories(server: Nsinit, session_id: str) -> list[Path]:
    assert isinstance(server.ready, Ready)
    return [Path(directory, session_id) for directory in set(server.ready.cgroup_dirs.values())]


def test_nsinit_finds_v1_alone(server: Nsinit) -> None:
    """The mode is v1, and no directory is in a v2 hierarchy."""
    assert isinstance(server.ready, Ready)
    assert server.ready.cgroup_mode == "v1"
    assert set(server.ready.cgroup_dirs) >= set(REQUIRED)
    assert "unified" not in server.ready.cgroup_dirs


def test_limits_are_written_and_every_process_is_below_them(server: Nsinit) -> None:
    """PID 1, the shell and what it starts are members in each hierarchy."""
    box = server.build(host_plan(limits=replace(SMALL, pids=33, cpu_quota_us=50_000)))
    box.run("sleep 1000 &")
    files = {"memory.limit_in_bytes": 48 << 20, "pids.max": 33, "cpu.cfs_quota_us": 50_000}
    paths = [each / name for each in _directories(server, box.session_id) for name in files]
    found = {path.name: int(path.read_text()) for path in paths if path.exists()}
    assert found == files
    members = [(each / "cgroup.procs").read_text().split() for each in _directories(server, box.session_id)]
    assert {len(pids) for pids in members} == {3}
    assert box.run("cut -d: -f3 /proc/self/cgroup | sort -u").out.split()[0] == "/"
    box.teardown()


def test_a_memory_hog_dies_alone_and_counters_are_read(server: Nsinit) -> None:
    """The hog is killed, the event fires, the shell lives on; the teardown tells kills, processor time and peak."""
    box = server.build(host_plan(limits=SMALL))
    assert box.run(f'python3 -c "{HOG}"').code == 137
    poller = select.poll()
    poller.register(box.event_fd, select.POLLIN)
    assert box.built.oom_event == "eventfd"
    assert poller.poll(patience(PATIENCE_S) * 1000)
    assert box.run("echo lives").out == "lives\n"
    torn_down = box.teardown()
    assert torn_down.oom_kills == 1
    assert torn_down.cpu_usec > 0
    assert 40 << 20 < torn_down.memory_peak_bytes <= 48 << 20


def test_forking_beyond_the_pids_limit_fails_with_eagain(server: Nsinit) -> None:
    """The limit holds back the session alone."""
    box = server.build(host_plan(limits=replace(ROOMY, pids=16)))
    assert box.python(FORK_UNTIL_REFUSED) == "EAGAIN True"
    box.teardown()


def test_a_teardown_ends_a_fork_bomb_and_leaves_nothing(server: Nsinit) -> None:
    """A fork bomb ends with PID 1, as v1 has no `cgroup.kill`."""
    box = server.build(host_plan(limits=replace(ROOMY, pids=40)))
    box.run("bomb() { while :; do bomb & done; }; bomb 2>/dev/null & :", timeout_ms=2000)
    (pids,) = [each for each in _directories(server, box.session_id) if (each / "pids.current").exists()]
    wait_until(lambda: int((pids / "pids.current").read_text()) > 30, "the bomb went off")
    assert box.teardown().leftovers == ()
    assert server.traces(box.session_id) == []
    assert server.scan() == {}
    wait_until(lambda: server.processes() == set(), "every process ended")


def test_another_nsinit_finds_and_removes_a_session(server: Nsinit) -> None:
    """After a crash the v1 directories alone tell which process is PID 1, and whom to kill."""
    box = server.build(host_plan())
    assert isinstance(server.ready, Ready)
    node_group = Path(server.ready.cgroup_dirs["memory"]).name.removeprefix("sandkasten-")
    server.kill()
    with running(server.data_dir, node_group, wrapper=without_v2()) as successor:
        answer, fds = successor.ask(Adopt, session_id=box.session_id)
        assert isinstance(answer, Adopted), answer
        for fd in fds:
            os.close(fd)
        assert answer.identity == box.built.identity
        box.run("sleep 1000 &")
        box.release()
        assert successor.teardown(box.session_id).leftovers == ()
        assert successor.traces(box.session_id) == []


def test_a_frozen_session_stands_still_and_goes_on_as_it_was(server: Nsinit) -> None:
    """All of a frozen session stands still, computing or sleeping; thawed, it goes on; frozen, it can be torn down."""
    check_freezing(server)


def test_the_counters_the_daemon_reads_are_there(server: Nsinit) -> None:
    """Limits, use, kills and refusals, by the reader that stats and command results stand on."""
    check_counters(server, SMALL)


def _group(server: Nsinit, session_id: str, name: str) -> int:
    """Make a group and return its descriptor."""
    answer, fds = server.ask(MakeRunCgroup, session_id=session_id, name=name)
    assert isinstance(answer, RunCgroupMade), answer
    assert answer.membership == "join"
    (fd,) = fds
    return fd


def _pids_directory(server: Nsinit, session_id: str) -> Path:
    assert isinstance(server.ready, Ready)
    return Path(server.ready.cgroup_dirs["pids"], session_id)


@contextmanager
def _joined(group_fd: int, command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A powerless process that joined a group by its descriptor, then runs a shell command."""
    join = f'echo 0 >&{group_fd} && exec {group_fd}>&- && echo joined && exec /bin/sh -c "$0"'
    process = subprocess.Popen(
        ["/bin/bash", "-c", join, command], pass_fds=[group_fd], user=65534, extra_groups=[], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"joined\n"
        yield process
    finally:
        process.kill()
        process.communicate()
        os.close(group_fd)


def test_a_powerless_process_joins_a_group_and_is_killed_with_it(server: Nsinit) -> None:
    """A process joins by the descriptor alone; the run cgroup is below the session's pids directory, whose count
    includes it.
    """
    box = server.build(host_plan())
    directory = _pids_directory(server, box.session_id)
    box.run("true")
    before = int((directory / "pids.current").read_text())
    with _joined(_group(server, box.session_id, "p-1"), "exec sleep 1000") as process:
        assert (directory / "p-1/cgroup.procs").read_text().split() == [str(process.pid)]
        assert int((directory / "pids.current").read_text()) == before + 1
        assert isinstance(server.ask(RemoveRunCgroup, session_id=box.session_id, name="p-1")[0], Failed)
        assert process.poll() is None
        assert isinstance(server.ask(RemoveRunCgroup, session_id=box.session_id, name="p-1", kill=True)[0], Ok)
        assert process.wait(patience(PATIENCE_S)) == -9
    assert not (directory / "p-1").exists()
    box.teardown()


def test_pid_1_runs_a_program_in_a_group(server: Nsinit) -> None:
    """The process joins by the descriptor before it becomes the program."""
    box = server.build(host_plan())
    fd = _group(server, box.session_id, "p-1")
    program = RunProgram("r1", argv=("grep", ":pids:", "/proc/self/cgroup"), group=BirthCgroup("p-1", "join"))
    reply, out, _ = box.request(program, fd)
    os.close(fd)
    assert isinstance(reply, ExecReply), reply
    assert out.endswith(b":pids:/p-1\n")
    box.teardown()


def test_a_fork_bomb_in_a_group_is_killed_with_it(server: Nsinit) -> None:
    """Processes of a fork bomb are killed one by one, while no new process can be born in the run cgroup."""
    box = server.build(host_plan(limits=replace(ROOMY, pids=40)))
    directory = _pids_directory(server, box.session_id)
    with _joined(_group(server, box.session_id, "bomb"), "b() { while :; do b & done; }; b 2>/dev/null"):
        wait_until(lambda: int((directory / "pids.current").read_text()) > 30, "the bomb went off")
        assert isinstance(server.ask(RemoveRunCgroup, session_id=box.session_id, name="bomb", kill=True)[0], Ok)
        assert not (directory / "bomb").exists()
    assert box.run("echo lives").out == "lives\n"
    box.teardown()


def test_a_teardown_takes_groups_and_their_members(server: Nsinit) -> None:
    """After a teardown no hierarchy holds a run cgroup of the session or a process of one."""
    box = server.build(host_plan())
    os.close(_group(server, box.session_id, "empty"))
    with _joined(_group(server, box.session_id, "full"), "exec sleep 1000") as process:
        assert box.teardown().leftovers == ()
        assert process.wait(patience(PATIENCE_S)) == -9
    assert server.traces(box.session_id) == []


def test_forks_refused_in_a_group_are_counted(server: Nsinit) -> None:
    """The kernel counts a refused fork in the run cgroup of the process; the reader adds the counts up."""
    box = server.build(host_plan(limits=replace(ROOMY, pids=8)))
    assert isinstance(server.ready, Ready)
    stats = CgroupStats(server.ready.cgroup_dirs, box.session_id)
    before = stats.read_pids_refused()
    loop = "for i in 1 2 3 4 5 6 7 8 9 10; do sleep 5 & done; wait"
    with _joined(_group(server, box.session_id, "p-1"), f"({loop}) 2>/dev/null; exec sleep 1000"):
        wait_until(lambda: stats.read_pids_refused() > before, "a fork was refused and counted")
        server.ask(RemoveRunCgroup, session_id=box.session_id, name="p-1", kill=True)
    stats.close()
    box.teardown()


def test_the_victim_of_the_oom_killer_is_named(server: Nsinit) -> None:
    """The victim's session is read from the path of its v1 memory cgroup in the kernel's log."""
    box = server.build(host_plan(limits=SMALL))
    assert box.run(f'python3 -c "{HOG}"').code == 137
    assert server.ask(FindOomKills, session_id=box.session_id)[0].name == "python3"
    box.teardown()
