"""Changes of a real directory tree: whole or not at all, and never through a link."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.files.operations import perform
from runner.loop.context import Refused
from runner.wire.protocol import ChangeMode, CopyFile, Done, FileRequest, MakeDirectory, MoveFile, RemoveFile
from tests.file_requests import waits_for_disk
from tests.unit.test_runner_entries import make_tree, work_in


def refused(top: Path, request: FileRequest) -> str:
    with pytest.raises(Refused) as raised:
        perform(request, work_in(top))
    return raised.value.error.code


def names(top: Path) -> list[str]:
    return sorted(str(each.relative_to(top)) for each in top.rglob("*"))


def test_a_directory_is_made_once(tmp_path: Path) -> None:
    """With `parents` also those above, and again."""
    assert refused(tmp_path, MakeDirectory("a/b")) == "FILE_NOT_FOUND"
    for _ in range(2):
        assert perform(MakeDirectory("a/b", parents=True), work_in(tmp_path)) == Done(f"{tmp_path}/a/b")
    assert refused(tmp_path, MakeDirectory("a")) == "EXISTS"
    (tmp_path / "f").touch()
    assert refused(tmp_path, MakeDirectory("f", parents=True)) == "EXISTS"


@pytest.mark.parametrize("kind", [MoveFile, CopyFile])
def test_a_name_that_is_taken_is_kept(tmp_path: Path, kind: type[MoveFile | CopyFile]) -> None:
    """Only `overwrite` replaces a file; nothing replaces a directory with entries."""
    make_tree(tmp_path)
    before = names(tmp_path)
    assert refused(tmp_path, kind("a", "b.x")) == "EXISTS"
    assert refused(tmp_path, kind("b", "b/c/in")) == "INVALID_PATH"
    assert refused(tmp_path, kind("a", "a")) == "INVALID_PATH"
    assert refused(tmp_path, kind("b/c", "b", overwrite=True)) == "NOT_EMPTY"
    assert refused(tmp_path, kind("b", "a", overwrite=True)) == "NOT_A_DIRECTORY"
    assert refused(tmp_path, kind("missing", "new")) == "FILE_NOT_FOUND"
    assert refused(tmp_path, kind("a", "../out")) == "PATH_OUTSIDE"
    assert refused(tmp_path, kind("a", "out/x")) == "PATH_OUTSIDE"
    assert refused(tmp_path, kind(".", "new")) == "PERMISSION_DENIED"
    assert names(tmp_path) == before
    perform(kind("a", "b.x", overwrite=True), work_in(tmp_path))
    assert (tmp_path / "b.x").read_text() == "a"
    assert (tmp_path / "a").exists() is (kind is CopyFile)


@pytest.mark.parametrize("path", ["/proc", "/sys"])
@pytest.mark.parametrize(
    "change",
    [
        lambda path: CopyFile(path, "new"),
        lambda path: MoveFile(path, "new"),
        lambda path: MoveFile("a", path, overwrite=True),
        lambda path: RemoveFile(path, recursive=True),
    ],
)
def test_the_kernels_own_files_are_refused_by_their_kind(
    tmp_path: Path, change: Callable[[str], FileRequest], path: str
) -> None:
    """At once: before any of them is opened."""
    make_tree(tmp_path)
    with pytest.raises(Refused) as raised:
        perform(change(path), work_in(tmp_path, anywhere=True))
    assert raised.value.error.code == "NOT_A_FILE"


def test_a_copy_is_the_same_tree(tmp_path: Path) -> None:
    """Content, modes, times, links as links, holes as holes; nothing is left beside it."""
    make_tree(tmp_path)
    (tmp_path / "b/a").chmod(0o640)
    (tmp_path / "b/link").symlink_to("../a")
    with (tmp_path / "b/sparse").open("wb") as file:
        file.truncate(1 << 30)
        file.seek(1 << 29)
        file.write(b"middle")
    os.utime(tmp_path / "b", ns=(1, 2))
    perform(CopyFile("b", "copy"), work_in(tmp_path))
    assert names(tmp_path / "copy") == names(tmp_path / "b")
    for name in names(tmp_path / "b"):
        old, new = (tmp_path / top / name for top in ("b", "copy"))
        assert (old.lstat().st_mode, old.lstat().st_mtime_ns) == (new.lstat().st_mode, new.lstat().st_mtime_ns)
    assert (tmp_path / "copy").stat().st_mtime_ns == 2
    assert os.readlink(tmp_path / "copy/link") == "../a"
    sparse = tmp_path / "copy/sparse"
    assert sparse.stat().st_size == 1 << 30
    assert sparse.stat().st_blocks * 512 < 1 << 20
    with sparse.open("rb") as file:
        file.seek(1 << 29)
        assert file.read(6) == b"middle"
    assert not [each for each in names(tmp_path) if each.endswith(".part")]


def test_a_copy_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """A FIFO somewhere below: neither half a copy under the name, nor a part beside it."""
    make_tree(tmp_path)
    os.mkfifo(tmp_path / "b/c/z")
    before = names(tmp_path)
    assert refused(tmp_path, CopyFile("b", "copy")) == "NOT_A_FILE"
    assert names(tmp_path) == before


def test_modes_are_not_set_through_links(tmp_path: Path) -> None:
    """Below a directory; the path itself is followed, as chmod(1) does."""
    make_tree(tmp_path)
    outside = tmp_path.with_name("outside")
    outside.write_text("x")
    outside.chmod(0o644)
    (tmp_path / "b/link").symlink_to(outside)
    perform(ChangeMode("b", 0o700, recursive=True), work_in(tmp_path))
    assert {(tmp_path / each).stat().st_mode & 0o777 for each in ("b", "b/c", "b/c/d", "b/a")} == {0o700}
    assert outside.stat().st_mode & 0o777 == 0o644


def test_what_is_moved_between_file_systems_is_on_the_disk(tmp_path: Path) -> None:
    """The copy is synced before the original is removed."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        (Path(memory) / "d").mkdir()
        for name in ("d/f", "f"):
            (Path(memory) / name).write_bytes(b"x" * 10_000)
        for name in ("d", "f"):
            perform(MoveFile(f"{memory}/{name}", name), work_in(tmp_path, anywhere=True))
        assert os.listdir(memory) == []
    perform(CopyFile("f", "control"), work_in(tmp_path))
    assert [waits_for_disk(tmp_path / each) for each in ("d/f", "f", "control")] == [False, False, True]


def test_a_move_whose_original_goes_by_halves_says_so(tmp_path: Path) -> None:
    """The kernel alone knows that a file may not be removed, and says it after others are gone: the copy is whole."""
    (tmp_path / "d").mkdir()
    for name in ("one", "two", "three"):
        (tmp_path / "d" / name).touch()
    first, *_, last = os.listdir(tmp_path / "d")
    subprocess.run(["chattr", "+i", tmp_path / "d" / last], check=True)
    try:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
            with pytest.raises(Refused, match="copied whole, and not all of the original could be removed"):
                perform(MoveFile("d", f"{memory}/d"), work_in(tmp_path, anywhere=True))
            assert sorted(os.listdir(f"{memory}/d")) == ["one", "three", "two"]
    finally:
        subprocess.run(["chattr", "-i", tmp_path / "d" / last], check=True)
    assert not (tmp_path / "d" / first).exists()
