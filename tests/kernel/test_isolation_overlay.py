"""The overlay in both ways it can be asked for: layers by descriptor, and by path for kernels before 6.13."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from nsinit.kernel import constants as k
from nsinit.kernel import mounts, stage, syscalls
from nsinit.kernel.mounts import Features, OverlayParts
from nsinit.kernel.slots import FIRST_BASE, make_user_namespace
from nsinit.storage.mechanism import make_layers

pytestmark = pytest.mark.cgroup_v2


def _in_own_mount_namespace(check: Callable[[], None]) -> None:
    """Run `check` in a process with its own mount namespace; fail with what it raised."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            syscalls.unshare(k.CLONE_NEWNS)
            syscalls.mount("", "/", flags=k.MS_REC | k.MS_PRIVATE)
            check()
        except BaseException:  # noqa: BLE001 - reported by the parent
            os.write(write_fd, traceback.format_exc().encode()[-4000:])
        finally:
            os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd, "rb") as pipe:
        failure = pipe.read().decode()
    os.waitpid(pid, 0)
    assert failure == ""


@pytest.mark.parametrize("by_fd", [True, False])
def test_lower_ids_are_shifted_and_writes_go_to_the_upper(tmp_path: Path, by_fd: bool) -> None:
    """Image files of id 0 show as the session's root, a changed file is copied up, the image stays as it was."""
    lower, session, staged = (tmp_path / name for name in ("lower", "session", "stage"))
    lower.mkdir()
    staged.mkdir()
    (lower / "file").write_text("image")

    def check() -> None:
        stage.make_stage(str(staged))
        userns_fd = make_user_namespace(FIRST_BASE)
        if by_fd and not mounts.probe_features(str(staged), userns_fd).overlay_by_fd:
            return
        os.mkdir(session, 0o700)
        make_layers(str(session), FIRST_BASE)
        layers = OverlayParts((str(lower),), str(session), "root", userns_fd)
        mount_fd = mounts.overlay(layers, features=Features(by_fd, True), stage_path=str(staged))
        mounts.attach(mount_fd, os.open(staged / stage.ROOT, os.O_PATH))
        merged = staged / stage.ROOT
        assert (merged / "file").stat().st_uid == FIRST_BASE
        (merged / "file").write_text("session")
        (merged / "new").write_text("new")
        os.unlink(merged / "new")
        assert (session / "root/file").read_text() == "session"
        assert (session / "root/file").stat().st_uid == FIRST_BASE
        assert (lower / "file").read_text() == "image"
        table = Path("/proc/self/mountinfo").read_text()
        (line,) = [each for each in table.splitlines() if " - overlay sandkasten " in each]
        assert str(tmp_path) not in line.split(" - ")[1]

    _in_own_mount_namespace(check)


@pytest.mark.parametrize("by_fd", [True, False])
def test_the_first_of_two_lowers_lies_above_the_second(tmp_path: Path, by_fd: bool) -> None:
    """Directories show what both have, and a file of the first covers one of the second; so it is with as many as there
    may be."""
    first, second, session, staged = (tmp_path / name for name in ("first", "second", "session", "stage"))
    others = [tmp_path / str(number) for number in range(stage.MAX_LOWERS - 2)]
    for lower in (first, second):
        (lower / "bin").mkdir(parents=True)
        (lower / "bin/same").write_text(lower.name)
        (lower / "bin" / lower.name).write_text("")
    for lower in others:
        lower.mkdir()
    staged.mkdir()

    def check() -> None:
        stage.make_stage(str(staged))
        userns_fd = make_user_namespace(FIRST_BASE)
        if by_fd and not mounts.probe_features(str(staged), userns_fd).overlay_by_fd:
            return
        os.mkdir(session, 0o700)
        make_layers(str(session), FIRST_BASE)
        layers = OverlayParts(tuple(map(str, (first, *others, second))), str(session), "usr", userns_fd)
        mount_fd = mounts.overlay(layers, features=Features(by_fd, True), stage_path=str(staged))
        mounts.attach(mount_fd, os.open(staged / stage.ROOT, os.O_PATH))
        merged = staged / stage.ROOT / "bin"
        assert sorted(os.listdir(merged)) == ["first", "same", "second"]
        assert (merged / "same").read_text() == "first"
        table = Path("/proc/self/mountinfo").read_text()
        assert f" {staged}/{stage.STAGED_ROOT}" not in table

    _in_own_mount_namespace(check)


def test_a_link_is_no_lower(tmp_path: Path) -> None:
    """A lower layer that is a link is refused, alone or among others: the maker of an image must not choose which of
    the machine's files are seen inside."""
    lower, link, session, staged = (tmp_path / name for name in ("lower", "link", "session", "stage"))
    lower.mkdir()
    staged.mkdir()
    link.symlink_to(lower)

    def check() -> None:
        stage.make_stage(str(staged))
        userns_fd = make_user_namespace(FIRST_BASE)
        os.mkdir(session, 0o700)
        make_layers(str(session), FIRST_BASE)
        features = mounts.probe_features(str(staged), userns_fd)
        for paths in ((link,), (lower, link), (lower,)):
            parts = OverlayParts(tuple(map(str, paths)), str(session), "root", userns_fd)
            with pytest.raises(OSError) if link in paths else contextlib.nullcontext():
                os.close(mounts.overlay(parts, features=features, stage_path=str(staged)))

    _in_own_mount_namespace(check)


def test_an_upper_that_overlayfs_can_not_use_is_an_error_not_read_only(tmp_path: Path) -> None:
    """overlayfs falls back to a silent read-only mount when it can't make its work directory; the build must not."""
    lower, session, staged = (tmp_path / name for name in ("lower", "session", "stage"))
    for path in (lower, session, staged):
        path.mkdir()

    def check() -> None:
        stage.make_stage(str(staged))
        syscalls.mount("upper", str(session), "tmpfs")
        for name in ("root", "root-work"):
            (session / name).mkdir()
        syscalls.mount("", str(session), flags=k.MS_REMOUNT | k.MS_BIND | k.MS_RDONLY)
        userns_fd = make_user_namespace(FIRST_BASE)
        layers = OverlayParts((str(lower),), str(session), "root", userns_fd)
        with pytest.raises((mounts.ReadOnlyOverlay, OSError)):
            mounts.overlay(layers, features=mounts.probe_features(str(staged), userns_fd), stage_path=str(staged))

    _in_own_mount_namespace(check)
