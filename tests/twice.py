"""Runs the whole suite in lanes, and what failed there once more, alone; that second result is what counts.

Many tests watch real processes against real deadlines, and two lanes on a small machine take each other's time. What
only passes alone is named as such, for somebody to mend; more than a handful of failures is no matter of time, and
stays a failure at once.

    python -m tests.twice LANES [ARGUMENT of pytest …]
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TESTS_FAILED = 1
"""Exit status of pytest; see `pytest.ExitCode`."""

MAX_AGAIN = 12
"""More failures than this have a common cause."""


def main(lanes: int, arguments: Sequence[str]) -> int:
    """Return the exit status of the last run."""
    status = _pytest("-n", str(lanes), "--dist", "loadfile", "--no-loadscope-reorder", *arguments)
    failed = _last_failed() if status == TESTS_FAILED else []
    if not 0 < len(failed) <= MAX_AGAIN:
        return status
    print(f"{len(failed)} failed beside others and run again alone:", *failed, sep="\n  ", flush=True)
    return _pytest("-n", "0", "--last-failed", "--last-failed-no-failures", "none", *arguments)


def _pytest(*arguments: str) -> int:
    process = subprocess.Popen([sys.executable, "-m", "pytest", *arguments])
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: process.send_signal(number))
    signal.signal(signal.SIGINT, lambda *_: None)  # a terminal sends it to pytest as well, which ends in its own way
    return process.wait()


def _last_failed() -> list[str]:
    """Return what pytest's cache (in the current directory) says of the run before."""
    try:
        return sorted(json.loads(Path(".pytest_cache/v/cache/lastfailed").read_text()))
    except FileNotFoundError:
        return []


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
