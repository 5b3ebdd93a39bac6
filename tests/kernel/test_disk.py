"""Disk limits from the inside and from the outside: what a session can fill, and what is left when it is gone."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from nsinit.cgroup.disk_io import find_disk
from nsinit.wire.protocol import AskDisk, DiskLimits, DiskSpec, DiskUse, Failed, IoLimits, Ok, Prepare, Ready, SetDisk
from runner.files.operations import perform
from runner.wire.protocol import CopyFile
from sandkasten.counters.cgroup import CgroupStats
from tests.kernel.harness import (
    ROOMY,
    Nsinit,
    Sandbox,
    data_directory,
    host_plan,
    new_id,
    run_outside,
    running,
    wait_until,
)
from tests.unit.test_runner_entries import work_in

MIB = 1 << 20
SMALL = DiskLimits(size_bytes=32 * MIB, inodes=2000)
LIMITED = ("loop", "tmpfs", pytest.param("project", marks=pytest.mark.project_quota), "btrfs")
on_xfs_too = pytest.mark.parametrize(
    "server", [*LIMITED, pytest.param("xfs", marks=pytest.mark.project_quota)], indirect=True, scope="module"
)
"""Mark of tests that run on XFS as well: mode `project` depends on how a file system counts and refuses."""

FILL_INODES = """
import errno, os
os.mkdir("/home/sandbox/many")
try:
    for number in range(5000):
        os.close(os.open(f"/home/sandbox/many/{number}", os.O_CREAT))
except OSError as error:
    print(errno.errorcode[error.errno], 1000 < number <= 2000)
"""

HOSTILE = """
import ctypes, errno, fcntl, os, struct
home = "/home/sandbox"
def attempt(name, work):
    try:
        work()
        print(name, "done")
    except OSError as error:
        print(name, errno.errorcode[error.errno])
fd = os.open(f"{home}/sparse", os.O_CREAT | os.O_RDWR)
attempt("sparse", lambda: os.ftruncate(fd, 1 << 34))
attempt("fallocate", lambda: os.posix_fallocate(fd, 0, 64 << 20))
os.ftruncate(fd, 0)
libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
for _ in range(50):  # hole punching and writing again in turns
    os.pwrite(fd, b"x" * (1 << 18), 1 << 33)
    libc.fallocate(fd, 3, 1 << 33, 1 << 18)
held = os.open(f"{home}/held", os.O_CREAT | os.O_RDWR)
os.unlink(f"{home}/held")
def fill():
    while True:
        os.write(held, b"y" * (1 << 20))
attempt("unlinked", fill)
attempt("while full", lambda: os.posix_fallocate(fd, 0, 8 << 20))
os.close(held)
def project():
    buffer = bytearray(28)
    fcntl.ioctl(fd, 0x801C581F, buffer)
    fcntl.ioctl(fd, 0x401C5820, struct.pack("=IIII", 0, 0, 0, 4711) + bytes(12))
attempt("project id", project)
os.unlink(f"{home}/sparse")
os.chdir(home)
for _ in range(900):  # longer than any path may be
    os.mkdir("deep")
    os.chdir("deep")
print("deep")
"""


@pytest.fixture(scope="module", params=LIMITED)
def server(request: pytest.FixtureRequest) -> Iterator[Nsinit]:
    """An nsinit whose sessions' disks are of one mode; project quotas need a file system made for them."""
    mode: DiskSpec = "project" if request.param == "xfs" else request.param
    with contextlib.ExitStack() as stack:
        elsewhere = stack.enter_context(MADE[request.param]()) if request.param in MADE else None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "tempdir", elsewhere or tempfile.tempdir)
            data_dir = stack.enter_context(data_directory())
        nsinit = stack.enter_context(running(data_dir, disk=mode))
        if mode == "project" and isinstance(nsinit.ready, Failed) and nsinit.ready.stage == "disk":
            pytest.skip(nsinit.ready.message)
        assert isinstance(nsinit.ready, Ready), nsinit.ready
        assert nsinit.ready.disk == mode
        yield nsinit


@contextlib.contextmanager
def btrfs(size_mb: int = 512) -> Iterator[str]:
    """A mounted btrfs with quotas."""
    with mounted("btrfs", "btrfs-progs", size_mb=size_mb) as point:
        run_outside(["btrfs", "quota", "enable", point])
        yield point


def xfs() -> AbstractContextManager[str]:
    """A mounted xfs that counts by project."""
    return mounted("xfs", "xfsprogs", "prjquota")


@contextlib.contextmanager
def mounted(fstype: str, package: str, *options: str, size_mb: int = 512) -> Iterator[str]:
    """A new file system in a sparse file; a machine that has no such one skips, in its own words."""
    program = f"mkfs.{fstype}"
    if shutil.which(program) is None:
        pytest.skip(f"needs {program} ({package})")
    with tempfile.TemporaryDirectory(prefix=f"sandkasten-{fstype}-") as directory:
        image, point = f"{directory}/image", f"{directory}/mounted"
        os.mkdir(point)
        with open(image, "wb") as file:
            file.truncate(size_mb * MIB)
        run_outside([program, "-q", image])
        try:
            run_outside(["mount", "-t", fstype, "-o", ",".join(("loop", *options)), image, point])
        except subprocess.CalledProcessError as error:
            why = error.stderr.partition(f"{point}: ")[2].partition("\n")[0]
            pytest.skip(f"this kernel mounts no {' '.join((fstype, *options))}: {why}")
        try:
            yield point
        finally:
            run_outside(["umount", point])


MADE: dict[str, Callable[[], AbstractContextManager[str]]] = {"btrfs": btrfs, "xfs": xfs}
"""File systems for data directories that this machine may lack, each with the context manager that makes one."""


def why_not(data_dir: Path, mode: DiskSpec) -> str | None:
    """Return why a mode can't be had, in nsinit's words."""
    server = Nsinit(data_dir, new_id(), disk=mode)
    server.close()
    if isinstance(server.ready, Ready):
        return None
    assert (type(server.ready), server.ready.stage) == (Failed, "disk")
    return str(server.ready.message)


def loops_of(data_dir: Path) -> list[str]:
    """Return the images below a data directory that are behind a loop device of this machine."""
    found = []
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            image = path.read_text().strip()
        except OSError:
            continue  # the device went while being looked at
        if image.startswith(str(data_dir)):
            found.append(image)
    return found


def use_of(server: Nsinit, sandbox: Sandbox) -> DiskUse:
    answer, _ = server.ask(AskDisk, session_id=sandbox.session_id)
    assert isinstance(answer, DiskUse), answer
    return answer


def settle(server: Nsinit) -> None:
    """Let a file system bring its counts up to date, if it does so only from time to time."""
    assert isinstance(server.ready, Ready)
    if server.ready.disk == "btrfs":
        run_outside(["sync", "-f", str(server.data_dir)])


def allocated_bytes(path: Path) -> int:
    return int(run_outside(["du", "--summarize", "--block-size=1", str(path)]).split()[0])


def digest(tree: Path) -> str:
    sums = hashlib.sha256()
    for path in sorted(tree.rglob("*")):
        sums.update(f"{path.relative_to(tree)} {path.lstat().st_mode} {path.lstat().st_size}".encode())
        sums.update(path.read_bytes() if path.is_file() and not path.is_symlink() else b"")
    return sums.hexdigest()


@on_xfs_too
def test_a_full_disk_is_enospc_and_hurts_nobody_else(server: Nsinit) -> None:
    """Writing ends at the limit, the session lives and has room again after deleting; its neighbour noticed nothing."""
    first, second = (server.build(host_plan(disk=SMALL)) for _ in range(2))
    full = first.run("head -c 100000000 /dev/zero > /home/sandbox/big")
    assert full.code == 1
    assert re.search("No space left on device|Disk quota exceeded", full.err)
    assert first.run("head -c 1000000 /dev/zero > /workspace/f").code != 0
    settle(server)
    used = use_of(server, first)
    assert 24 * MIB < used.limit_bytes <= SMALL.size_bytes
    assert used.used_bytes > 0.9 * used.limit_bytes
    assert second.run("head -c 20000000 /dev/zero > /home/sandbox/big; rm /home/sandbox/big").code == 0
    assert first.run("rm /home/sandbox/big; echo kept > /workspace/f; cat /workspace/f").out == "kept\n"
    settle(server)
    assert use_of(server, first).used_bytes < used.used_bytes // 2
    first.teardown()
    second.teardown()


@on_xfs_too
def test_inodes_are_limited(server: Nsinit) -> None:
    """Empty files end at the limit, too, and `df -i` says so."""
    if server.ready.disk == "btrfs":
        pytest.skip("btrfs does not count inodes; what they take counts as bytes")
    sandbox = server.build(host_plan(disk=SMALL))
    assert sandbox.python(FILL_INODES) in ("ENOSPC True", "EDQUOT True")
    used = use_of(server, sandbox)
    assert (used.used_inodes, used.limit_inodes <= 2048) == (used.limit_inodes, True)
    assert int(sandbox.run("df --output=iavail / | tail -1").out) == 0
    sandbox.teardown()


def test_every_part_of_the_root_shares_the_limit(server: Nsinit) -> None:
    """Writes to `/usr/local` count too; `/tmp` and `/dev/shm` have sizes and inodes of their own."""
    sandbox = server.build(host_plan(disk=SMALL))
    sizes = sandbox.run("for p in / /usr /workspace /home/sandbox; do df --output=size $p | tail -1; done").out.split()
    assert len(set(sizes)) == 1
    for path in ("/tmp", "/dev/shm"):
        size_kib, inodes = sandbox.run(f"df --output=size,itotal {path} | tail -1").out.split()
        assert 0 < int(size_kib) <= 256 * 1024
        assert 0 < int(inodes) <= 65536
    sandbox.teardown()


@on_xfs_too
def test_no_trick_gets_more_than_the_limit(server: Nsinit, tmp_path: Path) -> None:
    """Sparse files, holes, unlinked files, other project ids, chains of directories: the host gives what was promised,
    everything outside stays as it was, and all of it is gone afterwards."""
    (tmp_path / "canary").mkdir()
    (tmp_path / "canary/file").write_text("outside")
    before = digest(tmp_path), digest(server.data_dir / "images")
    sandbox = server.build(host_plan(disk=SMALL))
    out = sandbox.python(HOSTILE).replace("EDQUOT", "ENOSPC").splitlines()
    assert out[1:] == ["fallocate ENOSPC", "unlinked ENOSPC", "while full ENOSPC", out[4], "deep"]
    assert out[4] in ("project id EPERM", "project id EINVAL", "project id ENOTTY", "project id EOPNOTSUPP")
    directory = server.data_dir / "sessions" / sandbox.session_id
    assert allocated_bytes(directory) <= SMALL.size_bytes
    assert sandbox.run("echo alive").out == "alive\n"
    torn_down = sandbox.teardown()
    assert torn_down.leftovers == ()
    wait_until(lambda: not os.listdir(server.data_dir / "trash"), "the trash is deleted")
    assert (loops_of(server.data_dir), server.traces(sandbox.session_id)) == ([], [])
    assert (digest(tmp_path), digest(server.data_dir / "images")) == before


def test_a_pool_sandbox_made_for_another_size_gets_the_right_one(server: Nsinit) -> None:
    """The disk of a pool sandbox has a guessed size; the plan's size replaces the guess."""
    session_id = new_id()
    server.ask(Prepare, session_id=session_id, limits=ROOMY, disk=DiskLimits(64 * MIB, 4000))
    sandbox = server.build(host_plan(session_id, disk=SMALL))
    use = use_of(server, sandbox)
    assert 0 < use.limit_bytes <= SMALL.size_bytes
    assert use.limit_inodes <= 2048
    sandbox.teardown()
    assert loops_of(server.data_dir) == []


def test_a_running_session_gets_more_where_the_mechanism_can(server: Nsinit) -> None:
    """A quota changes at once, both ways; a disk of its own keeps its size, and nsinit says so."""
    sandbox = server.build(host_plan(disk=SMALL))
    answer, _ = server.ask(SetDisk, session_id=sandbox.session_id, disk=DiskLimits(64 * MIB, 4000))
    assert isinstance(server.ready, Ready)
    if server.ready.disk in ("loop", "tmpfs"):
        assert (answer.stage, answer.errno) == ("disk limits", errno.EOPNOTSUPP)
        assert sandbox.run("head -c 40000000 /dev/zero > /home/sandbox/big").code == 1
    else:
        assert isinstance(answer, Ok), answer
        assert sandbox.run("head -c 40000000 /dev/zero > /home/sandbox/big").code == 0
        assert sandbox.run("head -c 40000000 /dev/zero >> /home/sandbox/big").code == 1
    sandbox.teardown()


@pytest.mark.parametrize(
    ("disk", "message"),
    [
        (DiskLimits(-1, 1000), "disk size_bytes must be"),
        (DiskLimits(1 << 50, 1000), "disk size_bytes must be"),
        (DiskLimits(32 * MIB, 0), "disk inodes must be"),
        (DiskLimits(32 * MIB, 1 << 40), "disk inodes must be"),
    ],
)
def test_numbers_no_disk_can_have_are_refused_again(server: Nsinit, disk: DiskLimits, message: str) -> None:
    """nsinit checks for itself what the daemon sends."""
    assert server.refused(host_plan(disk=disk)).message.startswith(message)


def test_what_is_deleted_inside_is_given_back_to_the_host() -> None:
    """The image is sparse, holds no more than what is in it, and shrinks again."""
    with data_directory() as data_dir, running(data_dir, disk="loop") as server:
        sandbox = server.build(host_plan())
        directory = data_dir / "sessions" / sandbox.session_id
        assert allocated_bytes(directory) < 2 * MIB
        assert sandbox.run("dd if=/dev/zero of=/home/sandbox/big bs=1M count=48 oflag=direct").code == 0
        assert allocated_bytes(directory) > 40 * MIB
        sandbox.run("rm /home/sandbox/big")
        wait_until(lambda: allocated_bytes(directory) < 10 * MIB, "the host has its blocks again")
        sandbox.teardown()


def test_no_loop_device_outlives_its_session() -> None:
    """The loop device of a session goes with it, whether PID 1 alone, nsinit, or nsinit in the middle of a build is
    killed.
    """
    with data_directory() as data_dir:
        node_id = new_id()
        with running(data_dir, node_id, disk="loop") as server:
            killed, kept = (server.build(host_plan(disk=SMALL)) for _ in range(2))
            os.kill(killed.pid, signal.SIGKILL)
            wait_until(lambda: len(loops_of(data_dir)) == 1, "the device of the killed session went")
            server.ask(Prepare, session_id=new_id(), limits=ROOMY, disk=SMALL)
            server.send(Prepare, session_id=new_id(), limits=ROOMY, disk=SMALL)
            server.kill()
            wait_until(lambda: len(loops_of(data_dir)) == 1, "only the device of the running session is there")
        with running(data_dir, node_id, disk="loop") as server:
            answer, _ = server.ask(AskDisk, session_id=kept.session_id)
            assert isinstance(answer, DiskUse), answer
            assert answer.limit_bytes <= SMALL.size_bytes
            server.teardown(kept.session_id)
            assert loops_of(data_dir) == []


def test_a_disk_in_memory_leaves_half_of_it_to_programs() -> None:
    """A full disk in memory is no space left on the device, and not an out-of-memory kill."""
    with data_directory() as data_dir, running(data_dir, disk="tmpfs") as server:
        plan = host_plan()
        sandbox = server.build(plan)
        assert use_of(server, sandbox).limit_bytes == plan.limits.memory_bytes // 2
        assert sandbox.run("head -c 1000000000 /dev/zero > /home/sandbox/big").code == 1
        assert sandbox.teardown().oom_kills in (0, -1)


def test_without_a_mechanism_nothing_is_limited_and_nothing_is_claimed() -> None:
    """Mode `none`, which must be asked for, limits and counts nothing."""
    with data_directory() as data_dir, running(data_dir, disk="none") as server:
        sandbox = server.build(host_plan(disk=SMALL))
        assert sandbox.run("head -c 50000000 /dev/zero > /home/sandbox/big").code == 0
        use = use_of(server, sandbox)
        assert (use.used_bytes, use.limit_bytes, use.used_inodes, use.limit_inodes) == (-1, -1, -1, -1)
        sandbox.teardown()


def test_a_copy_within_a_file_system_that_shares_blocks_takes_none() -> None:
    """A request to copy a directory, on btrfs."""
    with btrfs() as point:
        top, content = Path(point), os.urandom(MIB) * 64
        (top / "d").mkdir()
        (top / "d/f").write_bytes(content)
        os.sync()
        before = os.statvfs(point)
        perform(CopyFile("d", "copy"), work_in(top))
        os.sync()
        assert (before.f_bfree - os.statvfs(point).f_bfree) * before.f_frsize < 8 * MIB
        assert (top / "copy/f").read_bytes() == content


def test_a_mode_that_can_not_be_had_ends_the_start() -> None:
    """A start with a disk mode that the machine lacks ends with the reason; no session runs with less than was asked
    for.
    """
    with data_directory() as data_dir:
        assert why_not(data_dir, "btrfs") == "disk.mode btrfs can't be had here: the data directory is not on btrfs"
        assert os.listdir(data_dir / "sessions") == []


IO_FILES = {"io": "io.max", "blkio": "blkio.throttle.write_bps_device"}
IO_BPS = 8 << 20
IO_BYTES = 16 << 20


def test_the_disk_is_slowed_down_to_the_limit_and_counted() -> None:
    """Direct writes take the time that the limit gives them, in v1 as in v2, and the counters have them."""
    with data_directory() as data_dir:
        if not find_disk(str(data_dir)):
            pytest.skip("the file system names no disk")
        with running(data_dir, disk="none", io=IoLimits(write_bps=IO_BPS)) as nsinit:
            assert isinstance(nsinit.ready, Ready)
            dirs = nsinit.ready.cgroup_dirs
            found = dirs.keys() & IO_FILES.keys()
            if not found:
                pytest.skip("there is no controller of disks")
            (name,) = found
            box = nsinit.build(host_plan())
            with open(os.path.join(dirs[name], box.session_id, IO_FILES[name])) as file:
                assert str(IO_BPS) in file.read()
            began = time.monotonic()
            done = box.run("dd if=/dev/zero of=/workspace/big bs=1M count=16 oflag=direct 2>&1")
            assert "16+0 records out" in done.out
            assert time.monotonic() - began > 0.75 * IO_BYTES / IO_BPS
            stats = CgroupStats(dirs, box.session_id)
            try:
                found_stats = stats.read_all()
            finally:
                stats.close()
            assert (found_stats.io_write_bytes or 0) >= IO_BYTES
            assert (found_stats.io_writes or 0) > 0
