"""Archives of workspaces on the real kernel: what goes out comes back, and what is hostile stays outside."""

from __future__ import annotations

import io
import os
import signal
import stat
import tarfile
from pathlib import Path

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.wire.protocol import Packed, Unpack
from sandkasten import errors
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.config import Config
from tests.file_requests import packed, unpacked, waits_for_disk
from tests.kernel.processes import nsinit_pid

_NAME = st.binary(min_size=1, max_size=120).filter(lambda name: not set(name) & {0, 0x2F} and name not in (b".", b".."))
_MODE = st.integers(0, 0o777)
_TIME = st.integers(0, 2**33 * 10**9)


async def pack(supervisor: LocalSupervisor, workspace_id: str, path: str = ".") -> bytes:
    return (await packed(supervisor.workspace_files(workspace_id), path))[0]


def tree(top: Path) -> dict[bytes, tuple[object, ...]]:
    """Return all there is below a directory: kind, mode, time, owner, content or target."""
    found: dict[bytes, tuple[object, ...]] = {}
    for directory, directories, files in os.walk(os.fsencode(top)):
        for name in (*directories, *files):
            path = os.path.join(directory, name)
            status = os.lstat(path)
            content: object = None
            if stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)
            elif stat.S_ISREG(status.st_mode):
                content = Path(os.fsdecode(path)).read_bytes()
            facts = (status.st_mode, status.st_mtime_ns, status.st_uid, status.st_gid, content)
            found[os.path.relpath(path, os.fsencode(top))] = facts
    return found


def fill(top: Path, names: dict[bytes, tuple[str, int, int, bytes]]) -> None:
    """Make what was drawn, as uid 1000."""
    for name, (kind, mode, time_ns, content) in names.items():
        path = os.path.join(os.fsencode(top), name)
        if kind == "link":
            os.symlink(content.replace(b"\0", b"") or b"x", path)
        elif kind == "directory":
            os.mkdir(path)
            Path(os.fsdecode(os.path.join(path, b"inside"))).write_bytes(content)
            os.chown(os.path.join(path, b"inside"), 1000, 1000)
        else:
            Path(os.fsdecode(path)).write_bytes(content)
        os.lchown(path, 1000, 1000)
        if kind != "link":
            os.chmod(path, mode | (stat.S_IRUSR if kind == "file" else stat.S_IRUSR | stat.S_IXUSR))
        os.utime(path, ns=(time_ns, time_ns), follow_symlinks=False)


async def test_what_goes_out_comes_back(supervisor: LocalSupervisor, config: Config) -> None:
    """Names of any bytes and length, modes, times to the nanosecond, links, empty directories: a property."""
    top = config.data_dir / "workspaces"
    entries = st.dictionaries(
        _NAME,
        st.tuples(st.sampled_from(["file", "directory", "link"]), _MODE, _TIME, st.binary(max_size=2000)),
        max_size=8,
    )
    drawn: list[dict[bytes, tuple[str, int, int, bytes]]] = []

    @settings(max_examples=12, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(entries)
    def draw(names: dict[bytes, tuple[str, int, int, bytes]]) -> None:
        drawn.append(names)

    draw()
    (top / "out").mkdir()
    for number, names in enumerate(drawn):
        (top / "out" / str(number)).mkdir()
        fill(top / "out" / str(number), names)
    await unpacked(supervisor, "back", await pack(supervisor, "out"))
    assert tree(top / "back") == tree(top / "out") | {
        os.fsencode(str(number)): (*before[:2], 1000, 1000, None)
        for number in range(len(drawn))
        for before in [_facts(top / "out" / str(number))]
    }
    assert sum(len(each) for each in drawn) > 10


def _facts(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mode, status.st_mtime_ns


async def test_hard_links_and_holes_survive_and_odd_files_are_counted(
    supervisor: LocalSupervisor, config: Config
) -> None:
    """Two names stay one file; a FIFO and a socket are left out; a directory alone can be packed."""
    top = config.data_dir / "workspaces" / "links"
    (top / "d").mkdir(parents=True)
    (top / "d/a").write_bytes(b"x" * 100_000)
    os.link(top / "d/a", top / "d/b")
    os.mkfifo(top / "d/fifo")
    for each in (top, *top.rglob("*")):
        os.lchown(each, 1000, 1000)
    archive, contents = await packed(supervisor.workspace_files("links"), "d")
    assert contents == Packed(2, 100_000, 1)
    assert await unpacked(supervisor, "linked", archive) == Packed(2, 100_000, 0)
    back = config.data_dir / "workspaces" / "linked"
    assert (back / "a").stat().st_ino == (back / "b").stat().st_ino
    (top / "d/secret").write_bytes(b"x")  # root's, and closed
    (top / "d/secret").chmod(0o600)
    with pytest.raises(errors.PermissionDenied):
        await pack(supervisor, "links")


async def test_what_is_unpacked_is_on_the_disk(supervisor: LocalSupervisor, config: Config) -> None:
    """A workspace is synced before the answer; the worker that writes it may sync no file system."""
    control = config.data_dir / "control"
    control.write_bytes(b"x" * 10_000)
    assert waits_for_disk(control)
    archive = _archive(_member("f", size=10_000), _member("d/g", size=10_000))
    async with supervisor.workspace_files("synced", make=True).stream(Unpack(10, 100_000)) as stream:
        await stream.send(archive)
        await stream.end(Packed)
    assert [waits_for_disk(config.data_dir / "workspaces/synced" / each) for each in ("f", "d/g")] == [False, False]


def _member(name: str, **fields: object) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(member, field, value)
    return member


def _archive(*members: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(b"x" * member.size) if member.isreg() else None)
    return buffer.getvalue()


async def test_hostile_archives_make_nothing(supervisor: LocalSupervisor, config: Config) -> None:
    """Traversal, links to walk through, broken archives: refused, and neither workspace nor draft is left."""
    out = {"type": tarfile.SYMTYPE, "linkname": "/"}
    hostile = {
        "traversal": _archive(_member("../up", size=1)),
        "walk": _archive(_member("link", **out), _member("link/etc/up", size=1)),
        "up": _archive(_member("link", type=tarfile.SYMTYPE, linkname=".."), _member("link/up", size=1)),
        "hard": _archive(_member("hard", type=tarfile.LNKTYPE, linkname="../../machine.json")),
        "none": b"no archive at all" * 100,
        "cut": _archive(_member("file", size=100_000))[:50_000],
    }
    for name, archive in hostile.items():
        with pytest.raises(errors.InvalidRequest):
            await unpacked(supervisor, f"bad-{name}", archive)
    assert os.listdir(config.data_dir / "workspaces") == os.listdir(config.data_dir / "drafts") == []
    assert await supervisor.workspaces() == []
    devices = [_member("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3), _member("fifo", type=tarfile.FIFOTYPE)]
    fine = _archive(*devices, _member("suid", size=3, mode=0o6755, uid=0, gid=0), _member("/absolute/f", size=1))
    assert await unpacked(supervisor, "fine", fine) == Packed(4, 4, 2)
    found = tree(config.data_dir / "workspaces" / "fine")
    assert {path: (facts[0], facts[2]) for path, facts in found.items()} == {
        b"suid": (stat.S_IFREG | 0o755, 1000),
        b"absolute": (stat.S_IFDIR | 0o755, 1000),
        b"absolute/f": (stat.S_IFREG | 0o644, 1000),
    }


async def test_an_import_replaces_all_or_nothing(supervisor: LocalSupervisor, config: Config) -> None:
    """Refused while there is one; with `replace` the old files stay until the new ones are whole, then are gone."""
    kept, new = _archive(_member("old", size=1)), _archive(_member("new", size=1))
    await unpacked(supervisor, "one", kept)
    with pytest.raises(errors.Conflict):
        await unpacked(supervisor, "one", new)
    with pytest.raises(errors.InvalidRequest):
        await unpacked(supervisor, "one", new[:512] + b"broken" * 1000, replace=True)
    async with supervisor.open_unpack("one", replace=True) as writer:  # and left before the end
        await writer.send(new[:700])
    top = config.data_dir / "workspaces" / "one"
    assert sorted(os.listdir(top)) == ["old"]
    await unpacked(supervisor, "one", new, replace=True)
    assert sorted(os.listdir(top)) == ["new"]
    assert os.listdir(config.data_dir / "drafts") == []


async def test_an_import_whose_caller_has_left_publishes_nothing_of_the_next_one(
    supervisor: LocalSupervisor, config: Config
) -> None:
    """An import whose caller has left may still be completed or not; it never publishes what the next import has sent
    so far, nor loses the content that the next import was to replace.
    """
    await unpacked(supervisor, "one", _archive(_member("old", size=1)))
    top = config.data_dir / "workspaces" / "one"
    is_sent, may_commit = trio.Event(), trio.Event()

    async def import_first(*, task_status: trio.TaskStatus[trio.CancelScope] = trio.TASK_STATUS_IGNORED) -> None:
        with trio.CancelScope() as scope:
            task_status.started(scope)
            async with supervisor.open_unpack("one", replace=True) as writer:
                await writer.send(_archive(_member("first", size=1)))
                is_sent.set()
                await may_commit.wait()
                await writer.commit()

    async def import_next() -> None:
        while True:
            try:
                async with supervisor.open_unpack("one", replace=True) as writer:
                    await writer.send(_archive(_member("next", size=1))[:700])
                    await trio.sleep(0.2)  # time for what may not happen
                    assert os.listdir(top) in (["old"], ["first"])
                    return
            except errors.WorkspaceBusy:
                await trio.sleep(0.001)

    async with trio.open_nursery() as nursery:
        first: trio.CancelScope = await nursery.start(import_first)
        await is_sent.wait()
        pid = nsinit_pid()
        os.kill(pid, signal.SIGSTOP)
        try:
            may_commit.set()
            await trio.testing.wait_all_tasks_blocked(0.1)
            first.cancel()
            await trio.testing.wait_all_tasks_blocked(0.1)
            nursery.start_soon(import_next)
        finally:
            os.kill(pid, signal.SIGCONT)
    assert os.listdir(top) in (["old"], ["first"])
    assert os.listdir(config.data_dir / "drafts") == []
