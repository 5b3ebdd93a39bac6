"""Values of a session: spec, limits, state at one moment, and reasons of its end.

Frozen and free of behaviour. Durations are seconds as floats, moments are aware UTC datetimes.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any

import attrs

from nsinit.wire.protocol import MAX_STOP_GRACE_MS
from sandkasten.model.network import Network, NetworkCounters, Preview, PreviewSpec

FOREVER_S = math.inf
"""A time to live or a lifetime without end. JSON and the database say null."""

MAX_TTL_S = 86_400
"""The longest idle timeout under its published name, `ttl_seconds`."""

MAX_SPAN_S = 366 * 86_400.0
"""The longest finite idle timeout or lifetime."""


class EndReason(enum.StrEnum):
    """Reasons of a session's end; a closed set. A session's `reason` gives details in words."""

    IDLE = "idle"
    """No activity for its time to live."""

    MAX_LIFETIME = "max_lifetime"
    """The maximum lifetime was over."""

    USER = "user"
    """By request of a client, or of the operator who stopped the daemon."""

    CRASHED = "crashed"
    """PID 1 died, or could not be trusted any more."""

    OOM = "oom"
    """PID 1 died while the kernel killed processes of the session for memory."""

    HOST_REBOOT = "host_reboot"
    """The machine stopped or was restarted."""

    ERROR = "error"
    """The build failed, or the daemon had an error."""


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
"""Lowest and highest value of the limits that are fixed when a session is made."""


STOP_GRACE_BOUNDS_MS = (0, MAX_STOP_GRACE_MS)
"""Bounds of the time that the processes of a session have to end by themselves."""


@attrs.frozen
class Limits:
    """Limits of one session. `cpu` is in cores (0.5 = half of one); `disk_inodes` counts files and directories.

    The limits with None are fixed when the session is made. In a spec None is the configured default, in a change the
    present value. `open_files` is how far each process may raise its own limit (RLIMIT_NOFILE). `/tmp` and `/dev/shm`
    hold `_mb` and `_inodes`; their content counts as memory.
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
    """Time that tasks waited for a resource: per cent of the last 10, 60 and 300 seconds, and µs in all."""

    avg10: float
    avg60: float
    avg300: float
    total_usec: int


@attrs.frozen
class UsageSample:
    """The use of a session at one moment: processor time of its whole life, and memory; None where the kernel has no
    such counter."""

    time: datetime
    cpu_usage_usec: int | None
    memory_bytes: int | None


@attrs.frozen
class Pressure:
    """Pressure on a resource. `some`: at least one task waited; `full`: all tasks did, so no work got done."""

    some: Stall | None = None
    full: Stall | None = None


@attrs.frozen
class SessionStats:
    """Counters of one session, None where the kernel offers none.

    `memory_peak_bytes` and `pids_peak` are the highest ever. The quota was used up in `cpu_throttled` of `cpu_periods`,
    for `cpu_throttled_usec` in all; `cpu_limit` is in cores. `pids_refused` counts forks that failed. `spool_bytes` is
    the size of the runs' output kept outside of the session, in memory and on disk. `network` counts since the way out
    was opened; None without one, or while the egress process can't be asked.
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
    io_read_bytes: int | None = None
    io_write_bytes: int | None = None
    io_reads: int | None = None
    io_writes: int | None = None
    cpu_pressure: Pressure | None = None
    memory_pressure: Pressure | None = None
    io_pressure: Pressure | None = None
    spool_bytes: int = 0
    network: NetworkCounters | None = None


def _strings(value: Iterable[str] | None) -> tuple[str, ...] | None:
    return None if value is None else tuple(value)


@attrs.frozen
class FileRules:
    """File rules: paths where commands may read and execute, and paths where they may write.

    Paths are absolute, inside the sandbox, and exist when the session is made. None: no rule. A writable path is
    readable.
    """

    readable: Sequence[str] | None = attrs.field(default=None, converter=_strings)
    writable: Sequence[str] | None = attrs.field(default=None, converter=_strings)


def file_rules(value: FileRules | Mapping[str, Any] | None) -> FileRules | None:  # Any: JSON
    """Return file rules; a mapping is the form in which they are stored."""
    return FileRules(**value) if isinstance(value, Mapping) else value


SESSION_ID = re.compile(r"[0-9a-f]{16,32}\Z")
"""Form of a session id; clients treat ids as opaque."""


WORKSPACE_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}[a-z0-9]\Z")
ACCOUNT_RULE = "must be 1 to 32 of a-z, 0-9, '_', '-', begin with a letter or '_', and not be root"
ACCOUNT = re.compile(r"(?!root\Z)[a-z_][a-z0-9_-]{0,31}\Z")


STATEFUL, STATELESS = EXEC_MODES = ("stateful", "stateless")


class AtEnd(enum.StrEnum):
    """The fate of a session whose lease ran out."""

    DESTROY = "destroy"
    PAUSE = "pause"
    """The session is paused, and has no end from then on but that of the operator's longest lifetime."""


SECCOMP_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}\Z")


SECCOMP_PROFILES = ("strict", "mvp", "debug", "off")
"""Built-in system call filters; an operator's own have other names."""


class Status(enum.StrEnum):
    """Life-cycle states of a session; `lifecycle.py` has the table. `POOL_IDLE`: a member of a session pool, from its
    birth until it is claimed; no client knows the session yet."""

    POOL_IDLE = "pool_idle"
    CREATING = "creating"
    RUNNING = "running"
    PAUSED = "paused"
    DESTROYING = "destroying"
    DESTROYED = "destroyed"
    EXPIRED = "expired"
    CRASHED = "crashed"
    LOST = "lost"


@attrs.frozen
class SessionOptions:
    """Options chosen when the session was made, for its whole life. Kept with its record, so every field has a default:
    older records lack the newer fields.

    `exec_mode`: `stateful`, or `stateless`: a command that names no shell and no mode runs beside the shells. `user`
    runs every process without a user of its own, and file requests have its rights (None: the sandbox user).
    `root_inside`: commands may run as root. `filesystem`: rules that bind every command. `seccomp`: the system call
    filter; records without the field had none. `streams`: those of a run that asks for none. `workspace_mode`:
    `shared`, or `exclusive`: no other session holds the workspace meanwhile. `stop_grace_ms`: the time between the
    SIGTERM that tells the processes of the end and the kill; 0: they are not told. `at_end`: as `AtEnd`. `account`: a
    name of the sandbox user, with the home `/home/NAME`, whatever the image calls that user.
    """

    exec_mode: str = STATEFUL
    user: str | None = None
    root_inside: bool = False
    filesystem: FileRules | None = attrs.field(default=None, converter=file_rules)
    seccomp: str = "off"
    workspace_mode: str = "shared"
    stop_grace_ms: int = 0
    streams: str | None = None
    at_end: str = AtEnd.DESTROY.value
    account: str | None = None


@attrs.frozen
class SessionSpec:
    """A session to make. `None` means the configured default.

    `ttl_s` is an idle timeout, `max_lifetime_s` counts from the session's creation, and either may be `FOREVER_S`,
    where the configuration allows it. `env` reaches the sandbox only (never a log, an argv or nsinit).
    `idempotency_key`: the same key with the same spec answers with the same session, with another spec it is a
    `Conflict`. `key_id`: the API key of the request; None for library users. `workspace_within`: labels that the
    workspace must have, or it is `WorkspaceNotFound`; a new workspace gets them. `network` is whole: nothing of the
    configured one is added. `secret_env`: from variables to names of secrets, whose placeholders they get.
    `publish`: previews that are open as soon as the session is. `warm`: the id of the process that a pool's member has
    running, if the session may be one with it; members without it will do as well.
    """

    image: str | None = None
    ttl_s: float | None = None
    workspace_id: str | None = None
    workspace_mode: str | None = None
    workspace_within: Mapping[str, str] = attrs.field(factory=dict)
    labels: Mapping[str, str] = attrs.field(factory=dict)
    env: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    secret_env: Mapping[str, str] = attrs.field(factory=dict)
    limits: Limits | None = None
    max_lifetime_s: float | None = None
    readonly_rootfs: bool | None = None
    shell: str | None = None
    exec_mode: str | None = None
    user: str | None = None
    account: str | None = None
    root_inside: bool | None = None
    filesystem: FileRules | None = None
    seccomp: str | None = None
    stop_grace_ms: int | None = None
    streams: str | None = None
    at_end: AtEnd | None = None
    network: Network | None = None
    publish: Sequence[PreviewSpec] = ()
    warm: str | None = None
    idempotency_key: str | None = None
    key_id: str | None = None


@attrs.frozen
class SessionPatch:
    """Changes of a live session; `None` leaves a field as it is. In `env` a value of None removes the variable;
    `secret_env` as in a spec.

    `network` replaces the present one whole. With `if_revision` the patch is a `Conflict`, whose details have the
    present `revision`, unless the network is at that revision.
    """

    ttl_s: float | None = None
    max_lifetime_s: float | None = None
    labels: Mapping[str, str] | None = None
    limits: Limits | None = None
    env: Mapping[str, str | None] | None = attrs.field(default=None, repr=False)
    secret_env: Mapping[str, str] = attrs.field(factory=dict)
    network: Network | None = None
    if_revision: int | None = None


@attrs.frozen
class PauseSpec:
    """A pause to make. `auto_resume`: the next request that needs the session's processes resumes them; otherwise such
    a request is refused.

    `stop_lease`: the idle end comes no nearer during the pause; the end of the lifetime does.
    """

    auto_resume: bool = True
    stop_lease: bool = False


@attrs.frozen
class Pause:
    """A pause under way since `since`; the other fields as in `PauseSpec`."""

    since: datetime
    auto_resume: bool
    stop_lease: bool


@attrs.frozen
class Session:
    """A session at one moment.

    `timings_ms` is set only in the answer to its create: the phases in order, and behind the build's its steps as
    `build.…`. `expires_at` is when the session ends without further activity; None if it does not. While an activity
    holds the idle end off, or a pause stopped it, `expires_at` counts from now on. `network_revision` counts the
    changes of `network`, from 1.
    """

    id: str
    image: str
    status: Status
    cwd: str
    created_at: datetime
    expires_at: datetime | None
    last_activity: datetime
    ttl_s: float
    limits: Limits
    max_lifetime_s: float = FOREVER_S
    workspace_id: str | None = None
    labels: Mapping[str, str] = attrs.field(factory=dict)
    acquire_source: str = "cold"
    acquire_detail: str | None = None
    reason: str | None = None
    end_reason: EndReason | None = None
    epoch: int = 0
    timings_ms: Mapping[str, float] = attrs.field(factory=dict)
    options: SessionOptions = attrs.field(factory=SessionOptions)
    pause: Pause | None = None
    key_id: str | None = None
    """Public id of the API key that made the session."""
    network: Network = attrs.field(factory=Network)
    network_revision: int = 1
    previews: Mapping[int, Preview] = attrs.field(factory=dict)
    """Open previews by port."""

    @property
    def published(self) -> Sequence[Preview]:
        """The open previews that are ports of the node."""
        return [each for each in self.previews.values() if each.host_port is not None]
