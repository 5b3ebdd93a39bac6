"""The values of the supervisor's interface: frozen, free of HTTP and of kernel details, structured by cattrs.

Owns no behaviour beyond small derivations. Times are aware UTC datetimes in records, seconds as floats in durations.
Sizes carry their unit in the name.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import attrs

from sandkasten.filerules import FileRules, file_rules
from sandkasten.lifetime import FOREVER_S as FOREVER_S
from sandkasten.lifetime import MAX_SPAN_S as MAX_SPAN_S
from sandkasten.lifetime import EndReason as EndReason
from sandkasten.stats import FIXED_BOUNDS as FIXED_BOUNDS
from sandkasten.stats import LIMIT_BOUNDS as LIMIT_BOUNDS
from sandkasten.stats import Limits as Limits
from sandkasten.stats import Pressure as Pressure
from sandkasten.stats import SessionStats as SessionStats
from sandkasten.stats import Stall as Stall

SESSION_ID = re.compile(r"[0-9a-f]{16,32}\Z")
"""What a session id looks like to us; clients treat it as opaque."""

WORKSPACE_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}[a-z0-9]\Z")
EXEC_ID = re.compile(r"[\x21-\x7e]{1,128}\Z")
SHELL_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,31}\Z")
STATEFUL, STATELESS = EXEC_MODES = ("stateful", "stateless")

DEFAULT_SHELL = "default"
SECCOMP_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}\Z")
SECCOMP_PROFILES = ("strict", "mvp", "debug", "off")
"""System call filters that come along; an operator's own have other names."""
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


@attrs.frozen
class SessionOptions:
    """What was chosen when the session was made and holds for its life. Kept with its record, so every field has a
    default: older records lack the newer ones.

    `exec_mode`: `stateful`, or `stateless`: a command that names no shell and no mode runs beside the shells.
    `user` runs all that names no other, and file requests are made with its rights (None: the sandbox user).
    `root_inside`: commands may run as root. `filesystem`: rules that bind every command.
    `seccomp`: the system call filter; sessions of before there was one have none.
    `workspace_mode`: `shared`, or `exclusive`: no other session has the workspace meanwhile.
    """

    exec_mode: str = STATEFUL
    user: str | None = None
    root_inside: bool = False
    filesystem: FileRules | None = attrs.field(default=None, converter=file_rules)
    seccomp: str = "off"
    workspace_mode: str = "shared"


@attrs.frozen
class SessionSpec:
    """What a caller wants. `None` means the configured default; `ttl_s` is an idle timeout, `max_lifetime_s` counts
    from the session's creation, and either may be `FOREVER_S`, where the configuration allows it.

    `env` reaches the sandbox only (never a log, an argv or nsinit). `idempotency_key`: the same key with the same spec
    answers the same session, with another spec it is a `Conflict`. `key_id`: the API key that asks; a library has none.
    `workspace_within`: labels that the workspace must have, or it is `WorkspaceNotFound`; one that is made gets them.
    """

    image: str | None = None
    ttl_s: float | None = None
    workspace_id: str | None = None
    workspace_mode: str | None = None
    workspace_within: Mapping[str, str] = attrs.field(factory=dict)
    labels: Mapping[str, str] = attrs.field(factory=dict)
    env: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    limits: Limits | None = None
    max_lifetime_s: float | None = None
    readonly_rootfs: bool | None = None
    shell: str | None = None
    exec_mode: str | None = None
    user: str | None = None
    root_inside: bool | None = None
    filesystem: FileRules | None = None
    seccomp: str | None = None
    idempotency_key: str | None = None
    key_id: str | None = None


@attrs.frozen
class SessionPatch:
    """What may change on a live session; `None` leaves it as it is. In `env` a value of None removes the variable."""

    ttl_s: float | None = None
    max_lifetime_s: float | None = None
    labels: Mapping[str, str] | None = None
    limits: Limits | None = None
    env: Mapping[str, str | None] | None = attrs.field(default=None, repr=False)


@attrs.frozen
class PauseSpec:
    """How to pause. `auto_resume`: the next request that needs the session's processes makes them go on; otherwise it
    is refused. `stop_lease`: the idle end comes no nearer meanwhile; the end of its whole life does."""

    auto_resume: bool = True
    stop_lease: bool = False


@attrs.frozen
class Pause:
    """A pause under way, and since when; otherwise as `PauseSpec`."""

    since: datetime
    auto_resume: bool
    stop_lease: bool


@attrs.frozen
class Session:
    """A session as it was at one moment. `timings_ms` is in the answer to its create alone: the
    phases in order, and behind the build's its steps as `build.…`. `expires_at` is when the
    session ends if nothing is done with it from now on; None if it does not. While something
    holds the idle end off, or a pause stopped it, that is what it would be from now on."""

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
    """The API key that made it, by its public id."""


class ExecKind(enum.StrEnum):
    """What a run is: a command (in a shell or beside one), a background process, or a terminal."""

    COMMAND = "command"
    PROCESS = "process"
    TERMINAL = "terminal"


class ExecState(enum.StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


class OnDisconnect(enum.StrEnum):
    """What becomes of a command whose caller leaves before its end."""

    CANCEL = "cancel"
    DETACH = "detach"


@attrs.frozen
class TerminalSize:
    """Size of a terminal in character cells, each 1 to 1000."""

    cols: int = 80
    rows: int = 24


@attrs.frozen
class ExecSpec:
    """What to run. Exactly one of `command` (a script for a shell) and `argv` (a program, no shell) is given.

    A command runs in the persistent shell named `shell`, behind what that shell already has to do, unless `stateless`
    (None: as the session's `exec_mode` says, and always in a shell that is not the default one): then, like `argv`, it
    is a process of its own beside the shells, and may have another `user` (a name of the image's
    `/etc/passwd` or `UID[:GID]`; root where the session may have it).
    `timeout_ms` None or 0 means the configured maximum, `unlimited` none at all (where the configuration allows it).
    `env` and `cwd` hold for this run only. `stdin` None is `/dev/null` unless `stdin_open`: then more may be sent until
    it is closed. With `terminal` the streams are a terminal of that size and all output is `Stream.STDOUT`.
    `exec_id` None lets the supervisor choose one; a chosen one makes a repeat attach instead of running twice, unless
    it `has_new_id`: `make_exec_id` has just made it.
    """

    command: str | None = attrs.field(default=None, repr=False)
    argv: tuple[str, ...] | None = attrs.field(default=None, repr=False)
    shell: str = DEFAULT_SHELL
    stateless: bool | None = None
    timeout_ms: int | None = None
    unlimited: bool = False
    cwd: str | None = None
    env: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    user: str | None = None
    stdin: bytes | None = attrs.field(default=None, repr=False)
    stdin_open: bool = False
    terminal: TerminalSize | None = None
    exec_id: str | None = None
    has_new_id: bool = attrs.field(default=False, eq=False)

    @property
    def is_program(self) -> bool:
        """Whether it runs beside the shells."""
        return bool(self.stateless) or self.argv is not None

    def in_session(self, options: SessionOptions) -> ExecSpec:
        """Return the same with what it leaves to the session."""
        if self.stateless is not None or self.argv is not None or self.shell != DEFAULT_SHELL:
            return self
        return attrs.evolve(self, stateless=True) if options.exec_mode == STATELESS else self


@attrs.frozen
class ProcessSpec:
    """A background process: `argv`, or `command` for a fresh shell. It has no time limit and its standard input stays
    open until it is closed. With `keep_alive` it holds off the session's idle end like a running command."""

    command: str | None = attrs.field(default=None, repr=False)
    argv: tuple[str, ...] | None = attrs.field(default=None, repr=False)
    process_id: str | None = None
    cwd: str | None = None
    env: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    user: str | None = None
    terminal: TerminalSize | None = None
    keep_alive: bool = False


@attrs.frozen
class ShellSpec:
    """One more persistent shell of a session. `shell` (`bash`, `sh`) and `user` are the session's own if None."""

    name: str
    shell: str | None = None
    cwd: str | None = None
    env: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    user: str | None = None


@attrs.frozen
class TerminalSpec:
    """A terminal to open: of an interactive shell of its own, or onto the persistent shell named `shell`, which is
    watched until `take_over`. `terminal_id` of an open terminal joins it as one more viewer."""

    size: TerminalSize = attrs.field(factory=TerminalSize)
    shell: str | None = None
    terminal_id: str | None = None
    read_only: bool = False
    cwd: str | None = None
    env: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    user: str | None = None


@attrs.frozen
class Output:
    """One piece of a run's output, at most 64 KiB; `sequence` counts from 1 over both streams."""

    stream: Stream
    data: bytes
    sequence: int


@attrs.frozen
class OutputSlice:
    """A part of a run's output, by offset in bytes. `offset` is where `data` begins, `first_offset` where what is kept
    begins, `total_bytes` what was written so far; `is_final`: nothing will follow `data`."""

    data: bytes = attrs.field(repr=False)
    offset: int
    next_offset: int
    first_offset: int
    total_bytes: int
    is_final: bool


@attrs.frozen
class Usage:
    """What ran used; -1 = unknown.

    For a command in a shell, `cpu_ms` is what its shell and all that was started there used while it ran, jobs of
    earlier commands included, and `peak_memory_bytes` the session's while it ran: a lower bound when the session once
    used more than it did during this command. For a program they are its own. `written_bytes` went to storage.
    """

    cpu_ms: int = -1
    peak_memory_bytes: int = -1
    written_bytes: int = -1


@attrs.frozen
class ExecEnd:
    """How a run ended, without its output. `exit_code` is 128+n after signal n. `timeout_ms` None: it had none.
    `victim` is the process that ran out of memory, by the name it gave itself."""

    exec_id: str
    exit_code: int
    signal: int | None
    cause: Cause
    cwd: str
    duration_ms: int
    timeout_ms: int | None
    shell_restarted: bool
    usage: Usage
    victim: str | None = None


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
class ExecInfo:
    """A run as it is at one moment. `command` is what runs, cut after 200 characters; `shell` None: beside the shells.

    `end` is there once it ended. Output is kept from `first_sequence` on; `last_sequence` is that of the latest piece.
    `trace_id` is the trace of the request that began it.
    """

    exec_id: str
    kind: ExecKind
    state: ExecState
    command: str = attrs.field(repr=False)
    created_at: datetime
    shell: str | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    pid: int | None = None
    end: ExecEnd | None = None
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    first_sequence: int = 1
    last_sequence: int = 0
    last_line: str = ""
    keep_alive: bool = False
    terminal: TerminalSize | None = None
    trace_id: str | None = None


@attrs.frozen
class ShellInfo:
    """A persistent shell. `running` is the run it is busy with, `queued` the ids of those that wait for it."""

    name: str
    cwd: str
    running: ExecInfo | None = None
    queued: tuple[str, ...] = ()


@attrs.frozen
class Port:
    """A TCP port that something inside listens on. `address` is `0.0.0.0` or `::` for all."""

    port: int
    address: str


@attrs.frozen
class WaitFor:
    """What to wait for: exactly one of the end of the process, any listener on a port, a line of output in which
    a regular expression (RE2 syntax: linear time, whatever the output) finds something."""

    exit: bool = False
    port: int | None = None
    pattern: str | None = None


@attrs.frozen
class Waited:
    """What came of waiting: whether it happened, the run as it was then, and the line that matched."""

    happened: bool
    run: ExecInfo
    line: str | None = None


class EventType(enum.StrEnum):
    """What an event tells; a closed set."""

    SESSION_CREATED = "session.created"
    SESSION_PAUSED = "session.paused"
    SESSION_RESUMED = "session.resumed"
    SESSION_EXPIRING = "session.expiring"
    SESSION_EXPIRED = "session.expired"
    SESSION_DESTROYED = "session.destroyed"
    SESSION_CRASHED = "session.crashed"
    SESSION_LOST = "session.lost"
    EXEC_STARTED = "exec.started"
    EXEC_ENDED = "exec.ended"
    PROCESS_STARTED = "process.started"
    PROCESS_EXITED = "process.exited"
    TERMINAL_OPENED = "terminal.opened"
    TERMINAL_CLOSED = "terminal.closed"
    SHELL_OPENED = "shell.opened"
    SHELL_CLOSED = "shell.closed"
    PORT_OPENED = "port.opened"
    PORT_CLOSED = "port.closed"
    OOM = "oom"
    LEFTOVER_FOUND = "leftover.found"
    LEFTOVER_REMOVED = "leftover.removed"


@attrs.frozen
class Event:
    """Something that happened. Cursors are opaque to clients and ordered; `data` holds JSON values."""

    cursor: str
    time: datetime
    type: EventType
    session_id: str
    data: Mapping[str, Any] = attrs.field(factory=dict)  # JSON values


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
