"""Limits beyond the kernel's bounds: those fixed when a session is made, and the most the operator allows. Pure.

Open files and the sizes of `/tmp` and `/dev/shm` can't change while a session lives: what runs has inherited or mounted
them. `plan.check_limits` owns the bounds of those that can.
"""

from __future__ import annotations

import attrs

from sandkasten.config import Defaults, Maximum
from sandkasten.model import FIXED_BOUNDS, Limits
from sandkasten.model.errors import InvalidRequest

_BYTES_PER_INODE = 4096
_MIB = 1024 * 1024
_MIN_INODES = 1024
_TMPFS_SHARES = {"tmp_mb": 2, "shm_mb": 4}
"""Each may be at most one part of so many of the memory: a full one is "no space left", not a killed PID 1."""
_MAXIMUM_OF = {
    "cpu": "cpu_limit",
    "memory_mb": "mem_limit_mb",
    "pids": "pids_limit",
    "open_files": "open_files_limit",
    "tmp_mb": "tmp_limit_mb",
    "shm_mb": "shm_limit_mb",
}


def fill_fixed(limits: Limits, defaults: Defaults) -> Limits:
    """Return `limits`, of which the others were checked, with every fixed one filled in.

    Raises:
        InvalidRequest: one that was asked for is out of range, or more than its share of the memory.
    """
    problems = _bad_values(limits)
    for name, parts in _TMPFS_SHARES.items():
        asked = getattr(limits, name)
        if f"limits.{name}" not in problems and asked is not None and asked * parts > limits.memory_mb:
            problems[f"limits.{name}"] = f"must be at most 1/{parts} of memory_mb: what is in there counts as memory"
    if problems:
        raise InvalidRequest("limits out of range", **problems)
    tmp_mb = limits.tmp_mb or min(defaults.tmp_limit_mb, limits.memory_mb // 2)
    shm_mb = limits.shm_mb or min(defaults.shm_limit_mb, limits.memory_mb // 4)
    return attrs.evolve(
        limits,
        open_files=limits.open_files or defaults.open_files_limit,
        tmp_mb=tmp_mb,
        tmp_inodes=limits.tmp_inodes or defaults.tmp_inodes or _usual_inodes(tmp_mb),
        shm_mb=shm_mb,
        shm_inodes=limits.shm_inodes or defaults.shm_inodes or _usual_inodes(shm_mb),
    )


def keep_fixed(limits: Limits, current: Limits) -> Limits:
    """Return a change's `limits` with the fixed ones as they are. Raises `InvalidRequest` if it would change one."""
    kept = {name: getattr(current, name) for name in FIXED_BOUNDS}
    asked = {name: getattr(limits, name) for name in FIXED_BOUNDS}
    problems = {
        f"limits.{name}": "is fixed when the session is made"
        for name, value in asked.items()
        if value is not None and value != kept[name]
    }
    if problems:
        raise InvalidRequest("these limits can't change", **problems)
    return attrs.evolve(limits, **kept)


def check_maximum(limits: Limits, maximum: Maximum) -> None:
    """Refuse more than the operator allows. Raises `InvalidRequest`."""
    most = {name: getattr(maximum, setting) for name, setting in _MAXIMUM_OF.items()}
    asked = {name: getattr(limits, name) for name in most}
    problems = {
        f"limits.{name}": f"must be at most {most[name]} on this server"
        for name, value in asked.items()
        if value is not None and value > most[name]
    }
    if problems:
        raise InvalidRequest("limits above this server's maximum", **problems)


def _bad_values(limits: Limits) -> dict[str, str]:
    problems = {}
    for name, (low, high) in FIXED_BOUNDS.items():
        value = getattr(limits, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            problems[f"limits.{name}"] = "must be an integer"
        elif value is not None and not low <= value <= high:
            problems[f"limits.{name}"] = f"must be between {low} and {high}"
    return problems


def _usual_inodes(size_mb: int) -> int:
    return max(size_mb * _MIB // _BYTES_PER_INODE, _MIN_INODES)
