"""Builds of sandboxes: images that fight back, workspaces, read-only roots, and builds that fail."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nsinit.wire.protocol import (
    Build,
    DiskLimits,
    Failed,
    Limits,
    MakeWorkspace,
    MountImage,
    Ok,
    Prepare,
    SandboxPlan,
    Teardown,
    TornDown,
)
from tests.kernel.harness import (
    ROOMY,
    Nsinit,
    data_directory,
    host_plan,
    make_rootfs_image,
    new_id,
    rootfs_plan,
    running,
    wait_until,
)

needs_busybox = pytest.mark.skipif(not Path("/bin/busybox").exists(), reason="needs a static busybox")


@pytest.fixture
def server() -> Iterator[Nsinit]:
    with data_directory() as data_dir, running(data_dir) as nsinit:
        yield nsinit


def _assert_nothing_left(server: Nsinit, session_id: str) -> None:
    assert server.traces(session_id) == []
    assert server.scan() == {}
    wait_until(lambda: server.processes() == set(), "the process that deletes the trash ended")


def test_the_host_sees_no_mount_of_a_sandbox(server: Nsinit) -> None:
    """While a sandbox runs, the host's mount table is what it was."""
    before = Path("/proc/self/mountinfo").read_text()
    sandbox = server.build(host_plan())
    assert Path("/proc/self/mountinfo").read_text() == before
    sandbox.teardown()


def test_writes_stay_in_the_session(server: Nsinit) -> None:
    """Files that a session writes over the image are its own: neither the image nor the next session has them."""
    first = server.build(host_plan())
    first.run("echo mine > /home/sandbox/f; echo mine > /workspace/f")
    first.teardown()
    second = server.build(host_plan())
    assert second.run("ls -A /home/sandbox /workspace | grep -v :").out.strip() == ""
    assert not (server.data_dir / "images/host/rootfs/workspace/f").exists()
    second.teardown()


@needs_busybox
def test_a_foreign_image_without_accounts_or_mount_points_works(server: Nsinit) -> None:
    """Missing mount points are made, and the sandbox user gets an account."""
    make_rootfs_image(server.data_dir, "tiny")
    sandbox = server.build(rootfs_plan("tiny"))
    assert sandbox.run("id").out.startswith("uid=1000(sandbox) gid=1000(sandbox)")
    assert sandbox.run("cat /etc/passwd").out.splitlines()[0].startswith("root:x:0:0:")
    assert sandbox.run("stat -c %u:%g /bin/busybox /etc/passwd").out.split() == ["0:0", "0:0"]
    sandbox.teardown()


@needs_busybox
def test_accounts_of_an_image_are_left_alone(server: Nsinit) -> None:
    """An image that knows uid 1000 keeps its files byte by byte."""
    rootfs = make_rootfs_image(server.data_dir, "named")
    (rootfs / "etc").mkdir()
    (rootfs / "etc/passwd").write_text("node:x:1000:1000::/home/node:/bin/sh\nodd line")
    for account in ("", "node"):
        sandbox = server.build(rootfs_plan("named", account=account))
        assert sandbox.run("cat /etc/passwd").out == "node:x:1000:1000::/home/node:/bin/sh\nodd line"
        sandbox.teardown()


@needs_busybox
def test_an_account_that_is_asked_for_is_made_with_its_home(server: Nsinit) -> None:
    """Programs find it by its name and by its id, whatever the image has by either. The image has none then."""
    rootfs = make_rootfs_image(server.data_dir, "other")
    (rootfs / "etc").mkdir()
    (rootfs / "etc/passwd").write_text("user:x:7:7::/:/bin/no\nnode:x:1000:1000::/home/node:/bin/sh\n")
    sandbox = server.build(rootfs_plan("other", account="user"))
    assert sandbox.run("cat /etc/passwd").out.splitlines() == [
        "user:x:1000:1000:user:/home/user:/bin/sh",
        "node:x:1000:1000::/home/node:/bin/sh",
    ]
    assert sandbox.run("id; stat -c '%u:%g %a' /home/user").out.splitlines() == [
        "uid=1000(user) gid=1000(sandbox)",
        "1000:1000 755",
    ]
    sandbox.teardown()
    assert not (rootfs / "home").exists()


@needs_busybox
@pytest.mark.parametrize("name", ["dev", "proc", "sys", "tmp", "run", "workspace", "home", "etc"])
def test_an_image_with_a_link_for_a_mount_point_is_refused(server: Nsinit, name: str) -> None:
    """`/dev -> /etc` and its like end the build; nothing is mounted or written where the link points."""
    rootfs = make_rootfs_image(server.data_dir, "hostile")
    (rootfs / name).symlink_to("/bin")
    failed = server.refused(plan := rootfs_plan("hostile"))
    assert (failed.path, failed.errno) == (f"/{name}", 40) or failed.path.startswith(f"/{name}/")
    assert sorted(os.listdir(rootfs)) == sorted(["bin", name])
    _assert_nothing_left(server, plan.session_id)


@needs_busybox
@pytest.mark.parametrize("name", ["passwd", "hosts", "resolv.conf", "hostname"])
def test_a_link_in_etc_redirects_no_write(server: Nsinit, name: str) -> None:
    """Files nsinit writes replace a link of the image instead of following it; a link for passwd ends the build."""
    outside = server.data_dir / "outside"
    outside.write_text("untouched")
    rootfs = make_rootfs_image(server.data_dir, "hostile")
    (rootfs / "etc").mkdir()
    (rootfs / "etc" / name).symlink_to(outside)
    if name == "passwd":
        assert server.refused(rootfs_plan("hostile")).stage == "etc"
    else:
        sandbox = server.build(rootfs_plan("hostile"))
        assert sandbox.run(f"readlink /etc/{name}").code != 0
        sandbox.teardown()
    assert outside.read_text() == "untouched"


@needs_busybox
def test_a_fifo_for_passwd_does_not_hang_the_build(server: Nsinit) -> None:
    """A file of the image that must be read is read only if it is a regular file."""
    rootfs = make_rootfs_image(server.data_dir, "hostile")
    (rootfs / "etc").mkdir()
    os.mkfifo(rootfs / "etc/passwd")
    assert server.refused(rootfs_plan("hostile")).stage == "etc"


@needs_busybox
def test_a_device_node_of_an_image_is_dead(server: Nsinit) -> None:
    """A disk's node smuggled into an image can't be opened inside."""
    rootfs = make_rootfs_image(server.data_dir, "hostile")
    os.mknod(rootfs / "disk", 0o060666, os.makedev(254, 0))
    os.chmod(rootfs / "disk", 0o666)
    sandbox = server.build(rootfs_plan("hostile"))
    assert "Permission denied" in sandbox.run("cat /disk").err
    sandbox.teardown()


@pytest.mark.parametrize(
    ("change", "stage"),
    [({"image": "missing"}, "overlay root"), ({"workspace_id": "no-such-workspace"}, "workspace")],
)
def test_a_failed_build_leaves_nothing(server: Nsinit, change: dict[str, str], stage: str) -> None:
    """The answer names the step and what it failed on; nothing of the session is left; the next build works."""
    plan = replace(host_plan(), **change)  # type: ignore[arg-type]
    failed = server.refused(plan)
    assert (failed.stage, failed.errno) == (stage, 2)
    assert next(iter(change.values())) in failed.path
    _assert_nothing_left(server, plan.session_id)
    server.build(host_plan()).teardown()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"session_id": "../../../etc"}, "invalid session id: '../../../etc'"),
        ({"session_id": "0123456789ABCDEF"}, "invalid session id: '0123456789ABCDEF'"),
        ({"session_id": "0123456789abcdef\n"}, r"invalid session id: '0123456789abcdef\n'"),
        ({"image": "../host"}, "invalid image name: '../host'"),
        ({"image": "a/b"}, "invalid image name: 'a/b'"),
        ({"workspace_id": ".."}, "invalid workspace id: '..'"),
        ({"workspace_id": "a\0b"}, r"invalid workspace id: 'a\x00b'"),
        ({"account": "root"}, "invalid account: 'root'"),
        ({"account": "a:b"}, "invalid account: 'a:b'"),
        (
            {"limits": Limits(memory_bytes=0, pids=64, cpu_quota_us=100_000)},
            "memory_bytes must be between 4194304 and 70368744177664, got 0",
        ),
        (
            {"limits": Limits(memory_bytes=1 << 28, pids=-1, cpu_quota_us=100_000)},
            "pids must be between 2 and 4194304, got -1",
        ),
        ({"tmp_bytes": -1}, "tmp_bytes must be between 4096 and 70368744177664, got -1"),
    ],
)
def test_a_bad_name_or_number_is_refused_before_anything_is_made(
    server: Nsinit, change: dict[str, object], sentence: str
) -> None:
    """nsinit doesn't trust the daemon's checks; the answer and the log both say what is wrong with which value."""
    plan = replace(host_plan(), **change)  # type: ignore[arg-type]
    failed = server.refused(plan)
    assert (failed.stage, failed.errno, failed.message) == ("validate", 0, sentence)
    (line,) = [json.loads(each) for each in server.log.splitlines() if "request failed" in each]
    assert (line["stage"], line["reason"], line["session_id"]) == ("validate", sentence, plan.session_id)
    assert server.scan() == {}


def test_a_second_build_of_a_running_session_does_not_touch_it(server: Nsinit) -> None:
    """The id is taken: the second build fails and the first sandbox goes on."""
    sandbox = server.build(host_plan())
    sandbox.run("export KEPT=yes")
    assert server.refused(host_plan(sandbox.session_id)).errno == 17
    assert sandbox.run("echo $KEPT").out == "yes\n"
    sandbox.teardown()


def test_a_prepared_pool_sandbox_becomes_the_sandbox_of_its_id(server: Nsinit) -> None:
    """Prepare makes the process, Build only adds the image to it."""
    session_id = new_id()
    answer, _ = server.ask(Prepare, session_id=session_id, limits=ROOMY)
    assert isinstance(answer, Ok)
    (pid,) = server.processes()
    sandbox = server.build(host_plan(session_id))
    assert sandbox.pid == pid
    assert sandbox.run("echo works").out == "works\n"
    sandbox.teardown()


def test_a_pool_sandbox_with_an_image_becomes_the_sandbox_of_its_id(server: Nsinit) -> None:
    """The image is mounted already: the build adds the parts that differ from plan to plan."""
    plan = _imaged(server)
    (pid,) = server.processes()
    server.ask(MakeWorkspace, workspace_id="kept")
    sandbox = server.build(replace(plan, workspace_id="kept", readonly_rootfs=True, limits=replace(ROOMY, pids=99)))
    assert sandbox.pid == pid
    assert {"pivot root", "workspace"} <= sandbox.built.timings_us.keys()
    assert not {"overlay root", "etc"} & sandbox.built.timings_us.keys()
    assert sandbox.run("echo works > /workspace/f; cat /workspace/f").out == "works\n"
    assert sandbox.run("hostname; stat -c %U /etc/passwd").out.split() == [f"sk-{plan.session_id[:8]}", "root"]
    assert "Read-only" in sandbox.run("touch /usr/f /f").err
    sandbox.teardown()
    os.sync()  # a cgroup with pages of workspace files stays until they are written
    wait_until(lambda: server.traces(plan.session_id) == [], "the pages of the workspace's file are freed")
    _assert_nothing_left(server, plan.session_id)


@pytest.mark.parametrize(
    "other",
    [
        {"image": "other"},
        {"limits": replace(ROOMY, memory_bytes=ROOMY.memory_bytes * 2)},
        {"disk": DiskLimits(64 << 20, 2000)},
        {"tmp_bytes": 1 << 20},
        {"shm_inodes": 77},
        {"account": "user"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_pool_sandbox_with_an_image_is_no_sandbox_of_another_plan(server: Nsinit, other: dict[str, Any]) -> None:
    """No session gets an image, or sizes, that its plan does not name; the id can be built again."""
    plan = _imaged(server)
    failed = server.refused(replace(plan, **other))
    assert (failed.stage, failed.errno) == ("pool", errno.EINVAL)
    _assert_nothing_left(server, plan.session_id)
    server.build(plan).teardown()


def test_only_a_blank_pool_sandbox_gets_an_image(server: Nsinit) -> None:
    """A pool sandbox that already has an image gets no other, nor does a running session, which lives on; a pool
    sandbox whose image is missing is removed.
    """
    plan = _imaged(server)
    answer, _ = server.ask(MountImage, plan=plan)
    assert (answer.stage, answer.errno) == ("pool", errno.ENOENT)
    sandbox = server.build(plan)
    answer, _ = server.ask(MountImage, plan=plan)
    assert (answer.stage, answer.errno) == ("pool", errno.ENOENT)
    assert sandbox.run("echo lives").out == "lives\n"
    sandbox.teardown()
    missing = host_plan(new_id(), image="missing")
    server.ask(Prepare, session_id=missing.session_id, limits=ROOMY)
    answer, _ = server.ask(MountImage, plan=missing)
    assert answer.stage == "overlay root"
    _assert_nothing_left(server, missing.session_id)


def _imaged(server: Nsinit) -> SandboxPlan:
    plan = host_plan(new_id())
    server.ask(Prepare, session_id=plan.session_id, limits=ROOMY)
    answer, _ = server.ask(MountImage, plan=plan)
    assert isinstance(answer, Ok), answer
    return plan


def test_a_pool_sandbox_that_was_never_used_is_discarded(server: Nsinit) -> None:
    """Teardown takes it away, whole, blank or with an image."""
    session_id = new_id()
    server.ask(Prepare, session_id=session_id, limits=ROOMY)
    server.teardown(session_id)
    _assert_nothing_left(server, session_id)
    plan = _imaged(server)
    server.teardown(plan.session_id)
    _assert_nothing_left(server, plan.session_id)


def test_a_pool_sandbox_that_died_fails_its_build_alone(server: Nsinit) -> None:
    """A killed pool sandbox gives a clear failure and leaves nothing; the same id can be built again."""
    session_id = new_id()
    server.ask(Prepare, session_id=session_id, limits=ROOMY)
    (pid,) = server.processes()
    os.kill(pid, signal.SIGKILL)
    failed = server.refused(host_plan(session_id))
    assert failed.stage == "child"
    _assert_nothing_left(server, session_id)
    server.build(host_plan(session_id)).teardown()


def test_a_workspace_maps_its_owner_and_squashes_root(server: Nsinit) -> None:
    """The sandbox user writes as disk uid 1000; no file of a workspace is ever owned by root or a session's range."""
    server.ask(MakeWorkspace, workspace_id="wide.open")
    sandbox = server.build(host_plan(workspace_id="wide.open"))
    sandbox.run("echo kept > /workspace/file && chmod 6755 /workspace/file")
    assert sandbox.run("stat -c %u:%g /workspace /workspace/file").out.split() == ["1000:1000", "1000:1000"]
    assert "nosuid" in sandbox.run("grep ' /workspace ' /proc/self/mounts").out
    on_disk = os.stat(server.data_dir / "workspaces/wide.open/file")
    assert (on_disk.st_uid, on_disk.st_gid) == (1000, 1000)
    sandbox.teardown()


def test_a_foreign_owner_in_a_workspace_can_not_be_taken_over(server: Nsinit) -> None:
    """A file whose disk owner is outside the map shows as nobody's and can't be written or removed through a chown."""
    server.ask(MakeWorkspace, workspace_id="shared")
    stray = server.data_dir / "workspaces/shared/stray"
    stray.write_text("root's")
    stray.chmod(0o600)
    sandbox = server.build(host_plan(workspace_id="shared"))
    assert sandbox.run("stat -c %u /workspace/stray").out == "65534\n"
    assert sandbox.run("cat /workspace/stray").code != 0
    assert sandbox.run("echo x >> /workspace/stray").code != 0
    sandbox.teardown()
    assert stray.read_text() == "root's"


def test_a_workspace_outlives_its_session(server: Nsinit) -> None:
    """Teardown deletes nothing of a workspace, and the next session finds its files."""
    server.ask(MakeWorkspace, workspace_id="notes")
    first = server.build(host_plan(workspace_id="notes"))
    first.run("mkdir -p /workspace/deep/er && echo 1 > /workspace/deep/er/f")
    first.teardown()
    second = server.build(host_plan(workspace_id="notes"))
    assert second.run("cat /workspace/deep/er/f").out == "1\n"
    second.teardown()
    assert (server.data_dir / "workspaces/notes/deep/er/f").read_text() == "1\n"


def test_make_workspace_twice_changes_nothing(server: Nsinit) -> None:
    """Making a workspace that is there keeps its files and answers Ok."""
    server.ask(MakeWorkspace, workspace_id="again")
    (server.data_dir / "workspaces/again/f").write_text("x")
    answer, _ = server.ask(MakeWorkspace, workspace_id="again")
    assert isinstance(answer, Ok)
    assert (server.data_dir / "workspaces/again/f").read_text() == "x"


def test_a_read_only_root_leaves_workspace_home_and_tmp_writable(server: Nsinit) -> None:
    """With `readonly_rootfs` the image can't be changed, not even by its owner's uid."""
    sandbox = server.build(host_plan(readonly_rootfs=True, account="user"))
    places = ["/workspace", "/home/sandbox", "/home/user", "/tmp", "/dev/shm"]
    writable = f"for d in {' '.join(places)}; do echo x > $d/f && echo $d; done"
    assert sandbox.run(writable).out.split() == places
    options = {line.split()[1]: line.split()[3] for line in sandbox.run("cat /proc/self/mounts").out.splitlines()}
    assert options["/"].startswith("ro,")
    assert options["/usr"].startswith("ro,")
    sandbox.teardown()


def test_tmp_is_bounded_in_bytes_and_files(server: Nsinit) -> None:
    """A full /tmp says so; the session lives on."""
    sandbox = server.build(host_plan(tmp_bytes=1 << 20))
    assert "No space left" in sandbox.run("head -c 2000000 /dev/zero > /tmp/big").err
    script = """
import itertools
try:
    for number in itertools.count():
        open(f"/tmp/{number}", "w").close()
except OSError as error:
    print(error.errno, number < 5000)
"""
    sandbox.run("rm /tmp/big")
    assert sandbox.python(script) == "28 True"
    sandbox.teardown()


def test_a_socket_path_longer_than_an_address_holds_works() -> None:
    """The data directory may be deeper than the 108 bytes of sun_path."""
    with data_directory() as short:
        deep = short / ("d" * 100) / ("e" * 100)
        deep.mkdir(parents=True)
        shutil.move(short / "images", deep / "images")
        with running(deep) as server:
            server.build(host_plan()).teardown()


def test_twenty_builds_at_once_are_all_answered(server: Nsinit) -> None:
    """Builds don't wait for one another, each has its own ids, and teardown of all leaves nothing."""
    plans = [host_plan() for _ in range(20)]
    for plan in plans:
        server.send(Build, plan=plan)
    bases = set()
    for _ in plans:
        answer, fds = server.receive()
        assert not isinstance(answer, Failed), answer
        bases.add(answer.identity.base_uid)
        for fd in fds:
            os.close(fd)
    assert len(bases) == len(plans)
    assert set(server.scan()) == {plan.session_id for plan in plans}
    for plan in plans:
        assert server.teardown(plan.session_id).leftovers == ()
    _assert_nothing_left(server, plans[0].session_id)


def test_a_teardown_ends_a_build_that_is_under_way(server: Nsinit) -> None:
    """Build and Teardown of one id, sent together: whatever the build answers, nothing is left."""
    plan: SandboxPlan = host_plan()
    server.send(Build, plan=plan)
    server.send(Teardown, session_id=plan.session_id)
    _, fds = server.receive()
    for fd in fds:
        os.close(fd)
    answer, _ = server.receive()
    assert isinstance(answer, TornDown)
    _assert_nothing_left(server, plan.session_id)
