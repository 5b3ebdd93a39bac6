"""docs/operations.md: its commands do what is written there, and what it names is there."""

from __future__ import annotations

import re
from pathlib import Path

from tests.contract.test_docs import ROOT, _blocks, _check_console, data_dir, needs_root

__all__ = ["data_dir"]  # a fixture

TEXT = (ROOT / "docs/operations.md").read_text()
NOT_ALWAYS = {"keys.json", "listening.json", "broker"}
"""Not there before the first key was made; not there while no daemon runs; not there before the first secret."""


def test_the_metrics_that_it_points_to_are_documented() -> None:
    """Documented metrics are there: another test compares the documented with the served ones."""
    named = set(re.findall(r"`(sandkasten_\w+)", TEXT))
    assert len(named) > 5
    assert named - set(re.findall(r"^\| `(\w+)`", (ROOT / "docs/observability.md").read_text(), re.MULTILINE)) == set()


@needs_root
def test_the_commands_of_the_operator_work_line_by_line(data_dir: Path, tmp_path: Path) -> None:
    """All console blocks, one after the other, in one shell; and the data directory has what the table of a backup
    names."""
    block = "".join(text for kind, text in _blocks(TEXT) if kind == "console")
    _check_console(block, data_dir, tmp_path, has_tables=False)
    rows = re.findall(r"^\| ((?:`[\w./-]+`(?:, )?)+) \|", TEXT, re.MULTILINE)
    named = {name.rstrip("/") for row in rows for name in re.findall(r"`([\w./-]+)`", row)}
    assert len(named) > 8
    assert named - NOT_ALWAYS - {entry.name for entry in data_dir.iterdir()} == set()
