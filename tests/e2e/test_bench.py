"""The benchmark in a form that takes a minute or two: every section works, and the report has what it must."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path

import pytest

from bench import daemon
from bench.__main__ import main
from bench.sections import SECTIONS
from tests.e2e.seed import Command

pytestmark = pytest.mark.usefixtures("nsinit_seed")


def test_every_section_works_and_is_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row fails, the samples are kept, and the plots are there. A peer that can't run is told with its error."""
    faulthandler.cancel_dump_traceback_later()  # longer than a test may take
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr(daemon, "start", Command)
    monkeypatch.setattr(sys, "argv", ["bench", "--share", "0.005", "--seed", "1", "--into", str(tmp_path)])
    status = main()
    (made,) = tmp_path.glob("*.json")
    content = json.loads(made.read_text())
    failed = {name: row["errors"] for name, row in content["rows"].items() if row["errors"]}
    ours = {name: errors for name, errors in failed.items() if not (name.startswith("peer: ") and " exec" in name)}
    assert (ours, content["sections"].keys()) == ({}, SECTIONS.keys())
    assert all(told.isdigit() for told in content["sections"].values())
    assert status == bool(failed)
    assert all(row.get("us") or row["kB/s"] for name, row in content["rows"].items() if name not in failed)
    page = made.with_suffix(".md").read_text()
    assert content["header"]["command"] == "make bench ARGS='--seed 1 --share 0.005'"
    for name in (
        *content["rows"],
        "system calls",
        "seed",
        "## Density",
        "## Restarts",
        "## Rollouts",
        "## Goals",
        "## Rates",
        "## Steps of a create",
    ):
        assert name in page
    assert len(list(tmp_path.glob("*.svg"))) == 5
    for peer in content["peers"]:
        assert peer["name"] in page
        assert peer["reason"] == "" or "**Not measured**" in page
        assert "runroot" not in peer["reason"]  # podman(1): at most 50 characters
    assert not [*Path("/sys/fs/cgroup").glob(f"*/bench-{os.getpid()}-podman")]
