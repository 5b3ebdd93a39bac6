"""Runs the whole suite in lanes, and what failed there once more, alone; that second result is what counts.

Many tests watch real processes against real deadlines, and four lanes on a small machine take each other's time. The
tests that needed the second run are counted and named at its end, above pytest's own counts, for somebody to mend.
More than a handful of failures is no matter of time, and stays a failure at once.

    python -m tests.twice LANES [ARGUMENT of pytest …]
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

TESTS_FAILED = 1
"""Exit status of pytest; see `pytest.ExitCode`."""

NEEDED_AGAIN = "SANDKASTEN_TESTS_NEEDED_AGAIN"
"""Environment variable of the second run: the node ids of its tests, one a line."""

MAX_AGAIN = 12
"""More failures than this have a common cause."""

_LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")


def main(lanes: int, arguments: Sequence[str]) -> int:
    """Return the exit status of the last run."""
    # The failures of an earlier run are not this one's; what else its cache holds (modules found clean) stays.
    _LAST_FAILED.unlink(missing_ok=True)
    status = _pytest("-n", str(lanes), "--dist", "loadfile", "--no-loadscope-reorder", *arguments)
    failed = _last_failed() if status == TESTS_FAILED else []
    if not 0 < len(failed) <= MAX_AGAIN:
        return status
    os.environ[NEEDED_AGAIN] = "\n".join(failed)
    again = ("-p", "tests.twice", "--last-failed", "--last-failed-no-failures", "none")
    return _pytest("-n", "0", *again, *arguments, *failed)  # named, so that no other file is collected


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests of the second run; pytest calls this as a plugin, just before it prints its counts."""
    failed = os.environ[NEEDED_AGAIN].splitlines()
    terminalreporter.section(f"{len(failed)} needed a second run, alone", sep="-")
    terminalreporter.write_line("\n".join(failed))


def _pytest(*arguments: str) -> int:
    process = subprocess.Popen([sys.executable, "-m", "pytest", *arguments])
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: process.send_signal(number))
    signal.signal(signal.SIGINT, lambda *_: None)  # a terminal sends it to pytest as well, which ends in its own way
    return process.wait()


def _last_failed() -> list[str]:
    """Return what pytest's cache (in the current directory) says of the run before."""
    try:
        return sorted(json.loads(_LAST_FAILED.read_text()))
    except FileNotFoundError:
        return []


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
