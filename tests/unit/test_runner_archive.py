"""Archives of trees: packed while somebody changes them in the worst moment, between the look at a name and its
opening; and unpacked by a kernel that is watched."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from nsinit.sandbox.child import RunnerKernel
from runner.files import archive
from runner.files.archive import pack, unpack

Change = Callable[[Path], None]


@pytest.fixture
def change(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Change], None]:
    """Have a change made right before the first regular file of the tree is opened."""
    real = os.open
    due: list[Change] = []

    def open_late(path: str | bytes, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if due and isinstance(path, bytes) and not flags & os.O_DIRECTORY:
            due.pop()(tmp_path / os.fsdecode(path))
        return real(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", open_late)
    return due.append


def packed(top: Path) -> dict[str, bytes | None]:
    """Return what is in an archive of a directory: names and contents."""
    out = io.BytesIO()
    fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    try:
        pack(fd, out)
    finally:
        os.close(fd)
    with tarfile.open(fileobj=io.BytesIO(out.getvalue())) as made:
        files = {member.name: made.extractfile(member) for member in made}
        return {name: None if file is None else file.read() for name, file in files.items()}


@pytest.mark.parametrize("length", [1, 10_000])
def test_a_file_that_is_replaced_is_one_of_both(tmp_path: Path, change: Callable[[Change], None], length: int) -> None:
    """Never the beginning of the new one, nor the new one filled up to the size of the old one."""
    (tmp_path / "file").write_bytes(b"old" * 100)

    def replace(path: Path) -> None:
        new = tmp_path.with_name("new")
        new.write_bytes(b"n" * length)
        new.replace(path)

    change(replace)
    assert packed(tmp_path) == {"file": b"n" * length}


def test_of_two_names_of_a_file_the_one_that_is_left_has_it(tmp_path: Path, change: Callable[[Change], None]) -> None:
    """The archive has no link to what is not in it."""
    (tmp_path / "one").write_bytes(b"content")
    os.link(tmp_path / "one", tmp_path / "two")
    removed: list[str] = []

    def remove(path: Path) -> None:
        path.unlink()
        removed.append(path.name)

    change(remove)
    assert packed(tmp_path) == dict.fromkeys({"one", "two"} - set(removed), b"content")


@pytest.mark.parametrize("kind", ["link", "directory", "fifo"])
def test_what_becomes_something_else_costs_nothing_but_itself(
    tmp_path: Path, change: Callable[[Change], None], kind: str
) -> None:
    """The archive goes on and is whole."""
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(b"content")
    changed: list[str] = []

    def become(path: Path) -> None:
        changed.append(path.name)
        path.unlink()
        match kind:
            case "link":
                path.symlink_to("x")
            case "directory":
                path.mkdir()
            case _:
                os.mkfifo(path)

    change(become)
    assert packed(tmp_path) == dict.fromkeys({"one", "two"} - set(changed), b"content")


class WatchedKernel(RunnerKernel):
    """Notes what there is whenever the file system would be synced."""

    def __init__(self, top: Path) -> None:
        super().__init__(filters_commands=False)
        self._top = top
        self.synced: list[int] = []

    def syncfs(self, fd: int) -> None:
        self.synced.append(sum(each.stat().st_size for each in self._top.iterdir()))


def test_what_is_unpacked_is_on_the_disk_and_little_waits_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next sync finds next to nothing to do."""
    monkeypatch.setattr(archive, "_UNSYNCED_BYTES", 1_000_000)
    source = io.BytesIO()
    with tarfile.open(fileobj=source, mode="w") as made:
        for number in range(5):
            member = tarfile.TarInfo(f"file-{number}")
            member.size = 700_000
            made.addfile(member, io.BytesIO(bytes(member.size)))
    source.seek(0)
    kernel = WatchedKernel(tmp_path)
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        unpack(fd, source, kernel, max_entries=10, max_bytes=10_000_000)
    finally:
        os.close(fd)
    before = [0, *kernel.synced]
    assert kernel.synced[-1] == 5 * 700_000
    assert all(now - then <= 1_000_000 + 700_000 for then, now in zip(before, kernel.synced, strict=False))
