"""One daemon at 10, 100, 300 and 1000 sessions: the cost of idle sessions, and of a command beside many of them.

`measure_thousand` starts a daemon with the default configuration, grows it step by step, and yields one `Step` for
each number of sessions, with all raw samples. Processor time is the kernel's own account of running time, so that other
work on the machine changes it little. Commands are sent over one HTTP connection: to one session again and again
(`one`), and to all sessions in turn (`all`), where each command meets a session whose memory no cache holds. At the
last step all sessions get a way out.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import attrs

from bench import daemon, measure

SIZES = (10, 100, 300, 1000)
QUIET_S, SETTLE_S = 20.0, 22.0
"""The second covers the sweep of the daemon's heap that follows work once, within 15 s (`sandkasten.cli.heap`): of
0.25 s at 600 sessions, it would be 1.2 % of a core in the 20 s that are measured."""
EXECS = 1000
_BATCH = 50
"""Commands between two readings of the daemon's processor time."""

_CHANGES = 10
_READS = 10
_WAY_OUT = {"mode": "allow", "allow": ["@python", "db.example.org:5432"]}


@attrs.define
class Step:
    """The figures of one number of sessions. Times in milliseconds, `idle` in percent of a core by process name,
    `exec_cpu_ms` and the like are means over batches. Lists are raw samples in the order they were taken."""

    sessions: int
    grown_s: float = 0
    idle: dict[str, float] = attrs.field(factory=dict)
    idle_daemon: float = 0
    idle_tree: float = 0
    resident_mib: float = 0
    exec_ms: dict[str, list[float]] = attrs.field(factory=dict)
    exec_cpu_ms: dict[str, list[float]] = attrs.field(factory=dict)
    create_ms: list[float] = attrs.field(factory=list)
    create_cpu_ms: float = 0
    destroy_ms: list[float] = attrs.field(factory=list)
    destroy_cpu_ms: float = 0
    list_ms: list[float] = attrs.field(factory=list)
    metrics_ms: list[float] = attrs.field(factory=list)
    ways_out: dict[str, float] = attrs.field(factory=dict)


def measure_thousand(
    data_dir: Path, sizes: Sequence[int] = SIZES, *, quiet_s: float = QUIET_S, execs: int = EXECS, **environ: str
) -> Generator[Step]:
    """Run a daemon, with settings by the names of their variables, and yield its figures at each number of sessions.
    Close the iterator (`contextlib.closing`) to end the daemon early."""
    sessions = list[str]()
    with daemon.running(data_dir, **environ) as (pid, address), daemon.Client(address) as client:
        for size in sizes:
            began = time.perf_counter()
            while len(sessions) < size:
                sessions.append(_create(client))
            step = Step(size, time.perf_counter() - began)
            _measure_quiet(step, pid, quiet_s)
            for name, targets in (("one", sessions[:1]), ("all", sessions)):
                _measure_execs(step, name, pid, client, targets, execs)
            _measure_changes(step, pid, client, sessions)
            step.list_ms = _times(lambda: client.call("GET", "/v1/sessions?limit=1000"))
            step.metrics_ms = _times(lambda: client.text("GET", "/metrics"))
            step.resident_mib = measure.own_resident_bytes(pid) / 2**20
            if size == sizes[-1]:
                step.ways_out = _measure_ways_out(pid, client, sessions, quiet_s)
            yield step


def _create(client: daemon.Client) -> str:
    """Make a session whose shell has run a command."""
    session = str(client.call("POST", "/v1/sessions", {})["id"])
    _exec(client, session)
    return session


def _exec(client: daemon.Client, session: str) -> None:
    answer = client.call("POST", f"/v1/sessions/{session}/exec", {"cmd": ":"})
    if answer["exit_code"] != 0:
        raise RuntimeError(f"a command failed: {answer}")


def _measure_quiet(step: Step, pid: int, quiet_s: float) -> None:
    """Read the processor time of the daemon's whole family before and after a time in which nothing is asked."""
    time.sleep(min(SETTLE_S, 1.2 * quiet_s))
    before, began = _family_cpu_ns(pid), time.perf_counter()
    time.sleep(quiet_s)
    after, took_ns = _family_cpu_ns(pid), (time.perf_counter() - began) * 1e9
    used = Counter[str]()
    for each, (name, cpu_ns) in after.items():
        used[name] += cpu_ns - before.get(each, (name, 0))[1]
    step.idle = {name: 100 * ns / took_ns for name, ns in used.most_common()}
    step.idle_daemon = 100 * (after[pid][1] - before[pid][1]) / took_ns
    step.idle_tree = sum(step.idle.values())


def _measure_execs(step: Step, name: str, pid: int, client: daemon.Client, sessions: Sequence[str], execs: int) -> None:
    for session in sessions[:_BATCH]:
        _exec(client, session)
    times_ms, cpu_ms = [], []
    for first in range(0, execs, _BATCH):
        before = cpu_ns(pid)
        for number in range(first, first + _BATCH):
            began = time.perf_counter()
            _exec(client, sessions[number % len(sessions)])
            times_ms.append((time.perf_counter() - began) * 1e3)
        cpu_ms.append((cpu_ns(pid) - before) / 1e6 / _BATCH)
    step.exec_ms[name], step.exec_cpu_ms[name] = times_ms, cpu_ms


def _measure_changes(step: Step, pid: int, client: daemon.Client, sessions: list[str]) -> None:
    """End some of the sessions and make as many again. The processor time is the daemon's own."""
    before = cpu_ns(pid)
    step.destroy_ms = _times(lambda: client.call("DELETE", f"/v1/sessions/{sessions.pop()}"), _CHANGES)
    step.destroy_cpu_ms = (cpu_ns(pid) - before) / 1e6 / _CHANGES
    before = cpu_ns(pid)
    step.create_ms = _times(lambda: sessions.append(client.call("POST", "/v1/sessions", {})["id"]), _CHANGES)
    step.create_cpu_ms = (cpu_ns(pid) - before) / 1e6 / _CHANGES


def _measure_ways_out(pid: int, client: daemon.Client, sessions: Sequence[str], quiet_s: float) -> dict[str, float]:
    """Give each session a way out; return what that costs, the start of the process for the first one apart."""
    client.call("PATCH", f"/v1/sessions/{sessions[0]}", {"network": _WAY_OUT})
    carrier = carrier_of(pid)

    def memory() -> list[int]:
        time.sleep(1)
        return [measure.kernel_bytes(), measure.resident_bytes(carrier), measure.own_resident_bytes(pid)]

    before = memory()
    for session in sessions[1:]:
        client.call("PATCH", f"/v1/sessions/{session}", {"network": _WAY_OUT})
    more = [(now - then) / len(sessions[1:]) / 1024 for now, then in zip(memory(), before, strict=True)]
    began_ns = cpu_ns(carrier)
    time.sleep(quiet_s)
    return {
        "sessions with a way out": len(sessions),
        "memory per way out, KiB": round(more[0] + more[1], 1),
        "memory per way out, in the egress process, KiB": round(more[1], 1),
        "memory per way out, in the daemon besides, with an event, KiB": round(more[2], 1),
        "idle egress process, % of a core": round((cpu_ns(carrier) - began_ns) / quiet_s / 1e7, 3),
    }


def carrier_of(pid: int, role: str = "egress") -> int:
    """Return the pid of a daemon's process that carries connections, in this role."""
    (found,) = (each for each in measure.family(pid) if b"\0%b\0" % role.encode() in _command_of(each))
    return found


def _command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def _times(work: Callable[[], Any], count: int = _READS) -> list[float]:
    times_ms = []
    for _ in range(count):
        began = time.perf_counter()
        work()
        times_ms.append((time.perf_counter() - began) * 1e3)
    return times_ms


def cpu_ns(pid: int) -> int:
    """Return the time that a process has run, its ended threads included. Raises `OSError` if it has ended."""
    # clock_getcpuclockid(3) makes this number; 2 is CPUCLOCK_SCHED of the kernel's posix-timers_types.h.
    return time.clock_gettime_ns((~pid << 3) | 2)


def _family_cpu_ns(root: int) -> dict[int, tuple[str, int]]:
    found = {}
    for pid in measure.family(root):
        try:
            found[pid] = (Path(f"/proc/{pid}/comm").read_text().strip(), cpu_ns(pid))
        except OSError:
            continue  # the process ended
    return found
