"""Questions about files, and archives of them, over a link to a sandbox without programs.

Leaving a context early closes the connection, which ends the work in the sandbox. Everything that comes is hostile and
checked by `runner_link`; names and paths are handed on as they are.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TypeVar

import trio

from runner.wire import protocol
from runner.wire.protocol import CHUNK_BYTES, Kind
from sandkasten.actors.workspaces.transfer import check_path, require
from sandkasten.links.runner import RunnerConnection, RunnerLink, check_piece, decode_answer
from sandkasten.model.errors import RunnerProtocolError
from sandkasten.model.workspace import FileInfo, FileListing, Packed, WorkspaceUsage

T = TypeVar("T")

_ANSWER_S = 60.0
_LONG_S = 1800.0
"""Until the first byte or the end of what walks a whole tree."""
_MEASURE_ENTRIES = 1_000_000
_MEASURE_MS = 5_000


async def list_files(link: RunnerLink, path: str, *, after: str, limit: int) -> FileListing:
    """See `WorkspaceSupervisor.list_files`."""
    check_path(path)
    listing = await _ask(link, protocol.ListFiles(path, after, limit), protocol.Listing)
    return FileListing(listing.path, tuple(_file_info(each) for each in listing.entries), listing.more)


async def stat_file(link: RunnerLink, path: str) -> FileInfo:
    """See `WorkspaceSupervisor.stat_file`."""
    check_path(path)
    return _file_info(await _ask(link, protocol.StatFile(path), protocol.FileEntry))


async def remove_file(link: RunnerLink, path: str, *, recursive: bool) -> str:
    """See `WorkspaceSupervisor.remove_file`."""
    check_path(path)
    return (await _ask(link, protocol.RemoveFile(path, recursive), protocol.Done, patience_s=_LONG_S)).path


async def measure(link: RunnerLink) -> WorkspaceUsage:
    """Count what is in the workspace, within bounds."""
    request = protocol.Measure(".", _MEASURE_ENTRIES, _MEASURE_MS)
    found = await _ask(link, request, protocol.Measured)
    return WorkspaceUsage(
        found.entries, found.files, found.size_bytes, found.disk_bytes, found.complete, datetime.now(UTC)
    )


async def _ask(link: RunnerLink, request: object, answer: type[T], *, patience_s: float = _ANSWER_S) -> T:
    async with link.connection() as connection:
        await connection.send_request(request)
        return require(await connection.receive_answer(deadline=trio.current_time() + patience_s), answer)


def _file_info(entry: protocol.FileEntry) -> FileInfo:
    return FileInfo(
        name=entry.name,
        kind=entry.kind,
        size_bytes=entry.size_bytes,
        mode=entry.mode,
        owner=entry.owner,
        modified_us=entry.mtime_us,
        target=entry.target,
        path=entry.path,
    )


class LocalArchiveReader:
    """See `supervisor_workspaces.ArchiveReader`. `first` was received already."""

    def __init__(self, connection: RunnerConnection, first: bytes) -> None:
        self._connection = connection
        self._first: bytes | None = first
        self.packed: Packed | None = None

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        if self.packed is not None:
            raise StopAsyncIteration
        kind, body = await self._connection.receive(deadline=trio.current_time() + _LONG_S)
        if kind is Kind.DATA:
            check_piece(body, "an archive")
            return body
        self.packed = _packed(require(decode_answer(kind, body), protocol.Packed))
        raise StopAsyncIteration


@asynccontextmanager
async def open_pack(link: RunnerLink, path: str) -> AsyncIterator[LocalArchiveReader]:
    """Begin to pack a directory; what can't be packed is said here."""
    check_path(path)
    async with link.connection() as connection:
        await connection.send_request(protocol.Pack(path))
        kind, body = await connection.receive(deadline=trio.current_time() + _LONG_S)
        if kind is not Kind.DATA:  # an archive has an end mark at the least
            require(decode_answer(kind, body), protocol.FileInfo)
            raise RunnerProtocolError("a file instead of an archive")
        check_piece(body, "an archive")
        yield LocalArchiveReader(connection, body)


class Unpacking:
    """An archive on its way into a sandbox."""

    def __init__(self, connection: RunnerConnection) -> None:
        self._connection = connection

    async def send(self, data: bytes) -> None:
        for start in range(0, len(data), CHUNK_BYTES):
            await self._connection.send(Kind.DATA, data[start : start + CHUNK_BYTES])

    async def end(self) -> Packed:
        """Say that this was all, and wait until it is unpacked."""
        await self._connection.send(Kind.END)
        answer = await self._connection.receive_answer(deadline=trio.current_time() + _LONG_S)
        return _packed(require(answer, protocol.Packed))


@asynccontextmanager
async def open_unpack(link: RunnerLink, *, max_entries: int, max_bytes: int) -> AsyncIterator[Unpacking]:
    """Begin to unpack an archive; what is wrong with it is known at its end."""
    async with link.connection() as connection:
        await connection.send_request(protocol.Unpack(max_entries, max_bytes))
        yield Unpacking(connection)


def _packed(answer: protocol.Packed) -> Packed:
    return Packed(answer.entries, answer.size_bytes, answer.skipped)
