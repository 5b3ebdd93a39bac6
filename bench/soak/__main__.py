"""`python -m bench.soak`: the long form; `--short` is what the tests run. Writes its report where `--report` says."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import attrs
import trio

from bench.soak.report import text_of
from bench.soak.run import Size, soak

LONG = Size(
    cycles=10_000,
    cycles_at_once=4,
    sessions=300,
    faults_s=300.0,
    fault_every_s=1.0,
    step_pause_s=2.0,
    noise_s=10.0,
    seed=1,
)
SHORT = attrs.evolve(
    LONG, cycles=40, cycles_at_once=2, sessions=10, faults_s=6.0, fault_every_s=0.8, step_pause_s=0.2, noise_s=0.5
)


def main() -> int:
    """Run one; the status is 1 when something was lost or left."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--short", action="store_true", help="a minute instead of many")
    parser.add_argument("--cycles", type=int, help=f"create, exec, destroy so often (default {LONG.cycles})")
    parser.add_argument("--sessions", type=int, help=f"sessions at once (default {LONG.sessions})")
    parser.add_argument("--seconds", type=float, help=f"of random kills (default {LONG.faults_s:.0f})")
    parser.add_argument("--seed", type=int, help="of everything that is left to chance")
    parser.add_argument("--report", type=Path, help="write the report there as well")
    arguments = parser.parse_args()
    size = SHORT if arguments.short else LONG
    chosen = {
        "cycles": arguments.cycles,
        "sessions": arguments.sessions,
        "faults_s": arguments.seconds,
        "seed": arguments.seed,
    }
    report = trio.run(soak, attrs.evolve(size, **{name: each for name, each in chosen.items() if each is not None}))
    text = text_of(report)
    print(text)
    if arguments.report is not None:
        arguments.report.write_text(text)
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
