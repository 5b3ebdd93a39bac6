"""Life and death of sandboxes beyond one nsinit: teardown, adoption after a crash, stop, deletion of what is left."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsinit.server.requests import LIST_BATCH
from nsinit.storage import trash
from nsinit.storage.paths import Layout
from nsinit.wire.protocol import (
    Adopt,
    Adopted,
    Failed,
    Found,
    MakeWorkspace,
    Prepare,
    Ready,
    Scan,
    Scanned,
    SetLimits,
    TornDown,
)
from tests.kernel.harness import (
    PATIENCE_S,
    ROOMY,
    Nsinit,
    data_directory,
    host_plan,
    new_id,
    new_node_id,
    running,
    wait_until,
)
from tests.waiting import patience


@pytest.fixture
def data_dir() -> Iterator[Path]:
    with data_directory() as path:
        yield path


@pytest.fixture
def server(data_dir: Path) -> Iterator[Nsinit]:
    with running(data_dir) as nsinit:
        yield nsinit


def _is_dead(pidfd: int, timeout_s: float = PATIENCE_S) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(patience(timeout_s) * 1000))


@pytest.mark.cgroup_v2
def test_teardown_leaves_nothing_and_may_be_repeated(server: Nsinit) -> None:
    """No process, cgroup or directory; the second and third answer say the same with unknown counters."""
    sandbox = server.build(host_plan())
    sandbox.run("sleep 100 & setsid sleep 100 &")
    assert server.teardown(sandbox.session_id).leftovers == ()
    assert _is_dead(sandbox.pidfd, 0)
    sandbox.release()
    assert server.traces(sandbox.session_id) == []
    again = server.teardown(sandbox.session_id)
    assert again == TornDown(again.seq, sandbox.session_id, oom_kills=-1, cpu_usec=-1, memory_peak_bytes=-1)
    assert server.teardown(new_id()).leftovers == ()


def test_teardown_counts_what_the_session_used(server: Nsinit) -> None:
    """CPU time and peak memory are read before the cgroup goes."""
    sandbox = server.build(host_plan())
    sandbox.run("i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done")
    counters = sandbox.teardown()
    assert counters.cpu_usec > 10_000
    assert counters.memory_peak_bytes > 1 << 20
    assert counters.oom_kills == 0


def test_a_fork_bomb_ends_with_its_session(server: Nsinit) -> None:
    """A teardown ends a fork bomb, however fast that forks."""
    sandbox = server.build(host_plan())
    sandbox.run("bomb() { bomb | bomb & }; bomb; sleep 0.2", timeout_ms=1000)
    assert sandbox.teardown().leftovers == ()
    assert server.traces(sandbox.session_id) == []
    wait_until(lambda: server.processes() == set(), "the process that deletes the trash ended")


@pytest.mark.cgroup_v2
def test_the_death_of_pid_1_takes_everything_and_shows_on_its_pidfd(server: Nsinit) -> None:
    """The descriptor that came with `Built` becomes readable, and no process of the session is left."""
    sandbox = server.build(host_plan())
    sandbox.run("setsid sleep 1000 &")
    assert not _is_dead(sandbox.pidfd, 0)
    os.kill(sandbox.pid, signal.SIGKILL)
    assert _is_dead(sandbox.pidfd)
    wait_until(lambda: server.processes() == set(), "the session's processes ended")
    assert server.scan()[sandbox.session_id].identity is None
    sandbox.teardown()


@pytest.mark.cgroup_v2
def test_sessions_outlive_nsinit_and_are_found_again(data_dir: Path) -> None:
    """SIGKILL of nsinit ends no session; the next one finds it by the kernel alone, attaches and tears it down."""
    node_id = new_node_id()
    with running(data_dir, node_id) as first:
        sandbox = first.build(host_plan())
        sandbox.run("export KEPT=yes; cd /tmp")
        first.kill()
        assert sandbox.run("echo $KEPT $PWD").out == "yes /tmp\n"
        with running(data_dir, node_id) as second:
            found = second.scan()[sandbox.session_id]
            assert found.identity == sandbox.built.identity
            assert (found.has_cgroup, found.has_files) == (True, True)
            attached, fds = second.ask(Adopt, session_id=sandbox.session_id)
            assert isinstance(attached, Adopted)
            assert (attached.identity, attached.oom_event) == (sandbox.built.identity, sandbox.built.oom_event)
            assert sandbox.run("echo $KEPT").out == "yes\n"
            sandbox.release()
            assert second.teardown(sandbox.session_id).leftovers == ()
            assert _is_dead(fds[0])
            for fd in fds:
                os.close(fd)
            assert second.traces(sandbox.session_id) == []


def test_a_restarted_nsinit_hands_out_no_id_of_a_living_session(data_dir: Path) -> None:
    """The slot table is rebuilt from the kernel: ten more sessions, and none shares the survivor's ids."""
    node_id = new_node_id()
    with running(data_dir, node_id) as first:
        survivor = first.build(host_plan())
        first.kill()
        with running(data_dir, node_id) as second:
            others = [second.build(host_plan()) for _ in range(10)]
            bases = {other.built.identity.base_uid for other in others}
            assert len(bases) == len(others)
            assert survivor.built.identity.base_uid not in bases
            survivor.release()
            second.teardown(survivor.session_id)
            for other in others:
                other.teardown()


def test_hanging_up_discards_blank_pool_sandboxes_and_keeps_sessions(data_dir: Path) -> None:
    """The end of the daemon ends nsinit and what it had prepared, and nothing else."""
    node_id = new_node_id()
    with running(data_dir, node_id) as first:
        sandbox = first.build(host_plan())
        spare = new_id()
        first.ask(Prepare, session_id=spare, limits=ROOMY)
        first.close()
        assert first.traces(spare) == []
        assert sandbox.run("echo alive").out == "alive\n"
        with running(data_dir, node_id) as second:
            assert list(second.scan()) == [sandbox.session_id]
            sandbox.release()


def test_hanging_up_discards_a_pool_sandbox_that_is_being_made(data_dir: Path) -> None:
    """A sandbox that becomes ready after the end of the daemon was noticed goes like those that were ready before."""
    with running(data_dir) as server:
        assert isinstance(server.ready, Ready)
        spare = new_id()
        server.send(Prepare, session_id=spare, limits=ROOMY)
        server.close()
        assert server.traces(spare) == []
    assert not any(os.path.exists(directory) for directory in server.ready.cgroup_dirs.values())


def test_a_clean_stop_leaves_no_cgroup(data_dir: Path) -> None:
    """The directories that held session cgroups go with the last nsinit."""
    with running(data_dir) as server:
        assert isinstance(server.ready, Ready)
        directories = set(server.ready.cgroup_dirs.values())
        assert all(os.path.isdir(directory) for directory in directories)
        server.build(host_plan()).teardown()
    assert not any(os.path.exists(directory) for directory in directories)


def test_two_nsinits_never_share_a_data_directory(data_dir: Path, server: Nsinit) -> None:
    """The second waits for the first and then gives up with a reason; the first is not disturbed."""
    second = Nsinit(data_dir, "other-node")
    second.close()
    assert isinstance(second.ready, Failed)
    assert "another nsinit" in second.ready.message
    server.build(host_plan()).teardown()


@pytest.mark.parametrize(("request_type", "fields"), [(Adopt, {}), (SetLimits, {"limits": ROOMY})])
def test_requests_on_an_unknown_session_fail_softly(
    server: Nsinit, request_type: type, fields: dict[str, object]
) -> None:
    """A request for an unknown session fails as ENOENT or ESRCH and changes nothing."""
    answer, fds = server.ask(request_type, session_id=new_id(), **fields)
    assert isinstance(answer, Failed)
    assert answer.errno in (2, 3)
    assert fds == []
    assert server.scan() == {}


def test_a_scan_of_many_sessions_comes_in_batches_without_gap_or_repeat(server: Nsinit) -> None:
    """Each answer goes on after the id it is asked for, all but the last are full and say that more follow."""
    ids = sorted(new_id() for _ in range(2 * LIST_BATCH + 1))
    paths = [server.data_dir / "sessions" / session_id for session_id in ids]
    for path in paths:
        path.mkdir()
    batches: list[Scanned] = []
    while not batches or batches[-1].more:
        answer, _ = server.ask(Scan, after=batches[-1].sessions[-1].session_id if batches else "")
        assert isinstance(answer, Scanned), answer
        batches.append(answer)
    assert [len(batch.sessions) for batch in batches] == [LIST_BATCH, LIST_BATCH, 1]
    found = [each for batch in batches for each in batch.sessions]
    assert found == [Found(session_id, None, has_cgroup=False, has_files=True) for session_id in ids]
    for path in paths:
        path.rmdir()


def test_session_directories_are_deleted_in_the_background(server: Nsinit) -> None:
    """Deep chains, mode-000 directories and links in a session's files are deleted, and links are not followed."""
    outside = server.data_dir / "images/host/rootfs/etc/group"
    sandbox = server.build(host_plan())
    sandbox.python(
        """
import os
os.mkdir("/workspace/locked"); open("/workspace/locked/f", "w").close(); os.chmod("/workspace/locked", 0)
os.symlink("/etc/group", "/workspace/link"); os.symlink("/", "/workspace/root")
for depth in range(2000):
    os.mkdir("d"); os.chdir("d")
"""
    )
    sandbox.teardown()
    wait_until(lambda: os.listdir(server.data_dir / "trash") == [], "the trash is empty")
    assert outside.exists()


def test_deletion_refuses_to_cross_a_mount(tmp_path: Path) -> None:
    """A mount in a session's directory survives the deletion of the directory around it."""
    layout = Layout(str(tmp_path))
    layout.make()
    held = tmp_path / "sessions/0123456789abcdef/root/held"
    held.mkdir(parents=True)
    (held.parent / "plain").write_text("x")
    pid = os.fork()
    if pid == 0:
        os._exit(_delete_around_a_mount(layout, held))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _delete_around_a_mount(layout: Layout, held: Path) -> int:
    """In a mount namespace of its own: mount on `held`, delete the session, look at what is left. 0 is right."""
    from nsinit.kernel import constants as k
    from nsinit.kernel import syscalls

    syscalls.unshare(k.CLONE_NEWNS)
    syscalls.mount("", "/", flags=k.MS_REC | k.MS_PRIVATE)
    syscalls.mount("precious", str(held), "tmpfs")
    (held / "file").write_text("kept")
    sessions_fd = os.open(layout.sessions, os.O_RDONLY)
    try:
        trash.remove_tree(sessions_fd, "0123456789abcdef")
    except OSError:
        return 0 if (held / "file").read_text() == "kept" and not (held.parent / "plain").exists() else 2
    return 1


def test_an_id_is_free_again_as_soon_as_its_session_has_ended(server: Nsinit) -> None:
    """Pages of the ended session's files are freed meanwhile; the new session of that id has a cgroup of its own."""
    server.ask(MakeWorkspace, workspace_id="kept")
    plan = host_plan(workspace_id="kept")
    for _ in range(3):
        sandbox = server.build(plan)
        assert sandbox.run("head -c 50000000 /dev/zero > file; wc -c < file").out == "50000000\n"
        assert server.teardown(sandbox.session_id).leftovers == ()
        sandbox.release()
