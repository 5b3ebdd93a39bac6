"""The contract between the daemon and PID 1 of a sandbox: frames, messages, limits. Sans-I/O.

One `AF_UNIX SOCK_STREAM` connection carries one request at a time, so the kernel does the flow control and closing the
connection cancels what runs on it; after the final frame the connection is idle and may carry the next request.

    daemon → runner   REQUEST, then while it runs: DATA* END (stdin or upload bytes), CANCEL
    runner → daemon   STARTED?, then STDOUT / STDERR / DATA*, and exactly one final REPLY or ERROR

The daemon treats every byte from the runner as hostile: the decoder refuses oversized and unknown frames and stays in
error afterwards; `wire.Vocabulary` refuses every body that is not exactly one of the messages below.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass, field
from typing import Literal

from runner.wire import ProtocolError, Vocabulary

__all__ = ["Frame", "FrameDecoder", "Kind", "ProtocolError", "encode_frame"]

PROTOCOL_VERSION = 1

MAX_REQUEST_BYTES = 8 * 1024 * 1024
"""Largest frame body the runner accepts: a 1 MiB command, JSON-escaped at its worst."""

MAX_FRAME_BYTES = 256 * 1024
"""Largest frame body the daemon accepts from a runner. Output and file data come in pieces of at most 64 KiB."""

CHUNK_BYTES = 64 * 1024
"""What the runner reads from a pipe or file at once, and so the largest DATA, STDOUT or STDERR body it sends."""

_HEADER = struct.Struct(">IB")
HEADER_BYTES = _HEADER.size


class Kind(enum.IntEnum):
    """What a frame's body is."""

    REQUEST = 0x01
    DATA = 0x02
    END = 0x03
    CANCEL = 0x04
    STARTED = 0x10
    STDOUT = 0x11
    STDERR = 0x12
    REPLY = 0x13
    ERROR = 0x14


FROM_DAEMON = frozenset({Kind.REQUEST, Kind.DATA, Kind.END, Kind.CANCEL})
FROM_RUNNER = frozenset({Kind.DATA, Kind.STARTED, Kind.STDOUT, Kind.STDERR, Kind.REPLY, Kind.ERROR})

Frame = tuple[Kind, bytes]


def encode_header(kind: Kind, length: int) -> bytes:
    """Return the header of a frame whose body of `length` bytes follows (for `sendmsg` without a copy)."""
    return _HEADER.pack(length, kind)


def encode_frame(kind: Kind, body: bytes = b"") -> bytes:
    """Return one whole frame."""
    return _HEADER.pack(len(body), kind) + body


class FrameDecoder:
    """Split a byte stream into frames; an iterator that stops when the buffered bytes hold no whole frame.

    After a `ProtocolError` it stays in error: every later `feed` or `next` raises again.
    """

    def __init__(self, allowed: frozenset[Kind], *, max_body_bytes: int) -> None:
        self._allowed = allowed
        self._max_body_bytes = max_body_bytes
        self._buffer = bytearray()
        self._error: str | None = None

    def feed(self, data: bytes) -> None:
        """Add received bytes. At most one frame more than what `next` consumed is ever buffered by a caller that
        iterates to the end after each `feed`."""
        self._check()
        self._buffer += data

    @property
    def buffered_bytes(self) -> int:
        """Bytes received and not yet handed out."""
        return len(self._buffer)

    def __iter__(self) -> FrameDecoder:
        return self

    def __next__(self) -> Frame:
        self._check()
        if len(self._buffer) < HEADER_BYTES:
            raise StopIteration
        length, number = _HEADER.unpack_from(self._buffer)
        if number not in self._allowed:
            self._fail(f"frame kind {number:#04x} is not allowed here")
        if length > self._max_body_bytes:
            self._fail(f"frame of {length} bytes exceeds {self._max_body_bytes}")
        if len(self._buffer) < HEADER_BYTES + length:
            raise StopIteration
        body = bytes(memoryview(self._buffer)[HEADER_BYTES : HEADER_BYTES + length])
        del self._buffer[: HEADER_BYTES + length]
        return Kind(number), body

    def _check(self) -> None:
        if self._error is not None:
            raise ProtocolError(self._error)

    def _fail(self, message: str) -> None:
        self._error = message
        self._buffer.clear()
        raise ProtocolError(message)


# Requests ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """Ask who answers. Sent once on a new link and again at adoption. Answer: `HelloReply`."""

    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Setup:
    """First request to a new sandbox: start the default shell. Answered at once; the shell starts meanwhile.

    `env` is added to the documented base environment of every command; `shell` is the preferred shell's name
    (`bash` or `sh`), the runner falls back to what the image has. Answer: `HelloReply`, or error `NO_SHELL`.
    """

    env: dict[str, str] = field(default_factory=dict)
    shell: str = "bash"
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Exec:
    """Run `command` in the persistent shell. Answer: STARTED, output frames, then `ExecReply`.

    `timeout_ms` counts from STARTED; `None` means none. `cwd` and `env` apply to this command only.
    With `stdin` the following DATA frames are its standard input up to END, otherwise it is `/dev/null`.
    """

    exec_id: str
    command: str
    timeout_ms: int | None = None
    cwd: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    stdin: bool = False


@dataclass(frozen=True, slots=True)
class ReadFile:
    """Read a regular file as the sandbox user. Answer: STARTED with `FileInfo`, DATA*, then `Done`."""

    path: str
    max_bytes: int


@dataclass(frozen=True, slots=True)
class WriteFile:
    """Replace a file atomically with the DATA frames up to END, as the sandbox user, making its parents.

    An existing file keeps its mode; a new one gets 0644. Closing before END leaves the old file untouched.
    Answer: `Done` with the resolved path.
    """

    path: str


# Answers ----------------------------------------------------------------------------------------------------------

Cause = Literal["exited", "signalled", "timed_out", "cancelled", "shell_died"]
"""How a command ended as far as PID 1 can see; the daemon refines it (out of memory, pids limit, sandbox died)."""


@dataclass(frozen=True, slots=True)
class HelloReply:
    """`shell` is the absolute path of the default shell inside the sandbox; empty before `Setup`."""

    shell: str
    cwd: str
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Started:
    """The command was handed to the shell."""

    exec_id: str


@dataclass(frozen=True, slots=True)
class FileInfo:
    """`path` is resolved, absolute, inside the sandbox; bytes that are not UTF-8 are surrogate-escaped."""

    path: str
    size_bytes: int
    truncated: bool


@dataclass(frozen=True, slots=True)
class ExecReply:
    """The end of a command. `exit_code` is 128+n after signal n; `signal` is n or None.

    `cwd` is the shell's directory afterwards (surrogate-escaped); `shell_restarted`: the shell process is a new one.
    """

    exec_id: str
    exit_code: int
    signal: int | None
    cause: Cause
    cwd: str
    duration_us: int
    shell_restarted: bool


@dataclass(frozen=True, slots=True)
class Done:
    """A file request succeeded on this resolved path."""

    path: str


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
]


@dataclass(frozen=True, slots=True)
class Error:
    """A request failed; the connection stays usable."""

    code: ErrorCode
    message: str


REQUESTS = Vocabulary(Hello, Setup, Exec, ReadFile, WriteFile)
ANSWERS = Vocabulary(HelloReply, Started, FileInfo, ExecReply, Done, Error)
"""Bodies of STARTED (`Started`, `FileInfo`), REPLY (`HelloReply`, `ExecReply`, `Done`) and ERROR (`Error`) frames."""
