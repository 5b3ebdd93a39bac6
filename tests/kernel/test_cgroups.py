"""Limits in force: what a session can't exceed, how that is counted and told, in whichever cgroup mode runs here."""

from __future__ import annotations

import contextlib
import os
import select
from dataclasses import replace
from pathlib import Path

import pytest

from nsinit.cgroup.tree import read_owner
from nsinit.wire.protocol import Adopt, Ok, Prepare, Ready, SetLimits
from runner.wire.protocol import ExecReply, RunProgram
from tests.kernel.harness import (
    FORK_UNTIL_REFUSED,
    PATIENCE_S,
    ROOMY,
    Nsinit,
    check_counters,
    check_freezing,
    host_plan,
)
from tests.waiting import patience

pytestmark = pytest.mark.cgroup_v2

SMALL = replace(ROOMY, memory_bytes=48 << 20)
SHARES = ("cpu.weight", "cpu.shares")
HOG = "import sys\nheld = [bytearray(1 << 20) for _ in range(400)]\nprint('never')"


def _value(server: Nsinit, session_id: str, controller: str, *names: str) -> str:
    """Return the first of the named files that this cgroup version has."""
    assert isinstance(server.ready, Ready)
    directory = f"{server.ready.cgroup_dirs[controller]}/{session_id}"
    (path,) = [f"{directory}/{name}" for name in names if os.path.exists(f"{directory}/{name}")][:1]
    with open(path) as file:
        return file.read().strip()


def _event_fired(fd: int, kind: str) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN if kind == "eventfd" else select.POLLPRI | select.POLLERR)
    return bool(poller.poll(patience(PATIENCE_S) * 1000))


def _limits(server: Nsinit, session_id: str) -> tuple[str, str, str]:
    """Return memory in bytes, pids and cpu quota in microseconds, as the kernel has them."""
    return (
        _value(server, session_id, "memory", "memory.max", "memory.limit_in_bytes"),
        _value(server, session_id, "pids", "pids.max"),
        _value(server, session_id, "cpu", "cpu.max", "cpu.cfs_quota_us").split()[0],
    )


SWAP = {"memory.swap.max": "0", "memory.memsw.limit_in_bytes": str(48 << 20), "memory.swappiness": "0"}
"""The files that keep a session of 48 MiB from swapping; each kernel has some of them (the second counts
memory too)."""


def test_what_a_cleaner_of_the_machine_removes_is_made_again(server: Nsinit) -> None:
    """A cleaner may remove our cgroup directories while no session is in them; the next session has its limits, and the
    directories are known as ours again.
    """
    assert isinstance(server.ready, Ready)
    directories = set(server.ready.cgroup_dirs.values())
    before = {each: read_owner(each) for each in directories}
    for each in directories:
        with contextlib.suppress(OSError):  # in a pure v2 tree nsinit may be in it
            os.rmdir(each)
    box = server.build(host_plan(limits=SMALL))
    assert _limits(server, box.session_id) == (str(48 << 20), str(SMALL.pids), str(SMALL.cpu_quota_us))
    assert {each: read_owner(each) for each in directories} == before
    box.teardown()


def test_limits_are_written_in_every_hierarchy(server: Nsinit) -> None:
    """Memory, swap, pids and cpu hold what the plan says."""
    box = server.build(host_plan(limits=replace(SMALL, pids=33, cpu_quota_us=50_000)))
    assert _limits(server, box.session_id) == (str(48 << 20), "33", "50000")
    assert isinstance(server.ready, Ready)
    directory = Path(server.ready.cgroup_dirs["memory"], box.session_id)
    found = {name: (directory / name).read_text().strip() for name in SWAP if (directory / name).exists()}
    assert found
    assert found == {name: SWAP[name] for name in found}
    box.teardown()


def test_a_prepared_pool_sandbox_has_limits_from_its_birth_and_then_those_of_the_plan(server: Nsinit) -> None:
    """The pool sandbox's limits are the probable ones before its process exists, and the plan's before the image is
    touched.
    """
    plan = host_plan(limits=replace(SMALL, pids=33))
    server.ask(Prepare, session_id=plan.session_id, limits=ROOMY)
    assert _limits(server, plan.session_id) == (str(256 << 20), "64", "200000")
    server.build(plan)
    assert _limits(server, plan.session_id) == (str(48 << 20), "33", str(SMALL.cpu_quota_us))


def test_a_session_goes_before_others_only_while_it_is_built(server: Nsinit) -> None:
    """The session's share of the processors is raised during the build; it is the usual one before any foreign code
    runs in the session, and when another nsinit finds the session.
    """
    plan = host_plan()
    assert isinstance(server.ask(Prepare, session_id=plan.session_id, limits=plan.limits)[0], Ok)
    (usual,) = {_value(server, server.build(host_plan()).session_id, "cpu", *SHARES)}
    assert usual in ("100", "1024")
    assert int(_value(server, plan.session_id, "cpu", *SHARES)) == 100 * int(usual)
    server.build(plan)
    assert _value(server, plan.session_id, "cpu", *SHARES) == usual
    assert isinstance(server.ready, Ready)
    directory = Path(server.ready.cgroup_dirs["cpu"], plan.session_id)
    (path,) = [directory / name for name in SHARES if (directory / name).exists()]
    path.write_text("5000")
    _, fds = server.ask(Adopt, session_id=plan.session_id)
    for fd in fds:
        os.close(fd)
    assert path.read_text().strip() == usual


def test_every_process_of_a_session_is_in_its_cgroups(server: Nsinit) -> None:
    """PID 1, the shell and a daemonised command are members in each hierarchy."""
    box = server.build(host_plan())
    box.run("setsid sleep 1000 &")
    assert isinstance(server.ready, Ready)
    members = {
        _value(server, box.session_id, name, "cgroup.procs")
        and len(_value(server, box.session_id, name, "cgroup.procs").split())
        for name in server.ready.cgroup_dirs
    }
    assert members == {3}
    box.teardown()


def test_a_memory_hog_dies_alone_and_is_counted(server: Nsinit) -> None:
    """The hog is killed, the event fires, the count is one, the shell and its state live on."""
    box = server.build(host_plan(limits=SMALL))
    box.run("export KEPT=yes")
    result = box.run(f'python3 -c "{HOG}"')
    assert result.code == 137
    assert "never" not in result.out
    assert _event_fired(box.event_fd, box.built.oom_event)
    assert box.run("echo $KEPT").out == "yes\n"
    assert box.teardown().oom_kills == 1


def test_no_event_comes_without_a_kill(server: Nsinit) -> None:
    """The descriptor of a session that stays within its memory is silent."""
    box = server.build(host_plan())
    if box.built.oom_event == "memory_events":
        os.read(box.event_fd, 4096)
    box.run("true")
    poller = select.poll()
    poller.register(box.event_fd, select.POLLIN if box.built.oom_event == "eventfd" else select.POLLPRI)
    assert poller.poll(0) == []
    box.teardown()


def test_tmpfs_counts_as_memory(server: Nsinit) -> None:
    """Files in /tmp and /dev/shm are the session's memory; full ones are "no space left", and nothing is killed."""
    box = server.build(host_plan(limits=SMALL, tmp_bytes=1 << 30, shm_bytes=1 << 30))
    for directory in ("/tmp", "/dev/shm"):
        assert "No space left" in box.run(f"head -c 200000000 /dev/zero > {directory}/big").err
    counters = box.teardown()
    assert 36 << 20 <= counters.memory_peak_bytes <= 48 << 20
    assert counters.oom_kills == 0


def test_forking_beyond_the_pids_limit_fails_with_eagain(server: Nsinit) -> None:
    """The limit is exact, and it holds back the session alone."""
    box = server.build(host_plan(limits=replace(ROOMY, pids=16)))
    assert box.python(FORK_UNTIL_REFUSED) == "EAGAIN True"
    box.teardown()


def test_the_cpu_quota_throttles(server: Nsinit) -> None:
    """A busy loop under a tenth of a core is held back again and again."""
    box = server.build(host_plan(limits=replace(ROOMY, cpu_quota_us=10_000)))
    box.run("end=$((${EPOCHREALTIME/./} + 500000)); while [ ${EPOCHREALTIME/./} -lt $end ]; do :; done")
    stat = dict(line.split() for line in _value(server, box.session_id, "cpu", "cpu.stat").splitlines())
    assert int(stat["nr_throttled"]) >= 2
    box.teardown()


@pytest.mark.parametrize("memory_bytes", [32 << 20, 512 << 20])
def test_limits_change_up_and_down_while_running(server: Nsinit, memory_bytes: int) -> None:
    """SetLimits takes effect at once in both directions."""
    box = server.build(host_plan(limits=replace(ROOMY, memory_bytes=128 << 20)))
    changed = replace(ROOMY, memory_bytes=memory_bytes, pids=20, cpu_quota_us=30_000)
    answer, _ = server.ask(SetLimits, session_id=box.session_id, limits=changed)
    assert isinstance(answer, Ok), answer
    assert _value(server, box.session_id, "memory", "memory.max", "memory.limit_in_bytes") == str(memory_bytes)
    assert _value(server, box.session_id, "pids", "pids.max") == "20"
    box.teardown()


def test_nothing_of_a_cgroup_is_writable_inside(server: Nsinit) -> None:
    """The session's own are mounted, each read-only, and by root inside neither a file can be written nor a directory
    made."""
    box = server.build(host_plan(root_inside=True))
    options = box.run("grep /sys/fs/cgroup /proc/self/mounts | cut -d' ' -f3,4 | grep ^cgroup").out.splitlines()
    assert options
    assert all(each.split()[1].startswith("ro,") for each in options)
    write = "find /sys -type f -writable; find /sys -type d -exec mkdir {}/own \\; 2>/dev/null; find /sys -name own"
    reply, out, _ = box.request(RunProgram("w", ("sh", "-c", write), user="root"))
    assert isinstance(reply, ExecReply)
    assert out == b""
    box.teardown()


def test_a_frozen_session_stands_still_and_goes_on_as_it_was(server: Nsinit) -> None:
    """All of a frozen session stands still, computing or sleeping; thawed, it goes on; frozen, it can be torn down."""
    check_freezing(server)


def test_the_counters_the_daemon_reads_are_there(server: Nsinit) -> None:
    """Limits, use, kills and refusals, by the reader that stats and command results stand on."""
    check_counters(server, SMALL)
