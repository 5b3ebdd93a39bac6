"""`make bench` and `make bench-full`: measure all sections, print them, write the report.

Options: --only NAMES, --share SHARE, --seed N, --into DIR.
"""

from __future__ import annotations

import argparse
import itertools
import random
import secrets
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import trio

from bench.peers import peers_in
from bench.report import Report
from bench.sections import SECTIONS, Bench

ROOT = Path(__file__).resolve().parents[1]
_SHARES = {1.0: "make bench-full", 0.1: "make bench"}
BUDGET_S = 23.5 * 60
"""Time of all loops of a whole run; no section begins after this."""
AROUND_S = 1.5
"""Time of a section beside its loops: daemons start and end."""
GRACE_S = 60
"""A section that waits for something so long after its time fails."""


def main() -> int:
    """Measure and print; 1 if a section failed, or a sample of a row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SECTIONS), help=", ".join(SECTIONS))
    parser.add_argument(
        "--share", type=_share, default=1.0, help="of all counts and durations; 0.005: does all of it work"
    )
    parser.add_argument(
        "--seed", type=int, default=secrets.randbelow(10**6), help="of the order of blocks and arrivals"
    )
    parser.add_argument("--into", type=Path, metavar="DIR", help="write the report there; without it, only print")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.only if name not in SECTIONS]:
        parser.error(f"no such section: {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    options = [f"--seed {arguments.seed}"]
    if arguments.only != list(SECTIONS):
        options.append(f"--only {','.join(arguments.only)}")
    if arguments.share not in _SHARES:
        options.append(f"--share {arguments.share}")
    command = f"{_SHARES.get(arguments.share, 'make bench')} ARGS='{' '.join(options)}'"
    with tempfile.TemporaryDirectory(prefix="sandkasten-bench-") as scratch:
        bench = Bench(Path(scratch), random.Random(arguments.seed), arguments.share)
        report = Report(bench, arguments.into or Path(scratch) / "report", arguments.seed, command)
        report.describe(ROOT)
        with peers_in(bench.scratch / "peers") as bench.peers:
            trio.run(_run, report, arguments.only)
    print("\n".join(report.page()))
    failed = [name for name, row in bench.table.rows.items() if row.errors]
    return 1 if failed or any(not told[0].isdigit() for told in report.sections.values()) else 0


def _share(text: str) -> float:
    if not 0 < (share := float(text)) <= 1:
        raise ValueError("not between 0 and 1")
    return share


def ends_s(names: Sequence[str], share: float) -> Sequence[float]:
    """Return the seconds of the run after which no round of each section begins. What a section leaves of its time is
    the next one's."""
    budgets = [SECTIONS[name].budget_s for name in names]
    scale = share * min(1, BUDGET_S / sum(budgets))
    return [*itertools.accumulate(AROUND_S + scale * budget for budget in budgets)]


async def _run(report: Report, names: list[str]) -> None:
    began = time.monotonic()
    for name, end_s in zip(names, ends_s(names, report.bench.share), strict=True):
        section_began = time.monotonic()
        if section_began - began > BUDGET_S:
            report.sections[name] = "not begun: out of time"
            continue
        report.bench.deadline = began + end_s
        try:
            with trio.fail_after(max(0.0, began + end_s - section_began) + GRACE_S):
                await SECTIONS[name].work(report.bench)
        except Exception as error:  # noqa: BLE001 - the others go on; the report tells
            traceback.print_exc()
            report.sections[name] = f"failed: {type(error).__name__}: {error}"[:300]
        else:
            report.sections[name] = f"{time.monotonic() - section_began:.0f}"
        print(f"{name}: {report.sections[name]}", flush=True)
        report.write()


if __name__ == "__main__":
    raise SystemExit(main())
