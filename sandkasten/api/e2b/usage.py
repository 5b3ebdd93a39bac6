"""The use of a sandbox, over time and now, and the variables that its programs have, in E2B's terms."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from sandkasten.log import rfc3339
from sandkasten.model import ExecSpec, Session, UsageSample
from sandkasten.supervisor import Supervisor

_ENV_MS = 10_000
_MIB = 2**20


async def read_metrics(supervisor: Supervisor, session: Session) -> Iterator[dict[str, Any]]:
    """Return the samples of the last hour, in order, and one of now. The disk's use is only known of now."""
    now = await supervisor.stats(session.id)
    kept = await supervisor.usage(session.id, 0, math.inf)
    samples = [*kept, UsageSample(datetime.now(UTC), now.cpu_usage_usec, now.memory_bytes)]
    before = [UsageSample(session.created_at, 0, None), *samples]
    return (_metric(session, *pair, now.disk_bytes or 0) for pair in zip(before, samples, strict=False))


def _metric(session: Session, before: UsageSample, sample: UsageSample, disk_bytes: int) -> dict[str, Any]:
    """Return a sample; the processors' share is that since the sample before, of those that the sandbox may use."""
    span_s = max((sample.time - before.time).total_seconds(), 0.001)
    used_s = max((sample.cpu_usage_usec or 0) - (before.cpu_usage_usec or 0), 0) / 1e6
    return {
        "timestamp": rfc3339(sample.time),
        "timestampUnix": int(sample.time.timestamp()),
        "cpuCount": math.ceil(session.limits.cpu),
        "cpuUsedPct": min(round(used_s / span_s / session.limits.cpu * 100, 2), 100.0),
        "memUsed": sample.memory_bytes or 0,
        "memTotal": session.limits.memory_mb * _MIB,
        "memCache": 0,
        "diskUsed": disk_bytes,
        "diskTotal": session.limits.disk_mb * _MIB,
    }


async def read_metrics_now(supervisor: Supervisor, session: Session) -> dict[str, Any]:
    """Return the newest sample as a sandbox's own service spells it."""
    *_, newest = await read_metrics(supervisor, session)
    return {
        "ts": newest["timestampUnix"],
        "cpu_count": newest["cpuCount"],
        "cpu_used_pct": newest["cpuUsedPct"],
        "mem_total": newest["memTotal"],
        "mem_used": newest["memUsed"],
        "mem_cache": newest["memCache"],
        "mem_total_mib": newest["memTotal"] // _MIB,
        "mem_used_mib": newest["memUsed"] // _MIB,
        "disk_used": newest["diskUsed"],
        "disk_total": newest["diskTotal"],
    }


async def read_environment(supervisor: Supervisor, session: Session, user: str | None) -> dict[str, str]:
    """Return the variables that a user's programs have, as one of them tells: the sandbox may have changed any."""
    spec = ExecSpec(argv=("env", "-0"), user=user, timeout_ms=_ENV_MS)
    result = await supervisor.exec(session.id, spec)
    pairs = (each.partition("=") for each in result.output.decode("utf-8", "replace").split("\0") if "=" in each)
    return {name: value for name, _, value in pairs}
