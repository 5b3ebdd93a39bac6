"""The catalogue of attempts and what docs/security.md says of it are the same."""

from __future__ import annotations

import re
from pathlib import Path

from sandkasten.security.campaign import catalogue
from sandkasten.security.probes.attempt import Attempt
from sandkasten.security.report import HEADER

TEXT = (Path(__file__).parents[2] / "docs/security.md").read_text()
SECTION = TEXT.partition("## Attack it yourself")[2]


def test_the_documented_classes_are_those_of_the_catalogue() -> None:
    """Each class is named once, and none that there is not."""
    listed = SECTION.partition("- The classes:")[2].partition("`--only")[0]
    named = re.findall(r"`([a-z_]+)`", listed)
    assert sorted(named) == sorted({each.group for each in catalogue()})


def test_every_attempt_on_memory_has_its_row_with_figures() -> None:
    """The table of kernel objects names each attempt once, and none that there is not, with three figures. A row
    without an attempt has its figures from the text below."""
    table = TEXT.partition("| Kernel object |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert {len(row) for row in rows} == {9}
    tried = {row[7].strip("`"): row[4:7] for row in rows if row[7] != "–"}
    assert sorted(tried) == sorted(each.id.partition(".")[2] for each in catalogue() if each.group == "memory")
    assert all(figure == "the same" or re.search(r"\d", figure) for row in tried.values() for figure in row)


def test_the_documented_attempts_exist_as_shown() -> None:
    """The excerpt's lines name attempts, what they stand for and the user as the table does today."""
    known: dict[str, Attempt] = {each.id: each for each in catalogue()}
    table = SECTION.split("```")[1].strip().splitlines()
    assert table[0] == HEADER
    assert len(table) > 5
    for line in table[1:]:
        verdict, name, user = line.split()[:3]
        assert verdict == "held"
        assert user == "-" or user in known[name].users
        assert known[name].stands_for in line
