"""A machine whose disk is full, as programs in sessions meet it: an error at the write, and nothing is lost that was
written before.

The data directory is a file system of its own of one GiB, which another program fills.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trio

from nsinit.kernel import stage
from nsinit.server.disk_watch import DiskWatch
from nsinit.server.leftovers import HostView
from nsinit.storage.ext4_image import find_tool, make_image
from nsinit.storage.paths import Layout
from nsinit.wire.protocol import DiskLimits
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import open_supervisor
from sandkasten.config import Config, DiskSettings, ServerSettings
from sandkasten.errors import DiskReserve
from sandkasten.model import Cause, ExecSpec, Limits, SessionSpec, Status
from sandkasten.model.workspace import WorkspaceQuota, WorkspaceSpec
from tests.kernel.harness import run_outside
from tests.kernel.processes import nsinit_pid
from tests.kernel.test_disk import btrfs, mounted
from tests.waiting import until

MIB = 1 << 20
SIZE_MB, RESERVE_MB = 1024, 256
LIMITS = Limits(disk_mb=300, memory_mb=512)
CUT_SHORT = Limits(disk_mb=130, memory_mb=512)
"""mke2fs makes a file system of 128 MiB of it: the last block group would be too small."""
HOME = "/home/sandbox"

WRITE = """
import errno, hashlib, json, os, sys
path, count, wants_sync = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "sync"
done, why = 0, ""
try:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in range(count):
        block = memoryview(hashlib.sha256(b"%d" % number).digest() * 32768)
        while block:
            block = block[os.write(fd, block):]
        if wants_sync:
            os.fsync(fd)
        done += 1
except OSError as error:
    why = errno.errorcode[error.errno]
    print(error, file=sys.stderr)
print(json.dumps([done, why]))
sys.exit(why != "")
"""
"""Appends blocks of a MiB, each with bytes of its own; says how many were taken, and what became of the next."""

CHECK = """
import hashlib, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
with open(fd, "rb") as file:
    print(all(file.read(1 << 20) == hashlib.sha256(b"%d" % n).digest() * 32768 for n in range(int(sys.argv[2]))))
"""


class Machine:
    """A supervisor on a disk that a test can fill."""

    def __init__(self, supervisor: LocalSupervisor, point: Path, mode: str) -> None:
        self.supervisor = supervisor
        self.has_images = mode == "loop"
        self._point = point
        self._filler = point / "filler"

    @property
    def free_bytes(self) -> int:
        space = os.statvfs(self._point)
        return space.f_bavail * space.f_frsize

    async def fill(self, session_id: str) -> None:
        """Take all blocks but those that are root's, as another program of the machine would; wait until a session
        knows."""
        with self._filler.open("wb") as file, contextlib.suppress(OSError):
            while self.free_bytes > 0:
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, MIB)
                await trio.sleep(0.001)
        os.sync()
        if self.has_images:
            await until(lambda: self.has_no_room(session_id))

    def make_room(self) -> None:
        self._filler.unlink()

    def sync(self) -> None:
        """Bring all to the disk, and forget what images hold in memory: what is read next is on the disk."""
        fd = os.open(self._point, os.O_RDONLY)
        os.sync()
        os.close(fd)
        for image in (*self._point.glob("data/sessions/*/*.ext4"), *self._point.glob("data/volumes/*/image")):
            with image.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    async def write(self, session_id: str, path: str, count: int, *, sync: bool = False) -> tuple[int, str, Cause]:
        spec = ExecSpec(argv=("python3", "-c", WRITE, path, str(count), "sync" if sync else ""))
        result = await self.supervisor.exec(session_id, spec)
        done, why = json.loads(result.stdout)
        return done, why, result.end.cause

    async def is_whole(self, session_id: str, path: str, count: int) -> bool:
        result = await self.supervisor.exec(session_id, ExecSpec(argv=("python3", "-c", CHECK, path, str(count))))
        return result.stdout == b"True\n"

    async def has_room(self, session_id: str) -> bool:
        shown = await self.supervisor.exec(session_id, ExecSpec(f"stat -f -c %a {HOME}"))
        return shown.stdout != b"0\n"

    async def has_no_room(self, session_id: str) -> bool:
        return not await self.has_room(session_id)


@contextlib.contextmanager
def _ext4() -> Iterator[str]:
    with mounted("ext4", "e2fsprogs", size_mb=SIZE_MB) as point:
        yield point


MODES = {"loop": _ext4, "btrfs": lambda: btrfs(SIZE_MB), "none": _ext4, "tmpfs": _ext4}
ON_DISK = ("loop", "btrfs", "none")


@pytest.fixture(params=["loop"])
async def machine(request: pytest.FixtureRequest) -> AsyncIterator[Machine]:
    with MODES[request.param]() as point:
        config = Config(
            data_dir=Path(point) / "data",
            server=ServerSettings(pool_sandboxes=0),
            disk=DiskSettings(mode=request.param, reserve_percent=0, reserve_mb=RESERVE_MB),
        )
        async with open_supervisor(config) as supervisor:
            yield Machine(supervisor, Path(point), request.param)


@pytest.mark.parametrize("machine", ON_DISK, indirect=True)
async def test_a_full_machine_is_a_full_disk_to_programs(machine: Machine) -> None:
    """The program's write fails, and its run has the cause. What was written before is whole, of the session and of its
    neighbour; both go on, creates are refused, and with room again all is as before."""
    supervisor = machine.supervisor
    full, neighbour = [(await supervisor.create(SessionSpec(limits=each))).id for each in (CUT_SHORT, LIMITS)]
    for each in (full, neighbour):
        assert await machine.write(each, f"{HOME}/before", 20, sync=True) == (20, "", Cause.EXITED)
    machine.sync()
    await machine.fill(full)
    done, why, cause = await machine.write(full, f"{HOME}/after", 60, sync=True)
    assert (why, cause) == ("ENOSPC", Cause.DISK_FULL)
    machine.sync()
    for each in (full, neighbour):
        assert await machine.is_whole(each, f"{HOME}/before", 20)
    assert done == 0 or await machine.is_whole(full, f"{HOME}/after", done)
    assert (await supervisor.exec(neighbour, ExecSpec("echo fine"))).stdout == b"fine\n"
    overwrite = f"printf x | dd of={HOME}/before conv=notrunc,fsync status=none && head -c 1 {HOME}/before"
    assert (await supervisor.exec(neighbour, ExecSpec(overwrite))).stdout in (b"x", b"")  # btrfs writes to a new place
    with pytest.raises(DiskReserve):
        await supervisor.create(SessionSpec(limits=LIMITS))
    machine.make_room()
    await until(lambda: machine.has_room(full))
    assert await machine.write(full, f"{HOME}/again", 20) == (20, "", Cause.EXITED)
    assert {(await supervisor.get(each)).status for each in (full, neighbour)} == {Status.RUNNING}


@pytest.mark.parametrize("machine", ["tmpfs"], indirect=True)
async def test_files_in_memory_know_no_full_machine(machine: Machine) -> None:
    """A disk of mode `tmpfs` takes what it took before."""
    session_id = (await machine.supervisor.create(SessionSpec(limits=LIMITS))).id
    await machine.fill(session_id)
    assert await machine.write(session_id, f"{HOME}/after", 60) == (60, "", Cause.EXITED)


async def test_no_burst_of_writers_overtakes_the_watch(machine: Machine) -> None:
    """Sessions that write as fast as they can, together more than the machine has: one is told of the block that finds
    no place, and every block that was taken is on the disk, though nobody has waited for it."""
    ids = [(await machine.supervisor.create(SessionSpec(limits=LIMITS))).id for _ in range(3)]
    ends: dict[str, tuple[int, str, Cause]] = {}

    async def write(session_id: str) -> None:
        ends[session_id] = await machine.write(session_id, f"{HOME}/burst", 250)

    async with trio.open_nursery() as nursery:
        for each in ids:
            nursery.start_soon(write, each)
    assert "ENOSPC" in [why for _, why, _ in ends.values()]
    machine.sync()
    assert machine.free_bytes > 0
    for session_id, (done, _, _) in ends.items():
        assert done == 0 or await machine.is_whole(session_id, f"{HOME}/burst", done)


async def test_no_program_can_keep_room_that_the_machine_may_not_have(machine: Machine) -> None:
    """Blocks set aside by fallocate(2) would be written when the disk is full; images have none. The C library's
    function writes them instead."""
    session = await machine.supervisor.create(SessionSpec(limits=LIMITS))
    refused = await machine.supervisor.exec(session.id, ExecSpec(f"LC_ALL=C fallocate -l 1M {HOME}/kept"))
    assert b"Operation not supported" in refused.output
    script = f"import os; fd = os.open('{HOME}/kept', os.O_RDWR | os.O_CREAT); os.posix_fallocate(fd, 0, 1 << 20)"
    done = await machine.supervisor.exec(session.id, ExecSpec(f'python3 -c "{script}" && du -k {HOME}/kept | cut -f1'))
    assert int(done.stdout) >= 1024


async def test_a_workspace_with_a_quota_loses_nothing(machine: Machine) -> None:
    """The image of a workspace is one as a session's, and others have it at the same time."""
    supervisor = machine.supervisor
    await supervisor.make_workspace("shared", WorkspaceSpec(quota=WorkspaceQuota(200 * MIB, 5000)))
    first, second = [(await supervisor.create(SessionSpec(limits=LIMITS, workspace_id="shared"))).id for _ in range(2)]
    assert await machine.write(first, "/workspace/before", 20, sync=True) == (20, "", Cause.EXITED)
    await machine.fill(first)
    await until(lambda: machine.has_no_room(second))
    done, why, cause = await machine.write(second, "/workspace/after", 60, sync=True)
    assert (why, cause) == ("ENOSPC", Cause.DISK_FULL)
    machine.sync()
    assert await machine.is_whole(second, "/workspace/before", 20)
    assert done == 0 or await machine.is_whole(first, "/workspace/after", done)


async def test_the_next_nsinit_gives_back_what_the_last_one_held(machine: Machine) -> None:
    """An nsinit that was killed while the disk was full leaves images that take nothing; the next one looks."""
    supervisor = machine.supervisor
    session_id = (await supervisor.create(SessionSpec(limits=LIMITS))).id
    await machine.fill(session_id)
    os.kill(nsinit_pid(), signal.SIGKILL)
    machine.make_room()
    await until(lambda: machine.has_room(session_id))
    assert await machine.write(session_id, f"{HOME}/again", 20) == (20, "", Cause.EXITED)


def test_the_watch_holds_the_images_of_its_data_directory_alone(tmp_path: Path) -> None:
    """An image of another program stays as it is, though a link in the data directory leads to it. Half of the disk is
    the most that may be asked for, nothing is held for a floor of nothing, and an image is released whatever it keeps.
    One that can't be told costs no other one its turn."""
    with contextlib.ExitStack() as stack:
        point = Path(stack.enter_context(mounted("ext4", "e2fsprogs", size_mb=SIZE_MB)))
        layout = Layout(str(point / "data"))
        for each in (layout.sessions, layout.volumes, layout.volume_drafts, f"{layout.stage}/{stage.DEVICES}"):
            os.makedirs(each)
        (point / "data" / tmp_path.name).symlink_to(tmp_path)
        places = (tmp_path / "a", *(point / f"data/sessions/{name}" for name in "bcd"))
        foreign, broken, *ours = [stack.enter_context(_image(place)) for place in places]
        Path(f"{layout.stage}/{stage.DEVICES}/{broken.removeprefix('loop')}").write_bytes(b"no device")
        host = HostView.open()
        stack.callback(host.close)
        watch = DiskWatch.open(layout, host.blocks_fd, 1 << 62)
        stack.callback(watch.close)
        os.sync()  # what the machine's programs wrote counts as on its way, to this disk too
        assert (_look(watch), [_kept(each) for each in ours]) == (False, [0, 0])
        with (point / "filler").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, SIZE_MB * MIB * 3 // 5)
        assert _look(watch)
        assert (_kept(foreign), [_kept(each) for each in ours]) == (0, [32767] * 2)
        (Path("/sys/fs/ext4") / ours[0] / "reserved_clusters").write_text("30000")
        watch.floor_bytes = 0
        with (point / "more").open("wb") as file, contextlib.suppress(OSError):
            while True:
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, MIB)
        (tmp_path / "on its way").write_bytes(bytes(16 * MIB))
        assert (_look(watch), [_kept(each) for each in ours]) == (False, [655] * 2)


@contextlib.contextmanager
def _image(directory: Path) -> Iterator[str]:
    """Yield the device of a mounted image that was made for 130 MiB, `directory`/1.ext4."""
    directory.mkdir()
    image = directory / "1.ext4"
    make_image(find_tool("mke2fs"), DiskLimits(130 * MIB, 30_000), str(image))
    with tempfile.TemporaryDirectory() as where:
        run_outside(["mount", "-o", "loop", str(image), where])
        try:
            source = run_outside(["findmnt", "-n", "-o", "SOURCE", where]).strip()
            yield os.path.basename(source)
        finally:
            run_outside(["umount", where])


def _look(watch: DiskWatch) -> bool:
    for _ in watch.look():
        pass
    return watch._is_holding


def _kept(device: str) -> int:
    return int((Path("/sys/fs/ext4") / device / "reserved_clusters").read_text())
