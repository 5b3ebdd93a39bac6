"""The probe on the real kernel: it finds what is there, and leaves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandkasten.host import examine
from sandkasten.model.node import Verdict

pytestmark = [pytest.mark.kernel, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]


@pytest.mark.cgroup_v2
def test_the_probe_tries_every_step_and_leaves_nothing(tmp_path: Path) -> None:
    """Each step of the probe has an answer, and the data directory is as empty as before."""
    checks = {check.id: check for check in examine.examine(tmp_path).checks}
    assert {"cgroups", "openat2", "clone3", "mounts", "overlay"} <= checks.keys()
    assert [check.id for check in checks.values() if check.verdict is Verdict.MISSING] == []
    assert os.listdir(tmp_path) == []


@pytest.mark.cgroup_v2
def test_before_the_first_start_the_probe_runs_where_the_data_directory_will_be(tmp_path: Path) -> None:
    """The probe skips no step before the data directory exists, does not make it, and leaves nothing."""
    checks = {check.id: check for check in examine.examine(tmp_path / "not/there", thorough=True).checks}
    assert {"cgroups", "memory_limit", "overlay", "bridge"} <= checks.keys()
    assert [check.id for check in checks.values() if check.verdict is Verdict.MISSING] == []
    assert os.listdir(tmp_path) == []


def test_a_place_where_no_directory_can_be_made_is_a_finding(tmp_path: Path) -> None:
    """The sentence names the place and the reason."""
    (tmp_path / "file").touch()
    (check,) = examine.probe(tmp_path / "file").checks
    assert check.verdict is Verdict.MISSING
    assert check.seen.startswith(f"nothing can be tried in {tmp_path / 'file'}: NotADirectoryError")


def test_a_data_directory_that_can_not_hold_a_layer_is_found_by_trying(tmp_path: Path) -> None:
    """On an overlay of an overlay the layer fails; the probe says so instead of a session later."""
    script = """
set -e
for d in lower upper work merged; do mkdir "$1/$d"; done
mount -t overlay overlay -o lowerdir="$1/lower",upperdir="$1/upper",workdir="$1/work" "$1/merged"
exec "$2" -c 'import sys; from pathlib import Path; from sandkasten.host import examine
for check in examine.examine(Path(sys.argv[1])).checks: print(check.id, check.verdict)' "$1/merged"
"""
    command = ["unshare", "--mount", "sh", "-c", script, "sh", str(tmp_path), sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert {"overlay missing", "data_dir missing"} <= set(done.stdout.splitlines()), done.stderr
