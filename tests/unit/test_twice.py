"""The suite's second chance: for what only others' load made fail, and for nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

ONCE = """
from pathlib import Path

def test_that_passes_the_second_time():
    seen = Path("seen")
    is_second = seen.exists()
    seen.touch()
    assert is_second

def test_that_passes():
    assert not Path("passed").exists()
    Path("passed").touch()
"""
ALWAYS = "def test_that_fails():\n    assert False\n"
MANY = "import pytest\n@pytest.mark.parametrize('n', range(13))\ndef test_of_many(n):\n    assert False\n"


def run(directory: Path, **files: str) -> tuple[int, str]:
    """Return the exit status and what was printed."""
    (directory / "pytest.ini").write_text("[pytest]\n")
    for name, text in files.items():
        (directory / f"test_{name}.py").write_text(text)
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
    environment = {**os.environ, **plugins, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.twice", "1", "-q"]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_what_passes_alone_is_a_success_and_is_named(tmp_path: Path) -> None:
    """Only the failed test runs again: the other would fail a second time."""
    status, printed = run(tmp_path, once=ONCE)
    assert status == 0, printed
    *_, title, name, counts = printed.splitlines()
    assert title.strip("- ") == "1 needed a second run, alone"
    assert name == "test_once.py::test_that_passes_the_second_time"
    assert counts.startswith("1 passed in ")


def test_failures_of_an_earlier_run_are_not_of_this_one(tmp_path: Path) -> None:
    """Another command of the same checkout had failed tests that these arguments leave out. Results that tests keep in
    the cache stay."""
    cache = tmp_path / ".pytest_cache/v/cache/lastfailed"
    cache.parent.mkdir(parents=True)
    cache.write_text('{"vm/test_machine.py::test_of_before": true}')
    checked = cache.with_name("checked")
    checked.write_text('["a module"]')
    status, printed = run(tmp_path, once=ONCE)
    assert status == 0, printed
    assert "test_of_before" not in printed
    assert checked.exists()


def test_what_fails_twice_is_a_failure(tmp_path: Path) -> None:
    status, printed = run(tmp_path, once=ONCE, always=ALWAYS)
    assert status == 1
    assert "1 failed, 1 passed" in printed.splitlines()[-1]


def test_many_failures_get_no_second_run(tmp_path: Path) -> None:
    status, printed = run(tmp_path, many=MANY)
    assert status == 1
    assert "second run" not in printed


def test_a_file_that_cannot_be_imported_is_a_failure(tmp_path: Path) -> None:
    """The tests of the broken file did not run at all, whatever became of the others."""
    status, printed = run(tmp_path, once=ONCE, broken="import nothing_of_this_name\n")
    assert status != 0
    assert "1 error" in printed.splitlines()[-1]


def test_an_interrupt_ends_it(tmp_path: Path) -> None:
    """Ctrl-C in the first run: pytest ends as it does, and nothing starts anew."""
    status, printed = run(tmp_path, interrupted="def test_ctrl_c():\n    raise KeyboardInterrupt\n", always=ALWAYS)
    assert status not in (0, 1)
    assert "second run" not in printed
