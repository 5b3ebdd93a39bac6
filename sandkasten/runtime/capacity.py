"""What the node has in all, has promised to live sessions, and what those use. Reads /proc, statvfs and cgroup files.

Blocking reads of a few microseconds; nothing is kept open. What the kernel does not tell is None, never 0.
Sources: proc(5) meminfo; Documentation/admin-guide/cgroup-v2.rst; cgroup-v1/memory.rst.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from sandkasten.machine import Amounts
from sandkasten.model import Limits

_MIB = 1024 * 1024


def read_totals(data_dir: Path, *, max_sessions: int) -> Amounts:
    """Return what there is."""
    space = os.statvfs(data_dir)
    return Amounts(
        sessions=max_sessions,
        cpu=float(len(os.sched_getaffinity(0))),
        memory_bytes=_memory_total(),
        pids=_number("/proc/sys/kernel/pid_max"),
        disk_bytes=space.f_blocks * space.f_frsize,
    )


def committed(limits: Iterable[Limits]) -> Amounts:
    """Return the sum of what live sessions may use. Pure."""
    each = list(limits)
    return Amounts(
        sessions=len(each),
        cpu=round(sum(one.cpu for one in each), 3),
        memory_bytes=sum(one.memory_mb for one in each) * _MIB,
        pids=sum(one.pids for one in each),
        disk_bytes=sum(one.disk_mb for one in each) * _MIB,
    )


def read_used(data_dir: Path, cgroup_dirs: Mapping[str, str], *, sessions: int) -> Amounts:
    """Return what all sessions together use: memory and processes by the cgroup above them, disk of the data
    directory's file system by whomever. CPU is a rate and not among them."""
    space = os.statvfs(data_dir)
    memory = cgroup_dirs.get("memory", "")
    in_memory = _number(f"{memory}/memory.current")
    return Amounts(
        sessions=sessions,
        memory_bytes=_number(f"{memory}/memory.usage_in_bytes") if in_memory is None else in_memory,
        pids=_number(f"{cgroup_dirs.get('pids', '')}/pids.current"),
        disk_bytes=(space.f_blocks - space.f_bfree) * space.f_frsize,
    )


def _memory_total() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = file.readline().split()
    except OSError:
        return None
    return int(fields[1]) * 1024 if fields[:1] == ["MemTotal:"] else None


def _number(path: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            text = file.read().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
