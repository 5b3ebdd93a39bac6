"""Reading and writing one file of a sandbox over a borrowed runner link; implements `FileReader` and `FileWriter`.

Leaving a context early closes the connection, which aborts the transfer in the sandbox: a half-written file never
replaces the old one. The path is hostile and resolved inside the sandbox only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import trio

from runner.wire import protocol
from runner.wire.protocol import CHUNK_BYTES, Kind
from sandkasten.links.runner import RunnerConnection, RunnerLink, check_piece, decode_answer
from sandkasten.model.errors import (
    Capacity,
    DiskFull,
    FileNotFound,
    InvalidRequest,
    IsADirectory,
    NotADirectory,
    NotAFile,
    NotEmpty,
    PathOutside,
    PermissionDenied,
    RunnerProtocolError,
    SandboxError,
    SandkastenError,
    TooLarge,
)
from sandkasten.model.workspace import FileHead

T = TypeVar("T")

_ANSWER_S = 60.0
"""How long PID 1 may take for the next piece of a file."""

_SYNCED_S = 1800.0
"""How long a file may take until it is on the disk."""

_REFUSALS: dict[str, type[SandkastenError]] = {
    "FILE_NOT_FOUND": FileNotFound,
    "IS_DIRECTORY": IsADirectory,
    "NOT_A_FILE": NotAFile,
    "PERMISSION_DENIED": PermissionDenied,
    "NOT_A_DIRECTORY": NotADirectory,
    "NOT_EMPTY": NotEmpty,
    "PATH_OUTSIDE": PathOutside,
    "BAD_ARCHIVE": InvalidRequest,
    "TOO_MANY": Capacity,
    "INVALID_PATH": InvalidRequest,
    "DISK_FULL": DiskFull,
    "TOO_LARGE": TooLarge,
}


class LocalFileReader:
    """See `supervisor.FileReader`. No more comes of it than was asked for, whatever the runner sends."""

    def __init__(self, connection: RunnerConnection, info: protocol.FileInfo, max_bytes: int) -> None:
        self._connection = connection
        self._left_bytes = max_bytes
        self.head = FileHead(path=info.path, size_bytes=info.size_bytes, truncated=info.truncated)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        kind, body = await self._connection.receive(deadline=trio.current_time() + _ANSWER_S)
        if kind is Kind.DATA:
            check_piece(body, "a file")
            self._left_bytes -= len(body)
            if self._left_bytes < 0:
                raise RunnerProtocolError("more of a file than was asked for")
            return body
        require(decode_answer(kind, body), protocol.Done)
        raise StopAsyncIteration


class LocalFileWriter:
    """See `supervisor.FileWriter`."""

    def __init__(self, connection: RunnerConnection, *, patience_s: float) -> None:
        self._connection, self._patience_s = connection, patience_s

    async def send(self, data: bytes) -> None:
        for start in range(0, len(data), CHUNK_BYTES):
            await self._connection.send(Kind.DATA, data[start : start + CHUNK_BYTES])

    async def commit(self) -> str:
        await self._connection.send(Kind.END)
        answer = await self._connection.receive_answer(deadline=trio.current_time() + self._patience_s)
        done: protocol.Done = require(answer, protocol.Done)
        return done.path


@asynccontextmanager
async def open_reader(link: RunnerLink, path: str, max_bytes: int) -> AsyncIterator[LocalFileReader]:
    """Open `path` for reading; raises what `Supervisor.open_read` says."""
    check_path(path)
    async with link.connection() as connection:
        await connection.send_request(protocol.ReadFile(path=path, max_bytes=max_bytes))
        answer = await connection.receive_answer(deadline=trio.current_time() + _ANSWER_S)
        info = require(answer, protocol.FileInfo)
        yield LocalFileReader(connection, info, max_bytes)


@asynccontextmanager
async def open_writer(link: RunnerLink, path: str, *, sync: bool = False) -> AsyncIterator[LocalFileWriter]:
    """Start replacing `path`; what is wrong with it may only be known at `commit`, which with `sync` returns when all
    is on the disk."""
    check_path(path)
    async with link.connection() as connection:
        await connection.send_request(protocol.WriteFile(path=path, sync=sync))
        yield LocalFileWriter(connection, patience_s=_SYNCED_S if sync else _ANSWER_S)


def check_path(path: str) -> None:
    """Refuse what no path can be. Raises `InvalidRequest`."""
    if not path or "\0" in path:
        raise InvalidRequest("malformed path", path="empty" if not path else "NUL character")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise InvalidRequest("malformed path", path="lone surrogate") from None


def require(answer: object, expected: type[T]) -> T:
    """Return the answer if it is of the expected class, or raise the refusal it is."""
    if isinstance(answer, expected):
        return answer
    if isinstance(answer, protocol.Error):
        raise _REFUSALS.get(answer.code, SandboxError)(answer.message)
    raise RunnerProtocolError(f"{type(answer).__name__} while a file is transferred")
