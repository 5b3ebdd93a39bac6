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

from bench import files, goals, images, protections
from bench.peers import ASPECTS, OURS
from bench.plots import cdf, plot
from bench.sampling import difference_interval, in_a_row, interval, percentile, ratio_interval
from bench.sections import BUBBLEWRAP, COLD, ECHO, HEALTHZ, KINDS, Bench, create_row, exec_row, first_row
from sandkasten.host import examine

BASES: Mapping[str, str] = {
    **{first_row(kind): BUBBLEWRAP for kind in KINDS},
    **{f"peer: {name}": BUBBLEWRAP for name in ("runc", "crun", "systemd-nspawn", "runsc")},
    create_row(COLD): BUBBLEWRAP,
    create_row("sandbox pool"): BUBBLEWRAP,
    create_row("session pool"): HEALTHZ,
    exec_row("builtin", "HTTP"): HEALTHZ,
    exec_row("/bin/true", "HTTP"): HEALTHZ,
    exec_row("builtin", "WebSocket"): ECHO,
    in_a_row(exec_row("builtin", "HTTP")): in_a_row(HEALTHZ),
    in_a_row(exec_row("builtin", "WebSocket")): in_a_row(ECHO),
    files.SMALL: files.HEALTHZ,
    exec_row("/bin/true", "library"): "/bin/true",
    images.IMPORT: images.TAR,
    images.PULL: images.PEERS,
    images.FRESH: images.WARM,
    **{images.layers_row(count): images.layers_row(1) for count in images.LAYERS[1:]},
    **{f"peer: {name} exec": exec_row("/bin/true", "HTTP") for name in ("runc", "crun", "runsc")},
}
"""Row to the row that it is divided by."""

GOALS_HEAD = ("figure", "measured", "goal", "")


def base_of(name: str) -> str:
    """Return the row that a row is divided by, or nothing."""
    for beginning in (protections.CREATE, protections.EXEC):
        if name.startswith(beginning) and name != beginning + protections.DEFAULT:
            return beginning + protections.DEFAULT
    return BASES.get(name, "")


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
            "rows": {name: row.as_json() for name, row in self.bench.table.rows.items()},
        }
        (self.directory / f"{self.name}.json").write_text(json.dumps(content, separators=(",", ":")) + "\n")
        for name, document in self._plots().items():
            (self.directory / f"{self.name}-{name}.svg").write_text(document)
        (self.directory / f"{self.name}.md").write_text("\n".join(self.page()) + "\n")

    def _plots(self) -> Mapping[str, str]:
        rows, facts = self.bench.table.rows, self.bench.facts
        starts = {
            name.removeprefix("create and "): cdf(row.values)
            for name, row in rows.items()
            if name.startswith(("create and first", "peer: ")) and not name.endswith(" exec")
        }
        commands = {
            name: cdf(row.values) for name, row in rows.items() if name.startswith(("exec builtin, ", "exec /bin"))
        }
        commands = {
            name: points for name, points in commands.items() if "sessions" not in name and "library, " not in name
        }
        opened = {
            name.removeprefix("load, "): cdf(row.values) for name, row in rows.items() if name.startswith("load, open")
        }
        curve = [(clients, rate) for clients, rate in facts.get("load, closed: clients and commands per second", ())]
        density = facts.get("density", ())
        dense = {
            key.removesuffix(", ms"): [(line["sessions"], line[key]) for line in density]
            for key in ("exec p50, one, ms", "exec p99, one, ms", "exec p50, all, ms", "exec p99, all, ms")
        }
        share = "share of samples"
        found = {
            "starts": plot("From nothing to a command's output", starts, x="ms", y=share, log_x=True),
            "commands": plot("Commands in a session", commands, x="ms", y=share, log_x=True),
            "open-loop": plot("Latency from the intended time", opened, x="ms", y=share, log_x=True),
            "scaling": plot("Closed loop", {"commands per second": curve}, x="clients", y="per second", log_x=True),
            "density": plot("Commands beside idle sessions", dense, x="sessions", y="ms", log_x=True),
        }
        has = {"starts": starts, "commands": commands, "open-loop": opened, "scaling": curve, "density": density}
        return {name: document for name, document in found.items() if has[name]}

    def page(self) -> list[str]:
        """Return the lines of the report's page."""
        lines = [
            f"# Benchmark of {self.name}",
            "",
            "Made by `make bench-full`; how is told in [README.md](README.md).",
            "",
        ]
        lines += _table(("", ""), [*self.header.items()])
        lines += ["", "## Goals", ""]
        lines += _table(GOALS_HEAD, goals.lines(self.bench.table.rows, self.bench.facts))
        lines += ["", "## Rows", ""]
        lines += ["Times in milliseconds; intervals are 95 % bootstrap intervals, of the median or of the ratio.", ""]
        head = ("row", "n", "failed", "median", "interval", "p95", "p99", "ratio of medians")
        lines += _table(head, [self._line(name) for name in self.bench.table.rows])
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
        lines += ["All run the same program on the same root file system. What each isolates:", ""]
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

    def _line(self, name: str) -> Sequence[str]:
        row = self.bench.table.rows[name]
        low, high = interval(row.values)
        failed = str(len(row.errors)) + (f" ({row.errors[0][:60]})" if row.errors else "")
        shown = [name, str(len(row.values)), failed, f"{row.median:.3g}", f"{low:.3g} to {high:.3g}"]
        shown += [f"{percentile(row.values, percent):.3g}" for percent in (95, 99)]
        base = self.bench.table.rows.get(base_of(name))
        if base is None or not (base.values and row.values):
            return (*shown, "")
        low, high = ratio_interval(row.values, base.values)
        less, more = difference_interval(row.values, base.values)
        ratio = (
            f"{row.median / base.median:.2f} ({low:.2f} to {high:.2f}) x {base_of(name)}; {less:+.2f} to {more:+.2f} ms"
        )
        return (*shown, ratio)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(_cells(row))} |" for row in rows)]


def _cells(row: Sequence[str]) -> list[str]:
    return [" ".join(cell.split()).replace("|", "\\|") for cell in row]


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown" * bool(done.returncode)
