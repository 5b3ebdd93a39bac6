"""Edits and views of text in a real directory: exact, all or none, and never in silence."""

from __future__ import annotations

import itertools
import json
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.files import edit
from runner.files.operations import perform
from runner.files.tree import etag_of
from runner.files.view import MAX_VIEW_BYTES
from runner.loop.context import Refused
from runner.wire.protocol import ANSWERS, MAX_FRAME_BYTES, Edited, EditFiles, Unedited, Viewed, ViewFile
from tests.unit.test_runner_entries import work_in

TEXT = "one\ntwo\nthree\ntwo\n"


def make(top: Path, *edits: dict[str, Any], dry_run: bool = False, sync: bool = False) -> Edited | Unedited:
    with tempfile.TemporaryFile() as spool:
        spool.write(json.dumps(edits).encode())
        spool.seek(0)
        answer = perform(EditFiles(dry_run, sync), work_in(top, source_fd=spool.fileno()))
    assert isinstance(answer, Edited | Unedited)
    assert len(ANSWERS.encode(answer)) < MAX_FRAME_BYTES
    return answer


def contents_of(top: Path) -> dict[str, bytes]:
    return {str(each.relative_to(top)): each.read_bytes() for each in top.rglob("*") if each.is_file()}


@pytest.mark.parametrize(
    ("wanted", "after"),
    [
        ({"op": "replace", "old": "three", "new": "3"}, "one\ntwo\n3\ntwo\n"),
        ({"op": "replace", "old": "two", "new": "2", "count": "all"}, "one\n2\nthree\n2\n"),
        ({"op": "insert", "line": 0, "text": "zero"}, "zero\none\ntwo\nthree\ntwo\n"),
        ({"op": "insert", "line": 4, "text": "end\n"}, "one\ntwo\nthree\ntwo\nend\n"),
        ({"op": "patch", "patch": "--- f\n+++ f\n@@ -2,2 +2,2 @@\n two\n-three\n+3\n"}, "one\ntwo\n3\ntwo\n"),
        ({"op": "patch", "patch": "@@ -3 +3 @@\n-three\n+3\n@@ -4,0 +5 @@\n+end\n"}, "one\ntwo\n3\ntwo\nend\n"),
        (
            {"op": "patch", "patch": "*** Begin Patch\n*** Update File: f\n@@ three\n-two\n+2\n*** End Patch\n"},
            "one\ntwo\nthree\n2\n",
        ),
        (
            {"op": "patch", "patch": "@@ -4 +4 @@\n-two\n+2\n\\ No newline at end of file\n"},
            "one\ntwo\nthree\n2",
        ),
    ],
)
def test_an_edit_changes_its_text_alone(tmp_path: Path, wanted: dict[str, Any], after: str) -> None:
    """The mode stays, nothing is left beside the file, and a trial writes nothing."""
    (tmp_path / "f").write_text(TEXT)
    (tmp_path / "f").chmod(0o750)
    trial = make(tmp_path, {"path": "f", **wanted}, dry_run=True)
    assert contents_of(tmp_path) == {"f": TEXT.encode()}
    made = make(tmp_path, {"path": "f", **wanted})
    assert contents_of(tmp_path) == {"f": after.encode()}
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o750
    assert isinstance(trial, Edited)
    assert isinstance(made, Edited)
    assert trial.files[0].diff == made.files[0].diff
    assert trial.files[0].etag == ""
    assert made.files[0].etag


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ({"op": "replace", "old": "two", "new": "2"}, Unedited(1, "ambiguous", (2, 4))),
        ({"op": "replace", "old": "four", "new": "4"}, Unedited(1, "absent")),
        ({"op": "insert", "line": 5, "text": "x"}, Unedited(1, "absent")),
        ({"op": "patch", "patch": "\\ No\n@@\n\\ No\n"}, Unedited(1, "absent")),
        ({"op": "patch", "patch": "@@\n-two\n+2\n"}, Unedited(1, "ambiguous", (2, 4))),
        ({"op": "patch", "patch": "@@ -3 +3 @@\n-two\n+2\n"}, Unedited(1, "ambiguous", (2, 4))),
        ({"op": "patch", "patch": "@@ -1,2 +1,2 @@\n one\n-Two\n+2\n"}, Unedited(1, "absent")),
    ],
)
def test_one_edit_that_cannot_be_made_stops_all(tmp_path: Path, wanted: dict[str, Any], problem: Unedited) -> None:
    """Not even a directory of the edits before it is made."""
    (tmp_path / "f").write_text(TEXT)
    first = {"path": "d/new", "op": "create", "text": "x"}
    assert make(tmp_path, first, {"path": "f", **wanted}) == problem
    assert (contents_of(tmp_path), (tmp_path / "d").exists()) == ({"f": TEXT.encode()}, False)


def test_a_patch_that_is_off_says_so(tmp_path: Path) -> None:
    """By three lines; four are too many."""
    for lines, offsets in ((3, (3,)), (4, None)):
        (tmp_path / "f").write_text("\n" * lines + "x\n")
        made = make(tmp_path, {"path": "f", "op": "patch", "patch": "@@ -1 +1 @@\n-x\n+y\n"})
        assert (made.files[0].offsets if isinstance(made, Edited) else None) == offsets


@pytest.mark.parametrize(
    ("size", "wanted", "is_taken"),
    [
        (edit.MAX_EDIT_BYTES // 2, {"op": "replace", "old": "\0\0", "new": "x", "count": "all"}, True),
        (edit.MAX_EDIT_BYTES // 2, {"op": "insert", "line": 0, "text": "x"}, False),
        (0, {"op": "insert", "line": 0, "text": "x" * edit.MAX_EDIT_BYTES}, False),
    ],
)
def test_edits_are_bounded(tmp_path: Path, size: int, wanted: dict[str, Any], is_taken: bool) -> None:
    """The request, and all files before and after; what is too much changes nothing."""
    (tmp_path / "f").write_bytes(bytes(size))
    if is_taken:
        assert isinstance(make(tmp_path, {"path": "f", **wanted}), Edited)
        return
    with pytest.raises(Refused) as refused:
        make(tmp_path, {"path": "f", **wanted})
    assert refused.value.error.code == "TOO_LARGE"
    assert (tmp_path / "f").read_bytes() == bytes(size)


def test_edits_are_made_one_upon_another(tmp_path: Path) -> None:
    """Of one file under two names, too; bytes that are no text stay, and a deleted file is gone."""
    (tmp_path / "f").write_bytes(b"a\xff\r\nb")
    (tmp_path / "old").write_text("x")
    (tmp_path / "link").symlink_to("f")
    made = make(
        tmp_path,
        {"path": "f", "op": "replace", "old": "b", "new": "c"},
        {"path": "link", "op": "replace", "old": "c", "new": "d"},
        {"path": "old", "op": "delete"},
        {"path": "d/new", "op": "create", "text": "n"},
    )
    assert isinstance(made, Edited)
    assert (tmp_path / "link").is_symlink()
    (tmp_path / "link").unlink()
    assert contents_of(tmp_path) == {"f": b"a\xff\r\nd", "d/new": b"n"}


def test_a_new_file_has_the_place_that_the_kernel_gives_it(tmp_path: Path) -> None:
    """A link is followed before `..` leaves it; a name with a slash is a directory's; one place is one file."""
    (tmp_path / "d/e").mkdir(parents=True)
    (tmp_path / "link").symlink_to("d/e")
    made = make(
        tmp_path,
        {"path": "link/../x", "op": "create", "text": "a"},
        {"path": "d//./x", "op": "replace", "old": "a", "new": "b"},
        {"path": "n/m/y", "op": "create", "text": "c"},
        {"path": "./n/./m/y", "op": "replace", "old": "c", "new": "d"},
    )
    assert isinstance(made, Edited)
    assert contents_of(tmp_path) == {"d/x": b"b", "n/m/y": b"d"}
    for path in ("new/", "d/new/.", "d/x/"):
        with pytest.raises(Refused) as refused:
            make(tmp_path, {"path": path, "op": "create", "text": ""}, dry_run=True)
        assert refused.value.error.code == "IS_DIRECTORY"


def test_another_version_is_not_edited(tmp_path: Path) -> None:
    """The present one is told."""
    (tmp_path / "f").write_text(TEXT)
    answer = make(tmp_path, {"path": "f", "op": "delete", "if_match": '"other"'})
    assert isinstance(answer, Unedited)
    assert (answer.reason, contents_of(tmp_path)) == ("version", {"f": TEXT.encode()})
    right = {"path": "f", "op": "delete", "if_match": answer.etag}
    assert isinstance(make(tmp_path, right), Edited)
    assert contents_of(tmp_path) == {}


def test_what_is_removed_is_gone_from_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory that had the name is synced, where the request asks for it."""
    (tmp_path / "f").write_text("x")
    synced, real = [], os.fsync

    def sync(fd: int) -> None:
        synced.append(os.fstat(fd).st_ino)
        real(fd)

    monkeypatch.setattr(os, "fsync", sync)
    make(tmp_path, {"path": "f", "op": "delete"}, sync=True)
    assert (contents_of(tmp_path), synced) == ({}, [tmp_path.stat().st_ino])


@pytest.mark.parametrize("theirs", ["", "a", "b", "new"])
@pytest.mark.parametrize("fails_at", [1, 2, 3, 4])
def test_an_error_on_the_way_puts_the_old_files_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int, theirs: str
) -> None:
    """Any of the files may be the one that can't take its place. A file that another process put in its place meanwhile
    stays."""
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text(name)
    before = contents_of(tmp_path)
    calls = []
    real = edit._put

    def put(draft: Any, *, syncs: bool) -> None:
        calls.append(draft)
        if len(calls) == fails_at:
            if theirs:
                (tmp_path / "other").write_text("theirs")
                (tmp_path / "other").rename(tmp_path / theirs)
            raise OSError(28, os.strerror(28))
        real(draft, syncs=syncs)

    monkeypatch.setattr(edit, "_put", put)
    with pytest.raises(Refused) as refused:
        make(
            tmp_path,
            {"path": "a", "op": "replace", "old": "a", "new": "A"},
            {"path": "new", "op": "create", "text": "n"},
            {"path": "b", "op": "delete"},
            {"path": "c", "op": "replace", "old": "c", "new": "C"},
        )
    assert refused.value.error.code == "DISK_FULL"
    assert contents_of(tmp_path) == before | ({theirs: b"theirs"} if theirs else {})


def test_a_file_that_another_process_changes_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The edit was computed for the content before."""
    (tmp_path / "f").write_text("x")
    monkeypatch.setattr(edit, "_diff", lambda *_: (tmp_path / "f").write_text("theirs") and None)
    with pytest.raises(Refused):
        make(tmp_path, {"path": "f", "op": "replace", "old": "x", "new": "y"})
    assert contents_of(tmp_path) == {"f": b"theirs"}


@pytest.mark.slow
def test_after_a_kill_every_file_is_old_or_new(tmp_path: Path) -> None:
    """A kill at any step leaves each file whole, under its name. What lies beside it is hidden, and the request can be
    made again for the files that are old."""
    names, old, new = ["a", "b", "c"], b"old\n" * 1000, b"new\n" * 1000
    wanted = [{"path": name, "op": "replace", "old": "old", "new": "new", "count": "all"} for name in names]
    seen = set[int]()
    for step in itertools.count():
        for name in names:
            (tmp_path / name).write_bytes(old)
        pid = os.fork()
        if pid == 0:
            _edit_until(tmp_path, wanted, step)
        was_killed = os.waitpid(pid, 0)[1] == signal.SIGKILL
        found = {name: (tmp_path / name).read_bytes() for name in names}
        assert set(found.values()) <= {old, new}
        seen.add(list(found.values()).count(new))
        rest = [
            each | {"if_match": etag_of((tmp_path / each["path"]).stat())}
            for each in wanted
            if found[each["path"]] == old
        ]
        assert not rest or isinstance(make(tmp_path, *rest), Edited)
        assert {(tmp_path / name).read_bytes() for name in names} == {new}
        for each in set(tmp_path.iterdir()) - {tmp_path / name for name in names}:
            assert each.name.startswith(".sandkasten-")
            each.unlink()
        if not was_killed:
            break
    assert seen == {0, 1, 2, 3}


def _edit_until(top: Path, wanted: list[dict[str, Any]], step: int) -> None:
    """Make edits and exit, or be killed before a step that changes something on the disk."""
    steps = itertools.count()

    def killing(call: Callable[..., Any]) -> Callable[..., Any]:
        def kill_or_call(*arguments: Any, **options: Any) -> Any:  # of the call
            if next(steps) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return kill_or_call

    try:
        for name in ("write", "fchmod", "link", "rename", "unlink"):
            setattr(os, name, killing(getattr(os, name)))
        make(top, *wanted)
    finally:
        os._exit(0)


@pytest.mark.parametrize("patch", ["", "x", "@@ -1,2 +1 @@\n-a\n", "@@\n*a\n", "*** Add File: x\n+a\n"])
def test_what_is_no_patch_is_refused(tmp_path: Path, patch: str) -> None:
    """Nothing is changed."""
    (tmp_path / "f").write_text("a\n")
    with pytest.raises(Refused) as refused:
        make(tmp_path, {"path": "f", "op": "patch", "patch": patch})
    assert refused.value.error.code == "BAD_REQUEST"
    assert contents_of(tmp_path) == {"f": b"a\n"}


def see(top: Path, first: int, last: int | None) -> tuple[bytes, Viewed]:
    with tempfile.TemporaryFile() as out:
        seen = perform(ViewFile("f", first, last), work_in(top, out_fd=out.fileno()))
        out.seek(0)
        assert isinstance(seen, Viewed)
        return out.read(), seen


def test_a_view_has_the_lines_that_are_wanted(tmp_path: Path) -> None:
    """The count is of all; a line longer than the room is cut, and said to be."""
    (tmp_path / "f").write_text(TEXT)
    text, seen = see(tmp_path, 2, 3)
    assert (text, seen.last, seen.total, seen.truncated) == (b"two\nthree\n", 3, 4, False)
    text, seen = see(tmp_path, 9, None)
    assert (text, seen.total) == (b"", 4)
    (tmp_path / "f").write_bytes(b"x" * (2 * MAX_VIEW_BYTES) + b"\nend")
    text, seen = see(tmp_path, 1, None)
    assert (len(text), seen.last, seen.total, seen.truncated) == (MAX_VIEW_BYTES, 1, 2, True)
    (tmp_path / "f").write_bytes(b"x" * (MAX_VIEW_BYTES - 1) + b"\nend")
    for last, truncated in ((1, False), (None, True)):  # as many as there is room for, and one byte more
        text, seen = see(tmp_path, 1, last)
        assert (len(text), seen.last, seen.total, seen.truncated) == (MAX_VIEW_BYTES, 1, 2, truncated)
