"""Persistent workspaces on the real kernel: who owns what is in them, who has them, and what nothing can take away."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from nsinit.helpers.cgroup_maker import EMPTIER_NAME
from nsinit.sandbox.init_steps import NAME
from runner.wire.protocol import ChangeOwner, Done
from sandkasten import errors
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.actors.workspaces.uploads import sweep_once
from sandkasten.config import Config
from sandkasten.links.fds import OwnedFd
from sandkasten.model import ExecSpec, ProcessSpec, SessionSpec, Status
from sandkasten.model.workspace import UPLOAD_S, UploadSpec, WorkspacePatch, WorkspaceSpec
from tests import file_requests
from tests.file_requests import listed, looked_at, removed, written
from tests.kernel.processes import is_init, nsinit_pid
from tests.leaks import descendants
from tests.waiting import patience, until

WORKSPACE = "user-1"


async def write(supervisor: LocalSupervisor, path: str, content: bytes) -> str:
    return await written(supervisor.workspace_files(WORKSPACE, make=True), path, content)


async def read(supervisor: LocalSupervisor, path: str, *, max_bytes: int = 1 << 20) -> bytes:
    return await file_requests.read(supervisor.workspace_files(WORKSPACE), path, max_bytes=max_bytes)


async def run(supervisor: LocalSupervisor, session_id: str, command: str) -> str:
    result = await supervisor.exec(session_id, ExecSpec(command))
    assert result.end.exit_code == 0, result.output
    return result.stdout.decode()


async def test_a_part_that_root_has_left_is_removed(supervisor: LocalSupervisor, config: Config) -> None:
    """Also from a directory that root alone may enter, when its session is gone."""
    session = await supervisor.create(SessionSpec(workspace_id=WORKSPACE))
    await supervisor.exec(session.id, ExecSpec("mkdir -m 700 private", user="root", stateless=True))
    await supervisor.files(session.id).begin_upload(UploadSpec("private/f", user="root"))
    await supervisor.destroy(session.id)
    place = config.data_dir / "workspaces" / WORKSPACE / "private"
    assert len(list(place.iterdir())) == 1
    late = datetime.now(UTC) + timedelta(seconds=UPLOAD_S + 60)
    await sweep_once(supervisor._store, supervisor._files_at, late)
    assert list(place.iterdir()) == []


async def test_files_need_no_session(supervisor: LocalSupervisor, config: Config) -> None:
    """Write, list, look at, read and remove; on the host everything belongs to the one id of sandbox users."""
    assert await write(supervisor, "a/b.txt", b"hello") == "/workspace/a/b.txt"
    assert await read(supervisor, "a/b.txt") == b"hello"
    assert await read(supervisor, "/workspace/a/b.txt", max_bytes=2) == b"he"
    listing = await listed(supervisor.workspace_files(WORKSPACE), "a")
    assert [(each.name, each.kind, each.size_bytes, each.mode, each.owner) for each in listing.entries] == [
        ("b.txt", "file", 5, 0o644, 1000)
    ]
    on_disk = os.stat(config.data_dir / "workspaces" / WORKSPACE / "a/b.txt")
    assert (on_disk.st_uid, on_disk.st_gid) == (1000, 1000)
    assert (await looked_at(supervisor.workspace_files(WORKSPACE), "a")).path == "/workspace/a"
    with pytest.raises(errors.NotEmpty):
        await removed(supervisor.workspace_files(WORKSPACE), "a")
    assert await removed(supervisor.workspace_files(WORKSPACE), "a", recursive=True) == "/workspace/a"
    assert (await listed(supervisor.workspace_files(WORKSPACE))).entries == ()
    with pytest.raises(errors.WorkspaceNotFound):
        await listed(supervisor.workspace_files("another"))


async def test_the_files_have_one_owner(supervisor: LocalSupervisor) -> None:
    """An id that the workspace's mount has no place for is refused, as any other is."""
    await write(supervisor, "f", b"")
    for owner in (0, 370, 65535):
        with pytest.raises(errors.PermissionDenied):
            await supervisor.workspace_files(WORKSPACE).ask(ChangeOwner("f", owner=owner), Done)
    assert (await looked_at(supervisor.workspace_files(WORKSPACE), "f")).owner == 1000


@pytest.mark.parametrize("path", ["a/b", "/a/b", "//a/b", "/workspace/a/b", "/a/../a/b"])
async def test_the_workspace_is_the_root_of_its_files(supervisor: LocalSupervisor, path: str) -> None:
    """As for users of the routes before sessions; what leads above it is refused."""
    assert await write(supervisor, path, b"here") == "/workspace/a/b"
    assert await read(supervisor, path) == b"here"
    with pytest.raises(errors.PathOutside):
        await write(supervisor, "/../a", b"")
    with pytest.raises(errors.FileNotFound):
        await read(supervisor, "/etc/passwd")


async def test_sessions_with_different_ids_see_the_same_owner(supervisor: LocalSupervisor, config: Config) -> None:
    """Two sessions have different host ids; a file of the one is the other's own. What root inside makes belongs to no
    user of the machine, and has no set-id bit that means anything there."""
    spec = SessionSpec(workspace_id=WORKSPACE, root_inside=False)
    first, second = await supervisor.create(spec), await supervisor.create(spec)
    await run(supervisor, first.id, "echo one > f; mkdir -p d; cp /bin/true suid; chmod 4755 suid")
    assert (
        await run(supervisor, second.id, "stat -c '%u %g' f d; echo two >> f; cat f")
        == "1000 1000\n1000 1000\none\ntwo\n"
    )
    top = config.data_dir / "workspaces" / WORKSPACE
    assert {(each.stat().st_uid, each.stat().st_gid) for each in (top, *top.iterdir())} == {(1000, 1000)}
    assert "nosuid" in await run(supervisor, first.id, "grep ' /workspace ' /proc/self/mounts")
    assert await read(supervisor, "f") == b"one\ntwo\n"


async def test_a_workspace_outlives_its_sessions(supervisor: LocalSupervisor) -> None:
    """Destroyed or dead, a session takes nothing along; the record counts it."""
    for number, command in enumerate(("echo kept > f", "cat f > g; kill -9 -1")):
        session = await supervisor.create(SessionSpec(workspace_id=WORKSPACE))
        await supervisor.exec(session.id, ExecSpec(command))
        ending_at = datetime.now(UTC)
        await supervisor.destroy(session.id)

        async def is_synced(moment: datetime = ending_at) -> bool:
            return (await supervisor.workspace(WORKSPACE)).last_used > moment

        await until(is_synced)  # noted behind the sync that the end of a session brings
        found = await supervisor.workspace(WORKSPACE)
        assert (found.session_count, found.active_session_count) == (number + 1, 0)
    assert await read(supervisor, "g") == b"kept\n"


async def test_exclusive_means_alone(supervisor: LocalSupervisor) -> None:
    """An exclusive session and any other never share a workspace: the second is refused and leaves no record."""
    shared = SessionSpec(workspace_id=WORKSPACE)
    alone = SessionSpec(workspace_id=WORKSPACE, workspace_mode="exclusive")
    for first, then in ((shared, alone), (alone, shared), (alone, alone)):
        session = await supervisor.create(first)
        with pytest.raises(errors.WorkspaceBusy) as refused:
            await supervisor.create(then)
        assert refused.value.details["sessions"] == [session.id]
        await supervisor.destroy(session.id)
    assert len(await supervisor.list(ended=True)) == 3
    with pytest.raises(errors.InvalidRequest):
        await supervisor.create(SessionSpec(workspace_mode="exclusive"))


async def test_of_many_that_want_it_alone_one_gets_it(supervisor: LocalSupervisor) -> None:
    """Of exclusive sessions on one workspace, created at the same moment, one is made and the others are refused."""
    outcomes: list[object] = []

    async def create() -> None:
        try:
            outcomes.append(await supervisor.create(SessionSpec(workspace_id=WORKSPACE, workspace_mode="exclusive")))
        except errors.WorkspaceBusy as error:
            outcomes.append(error.code)

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(create)
    assert sorted(each for each in outcomes if isinstance(each, str)) == ["WORKSPACE_BUSY"] * 3


async def test_a_workspace_in_use_is_not_deleted(supervisor: LocalSupervisor, config: Config) -> None:
    """A workspace that a session has is not deleted; with force that session is ended first, and nothing of the
    workspace is left.
    """
    session = await supervisor.create(SessionSpec(workspace_id=WORKSPACE))
    await run(supervisor, session.id, "mkdir -p a/b; echo x > a/b/c")
    with pytest.raises(errors.WorkspaceBusy):
        await supervisor.delete_workspace(WORKSPACE)
    assert await run(supervisor, session.id, "cat a/b/c") == "x\n"
    await supervisor.delete_workspace(WORKSPACE, force=True)
    assert (await supervisor.get(session.id)).status is Status.DESTROYED
    assert os.listdir(config.data_dir / "workspaces") == []
    assert await supervisor.workspaces() == []
    with pytest.raises(errors.WorkspaceNotFound):
        await supervisor.delete_workspace(WORKSPACE)


async def test_deleting_and_attaching_exclude_each_other(supervisor: LocalSupervisor, config: Config) -> None:
    """Of a delete and an attach at once either may win; a session that runs has its workspace in place."""
    await write(supervisor, "f", b"x")
    outcomes: list[str] = []

    async def delete() -> None:
        try:
            await supervisor.delete_workspace(WORKSPACE)
            outcomes.append("deleted")
        except (errors.WorkspaceBusy, errors.WorkspaceNotFound) as error:
            outcomes.append(error.code)

    async def attach() -> None:
        try:
            session = await supervisor.create(SessionSpec(workspace_id=WORKSPACE))
            assert await run(supervisor, session.id, "echo y > g; cat g") == "y\n"
            assert (config.data_dir / "workspaces" / WORKSPACE / "g").exists()
            await supervisor.destroy(session.id)
            outcomes.append("attached")
        except errors.WorkspaceBusy as error:
            outcomes.append(error.code)

    for first, second in ((delete, attach), (attach, delete)):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(second)
    assert len(outcomes) == 4
    await attach()
    assert outcomes[-1] == "attached"


@contextlib.contextmanager
def hung(pid: int) -> Iterator[Callable[[], None]]:
    """Stop a process until the end of the block, or until the function that is yielded is called."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield lambda: os.kill(pid, signal.SIGCONT)
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_a_delete_whose_caller_has_left_is_over_before_anybody_gets_the_workspace(
    supervisor: LocalSupervisor, config: Config
) -> None:
    """A delete goes on without its caller, and no session gets the workspace before the delete is over."""
    await write(supervisor, "f", b"x")
    outcomes: list[str] = []

    async def attach() -> None:
        try:
            session = await supervisor.create(SessionSpec(workspace_id=WORKSPACE))
        except errors.WorkspaceBusy as error:
            outcomes.append(error.code)
            return
        assert await run(supervisor, session.id, "echo y > g; ls") == "g\n"
        assert (config.data_dir / "workspaces" / WORKSPACE / "g").exists()
        outcomes.append("attached")

    with hung(nsinit_pid()) as go_on:
        async with trio.open_nursery() as nursery:
            caller: trio.CancelScope = await nursery.start(_in_scope, supervisor.delete_workspace, WORKSPACE)
            await trio.testing.wait_all_tasks_blocked(0.1)
            caller.cancel()
            with trio.fail_after(patience()):
                await attach()
            go_on()
    assert outcomes == ["WORKSPACE_BUSY"]
    assert os.listdir(config.data_dir / "workspaces") == []
    await attach()
    assert outcomes[-1] == "attached"


async def _in_scope(
    work: Callable[[str], Awaitable[None]],
    workspace_id: str,
    *,
    task_status: trio.TaskStatus[trio.CancelScope] = trio.TASK_STATUS_IGNORED,
) -> None:
    with trio.CancelScope() as scope:
        task_status.started(scope)
        await work(workspace_id)


async def test_a_session_that_ends_in_the_middle_of_an_upload_leaves_nothing_of_it(
    supervisor: LocalSupervisor, config: Config
) -> None:
    """An upload that its session's end cuts off leaves neither half a file nor a temporary one; earlier files stay."""
    await write(supervisor, "kept", b"kept")
    for name in ("new", "kept"):
        spec = SessionSpec(workspace_id=WORKSPACE, workspace_mode="exclusive")
        session = await supervisor.create(spec)
        with contextlib.suppress(errors.SessionExpired):
            async with supervisor.files(session.id).open_write(name) as writer:
                await writer.send(b"x" * 100_000)
                await run(supervisor, session.id, "true")  # PID 1 has handled all that was sent before
                await supervisor.destroy(session.id)
                await writer.commit()
                pytest.fail("the file of a session that has ended was placed")
    assert os.listdir(config.data_dir / "workspaces" / WORKSPACE) == ["kept"]
    assert await read(supervisor, "kept") == b"kept"


async def test_what_is_known_follows_what_is_there(supervisor: LocalSupervisor, config: Config) -> None:
    """A directory without a record is listed as a workspace; a record without a directory says so; labels are kept."""
    made = await supervisor.make_workspace("made", WorkspaceSpec({"team": "a"}))
    assert (made.labels, made.has_directory) == ({"team": "a"}, True)
    with pytest.raises(errors.Conflict):
        await supervisor.make_workspace("made", WorkspaceSpec())
    (config.data_dir / "workspaces" / "found").mkdir()
    (config.data_dir / "workspaces" / "Not a name").mkdir()
    os.rmdir(config.data_dir / "workspaces" / "made")
    known = await supervisor.workspaces()
    assert [(each.id, each.has_directory) for each in known] == [("found", True), ("made", False)]
    assert [each.id for each in await supervisor.workspaces(after="found", limit=1)] == ["made"]
    changed = await supervisor.update_workspace("found", WorkspacePatch({"team": "b"}))
    assert changed.labels == (await supervisor.workspace("found")).labels == {"team": "b"}
    await supervisor.delete_workspace("made")
    assert [each.id for each in await supervisor.workspaces(measure=True)] == ["found"]


async def test_hostile_files_stay_in_the_jail(supervisor: LocalSupervisor, tmp_path: Path) -> None:
    """Links to the host, FIFOs, devices and names with traversal reach nothing and hang nobody."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    session = await supervisor.create(SessionSpec(workspace_id=WORKSPACE))
    commands = (
        f"ln -s {secret} out",
        "ln -s / root",
        "ln -s /proc/1/root proc",
        "ln -s .. up",
        "mkfifo fifo",
        "ln -s loop loop",
    )
    await run(
        supervisor, session.id, "; ".join((*commands, "ln -s /dev/zero zero", "echo in > file", "ln -s file fine"))
    )
    for path, refusal in {
        "out": errors.FileNotFound,
        "root/etc/passwd": errors.FileNotFound,
        "proc/etc/passwd": errors.FileNotFound,
        "up/etc/passwd": errors.FileNotFound,
        "zero": errors.PathOutside,
        "fifo": errors.NotAFile,
        "loop": errors.PathOutside,
        "../../etc/passwd": errors.FileNotFound,
        "/etc/passwd": errors.FileNotFound,
        "/proc/self/environ": errors.FileNotFound,
        "root": errors.PathOutside,
    }.items():
        with pytest.raises(refusal):
            await read(supervisor, path)
    for path in ("root", "up", "/proc", "..", "/.."):
        with pytest.raises(
            errors.FileNotFound if path == "/proc" else errors.PathOutside
        ):  # a link to where nothing is
            await listed(supervisor.workspace_files(WORKSPACE), path)
    for path in ("root/x", "up/x", "/root/x", "../x", "/../x"):
        with pytest.raises((errors.PathOutside, errors.PermissionDenied)):
            await write(supervisor, path, b"x")
    assert await read(supervisor, "fine") == b"in\n"
    kinds = {
        each.name: (each.kind, each.target) for each in (await listed(supervisor.workspace_files(WORKSPACE))).entries
    }
    assert kinds["out"] == ("symlink", str(secret))
    assert kinds["fifo"] == ("other", "")
    assert (await looked_at(supervisor.workspace_files(WORKSPACE), "root")).kind == "symlink"
    assert await removed(supervisor.workspace_files(WORKSPACE), "root", recursive=True) == "/workspace/root"
    assert secret.read_text() == "secret"


async def test_what_serves_files_goes_when_it_is_idle_and_with_nsinit(supervisor: LocalSupervisor) -> None:
    """One helper serves a workspace's files, whoever asks. It ends some seconds after its last request, and with a
    killed nsinit; then there is another one.
    """

    async def helpers() -> set[int]:
        """No image is mounted in a helper, and so its root is a tmpfs. Its file workers are forks of it."""
        roots = {pid: _root_of(pid) for pid, name in descendants(os.getpid()) if name == NAME and is_init(pid)}
        return {pid for pid, root in roots.items() if root == "tmpfs"}

    async def is_gone() -> bool:
        return not await helpers()

    async def reads() -> bool:
        try:
            return await read(supervisor, "f") == b"x"
        except errors.SandkastenError:  # nsinit is on its way back
            return False

    await write(supervisor, "f", b"x")
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(listed, supervisor.workspace_files(WORKSPACE))
    assert len(await helpers()) == 1
    await until(is_gone)
    assert await reads()
    await write(supervisor, "f", b"x")
    (helper,) = await helpers()
    with OwnedFd(os.pidfd_open(helper)) as pidfd, trio.fail_after(patience()):
        os.kill(nsinit_pid(), signal.SIGKILL)
        await trio.lowlevel.wait_readable(pidfd.fileno())
    await until(reads)


def _root_of(pid: int) -> str:
    """Return the kind of file system that is a process's root."""
    try:
        mounts = Path(f"/proc/{pid}/mounts").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(" ")[2] for line in mounts if line.split(" ")[1] == "/"), "")


async def test_a_huge_directory_comes_in_pages(supervisor: LocalSupervisor) -> None:
    """Pages of a directory list each name once, in the order of bytes, names that are no UTF-8 included."""
    session = await supervisor.create(SessionSpec(workspace_id=WORKSPACE))
    await run(supervisor, session.id, "mkdir d; cd d; seq -f %05g 2500 | xargs touch; touch \"$(printf '\\377')\"")
    names: list[str] = []
    more = True
    while more:
        page = await listed(supervisor.workspace_files(WORKSPACE), "d", after=names[-1] if names else "")
        names += [each.name for each in page.entries]
        more = page.more
        assert len(page.entries) <= 1000
    assert names == [f"{number:05}" for number in range(1, 2501)] + ["\udcff"]
    usage = (await supervisor.workspace(WORKSPACE, measure=True)).usage
    assert usage is not None
    assert (usage.entries, usage.files, usage.size_bytes, usage.complete) == (2502, 2501, 0, True)


def _cgroup(session_id: str, hierarchy: str) -> Path:
    """Return the directory of a live session's cgroup in a hierarchy, or in the only one."""
    tops = f"/sys/fs/cgroup/{hierarchy}", "/sys/fs/cgroup"
    top = next(each for each in tops if os.path.exists(f"{each}/cgroup.procs"))
    return next(Path(path, session_id) for path, names, _ in os.walk(top) if session_id in names)


def _kill_named(name: str) -> None:
    for pid, each in descendants(os.getpid()):
        if each == name:
            os.kill(pid, signal.SIGKILL)


async def _until_true(condition: Callable[[], Awaitable[bool]]) -> None:
    while not await condition():  # noqa: ASYNC110 - the kernel and another process change it
        await trio.sleep(0.1)


async def _is_gone(directory: Path) -> bool:
    return not await trio.Path(directory).exists()


async def _pages_missing(path: Path) -> int:
    cached = await trio.run_process(["fincore", "-b", "-n", "-r", "-o", "RES", str(path)], capture_stdout=True)
    return os.stat(path).st_size - int(cached.stdout)


async def test_the_memory_of_ended_sessions_is_given_back_and_no_other(
    supervisor: LocalSupervisor, config: Config, tmp_path: Path
) -> None:
    """Files of workspaces stay, and would keep the cgroups of ended sessions in the kernel. Their pages are freed when
    the kernel has written them; pages of a file that no session read stay in memory."""
    others = tmp_path / "others"
    others.write_bytes(bytes(8 << 20))
    os.sync()
    missing, directories = [], []
    for number in range(36):
        session = await supervisor.create(SessionSpec(workspace_id=WORKSPACE))
        await run(supervisor, session.id, f"head -c 3000000 /dev/urandom > {number}; cat {number} | sha256sum")
        directories.append(_cgroup(session.id, "memory"))
        others.read_bytes()
        await supervisor.destroy(session.id)
        missing.append(await _pages_missing(others))
    assert any([not await _is_gone(directory) for directory in directories]), "all was written at once"
    await trio.to_thread.run_sync(os.sync)  # instead of a wait for the kernel's next write, 30 seconds
    for directory in directories:
        await until(partial(_is_gone, directory))
    assert await _files_in_memory(config.data_dir / "workspaces" / WORKSPACE) <= 2
    # A machine may free pages of its own accord at any time (DAMON, where `/sys/kernel/mm/damon/admin` has a scheme
    # with the action `pageout`: some pages every few seconds), but not during most of the ends of sessions.
    assert statistics.median(missing) == 0, missing
    assert len((await listed(supervisor.workspace_files(WORKSPACE), ".")).entries) == 36


async def _files_in_memory(directory: Path) -> int:
    """Return the number of files of a directory that have pages in memory, each of which may keep a removed cgroup."""
    files = [Path(each) for each in await trio.Path(directory).iterdir()]
    return sum([await _pages_missing(each) < each.stat().st_size for each in files])


async def _are_few_in_memory(directory: Path) -> bool:
    return await _files_in_memory(directory) <= 2


@pytest.mark.cgroup_v2
async def test_ended_sessions_with_files_leave_no_dying_cgroups(supervisor: LocalSupervisor) -> None:
    """The kernel's count of removed cgroups that it keeps, below the cgroup of all sessions, is what it was."""

    async def dying() -> int:
        lines = (await trio.Path(parent, "cgroup.stat").read_text()).splitlines()
        return next(int(each.split()[1]) for each in lines if each.startswith("nr_dying_descendants "))

    async def is_as_before() -> bool:
        return await dying() <= before

    session = await supervisor.create(SessionSpec(workspace_id=WORKSPACE))
    parent = _cgroup(session.id, "unified").parent
    before = await dying()
    for number in range(8):
        await run(supervisor, session.id, f"head -c 1000000 /dev/urandom > {number}; cat {number} | sha256sum")
        await supervisor.destroy(session.id)
        session = await supervisor.create(SessionSpec(workspace_id=WORKSPACE))
    await trio.to_thread.run_sync(os.sync)  # instead of a wait for the kernel's next write, 30 seconds
    await until(is_as_before)


async def test_sessions_that_are_killed_leave_no_cgroups(supervisor: LocalSupervisor, config: Config) -> None:
    """PID 1 is killed in the middle of a write, and later nsinit and the helper that frees pages: within a minute no
    cgroup is left, and no page of the workspace that would keep one in the kernel.

    The kernel's own count is of the whole machine, and says nothing while other programs make cgroups."""
    files = config.data_dir / "workspaces" / WORKSPACE
    for killed in ("PID 1", "nsinit", "emptier"):
        sessions = [await supervisor.create(SessionSpec(workspace_id=WORKSPACE)) for _ in range(4)]
        directories = [_cgroup(session.id, "memory") for session in sessions]
        for number, session in enumerate(sessions):
            await run(supervisor, session.id, f"head -c 3000000 /dev/zero > {number}; cat {number} | sha256sum")
            await supervisor.start_process(session.id, ProcessSpec(f"while :; do echo {number} >> log{number}; done"))
        if killed == "PID 1":
            _kill_named(NAME)
        elif killed == "nsinit":
            os.kill(nsinit_pid(), signal.SIGKILL)
        for session in sessions:
            await supervisor.destroy(session.id)
            if killed == "emptier":
                _kill_named(EMPTIER_NAME)
        with trio.fail_after(patience(60)):
            for directory in directories:
                await _until_true(partial(_is_gone, directory))
            await _until_true(partial(_are_few_in_memory, files))
