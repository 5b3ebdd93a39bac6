"""The units that are shipped: systemd takes them, they name what the daemon knows, and they fence it in."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from nsinit.kernel import constants
from nsinit.kernel.capabilities import START_CAPABILITIES
from sandkasten.cli.main import main
from sandkasten.config import DEFAULT_DATA_DIR
from sandkasten.host.account import NAME
from tests.waiting import patience

UNITS = Path(__file__).resolve().parents[2] / "sandkasten/cli/systemd"
MAX_EXPOSURE = 2.5
"""systemd's own score of a unit, from 0 (fenced in) to 10."""


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze here (package systemd)")
    return subprocess.run(
        ["systemd-analyze", *arguments],
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
        env={"LC_ALL": "C"},
    )


def installed(directory: Path) -> list[str]:
    """Return the units as `sandkasten install-service` puts them in place, with the program where it is here."""
    assert main(["install-service", "--destdir", str(directory)]) == 0
    return sorted(map(str, (directory / "etc/systemd/system").iterdir()))


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    """Nothing to complain about, for systemd 252 as well: Debian 12's, which says so of settings that came later."""
    paths = installed(tmp_path)
    assert len(paths) == 3
    done = analyze("verify", *paths)
    complaints = [line for line in (done.stdout + done.stderr).splitlines() if "sandkasten" in line]
    assert (done.returncode, complaints) == (0, [])


def test_the_daemons_unit_fences_it_in(tmp_path: Path) -> None:
    """By the measure that systemd has for it."""
    path = next(path for path in installed(tmp_path) if path.endswith("sandkasten.service"))
    done = analyze("security", "--offline=true", "--no-pager", path)
    score = re.search(r"Overall exposure level for sandkasten.service: ([\d.]+)", done.stdout)
    assert score is not None, done.stdout + done.stderr
    assert float(score[1]) < MAX_EXPOSURE


def test_nsinit_starts_with_the_capabilities_that_its_unit_leaves_it() -> None:
    """One that was started otherwise gives the rest away itself."""
    lines = re.findall(r"^CapabilityBoundingSet=(.*)$", (UNITS / "sandkasten-nsinit.service").read_text(), re.MULTILINE)
    named = {getattr(constants, name) for line in lines for name in line.split()}
    assert sum(1 << number for number in named) == START_CAPABILITIES


def test_the_units_say_what_the_program_means() -> None:
    """One account, one data directory; sandboxes outlive the unit that made them."""
    daemon = (UNITS / "sandkasten.service").read_text()
    nsinit = (UNITS / "sandkasten-nsinit.service").read_text()
    assert f"User={NAME}\n" in daemon
    assert f"ReadWritePaths={DEFAULT_DATA_DIR}\n" in daemon
    sandboxes = (UNITS / "sandkasten-sandboxes.service").read_text()
    assert "KillMode=process\n" in nsinit
    assert "Requires=sandkasten-sandboxes.service\nAfter=sandkasten-sandboxes.service\n" in nsinit
    assert " --cgroup system.slice/sandkasten-sandboxes.service\n" in nsinit
    for unit in (nsinit, sandboxes):
        assert re.search(r"^Delegate=.*\bcpu\b.*\bmemory\b.*\bpids\b", unit, re.MULTILINE)
    assert f"u {NAME} " in (UNITS / "sandkasten.sysusers").read_text()
    assert "Requires=sandkasten-nsinit" not in daemon
