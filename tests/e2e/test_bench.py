"""The benchmark in a form that takes a minute or two: every section works, and the report has what it must."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench.sections import SECTIONS
from tests.waiting import patience

ROOT = Path(__file__).parents[2]
_PATIENCE_S = 240.0


def test_every_section_works_and_is_in_the_report(tmp_path: Path) -> None:
    """No row fails, the samples are kept, and the plots are there. A peer that can't run is told with its error."""
    done = subprocess.run(
        [sys.executable, "-m", "bench", "--share", "0.005", "--seed", "1", "--into", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience(_PATIENCE_S),
        check=False,
    )
    (made,) = tmp_path.glob("*.json")
    content = json.loads(made.read_text())
    failed = {name: row["errors"] for name, row in content["rows"].items() if row["errors"]}
    ours = {name: errors for name, errors in failed.items() if not name.startswith("peer: ")}
    assert (ours, content["sections"].keys()) == ({}, SECTIONS.keys()), done.stderr
    assert all(told.isdigit() for told in content["sections"].values()), done.stderr
    assert done.returncode == bool(failed)
    assert all(row["us"] for name, row in content["rows"].items() if name not in failed)
    page = made.with_suffix(".md").read_text()
    for name in (
        *content["rows"],
        "system calls",
        "seed",
        "## Density",
        "## Restarts",
        "## Rollouts",
        "## Goals",
        "## Steps of a create",
    ):
        assert name in page
    assert len(list(tmp_path.glob("*.svg"))) == 5
    for peer in content["peers"]:
        assert peer["name"] in page
        assert peer["reason"] == "" or "**Not measured**" in page
