"""What a run used and why it ended, from what the runner reports and the session's counters before and after it.

The runner says how a run ended as far as PID 1 can see; the kernel's counters say whether memory or the pids limit was
behind it. With other runs beside it only a death by SIGKILL is blamed on memory, and only a shell that
gave up forking on the limit. Reads counters, owns none.
"""

from __future__ import annotations

import attrs

from runner.protocol import ExecReply
from sandkasten.actors.run import Run
from sandkasten.model import Cause, ExecEnd, Usage
from sandkasten.runtime.cgroup_stats import CgroupStats, UsageReading

_SIGKILL = 9
_CAN_NOT_FORK = 254
"""What bash exits with when it has given up forking."""
_READINGS = 6
_OWN_CAUSES = (Cause.TIMED_OUT, Cause.CANCELLED)
"""Causes that we brought about: what the counters say besides does not matter."""


@attrs.frozen
class Account:
    """The counters when a run began; `is_alone` if no other run was there."""

    usage: UsageReading
    oom_kills: int
    pids_refused: int
    is_alone: bool

    @classmethod
    def open(cls, stats: CgroupStats, *, is_alone: bool) -> Account:
        """Take the readings; a few microseconds."""
        return cls(stats.read_usage(), stats.read_oom_kills(), stats.read_pids_refused(), is_alone)

    @classmethod
    def of_readings(cls, readings: tuple[int, ...]) -> Account | None:
        """Return the account that `readings` were taken from, None if they are none."""
        if len(readings) != _READINGS:
            return None
        cpu_usec, memory_bytes, peak_bytes, oom_kills, pids_refused, is_alone = readings
        return cls(UsageReading(cpu_usec, memory_bytes, peak_bytes), oom_kills, pids_refused, bool(is_alone))

    @property
    def readings(self) -> tuple[int, ...]:
        """The same as numbers, to be written down."""
        usage = (self.usage.cpu_usec, self.usage.memory_bytes, self.usage.memory_peak_bytes)
        return (*usage, self.oom_kills, self.pids_refused, int(self.is_alone))

    def close(self, run: Run, reply: ExecReply, stats: CgroupStats, *, is_alone: bool) -> ExecEnd:
        """Return the end of the run that the runner reported."""
        cause = self._refine(reply, stats, is_alone=is_alone and self.is_alone)
        if run.is_program:
            usage = _own_usage(reply)
        else:
            usage = _usage(self.usage, stats.read_usage(), reply.written_bytes, hit_limit=cause is Cause.OOM)
        return ExecEnd(
            exec_id=run.exec_id,
            exit_code=reply.exit_code,
            signal=reply.signal,
            cause=cause,
            cwd=reply.cwd,
            duration_ms=round(reply.duration_us / 1000),
            timeout_ms=run.timeout_ms,
            shell_restarted=reply.shell_restarted,
            usage=usage,
        )

    def _refine(self, reply: ExecReply, stats: CgroupStats, *, is_alone: bool) -> Cause:
        cause = Cause(reply.cause)
        if reply.exit_code == 0 or cause in _OWN_CAUSES:
            return cause
        was_killed = reply.exit_code == 128 + _SIGKILL
        if stats.read_oom_kills() > self.oom_kills and (is_alone or was_killed):
            return Cause.OOM
        could_not_fork = reply.exit_code == _CAN_NOT_FORK
        if stats.read_pids_refused() > self.pids_refused and (is_alone or could_not_fork):
            return Cause.PIDS_LIMIT
        return Cause.DISK_FULL if reply.disk_full else cause


def cut_short(run: Run, cause: Cause, cwd: str) -> ExecEnd:
    """Return the end of a run whose runner will never report it."""
    return ExecEnd(
        exec_id=run.exec_id,
        exit_code=128 + _SIGKILL,
        signal=_SIGKILL,
        cause=cause,
        cwd=cwd,
        duration_ms=run.age_ms,
        timeout_ms=run.timeout_ms,
        shell_restarted=False,
        usage=Usage(),
    )


def _own_usage(reply: ExecReply) -> Usage:
    """Return what a program and the processes it waited for used."""
    cpu_ms = reply.cpu_us // 1000 if reply.cpu_us >= 0 else -1
    return Usage(cpu_ms=cpu_ms, peak_memory_bytes=reply.peak_bytes, written_bytes=reply.written_bytes)


def _usage(before: UsageReading, after: UsageReading, written_bytes: int, *, hit_limit: bool) -> Usage:
    """Return what the session used in between.

    The peak is exact when the session's highest mark rose meanwhile or the limit was hit; otherwise the higher of the
    two readings is a lower bound.
    """
    cpu_ms = (after.cpu_usec - before.cpu_usec) // 1000 if min(after.cpu_usec, before.cpu_usec) >= 0 else -1
    is_exact = hit_limit or after.memory_peak_bytes > before.memory_peak_bytes
    peak = after.memory_peak_bytes if is_exact else max(before.memory_bytes, after.memory_bytes)
    return Usage(cpu_ms=cpu_ms, peak_memory_bytes=peak, written_bytes=written_bytes)
