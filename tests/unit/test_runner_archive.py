"""Archives of trees: packed while somebody changes them in the worst moment, between the look at a name and its
opening; and unpacked by a kernel that is watched."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from nsinit.sandbox.child import RunnerKernel
from runner.files import zip_archive
from runner.files.archive import TreeMaker, pack
from runner.files.operations import perform
from runner.files.tree import TreeFile, Walk, never_ends
from runner.loop.context import Refused
from runner.wire.protocol import Pack, Packed, Unpack
from tests.unit.test_runner_entries import work_in

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
        pack(Walk(fd), out)
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


# Zip ------------------------------------------------------------------------------------------------------------------


def zipped(top: Path, path: str = ".", *, kind: Literal["tar", "zip"] = "zip") -> tuple[Packed, bytes]:
    """Return the counts and an archive that went through a pipe."""
    read_fd, write_fd = os.pipe()
    with subprocess.Popen(["cat"], stdin=read_fd, stdout=subprocess.PIPE) as reader:
        os.close(read_fd)
        assert reader.stdout is not None
        try:
            answer = perform(Pack(path, kind), work_in(top, anywhere=True, out_fd=write_fd))
        finally:
            os.close(write_fd)
        content = reader.stdout.read()
    assert isinstance(answer, Packed)
    return answer, content


def unzipped(
    top: Path,
    content: bytes,
    *,
    path: str = ".",
    entries: int = 100,
    size: int = 10_000_000,
    kind: Literal["tar", "zip"] = "zip",
) -> Packed:
    """Unpack an archive below `top`."""
    spool = top.parent / "spool"
    spool.write_bytes(content)
    with spool.open("rb") as source:
        work = work_in(top, anywhere=True, source_fd=source.fileno())
        answer = perform(Unpack(entries, size, path, kind), work)
    assert isinstance(answer, Packed)
    return answer


def archive_of(**members: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as made:
        for name, content in members.items():
            made.writestr(name, content)
    return out.getvalue()


def test_a_zip_archive_comes_back_as_it_was(tmp_path: Path) -> None:
    """Names, contents, modes and times; what a zip archive has no form for is left out and counted in it."""
    top, back = tmp_path / "top", tmp_path / "back"
    (top / "d/empty").mkdir(parents=True)
    back.mkdir()
    (top / "d/größe").write_bytes(bytes(range(256)) * 5000)
    (top / "run").write_bytes(b"#!")
    (top / "run").chmod(0o750)
    os.utime(top / "run", (1_000_000_000, 1_000_000_000))
    (top / "link").symlink_to("run")
    (top / os.fsdecode(b"\xff")).touch()
    os.mkfifo(top / "fifo")
    packed, content = zipped(top)
    assert packed == Packed(4, 256 * 5000 + 2, 3)
    with zipfile.ZipFile(io.BytesIO(content)) as made:
        assert (made.testzip(), made.comment) == (None, b"left out: 3")
        flags = {each.filename: each.flag_bits & 0x808 for each in made.infolist()}
        assert flags == {"d/": 0, "d/empty/": 0, "d/größe": 0x808, "run": 0x8}
    assert unzipped(back, content) == Packed(4, 256 * 5000 + 2, 0)
    assert sorted(str(each.relative_to(back)) for each in back.rglob("*")) == ["d", "d/empty", "d/größe", "run"]
    assert (back / "d/größe").read_bytes() == (top / "d/größe").read_bytes()
    status = (back / "run").stat()
    assert (status.st_mode & 0o7777, status.st_mtime) == (0o750, 1_000_000_000)


@pytest.mark.skipif(shutil.which("unzip") is None, reason="unzip is not installed")
def test_another_program_reads_a_zip_archive(tmp_path: Path) -> None:
    """Info-ZIP finds no fault."""
    (tmp_path / "f").write_bytes(b"x" * 100_000)
    (tmp_path.parent / "made.zip").write_bytes(zipped(tmp_path)[1])
    subprocess.run(["unzip", "-t", str(tmp_path.parent / "made.zip")], check=True, capture_output=True)


def test_a_file_of_more_than_four_gigabytes_fits(tmp_path: Path) -> None:
    """The head of the member has the fields of ZIP64 beforehand."""
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(5 * 1024**3)
    fd = os.open(tmp_path, os.O_RDONLY)
    member = next(zip_archive._member_of(found, found.status) for found in Walk(fd))
    os.close(fd)
    assert member is not None
    assert member.file_size * 1.05 > zipfile.ZIP64_LIMIT


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"PK\x03\x04 no archive", "BAD_ARCHIVE"),
        (archive_of(f=b"x" * 50)[:-30], "BAD_ARCHIVE"),
        (archive_of(f=b"x" * 50).replace(b"xxxx", b"xxxy", 1), "BAD_ARCHIVE"),
        (archive_of(**{"../f": b"x"}), "BAD_ARCHIVE"),
        (archive_of(**{"link/f": b"x"}), "BAD_ARCHIVE"),
        (archive_of(**{f"f{number}": b"" for number in range(4)}), "TOO_LARGE"),
        (archive_of(f=b"x" * 1001), "TOO_LARGE"),
    ],
)
def test_a_hostile_zip_archive_is_refused(tmp_path: Path, content: bytes, code: str) -> None:
    """Broken ones, ways out, and more than is allowed; nothing is left of the archive itself."""
    top = tmp_path / "top"
    top.mkdir()
    (top / "link").symlink_to("/etc")
    with pytest.raises(Refused) as refused:
        unzipped(top, content, entries=3, size=1000)
    assert refused.value.error.code == code
    assert not [each for each in top.iterdir() if each.name.startswith(".sandkasten")]


def test_a_bomb_is_stopped_at_its_bound(tmp_path: Path) -> None:
    """A small archive whose files are large; nothing of the one that is too large stays."""
    top = tmp_path / "top"
    top.mkdir()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("f", bytes(50_000_000))
    assert len(out.getvalue()) < 100_000
    with pytest.raises(Refused) as refused:
        unzipped(top, out.getvalue(), size=1_000_000)
    assert refused.value.error.code == "TOO_LARGE"
    assert os.listdir(top) == []


def test_a_link_over_a_file_takes_its_place_or_leaves_it(tmp_path: Path) -> None:
    """One to itself changes nothing; one that leads nowhere is refused, and the old file stays."""
    (tmp_path / "f").write_text("old")
    fd = os.open(tmp_path, os.O_RDONLY)
    maker = TreeMaker(fd, os.fsencode(tmp_path), RunnerKernel(filters_commands=False), Unpack(10, 10), never_ends)
    member = tarfile.TarInfo("f")
    member.type, member.linkname = tarfile.LNKTYPE, "f"
    maker.take(member, io.BytesIO)
    member.linkname = "missing"
    with pytest.raises(Refused, match="no such file"):
        maker.take(member, io.BytesIO)
    os.close(fd)
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("f", "old")]


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_a_directory_keeps_its_sticky_bit(tmp_path: Path, kind: Literal["tar", "zip"]) -> None:
    """Out and in, over one that is there: what many may write in must not lose it."""
    (tmp_path / "top/d").mkdir(parents=True)
    (tmp_path / "top/d").chmod(0o1777)
    _, content = zipped(tmp_path / "top", kind=kind)
    unzipped(tmp_path / "top", content, kind=kind)
    assert (tmp_path / "top/d").stat().st_mode & 0o7777 == 0o1777


def test_an_absolute_name_and_a_missing_directory_are_below(tmp_path: Path) -> None:
    """A leading slash means nothing, and the directory to unpack into is made."""
    top = tmp_path / "top"
    top.mkdir()
    unzipped(top, archive_of(**{"/etc/f": b"x"}), path="new/deep")
    assert (top / "new/deep/etc/f").read_bytes() == b"x"


def test_the_kernels_own_files_are_in_no_archive(tmp_path: Path) -> None:
    """Neither packed nor unpacked, wherever the archive begins."""
    fd = os.open("/", os.O_RDONLY)
    for name in (b"proc", b"sys"):
        found = TreeFile(fd, name, name, os.stat(b"/" + name))
        assert Walk(fd, real=b"/")._enter(found, 1) == -1
    maker = TreeMaker(fd, b"/", RunnerKernel(filters_commands=False), Unpack(10, 10), never_ends)
    maker.take(tarfile.TarInfo("proc/self/comm"), io.BytesIO)
    assert maker.finish() == Packed(1, 0, 1)
    os.close(fd)
