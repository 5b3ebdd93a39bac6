"""What lies about in nsinit's places and is nobody's is found, named, and removed when it is asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from nsinit.cgroup.session import kill_listed
from nsinit.cgroup.tree import mark_of, set_mark
from nsinit.server.strays import shown
from nsinit.wire.protocol import Failed, Ok, Ready, RemoveStray, Stray, Survey, Surveyed
from tests.kernel.harness import Nsinit, data_directory, host_plan, running, wait_until
from tests.kernel.processes import sleeper_in
from tests.waiting import patience

HOSTILE = os.fsdecode(b"no id\n\xff\\x..")


def survey(server: Nsinit) -> set[Stray]:
    """Return what is found."""
    answer, _ = server.ask(Survey)
    assert isinstance(answer, Surveyed), answer
    return set(answer.strays)


def remove(server: Nsinit, stray: Stray) -> None:
    """Remove one stray, which must succeed."""
    answer, _ = server.ask(RemoveStray, stray=stray)
    assert isinstance(answer, Ok), (answer, server.log)


def settled(server: Nsinit) -> set[Stray]:
    """Return what is found once the trash was deleted."""
    wait_until(lambda: not os.listdir(server.data_dir / "trash"), "the trash was deleted")
    return survey(server)


def hierarchies(server: Nsinit) -> set[Path]:
    """Return the directories that session cgroups are made in."""
    assert isinstance(server.ready, Ready)
    return {Path(each) for each in server.ready.cgroup_dirs.values()}


def test_foreign_names_among_sessions_are_found_and_removed_and_sessions_are_not(server: Nsinit) -> None:
    """A running session is no stray; a name of any bytes is told, compared and removed, with what is in it."""
    box = server.build(host_plan())
    assert survey(server) == set()
    made = {
        Stray("session_directory", shown(HOSTILE)): server.data_dir / "sessions" / HOSTILE,
        Stray("run_directory", "lost+found"): server.data_dir / "run" / "lost+found",
    }
    for path in made.values():
        (path / "inner").mkdir(parents=True)
        (path / "inner" / "file").write_text("content")
    (server.data_dir / "workspaces" / "kept").mkdir()
    (server.data_dir / "sessions" / HOSTILE / "link").symlink_to(server.data_dir / "workspaces")
    assert survey(server) == set(made)
    for stray in made:
        remove(server, stray)
    assert settled(server) == set()
    assert (server.data_dir / "workspaces" / "kept").is_dir()
    assert box.run("echo alive").out == "alive\n"


def test_a_foreign_cgroup_is_emptied_and_removed_even_when_it_is_frozen(server: Nsinit) -> None:
    """Whatever was left in it, nested or frozen, dies."""
    directories = sorted(hierarchies(server))
    for directory in directories:
        (directory / "foreign" / "inner").mkdir(parents=True)
    freezable = next((each for each in directories if (each / "foreign" / "cgroup.freeze").exists()), None)
    with sleeper_in(directories[0] / "foreign" / "inner") as process:
        if freezable is not None:
            (freezable / "foreign" / "inner" / "cgroup.procs").write_text(str(process.pid))
            (freezable / "foreign" / "cgroup.freeze").write_text("1")
        assert survey(server) == {Stray("cgroup", "foreign")}
        remove(server, Stray("cgroup", "foreign"))
        assert process.wait(patience(10)) == -9
    assert survey(server) == set()
    assert not any((each / "foreign").exists() for each in directories)


def test_cgroups_left_elsewhere_are_found_by_name_and_mark_only(server: Nsinit) -> None:
    """A directory of the same node's name is this installation's only with its mark: a copy's sessions are safe."""
    home = sorted(hierarchies(server))[0]
    other = home.parent / "sandkasten-elsewhere"
    left, foreign = other / "a" / home.name, other / "b" / home.name
    try:
        for directory in (left, foreign):
            (directory / ("f" * 24)).mkdir(parents=True)
        set_mark(str(left), mark_of(str(server.data_dir)))
        set_mark(str(foreign), "1:1")
        with sleeper_in(foreign / ("f" * 24)) as innocent, sleeper_in(left / ("f" * 24)) as orphan:
            assert survey(server) == {Stray("other_cgroup", str(left))}
            remove(server, Stray("other_cgroup", str(left)))
            assert orphan.wait(patience(10)) == -9
            assert innocent.poll() is None
            remove(server, Stray("other_cgroup", str(foreign)))
            assert innocent.poll() is None
        assert not left.exists()
        assert foreign.exists()
    finally:
        for path, _, _ in os.walk(other, topdown=False):
            os.rmdir(path)


@pytest.mark.parametrize("name", ["../workspaces", "../../outside", "/etc", "."])
def test_a_name_that_was_not_found_removes_nothing(server: Nsinit, name: str) -> None:
    """The daemon's word is compared and never followed."""
    (server.data_dir / "workspaces" / "kept").mkdir(exist_ok=True)
    for kind in ("session_directory", "run_directory", "cgroup", "other_cgroup", "loop"):
        remove(server, Stray(kind, name))
    assert (server.data_dir / "workspaces" / "kept").is_dir()
    assert all(each.is_dir() for each in hierarchies(server))


def test_a_loop_device_with_a_file_of_a_dead_session_is_found_and_detached(server: Nsinit) -> None:
    """One that a session still has is left alone."""
    assert shutil.which("losetup") is not None
    directory = server.data_dir / "sessions" / ("e" * 24)
    directory.mkdir()
    image = directory / "1-1.ext4"
    with image.open("wb") as file:
        file.truncate(1 << 20)
    device = subprocess.check_output(["losetup", "--find", "--show", str(image)], text=True).strip()
    try:
        number = device.removeprefix("/dev/loop")
        stray = Stray("loop", f"{number} {image}")
        assert survey(server) == {stray}
        cgroups = [each / ("e" * 24) for each in hierarchies(server)]
        for cgroup in cgroups:
            cgroup.mkdir()
        assert survey(server) == set()
        for cgroup in cgroups:
            cgroup.rmdir()
        remove(server, stray)
        wait_until(lambda: not Path(f"/sys/block/loop{number}/loop/backing_file").exists(), "it was detached")
        assert settled(server) == set()
    finally:
        if Path(f"/sys/block/{Path(device).name}/loop/backing_file").exists():
            subprocess.run(["losetup", "--detach", device], check=True)


def test_a_copy_of_a_data_directory_can_not_take_over_the_sessions_of_the_first() -> None:
    """The node's id was copied with it; what runs under it is known by its mark, and the start is refused."""
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
    """A pid that a list has, and has no more when it is read again, may be anybody's by then."""
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
