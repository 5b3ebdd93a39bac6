"""Leftovers in nsinit's places are found and named; those that are surely ours are removed when that is asked for."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsinit.cgroup.session import kill_listed
from nsinit.cgroup.tree import owner_of, set_owner
from nsinit.helpers.builder import NAME as BUILDER
from nsinit.helpers.cgroup_maker import NAME as CGROUP_MAKER
from nsinit.helpers.forker import NAME as FORKER
from nsinit.kernel.mountinfo import parse_points
from nsinit.server.leftovers import MAX_LEFTOVERS, mounts_in, shown
from nsinit.wire.protocol import Failed, FindLeftovers, Leftover, LeftoversFound, Ok, Ready, RemoveLeftover
from tests.kernel.harness import Nsinit, data_directory, host_plan, running, wait_until
from tests.kernel.processes import sleeper_in
from tests.leaks import descendants
from tests.waiting import patience

HOSTILE = os.fsdecode(b"no id\n\xff\\x..")


def found(server: Nsinit) -> set[Leftover]:
    """Return what is found."""
    answer, _ = server.ask(FindLeftovers)
    assert isinstance(answer, LeftoversFound), answer
    return set(answer.leftovers)


def remove(server: Nsinit, leftover: Leftover) -> None:
    """Remove one leftover, which must succeed."""
    answer, _ = server.ask(RemoveLeftover, leftover=leftover)
    assert isinstance(answer, Ok), (answer, server.log)


def refuse(server: Nsinit, leftover: Leftover) -> None:
    """Ask for a leftover to be removed, which must be refused."""
    answer, _ = server.ask(RemoveLeftover, leftover=leftover)
    assert isinstance(answer, Failed), answer
    assert answer.errno == errno.EBUSY


def settled(server: Nsinit) -> set[Leftover]:
    """Return what is found once the trash was deleted."""
    wait_until(lambda: not os.listdir(server.data_dir / "trash"), "the trash was deleted")
    return found(server)


def hierarchies(server: Nsinit) -> set[Path]:
    """Return the directories that session cgroups are made in."""
    assert isinstance(server.ready, Ready)
    return {Path(each) for each in server.ready.cgroup_dirs.values()}


def test_foreign_names_among_sessions_are_found_and_removed_and_sessions_are_not(server: Nsinit) -> None:
    """A running session is no leftover; a name of any bytes is told, compared and removed, with what is in it."""
    box = server.build(host_plan())
    assert found(server) == set()
    made = {
        Leftover("session_directory", shown(HOSTILE)): server.data_dir / "sessions" / HOSTILE,
        Leftover("run_directory", "lost+found"): server.data_dir / "run" / "lost+found",
    }
    for path in made.values():
        (path / "inner").mkdir(parents=True)
        (path / "inner" / "file").write_text("content")
    (server.data_dir / "workspaces" / "kept").mkdir()
    (server.data_dir / "sessions" / HOSTILE / "link").symlink_to(server.data_dir / "workspaces")
    assert found(server) == set(made)
    for leftover in made:
        remove(server, leftover)
    assert settled(server) == set()
    assert (server.data_dir / "workspaces" / "kept").is_dir()
    assert box.run("echo alive").out == "alive\n"


def test_a_foreign_cgroup_is_emptied_and_removed_even_when_it_is_frozen(server: Nsinit) -> None:
    """Every process left in it dies, in a nested cgroup or a frozen one."""
    directories = sorted(hierarchies(server))
    for directory in directories:
        (directory / "foreign" / "inner").mkdir(parents=True)
    freezable = next((each for each in directories if (each / "foreign" / "cgroup.freeze").exists()), None)
    with sleeper_in(directories[0] / "foreign" / "inner") as process:
        if freezable is not None:
            (freezable / "foreign" / "inner" / "cgroup.procs").write_text(str(process.pid))
            (freezable / "foreign" / "cgroup.freeze").write_text("1")
        assert found(server) == {Leftover("cgroup", "foreign")}
        remove(server, Leftover("cgroup", "foreign"))
        assert process.wait(patience(10)) == -9
    assert found(server) == set()
    assert not any((each / "foreign").exists() for each in directories)


def test_cgroups_left_elsewhere_are_told_of_by_name_and_owner_and_stay(server: Nsinit) -> None:
    """A cgroup directory elsewhere with the node's name is this installation's only if its owner is, too; none is ever
    emptied.
    """
    home = sorted(hierarchies(server))[0]
    other = home.parent / "sandkasten-elsewhere"
    left, foreign = other / "a" / home.name, other / "b" / home.name
    try:
        for directory in (left, foreign):
            (directory / ("f" * 24)).mkdir(parents=True)
        set_owner(str(left), owner_of(str(server.data_dir)))
        set_owner(str(foreign), "1:1")
        with sleeper_in(foreign / ("f" * 24)) as innocent, sleeper_in(left / ("f" * 24)) as orphan:
            assert found(server) == {Leftover("other_cgroup", str(left))}
            for directory in (left, foreign):
                refuse(server, Leftover("other_cgroup", str(directory)))
            assert (innocent.poll(), orphan.poll()) == (None, None)
    finally:
        for path, _, _ in os.walk(other, topdown=False):
            os.rmdir(path)


@pytest.mark.parametrize("name", ["../workspaces", "../../outside", "/etc", "."])
def test_a_name_that_was_not_found_removes_nothing(server: Nsinit, name: str) -> None:
    """A name from the daemon is compared with the names found and never followed as a path."""
    (server.data_dir / "workspaces" / "kept").mkdir(exist_ok=True)
    for kind in ("session_directory", "run_directory", "cgroup", "loop"):
        remove(server, Leftover(kind, name))
    assert (server.data_dir / "workspaces" / "kept").is_dir()
    assert all(each.is_dir() for each in hierarchies(server))


def test_a_loop_device_with_a_file_of_a_dead_session_is_found_and_detached(server: Nsinit) -> None:
    """The loop device of a dead session is found and detached; that of a living session is left alone."""
    assert shutil.which("losetup") is not None
    directory = server.data_dir / "sessions" / ("e" * 24)
    directory.mkdir()
    image = directory / "1-1.ext4"
    with image.open("wb") as file:
        file.truncate(1 << 20)
    device = subprocess.check_output(["losetup", "--find", "--show", str(image)], text=True).strip()
    try:
        number = device.removeprefix("/dev/loop")
        leftover = Leftover("loop", f"{number} {image}")
        assert found(server) == {leftover}
        cgroups = [each / ("e" * 24) for each in hierarchies(server)]
        for cgroup in cgroups:
            cgroup.mkdir()
        assert found(server) == set()
        for cgroup in cgroups:
            cgroup.rmdir()
        remove(server, leftover)
        wait_until(lambda: not Path(f"/sys/block/loop{number}/loop/backing_file").exists(), "it was detached")
        assert settled(server) == set()
    finally:
        if Path(f"/sys/block/{Path(device).name}/loop/backing_file").exists():
            subprocess.run(["losetup", "--detach", device], check=True)


def test_a_copy_of_a_data_directory_can_not_take_over_the_sessions_of_the_first() -> None:
    """A copied data directory has the first one's node id: sessions under that id are known by their mark as the first
    one's, and the start is refused.
    """
    with data_directory() as first_dir, running(first_dir) as first, data_directory() as copy_dir:
        box = first.build(host_plan())
        assert isinstance(first.ready, Ready)
        node_id = Path(first.ready.cgroup_dirs["memory"]).name.removeprefix("sandkasten-")
        copy = Nsinit(copy_dir, node_id)
        try:
            assert isinstance(copy.ready, Failed)
            assert "another data directory" in copy.ready.message
        finally:
            copy.close()
        assert box.run("echo alive").out == "alive\n"


def test_who_has_got_the_pid_of_a_process_that_ended_is_not_killed() -> None:
    """A pid that is no longer in the cgroup when its list is read again may belong to any process by then, and is not
    killed.
    """
    innocent = subprocess.Popen(["/bin/sleep", "60"])
    try:
        looks = iter([(innocent.pid,), ()])
        kill_listed(lambda: next(looks))
        assert innocent.poll() is None
        kill_listed(lambda: (innocent.pid, 2**22 - 1))
        assert innocent.wait(patience(10)) == -9
    finally:
        innocent.kill()
        innocent.wait()


# Mounts made by hand ----------------------------------------------------------------------------------------------

ID = "e" * 24


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True, timeout=patience(30))


def bind(behind: Path, point: Path) -> None:
    """Mount a directory on another, which is made."""
    point.mkdir(parents=True, exist_ok=True)
    run("mount", "--bind", behind, point)


def points(directory: Path, pid: int | str = "self") -> list[str]:
    """Return the mount points below a directory that a process sees, once for each mount."""
    seen = (point for _, point in parse_points(Path(f"/proc/{pid}/mountinfo").read_text()))
    return [point for point in seen if point.startswith(f"{directory}/")]


@contextlib.contextmanager
def own_mount(directory: Path, propagation: str) -> Iterator[None]:
    """Make a directory a mount of its own, and undo all mounts below it in the end."""
    run("mount", "--bind", directory, directory)
    try:
        run("mount", f"--make-{propagation}", directory)
        yield
    finally:
        for point in reversed(points(directory)):
            run("umount", "--lazy", point)
        run("umount", "--lazy", directory)


@pytest.fixture
def behind(tmp_path: Path) -> Iterator[Path]:
    """A directory with files that must outlive every mount of it."""
    directory = tmp_path / "behind"
    (directory / "deep").mkdir(parents=True)
    for each in (directory, directory / "deep"):
        (each / "file").write_text("kept")
    yield directory
    assert [(each / "file").read_text() for each in (directory, directory / "deep")] == ["kept", "kept"]


@pytest.mark.parametrize("propagation", ["private", "shared"])
def test_mounts_made_by_hand_are_told_of_and_never_undone(propagation: str, behind: Path) -> None:
    """Mounts on a session's place or below, made before nsinit's start or after, are reported and stay; nsinit mounts
    nothing that the machine can see.
    """
    with data_directory() as data_dir, own_mount(data_dir, propagation):
        before, after, place = data_dir / "sessions" / "by hand\\", data_dir / "run" / "later", data_dir / "spool"
        bind(behind, before)
        with running(data_dir) as server:
            assert len(points(data_dir)) == 1
            bind(behind, after)
            bind(behind, place)
            made = points(data_dir)
            mounts = {Leftover("mount", shown(str(each))) for each in (before, after, place)}
            assert {each for each in found(server) if each.kind == "mount"} == mounts
            for each in mounts:
                refuse(server, each)
            box = server.build(host_plan())
            assert box.run("echo alive").out == "alive\n"
            box.teardown()
            assert points(data_dir) == made
        assert points(data_dir) == made


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("propagation", ["private", "shared"])
def test_a_teardown_deletes_nothing_behind_a_mount(
    propagation: str, linked: bool, behind: Path, tmp_path: Path
) -> None:
    """A directory, a workspace or a file that is mounted in a session's directory: what is behind it stays, and so does
    the mount, whether or not nsinit's own namespace shows it, and by whatever name it knows the data directory. Trash
    that is kept by one is told of."""
    with data_directory() as data_dir, own_mount(data_dir, propagation), contextlib.ExitStack() as stack:
        link = tmp_path / "link"
        link.symlink_to(data_dir)
        server = stack.enter_context(running(link if linked else data_dir))
        session = data_dir / "sessions" / ID
        workspace = data_dir / "workspaces" / "kept"
        workspace.mkdir()
        (workspace / "file").write_text("kept")
        bind(behind, session / "inner" / "point")
        bind(workspace, session / "inner" / "workspace")
        (session / "file").touch()
        run("mount", "--bind", behind / "file", session / "file")
        assert len(points(data_dir)) == 3
        assert server.teardown(ID).leftovers == ()
        wait_until(lambda: "trash not deleted" in server.log, "the deletion has come to it")
        assert len(points(data_dir / "trash")) == 3
        (kept,) = (each for each in found(server) if each.kind == "trash")
        refuse(server, kept)
        for point in reversed(points(data_dir)):
            run("umount", point)
        remove(server, kept)
        assert settled(server) == set()
        assert (workspace / "file").read_text() == "kept"


@pytest.mark.parametrize("propagation", ["private", "shared"])
def test_a_teardown_leaves_a_mount_in_the_place_of_a_socket(propagation: str, behind: Path) -> None:
    """On the directory or below it, it stays where it is, and is told of; without it the teardown goes on."""
    with data_directory() as data_dir, own_mount(data_dir, propagation), running(data_dir) as server:
        place = data_dir / "run" / ID
        for point in (place, place / "below"):
            bind(behind, point)
            made = points(data_dir)
            assert str(point) in made
            (left,) = server.teardown(ID).leftovers
            assert str(place) in left
            assert points(data_dir) == made
            run("umount", point)
        assert server.teardown(ID).leftovers == ()
        assert not place.exists()


def test_a_disk_that_was_mounted_before_the_start_is_given_back_by_its_umount(tmp_path: Path) -> None:
    """Neither nsinit nor a helper keeps it busy, private as the machine's mounts may be; one on a place stays."""
    image = tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(4 << 20)
    run("mkfs.ext4", "-q", image)
    device = subprocess.check_output(["losetup", "--find", "--show", str(image)], text=True).strip()
    try:
        with data_directory() as data_dir, own_mount(data_dir, "private"):
            for place, is_busy in (("sessions/by hand", False), ("spool", True)):
                point = data_dir / place
                point.mkdir(parents=True)
                run("mount", device, point)
                with running(data_dir) as server:
                    server.build(host_plan()).teardown()
                    run("umount", point)
                    assert is_mounted(device) is is_busy
                wait_until(lambda: not is_mounted(device), "it is free when nsinit has ended")
                point.rmdir()
    finally:
        run("losetup", "--detach", device)


def is_mounted(device: str) -> bool:
    """Whether any mount namespace has the file system of a device: open(2), O_EXCL on a block device."""
    try:
        os.close(os.open(device, os.O_RDONLY | os.O_EXCL))
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return True
    return False


def test_mounts_are_told_of_among_any_number_of_leftovers(server: Nsinit, behind: Path) -> None:
    """Leftovers that are removed make room for more; a mount would be kept out as long as there are more."""
    point = server.data_dir / "spool" / "by hand"
    bind(behind, point)
    try:
        for number in range(2 * MAX_LEFTOVERS):
            (server.data_dir / "sessions" / f"foreign-{number}").mkdir()
        answer = found(server)
        assert len(answer) == MAX_LEFTOVERS
        assert Leftover("mount", str(point)) in answer
    finally:
        run("umount", point)
        shutil.rmtree(server.data_dir / "spool")
        for path in server.data_dir.glob("sessions/foreign-*"):
            path.rmdir()


def test_only_nsinit_itself_holds_the_machines_mount_table(server: Nsinit) -> None:
    """Neither a helper nor a sandbox's PID 1 can read the machine's mount table."""
    box = server.build(host_plan())
    inside = {box.pid} | {pid for pid, _ in descendants(box.pid)}
    helpers = server.helpers(BUILDER) | server.helpers(FORKER) | server.helpers(CGROUP_MAKER)
    assert len(inside) > 1
    assert len(helpers) > 3
    assert [name for name in holdings(server.pid) if name.endswith("/mountinfo")]
    for pid in inside | helpers:
        assert not [name for name in holdings(pid) if name.endswith("/mountinfo") or name.startswith("mnt:")]
    box.teardown()


def holdings(pid: int) -> list[str]:
    """Return what a process's descriptors are."""
    links = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed this instant
            links.append(os.readlink(each))
    return links


MOUNTINFO = r"""
22 1 8:1 / / rw - ext4 /dev/sda rw
23 22 8:2 / /data rw - ext4 /dev/sdb rw
24 23 8:2 /x /data/sessions/a\040b\134 rw shared:1 - ext4 /dev/sdb rw
25 24 0:9 / /data/sessions/a\040b\134/deep rw - tmpfs none rw
26 23 0:9 / /data/workspaces/w rw - tmpfs none rw
27 23 0:9 / /data/sessions-old rw - tmpfs none rw
28 23 0:9 / /data/trash rw - tmpfs none rw
29 25 0:9 / /data/sessions/a\040b\134/deep rw - tmpfs none rw
""".strip()


def test_mounts_in_places_of_sessions_are_told_by_their_real_names() -> None:
    """Escapes undone, the last made first; the data directory itself, its neighbours and workspaces may be mounts."""
    outer = "/data/sessions/a b\\"
    assert mounts_in("/data", MOUNTINFO) == [f"{outer}/deep", "/data/trash", outer]
