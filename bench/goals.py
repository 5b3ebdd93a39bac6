"""Goals: each is a figure of a run, read from its rows and facts, and the bound that it should keep."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from bench import files, images, protections
from bench.clients import CLI, COPY, MCP, RAW, RAW_STREAM, SDK, SDK_STREAM, transfer_row
from bench.e2b import E2B_JAVASCRIPT, E2B_PYTHON, OURS
from bench.e2b import row as e2b_row
from bench.files import large_row
from bench.sampling import Row, in_a_row, percentile
from bench.sections import (
    BUBBLEWRAP,
    COLD,
    ECHO,
    EXEC_CPU,
    HEALTHZ,
    HEALTHZ_BESIDE,
    IDLE,
    KINDS,
    NOISES,
    OUTPUT,
    PLAIN_OUTPUT,
    POOL,
    SANDBOX_POOL,
    SIZES,
    burst_row,
    create_cpu_row,
    create_row,
    dense_row,
    exec_row,
    first_row,
    noisy_row,
)
from bench.ways_out import (
    BRIDGE,
    BROKER,
    CREATE_ALLOW,
    CREATE_NONE,
    DIRECT,
    DIRECT_PORT,
    MAKING,
    NAT,
    PREVIEW,
    PROXY,
    PUBLISHED,
    TUNNEL,
    connect_row,
    rate_row,
    tls_row,
)

Rows = Mapping[str, Row]
Facts = Mapping[str, Any]


@attrs.frozen
class Goal:
    """A figure and its bound, an upper one unless `at_least`. `read` returns NaN where the run has no such figure."""

    name: str
    read: Callable[[Rows, Facts], float]
    bound: float
    unit: str
    at_least: bool = False

    def line(self, rows: Rows, facts: Facts) -> Sequence[str]:
        """Return name, figure, goal and whether it is met, for a table; nothing if the run has no such figure."""
        value = self.read(rows, facts)
        if math.isnan(value):
            return ()
        is_met = value >= self.bound if self.at_least else value <= self.bound
        relation = "≥" if self.at_least else "≤"
        return (
            self.name,
            f"{value:.3g} {self.unit}",
            f"{relation} {self.bound:g} {self.unit}",
            ["missed", "met"][is_met],
        )


_E2B_WORKS = (
    ("run", "a command", 1.5),
    ("create", "a create", 1.3),
    ("up", "a file up", 2),
    ("down", "a file down", 2),
)
BASES: Mapping[str, str] = {
    **{first_row(kind): BUBBLEWRAP for kind in KINDS},
    **{f"peer: {name}": BUBBLEWRAP for name in ("runc", "crun", "podman", "systemd-nspawn", "runsc")},
    create_row(COLD): BUBBLEWRAP,
    create_row(SANDBOX_POOL): BUBBLEWRAP,
    create_row(POOL): HEALTHZ_BESIDE,
    exec_row("builtin", "HTTP"): HEALTHZ,
    exec_row("/bin/true", "HTTP"): HEALTHZ,
    exec_row("builtin", "WebSocket"): ECHO,
    in_a_row(exec_row("builtin", "HTTP")): in_a_row(HEALTHZ),
    in_a_row(exec_row("builtin", "WebSocket")): in_a_row(ECHO),
    exec_row("/bin/true", "library"): "/bin/true",
    **{f"peer: {name} exec": exec_row("/bin/true", "HTTP") for name in ("runc", "crun", "runsc")},
    OUTPUT: PLAIN_OUTPUT,
    files.SMALL: files.HEALTHZ,
    **{large_row(way, files.HTTP): large_row(way, files.PLAIN) for way in ("up", "down")},
    SDK: RAW,
    SDK_STREAM: RAW_STREAM,
    MCP: SDK,
    **{transfer_row(way): COPY for way in ("upload", "download")},
    **{e2b_row(work, sdk): e2b_row(work, OURS) for work, *_ in _E2B_WORKS for sdk in (E2B_PYTHON, E2B_JAVASCRIPT)},
    **{dense_row(size, way): dense_row(SIZES[0], way) for size in SIZES[1:] for way in ("one", "all")},
    **{noisy_row(name): noisy_row(IDLE) for name in NOISES if name != IDLE},
    **{connect_row(name): connect_row(NAT) for name in (PROXY, BRIDGE)},
    **{rate_row(name, way): rate_row(NAT, way) for name in (PROXY, BRIDGE) for way in ("up", "down")},
    tls_row(BROKER): tls_row(TUNNEL),
    rate_row(f"TLS by {BROKER},", "down"): rate_row(f"TLS by {TUNNEL},", "down"),
    CREATE_ALLOW: CREATE_NONE,
    PREVIEW: DIRECT,
    PUBLISHED: DIRECT_PORT,
    images.IMPORT: images.TAR,
    images.PULL: images.PEERS,
    images.FRESH: images.WARM,
    **{images.layers_row(count): images.layers_row(1) for count in images.LAYERS[1:]},
}
"""Row to the row that it is compared with. Both come in the same random blocks; those of `density` do not, as one
daemon grows from step to step."""


def base_of(name: str) -> str:
    """Return the row that a row is compared with, or nothing."""
    for beginning in (protections.CREATE, protections.EXEC):
        if name.startswith(beginning) and name != beginning + protections.DEFAULT:
            return beginning + protections.DEFAULT
    return BASES.get(name, "")


def _ratio(row: str, scale: float = 1) -> Callable[[Rows, Facts], float]:
    base = BASES[row]

    def read(rows: Rows, _facts: Facts) -> float:
        return scale * rows[row].median / rows[base].median if row in rows and base in rows else math.nan

    return read


def _difference(row: str) -> Callable[[Rows, Facts], float]:
    base = BASES[row]

    def read(rows: Rows, _facts: Facts) -> float:
        return rows[row].median - rows[base].median if row in rows and base in rows else math.nan

    return read


def _of_full_size(row: str) -> Callable[[Rows, Facts], float]:
    """Read a ratio of the section `image`: smaller archives have larger shares of what is the same for all."""
    read = _ratio(row)
    return lambda rows, facts: read(rows, facts) if facts.get(images.SIZE_FACT) == images.FULL_SIZE else math.nan


def _median(row: str, scale: float = 1) -> Callable[[Rows, Facts], float]:
    return lambda rows, _facts: rows[row].median * scale if row in rows else math.nan


def _fact(name: str) -> Callable[[Rows, Facts], float]:
    return lambda _rows, facts: facts.get(name, math.nan)


def _mean(row: str) -> Callable[[Rows, Facts], float]:
    return lambda rows, _facts: statistics.fmean(rows[row].values) if row in rows else math.nan


def _tail(row: str) -> Callable[[Rows, Facts], float]:
    return lambda rows, _facts: percentile(rows[row].values, 99) / rows[row].median if row in rows else math.nan


def _at_thousand(fact: str, column: str, *, ratio: bool = False) -> Callable[[Rows, Facts], float]:
    """Read a column of a table at 1000 sessions, or its ratio to the first line."""

    def read(_rows: Rows, facts: Facts) -> float:
        lines = [line for line in facts.get(fact, ()) if column in line]
        if not lines or lines[-1]["sessions"] != 1000:
            return math.nan
        value = statistics.median(line[column] for line in lines if line["sessions"] == 1000)
        return float(value / (lines[0][column] if ratio else 1))

    return read


def _of_ways_out(fact: str) -> Callable[[Rows, Facts], float]:
    """Read a fact of 1000 sessions with a way out: of fewer, the kernel's other memory is in it."""
    return lambda rows, facts: _fact(fact)(rows, facts) if facts.get("sessions with a way out") == 1000 else math.nan


_LIBRARY = exec_row("builtin", "library")
GOALS: Sequence[Goal] = (
    Goal("a builtin in-process, mean", _mean(_LIBRARY), 0.6, "ms"),
    Goal("a builtin in-process, ratio of p99 to p50", _tail(_LIBRARY), 3, "x"),
    Goal("a builtin over HTTP, ratio to GET /healthz", _ratio(exec_row("builtin", "HTTP")), 2, "x"),
    Goal("a builtin over an open WebSocket, ratio to an echo", _ratio(exec_row("builtin", "WebSocket")), 3, "x"),
    Goal("daemon CPU per exec", _median(EXEC_CPU), 0.6, "ms"),
    Goal("create from the session pool, ratio to GET /healthz", _ratio(create_row(POOL)), 2.5, "x"),
    Goal("create from the sandbox pool, ratio to bubblewrap", _ratio(create_row(SANDBOX_POOL)), 1.2, "x"),
    Goal("create without a pool, ratio to bubblewrap", _ratio(create_row(COLD)), 2, "x"),
    Goal("100 creates at once, without a pool", _median(burst_row(COLD, 100, "all"), 1e-3), 0.8, "s"),
    Goal("100 creates at once, session pool", _median(burst_row(POOL, 100, "all"), 1e-3), 0.25, "s"),
    Goal("machine CPU per create and destroy", _median(create_cpu_row(COLD)), 20, "ms"),
    Goal("memory per idle session that ran a command", _fact("memory per idle session, MiB"), 4, "MiB"),
    Goal("the same, pages merged", _fact("memory per idle session, pages merged, MiB"), 2, "MiB"),
    Goal(
        "output over a WebSocket, of a plain sender's rate",
        _ratio(OUTPUT, 100),
        50,
        "%",
        at_least=True,
    ),
    Goal("the SDK's exec, over the same request by hand", _difference(SDK), 0.4, "ms"),
    Goal("the SDK's stream, over the same WebSocket by hand", _difference(SDK_STREAM), 0.3, "ms"),
    Goal("MCP's bash, ratio to the SDK's exec", _ratio(MCP), 3, "x"),
    *(
        Goal(f"{sdk}: {what}, ratio to our SDK's", _ratio(e2b_row(work, sdk)), most, "x")
        for sdk in (E2B_PYTHON, E2B_JAVASCRIPT)
        for work, what, most in _E2B_WORKS
    ),
    Goal("the command line's exec of a builtin", _median(CLI), 250, "ms"),
    Goal("a small file over HTTP, ratio to GET /healthz", _ratio(files.SMALL), 1.5, "x"),
    *(
        Goal(
            f"a large file {way}, of a plain socket's rate",
            _ratio(large_row(way, files.HTTP), 100),
            50,
            "%",
            at_least=True,
        )
        for way in ("up", "down")
    ),
    *(
        Goal(f"a large file {way}, {what}", _fact(f"large file {way}, {what}, MiB"), 64, "MiB")
        for way in ("up", "down")
        for what in ("growth of the daemon", "peak of a file worker", "peak of the client")
    ),
    *(
        Goal(
            f"the SDK's {way}, of a copy from socket to socket",
            _ratio(transfer_row(way), 100),
            50,
            "%",
            at_least=True,
        )
        for way in ("upload", "download")
    ),
    *(
        Goal(f"memory of the SDK's {way}", _fact(f"SDK's {way}, MiB of client memory"), 64, "MiB")
        for way in ("upload", "download")
    ),
    Goal("set-up of a way out, by a builder", _median(MAKING), 1, "ms"),
    Goal("create with a way out, over one without", _difference(CREATE_ALLOW), 0.1, "ms"),
    Goal("create with a way out, ratio to one without", _ratio(CREATE_ALLOW), 1.1, "x"),
    Goal("connect and first byte by a way out, ratio to veth + NAT", _ratio(connect_row(PROXY)), 3, "x"),
    Goal(
        "connect and first byte in the mode bridge, ratio to veth + NAT",
        _ratio(connect_row(BRIDGE)),
        1.5,
        "x",
    ),
    *(
        Goal(
            f"bytes {way} {how}, of veth + NAT's rate",
            _ratio(rate_row(name, way), 100),
            least,
            "%",
            at_least=True,
        )
        for name, how, least in ((PROXY, "by a way out", 60), (BRIDGE, "in the mode bridge", 90))
        for way in ("up", "down")
    ),
    Goal("a request over a preview, over a connection to the server", _difference(PREVIEW), 0.4, "ms"),
    Goal("memory of a way out", _of_ways_out("memory per way out, KiB"), 20, "KiB"),
    Goal("idle egress process", _of_ways_out("idle egress process, % of a core"), 0.01, "% of a core"),
    Goal("import of a tar of 220 MB, ratio to tar -x and sync", _of_full_size(images.IMPORT), 1.3, "x"),
    Goal("pull and unpack of 150 MB, ratio to skopeo, umoci and sync", _of_full_size(images.PULL), 1.2, "x"),
    Goal("peak of the unpacker's jail", _fact(images.JAIL_MIB), 128, "MiB"),
    Goal("first session on an image that was just pulled, ratio to a later one", _of_full_size(images.FRESH), 2, "x"),
    Goal("first byte after it was written", _median("first byte after it was written, WebSocket"), 5, "ms"),
    Goal("interrupt to the command's end", _median("interrupt, WebSocket"), 20, "ms"),
    Goal("idle daemon at 1000 sessions", _at_thousand("density", "idle daemon, % of a core"), 1, "% of a core"),
    Goal(
        "exec p50 at 1000 sessions, ratio to that at 10, one session",
        _at_thousand("density", "exec p50, one, ms", ratio=True),
        1.15,
        "x",
    ),
    Goal(
        "exec p50 at 1000 sessions, ratio to that at 10, in turn",
        _at_thousand("density", "exec p50, all, ms", ratio=True),
        1.15,
        "x",
    ),
    Goal(
        "daemon CPU per exec at 1000 sessions, ratio to that at 10, one session",
        _at_thousand("density", "daemon CPU per exec, one, ms", ratio=True),
        1.15,
        "x",
    ),
    Goal(
        "daemon CPU per exec at 1000 sessions, ratio to that at 10, in turn",
        _at_thousand("density", "daemon CPU per exec, all, ms", ratio=True),
        1.15,
        "x",
    ),
    Goal("first command after a restart at 1000 sessions", _at_thousand("restarts", "first command, s"), 2, "s"),
)


def lines(rows: Rows, facts: Facts) -> Sequence[Sequence[str]]:
    """Return the lines of the goals' table."""
    return [line for goal in GOALS if (line := goal.line(rows, facts))]
