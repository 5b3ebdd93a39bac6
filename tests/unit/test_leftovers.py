"""Leftovers as `sandkasten doctor` tells of them, and the cases in which `--fix` refuses to remove any."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandkasten.actors.node.reconcile import SESSION, Leftover
from sandkasten.cli.common import Stop
from sandkasten.cli.leftovers import LeftoverReport, as_json, as_lines, find_leftovers, refuse_rivals
from sandkasten.config import Config
from sandkasten.host.leftovers import Survey

ID, OTHER = "a" * 24, "b" * 24


def test_nothing_is_said_in_one_line_and_everything_else_has_one_of_its_own() -> None:
    """Unknown sandboxes that run are told from mere remains, each with the owner of its removal."""
    assert [line.split()[0] for line in as_lines(LeftoverReport(live=[ID]))] == ["live", "left"]
    left = [Leftover(SESSION, ID), Leftover(SESSION, OTHER), Leftover("mount", "/x"), Leftover("loop", "0 /y")]
    lines = as_lines(LeftoverReport(left=left, running={ID}, unfinished={"c" * 24: "gone"}))
    assert lines[1].split(maxsplit=2) == ["unended", "session", f"{'c' * 24}: gone"]
    assert [line.split(maxsplit=2)[2] for line in lines[2:6]] == [
        f"{ID}: runs, and the database has it not",
        f"{OTHER}: remains, and the database has it not",
        "/x: left to you: it may be a disk for the data directory",
        "0 /y",
    ]
    assert lines[6].strip() == "fix: `sandkasten doctor --fix` removes it"
    assert (
        as_lines(LeftoverReport(is_served=True, left=left))[-1].strip()
        == "fix: the daemon removes it within two minutes"
    )
    only_disk = as_lines(LeftoverReport(is_served=True, left=left[2:3]))
    how = "`umount` a mount, if it is no disk for the data directory; end what runs in a cgroup"
    assert only_disk[-1].strip() == f"fix: left to you: {how}"


def test_a_data_directory_that_is_not_there_has_no_remains(tmp_path: Path) -> None:
    """A look does not make the directory."""
    remains = find_leftovers(Config(data_dir=tmp_path / "none"))
    assert as_json(remains) == {"daemon_runs": False, "live": [], "unfinished": [], "left": []}
    assert list(tmp_path.iterdir()) == []


def test_with_recorded_sessions_in_two_places_nothing_is_done() -> None:
    """Sessions in one of the places would be taken for lost and ended."""
    refuse_rivals(LeftoverReport())
    with pytest.raises(Stop, match=r"more than one place.*/c/unit/sandkasten-1"):
        refuse_rivals(LeftoverReport(survey=Survey(rivals=["/c/unit/sandkasten-1"])))
