"""The part of the supervisor's interface that is about persistent workspaces and their files; no HTTP type in it.

Files of a workspace are reached without a session, in a sandbox of their own that holds nothing else, with the sandbox
user's rights. Paths are relative to the workspace or begin with `/workspace`; what leads outside is `PathOutside`.
Every method on a workspace that isn't there raises `WorkspaceNotFound`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from sandkasten.model.workspace import (
    FileHead,
    FileInfo,
    FileListing,
    Packed,
    Within,
    Workspace,
    WorkspacePatch,
    WorkspaceSpec,
)


class FileReader(Protocol):
    """An open file in the sandbox; iterate for its bytes, in pieces of at most 64 KiB."""

    @property
    def head(self) -> FileHead: ...

    def __aiter__(self) -> AsyncIterator[bytes]: ...


class FileWriter(Protocol):
    """A file being replaced. `send` pieces, then `commit`; leaving the context without it keeps the old file."""

    async def send(self, data: bytes) -> None: ...

    async def commit(self) -> str:
        """Put the new content in place atomically and return the resolved path."""
        ...


class ArchiveReader(Protocol):
    """A tar archive being made; iterate for its bytes, in pieces of at most 64 KiB."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    @property
    def packed(self) -> Packed | None:
        """What went into it, once it is complete."""
        ...


class ArchiveWriter(Protocol):
    """A tar archive being unpacked. `send` pieces, then `commit`; leaving the context without it undoes all of it."""

    async def send(self, data: bytes) -> None: ...

    async def commit(self) -> Packed:
        """Make what was unpacked the workspace. Raises `InvalidRequest` (a bad archive), `TooLarge`, `DiskFull`."""
        ...


class WorkspaceSupervisor(Protocol):
    """Workspaces of one node."""

    def workspaces_within(self, within: Within) -> WorkspaceSupervisor:
        """Return the same for somebody for whom only workspaces with these labels exist. What they make has them; a
        name that others took is `WorkspaceNotFound`, and `Conflict` for `make_workspace`."""
        ...

    async def workspaces(self, *, after: str = "", limit: int = 1000, measure: bool = False) -> Sequence[Workspace]:
        """Return workspaces in the order of their ids, those behind `after`. With `measure` as many of them have a
        `usage` as could be measured in some seconds."""
        ...

    async def workspace(self, workspace_id: str, *, measure: bool = False) -> Workspace:
        """Return one workspace. What was measured within the last half minute is not measured again."""
        ...

    async def make_workspace(self, workspace_id: str, spec: WorkspaceSpec) -> Workspace:
        """Make a workspace. Raises `Conflict` (there is one), `InvalidRequest` (the id)."""
        ...

    async def update_workspace(self, workspace_id: str, patch: WorkspacePatch) -> Workspace: ...

    async def delete_workspace(self, workspace_id: str, *, force: bool = False) -> None:
        """Delete a workspace and all of its files. Raises `WorkspaceBusy` while a session has it, or files of it are
        being transferred; with `force` those sessions are ended first."""
        ...

    def open_workspace_read(
        self, workspace_id: str, path: str, *, max_bytes: int
    ) -> AbstractAsyncContextManager[FileReader]:
        """As `Supervisor.open_read`."""
        ...

    def open_workspace_write(self, workspace_id: str, path: str) -> AbstractAsyncContextManager[FileWriter]:
        """As `Supervisor.open_write`, and makes the workspace. What `commit` has returned for is on the disk."""
        ...

    async def list_files(
        self, workspace_id: str, path: str = ".", *, after: str = "", limit: int = 1000
    ) -> FileListing:
        """List a directory, entries whose names come behind `after`. At most 1000, or fewer, at once.

        Raises:
            FileNotFound, NotADirectory, PermissionDenied, PathOutside.
        """
        ...

    async def stat_file(self, workspace_id: str, path: str) -> FileInfo:
        """Look at what is at a path; of a link, at the link."""
        ...

    async def remove_file(self, workspace_id: str, path: str, *, recursive: bool = False) -> str:
        """Remove what is at a path (of a link, the link) and return the resolved path.

        Raises:
            NotEmpty: a directory with something in it, without `recursive`.
            FileNotFound, PermissionDenied, PathOutside.
        """
        ...

    def open_pack(self, workspace_id: str, path: str = ".") -> AbstractAsyncContextManager[ArchiveReader]:
        """Make a tar archive of a directory. Raises `PermissionDenied`, before anything is read, when the sandbox user
        must not read all of it."""
        ...

    def open_unpack(self, workspace_id: str, *, replace: bool = False) -> AbstractAsyncContextManager[ArchiveWriter]:
        """Make a workspace of a tar archive.

        Raises:
            Conflict: there is one, and it is not to be replaced.
            WorkspaceBusy: the one to be replaced is in use.
        """
        ...
