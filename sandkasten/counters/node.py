"""Capacity and use of the node: totals, promises to live sessions, use and remainder, and the same as metrics.

A limit of a cgroup above the sessions (the daemon's unit, a container) is a limit of the node. Reads /proc, statvfs and
cgroup files: blocking calls of a few microseconds, nothing stays open. A figure that the kernel does not give is None
or left out, never 0.

Sources: proc(5) meminfo, loadavg; Documentation/accounting/psi.rst; Documentation/admin-guide/cgroup-v2.rst;
cgroup-v1/memory.rst; statvfs(3).
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from nsinit.wire.protocol import MAX_TERMINALS
from sandkasten.counters.cgroup import CgroupStats, parse_pressure
from sandkasten.counters.metrics import gauge
from sandkasten.model import Limits, Pressure
from sandkasten.model.network import NetworkCounters
from sandkasten.model.node import Amounts

_MIB = 1024 * 1024
_USEC = 1_000_000
_NO_LIMIT = 2**62
"""cgroup v1 writes no limit as the largest number of pages."""

_FDS_PER_SESSION = 19
"""Five are the session's, five read counters while its runs are measured, eight are connections that wait for a request
(measured: 18), and one is under way."""
_FDS_RESERVED = 200
FIRST_FDS = _FDS_PER_SESSION + 3
"""Descriptors that a session admitted a moment ago is going to take: the three of a way out included."""
_FEW_TERMINALS = 2
NAMESPACES_RESERVED = 128
"""Namespaces of each kind that are not for sessions: those of the machine, of helpers and of pool sandboxes."""
NAMESPACES = {"user.max_user_namespaces": 2} | {
    f"user.max_{kind}_namespaces": 1 for kind in ("cgroup", "ipc", "mnt", "net", "pid", "uts")
}
"""Namespaces of a session, by the sysctl that bounds them (namespaces(7)); a second user namespace maps system ids."""
_MAX_LEVELS = 32
_MAX_FILE_BYTES = 64 * 1024
_MEMORY_LIMITS = ("memory.max", "memory.limit_in_bytes")
_MEMORY_USES = ("memory.current", "memory.usage_in_bytes")
_ABOVE_ALL = "."
"""In place of a session's id: the directory that holds all of them."""

_RESOURCES = ("cpu", "memory", "io")


@attrs.frozen
class Bounds:
    """The cgroups from the sessions' own upwards that limit memory or pids, with their limits."""

    memory: Sequence[tuple[str, int]] = ()
    pids: Sequence[tuple[str, int]] = ()


def read_bounds(cgroup_dirs: Mapping[str, str]) -> Bounds:
    """Return the bounds above the sessions. `cgroup_dirs`: where their cgroups are made, by controller."""
    memory = tuple(_limits(cgroup_dirs.get("memory", ""), _MEMORY_LIMITS))
    return Bounds(memory, tuple(_limits(cgroup_dirs.get("pids", ""), ("pids.max",))))


def read_totals(data_dir: Path, bounds: Bounds, *, max_sessions: int) -> Amounts:
    """Return how much the machine has for sessions in all: its own amounts, or a bound above the sessions if that is
    lower."""
    space = os.statvfs(data_dir)
    return Amounts(
        sessions=max_sessions,
        cpu=float(len(os.sched_getaffinity(0))),
        memory_bytes=_least(_meminfo().get("MemTotal"), *(limit for _, limit in bounds.memory)),
        pids=_least(
            _number("/proc/sys/kernel/pid_max"),
            _number("/proc/sys/kernel/threads-max"),
            *(limit for _, limit in bounds.pids),
        ),
        disk_bytes=space.f_blocks * space.f_frsize,
    )


def read_free(data_dir: Path, bounds: Bounds) -> Amounts:
    """Return the amounts free now. CPU is a rate and not among them."""
    space = os.statvfs(data_dir)
    memory = [
        limit - (_first_number(directory, _MEMORY_USES) or 0) + _reclaimable(directory)
        for directory, limit in bounds.memory
    ]
    pids = [limit - (_number(f"{directory}/pids.current") or 0) for directory, limit in bounds.pids]
    return Amounts(
        memory_bytes=_least(_meminfo().get("MemAvailable"), *memory),
        pids=_least(_free_pids(), *pids),
        disk_bytes=space.f_bavail * space.f_frsize,
    )


def free_descriptors() -> int | None:
    """Return how many more files this process may open, None before Linux 6.2, where the size of /proc/self/fd is 0
    (proc_pid_fd(5): the number of open descriptors since then)."""
    opened = os.stat("/proc/self/fd").st_size
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - opened if opened else None


def committed(limits: Iterable[Limits]) -> Amounts:
    """Return the sum of the limits of live sessions. Pure."""
    each = list(limits)
    return Amounts(
        sessions=len(each),
        cpu=round(sum(one.cpu for one in each), 3),
        memory_bytes=sum(one.memory_mb for one in each) * _MIB,
        pids=sum(one.pids for one in each),
        disk_bytes=sum(one.disk_mb for one in each) * _MIB,
    )


def read_used(data_dir: Path, cgroup_dirs: Mapping[str, str], *, sessions: int) -> Amounts:
    """Return the use of all sessions together: memory and processes by the cgroup above them.

    Disk is the use of the data directory's file system, by any process. CPU is a rate and not among them.
    """
    space = os.statvfs(data_dir)
    return Amounts(
        sessions=sessions,
        memory_bytes=_first_number(cgroup_dirs.get("memory", ""), _MEMORY_USES),
        pids=_number(f"{cgroup_dirs.get('pids', '')}/pids.current"),
        disk_bytes=(space.f_blocks - space.f_bfree) * space.f_frsize,
    )


def session_bounds(wanted: int, *, descriptors: int | None = None) -> Mapping[str, int]:
    """Return the number of sessions that each fixed limit allows at once, by the limit's name; `wanted` is
    `server.max_sessions`. `descriptors`: of the daemon, by default those of this process.

    The kernel counts terminals for the machine, and bounds them for each sandbox (`terminals_of`).
    """
    if descriptors is None:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    bounds = {"server.max_sessions": wanted, "RLIMIT_NOFILE": max((descriptors - _FDS_RESERVED) // _FDS_PER_SESSION, 1)}
    pool = _terminal_pool()
    if pool is not None:
        bounds["kernel.pty.max"] = max(pool // _FEW_TERMINALS, 1)
    for name, each in NAMESPACES.items():
        most = _number(f"/proc/sys/{name.replace('.', '/')}")
        if most is not None:
            bounds[name] = max((most - NAMESPACES_RESERVED) // each, 1)
    return bounds


def terminals_of(sessions: int) -> int:
    """Return the terminals that each of so many sessions may have.

    The pool is divided: sessions times terminals never passes it, so no number of sessions, each with all its
    terminals, takes one from another session. A session with few terminals serves its user better than a refused one.
    So the share gets smaller first, down to `_FEW_TERMINALS`, and only then the number of sessions.
    """
    pool = _terminal_pool()
    return MAX_TERMINALS if pool is None else min(max(pool // sessions, _FEW_TERMINALS), MAX_TERMINALS)


def _terminal_pool() -> int | None:
    """Return the terminals of the machine without `kernel.pty.reserve`, which is the machine's own."""
    most, kept = (_number(f"/proc/sys/kernel/pty/{name}") for name in ("max", "reserve"))
    return None if most is None else most - (kept or 0)


# The same as metrics


def read_node(data_dir: Path, cgroup_dirs: Mapping[str, str]) -> list[Metric]:
    """Return the metrics of the machine and, with `cgroup_dirs`, of the sessions."""
    families = [*_of_sessions(cgroup_dirs)] if cgroup_dirs else []
    memory = _meminfo()
    space = os.statvfs(data_dir)
    return [
        *families,
        gauge(
            "sandkasten_node_memory_bytes",
            "Memory of the machine.",
            {"total": memory.get("MemTotal"), "available": memory.get("MemAvailable")},
            "what",
        ),
        gauge(
            "sandkasten_data_dir_bytes",
            "The file system of the data directory; free: to the daemon.",
            {"size": space.f_blocks * space.f_frsize, "free": space.f_bavail * space.f_frsize},
            "what",
        ),
        gauge(
            "sandkasten_data_dir_inodes",
            "The same in files; both 0 where there is no such limit.",
            {"size": space.f_files, "free": space.f_favail},
            "what",
        ),
        _pressure("sandkasten_node_pressure_seconds", "tasks of the machine", _node_pressure()),
    ]


def _of_sessions(cgroup_dirs: Mapping[str, str]) -> Iterator[Metric]:
    counters = CgroupStats(cgroup_dirs, _ABOVE_ALL)
    try:
        found = counters.read_all()
    finally:
        counters.close()
    cpu = found.cpu_usage_usec
    yield GaugeMetricFamily("sandkasten_sessions_memory_bytes", "Memory of all sessions together.", found.memory_bytes)
    yield GaugeMetricFamily("sandkasten_sessions_pids", "Processes and threads of all sessions together.", found.pids)
    yield CounterMetricFamily(
        "sandkasten_sessions_cpu_seconds",
        "Processor time of all sessions, ended ones included.",
        None if cpu is None else cpu / _USEC,
    )
    pressures = {name: getattr(found, f"{name}_pressure") for name in _RESOURCES}
    yield _pressure("sandkasten_sessions_pressure_seconds", "tasks of sessions", pressures)


def _pressure(name: str, whose: str, found: Mapping[str, Pressure | None]) -> Metric:
    help = f"How long some or all {whose} waited for a resource."
    family = CounterMetricFamily(name, help, labels=["resource", "kind"])
    for resource_name, pressure in found.items():
        for kind in ("some", "full"):
            stall = None if pressure is None else getattr(pressure, kind)
            if stall is not None:
                family.add_metric([resource_name, kind], stall.total_usec / _USEC)
    return family


def _node_pressure() -> dict[str, Pressure | None]:
    return {name: parse_pressure("\n".join(_lines(f"/proc/pressure/{name}"))) for name in _RESOURCES}


# Reading


def _least(*amounts: int | None) -> int | None:
    return min((amount for amount in amounts if amount is not None), default=None)


def _limits(directory: str, names: Sequence[str]) -> Iterator[tuple[str, int]]:
    for each in _upwards(directory):
        limit = _first_number(each, names)
        if limit is not None and limit < _NO_LIMIT:
            yield each, limit


def _upwards(directory: str) -> Iterator[str]:
    for _ in range(_MAX_LEVELS):
        if not directory or not os.path.exists(f"{directory}/cgroup.procs"):
            return
        yield directory
        directory = os.path.dirname(directory)


def _reclaimable(directory: str) -> int:
    """Return the bytes of a cgroup's memory that are pages of files not used for a while."""
    stat = dict(line.split(" ", 1) for line in _lines(f"{directory}/memory.stat") if " " in line)
    value = stat.get("total_inactive_file", stat.get("inactive_file", ""))  # v1 has both, of which one counts children
    return int(value) if value.isdigit() else 0


def _free_pids() -> int | None:
    """Return the number of thread ids left; the fourth field of loadavg ends with the number in use."""
    fields = next(iter(_lines("/proc/loadavg")), "").split()
    most = _least(_number("/proc/sys/kernel/pid_max"), _number("/proc/sys/kernel/threads-max"))
    if most is None or len(fields) < 4:
        return None
    threads = fields[3].partition("/")[2]
    return most - int(threads) if threads.isdigit() else None


def _meminfo() -> dict[str, int]:
    """Return the machine's memory in bytes, by the kernel's names."""
    found = {}
    for line in _lines("/proc/meminfo"):
        name, _, rest = line.partition(":")
        fields = rest.split()
        if fields[1:] == ["kB"] and fields[0].isdigit():
            found[name] = int(fields[0]) * 1024
    return found


def _first_number(directory: str, names: Iterable[str]) -> int | None:
    return next((found for name in names if (found := _number(f"{directory}/{name}")) is not None), None)


def _number(path: str) -> int | None:
    text = "\n".join(_lines(path))
    return int(text) if text.isdigit() else None


def _lines(path: str) -> list[str]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        return os.read(fd, _MAX_FILE_BYTES).decode("ascii", "replace").splitlines()
    except OSError:
        return []
    finally:
        os.close(fd)


_DEVICES = "/proc/self/net/dev"
_SENT = 8
"""The place of the bytes that were sent, behind what was received (proc_pid_net(5))."""


def read_link(link: str) -> NetworkCounters:
    """Return what passed the node's end of a session's link, whose `up` are bytes that the node received, refused ones
    among them; all are 0 without the link."""
    with open(_DEVICES) as file:
        for line in file:
            name, _, numbers = line.partition(":")
            if name.strip() == link:
                values = numbers.split()
                return NetworkCounters(bytes_up=int(values[0]), bytes_down=int(values[_SENT]))
    return NetworkCounters()
