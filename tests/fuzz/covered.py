"""Targets under atheris: `python -m tests.fuzz.covered SECONDS MAX_INPUT_BYTES TARGET…`; `__main__` runs it.

A process of its own, since atheris counts only code that is imported while it looks, which takes seconds of computing.
Atheris ends its process when it is done, so each target runs in a fork.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import atheris

with atheris.instrument_imports(include=["sandkasten", "runner", "nsinit", "egress", "tests"]):
    from tests.fuzz.targets import TARGETS


def main() -> int:
    """Fuzz each target for so many seconds and print what was seen; return 1 after a finding, which is printed."""
    seconds, max_bytes, *names = sys.argv[1:]
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "log")
        for name in names:
            if (pid := os.fork()) == 0:
                _fuzz(name, log, seconds, max_bytes)
            _, status = os.waitpid(pid, 0)
            said = log.read_text(errors="replace")
            last = [line for line in said.splitlines() if line.startswith(("Done", "#"))][-2:]
            print(f"{name}: {'; '.join(last)}; {'FINDING' if status else 'no finding'}", flush=True)
            if status:
                failed = 1
                print(said, flush=True)
    return failed


def _fuzz(name: str, log: Path, seconds: str, max_bytes: str) -> NoReturn:
    """Fuzz until the time is over, or something is found: then its input is in the log, and the status is not 0."""

    def target(data: bytes) -> None:
        try:
            TARGETS[name](data)
        except BaseException:
            print(f"{name}: finding, input {data.hex()}", flush=True)
            raise

    try:
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        bounds = [f"-max_total_time={seconds}", f"-max_len={max_bytes}", "-timeout=10", "-rss_limit_mb=2048"]
        atheris.Setup([sys.argv[0], *bounds, f"-artifact_prefix={log.parent}/"], target)
        atheris.Fuzz()
    finally:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
