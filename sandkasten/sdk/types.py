"""Values that the SDK hands out and takes.

The first classes are those of the published client: their fields come first and in its order, newer fields behind them
with defaults. Fields of an answer that this version does not know are left out. Times are texts in RFC 3339, UTC.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Final, Literal, Self

from sandkasten.errors import CommandFailed

StreamName = Literal["stdout", "stderr"]

_SHOWN_CHARS = 2000
"""Characters of a failed command's output in the message of `CommandFailed`, half from each end."""


class Unset(enum.Enum):
    """Type of `UNSET`, the default of an argument for which None has a meaning of its own."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET


@cache
def _names(cls: Any) -> tuple[str, ...]:  # a dataclass
    return tuple(each.name for each in fields(cls))


class Taken:
    """Base of values that are read from an answer's JSON object."""

    @classmethod
    def take(cls, data: Mapping[str, Any], **others: Any) -> Self:
        """Return the fields of `data` that the class has; `others` win over them."""
        names: tuple[str, ...] = _names(cls)  # type: ignore[arg-type]  # a class is hashable
        return cls(**{name: data[name] for name in names if name in data and name not in others}, **others)


# Results of commands --------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Ended(Taken):
    """Fields and checks that results of commands have in common. The fields are given by name, and so come behind."""

    exec_id: str = ""
    cause: str = "exited"
    signal: int | None = None
    victim: str | None = None
    timed_out: bool = False
    timeout_ms: int | None = None
    queued_ms: int = 0
    shell_restarted: bool = False
    usage: dict[str, int] = field(default_factory=dict)
    egress_denied: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether the command ended by itself with status 0."""
        return self._status == 0 and self.cause == "exited"

    @property
    def _status(self) -> int:
        return int(getattr(self, "exit_code", 0))

    def check(self) -> Self:
        """Return the result itself if the command succeeded.

        Raises:
            CommandFailed: the command did not; the message has head and tail of the output.
        """
        if self.ok:
            return self
        how = f"exit code {self._status}" if self.cause == "exited" else f"{self.cause}, exit code {self._status}"
        text = getattr(self, "output", "")
        if len(text) > _SHOWN_CHARS:
            half = _SHOWN_CHARS // 2
            text = f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
        raise CommandFailed(f"the command failed ({how})" + (f":\n{text}" if text else ""), result=self)


@dataclass
class ExecResult(_Ended):
    """Result of a command.

    `output` has both streams in order of arrival; `stdout` and `stderr` are filled if `exec` was asked for `separate`
    ones. `cause` is one of the causes of docs/api.md. `usage` has -1 for an unknown figure.
    """

    exit_code: int
    cwd: str
    output: str
    truncated: bool
    duration_ms: int
    stdout: str = ""
    stderr: str = ""
    bytes_total: int = 0
    bytes_omitted: int = 0


@dataclass
class ExecBytes(_Ended):
    """Result of a command with its output as exact bytes; the other fields are those of `ExecResult`."""

    exit_code: int
    cwd: str
    stdout: bytes
    stderr: bytes
    truncated: bool
    duration_ms: int
    bytes_total: int = 0
    bytes_omitted: int = 0


@dataclass
class ExecChunk:
    """Piece of output of a command; the last one has `done`, no output, and the fields of the command's end.

    `timestamp` is the server's clock in Unix milliseconds, 0 in the last piece.
    """

    output: str
    timestamp: int
    done: bool = False
    exit_code: int = 0
    cwd: str = ""
    duration_ms: int = 0
    stream: StreamName = "stdout"
    end: RunEnd | None = None


@dataclass
class RunEnd(_Ended):
    """End of a run. The fields are those of `ExecResult` that are not output."""

    exit_code: int
    cwd: str
    duration_ms: int


@dataclass
class Output:
    """Piece of a run's output: text that ends with a whole character, or bytes where they were asked for.

    `seq` is the number of the piece over both streams; several pieces in a row may have the same.
    """

    stream: StreamName
    data: str | bytes
    seq: int


@dataclass
class RunInfo(Taken):
    """A run: a command, a process or a terminal. `command` is cut to 200 characters; `end` is there once it ended."""

    exec_id: str
    kind: Literal["command", "process", "terminal"]
    state: Literal["queued", "running", "ended"]
    command: str
    created_at: str
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    first_sequence: int = 0
    last_sequence: int = 0
    last_line: str = ""
    shell: str | None = None
    started_at: str | None = None
    ended_at: str | None = None
    pid: int | None = None
    tty: dict[str, int] | None = None
    end: RunEnd | None = None
    process_id: str | None = None
    keep_alive: bool = False

    @classmethod
    def take(cls, data: Mapping[str, Any], **others: Any) -> Self:
        """Return the run that an answer describes."""
        return super().take(data, end=RunEnd.take(data["end"]) if data.get("end") else None, **others)


@dataclass
class OutputPart(Taken):
    """Part of a run's kept output. Offsets count bytes; the next part begins at `next_offset`.

    `first_offset` is the first kept byte, `total_bytes` what there is so far; no more follows if `is_final`.
    """

    data: bytes
    offset: int
    next_offset: int
    first_offset: int
    total_bytes: int
    is_final: bool

    @property
    def text(self) -> str:
        """The bytes as UTF-8, with U+FFFD for what is none."""
        return self.data.decode("utf-8", "replace")


@dataclass
class Waited(Taken):
    """End of a wait: whether the condition came true within the time, the run then, and the line that matched."""

    happened: bool
    run: RunInfo
    line: str | None = None


@dataclass
class Port(Taken):
    """TCP port on which a process of the session listens."""

    port: int
    address: str


@dataclass
class ShellInfo(Taken):
    """Persistent shell of a session. `running` is None while the shell waits; `queued` are ids of runs."""

    name: str
    cwd: str
    running: RunInfo | None = None
    queued: Sequence[str] = ()

    @classmethod
    def take(cls, data: Mapping[str, Any], **others: Any) -> Self:
        """Return the shell that an answer describes."""
        return super().take(data, running=RunInfo.take(data["running"]) if data.get("running") else None, **others)


# Sessions and workspaces ----------------------------------------------------------------------------------------------


@dataclass
class SessionInfo(Taken):
    """A session as the server describes it; docs/api.md explains the fields. `expires_at` is None for never."""

    id: str
    image: str
    status: str
    cwd: str
    created_at: str
    expires_at: str | None
    workspace_id: str | None = None
    container_id: str | None = None
    last_activity: str | None = None
    acquire_source: str = ""
    acquire_detail: str | None = None
    ttl_seconds: float | None = None
    idle_timeout_seconds: float | None = None
    max_lifetime_seconds: float | None = None
    limits: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    exec_mode: str = "stateful"
    user: str | None = None
    root_inside: bool = True
    filesystem: dict[str, Any] | None = None
    seccomp: str = ""
    workspace_mode: str = "shared"
    stop_grace_ms: int = 0
    streams: str | None = None
    at_end: str = "destroy"
    account: str | None = None
    network: dict[str, Any] = field(default_factory=dict)
    published: Sequence[Mapping[str, int]] = ()
    epoch: int = 0
    key_id: str | None = None
    reason: str | None = None
    end_reason: str | None = None
    pause: dict[str, Any] | None = None

    @property
    def is_live(self) -> bool:
        """Whether the session has not ended."""
        return self.status in ("creating", "running", "paused")


@dataclass
class SessionStats(Taken):
    """Use of resources of a session; None for a counter that the node's kernel does not have, 0 in the first three."""

    memory_bytes: int
    memory_limit: int
    cpu_usage_usec: int
    memory_peak_bytes: int | None = None
    oom_kills: int | None = None
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
    cpu_pressure: dict[str, Any] | None = None
    memory_pressure: dict[str, Any] | None = None
    io_pressure: dict[str, Any] | None = None
    spool_bytes: int = 0
    network: dict[str, int] | None = None

    @classmethod
    def take(cls, data: Mapping[str, Any], **others: Any) -> Self:
        """Return the counters of an answer."""
        first = {name: data.get(name) or 0 for name in ("memory_bytes", "memory_limit", "cpu_usage_usec")}
        return super().take(data, **first, **others)


@dataclass
class NetworkInfo(Taken):
    """Network of a session: its policy, the number of the policy's changes from 1, and counters of the way out."""

    mode: str
    allow: list[str]
    deny: list[str]
    limits: dict[str, int | None]
    log: str
    revision: int
    proxy_env: bool = False
    secrets: list[str] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)


@dataclass
class LayerInfo(Taken):
    """Layer of a pull: bytes of it that came, and its `phase`: `waiting`, `downloading`, `unpacking`, `done`, or
    `present` if the server had it."""

    layer: str
    done_bytes: int
    total_bytes: int
    phase: str


@dataclass
class JobInfo(Taken):
    """Job of the server. `state` is `queued`, `running`, `done`, `failed` or `cancelled`; a failed one has an `error`
    with `error_code`, `message` and `details`."""

    id: str
    kind: str
    state: str
    reference: str
    name: str
    platform: str
    created_at: str
    ended_at: str | None = None
    digest: str | None = None
    error: dict[str, Any] | None = None
    progress: list[LayerInfo] = field(default_factory=list)

    @classmethod
    def take(cls, data: Mapping[str, Any], **others: Any) -> Self:
        progress = [LayerInfo.take(each) for each in data.get("progress", ())]
        return super().take(data, progress=progress, **others)

    @property
    def has_ended(self) -> bool:
        """Whether the job is over."""
        return self.state in ("done", "failed", "cancelled")


@dataclass
class SecretInfo(Taken):
    """Secret that the server keeps; its value is told to nobody. `placeholder` stands for it in sessions, None: a text
    of each session's own."""

    name: str
    hosts: list[str]
    placeholder: str | None = None


@dataclass
class Preview(Taken):
    """Port of a session that is reached from outside until `expires_at`. `url` and `token` are known to whoever opened
    it; `access` is `token` or `public`, or `local` for plain TCP on `host_port` of the server's machine."""

    port: int
    access: str
    expires_at: str
    keep_alive: bool = False
    resume: bool = False
    host_port: int | None = None
    url: str | None = None
    token: str | None = field(default=None, repr=False)

    @property
    def link(self) -> str:
        """The URL with the token, for a browser, which keeps the token as a cookie. Raises `ValueError` without URL."""
        if self.url is None:
            raise ValueError("only the answer to the opening of a preview has its URL")
        return self.url if self.token is None else f"{self.url}?_sandkasten_token={self.token}"


@dataclass
class EgressEntry(Taken):
    """Connection of a session at its end, a refused one, a question to the resolver, or a host that a connection waits
    for. `kind` is `tcp`, `http`, `proxy` or `dns`, `verdict` `allowed`, `denied` or `asked`. `exec_id` is the run whose
    program asked, where it can have been no other's."""

    cursor: str
    time: str
    kind: str
    verdict: str
    host: str
    port: int | None = None
    address: str | None = None
    reason: str | None = None
    rule: str | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    duration_ms: int = 0
    cause: str | None = None
    exec_id: str | None = None


@dataclass
class EgressPage(Taken):
    """Part of a session's log of its way out, oldest first. The next part is behind `cursor`; `dropped` entries were
    lost, `missed` ones behind the cursor that was asked for are kept no more."""

    entries: list[EgressEntry]
    cursor: str
    dropped: int = 0
    missed: int = 0

    @classmethod
    def take(cls, data: Mapping[str, Any], **others: Any) -> Self:
        """Return the part that an answer describes."""
        return super().take(data, entries=[EgressEntry.take(each) for each in data["entries"]], **others)


@dataclass
class ReadResult:
    """Content of a file, only its beginning if `truncated`; `path` is resolved."""

    content: bytes
    path: str
    truncated: bool


@dataclass
class WorkspaceInfo(Taken):
    """A workspace. A quota of None is none; `usage` is there if it was asked for."""

    id: str
    created_at: str = ""
    last_used: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    session_count: int = 0
    active_session_count: int = 0
    has_directory: bool = True
    quota_bytes: int | None = None
    quota_files: int | None = None
    usage: dict[str, Any] | None = None


# Files ----------------------------------------------------------------------------------------------------------------


@dataclass
class FileInfo(Taken):
    """Entry of a directory. `type` is `file`, `directory`, `symlink` or `other`; `mode` is octal, such as `0644`.

    `etag` is the version of the file, `target` where a link leads, `sha256` the digest of the content if it was asked
    for. Of a name that is not UTF-8 the path is spelled as docs/api.md says, `name` is for people, and `name_base64`
    has the bytes.
    """

    name: str
    path: str
    is_dir: bool
    type: str
    size: int
    mode: str
    uid: int
    gid: int
    user: str | None = None
    group: str | None = None
    modified_at: str | None = None
    etag: str = ""
    target: str | None = None
    name_base64: str | None = None
    sha256: str | None = None


@dataclass
class WrittenFile(Taken):
    """A file that was written: its resolved path, new version, and size in bytes."""

    path: str
    etag: str
    size: int


@dataclass
class UnpackedArchive(Taken):
    """Result of unpacking an archive: its entries, the bytes of its files, and entries of kinds that are left out."""

    entries: int
    size_bytes: int
    skipped: int


@dataclass
class FileView(Taken):
    """Numbered lines of a file from `first` to `last` of `lines`, or the paths of a directory two levels deep."""

    path: str
    type: str
    text: str
    first: int
    last: int
    lines: int
    truncated: bool
    etag: str


@dataclass
class FileEdit(Taken):
    """An edit that was made: the file's new version (empty if deleted), and `diff`, None for a file that is no text."""

    path: str
    etag: str
    replacements: int
    diff: str | None = None
    offsets: Sequence[int] = ()


@dataclass
class Match(Taken):
    """Line of a file that holds what was searched; `cut` if it is a part of a longer one. `column` counts from 1."""

    path: str
    line: int
    column: int
    text: str
    before: Sequence[str] = ()
    after: Sequence[str] = ()
    cut: bool = False


@dataclass
class Matches(Taken):
    """Result of a search: the lines found, and whether more were cut off by `max_matches` or by time."""

    found: list[Match]
    files: int
    searched: int
    skipped: int
    truncated: bool
    timed_out: bool


@dataclass
class WatchedChange(Taken):
    """Change of a watched file: `create`, `write`, `close`, `rename` (`to` is the new path), `chmod`, `remove`;
    `ready` comes first; `overflow` says that changes were lost.
    """

    type: str
    path: str = ""
    to: str | None = None


# The node -------------------------------------------------------------------------------------------------------------


@dataclass
class Event(Taken):
    """Event of the journal; docs/events.md lists the types. `cursor` is the position to go on behind."""

    cursor: str
    time: str
    type: str
    session_id: str
    data: dict[str, Any] = field(default_factory=dict)
    trace_id: str | None = None
    key_id: str | None = None


@dataclass
class ImageInfo(Taken):
    """Image from which sessions can be made; `images()` tells the name alone. `references` are its tags as requests
    name them, `shared_bytes` those of `size_bytes` in layers of other images, and `in_use` has `sessions` and `pools`.
    `problems` are told by `get_image`."""

    name: str
    kind: str = ""
    source: str = ""
    created_at: str = ""
    digest: str = ""
    platform: str = ""
    tags: list[str] = field(default_factory=list)
    references: list[str] = field(default_factory=list)
    alias_names: list[str] = field(default_factory=list)
    size_bytes: int = 0
    shared_bytes: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    layers: list[dict[str, Any]] = field(default_factory=list)
    in_use: dict[str, list[str]] = field(default_factory=dict)
    problems: list[str] | None = None


@dataclass
class PrunedImages(Taken):
    """Layers, broken downloads and images of builds' caches that were removed, or would be, and the bytes of their
    files."""

    layers: int
    freed_bytes: int
    blobs: int = 0
    images: int = 0


@dataclass
class NodeInfo(Taken):
    """The node: `status` is `ready`, `not_ready` or `draining`; `capacity` is described in docs/api.md."""

    id: str
    status: str
    incarnation: int = 0
    time: str = ""
    started_at: str = ""
    capacity: dict[str, dict[str, Any]] = field(default_factory=dict)
    images: list[str] = field(default_factory=list)
    sessions: dict[str, int] = field(default_factory=dict)
    pool_sandboxes: int = 0
    queued: int = 0


@dataclass
class SystemInfo(Taken):
    """The installation: versions, defaults, limits, protections and checks, as docs/api.md describes them."""

    version: str
    python: str = ""
    kernel: str = ""
    architecture: str = ""
    cgroup_mode: str = ""
    features: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    protections: list[dict[str, Any]] = field(default_factory=list)
    examined_at: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)
