"""nsinit's helpers: they keep nothing of a session, can do no more than their work takes, and the death of one breaks
one build."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nsinit.helpers.builder import COUNT
from nsinit.helpers.builder import NAME as BUILDER
from nsinit.helpers.cgroup_maker import EMPTIER_NAME as CGROUP_EMPTIER
from nsinit.helpers.cgroup_maker import NAME as CGROUP_MAKER
from nsinit.helpers.forker import NAME as FORKER
from nsinit.helpers.forker import SEED_NAME as SEED
from nsinit.kernel import constants as k
from nsinit.kernel.capabilities import NSINIT_CAPABILITIES
from nsinit.kernel.mountinfo import is_below, parse_mountinfo
from nsinit.kernel.seccomp.filters import Filters
from nsinit.sandbox import init_steps
from nsinit.sandbox.init_steps import Init
from nsinit.wire.protocol import (
    Build,
    Built,
    Failed,
    MakeRunCgroup,
    MountImage,
    Ok,
    Prepare,
    RunCgroupMade,
    SandboxPlan,
    SetLimits,
    Teardown,
)
from tests import leaks
from tests.ground import Ground
from tests.kernel.harness import ROOMY, Nsinit, data_directory, host_plan, new_id, new_node_id, running, wait_until

INIT = "sandkasten-init"
_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "pid_for_children", "user", "uts")


@pytest.fixture
def server() -> Iterator[Nsinit]:
    with data_directory() as data_dir, running(data_dir) as nsinit:
        _wait_for_helpers(nsinit)
        yield nsinit


def _wait_for_helpers(server: Nsinit) -> set[int]:
    def found() -> set[int]:
        return set().union(*(server.helpers(name) for name in (BUILDER, FORKER, SEED, CGROUP_MAKER, CGROUP_EMPTIER)))

    wait_until(lambda: len(found()) == COUNT + 4, "the helpers started")
    return found()


def _capabilities(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: int(mask, 16) for name, _, mask in (each.partition(":") for each in lines) if name.startswith("Cap")}


def _holdings(pid: int) -> tuple[dict[str, str], list[str], str, set[str]]:
    """Return what a process can reach: its namespaces, descriptors, mounts, and root and working directory."""
    proc = Path(f"/proc/{pid}")
    return (
        {name: os.readlink(proc / "ns" / name) for name in NAMESPACES},
        _descriptors(pid),
        (proc / "mountinfo").read_text(),
        {os.readlink(proc / "cwd"), os.readlink(proc / "root")},
    )


def _descriptors(pid: int) -> list[str]:
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed this instant
            links.append(os.readlink(entry))
    return sorted(links)


def _all_holdings(server: Nsinit) -> dict[int, object]:
    return {pid: _holdings(pid) for name in (BUILDER, FORKER, SEED, CGROUP_MAKER) for pid in server.helpers(name)}


def _fail_while_stopped(server: Nsinit, pids: set[int], plan: SandboxPlan) -> Failed:
    """Stop helpers, ask for a build, kill them once a request lies in the socket of one; return the answer."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: all(_state(pid) == "T" for pid in pids), "the helpers stand still")
    server.send(Build, plan=plan)
    wait_until(lambda: any(_has_mail(pid) for pid in pids), "nsinit asked its helper")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    answer, _ = server.receive()
    assert isinstance(answer, Failed), answer
    return answer


def _has_mail(pid: int) -> bool:
    """Tell whether a message lies unread in a socket of a process; pidfd_getfd(2) gives a copy of its descriptor."""
    pidfd = os.pidfd_open(pid)
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            fd = _libc.syscall(_PIDFD_GETFD, pidfd, int(name), 0)
            if fd < 0:
                raise OSError(ctypes.get_errno(), "pidfd_getfd")
            try:
                if stat.S_ISSOCK(os.fstat(fd).st_mode) and select.select([fd], [], [], 0)[0]:
                    return True
            finally:
                os.close(fd)
    finally:
        os.close(pidfd)
    return False


@contextlib.contextmanager
def _frozen_sessions(server: Nsinit) -> Iterator[None]:
    """Freeze the group that session cgroups are in: what is born there gets no further."""
    if "unified" not in server.ready.cgroup_dirs:
        pytest.skip("needs the unified hierarchy")
    freeze = Path(server.ready.cgroup_dirs["unified"]) / "cgroup.freeze"
    freeze.write_text("1")
    try:
        yield
    finally:
        freeze.write_text("0")


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def _is_alive(pid: int) -> bool:
    return _state(pid) not in "ZX"


def _assert_all_is_well(server: Nsinit, plan: SandboxPlan) -> None:
    """The failed build leaves nothing, and the same id can be built now."""
    assert server.traces(plan.session_id) == []
    assert server.scan() == {}
    sandbox = server.build(plan)
    assert sandbox.run("echo works").out == "works\n"
    sandbox.teardown()


def test_helpers_keep_nothing_of_a_session(server: Nsinit) -> None:
    """While a sandbox runs and after it, helpers have the namespaces, descriptors and mounts they had before."""
    server.build(host_plan()).teardown()
    before = _all_holdings(server)
    sandboxes = [server.build(host_plan()) for _ in range(4)]
    prepared = new_id()
    server.ask(Prepare, session_id=prepared, limits=ROOMY)
    assert _all_holdings(server) == before
    server.ask(MountImage, plan=host_plan(prepared))
    assert _all_holdings(server) == before
    for sandbox in sandboxes:
        assert all(
            os.readlink(f"/proc/{sandbox.pid}/ns/{name}") != os.readlink(f"/proc/{server.pid}/ns/{name}")
            for name in ("mnt", "net", "pid", "user", "uts")
        )
        sandbox.teardown()
    server.ask(Teardown, session_id=prepared)
    assert _all_holdings(server) == before


def test_helpers_keep_nothing_of_a_failed_build(server: Nsinit) -> None:
    """A build that fails half-way, with the image's mounts in place, leaves nothing in the builder either."""
    before = _all_holdings(server)
    assert server.refused(host_plan(workspace_id="no-such-workspace")).stage == "workspace"
    assert server.refused(host_plan(image="missing")).stage == "overlay root"
    assert _all_holdings(server) == before


def test_helpers_live_where_nsinit_lives(server: Nsinit) -> None:
    """Between builds, a builder is in no other namespace than nsinit itself."""
    server.build(host_plan()).teardown()
    own = _holdings(server.pid)
    for pid in server.helpers(BUILDER) | server.helpers(FORKER) | server.helpers(SEED):
        namespaces, _, mountinfo, directories = _holdings(pid)
        assert (namespaces, mountinfo) == (own[0], own[2])
        assert "/" in directories


def test_a_builder_that_dies_with_an_order_fails_that_build_alone(server: Nsinit, ground: Ground) -> None:
    """The build ends with a reason and leaves nothing; new builders take over, which the leak check knows."""
    before = leaks.Snapshot.take(ground)
    builders, plan = server.helpers(BUILDER), host_plan()
    assert _fail_while_stopped(server, builders, plan).stage == "builder"
    wait_until(lambda: len(server.helpers(BUILDER)) == len(builders), "the builders were replaced")
    assert not server.helpers(BUILDER) & builders
    _assert_all_is_well(server, plan)
    assert [each for each in before.difference() if each.startswith("process")] == []


def test_a_build_whose_init_dies_while_no_builder_is_free_touches_no_other_sandbox(server: Nsinit) -> None:
    """The order waits with the descriptor of a process that is gone. A builder that was given another process of that
    pid would work in another session's sandbox.
    """
    builders, plans = server.helpers(BUILDER), [host_plan() for _ in range(COUNT + 2)]
    for pid in builders:
        os.kill(pid, signal.SIGSTOP)
    try:
        for plan in plans:
            before = server.helpers(INIT)
            server.send(Build, plan=plan)
            wait_until(lambda before=before: server.helpers(INIT) - before, "PID 1 is there")
            (pid,) = server.helpers(INIT) - before
            if plan is plans[COUNT]:  # the first that waits for a builder
                os.kill(pid, signal.SIGKILL)
                wait_until(lambda: "init ended" in server.log, "its end was seen")
    finally:
        for pid in builders:
            os.kill(pid, signal.SIGCONT)
    answers = {}
    for _ in plans:
        answer, fds = server.receive()
        answers[answer.seq] = answer
        for fd in fds:
            os.close(fd)
    *built, failed, last = (answers[seq] for seq in sorted(answers))
    assert {type(each) for each in (*built, last)} == {Built}, answers
    assert isinstance(failed, Failed)
    assert failed.errno in (errno.ESRCH, errno.ENOENT), failed  # the process is gone; not: there is no such descriptor
    for plan in plans:
        assert server.teardown(plan.session_id).leftovers == ()


def test_a_builder_that_dies_inside_a_sandbox_fails_that_build_alone(server: Nsinit) -> None:
    """A builder killed half-way, in the session's namespaces, takes the sandbox with it; the build fails and no
    other.
    """
    home = os.readlink(f"/proc/{server.pid}/ns/mnt")
    plan, forkers = host_plan(), server.helpers(FORKER)
    with _frozen_sessions(server):
        server.send(Build, plan=plan)
        inside: set[int] = set()

        def is_inside() -> bool:
            inside.update(pid for pid in server.helpers(BUILDER) if os.readlink(f"/proc/{pid}/ns/mnt") != home)
            return bool(inside)

        wait_until(is_inside, "a builder joined the sandbox")
        for pid in inside:
            os.kill(pid, signal.SIGKILL)
    answer, _ = server.receive()
    assert (type(answer), answer.stage) == (Failed, "builder")
    assert server.helpers(FORKER) == forkers
    _assert_all_is_well(server, plan)


def test_idle_helpers_that_die_are_not_missed(server: Nsinit) -> None:
    """A helper that died before a build does not fail the build."""
    pids = server.helpers(BUILDER) | server.helpers(FORKER) | server.helpers(CGROUP_MAKER)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(_is_alive(pid) for pid in pids), "the helpers ended")
    _assert_all_is_well(server, host_plan())


def test_a_forker_that_dies_with_a_request_fails_that_build_alone(server: Nsinit) -> None:
    """The build ends with a reason and leaves nothing; sandboxes of the old forker live on; a new one takes over."""
    survivor = server.build(host_plan())
    plan, forkers = host_plan(), server.helpers(FORKER)
    assert _fail_while_stopped(server, forkers, plan).stage == "clone"
    assert not server.helpers(FORKER) & forkers
    assert survivor.run("echo alive").out == "alive\n"
    survivor.teardown()
    _assert_all_is_well(server, plan)


def test_without_a_seed_the_death_of_the_forker_ends_nsinit() -> None:
    """No forker can be started then; the sandbox lives on, and the next nsinit has both."""
    with data_directory() as data_dir:
        node_id = new_node_id()
        first = Nsinit(data_dir, node_id)
        survivor = first.build(host_plan())
        for name in (SEED, FORKER):
            assert first.build(host_plan()).teardown().leftovers == ()
            for pid in first.helpers(name):
                os.kill(pid, signal.SIGKILL)
        first.send(Build, plan=host_plan())
        with pytest.raises(EOFError):
            first.receive()
        assert survivor.run("echo alive").out == "alive\n"
        survivor.release()
        first.close()
        with running(data_dir, node_id) as second:
            assert survivor.session_id in second.scan()
            second.build(host_plan()).teardown()


def test_a_cgroup_maker_that_dies_with_an_order_fails_that_build_alone(server: Nsinit) -> None:
    """The death of a cgroup maker fails its build alone, and the cgroups that it may have made are removed."""
    survivor = server.build(host_plan())
    plan, makers = host_plan(), server.helpers(CGROUP_MAKER)
    assert _fail_while_stopped(server, makers, plan).stage == "cgroup maker"
    wait_until(lambda: len(server.helpers(CGROUP_MAKER)) == 1, "the cgroup maker was replaced")
    assert not server.helpers(CGROUP_MAKER) & makers
    assert survivor.run("echo alive").out == "alive\n"
    survivor.teardown()
    _assert_all_is_well(server, plan)


def test_a_cgroup_maker_that_dies_over_a_running_session_is_not_missed(server: Nsinit) -> None:
    """The next cgroup maker carries the order out: limits are changed, and a run cgroup is made though half of one may
    be there.
    """
    sandbox = server.build(host_plan())
    raised = replace(ROOMY, memory_bytes=ROOMY.memory_bytes * 2)
    for order in ({"limits": raised}, {"name": "p-1"}):
        (pid,) = server.helpers(CGROUP_MAKER)
        os.kill(pid, signal.SIGSTOP)
        server.send(MakeRunCgroup if "name" in order else SetLimits, session_id=sandbox.session_id, **order)
        if "name" in order:  # as one that dies before it has told of it
            (_group_parent(server, sandbox.session_id) / "p-1").mkdir()
        server.scan()  # once the scan is answered, the order has been handed over
        os.kill(pid, signal.SIGKILL)
        answer, fds = server.receive()
        assert isinstance(answer, Ok | RunCgroupMade), answer
        for fd in fds:
            os.close(fd)
    directory = server.ready.cgroup_dirs["memory"]
    name = "memory.max" if server.ready.cgroup_mode == "v2" else "memory.limit_in_bytes"
    assert int(Path(directory, sandbox.session_id, name).read_text()) == raised.memory_bytes
    sandbox.teardown()


def test_who_has_a_cgroup_of_that_name_is_left_alone(server: Nsinit) -> None:
    """A build with the id of a session that this nsinit did not make, and that has no files, ends no process of that
    session.
    """
    plan = host_plan()
    directories = [Path(each, plan.session_id) for each in sorted(set(server.ready.cgroup_dirs.values()))]
    with subprocess.Popen(["/bin/sleep", "1000"]) as sleeper:
        try:
            for directory in directories:
                directory.mkdir()
                (directory / "cgroup.procs").write_text(str(sleeper.pid))
            failed = server.refused(plan)
            assert (failed.stage, failed.errno) == ("session", errno.EEXIST)
            assert sleeper.poll() is None
            assert all(directory.is_dir() for directory in directories)
        finally:
            sleeper.kill()
            sleeper.wait()
            for directory in directories:
                directory.rmdir()
    _assert_all_is_well(server, plan)


def test_a_cgroup_maker_that_hangs_costs_time_and_nothing_else(server: Nsinit) -> None:
    """A cgroup maker that is stopped over an order for a run cgroup: its successor makes that run cgroup, and then the
    cgroups of the session in the queue.
    """
    sandbox, plan = server.build(host_plan()), host_plan()
    (pid,) = server.helpers(CGROUP_MAKER)
    os.kill(pid, signal.SIGSTOP)
    server.send(MakeRunCgroup, session_id=sandbox.session_id, name="p-1")
    server.send(Build, plan=plan)
    answers = [server.receive(), server.receive()]
    for answer, fds in answers:
        assert isinstance(answer, RunCgroupMade | Built), answer
        for fd in fds:
            os.close(fd)
    assert not _is_alive(pid)
    server.teardown(plan.session_id)
    sandbox.teardown()


def _group_parent(server: Nsinit, session_id: str) -> Path:
    return Path(server.ready.cgroup_dirs.get("unified", server.ready.cgroup_dirs["pids"])) / session_id


def test_the_cgroup_maker_can_do_nothing_else(server: Nsinit) -> None:
    """The maker sees the hierarchies that sessions have cgroups in and an empty root, no interface but a loopback that
    is down, and could give files away; a program that it executed would gain nothing."""
    (pid,) = server.helpers(CGROUP_MAKER)
    proc = Path(f"/proc/{pid}")
    mounts = parse_mountinfo((proc / "mountinfo").read_text())
    assert {(each.fstype in ("cgroup", "cgroup2")) or each.point == "/" for each in mounts} == {True}
    assert all(any(is_below(path, each.point) for path in server.ready.cgroup_dirs.values()) for each in mounts)
    root = next(line for line in (proc / "mountinfo").read_text().splitlines() if line.split()[4] == "/")
    assert root.split()[5].split(",")[0] == "ro"
    assert os.listdir(proc / "root") == sorted({each.point.split("/")[1] for each in mounts} - {""})
    own = Path("/proc/self")
    for name in ("mnt", "net", "ipc", "uts"):
        assert len({os.readlink(each / "ns" / name) for each in (proc, own, Path(f"/proc/{server.pid}"))}) == 3
    held = _capabilities(pid)
    chown = 1 << k.CAP_CHOWN
    assert (held["CapEff"], held["CapPrm"], held["CapInh"], held["CapAmb"]) == (chown, chown, 0, 0)
    assert "NoNewPrivs:\t1" in (proc / "status").read_text()


def test_nsinit_and_its_helpers_have_no_network_and_no_power_beyond_their_work(server: Nsinit) -> None:
    """A daemon or sandbox that turns on nsinit and its helpers finds no interface of the machine, no modules, no raw
    devices."""
    for pid in (server.pid, *server.helpers(BUILDER), *server.helpers(FORKER), *server.helpers(SEED)):
        interfaces = Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]
        assert [each.partition(":")[0].strip() for each in interfaces] == ["lo"]
        held = _capabilities(pid)
        assert held["CapBnd"] & ~NSINIT_CAPABILITIES == held["CapPrm"] & ~NSINIT_CAPABILITIES == 0
        assert "NoNewPrivs:\t1" in Path(f"/proc/{pid}/status").read_text()


def test_helpers_end_with_nsinit() -> None:
    """No helper outlives nsinit, however nsinit ends."""
    node_id = new_node_id()
    with data_directory() as data_dir, running(data_dir, node_id) as server:
        pids = _wait_for_helpers(server)
        server.kill()
        wait_until(lambda: not any(_is_alive(pid) for pid in pids), "the helpers ended")
        with running(data_dir, node_id):
            pass  # the second teardown removes what the first could not


def test_pid_1_refuses_a_root_that_is_not_the_one_that_was_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were nsinit in a chroot, say, the builder's pivot_root would leave PID 1 in the host's tree: the build fails."""
    monkeypatch.chdir("/tmp")
    init = Init(0, -1, (), -1, -1, "", 0, 0, Filters((), ()), root_id=(0, 0))
    with pytest.raises(OSError, match="not the root") as refused:
        init_steps.enter_root(init)
    assert refused.value.errno == errno.ESTALE
    status = os.stat("/")
    init.root_id = status.st_dev, status.st_ino
    init_steps.enter_root(init)
    assert os.getcwd() == "/"
