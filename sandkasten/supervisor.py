"""The supervisor's interface: one typed async protocol with no HTTP type in it.

REST, command line and library users stand on `Supervisor`; `app.open_supervisor` gives the local implementation
(`actors/tree.py`). Every method raises members of `errors.SandkastenError` only. Cancelling a call drops its answer;
a command opened with `open_exec` is cancelled when its context is left before it ended.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from sandkasten.model import (
    ExecEnd,
    ExecResult,
    ExecSpec,
    FileHead,
    Output,
    Readiness,
    Session,
    SessionPatch,
    SessionSpec,
    SessionStats,
    Status,
)


class ExecStream(Protocol):
    """A command that was handed to the shell. Iterate for its output, then read `end`.

    A reader that stops iterating stops the command's pipe, and nothing else.
    """

    @property
    def exec_id(self) -> str: ...

    def __aiter__(self) -> AsyncIterator[Output]:
        """Yield output until the command has ended and all of it was handed out."""
        ...

    async def wait_end(self) -> ExecEnd:
        """Drop what output is left, wait for the end and return it. After exhausted iteration it returns at once."""
        ...

    async def cancel(self) -> None:
        """Walk the kill ladder on this command; its end then says `cancelled`. The shell lives on."""
        ...


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


class Supervisor(Protocol):
    """Sessions of one node."""

    @property
    def node_id(self) -> str: ...

    async def create(self, spec: SessionSpec) -> Session:
        """Make a session and return it running.

        Raises:
            InvalidImage, InvalidRequest, Conflict, Capacity, BuildFailed.
        """
        ...

    async def get(self, session_id: str) -> Session:
        """Return a session in whatever state, ended ones included. Raises `SessionNotFound`."""
        ...

    async def list(self, *, status: Status | None = None, ended: bool = False, limit: int = 1000) -> Sequence[Session]:
        """Return sessions, newest first: the live ones, those of one status, or with `ended` all that are known."""
        ...

    async def update(self, session_id: str, patch: SessionPatch) -> Session:
        """Change a live session. Raises `SessionNotFound`, `SessionExpired`."""
        ...

    async def destroy(self, session_id: str) -> Session:
        """End a session and return its final state; on an ended one a no-op. Raises `SessionNotFound`."""
        ...

    async def stats(self, session_id: str) -> SessionStats:
        """Raises `SessionNotFound`, `SessionExpired`."""
        ...

    def open_exec(self, session_id: str, spec: ExecSpec) -> AbstractAsyncContextManager[ExecStream]:
        """Run a command. Entering waits for its turn in the shell; leaving early cancels it.

        Raises:
            SessionNotFound, SessionExpired, ShellBusy, TooLarge, InvalidRequest, RunnerLost.
        """
        ...

    async def exec(self, session_id: str, spec: ExecSpec) -> ExecResult:
        """Run a command to its end and return its capped output. A timeout is a result with cause `timed_out`."""
        ...

    def open_read(self, session_id: str, path: str, *, max_bytes: int) -> AbstractAsyncContextManager[FileReader]:
        """Open a regular file for reading, as the sandbox user; relative paths are under `/workspace`.

        Raises:
            SessionNotFound, SessionExpired, FileNotFound, IsADirectory, NotAFile, PermissionDenied, PathOutside.
        """
        ...

    def open_write(self, session_id: str, path: str) -> AbstractAsyncContextManager[FileWriter]:
        """Replace a file, as the sandbox user, making its parents; errors as for `open_read`, and `DiskFull`."""
        ...

    async def readiness(self) -> Readiness:
        """Check store, fork server and disk."""
        ...
