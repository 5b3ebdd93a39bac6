"""Values of a run: the specs of commands, processes and terminals, their output, their end, and ids of runs.

Frozen and free of behaviour but for making ids. An id that the server makes has a form of its own (`run-` and 16
hexadecimal digits), so an id of that form that no run has is known to have been used, without being remembered.
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import attrs

from sandkasten.model.network import EgressDenial
from sandkasten.model.session import STATELESS, SessionOptions

EXEC_ID = re.compile(r"[\x21-\x7e]{1,128}\Z")


SHELL_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,31}\Z")


DEFAULT_SHELL = "default"

MAX_TIMEOUT_MS = 2**31
"""Longest time limit and wait for a shell, which PID 1 has a clock for."""


class Cause(enum.StrEnum):
    """Causes of a run's end; a closed set."""

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


class StreamsMode(enum.StrEnum):
    """Pipes of a run: one for each of its two streams, or one for both, whose output is all `Stream.STDOUT`, in the
    order in which it was written."""

    SEPARATE = "separate"
    MERGED = "merged"


class ExecKind(enum.StrEnum):
    """Kinds of run: a command (in a shell or beside one), a background process, or a terminal."""

    COMMAND = "command"
    PROCESS = "process"
    TERMINAL = "terminal"


class ExecState(enum.StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


class OnDisconnect(enum.StrEnum):
    """The fate of a command whose caller leaves before its end."""

    CANCEL = "cancel"
    DETACH = "detach"


@attrs.frozen
class TerminalSize:
    """Size of a terminal in character cells, each 1 to 1000."""

    cols: int = 80
    rows: int = 24


@attrs.frozen
class ExecSpec:
    """A command to run. Exactly one of `command` (a script for a shell) and `argv` (a program, no shell) is given.

    A command runs in the persistent shell named `shell`, behind the shell's earlier commands. With `stateless` (None:
    as the session's `exec_mode` says, but never in a shell that is not the default one) a command, like `argv`, is a
    process of its own beside the shells, and may have another `user` (`USER[:GROUP]`, names of
    the image's account files or numbers; root where the session allows it).

    `timeout_ms` None or 0 means the configured maximum, `unlimited` no limit (where the configuration allows it). A
    command that is still behind others of its shell after `queue_timeout_ms` is refused as `ShellBusy`; None or 0:
    after its time limit if the caller waits for its end, else never. `env` and `cwd` hold for this run only. `streams`
    None: as the session says, or else merged if the caller `reads_both` as one output, and separate if not. `stdin`
    None is `/dev/null` unless `stdin_open`: then more input may be sent until it is closed. With `terminal` the streams
    are a terminal of that size and all output is `Stream.STDOUT`.

    `exec_id` None lets the supervisor choose one. With a chosen id, a repeated request joins the run instead of running
    twice, unless `has_new_id` says that `make_exec_id` made the id for this request.
    """

    command: str | None = attrs.field(default=None, repr=False)
    argv: tuple[str, ...] | None = attrs.field(default=None, repr=False)
    shell: str = DEFAULT_SHELL
    stateless: bool | None = None
    timeout_ms: int | None = None
    queue_timeout_ms: int | None = None
    unlimited: bool = False
    cwd: str | None = None
    env: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    user: str | None = None
    stdin: bytes | None = attrs.field(default=None, repr=False)
    stdin_open: bool = False
    terminal: TerminalSize | None = None
    streams: StreamsMode | None = attrs.field(default=None, converter=attrs.converters.optional(StreamsMode))
    reads_both: bool = False
    exec_id: str | None = None
    has_new_id: bool = attrs.field(default=False, eq=False)

    @property
    def is_program(self) -> bool:
        """Whether the run is a process beside the shells."""
        return bool(self.stateless) or self.argv is not None

    @property
    def is_merged(self) -> bool:
        """Whether one pipe is standard output and standard error."""
        is_wanted = self.reads_both if self.streams is None else self.streams is StreamsMode.MERGED
        return is_wanted and self.terminal is None

    def in_session(self, options: SessionOptions) -> ExecSpec:
        """Return the spec with the fields that it leaves to the session filled in."""
        spec = self
        if spec.streams is None and options.streams is not None:
            spec = attrs.evolve(spec, streams=StreamsMode(options.streams))
        if spec.stateless is not None or spec.argv is not None or spec.shell != DEFAULT_SHELL:
            return spec
        return attrs.evolve(spec, stateless=True) if options.exec_mode == STATELESS else spec


@attrs.frozen
class ProcessSpec:
    """A background process: `argv`, or `command` for a fresh shell.

    A process has no time limit unless `timeout_ms` is one, and its standard input stays open until it is closed, or is
    `/dev/null` without `stdin_open`. With `keep_alive` the process holds off the session's idle end, as a running
    command does.
    """

    command: str | None = attrs.field(default=None, repr=False)
    argv: tuple[str, ...] | None = attrs.field(default=None, repr=False)
    process_id: str | None = None
    cwd: str | None = None
    env: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    user: str | None = None
    terminal: TerminalSize | None = None
    streams: StreamsMode | None = attrs.field(default=None, converter=attrs.converters.optional(StreamsMode))
    keep_alive: bool = False
    timeout_ms: int | None = None
    stdin_open: bool = True

    @property
    def program(self) -> ExecSpec:
        """The process as what it is besides: a program that runs beside the shells."""
        return ExecSpec(
            command=self.command,
            argv=self.argv,
            stateless=True,
            cwd=self.cwd,
            env=self.env,
            user=self.user,
            stdin_open=self.stdin_open,
            terminal=self.terminal,
            streams=self.streams,
            exec_id=self.process_id,
        )


@attrs.frozen
class WarmProcess:
    """A process that members of a session pool have running, for creates that ask for its id (`SessionSpec.warm`).

    A member is ready once the process has written a line that `ready` matches, in RE2 syntax, for which it has
    `within_s` seconds. The variables that a create brings are written to its input at the claim, as one line:
    `{"op": "claim", "env": {…}}`.
    """

    spec: ProcessSpec
    ready: str
    within_s: float = 60.0


@attrs.frozen
class ShellSpec:
    """A further persistent shell. `shell` (`bash`, `sh`) and `user` are the session's own if None."""

    name: str
    shell: str | None = None
    cwd: str | None = None
    env: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    user: str | None = None


@attrs.frozen
class TerminalSpec:
    """A terminal to open: on an interactive shell of its own, or on the persistent shell named `shell`.

    A persistent shell is only watched until `take_over`. The `terminal_id` of an open terminal joins it as a further
    viewer.
    """

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
    """A part of a run's output, by offset in bytes.

    `offset` is where `data` begins, `first_offset` where the kept output begins, `total_bytes` the size of the output
    so far; `is_final`: nothing will follow `data`.
    """

    data: bytes = attrs.field(repr=False)
    offset: int
    next_offset: int
    first_offset: int
    total_bytes: int
    is_final: bool


@attrs.frozen
class Usage:
    """Resources that a run used; -1 = unknown.

    For a command in a shell, `cpu_ms` is the time of the shell and all processes started in it while the command ran,
    jobs of earlier commands included. `peak_memory_bytes` is then the session's while the command ran: a lower bound if
    the session used more at an earlier time. For a program both are its own. `written_bytes` went to storage.
    """

    cpu_ms: int = -1
    peak_memory_bytes: int = -1
    written_bytes: int = -1


def _denials(value: Iterable[EgressDenial | Mapping[str, Any]]) -> tuple[EgressDenial, ...]:  # Any: JSON
    """Return refusals; mappings are the form in which a record keeps them."""
    return tuple(EgressDenial(**each) if isinstance(each, Mapping) else each for each in value)


@attrs.frozen
class ExecEnd:
    """End of a run, without its output. `exit_code` is 128+n after signal n; `timeout_ms` None: no time limit.

    `queued_ms` is the time before the command's turn in its shell, up to its end if it had none. `victim` is the name
    of the process that the kernel killed for memory; the process chose the name. `egress_denied` is what the session
    was refused to reach while the run went on, at most `MAX_DENIALS`.
    """

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
    queued_ms: int = 0
    egress_denied: Sequence[EgressDenial] = attrs.field(default=(), converter=_denials)


@attrs.frozen
class Gap:
    """A place in output where bytes were left out: before the byte at `offset`."""

    offset: int
    omitted_bytes: int


@attrs.frozen
class ExecResult:
    """A command's end and its output, capped with head and tail kept.

    `output` is stdout and stderr in order of arrival. `bytes_total` counts the bytes written on both streams,
    `bytes_omitted` those that the cap left out of `output`. `gaps` says where bytes are missing: by the names `output`,
    `stdout` and `stderr`, of those that are not whole.
    """

    end: ExecEnd
    output: bytes = attrs.field(repr=False)
    stdout: bytes = attrs.field(repr=False)
    stderr: bytes = attrs.field(repr=False)
    bytes_total: int
    bytes_omitted: int
    gaps: Mapping[str, Gap] = attrs.field(factory=dict)

    @property
    def truncated(self) -> bool:
        """Whether bytes are missing from `output`."""
        return self.bytes_omitted > 0


@attrs.frozen
class ExecInfo:
    """A run at one moment. `command` is cut after 200 characters; `shell` None: beside the shells.

    `end` is set once the run has ended. Output is kept from the piece numbered `first_sequence` to `last_sequence`.
    `trace_id` is the trace of the request that began the run.
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
    """A persistent shell. `running` is its present run, `queued` the ids of the runs that wait for the shell."""

    name: str
    cwd: str
    running: ExecInfo | None = None
    queued: tuple[str, ...] = ()


@attrs.frozen
class Port:
    """A TCP port on which a process inside listens. `address` is `0.0.0.0` or `::` for all."""

    port: int
    address: str


@attrs.frozen
class WaitFor:
    """A condition to wait for: the end of the process, a listener on a port, or a line of output; exactly one of them.

    `pattern` is a regular expression in RE2 syntax, so that matching takes linear time whatever the output is.
    """

    exit: bool = False
    port: int | None = None
    pattern: str | None = None


@attrs.frozen
class Waited:
    """Result of a wait: whether the condition was met, the run at that time, and the matching line."""

    happened: bool
    run: ExecInfo
    line: str | None = None


_PREFIX: Final = "run-"
_MADE: Final = re.compile(r"run-[0-9a-f]{16}\Z")


def make_exec_id() -> str:
    """Return a new run id in the server's form."""
    return _PREFIX + os.urandom(8).hex()


def is_made(exec_id: str) -> bool:
    """Whether an id has the form of the server's own."""
    return _MADE.match(exec_id) is not None
