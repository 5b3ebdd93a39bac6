"""Patterns of paths, and lines that hold a text, in a real directory."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from runner.files import search as module
from runner.files.operations import perform
from runner.files.search import Pattern
from runner.loop.context import Refused
from runner.wire.protocol import (
    ANSWERS,
    MAX_FRAME_BYTES,
    FileMatch,
    FoundFiles,
    GlobFiles,
    ListFiles,
    Searched,
    SearchFiles,
)
from tests.unit.test_runner_entries import work_in


def make(top: Path, **files: bytes) -> None:
    """Make files; `__` in a name stands for `/`, and `_` for a dot."""
    for name, content in files.items():
        path = top / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def found(top: Path, pattern: str, **options: Any) -> list[str]:
    """Return what all pages of a glob have."""
    paths: list[str] = []
    after = ""
    while True:
        answer = perform(GlobFiles(".", pattern, after, **options), work_in(top))
        assert isinstance(answer, FoundFiles)
        paths += answer.paths
        if not answer.after:
            return paths
        after = answer.after


def searched(top: Path, pattern: str, path: str = ".", **options: Any) -> tuple[list[FileMatch], Searched]:
    with open(top.parent / f"{top.name}.out", "w+b") as out:
        totals = perform(SearchFiles(path, pattern, **options), work_in(top, out_fd=out.fileno()))
        out.seek(0)
        lines = out.read().splitlines()
    assert isinstance(totals, Searched)
    assert all(len(line) < MAX_FRAME_BYTES for line in lines)
    return [ANSWERS.decode(line) for line in lines], totals


@pytest.mark.parametrize(
    ("pattern", "fits", "misses"),
    [
        ("*.py", ["a.py", ".py"], ["d/a.py", "a.pyc"]),
        ("**/*.py", ["a.py", "d/a.py", "d/e/a.py"], ["d/a.c"]),
        ("d/**", ["d/a", "d/e/a"], ["d", "e/d"]),
        ("**", ["a", "d/e"], []),
        ("**/e/**/f", ["e/f", "d/e/x/y/f"], ["f", "d/f"]),
        ("./d//[ab]?", ["d/ax", "d/bü"], ["d/cx", "d/a"]),
        ("{a,d/{b,c}}.x", ["a.x", "d/b.x", "d/c.x"], ["b.x", "d/a.x"]),
        ("{a}", ["{a}"], ["a"]),
    ],
)
def test_a_pattern_fits_paths(pattern: str, fits: list[str], misses: list[str]) -> None:
    """A directory above a path that fits is never passed over."""
    known = Pattern(pattern)
    assert [path for path in (*fits, *misses) if known.matches(os.fsencode(path))] == fits
    above = [path.rpartition("/")[0] for path in fits if "/" in path]
    assert all(known.may_hold(os.fsencode(each)) for each in above)


def test_a_pattern_enters_no_directory_in_vain() -> None:
    """One that can't hold a path that fits."""
    assert not Pattern("a/*").may_hold(b"b")
    assert not Pattern("a/*").may_hold(b"a/b")
    assert Pattern("a/*").may_hold(b"a")


@pytest.mark.parametrize("pattern", ["", "/etc/*", "../x", "a/../b", "{a,b}" * 7, "."])
def test_what_is_no_pattern_is_refused(tmp_path: Path, pattern: str) -> None:
    """One that leads elsewhere, or stands for too many."""
    with pytest.raises(Refused) as refused:
        found(tmp_path, pattern)
    assert refused.value.error.code == "BAD_REQUEST"


@pytest.mark.parametrize("limit", [1, 2, 1000])
def test_a_glob_is_in_order_whatever_the_pages(tmp_path: Path, limit: int) -> None:
    """Links are found and not entered; names of any bytes are found."""
    make(tmp_path, b__c__d_py=b"", b_py=b"", a__b__e_py=b"", a_c=b"")
    (tmp_path / "link").symlink_to("a")
    (tmp_path / os.fsdecode(b"\xff.py")).touch()
    assert found(tmp_path, "**/*.py", limit=limit) == ["a/b/e.py", "b/c/d.py", "b.py", "\udcff.py"]
    assert found(tmp_path, "{link,a}/**", limit=limit) == ["a/b", "a/b/e.py"]
    assert found(tmp_path, "li*", limit=limit) == ["link"]


def test_a_glob_out_of_time_goes_on_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every page gets on, and nothing is left out."""
    monkeypatch.setattr(module, "_GLOB_S", -1.0)
    for number in range(700):
        (tmp_path / f"{number:03d}").touch()
    first = perform(GlobFiles(".", "*9"), work_in(tmp_path))
    assert isinstance(first, FoundFiles)
    assert (first.after, len(first.paths)) == ("255", 25)
    assert len(found(tmp_path, "*9")) == 70


@pytest.mark.parametrize("after", ["../0", "a/../..", "./a", "a//b", "a/", "/", "a\0b"])
def test_a_cursor_that_no_list_gave_leads_nowhere(tmp_path: Path, after: str) -> None:
    """A path may be of a client's own making: none of its parts leaves the directory."""
    make(tmp_path, a__b_py=b"")
    for request in (GlobFiles(".", "**", after), ListFiles(".", after, depth=3)):
        with pytest.raises(Refused) as refused:
            perform(request, work_in(tmp_path))
        assert refused.value.error.code == "BAD_REQUEST"


def test_lines_are_found_with_their_places(tmp_path: Path) -> None:
    """Once each, with the first match, the lines around, and without the end of the line."""
    make(tmp_path, d__f_txt="eins\nzwei ü drei drei\r\n\nvier".encode(), g_txt=b"drei")
    matches, totals = searched(tmp_path, "drei", context=2)
    top = str(tmp_path)
    assert matches == [
        FileMatch(f"{top}/d/f.txt", 2, 8, "zwei ü drei drei", ("eins",), ("", "vier")),
        FileMatch(f"{top}/g.txt", 1, 1, "drei"),
    ]
    assert totals == Searched(2, 2, 2, 0, truncated=False, timed_out=False)
    assert [each.line for each in searched(tmp_path, "drei", "d/f.txt")[0]] == [2]


def test_expressions_and_texts_differ(tmp_path: Path) -> None:
    """A text is taken as it is; an expression knows begin and end of each line."""
    make(tmp_path, f=b"a.c\nabc\nABC\n")

    def lines(pattern: str, **options: Any) -> list[int]:
        return [each.line for each in searched(tmp_path, pattern, **options)[0]]

    assert lines("a.c") == [1]
    assert lines("a.c", case=False) == [1]
    assert lines("^a.c$", regex=True) == [1, 2]
    assert lines("^a.c$", regex=True, case=False) == [1, 2, 3]
    assert lines("c$", regex=True) == [1, 2]
    assert lines(".*", regex=True) == [1, 2, 3]
    assert lines("$", regex=True) == [1, 2, 3]
    assert lines(r"\Z", regex=True) == []
    assert lines(r"c\na", regex=True) == [1]


def test_what_is_no_text_is_left_out_and_counted(tmp_path: Path) -> None:
    """NUL bytes, large files, closed ones; `.git` is not entered; `everything` reads the first and the last."""
    make(tmp_path, bin=b"x\0", big=b"x" * 100, text=b"x", _git__x=b"x")
    (tmp_path / "link").symlink_to("text")
    os.mkfifo(tmp_path / "fifo")
    matches, totals = searched(tmp_path, "x", max_file_bytes=50)
    assert [each.path for each in matches] == [f"{tmp_path}/text"]
    assert (totals.searched, totals.skipped) == (1, 2)
    matches, totals = searched(tmp_path, "x", everything=True)
    assert (len(matches), totals.skipped) == (4, 0)


def test_a_glob_chooses_the_files(tmp_path: Path) -> None:
    """By name anywhere, or by path."""
    make(tmp_path, a_py=b"x", d__a_py=b"x", d__a_c=b"x")

    def paths(glob: str) -> list[str]:
        return [os.path.relpath(each.path, tmp_path) for each in searched(tmp_path, "x", glob=glob)[0]]

    assert paths("*.py") == ["a.py", "d/a.py"]
    assert paths("d/*") == ["d/a.c", "d/a.py"]
    assert paths("*.{c,h}") == ["d/a.c"]


def test_a_search_ends_at_its_limit(tmp_path: Path) -> None:
    """The totals say whether there is more."""
    make(tmp_path, f=b"x\n" * 10)
    for limit, truncated in ((9, True), (10, False)):
        matches, totals = searched(tmp_path, "x", max_matches=limit)
        assert (len(matches), totals.matches, totals.truncated) == (limit, limit, truncated)


def test_a_long_line_is_cut_around_the_match(tmp_path: Path) -> None:
    """The message stays small, and so does each line of context."""
    make(tmp_path, f=b"\xff" * 500_000 + b"needle" + b"\xff" * 500_000)
    ((match,), _) = searched(tmp_path, "needle", context=10)
    assert (match.cut, match.column, len(match.text)) == (True, 500_001, 1000)
    assert match.text[100:106] == "needle"


def test_a_costly_expression_ends_in_time(tmp_path: Path) -> None:
    """Matches before it are kept, and the totals tell the reason."""
    make(tmp_path, a=b"aaa!\n", b=b"a" * 200)
    began = time.monotonic()
    matches, totals = searched(tmp_path, r"^(a+)+!", regex=True, max_ms=300)
    assert time.monotonic() - began < 5
    assert ([each.line for each in matches], totals.timed_out, totals.truncated) == ([1], True, False)


@pytest.mark.parametrize("pattern", ["(", "a{99999999999}", "(" * 600 + ")" * 600, "*"])
def test_what_is_no_expression_is_refused(tmp_path: Path, pattern: str) -> None:
    """Patterns on which the compiler fails in different ways."""
    with pytest.raises(Refused) as refused:
        searched(tmp_path, pattern, regex=True)
    assert refused.value.error.code == "BAD_REQUEST"
