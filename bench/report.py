"""The report of one run: JSON with all samples, a Markdown page of tables, plots as SVG; written anew after each
section, so that a run that ends early loses nothing.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import attrs

from bench import goals
from bench.peers import ASPECTS, COMMAND, OURS
from bench.plots import cdf, plot
from bench.sampling import RATE, difference_interval, interval, percentile, ratio_interval
from bench.sections import KINDS, Bench, exec_row, first_row
from sandkasten.host import examine

_LEAST = 5
"""A row of fewer samples gets no interval: resamples of so few are the same few values."""
_ROWS_HEAD = ("row", "n", "failed", "median", "interval", "p95", "p99", "ratio of medians; difference")
_RATES_HEAD = (*_ROWS_HEAD[:5], "p5", "p1", _ROWS_HEAD[-1])
_ABOUT_ROWS = (
    "In milliseconds; `n` is the number of samples. Intervals are 95 % bootstrap intervals: of the median, of p95 and",
    "p99, of the ratio of two medians and of their difference. A median of fewer than five samples has none, and a",
    "percentile without a sample beyond it is left out. A create is timed to its answer, a peer from its start to its",
    "end with one command: `create and first command` is the row beside it. The end of a session is `destroy`. In",
    "rows of CPU each sample is the mean processor time of ten operations.",
)
_ABOUT_PEERS = (
    "All run the same program on the same root file system. OCI runtimes have the specification that their own `spec`",
    "writes, without a terminal and with `/usr` bound as for the others. The rows `exec` of runc, crun and runsc are",
    f"`exec NAME {' '.join(COMMAND)}` in a container that sleeps. `fork + exec` is the floor: the program without any",
    "isolation, started as the peers are. What each isolates, as it is started here:",
)
GOALS_HEAD = ("figure", "measured", "goal", "")


@attrs.define
class Report:
    """Results of a run so far. `sections` has the seconds that each section took, or its error."""

    bench: Bench
    directory: Path
    seed: int
    command: str
    began: datetime = attrs.field(factory=lambda: datetime.now(UTC))
    sections: dict[str, str] = attrs.field(factory=dict)
    header: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def name(self) -> str:
        """The stem of all files of this report."""
        return f"{self.began:%Y-%m-%d}"

    def describe(self, root: Path) -> None:
        """Take down the machine and the versions, before anything is measured."""
        cgroups = next(
            (each.seen for each in examine.probe(self.bench.scratch).checks if each.id == "cgroups"), "unknown"
        )
        changed = _git(root, "status", "--porcelain")
        packages = ", ".join(f"{name} {version(name)}" for name in ("trio", "quart", "hypercorn"))
        model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
        self.header = {
            "date": f"{self.began:%Y-%m-%d %H:%M} UTC",
            "commit": _git(root, "rev-parse", "--short", "HEAD") + (" with changes" if changed else ""),
            "command": self.command,
            "seed": str(self.seed),
            "machine": f"Linux {platform.release()} {platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB",
            "processor": model[0].partition(":")[2].strip() if model else platform.machine(),
            "load at the start": f"{os.getloadavg()[0]:.2f}",
            "cgroups": cgroups,
            "clock": Path("/sys/devices/system/clocksource/clocksource0/current_clocksource").read_text().strip(),
            "versions": f"sandkasten {version('sandkasten-runtime')}, Python {platform.python_version()}, {packages}",
        }

    def write(self) -> None:
        """Write all files."""
        self.directory.mkdir(parents=True, exist_ok=True)
        content = {
            "header": self.header,
            "sections": self.sections,
            "peers": [attrs.asdict(peer, filter=lambda field, _: field.name != "cwd") for peer in self.bench.peers],
            "facts": self.bench.facts,
            "rows": {name: row.as_json(name) for name, row in self.bench.table.rows.items()},
        }
        (self.directory / f"{self.name}.json").write_text(json.dumps(content, separators=(",", ":")) + "\n")
        for name, document in self._plots().items():
            (self.directory / f"{self.name}-{name}.svg").write_text(document)
        (self.directory / f"{self.name}.md").write_text("\n".join(self.page()) + "\n")

    def _plots(self) -> Mapping[str, str]:
        rows, facts = self.bench.table.rows, self.bench.facts
        started = [*map(first_row, KINDS), *(f"peer: {peer.name}" for peer in self.bench.peers)]
        starts = {name.removeprefix("create and "): cdf(rows[name].values) for name in started if name in rows}
        said = [exec_row(name, way) for name in ("builtin", "/bin/true") for way in ("library", "WebSocket", "HTTP")]
        said += [f"peer: {peer.name} exec" for peer in self.bench.peers]
        commands = {name: cdf(rows[name].values) for name in said if name in rows}
        opened = {
            name.removeprefix("load, "): cdf(row.values) for name, row in rows.items() if name.startswith("load, open")
        }
        curve = [(clients, rate) for clients, rate in facts.get("load, closed: clients and commands per second", ())]
        density = facts.get("density", ())
        dense = {
            f"{percent}, {told}": [(line["sessions"], line[f"exec {percent}, {key}, ms"]) for line in density]
            for key, told in (("one", "one session"), ("all", "all in turn"))
            for percent in ("p50", "p99")
        }
        share, latency = "share of samples", "latency, ms"
        found = {
            "starts": plot("From nothing to the output of a command", starts, x=latency, y=share, log_x=True),
            "commands": plot("Commands in a session that is there", commands, x=latency, y=share, log_x=True),
            "open-loop": plot("Open loop: latency from the intended time", opened, x=latency, y=share, log_x=True),
            "scaling": plot(
                "Closed loop: a builtin over HTTP, by number of clients",
                {"commands": curve},
                x="clients",
                y="commands per second",
                log_x=True,
            ),
            "density": plot("A builtin over HTTP beside idle sessions", dense, x="sessions", y=latency, log_x=True),
        }
        has = {"starts": starts, "commands": commands, "open-loop": opened, "scaling": curve, "density": density}
        return {name: document for name, document in found.items() if has[name]}

    def page(self) -> list[str]:
        """Return the lines of the report's page."""
        lines = [
            f"# Benchmark of {self.name}",
            "",
            f"Made by `{self.command}`; how is told in [README.md](README.md).",
            "",
        ]
        lines += _table(("", ""), [*self.header.items()])
        lines += ["", "## Goals", ""]
        lines += _table(GOALS_HEAD, goals.lines(self.bench.table.rows, self.bench.facts))
        lines += ["", "## Rows", "", *_ABOUT_ROWS, ""]
        times = [name for name in self.bench.table.rows if not name.endswith(RATE)]
        lines += _table(_ROWS_HEAD, [self._line(name, "ms") for name in times])
        lines += [
            "",
            "## Rates",
            "",
            "As above, in megabytes a second; p5 and p1 are the slow end.",
            "",
        ]
        rates = [name for name in self.bench.table.rows if name.endswith(RATE)]
        lines += _table(_RATES_HEAD, [self._line(name, "MB/s") for name in rates])
        lines += ["", "## Figures", ""]
        plain = {name: value for name, value in self.bench.facts.items() if not isinstance(value, list | dict)}
        lines += _table(("figure", "value"), [(name, str(value)) for name, value in plain.items()])
        for name, value in self.bench.facts.items():
            rows = [value] if isinstance(value, dict) else value
            if isinstance(rows, list) and rows and isinstance(rows[0], dict):
                lines += ["", f"## {name.capitalize()}", ""]
                keys = list(dict.fromkeys(key for row in rows for key in row))  # a line may lack a figure
                lines += _table(keys, [[str(row.get(key, "")) for key in keys] for row in rows])
        lines += ["", "## Peers", ""]
        lines += [*_ABOUT_PEERS, ""]
        isolation = [(peer.name, *(peer.isolates[each] for each in ASPECTS)) for peer in self.bench.peers]
        lines += _table(("", *ASPECTS), [("sandkasten", *(OURS[each] for each in ASPECTS)), *isolation])
        lines.append("")
        for peer in self.bench.peers:
            lines.append(
                f"- {peer.name} {peer.version}: `{' '.join(peer.command)}`".replace(str(self.bench.scratch), "BENCH")
            )
            if peer.reason:
                lines.append(
                    f"  **Not measured**: {' '.join(peer.reason.split())}".replace(str(self.bench.scratch), "BENCH")
                )
        lines += ["", "## Plots", ""]
        lines += [f"![{name}]({self.name}-{name}.svg)" for name in self._plots()]
        lines += ["", "## Sections", ""]
        lines += _table(("section", "seconds, or error"), [*self.sections.items()])
        lines += ["", *(f"- Out of time: {each}" for each in self.bench.cut)] if self.bench.cut else []
        return lines

    def _line(self, name: str, unit: str) -> Sequence[str]:
        row, base_name = self.bench.table.rows[name], goals.base_of(name)
        failed = str(len(row.errors)) + (f" ({row.errors[0][:60]})" if row.errors else "")
        shown = [name, str(len(row.values)), failed, f"{row.median:.3g}"]
        shown.append(_between(interval(row.values)) if len(row.values) >= _LEAST else "")
        for percent in (95, 99) if unit == "ms" else (5, 1):
            shown.append(_tail(row.values, percent))
        base = self.bench.table.rows.get(base_name)
        if base is None or not (base.values and row.values):
            return (*shown, "")
        ratio = f"{row.median / base.median:.2f}"
        if min(len(row.values), len(base.values)) < _LEAST:
            return (*shown, f"{ratio} x {base_name}")
        low, high = ratio_interval(row.values, base.values)
        less, more = difference_interval(row.values, base.values)
        between = f"({low:.2f} to {high:.2f}) x {base_name}"
        return (*shown, f"{ratio} {between}; {less:+.2f} to {more:+.2f} {unit}")


def _tail(values: Sequence[float], percent: int) -> str:
    """Return a percentile of a tail with its interval; nothing unless it has a sample beyond it."""
    if len(values) * min(percent, 100 - percent) < 100:
        return ""
    return f"{percentile(values, percent):.3g} ({_between(interval(values, percent))})"


def _between(bounds: tuple[float, float]) -> str:
    return f"{bounds[0]:.3g} to {bounds[1]:.3g}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(_cells(row))} |" for row in rows)]


def _cells(row: Sequence[str]) -> list[str]:
    return [" ".join(cell.split()).replace("|", "\\|") for cell in row]


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown" * bool(done.returncode)
