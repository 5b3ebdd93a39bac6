"""Images whose mount points lie: each is refused in words or harmless, and hashes say that nothing was touched."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import canary
from tests.kernel.harness import (
    Nsinit,
    host_plan,
    make_host_image,
    make_rootfs_image,
    rootfs_plan,
)

pytestmark = pytest.mark.skipif(not Path("/bin/busybox").exists(), reason="needs a static busybox")

MOUNT_POINTS = ("dev", "proc", "sys", "tmp", "run", "home", "home/sandbox", "workspace", "etc")


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    with canary.untouched(tmp_path / "outside") as root:
        yield root


def _new_name(server: Nsinit) -> str:
    return f"image-{len(os.listdir(server.data_dir / 'images'))}"


def _relative(path: Path, outside: Path) -> None:
    path.symlink_to("../" * 20 + str(outside).lstrip("/"))


def _chain(path: Path, outside: Path) -> None:
    """A link to a link to a link, the last of which leads out."""
    for number in (1, 2):
        (path.parent / f"step-{number}").symlink_to(f"step-{number + 1}")
    (path.parent / "step-3").symlink_to(outside)
    path.symlink_to("step-1")


def _socket(path: Path, outside: Path) -> None:
    directory_fd = os.open(path.parent, os.O_PATH)
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(f"/proc/self/fd/{directory_fd}/{path.name}")
    finally:
        os.close(directory_fd)


LIES: dict[str, Callable[[Path, Path], object]] = {
    "a link out": lambda path, outside: path.symlink_to(outside),
    "a relative link out": _relative,
    "a chain of links": _chain,
    "a link to itself": lambda path, outside: path.symlink_to(path.name),
    "a link to nothing": lambda path, outside: path.symlink_to("/nowhere"),
    "a link into proc": lambda path, outside: path.symlink_to("/proc/1/root"),
    "a file": lambda path, outside: path.write_text("no directory"),
    "a FIFO": lambda path, outside: os.mkfifo(path),
    "a socket": _socket,
    "a device": lambda path, outside: os.mknod(path, 0o020666, os.makedev(1, 3)),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("name", MOUNT_POINTS)
def test_a_mount_point_that_is_no_directory_ends_the_build(
    server: Nsinit, outside: Path, tmp_path: Path, name: str, lie: str
) -> None:
    """The answer names the mount point and a reason, nothing is left, and the image is as it was."""
    image = _new_name(server)
    rootfs = make_rootfs_image(server.data_dir, image)
    (rootfs / name).parent.mkdir(exist_ok=True)
    LIES[lie](rootfs / name, outside)
    before = canary.digest(rootfs)
    failed = server.refused(plan := rootfs_plan(image))
    assert failed.path == f"/{name}" or failed.path.startswith(f"/{name}/"), failed
    assert os.strerror(failed.errno) in ("Too many levels of symbolic links", "Not a directory"), failed
    assert server.traces(plan.session_id) == []
    assert canary.digest(rootfs) == before


@pytest.mark.parametrize("lie", LIES)
def test_a_usr_that_is_no_directory_ends_the_build(server: Nsinit, outside: Path, lie: str) -> None:
    """The host image's own `/usr` is where the machine's is mounted; a copy of that image that lies is refused."""
    image = _new_name(server)
    rootfs = make_host_image(server.data_dir, image)
    (rootfs / "usr").rmdir()
    LIES[lie](rootfs / "usr", outside)
    failed = server.refused(plan := host_plan(image=image))
    assert failed.stage in ("overlay usr", "overlay root"), failed
    assert server.traces(plan.session_id) == []


def _redirect(directory: Path, outside: Path) -> None:
    os.setxattr(directory, "trusted.overlay.redirect", str(outside).encode())


def _metacopy(directory: Path, outside: Path) -> None:
    file = directory / "passwd"
    file.write_text("")
    os.setxattr(file, "trusted.overlay.metacopy", b"")
    os.setxattr(file, "trusted.overlay.redirect", str(outside / "etc/passwd").encode())


OVERLAY_LIES: dict[str, Callable[[Path, Path], object]] = {
    "a directory that says it lies elsewhere": _redirect,
    "a file that says its data lie elsewhere": _metacopy,
    "an opaque directory": lambda directory, outside: os.setxattr(directory, "trusted.overlay.opaque", b"y"),
    "an origin": lambda directory, outside: os.setxattr(directory, "trusted.overlay.origin", b"\0" * 29),
    "an unprivileged redirect": lambda directory, outside: os.setxattr(
        directory, "user.overlay.redirect", str(outside).encode()
    ),
    "a whiteout": lambda directory, outside: os.mknod(directory / "passwd", 0o020000, os.makedev(0, 0)),
    "a whiteout by name": lambda directory, outside: (directory / ".wh.passwd").write_text(""),
    "an opaque mark by name": lambda directory, outside: (directory / ".wh..wh..opq").write_text(""),
}


@pytest.mark.parametrize("lie", OVERLAY_LIES)
def test_marks_of_overlayfs_in_an_image_lead_nowhere(server: Nsinit, outside: Path, lie: str) -> None:
    """Marks of overlayfs, however they came into the image, show no byte of the tree they name and change none."""
    image = _new_name(server)
    rootfs = make_rootfs_image(server.data_dir, image)
    (rootfs / "srv").mkdir()
    try:
        OVERLAY_LIES[lie](rootfs / "srv", outside)
    except OSError as error:
        pytest.skip(f"the file system of the test has no such attribute: {error}")
    box = server.build(rootfs_plan(image))
    seen = box.run("ls -A /srv; cat /srv/passwd /srv/etc/passwd; echo end").out
    assert "kept" not in seen
    assert "etc" not in seen.split()
    assert seen.endswith("end\n")
    assert box.run("touch /srv/new").code != 0
    box.teardown()
