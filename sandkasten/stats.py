"""What a session may use and what it uses, as values: part of the model, and had from there. Owns no behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs

LIMIT_BOUNDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "cpu": (0.01, 1024),
        "memory_mb": (16, 16 * 2**20),
        "pids": (8, 4 * 2**20),
        "disk_mb": (16, 16 * 2**20),
        "disk_inodes": (256, 2**32),
    }
)
"""Lowest and highest value of each field of `Limits`, for requests and for the configuration's defaults alike."""


FIXED_BOUNDS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "open_files": (1024, 2**20),
        "tmp_mb": (1, 8 * 2**20),
        "tmp_inodes": (64, 2**31),
        "shm_mb": (1, 4 * 2**20),
        "shm_inodes": (64, 2**31),
    }
)
"""The same for those that are fixed when a session is made."""


@attrs.frozen
class Limits:
    """What one session may use. `cpu` is in cores (0.5 = half of one); `disk_inodes` counts files and
    directories.

    The others are fixed when the session is made; None: the configured default then, and as it is in a change.
    `open_files` is how far each process may raise its own limit (RLIMIT_NOFILE). `/tmp` and `/dev/shm` hold `_mb` and
    `_inodes`; what is in them counts as memory.
    """

    cpu: float = 1.0
    memory_mb: int = 512
    pids: int = 256
    disk_mb: int = 2048
    disk_inodes: int = 200_000
    open_files: int | None = None
    tmp_mb: int | None = None
    tmp_inodes: int | None = None
    shm_mb: int | None = None
    shm_inodes: int | None = None


@attrs.frozen
class Stall:
    """How long tasks waited for a resource: per cent of the last 10, 60 and 300 seconds, and in all."""

    avg10: float
    avg60: float
    avg300: float
    total_usec: int


@attrs.frozen
class Pressure:
    """`some`: at least one task waited; `full`: all of them did, so nothing got done."""

    some: Stall | None = None
    full: Stall | None = None


@attrs.frozen
class SessionStats:
    """Counters of one session, None where the kernel offers none.

    `memory_peak_bytes` and `pids_peak` are the highest ever. In `cpu_throttled` of `cpu_periods` the quota was used up,
    for `cpu_throttled_usec` together; `cpu_limit` is in cores. `pids_refused` counts forks that failed. `spool_bytes`
    is kept of the runs' output outside of the session, in memory and on disk.
    """

    memory_bytes: int | None = None
    memory_limit: int | None = None
    memory_peak_bytes: int | None = None
    oom_kills: int | None = None
    cpu_usage_usec: int | None = None
    cpu_limit: float | None = None
    cpu_periods: int | None = None
    cpu_throttled: int | None = None
    cpu_throttled_usec: int | None = None
    pids: int | None = None
    pids_limit: int | None = None
    pids_peak: int | None = None
    pids_refused: int | None = None
    disk_bytes: int | None = None
    disk_limit_bytes: int | None = None
    disk_inodes: int | None = None
    disk_inodes_limit: int | None = None
    cpu_pressure: Pressure | None = None
    memory_pressure: Pressure | None = None
    io_pressure: Pressure | None = None
    spool_bytes: int = 0
