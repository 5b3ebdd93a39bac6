"""Requests for files that many tests make, on the files of a session or a workspace."""

from __future__ import annotations

import fcntl
import struct
from pathlib import Path

from runner.wire.protocol import (
    Done,
    Error,
    FileEntry,
    FileRequest,
    GetFile,
    ListFiles,
    Listing,
    Pack,
    Packed,
    RemoveFile,
    StatFile,
)
from sandkasten.supervisor import Files, WorkspaceSupervisor

_FIEMAP, _HEAD, _EXTENT, _DELALLOC = 0xC020660B, struct.Struct("=2Q4I"), struct.Struct("=5Q4I"), 0x4
"""ioctl_fiemap(2): the request, `struct fiemap`, `struct fiemap_extent`, and the mark of what has no place yet."""


def waits_for_disk(path: Path) -> bool:
    """Return whether the beginning of a file is in memory alone: ext4, xfs and btrfs give it no place before."""
    found = bytearray(_HEAD.pack(0, 1 << 62, 0, 0, 1, 0) + bytes(_EXTENT.size))
    with path.open("rb") as file:
        fcntl.ioctl(file, _FIEMAP, found)
    return bool(_EXTENT.unpack_from(found, _HEAD.size)[5] & _DELALLOC)


async def listed(files: Files, path: str = ".", *, after: str = "") -> Listing:
    """Return the entries of a directory, at most 1000."""
    return await files.ask(ListFiles(path, after), Listing)


async def looked_at(files: Files, path: str) -> FileEntry:
    """Return the properties of a path, of a link itself."""
    return await files.ask(StatFile(path), FileEntry)


async def removed(files: Files, path: str, *, recursive: bool = False) -> str:
    """Remove a path, and return where it was."""
    return (await files.ask(RemoveFile(path, recursive), Done)).path


async def read(files: Files, path: str, *, max_bytes: int = 1 << 20) -> bytes:
    """Return the content of a file."""
    async with files.open_read(path, max_bytes=max_bytes) as reader:
        return b"".join([piece async for piece in reader])


async def written(files: Files, path: str, content: bytes) -> str:
    """Replace a file, and return its resolved path."""
    async with files.open_write(path) as writer:
        await writer.send(content)
        return await writer.commit()


async def packed(files: Files, path: str = ".") -> tuple[bytes, Packed]:
    """Return a tar archive of a directory, and what is in it."""
    async with files.stream(Pack(path)) as stream:
        archive = b"".join([piece async for piece in stream])
        return archive, await stream.answer(Packed)


async def unpacked(
    workspaces: WorkspaceSupervisor, workspace_id: str, archive: bytes, *, replace: bool = False
) -> Packed:
    """Make a workspace of a tar archive, and return what is in it."""
    async with workspaces.open_unpack(workspace_id, replace=replace) as writer:
        await writer.send(archive)
        return await writer.commit()


async def refusal_of(files: Files, request: FileRequest, content: bytes | None = None) -> str:
    """Return the code of a request's error, or `done`. `content`: of a request that takes some."""
    async with files.stream(request) as stream:
        if content is not None:
            await stream.send(content)
            answer: object = await stream.end(object)
        else:
            answer = await (stream.head if isinstance(request, GetFile) else stream.answer)(object)
    return answer.code if isinstance(answer, Error) else "done"
