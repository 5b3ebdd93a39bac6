"""Reads what a node uses at one moment: all sessions together by the cgroup above them, and the machine itself.

Blocking reads of a few microseconds each; nothing is kept open. What the kernel does not tell is left out, never 0.
Sources: proc(5) meminfo; Documentation/accounting/psi.rst; statvfs(3).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from sandkasten.counters.cgroup import CgroupStats, parse_pressure
from sandkasten.model import Pressure
from sandkasten.model.measures import Family, Sample, gauge, single

_ABOVE_ALL = "."
"""In place of a session's id: the directory that holds all of them."""

_RESOURCES = ("cpu", "memory", "io")
_USEC = 1_000_000


def read_node(data_dir: Path, cgroup_dirs: Mapping[str, str]) -> list[Family]:
    """Return what there is to tell. Without `cgroup_dirs` nothing of the sessions is known."""
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


def _of_sessions(cgroup_dirs: Mapping[str, str]) -> Iterator[Family]:
    counters = CgroupStats(cgroup_dirs, _ABOVE_ALL)
    try:
        found = counters.read_all()
    finally:
        counters.close()
    cpu = found.cpu_usage_usec
    yield single("sandkasten_sessions_memory_bytes", "Memory of all sessions together.", found.memory_bytes)
    yield single("sandkasten_sessions_pids", "Processes and threads of all sessions together.", found.pids)
    yield single(
        "sandkasten_sessions_cpu_seconds",
        "Processor time of all sessions, ended ones included.",
        None if cpu is None else cpu / _USEC,
        kind="counter",
    )
    pressures = {name: getattr(found, f"{name}_pressure") for name in _RESOURCES}
    yield _pressure("sandkasten_sessions_pressure_seconds", "tasks of sessions", pressures)


def _pressure(name: str, whose: str, found: Mapping[str, Pressure | None]) -> Family:
    samples = []
    for resource, pressure in found.items():
        for kind in ("some", "full"):
            stall = None if pressure is None else getattr(pressure, kind)
            if stall is not None:
                samples.append(Sample((resource, kind), stall.total_usec / _USEC))
    help = f"How long some or all {whose} waited for a resource."
    return Family(name, "counter", help, ("resource", "kind"), samples)


def _node_pressure() -> dict[str, Pressure | None]:
    return {name: parse_pressure(_text(f"/proc/pressure/{name}")) for name in _RESOURCES}


def _meminfo() -> dict[str, int]:
    """Return the machine's memory in bytes, by the kernel's names."""
    found = {}
    for line in _text("/proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        fields = rest.split()
        if fields[1:] == ["kB"] and fields[0].isdigit():
            found[name] = int(fields[0]) * 1024
    return found


def _text(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except (OSError, ValueError):  # no such file, or pressure is not accounted (kernel option psi=0)
        return ""
