"""A supervisor in memory: sessions are records, runs follow a script, files are bytes. Knows no HTTP.

What a test wants to see (a command that was cancelled, a writer that was held up) is an event or a counter here.
"""

from __future__ import annotations

import posixpath
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from sandkasten.model import errors
from sandkasten.model.workspace import FileHead
from sandkasten.supervisor import Supervisor
from tests.fakes.commands import FakeRuns
from tests.fakes.runs import Run, Script
from tests.fakes.workspaces import FakeWorkspaces

__all__ = ["FakeSupervisor", "Run", "Script"]

ROOTS = ("/workspace", "/tmp", "/home/sandbox")
PIECE_BYTES = 64 * 1024


class FileReader:
    """A file of `size_bytes` that is never whole in memory unless it was written."""

    def __init__(self, head: FileHead, content: bytes | None) -> None:
        self.head = head
        self._content = content
        self._position = 0

    def __aiter__(self) -> FileReader:
        return self

    async def __anext__(self) -> bytes:
        await trio.lowlevel.checkpoint()
        start, self._position = self._position, min(self._position + PIECE_BYTES, self.head.size_bytes)
        if start == self._position:
            raise StopAsyncIteration
        return bytes(self._position - start) if self._content is None else self._content[start : self._position]


class FileWriter:
    def __init__(self, supervisor: FakeSupervisor, key: tuple[str, str]) -> None:
        self._supervisor = supervisor
        self._key = key
        self._content = bytearray()

    async def send(self, data: bytes) -> None:
        await self._supervisor.write_gate.wait()
        self._supervisor.bytes_written += len(data)
        if self._supervisor.is_keeping:
            self._content += data

    async def commit(self) -> str:
        await trio.lowlevel.checkpoint()
        self._supervisor.files[self._key] = bytes(self._content)
        return self._key[1]


class FakeSupervisor(FakeRuns, FakeWorkspaces):
    """`Supervisor` over dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        FakeWorkspaces.__init__(self)
        self.files: dict[tuple[str, str], bytes] = {}
        self.sizes: dict[str, int] = {}
        self.write_gate = trio.Event()
        self.write_gate.set()
        self.bytes_written = 0
        self.is_keeping = True

    @asynccontextmanager
    async def open_read(self, session_id: str, path: str, *, max_bytes: int) -> AsyncIterator[FileReader]:
        await self._live(session_id)
        resolved = self._resolve(path)
        content = self.files.get((session_id, resolved))
        if content is None and resolved not in self.sizes:
            raise errors.FileNotFound(f"no such file: {resolved}", path=resolved)
        size = self.sizes[resolved] if content is None else len(content)
        yield FileReader(FileHead(resolved, min(size, max_bytes), size > max_bytes), content)

    @asynccontextmanager
    async def open_write(self, session_id: str, path: str) -> AsyncIterator[FileWriter]:
        await self._live(session_id)
        yield FileWriter(self, (session_id, self._resolve(path)))

    def _resolve(self, path: str) -> str:
        resolved = posixpath.normpath(posixpath.join("/workspace", path))
        if resolved in ROOTS:
            raise errors.IsADirectory(f"is a directory: {resolved}", path=resolved)
        if not resolved.startswith(tuple(f"{root}/" for root in ROOTS)):
            raise errors.PathOutside(f"outside of the allowed roots: {resolved}", path=resolved)
        return resolved


def _is_whole(supervisor: FakeSupervisor) -> Supervisor:
    """Let the type checker compare this class with the interface."""
    return supervisor
