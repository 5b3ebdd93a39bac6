"""What a command used and why it ended, from the session's counters before and after it.

The runner says how a command ended as far as PID 1 can see; the kernel's counters say whether memory or the pids limit
was behind it. Reads counters, owns none.
"""

from __future__ import annotations

import attrs
import trio

from runner.protocol import ExecReply
from sandkasten.actors.exec_run import ExecRun
from sandkasten.model import Cause, ExecEnd, Usage
from sandkasten.runtime.cgroup_stats import CgroupStats, UsageReading

_SIGKILL = 9
_OWN_CAUSES = (Cause.TIMED_OUT, Cause.CANCELLED)
"""Causes that we brought about: what the counters say besides does not matter."""


@attrs.frozen
class Account:
    """The counters when a command began."""

    usage: UsageReading
    oom_kills: int
    pids_refused: int

    @classmethod
    def open(cls, stats: CgroupStats) -> Account:
        """Take the readings; a few microseconds."""
        return cls(stats.read_usage(), stats.read_oom_kills(), stats.read_pids_refused())

    def close(self, run: ExecRun, reply: ExecReply, stats: CgroupStats) -> ExecEnd:
        """Return the end of the command that the runner reported."""
        cause = self._refine(Cause(reply.cause), reply.exit_code, stats)
        return ExecEnd(
            exec_id=run.exec_id,
            exit_code=reply.exit_code,
            signal=reply.signal,
            cause=cause,
            cwd=reply.cwd,
            duration_ms=round(reply.duration_us / 1000),
            timeout_ms=run.timeout_ms,
            shell_restarted=reply.shell_restarted,
            usage=_usage(self.usage, stats.read_usage(), hit_limit=cause is Cause.OOM),
        )

    def _refine(self, cause: Cause, exit_code: int, stats: CgroupStats) -> Cause:
        if exit_code == 0 or cause in _OWN_CAUSES:
            return cause
        if stats.read_oom_kills() > self.oom_kills:
            return Cause.OOM
        return Cause.PIDS_LIMIT if stats.read_pids_refused() > self.pids_refused else cause


def cut_short(run: ExecRun, cause: Cause, cwd: str) -> ExecEnd:
    """Return the end of a command whose runner will never report it."""
    elapsed_s = trio.current_time() - run.started_at if run.started_at is not None else 0.0
    return ExecEnd(
        exec_id=run.exec_id,
        exit_code=128 + _SIGKILL,
        signal=_SIGKILL,
        cause=cause,
        cwd=cwd,
        duration_ms=round(elapsed_s * 1000),
        timeout_ms=run.timeout_ms,
        shell_restarted=False,
        usage=Usage(),
    )


def _usage(before: UsageReading, after: UsageReading, *, hit_limit: bool) -> Usage:
    """Return what the session used in between.

    The peak is exact when the session's highest mark rose meanwhile or the limit was hit; otherwise the higher of the
    two readings is a lower bound.
    """
    cpu_ms = (after.cpu_usec - before.cpu_usec) // 1000 if min(after.cpu_usec, before.cpu_usec) >= 0 else -1
    is_exact = hit_limit or after.memory_peak_bytes > before.memory_peak_bytes
    peak = after.memory_peak_bytes if is_exact else max(before.memory_bytes, after.memory_bytes)
    return Usage(cpu_ms=cpu_ms, peak_memory_bytes=peak)
