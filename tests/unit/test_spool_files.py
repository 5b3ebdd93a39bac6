"""What lies in the spool's directory: told by names that can be printed, removed only by what was told."""

from __future__ import annotations

import os
from pathlib import Path

from sandkasten.output.disk import SpoolFile, list_spool, remove_spool_files, session_of

ID = "a" * 24
RUNS = f"{ID}.00000001.runs"
HOSTILE = os.fsdecode(b"no name\n\xff")


def test_files_say_whose_they_are(tmp_path: Path) -> None:
    """Those with runs are a session's; a name of any bytes can be told."""
    for name in (RUNS, "0000000000000001.spool", HOSTILE):
        (tmp_path / name).touch()
    expected = {SpoolFile(RUNS, ID), SpoolFile("0000000000000001.spool"), SpoolFile("no name\n\\xff")}
    assert set(list_spool(tmp_path)) == expected
    assert list_spool(tmp_path / "nowhere") == ()


def test_a_name_that_only_looks_like_a_session_s_is_nobody_s() -> None:
    """An id has hexadecimal digits and no others, and nothing follows the ending."""
    for name in ("a.00000001.runs", f"{ID}.1.runs", f"{RUNS}.new", f"x{RUNS}", f"{RUNS}\n"):
        assert session_of(name) is None


def test_only_what_was_told_is_removed_and_no_link_is_followed(tmp_path: Path) -> None:
    """A path as a name removes nothing; what can't be removed is said."""
    outside, spool = tmp_path / "outside", tmp_path / "spool"
    outside.write_text("kept")
    spool.mkdir()
    (spool / "link").symlink_to(outside)
    (spool / "directory").mkdir()
    (spool / HOSTILE).touch()
    (spool / RUNS).touch()
    named = {"link", "directory", "no name\n\\xff", "../outside", str(outside), "gone"}
    assert set(remove_spool_files(spool, named)) == {"directory"}
    assert sorted(os.listdir(spool)) == sorted([RUNS, "directory"])
    assert outside.read_text() == "kept"
