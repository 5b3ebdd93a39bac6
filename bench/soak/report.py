"""A soak's findings as Markdown: figures with the machine and the date they belong to."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version

from bench.soak.run import Report

_LOG_LINES = 20


def text_of(report: Report) -> str:
    """Return the report."""
    parts = (_head, _cycles, _crowd, _storm, _neighbours, _left)
    return "".join(f"{line}\n" for part in parts for line in part(report))


def _head(report: Report) -> Iterator[str]:
    machine = f"Linux {platform.release()} {platform.machine()}, {os.cpu_count()} cores"
    yield f"# Soak of {datetime.now(UTC):%Y-%m-%d}"
    yield ""
    yield "Nothing was lost, nothing was left." if report.is_good else "**Failed**: see what was lost or left below."
    yield ""
    yield f"- {machine}; Python {platform.python_version()}, sandkasten {version('sandkasten-runtime')}"
    yield f"- {report.seconds:.0f} s, seed {report.size.seed}, load at the end {os.getloadavg()[0]:.1f}"


def _cycles(report: Report) -> Iterator[str]:
    done = report.phases.cycles
    yield ""
    yield "## Create, exec, destroy"
    yield ""
    yield f"{done.cycles} cycles over HTTP, {report.size.cycles_at_once} at once: {done.seconds:.0f} s."
    yield ""
    yield "| process | RSS MiB, first and last | growth, bytes a cycle | descriptors | threads | mounts |"
    yield "|---|---|---|---|---|---|"
    for name, first in done.first.items():
        last = done.last[name]
        cells = (
            f"{first.resident_bytes / 2**20:.1f} → {last.resident_bytes / 2**20:.1f}",
            f"{done.rss_slope_bytes.get(name, 0.0):.0f}",
            f"{first.descriptors} → {last.descriptors}",
            f"{first.threads} → {last.threads}",
            f"{first.mounts} → {last.mounts}",
        )
        yield f"| {name} | {' | '.join(cells)} |"


def _crowd(report: Report) -> Iterator[str]:
    counts = report.ledger.counts
    yield ""
    yield "## Sessions at once, with kills"
    yield ""
    yield f"{report.size.sessions} sessions, all made after {report.phases.opening_s:.1f} s;"
    yield f"{report.size.faults_s:.0f} s of work with a kill every {report.size.fault_every_s:.1f} s."
    yield ""
    for name in sorted(counts):
        yield f"- {name}: {counts[name]}"
    if report.phases.restarts_s:
        shown = ", ".join(f"{each:.1f}" for each in report.phases.restarts_s)
        yield f"- seconds from the daemon's death until its successor was ready: {shown}"
    yield ""
    phases = report.phases
    yield f"A last restart under {report.size.sessions} live sessions: {phases.adopted} answered with their shell"
    yield f"state, the last of them {phases.adoption_s:.1f} s after the kill."


def _storm(report: Report) -> Iterator[str]:
    storm = report.phases.storm
    yield ""
    yield "## Leases that end in one second"
    yield ""
    yield f"{storm.sessions} sessions: the last was gone {storm.gone_s:.1f} s after the second began. A bystander's"
    yield f"small command, p99: {storm.alone_p99_ms:.0f} ms before, {storm.beside_p99_ms:.0f} ms meanwhile,"
    yield f"{storm.beside_p99_ms / storm.alone_p99_ms:.1f} times as long."


def _neighbours(report: Report) -> Iterator[str]:
    alone = report.phases.neighbours[0]
    yield ""
    yield "## Bad neighbours"
    yield ""
    yield "A small command (`:`) in four other sessions, one after another in each:"
    yield ""
    yield "| beside | commands | median ms | p99 ms | p99 against alone |"
    yield "|---|---|---|---|---|"
    for each in report.phases.neighbours:
        ratio = each.p99_ms / alone.p99_ms
        yield f"| {each.noise or 'nobody'} | {each.count} | {each.median_ms:.1f} | {each.p99_ms:.1f} | {ratio:.1f} |"


def _left(report: Report) -> Iterator[str]:
    yield ""
    yield "## Lost and left"
    yield ""
    yield f"- files of workspaces that were confirmed, all of them compared at the end: {report.ledger.confirmed}"
    violations = report.ledger.counts["violations"]
    yield f"- violations (lost or changed bytes, lost shell state, dishonest answers): {violations}"
    yield from (f"  - {each}" for each in report.ledger.violations)
    kinds = ", ".join(f"{name} {number}" for name, number in report.left.items()) or "nothing"
    yield f"- left of processes, mounts, cgroups, namespaces, loop devices, directories, descriptors: {kinds}"
    if report.left_names:
        yield f"  - {dict(report.left_names)}"
    tasks = report.phases.tasks
    yield f"- tasks of the daemon's event loop: {tasks.at_start} at the start, {tasks.after_cycles} after the cycles,"
    yield f"  {tasks.at_end} when everything was gone{' (**grown**)' if tasks.growth > 0 else ''}"
    yield f"- removed cgroups that the kernel has not freed yet: {report.dying_cgroups}"
    if not report.is_good:
        yield ""
        yield "The daemons' errors, what no kill explains first:"
        yield ""
        yield from (f"    {line}" for line in report.log[:_LOG_LINES])
