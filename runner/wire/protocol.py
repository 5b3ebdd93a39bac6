"""The contract between the daemon and PID 1 of a sandbox: frames, messages, limits. Sans-I/O.

One `AF_UNIX SOCK_STREAM` connection carries one request at a time, so the kernel does the flow control and closing the
connection cancels what runs on it. After the final frame the connection is idle and may carry the next request.

    daemon → runner   REQUEST, then while it runs: DATA* END (stdin or upload bytes), CANCEL
    runner → daemon   STARTED?, then STDOUT / STDERR / DATA* / EVENT*, and exactly one final REPLY or ERROR

A command that must be reached while its connection is full of unread standard input is reached on another connection:
`Signal`, `Cancel` and `Resize` name it by its id. `RunProgram` and `OpenShell` may bring one descriptor (SCM_RIGHTS, on
the frame's first byte): the cgroup that the new process is born in; see `Membership`.

A run begun with a *ticket* is kept when its connection breaks, instead of being cancelled, and is found again by
`ListRuns` and `AttachRun`. The ticket is text of the daemon's, given back as it came.

The daemon treats every byte from the runner as hostile: the decoder refuses oversized and unknown frames and stays in
error afterwards; `Vocabulary` refuses every body that is not exactly one of the messages below.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import field
from typing import Literal, NoReturn

from runner.wire.codec import ProtocolError, Vocabulary, dataclass
from runner.wire.files import (
    MAX_CONTEXT,
    MAX_EDITS,
    MAX_MATCHES,
    MAX_SEARCHED_BYTES,
    MAX_WATCHES,
    AppendUpload,
    BeginUpload,
    ChangeKind,
    ChangeMode,
    ChangeOwner,
    CommitUpload,
    CopyFile,
    DropUpload,
    Edited,
    EditedFile,
    EditFiles,
    FileChange,
    FileEntry,
    FileInfo,
    FileKind,
    FileMatch,
    FilePart,
    FilePut,
    FileRequest,
    FileStats,
    FoundFiles,
    GetFile,
    GlobFiles,
    ListFiles,
    Listing,
    LookUpload,
    MakeDirectory,
    Measure,
    Measured,
    MoveFile,
    Pack,
    Packed,
    PutFile,
    ReadFile,
    RemoveFile,
    Searched,
    SearchFiles,
    StatFile,
    StatFiles,
    Unedited,
    Unmatched,
    Unpack,
    UploadState,
    Viewed,
    ViewFile,
    WatchFiles,
    Watching,
    WriteFile,
)

PROTOCOL_VERSION = 6
"""Version of this contract. A sandbox may outlive several daemons: they serve any PID 1 from `OLDEST_VERSION` on, and
ask of it only what its version knows."""

OLDEST_VERSION = 3
FILES_VERSION = 5
"""First version that takes every `FileRequest` in a sandbox with programs."""
MERGED_VERSION = 5
"""First version that merges the streams of a run, and bounds its wait for the shell."""

DEFAULT_SHELL = "default"
"""Name of the shell that `Setup` starts."""

MAX_SHELLS = 16
MAX_PROGRAMS = 64
"""Most shells, and programs beside them, that one sandbox runs at a time."""

MAX_REQUEST_BYTES = 8 * 1024 * 1024
"""Largest frame body the runner accepts: a 1 MiB command, JSON-escaped at its worst."""

MAX_FRAME_BYTES = 256 * 1024
"""Largest frame body the daemon accepts from a runner, and so the largest piece of output or of a file."""

CHUNK_BYTES = 64 * 1024
"""Most that the runner reads from a pipe or file at once, unless a pipe runs full: then `MAX_FRAME_BYTES`."""

_HEADER = struct.Struct(">IB")
HEADER_BYTES = _HEADER.size


class Kind(enum.IntEnum):
    """Kind of a frame's body."""

    REQUEST = 0x01
    DATA = 0x02
    END = 0x03
    CANCEL = 0x04
    STARTED = 0x10
    STDOUT = 0x11
    STDERR = 0x12
    REPLY = 0x13
    ERROR = 0x14
    EVENT = 0x15


FROM_DAEMON = frozenset({Kind.REQUEST, Kind.DATA, Kind.END, Kind.CANCEL})
FROM_RUNNER = frozenset({Kind.DATA, Kind.STARTED, Kind.STDOUT, Kind.STDERR, Kind.REPLY, Kind.ERROR, Kind.EVENT})

Frame = tuple[Kind, bytes]


def encode_header(kind: Kind, length: int) -> bytes:
    """Return the header of a frame whose body of `length` bytes follows (for `sendmsg` without a copy)."""
    return _HEADER.pack(length, kind)


def encode_frame(kind: Kind, body: bytes = b"") -> bytes:
    """Return one whole frame."""
    return _HEADER.pack(len(body), kind) + body


_MANY_PIECES = 64


class FrameDecoder:
    """Splits a byte stream into frames; an iterator that stops when the buffered bytes hold no whole frame.

    After a `ProtocolError` the decoder stays in error: every later `feed` or `next` raises again.
    """

    def __init__(self, allowed: frozenset[Kind], *, max_body_bytes: int) -> None:
        self._allowed = {int(kind): kind for kind in allowed}
        self._max_body_bytes = max_body_bytes
        self._buffer = b""
        self._start = 0
        """Bytes of the buffer that were handed out."""
        self._more: list[bytes] = []
        self._missing_bytes = 0
        """Of the frame whose begin the buffer has, and whose rest comes in pieces: they are copied once, when it is
        whole. What has come of the next frame then counts below zero."""
        self._error: str | None = None

    def feed(self, data: bytes) -> None:
        """Add received bytes. At most one frame more than what `next` consumed is ever buffered by a caller that
        iterates to the end after each `feed`."""
        self._check()
        if self._missing_bytes > 0:
            if len(self._more) == _MANY_PIECES:  # of a few bytes each: objects would take more room than bytes
                self._more = [b"".join(self._more)]
            self._more.append(data)
            self._missing_bytes -= len(data)
        elif self._start == len(self._buffer):  # so it is mostly
            self._buffer, self._start = data, 0
        else:
            self._buffer, self._start = self.take_rest() + data, 0

    def take_rest(self) -> bytes:
        """Return the bytes that are not handed out, which another decoder gets."""
        rest = b"".join((memoryview(self._buffer)[self._start :], *self._more))
        self._reset()
        return rest

    @property
    def buffered_bytes(self) -> int:
        """Bytes received and not yet handed out."""
        return len(self._buffer) - self._start + sum(map(len, self._more))

    def __iter__(self) -> FrameDecoder:
        return self

    def __next__(self) -> Frame:
        self._check()
        begin = self._start + HEADER_BYTES
        if self._missing_bytes > 0 or len(self._buffer) < begin:
            raise StopIteration
        length, number = _HEADER.unpack_from(self._buffer, self._start)
        kind = self._allowed.get(number)
        if kind is None:
            self._fail(f"frame kind {number:#04x} is not allowed here")
        if length > self._max_body_bytes:
            self._fail(f"frame of {length} bytes exceeds {self._max_body_bytes}")
        if self._more:
            last = self._more.pop()
            end = len(last) + self._missing_bytes
            body = b"".join((memoryview(self._buffer)[begin:], *self._more, memoryview(last)[:end]))
            self._reset()
            self._buffer, self._start = last, end
            return kind, body
        end = begin + length
        if len(self._buffer) < end:
            self._missing_bytes = end - len(self._buffer)
            raise StopIteration
        self._start = end
        return kind, bytes(memoryview(self._buffer)[begin:end])

    def _reset(self) -> None:
        self._buffer, self._start = b"", 0
        self._more, self._missing_bytes = [], 0

    def _check(self) -> None:
        if self._error is not None:
            raise ProtocolError(self._error)

    def _fail(self, message: str) -> NoReturn:
        self._error = message
        self._reset()
        raise ProtocolError(message)


# Requests ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """Ask for version and shells. Sent once on a new link and again at adoption. Answer: `HelloReply`."""

    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Graces:
    """Milliseconds that each rung of the kill ladder is given before the next: interrupt, terminate, kill."""

    interrupt_ms: int = 200
    terminate_ms: int = 300
    kill_ms: int = 300


@dataclass(frozen=True, slots=True)
class TerminalSize:
    """Size of a terminal in character cells."""

    cols: int
    rows: int


Membership = Literal["none", "clone", "join"]
"""Kind of a request's descriptor: none; a cgroup v2 directory, for CLONE_INTO_CGROUP; an open v1 `tasks` file, to which
the new process writes `0` before anything else."""


@dataclass(frozen=True, slots=True)
class BirthCgroup:
    """Run cgroup in which one program or shell is born. `name` is the last component of the cgroup's path, by which the
    runner finds the members in `/proc/<pid>/cgroup`."""

    name: str
    membership: Membership


@dataclass(frozen=True, slots=True)
class FileRules:
    """Paths that commands may read and execute, and paths that they may write; None: any that they otherwise could.
    Paths are absolute and exist. A writable path is readable; devices, `/proc` and the runner's own files are always
    both."""

    readable: tuple[str, ...] | None = None
    writable: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Setup:
    """First request to a new sandbox: set up the default shell. Answered at once; the shell starts meanwhile, or later.

    `env` is added to the documented base environment of every command; `shell` is the preferred shell's name
    (`bash` or `sh`), the runner falls back to what the image has. `user` is whom shells run as, and programs that name
    no other (null: the sandbox user); file requests are made with its rights. Answer: `HelloReply`, or errors
    `NO_SUCH_USER`, `INVALID_PATH` (of `files`, or the kernel has no such rules).
    """

    env: dict[str, str] = field(default_factory=dict)
    shell: str = "bash"
    graces: Graces = field(default_factory=Graces)
    user: str | None = None
    files: FileRules | None = None
    cwd: str | None = None
    """The directory in which the default shell starts, if its user may enter it."""
    unused_shell_ms: int | None = None
    """Milliseconds for which the default shell's process is kept before its first command, which starts it again. 0:
    the first command starts it. None: it is kept."""
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class SetEnv:
    """Change the session's variables (null removes one): what starts from now on has them, and each shell takes them
    over before its next command. Answer: `Done`."""

    env: dict[str, str | None]


@dataclass(frozen=True, slots=True)
class Thawed:
    """All of the sandbox stood still for so long, until now: time limits go on from there. Answer: `Done`."""

    frozen_ms: int


@dataclass(frozen=True, slots=True)
class Exec:
    """Run `command` in a persistent shell. Answer: STARTED, output frames, then `ExecReply`.

    `timeout_ms` counts from STARTED; `None` means none. `cwd` and `env` apply to this command only.
    With `stdin` the following DATA frames are its standard input up to END, otherwise it is `/dev/null`.
    With `terminal` its standard streams are a terminal of that size, which is the shell's controlling terminal
    until the command ends; DATA frames are what is typed, STDOUT what the screen gets, `stdin` is ignored.
    With `interactive` (needs `terminal`) the command is not run: the shell reads lines from the terminal and runs
    each in itself, with prompt and job control, until `exit` or end-of-file.
    With `merged` standard output and standard error are one pipe, and all output is STDOUT, in the order in which it
    was written; without, the order of output on two streams is that of arrival, as far as it is known.
    With `queue_timeout_ms` a command that is still behind others after that time is refused (error `QUEUE_TIMEOUT`).
    With `ticket` the run is kept; its id must then be that of no other kept run (error `EXISTS`).
    """

    exec_id: str
    command: str
    timeout_ms: int | None = None
    cwd: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    stdin: bool = False
    shell: str = DEFAULT_SHELL
    terminal: TerminalSize | None = None
    interactive: bool = False
    merged: bool = False
    queue_timeout_ms: int | None = None
    ticket: str = ""


@dataclass(frozen=True, slots=True)
class RunProgram:
    """Run a program beside the shells. Answer: STARTED, output frames, then `ExecReply`.

    Exactly one of `argv` (searched for in its PATH, no shell) and `command` (given to a fresh shell of the session's
    kind; with `interactive` that shell is an interactive one, and `command` empty). `cwd` is relative to the
    workspace. `user` is `USER[:GROUP]`, names of the image's account files or numbers; not PID 1's, and root only in
    a sandbox that was built for it. `stdin`, `terminal`, `timeout_ms`, `merged` and `ticket` as in `Exec`; the terminal
    is the program's controlling terminal. It ends when the program itself has; what it left running lives on, unless it
    was cancelled or timed out.
    """

    exec_id: str
    argv: tuple[str, ...] = ()
    command: str | None = None
    timeout_ms: int | None = None
    cwd: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    stdin: bool = False
    terminal: TerminalSize | None = None
    interactive: bool = False
    merged: bool = False
    user: str | None = None
    group: BirthCgroup | None = None
    ticket: str = ""


@dataclass(frozen=True, slots=True)
class Signal:
    """Send a signal to what a running command or program started. SIGINT also makes a shell leave the command it
    runs, as Ctrl-C would; so does any signal that ends a process by default when the command runs only builtins.
    Answer: `Done`, or error `NOT_RUNNING`."""

    exec_id: str
    number: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Walk the kill ladder on a command or program, queued or running; with `now` kill at once. Its own answer then
    says `cancelled`. Answer: `Done`, or error `NOT_RUNNING`."""

    exec_id: str
    now: bool = False


@dataclass(frozen=True, slots=True)
class Resize:
    """Change the size of the terminal of a running command or program. Answer: `Done`, or error `NOT_RUNNING`."""

    exec_id: str
    size: TerminalSize


@dataclass(frozen=True, slots=True)
class OpenShell:
    """Start one more persistent shell. It has a directory, environment and process tree of its own and shares files
    and network. `user` as in `RunProgram`. Answer: `ShellInfo` at once, the shell starts meanwhile; errors `EXISTS`,
    `TOO_MANY`, `NO_SHELL`, `NO_SUCH_USER`."""

    name: str
    shell: str = "bash"
    cwd: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    user: str | None = None
    group: BirthCgroup | None = None


@dataclass(frozen=True, slots=True)
class CloseShell:
    """End a named shell and everything it started; its commands end as cancelled. Answer: `Done`, or `NOT_RUNNING`."""

    name: str


@dataclass(frozen=True, slots=True)
class Watch:
    """Tell what happens in the sandbox: EVENT frames (`PortOpened`, `PortClosed`) until the connection is closed, or
    CANCEL, which is answered by `Done`. STARTED comes first; a port that is open then is told, too."""


# Answers ----------------------------------------------------------------------------------------------------------

Cause = Literal["exited", "signalled", "timed_out", "cancelled", "shell_died"]
"""Cause of a run's end as far as PID 1 can see. The daemon refines it (out of memory, pids limit, sandbox died)."""


@dataclass(frozen=True, slots=True)
class ShellInfo:
    """A persistent shell: the absolute path of its program, its directory (surrogate-escaped), and its group if it has
    one."""

    name: str
    path: str
    cwd: str
    group: str = ""


WITHOUT_SHELL = "none"


@dataclass(frozen=True, slots=True)
class HelloReply:
    """`shell` is the absolute path of the default shell inside the sandbox; empty before `Setup`, `WITHOUT_SHELL` in an
    image that has none. `shells` are the others there are. `version` is PID 1's; without the field it is the oldest.
    `has_changes`: variables were set since `Setup`."""

    shell: str
    cwd: str
    shells: tuple[ShellInfo, ...] = ()
    version: int = OLDEST_VERSION
    has_changes: bool = False


@dataclass(frozen=True, slots=True)
class Started:
    """The command was handed to the shell, or the program was started; `pid` is its pid inside, 0 in a shell."""

    exec_id: str
    pid: int = 0


@dataclass(frozen=True, slots=True)
class ExecReply:
    """The end of a command. `exit_code` is 128+n after signal n; `signal` is n or None.

    `cwd` is the shell's directory afterwards (surrogate-escaped); `shell_restarted`: the shell process is a new one.
    `disk_full`: it failed, and one of the file systems it may write to had no room left; `disk_filled`: and each had
    some when it had just begun. Of what it and the processes it waited for used, -1 where unknown: `cpu_us`,
    `peak_bytes` (programs only; PID 1's own size, some 15 MB, is the least it says), `written_bytes` (to storage,
    proc_pid_io(5) `write_bytes`).
    """

    exec_id: str
    exit_code: int
    signal: int | None
    cause: Cause
    cwd: str
    duration_us: int
    shell_restarted: bool
    disk_full: bool = False
    cpu_us: int = -1
    peak_bytes: int = -1
    written_bytes: int = -1
    disk_filled: bool = False


@dataclass(frozen=True, slots=True)
class PortOpened:
    """A process inside listens on a TCP port. `address` is the one it is bound to, `0.0.0.0` or `::` for all."""

    port: int
    address: str


@dataclass(frozen=True, slots=True)
class PortClosed:
    """No process listens there any more."""

    port: int
    address: str


@dataclass(frozen=True, slots=True)
class Done:
    """The request was performed; for a file request `path` is the resolved path."""

    path: str = ""


ErrorCode = Literal[
    "FILE_NOT_FOUND",
    "IS_DIRECTORY",
    "NOT_A_FILE",
    "PERMISSION_DENIED",
    "PATH_OUTSIDE",
    "INVALID_PATH",
    "DISK_FULL",
    "TOO_LARGE",
    "NO_SHELL",
    "SHELL_FAILED",
    "BAD_REQUEST",
    "IO_ERROR",
    "NOT_RUNNING",
    "EXISTS",
    "TOO_MANY",
    "NO_SUCH_SHELL",
    "NO_SUCH_USER",
    "NOT_A_DIRECTORY",
    "NOT_EMPTY",
    "BAD_ARCHIVE",
    "QUEUE_TIMEOUT",
]


@dataclass(frozen=True, slots=True)
class Error:
    """A request failed; the connection stays usable."""

    code: ErrorCode
    message: str


# Kept runs ----------------------------------------------------------------------------------------------------------
# A kept run goes on when its connection breaks, as long as its output finds room. Its end is kept until `ForgetRuns`.

MAX_TICKET_CHARS = 4096
MAX_LISTED_RUNS = 32
"""Most runs in one `RunList`: with tickets of the greatest length they still fit into one frame."""

KEPT_RUN_BYTES = 3 * 1024 * 1024
"""Most output of one run that PID 1 keeps. More than can be on its way: unsent, in the socket, and received by the
daemon but not stored."""

KEPT_PIECE_BYTES = 20
"""A piece that PID 1 keeps counts so much beside its bytes. It takes 120; but with more than a sixth of that, the tiny
pieces that can be on their way would not be kept."""


@dataclass(frozen=True, slots=True)
class ListRuns:
    """List the kept runs with a number above `after`, in order. Answer: `RunList`."""

    after: int = 0


@dataclass(frozen=True, slots=True)
class AttachRun:
    """Go on with a kept run: this connection takes the place of the one that the run was begun on. The peer knows the
    streams up to the offsets. Answer: STARTED with `Attached`, output frames, then `ExecReply`; errors `NOT_RUNNING`
    (there is no such run), `BAD_REQUEST` (the run has not written that much)."""

    exec_id: str
    stdout_offset: int = 0
    stderr_offset: int = 0


@dataclass(frozen=True, slots=True)
class ForgetRuns:
    """Forget the ends of runs; one that still goes on is cancelled. Answer: `Done`."""

    exec_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunEntry:
    """One kept run. `has_begun`: STARTED was sent; `input_ended`: all of its standard input has come."""

    number: int
    exec_id: str
    ticket: str
    has_begun: bool
    has_ended: bool
    input_ended: bool


@dataclass(frozen=True, slots=True)
class RunList:
    """One page of kept runs. `more`: there are more after the last number."""

    runs: tuple[RunEntry, ...]
    more: bool


@dataclass(frozen=True, slots=True)
class Attached:
    """Offsets at which the output that follows begins: those asked for, or later ones when output before them is not
    kept any more. `age_us` counts from the beginning of the run, 0 before it; `pid` as in `Started`."""

    exec_id: str
    stdout_offset: int
    stderr_offset: int
    age_us: int
    pid: int = 0


__all__ = [
    "MAX_CONTEXT",
    "MAX_EDITS",
    "MAX_MATCHES",
    "MAX_SEARCHED_BYTES",
    "MAX_WATCHES",
    "AppendUpload",
    "BeginUpload",
    "ChangeKind",
    "ChangeMode",
    "ChangeOwner",
    "CommitUpload",
    "CopyFile",
    "DropUpload",
    "EditFiles",
    "Edited",
    "EditedFile",
    "FileChange",
    "FileEntry",
    "FileInfo",
    "FileKind",
    "FileMatch",
    "FilePart",
    "FilePut",
    "FileRequest",
    "FileStats",
    "FoundFiles",
    "Frame",
    "FrameDecoder",
    "GetFile",
    "GlobFiles",
    "Kind",
    "ListFiles",
    "Listing",
    "LookUpload",
    "MakeDirectory",
    "Measure",
    "Measured",
    "MoveFile",
    "Pack",
    "Packed",
    "ProtocolError",
    "PutFile",
    "ReadFile",
    "RemoveFile",
    "SearchFiles",
    "Searched",
    "StatFile",
    "StatFiles",
    "Unedited",
    "Unmatched",
    "Unpack",
    "UploadState",
    "ViewFile",
    "Viewed",
    "WatchFiles",
    "Watching",
    "WriteFile",
    "encode_frame",
]


REQUESTS = Vocabulary(
    *(Hello, Setup, SetEnv, Thawed, Exec, RunProgram, Signal, Cancel, Resize, OpenShell, CloseShell, Watch),
    *(ListRuns, AttachRun, ForgetRuns, ReadFile, WriteFile),
    *(BeginUpload, AppendUpload, LookUpload, CommitUpload, DropUpload),
    *(MakeDirectory, MoveFile, CopyFile, ChangeMode, ChangeOwner),
    *(GlobFiles, SearchFiles, WatchFiles),
    *(EditFiles, ViewFile, GetFile, PutFile, ListFiles, StatFile, StatFiles, RemoveFile, Measure, Pack, Unpack),
)
ANSWERS = Vocabulary(
    *(HelloReply, Started, Attached, FileInfo, ExecReply, ShellInfo, RunList, Done, Error, PortOpened, PortClosed),
    *(FoundFiles, FileMatch, Searched, Watching, FileChange, UploadState),
    *(Edited, Unedited, Viewed, FilePart, FilePut, Unmatched, FileEntry, FileStats, Listing, Measured, Packed),
)
"""Bodies of STARTED (`Started`, `Attached`, `FileInfo`, `FilePart`, `Watching`), EVENT (`PortOpened`, `PortClosed`),
ERROR (`Error`), lines of DATA (`FileMatch`, `FileChange`) and REPLY (all others)."""
