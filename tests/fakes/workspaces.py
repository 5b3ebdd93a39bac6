"""The part of the supervisor in memory that has workspaces: dictionaries of bytes. Knows no HTTP."""

from __future__ import annotations

import posixpath
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import attrs
import trio

from sandkasten.model import WORKSPACE_ID, errors
from sandkasten.model.workspace import (
    EVERYWHERE,
    FileHead,
    FileInfo,
    FileListing,
    Packed,
    Within,
    Workspace,
    WorkspacePatch,
    WorkspaceSpec,
    WorkspaceUsage,
    is_within,
)

TOP = "/workspace"
PIECE_BYTES = 64 * 1024


class MemoryFile:
    """`FileReader` and `ArchiveReader` over bytes."""

    def __init__(self, head: FileHead, content: bytes) -> None:
        self.head = head
        self.packed = Packed(1, len(content), 0)
        self._content = content

    def __aiter__(self) -> MemoryFile:
        return self

    async def __anext__(self) -> bytes:
        await trio.lowlevel.checkpoint()
        piece, self._content = self._content[:PIECE_BYTES], self._content[PIECE_BYTES:]
        if not piece:
            raise StopAsyncIteration
        return piece


class MemoryWriter:
    def __init__(self, files: dict[str, bytes], path: str) -> None:
        self._files, self._path, self._content = files, path, bytearray()

    async def send(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self._content += data

    async def commit(self) -> str:
        await trio.lowlevel.checkpoint()
        self._files[self._path] = bytes(self._content)
        return self._path


class MemoryUnpacking:
    """Keeps the archive as it came."""

    def __init__(self, owner: FakeWorkspaces, workspace_id: str) -> None:
        self._owner, self._workspace_id, self._content = owner, workspace_id, bytearray()

    async def send(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self._content += data

    async def commit(self) -> Packed:
        await trio.lowlevel.checkpoint()
        self._owner.make(self._workspace_id, WorkspaceSpec())
        self._owner.workspace_files[self._workspace_id] = {}
        self._owner.archives[self._workspace_id] = bytes(self._content)
        return Packed(1, len(self._content), 0)


class FakeWorkspaces:
    """`WorkspaceSupervisor` over dictionaries. `busy`: workspaces that somebody has; `unpacking`: takes archives;
    `bounds`: for whom only workspaces with these labels exist."""

    def __init__(self) -> None:
        self.bounds: Within = EVERYWHERE
        self.unpacking: type[MemoryUnpacking] = MemoryUnpacking
        self.known: dict[str, Workspace] = {}
        self.workspace_files: dict[str, dict[str, bytes]] = {}
        self.archives: dict[str, bytes] = {}
        self.busy: set[str] = set()

    def workspaces_within(self, within: Within) -> FakeWorkspaces:
        bounded = FakeWorkspaces()
        bounded.__dict__.update({**vars(self), "bounds": within})
        return bounded

    def make(self, workspace_id: str, spec: WorkspaceSpec) -> Workspace:
        now = datetime.now(UTC)
        labels = {**spec.labels, **self.bounds}
        made = self.known.setdefault(workspace_id, Workspace(workspace_id, now, now, labels, quota=spec.quota))
        self._require(workspace_id)
        self.workspace_files.setdefault(workspace_id, {})
        return made

    async def workspaces(self, *, after: str = "", limit: int = 1000, measure: bool = False) -> Sequence[Workspace]:
        await trio.lowlevel.checkpoint()
        found = [
            self.known[each]
            for each in sorted(self.known)
            if each > after and is_within(self.known[each].labels, self.bounds)
        ][:limit]
        return [self._measured(each) for each in found] if measure else found

    async def workspace(self, workspace_id: str, *, measure: bool = False) -> Workspace:
        await trio.lowlevel.checkpoint()
        self._files_of(workspace_id)
        found = self.known[workspace_id]
        return self._measured(found) if measure else found

    def _measured(self, workspace: Workspace) -> Workspace:
        sizes = [len(each) for each in self.workspace_files[workspace.id].values()]
        usage = WorkspaceUsage(len(sizes), len(sizes), sum(sizes), sum(sizes), True, workspace.created_at)
        return attrs.evolve(workspace, usage=usage)

    async def make_workspace(self, workspace_id: str, spec: WorkspaceSpec) -> Workspace:
        await trio.lowlevel.checkpoint()
        if not WORKSPACE_ID.match(workspace_id):
            raise errors.InvalidRequest("malformed workspace id", workspace_id="malformed")
        if workspace_id in self.known:
            raise errors.Conflict(f"there is a workspace {workspace_id!r} already", workspace_id=workspace_id)
        return self.make(workspace_id, spec)

    async def update_workspace(self, workspace_id: str, patch: WorkspacePatch) -> Workspace:
        found = await self.workspace(workspace_id)
        if patch.labels is not None:
            self.known[workspace_id] = found = attrs.evolve(found, labels=dict(patch.labels))
        if patch.quota_bytes is not None and found.quota is not None:
            quota = attrs.evolve(found.quota, size_bytes=patch.quota_bytes)
            self.known[workspace_id] = found = attrs.evolve(found, quota=quota)
        return found

    async def delete_workspace(self, workspace_id: str, *, force: bool = False) -> None:
        await self.workspace(workspace_id)
        if workspace_id in self.busy and not force:
            raise errors.WorkspaceBusy(f"workspace {workspace_id!r} is in use", workspace_id=workspace_id, sessions=[])
        self.busy.discard(workspace_id)
        del self.known[workspace_id], self.workspace_files[workspace_id]

    @asynccontextmanager
    async def open_workspace_read(self, workspace_id: str, path: str, *, max_bytes: int) -> AsyncIterator[MemoryFile]:
        await trio.lowlevel.checkpoint()
        files, resolved = self._files_of(workspace_id), self._inside(path)
        if resolved not in files:
            raise errors.FileNotFound(f"no such file: {resolved}")
        content = files[resolved]
        head = FileHead(resolved, min(len(content), max_bytes), len(content) > max_bytes)
        yield MemoryFile(head, content[:max_bytes])

    @asynccontextmanager
    async def open_workspace_write(self, workspace_id: str, path: str) -> AsyncIterator[MemoryWriter]:
        await trio.lowlevel.checkpoint()
        self.make(workspace_id, WorkspaceSpec())
        yield MemoryWriter(self.workspace_files[workspace_id], self._inside(path))

    async def list_files(
        self, workspace_id: str, path: str = ".", *, after: str = "", limit: int = 1000
    ) -> FileListing:
        await trio.lowlevel.checkpoint()
        files, top = self._files_of(workspace_id), self._inside(path)
        if top in files:
            raise errors.NotADirectory(f"no directory: {top}")
        inside = {each[len(top) + 1 :].partition("/")[0] for each in files if each.startswith(f"{top}/")}
        if not inside and top != TOP:
            raise errors.FileNotFound(f"no such file: {top}")
        names = [each for each in sorted(inside) if each > after]
        entries = [self._info(files, posixpath.join(top, each)) for each in names[:limit]]
        return FileListing(top, entries, more=len(names) > limit)

    async def stat_file(self, workspace_id: str, path: str) -> FileInfo:
        await trio.lowlevel.checkpoint()
        files, resolved = self._files_of(workspace_id), self._inside(path)
        found = self._info(files, resolved)
        if found.kind == "directory" and not any(each.startswith(f"{resolved}/") for each in files):
            raise errors.FileNotFound(f"no such file: {resolved}")
        return attrs.evolve(found, path=resolved)

    async def remove_file(self, workspace_id: str, path: str, *, recursive: bool = False) -> str:
        await trio.lowlevel.checkpoint()
        files, resolved = self._files_of(workspace_id), self._inside(path)
        beneath = [each for each in files if each.startswith(f"{resolved}/")]
        if beneath and not recursive:
            raise errors.NotEmpty(f"the directory is not empty: {resolved}")
        if not beneath and resolved not in files:
            raise errors.FileNotFound(f"no such file: {resolved}")
        for each in (resolved, *beneath):
            files.pop(each, None)
        return resolved

    @asynccontextmanager
    async def open_pack(self, workspace_id: str, path: str = ".") -> AsyncIterator[MemoryFile]:
        await self.workspace(workspace_id)
        yield MemoryFile(FileHead(path, 0, False), self.archives.get(workspace_id, b""))

    @asynccontextmanager
    async def open_unpack(self, workspace_id: str, *, replace: bool = False) -> AsyncIterator[MemoryUnpacking]:
        await trio.lowlevel.checkpoint()
        if workspace_id in self.known:
            self._require(workspace_id)
        if workspace_id in self.known and not replace:
            raise errors.Conflict(f"there is a workspace {workspace_id!r} already", workspace_id=workspace_id)
        yield self.unpacking(self, workspace_id)

    def _info(self, files: dict[str, bytes], path: str) -> FileInfo:
        name, content = posixpath.basename(path), files.get(path)
        if content is None:
            return FileInfo(name, "directory", 4096, 0o755, 1000, 0)
        return FileInfo(name, "file", len(content), 0o644, 1000, 0)

    def _files_of(self, workspace_id: str) -> dict[str, bytes]:
        self._require(workspace_id)
        return self.workspace_files[workspace_id]

    def _require(self, workspace_id: str) -> None:
        if workspace_id not in self.known or not is_within(self.known[workspace_id].labels, self.bounds):
            raise errors.WorkspaceNotFound(f"there is no workspace {workspace_id!r}", workspace_id=workspace_id)

    def _inside(self, path: str) -> str:
        resolved = posixpath.normpath(posixpath.join(TOP, path))
        if resolved != TOP and not resolved.startswith(f"{TOP}/"):
            raise errors.PathOutside(f"outside of the workspace: {resolved}")
        return resolved
