"""One target under atheris: `python -m tests.fuzz.covered TARGET SECONDS MAX_INPUT_BYTES SCRATCH`; `__main__` runs it.

A process of its own, since atheris ends it, and counts only code that is imported while it looks.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["sandkasten", "runner", "nsinit", "egress", "tests"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    """Fuzz until the time is over, or something is found: then its input is printed, and the exit status is not 0."""
    name, seconds, max_bytes, scratch = sys.argv[1:]

    def target(data: bytes) -> None:
        try:
            TARGETS[name](data)
        except BaseException:
            print(f"{name}: finding, input {data.hex()}", flush=True)
            raise

    bounds = [f"-max_total_time={seconds}", f"-max_len={max_bytes}", "-timeout=10", "-rss_limit_mb=2048"]
    atheris.Setup([sys.argv[0], *bounds, f"-artifact_prefix={scratch}/"], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
