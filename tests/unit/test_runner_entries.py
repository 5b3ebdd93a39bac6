"""Lists and properties of files in a real directory: order, cursors, patterns, names of any bytes, versions."""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nsinit.sandbox.child import RunnerKernel
from runner.files import tree, uploads
from runner.files.operations import FileWork, perform
from runner.files.paths import Resolver
from runner.files.tree import etag_of
from runner.loop.config import RunnerConfig
from runner.loop.context import Refused
from runner.wire.protocol import ANSWERS, MAX_FRAME_BYTES, FileEntry, FileStats, ListFiles, Listing, StatFile, StatFiles
from sandkasten.api.resources.fields import FilePath, check_of, spell_path


def work_in(
    top: Path,
    *,
    anywhere: bool = False,
    source_fd: int = -1,
    out_fd: int = -1,
    start: Callable[[object], None] = lambda _head: None,
    check: tree.Check = tree.never_ends,
) -> FileWork:
    """Return means of work within a directory, or `anywhere`. The descriptors, of content, stay the caller's."""
    kernel = RunnerKernel(filters_commands=False)
    config = RunnerConfig(workspace=str(top), files_only=not anywhere)
    nothing = io.RawIOBase()
    source = nothing if source_fd < 0 else io.FileIO(source_fd, "rb", closefd=False)
    out = nothing if out_fd < 0 else io.FileIO(out_fd, "wb", closefd=False)
    return FileWork(Resolver(config, kernel), kernel, start, source, out, config.passing, check)


def pages(top: Path, request: ListFiles) -> list[str]:
    """Return the names of all pages of a list."""
    found: list[str] = []
    while True:
        listing = perform(replace(request, after=found[-1] if found else ""), work_in(top))
        assert isinstance(listing, Listing)
        found += [each.name for each in listing.entries]
        if not listing.more:
            return found


def make_tree(top: Path) -> None:
    for name in ("b/c/d", "b.x", "a", "b/a"):
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(name)
    (top / "out").symlink_to("/etc")


@pytest.mark.parametrize("limit", [1, 2, 1000])
def test_a_deep_list_is_in_order_whatever_the_pages(tmp_path: Path, limit: int) -> None:
    """A directory comes before its content, links are not entered, and a cursor goes on behind any entry."""
    make_tree(tmp_path)
    every = ["a", "b", "b/a", "b/c", "b/c/d", "b.x", "out"]
    assert pages(tmp_path, ListFiles(".", limit=limit, depth=3)) == every
    assert pages(tmp_path, ListFiles(".", limit=limit, depth=2)) == [each for each in every if each != "b/c/d"]
    assert pages(tmp_path, ListFiles(".", limit=limit)) == ["a", "b", "b.x", "out"]


@pytest.mark.parametrize("limit", [1, 4, 1000])
def test_a_directory_with_more_names_than_are_read_at_once_is_listed_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """Each entry once and in order, with what is below it, and those of a pattern alone."""
    monkeypatch.setattr(tree, "_NAMES_AT_ONCE", 3)
    (tmp_path / "b3").mkdir()
    names = [f"{letter}{number}" for letter in "abc" for number in range(7)]
    below = [f"b3/{name}" for name in names]
    for name in (*reversed(below), *names):
        (tmp_path / name).touch()
    time.sleep(0.03)  # names of a directory that was changed just now are not kept
    assert pages(tmp_path, ListFiles(".", limit=limit)) == names
    assert pages(tmp_path, ListFiles(".", limit=limit, depth=2)) == [*names[:11], *below, *names[11:]]
    assert pages(tmp_path, ListFiles(".", limit=limit, glob="?[05]")) == ["a0", "a5", "b0", "b5", "c0", "c5"]


@pytest.mark.slow
def test_a_hundred_thousand_entries_are_listed_in_pages() -> None:
    """Each once and in order; a page holds some thousands of names, not all."""
    names = [f"{number:06d}" for number in range(100_000)]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        top = Path(directory)
        for name in names:
            os.mknod(top / name)
        tracemalloc.start()
        for after in ("", names[50_000]):
            perform(ListFiles(".", after), work_in(top))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4 << 20
        assert pages(top, ListFiles(".", limit=1000)) == names


def test_a_cursor_of_an_entry_that_is_gone_goes_on_behind_it(tmp_path: Path) -> None:
    """Nothing comes twice, and nothing that stayed is left out."""
    make_tree(tmp_path)
    (tmp_path / "b/a").unlink()
    listing = perform(ListFiles(".", "b/a", depth=3), work_in(tmp_path))
    assert isinstance(listing, Listing)
    assert [each.name for each in listing.entries] == ["b/c", "b/c/d", "b.x", "out"]


def test_a_page_has_what_was_made_since_the_last_one(tmp_path: Path) -> None:
    """Names that are kept from one page to the next are those of the same version of the directory."""
    make_tree(tmp_path)
    time.sleep(0.03)  # a directory that was changed just now is read anew
    work = work_in(tmp_path)
    first = perform(ListFiles(".", limit=2), work)
    assert isinstance(first, Listing)
    (tmp_path / "b.w").touch()
    (tmp_path / "out").unlink()
    second = perform(ListFiles(".", first.entries[-1].name), work)
    assert isinstance(second, Listing)
    assert [[each.name for each in page.entries] for page in (first, second)] == [["a", "b"], ["b.w", "b.x"]]


def test_a_pattern_is_of_names_or_of_paths(tmp_path: Path) -> None:
    """One with a slash is of paths below the directory; directories are entered all the same."""
    make_tree(tmp_path)
    for glob, found in (
        ("a", ["a", "b/a"]),
        ("b/*", ["b/a", "b/c"]),
        ("**/d", ["b/c/d"]),
        ("*.x", ["b.x"]),
        ("{out,?}", ["a", "b", "b/a", "b/c", "b/c/d", "out"]),
    ):
        listing = perform(ListFiles(".", depth=9, glob=glob), work_in(tmp_path))
        assert isinstance(listing, Listing)
        assert [each.name for each in listing.entries] == found
    with pytest.raises(Refused, match="no pattern"):
        perform(ListFiles(".", glob="../a"), work_in(tmp_path))


def test_names_of_any_bytes_are_found_again(tmp_path: Path) -> None:
    """The spelling of a name in JSON is read as the same name, and as no other."""
    names = [b"\xff\x80", b"\xc3\x28", "ü".encode(), b"%ff", b"\\udcff", b"new\nline"]
    for name in names:
        (tmp_path / os.fsdecode(name)).write_bytes(name)
    listing = perform(ListFiles("."), work_in(tmp_path))
    assert isinstance(listing, Listing)
    spelled = [spell_path(each.name) for each in listing.entries]
    assert len(set(spelled)) == len(names)
    assert all(each.encode() for each in spelled)
    read = check_of(FilePath)
    assert read is not None
    assert sorted(os.fsencode(str(read(each))) for each in spelled) == sorted(names)


def test_many_properties_fit_into_one_answer(tmp_path: Path) -> None:
    """As many of the first as fit, null for a missing one, the target with `follow`."""
    long = "n" * 250
    for number in range(400):
        (tmp_path / f"{number:03d}{long}").touch()
    (tmp_path / "link").symlink_to("000" + long)
    paths = tuple(f"{number:03d}{long}" for number in range(400))
    answer = perform(StatFiles(paths), work_in(tmp_path))
    assert isinstance(answer, FileStats)
    assert 0 < len(answer.entries) < 400
    assert len(ANSWERS.encode(answer)) < MAX_FRAME_BYTES
    answer = perform(StatFiles(("missing", "link", "../outside", "l" * 300)), work_in(tmp_path))
    assert isinstance(answer, FileStats)
    assert [each and each.kind for each in answer.entries] == [None, "symlink", None, None]
    followed = perform(StatFiles(("link",), follow=True), work_in(tmp_path))
    assert isinstance(followed, FileStats)
    assert [each and (each.kind, each.name) for each in followed.entries] == [("file", "000" + long)]


def test_a_digest_is_of_one_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's own, by whatever link; a file that is written to while it is read has none."""
    (tmp_path / "f").write_bytes(b"x")
    (tmp_path / "link").symlink_to("f")
    entry = perform(StatFile("link", digest=True), work_in(tmp_path))
    assert isinstance(entry, FileEntry)
    assert (entry.kind, entry.path, entry.sha256) == ("file", f"{tmp_path}/f", hashlib.sha256(b"x").hexdigest())
    monkeypatch.setattr(uploads, "digest_of", lambda _fd: (tmp_path / "f").write_bytes(b"xy"))
    with pytest.raises(Refused) as refused:
        perform(StatFile("link", digest=True), work_in(tmp_path))
    assert refused.value.error.code == "EXISTS"


@pytest.mark.parametrize("path", ["/proc/self/environ", "/proc", "/sys/kernel", "/proc/1/root/etc"])
def test_the_kernels_own_files_are_no_place(tmp_path: Path, path: str) -> None:
    """Wherever a path may lead: they are not listed, and nothing in them is looked at."""
    with pytest.raises(Refused) as refused:
        perform(ListFiles(path), work_in(tmp_path, anywhere=True))
    assert refused.value.error.code == ("PERMISSION_DENIED" if "root" in path else "NOT_A_FILE")


def test_a_list_of_everything_stays_out_of_the_kernels_files(tmp_path: Path) -> None:
    """`/proc` is an entry of `/`, and its content is not."""
    listing = perform(ListFiles("/", "proc", depth=2, limit=1), work_in(tmp_path, anywhere=True))
    assert isinstance(listing, Listing)
    assert not any(each.name.startswith("proc/") for each in listing.entries)


def test_a_file_that_was_written_just_now_has_a_weak_version(tmp_path: Path) -> None:
    """Strong 20 ms later, and another one after each write, even if size and mtime are put back."""
    file = tmp_path / "f"
    file.write_text("one")
    assert etag_of(file.stat()).startswith('W/"')
    time.sleep(0.05)
    before = file.stat()
    assert etag_of(before).startswith('"')
    assert etag_of(before) == etag_of(file.stat())
    file.write_text("two")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    time.sleep(0.05)
    assert etag_of(file.stat()) != etag_of(before)
