"""The counters of a session's cgroup as the kernel writes them, for whoever has to look closely. Blocking; no owner.

Opens what is there and reads a few KiB of each; what there is depends on the machine (v2, hybrid, v1) and is told under
the kernel's own names. Sources: Documentation/admin-guide/cgroup-v2.rst; cgroup-v1/{memory,cpuacct,pids}.rst.
"""

from __future__ import annotations

from collections.abc import Mapping

FILES: Mapping[str, tuple[str, ...]] = {
    "unified": (
        *("cgroup.events", "cgroup.freeze", "cpu.stat", "cpu.max", "cpu.weight"),
        *("memory.current", "memory.peak", "memory.max", "memory.events", "pids.current", "pids.peak", "pids.max"),
        *("pids.events", "cpu.pressure", "memory.pressure", "io.pressure"),
    ),
    "memory": ("memory.usage_in_bytes", "memory.max_usage_in_bytes", "memory.limit_in_bytes", "memory.oom_control"),
    "cpu": ("cpu.stat", "cpu.cfs_quota_us", "cpu.cfs_period_us"),
    "cpuacct": ("cpuacct.usage",),
    "pids": ("pids.current", "pids.max", "pids.events"),
    "freezer": ("freezer.state",),
}
"""Which files are worth reading, by hierarchy."""

_READ_BYTES = 4096


def read_raw(dirs: Mapping[str, str], session_id: str) -> dict[str, str | int | dict[str, str | int]]:
    """Return the counters by file; empty when no cgroup of that session is there."""
    found: dict[str, str | int | dict[str, str | int]] = {}
    unified = dirs.get("unified")
    for hierarchy, path in dirs.items():
        if hierarchy == "unified" or path != unified:
            for name in FILES.get(hierarchy, ()):
                text = _read(f"{path}/{session_id}/{name}")
                if text is not None and name not in found:
                    found[name] = _parse(text)
    return found


def _parse(text: str) -> str | int | dict[str, str | int]:
    """Return one value, or those of a file with a key on each line."""
    lines = [line.partition(" ") for line in text.splitlines()]
    if lines and all(rest and not key.lstrip("-").isdigit() for key, _, rest in lines):
        return {key: _number(rest) for key, _, rest in lines}
    return _number(text.strip())


def _number(text: str) -> str | int:
    return int(text) if text.lstrip("-").isdecimal() else text


def _read(path: str) -> str | None:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(_READ_BYTES).decode("ascii", "replace")
    except OSError:
        return None
