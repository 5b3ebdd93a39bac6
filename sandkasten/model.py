"""The values of the supervisor's interface: frozen, free of HTTP and of kernel details, structured by cattrs.

Owns no behaviour beyond small derivations. Times are aware UTC datetimes in records, seconds as floats in durations.
Sizes carry their unit in the name.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType

import attrs

SESSION_ID = re.compile(r"[0-9a-f]{16,32}\Z")
"""What a session id looks like to us; clients treat it as opaque."""

WORKSPACE_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}[a-z0-9]\Z")
IMAGE_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,63}\Z")


class Status(enum.StrEnum):
    """Life-cycle states of a session; `lifecycle.py` has the table."""

    CREATING = "creating"
    RUNNING = "running"
    PAUSED = "paused"
    DESTROYING = "destroying"
    DESTROYED = "destroyed"
    EXPIRED = "expired"
    CRASHED = "crashed"
    LOST = "lost"


class Cause(enum.StrEnum):
    """Why a command ended; a closed set."""

    EXITED = "exited"
    SIGNALLED = "signalled"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    OOM = "oom"
    PIDS_LIMIT = "pids_limit"
    DISK_FULL = "disk_full"
    SHELL_DIED = "shell_died"
    SANDBOX_DIED = "sandbox_died"
    DAEMON_RESTARTED = "daemon_restarted"


class Stream(enum.StrEnum):
    STDOUT = "stdout"
    STDERR = "stderr"


LIMIT_BOUNDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"cpu": (0.01, 1024), "memory_mb": (16, 16 * 2**20), "pids": (8, 4 * 2**20), "disk_mb": (1, 1024 * 2**20)}
)
"""Lowest and highest value of each field of `Limits`, for requests and for the configuration's defaults alike."""


@attrs.frozen
class Limits:
    """What one session may use. `cpu` is in cores (0.5 = half of one)."""

    cpu: float = 1.0
    memory_mb: int = 512
    pids: int = 256
    disk_mb: int = 2048


@attrs.frozen
class SessionSpec:
    """What a caller wants. `None` means the configured default; `ttl_s` is an idle timeout in seconds.

    `env` reaches the sandbox only (never a log, an argv or nsinit). `idempotency_key`: the same key with the same spec
    answers the same session, with another spec it is a `Conflict`.
    """

    image: str | None = None
    ttl_s: float | None = None
    workspace_id: str | None = None
    labels: Mapping[str, str] = attrs.field(factory=dict)
    env: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    limits: Limits | None = None
    max_lifetime_s: float | None = None
    readonly_rootfs: bool | None = None
    shell: str | None = None
    idempotency_key: str | None = None


@attrs.frozen
class SessionPatch:
    """What may change on a live session; `None` leaves it as it is."""

    ttl_s: float | None = None
    labels: Mapping[str, str] | None = None
    limits: Limits | None = None


@attrs.frozen
class Session:
    """A session as it was at one moment. `timings_ms` has the phases of its create, in order."""

    id: str
    image: str
    status: Status
    cwd: str
    created_at: datetime
    expires_at: datetime
    last_activity: datetime
    ttl_s: float
    limits: Limits
    workspace_id: str | None = None
    labels: Mapping[str, str] = attrs.field(factory=dict)
    acquire_source: str = "cold"
    acquire_detail: str | None = None
    reason: str | None = None
    epoch: int = 0
    timings_ms: Mapping[str, float] = attrs.field(factory=dict)


@attrs.frozen
class SessionStats:
    """Counters of the session's cgroup; -1 where the kernel offers none."""

    memory_bytes: int
    memory_limit: int
    memory_peak_bytes: int
    cpu_usage_usec: int
    cpu_throttled: int
    pids: int
    pids_limit: int
    oom_kills: int


@attrs.frozen
class ExecSpec:
    """A command for the session's persistent shell.

    `timeout_ms` None or 0 means the configured maximum. `env` and `cwd` hold for this command only. `stdin` None is
    `/dev/null`. `exec_id` None lets the supervisor choose one.
    """

    command: str = attrs.field(repr=False)
    timeout_ms: int | None = None
    cwd: str | None = None
    env: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    stdin: bytes | None = attrs.field(default=None, repr=False)
    exec_id: str | None = None


@attrs.frozen
class Output:
    """One piece of a command's output, at most 64 KiB; `sequence` counts from 1 over both streams."""

    stream: Stream
    data: bytes
    sequence: int


@attrs.frozen
class Usage:
    """What the sandbox used while the command ran (other processes of the session included); -1 = unknown.

    `peak_memory_bytes` is a lower bound when the session once used more than it did during this command.
    """

    cpu_ms: int = -1
    peak_memory_bytes: int = -1


@attrs.frozen
class ExecEnd:
    """How a command ended, without its output. `exit_code` is 128+n after signal n."""

    exec_id: str
    exit_code: int
    signal: int | None
    cause: Cause
    cwd: str
    duration_ms: int
    timeout_ms: int
    shell_restarted: bool
    usage: Usage


@attrs.frozen
class ExecResult:
    """A command's end and its output, capped with head and tail kept.

    `output` is stdout and stderr in order of arrival. `bytes_total` counts what the command wrote on both streams,
    `bytes_omitted` what the cap left out of `output`.
    """

    end: ExecEnd
    output: bytes = attrs.field(repr=False)
    stdout: bytes = attrs.field(repr=False)
    stderr: bytes = attrs.field(repr=False)
    bytes_total: int
    bytes_omitted: int

    @property
    def truncated(self) -> bool:
        """Whether anything is missing from `output`."""
        return self.bytes_omitted > 0


@attrs.frozen
class FileHead:
    """A file that was opened for reading; `path` is resolved inside the sandbox, `size_bytes` what will be sent."""

    path: str
    size_bytes: int
    truncated: bool


@attrs.frozen
class Readiness:
    """Whether the node can serve; each check maps to `ok` or a sentence."""

    ready: bool
    checks: Mapping[str, str]
