"""Mounts that somebody made by hand below the sessions' places are found and detached, what is behind them untouched.

The data directory is a mount of its own here, so that what it propagates can be chosen: a shared one shows new mounts
to nsinit's namespace, too, a private one does not.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest

from nsinit.helpers.builder import NAME as BUILDER
from nsinit.helpers.cgroup_maker import NAME as CGROUP_MAKER
from nsinit.helpers.forker import NAME as FORKER
from nsinit.scheduler import Wait
from nsinit.server import mounts as hand_mounts
from nsinit.server.mounts import MachineMounts
from nsinit.server.strays import shown
from nsinit.wire.protocol import Failed, RemoveStray, Stray, Survey, Surveyed
from tests.kernel.harness import PATIENCE_S, Nsinit, data_directory, host_plan, new_node_id, running, wait_until
from tests.leaks import descendants
from tests.waiting import patience

ID = "e" * 24


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True, timeout=patience(30))


def bind(behind: Path, point: Path) -> None:
    """Mount a directory on another, which is made."""
    point.mkdir(parents=True, exist_ok=True)
    run("mount", "--bind", behind, point)


def table(pid: int | str = "self") -> list[tuple[str, str]]:
    """Return (id, point) of the mounts that a process sees."""
    lines = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    return [(line.split()[0], line.split()[4]) for line in lines]


def points(directory: Path, pid: int | str = "self") -> list[str]:
    """Return the mount points below a directory, once for each mount."""
    return [point for _, point in table(pid) if point.startswith(f"{directory}/")]


def survey(server: Nsinit) -> list[Stray]:
    answer, _ = server.ask(Survey)
    assert isinstance(answer, Surveyed), answer
    return list(answer.strays)


def remove(server: Nsinit, stray: Stray) -> bool:
    """Ask for one to be removed; return whether it is gone."""
    answer, _ = server.ask(RemoveStray, stray=stray)
    assert not isinstance(answer, Failed) or answer.errno == errno.EBUSY, answer
    return not isinstance(answer, Failed)


def put_away(server: Nsinit) -> tuple[str, ...]:
    """Remove the directories that the mounts were in; return what can't be removed."""
    left: tuple[str, ...] = server.teardown(ID).leftovers
    wait_until(lambda: not os.listdir(server.data_dir / "trash"), "the trash was deleted")
    return left


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


@pytest.fixture(scope="module", params=["private", "shared"])
def propagation(request: pytest.FixtureRequest) -> str:
    return cast(str, request.param)


@pytest.fixture(scope="module")
def server(propagation: str) -> Iterator[Nsinit]:
    """An nsinit on a data directory of that propagation; it has seen no mount by hand yet."""
    with data_directory() as data_dir, own_mount(data_dir, propagation), running(data_dir) as nsinit:
        yield nsinit


@pytest.fixture
def behind(tmp_path: Path) -> Iterator[Path]:
    """A directory with a file that must outlive every mount of it."""
    directory = tmp_path / "behind"
    directory.mkdir()
    (directory / "file").write_text("kept")
    yield directory
    assert (directory / "file").read_text() == "kept"


def test_mounts_below_places_are_found_and_detached_last_made_first(
    server: Nsinit, behind: Path, propagation: str
) -> None:
    """Stacked on one point, on a file, and with a name of any bytes; a session that is built meanwhile runs on, and
    the point can be removed afterwards, in nsinit's view, too."""
    places = server.data_dir
    outer, file = places / "sessions" / ID / "out er\\", places / "sessions" / ID / "file"
    bind(behind, outer)
    (behind / "inner").mkdir()
    bind(behind, outer / "inner")
    bind(behind, outer / "inner")
    file.touch()
    run("mount", "--bind", behind / "file", file)
    assert bool(points(places / "sessions", server.pid)) is (propagation == "shared")
    box = server.build(host_plan())
    found = survey(server)
    assert found == [Stray("mount", shown(str(each))) for each in (file, outer / "inner", outer)]
    for stray in found:
        assert remove(server, stray), server.log
    assert survey(server) == []
    assert points(places) == []
    assert points(places / "sessions", server.pid) == []
    assert box.run("echo alive").out == "alive\n"
    box.teardown()
    assert put_away(server) == ()
    assert not outer.parent.exists()


def test_a_mount_that_another_one_hides_goes_after_it(server: Nsinit, behind: Path) -> None:
    """While it is hidden nothing leads to it; what is in its place is left alone."""
    top = server.data_dir / "run" / ID
    bind(behind, top / "deep")
    (behind / "deep").mkdir()
    bind(behind, top)
    hidden, hiding = (Stray("mount", str(each)) for each in (top / "deep", top))
    assert survey(server) == [hiding, hidden]
    assert not remove(server, hidden)
    assert "a mount is left" in server.log
    assert remove(server, hiding)
    assert remove(server, hidden)
    assert (survey(server), points(server.data_dir)) == ([], [])
    assert put_away(server) == ()


def test_a_mount_on_a_place_itself_is_told_of_and_stays(server: Nsinit, behind: Path) -> None:
    """It may be a disk for it; what is mounted by hand below it goes all the same."""
    place = server.data_dir / "spool"
    bind(behind, place)
    bind(behind, place / "by-hand")
    stays = Stray("place_mount", str(place))
    assert survey(server) == [Stray("mount", f"{place}/by-hand"), stays]
    assert remove(server, Stray("mount", f"{place}/by-hand"))
    assert not remove(server, stays)
    assert remove(server, Stray("mount", str(place)))  # there is none of that kind and name
    assert survey(server) == [stays]
    assert points(server.data_dir) == [str(place)]
    run("umount", place)
    (behind / "by-hand").rmdir()
    assert survey(server) == []


def test_mounts_elsewhere_are_nobodys_business(server: Nsinit, behind: Path) -> None:
    """A workspace or an image may be a mount; being named changes nothing."""
    elsewhere = [server.data_dir / "workspaces" / "w", server.data_dir / "images" / "x", server.data_dir / "sessions-2"]
    for point in elsewhere:
        bind(behind, point)
    assert survey(server) == []
    for point in elsewhere:
        assert remove(server, Stray("mount", str(point)))
        assert str(point) in points(server.data_dir)
        run("umount", point)
        point.rmdir()


def test_only_nsinit_itself_holds_the_machines_mount_table(server: Nsinit) -> None:
    """Neither its helpers nor a sandbox's PID 1 could go back."""
    box = server.build(host_plan())
    inside = {box.pid} | {pid for pid, _ in descendants(box.pid)}
    helpers = server.helpers(BUILDER) | server.helpers(FORKER) | server.helpers(CGROUP_MAKER)
    assert len(inside) > 1
    assert len(helpers) > 3
    assert [name for name in holdings(server.pid) if name.endswith("/mountinfo")]
    assert os.readlink("/proc/self/ns/mnt") in holdings(server.pid)
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


def test_what_was_mounted_before_nsinit_began_goes_too(propagation: str, behind: Path) -> None:
    """Its namespace begins as a copy, and keeps none of it; an nsinit that died left nothing to do twice."""
    with data_directory() as data_dir, own_mount(data_dir, propagation):
        point = data_dir / "run" / "by-hand"
        bind(behind, point)
        node_id = new_node_id()
        for _ in range(2):
            with running(data_dir, node_id) as nsinit:
                assert points(data_dir / "run", nsinit.pid) == []
                assert survey(nsinit) == [Stray("mount", str(point)), Stray("run_directory", "by-hand")]
        with running(data_dir, node_id) as nsinit:
            for stray in survey(nsinit):
                assert remove(nsinit, stray)
            wait_until(lambda: not os.listdir(data_dir / "trash"), "the trash was deleted")
            assert survey(nsinit) == []
        assert points(data_dir) == []


def test_a_link_or_another_mount_on_the_way_leads_nowhere(tmp_path: Path, behind: Path) -> None:
    """What was found can be moved by a sandbox whose directory it is in: then nothing is detached."""
    point, elsewhere = tmp_path / "run" / "x" / "point", tmp_path / "elsewhere"
    bind(behind, point)
    bind(behind, elsewhere / "point")
    (found,) = found_in(tmp_path)
    try:
        (tmp_path / "run" / "x").rename(tmp_path / "run" / "y")
        (tmp_path / "run" / "x").symlink_to(elsewhere)
        with pytest.raises(OSError, match="openat2") as refused:
            hand_mounts.detach(found.point, [found.mount_id])
        assert refused.value.errno == errno.ELOOP
        (tmp_path / "run" / "x").unlink()
        elsewhere.rename(tmp_path / "run" / "x")
        with pytest.raises(OSError, match="another mount") as refused:
            hand_mounts.detach(found.point, [found.mount_id])
        assert refused.value.errno == errno.EBUSY
        assert sorted(points(tmp_path)) == [f"{tmp_path}/run/x/point", f"{tmp_path}/run/y/point"]
        assert list(hand_mounts.detach_all(str(tmp_path))) == [
            (f"{tmp_path}/run/x/point", None),
            (f"{tmp_path}/run/y/point", None),
        ]
        assert points(tmp_path) == []
    finally:
        for left in points(tmp_path):
            run("umount", left)


def found_in(data_dir: Path) -> Sequence[hand_mounts.HandMount]:
    mounts = MachineMounts.open(str(data_dir))
    try:
        return mounts.find()
    finally:
        mounts.close()


def wait_for(pidfd: int | None) -> None:
    """Wait until a process has ended; who forked it collects it."""
    assert pidfd is not None
    assert select.select([pidfd], [], [], patience(PATIENCE_S))[0]


class Hung(MachineMounts):
    """Whose process never gets to know what is mounted, as with a file system whose server is gone."""

    def find(self) -> Sequence[hand_mounts.HandMount]:
        while True:
            signal.pause()


def test_who_does_not_come_back_is_given_up_on_and_nobody_is_sent_after_him(tmp_path: Path) -> None:
    """He is killed; should he not even die, the next one is sent when he is gone."""
    opened = MachineMounts.open(str(tmp_path))
    hung = Hung(opened.data_dir, opened.table_fd, opened.namespace_fd)
    try:
        killed = hung.detach("/x")
        next(killed)
        wait_for(killed.send(False).fd)
        assert end_of(killed, happened=True) is False
        stuck = hung.detach("/x")
        next(stuck)
        pidfd = stuck.send(False).fd
        assert end_of(stuck, happened=False) is False
        assert hung.stuck == [pidfd]
        wait_for(pidfd)
        again = hung.detach("/x")
        next(again)
        assert hung.stuck == []
        wait_for(again.send(False).fd)
        assert end_of(again, happened=True) is False
    finally:
        hung.close()


def end_of(work: Generator[Wait, bool, bool], *, happened: bool) -> bool | None:
    """Return the answer of work that waits for nothing more; None: it still does."""
    try:
        work.send(happened)
    except StopIteration as end:
        return bool(end.value)
    return None
