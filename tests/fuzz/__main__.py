"""`make fuzz [SECONDS=600]`: every target in turn, each for its share of the time, by coverage where atheris is there.

    python -m tests.fuzz [--seconds N] [--input HEX] [TARGET ...]

Without atheris inputs are random. What was found is printed as hexadecimal digits for `--input`, with the seed; the
exit status is 1 then.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

from tests.fuzz.targets import TARGETS

MAX_INPUT_BYTES = 2000
_FOREVER = 2**63


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", default=list(TARGETS), metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=float, default=120.0, help="for all targets together")
    parser.add_argument("--input", type=bytes.fromhex, help="run this one input")
    arguments = parser.parse_args()
    if arguments.input is not None:
        for name in arguments.targets:
            TARGETS[name](arguments.input)
        return
    share_s = max(1.0, arguments.seconds / len(arguments.targets))
    if importlib.util.find_spec("atheris") is None:
        print("atheris is not installed (pip install -r requirements-fuzz.txt): inputs are random")
        for name in arguments.targets:
            seed = random.SystemRandom().getrandbits(32)
            print(f"{name}: {run_random(name, seed=seed, seconds=share_s)} inputs, seed {seed}, no finding", flush=True)
    else:
        command = [sys.executable, "-m", "tests.fuzz.covered", str(int(share_s)), str(MAX_INPUT_BYTES)]
        sys.exit(subprocess.call([*command, *arguments.targets]))


def run_random(
    name: str,
    *,
    seed: int,
    runs: int = _FOREVER,
    seconds: float = float("inf"),
    targets: Mapping[str, Callable[[bytes], None]] = TARGETS,
) -> int:
    """Run a target on random inputs; return how many. What it raises is raised, with its input printed."""
    chooser, until, count = random.Random(seed), time.monotonic() + seconds, 0
    while count < runs and time.monotonic() < until:
        data = chooser.randbytes(chooser.randrange(chooser.choice((8, 64, MAX_INPUT_BYTES))))
        try:
            targets[name](data)
        except BaseException:
            print(f"{name}: finding with seed {seed}, input {data.hex()}", flush=True)
            raise
        count += 1
    return count


if __name__ == "__main__":
    main()
