"""The supervisor's interface: one typed async protocol with no HTTP type in it.

REST, WebSocket, command line and library users stand on `Supervisor`; `app.open_supervisor` gives the local
implementation (`actors/tree.py`). Every method raises members of `errors.SandkastenError` only. Cancelling a call drops
its answer.

Commands, processes and terminals are all runs: each has an id, a log of its output that is kept for a while after its
end, and at most one owner who may leave. A run that was detached, or never had an owner, goes on by itself.

The part of the supervisor's interface that is about persistent workspaces and their files; no HTTP type in it.

Files of a workspace are reached without a session, in a sandbox of their own that holds nothing else, with the sandbox
user's rights. Paths are relative to the workspace or begin with `/workspace`; what leads outside is `PathOutside`.
Every method on a workspace that isn't there raises `WorkspaceNotFound`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from prometheus_client.metrics_core import Metric

from sandkasten.model import (
    Event,
    ExecEnd,
    ExecInfo,
    ExecResult,
    ExecSpec,
    OnDisconnect,
    Output,
    OutputSlice,
    PauseSpec,
    Port,
    ProcessSpec,
    Session,
    SessionPatch,
    SessionSpec,
    SessionStats,
    ShellInfo,
    ShellSpec,
    Status,
    Stream,
    TerminalSize,
    TerminalSpec,
    Waited,
    WaitFor,
)
from sandkasten.model.listing import SessionPage, SessionQuery
from sandkasten.model.node import Diagnosis, NodeCapacity, NodeInfo, Readiness, System
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


__all__ = ["FileReader", "FileWriter"]


class ExecStream(Protocol):
    """A reader of one run. Iterate for its output, then `wait_end`.

    A reader that stops iterating stops the run's pipe (once it lags by a window) and nothing else. Several readers of
    one run each get everything from where they joined; the pipe waits for the slowest of them.
    """

    @property
    def exec_id(self) -> str: ...

    @property
    def info(self) -> ExecInfo:
        """The run as it is now."""
        ...

    @property
    def is_joined(self) -> bool:
        """Whether the run was there before: somebody else began it, and leaving never cancels it."""
        ...

    def __aiter__(self) -> AsyncIterator[Output]:
        """Yield output until the run has ended and all of it was handed out.

        Raises:
            ExecGone: what comes next is not kept any more (only for a reader that joined a run without one).
        """
        ...

    async def wait_end(self) -> ExecEnd:
        """Drop what output is left, wait for the end and return it. After exhausted iteration it returns at once."""
        ...

    async def cancel(self) -> None:
        """Walk the kill ladder on this run; its end then says `cancelled`. The shell lives on."""
        ...

    def detach(self) -> None:
        """Let the run go on without us: leaving does not cancel it any more."""
        ...

    async def send_stdin(self, data: bytes) -> None:
        """Send input, waiting while the run does not read. Raises `ExecEnded`, `InvalidRequest` (it has no stdin)."""
        ...

    async def close_stdin(self) -> None:
        """End the input."""
        ...


class TerminalViewer(Protocol):
    """One viewer of a terminal. Iterate for what its screen gets: first what is kept of the past, then what comes.

    The terminal runs at the speed of its fastest viewer, or freely without one; a viewer that falls behind by more
    than is kept misses the middle, and `skipped_bytes` says how much. Leaving the context leaves the terminal open,
    except that a shell which was taken over is given back when its last taker leaves.
    """

    @property
    def terminal_id(self) -> str: ...

    @property
    def info(self) -> ExecInfo: ...

    @property
    def skipped_bytes(self) -> int: ...

    @property
    def is_taken_over(self) -> bool:
        """Whether what this viewer types reaches a shell now; of a terminal of its own always, if it may type."""
        ...

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield what the screen gets, in pieces of at most 64 KiB, until the terminal has ended."""
        ...

    async def send(self, data: bytes) -> None:
        """Type. Raises `PermissionDenied` for a read-only viewer or a shell that is only watched, `ExecEnded`."""
        ...

    async def resize(self, size: TerminalSize) -> None:
        """Change the size for all viewers. Raises as `send`."""
        ...

    async def take_over(self) -> None:
        """Sit down at the watched shell: behind what it runs, a prompt comes. Its commands wait until `give_back`, or
        until the prompt is left with `exit`. Cancelling the wait withdraws it. Raises `PermissionDenied` for a
        read-only viewer, `ShellBusy`, `ExecEnded` (the prompt was ended before it came)."""
        ...

    async def give_back(self) -> None:
        """Leave the prompt of a shell that was taken over; what runs there is ended. Otherwise no effect."""
        ...

    async def wait_end(self) -> ExecEnd:
        """Wait until the terminal has ended. A watched shell ends with its session or by `close_shell`."""
        ...


class EventStream(Protocol):
    """Events in order, from a cursor on. A reader that does not read is bounded: it is served from the journal and
    raises `CursorGone` once the journal has moved past it. Cancelling a read loses no event."""

    @property
    def cursor(self) -> str:
        """Where to go on later: what came up to here was read, or is of another session."""
        ...

    def __aiter__(self) -> AsyncIterator[Event]: ...

    async def __anext__(self) -> Event: ...


class Supervisor(WorkspaceSupervisor, Protocol):
    """Sessions of one node."""

    @property
    def node_id(self) -> str: ...

    async def create(self, spec: SessionSpec) -> Session:
        """Make a session and return it running.

        Raises:
            InvalidImage, InvalidRequest, Conflict, Capacity (BuildInterrupted among it), BuildFailed.
        """
        ...

    async def get(self, session_id: str) -> Session:
        """Return a session in whatever state, ended ones included. Raises `SessionNotFound`."""
        ...

    async def list(self, *, status: Status | None = None, ended: bool = False, limit: int = 1000) -> Sequence[Session]:
        """Return sessions, newest first: the live ones, those of one status, or with `ended` all that are known."""
        ...

    async def find(self, query: SessionQuery) -> SessionPage:
        """Return a page of the list that `list` is the beginning of: also by labels, and behind a place in it."""
        ...

    async def update(self, session_id: str, patch: SessionPatch) -> Session:
        """Change a live session: all that the patch says, or nothing.

        Raises:
            SessionNotFound, SessionExpired: there is nothing to change.
            InvalidRequest: a value is out of range.
            LimitInUse: the session uses more memory than its new limit.
        """
        ...

    async def pause(self, session_id: str, spec: PauseSpec | None = None) -> Session:
        """Let all of a session stand still: it uses no processor time and keeps its memory. Time limits of what runs go
        on where they were when it is resumed. Of a paused session, change how it is paused.

        Raises:
            Conflict: a file is being transferred.
            SessionNotFound, SessionExpired.
        """
        ...

    async def resume(self, session_id: str) -> Session:
        """Let a paused session go on; one that runs is left alone. Raises `SessionNotFound`, `SessionExpired`."""
        ...

    async def destroy(self, session_id: str) -> Session:
        """End a session and return its final state; on an ended one a no-op. Raises `SessionNotFound`."""
        ...

    async def wait_ended(self, session_id: str) -> Session:
        """Wait until a session has ended, whatever ended it, or its supervisor stops, and return it. Raises
        `SessionNotFound`."""
        ...

    async def stats(self, session_id: str) -> SessionStats:
        """Raises `SessionNotFound`, `SessionExpired`."""
        ...

    def attend(self, session_id: str) -> AbstractAsyncContextManager[None]:
        """Somebody is there: while this is entered, the session does not end for being idle. A pause goes on.

        Raises:
            SessionNotFound, SessionExpired, Capacity.
        """
        ...

    # Commands

    def open_exec(
        self, session_id: str, spec: ExecSpec, *, on_disconnect: OnDisconnect = OnDisconnect.CANCEL
    ) -> AbstractAsyncContextManager[ExecStream]:
        """Run a command. Entering waits for its turn in the shell; leaving before its end cancels or detaches it.

        With the id of a run that exists and the same spec, join that run instead, from its first output on; leaving
        then never cancels it.

        Raises:
            SessionNotFound, SessionExpired, ShellBusy, ShellNotFound, Conflict, ExecGone, TooLarge, InvalidRequest,
            Capacity, RunnerLost.
        """
        ...

    async def exec(
        self, session_id: str, spec: ExecSpec, *, on_disconnect: OnDisconnect = OnDisconnect.CANCEL
    ) -> ExecResult:
        """Run a command to its end and return its capped output; joins as `open_exec` does. A timeout is a result
        with cause `timed_out`."""
        ...

    def attach_exec(self, session_id: str, exec_id: str, *, after: int = 0) -> AbstractAsyncContextManager[ExecStream]:
        """Join a run of any kind behind the piece of output numbered `after`. Leaving never cancels it.

        Raises:
            SessionNotFound, SessionExpired, ExecNotFound, ExecGone.
        """
        ...

    async def execs(self, session_id: str) -> Sequence[ExecInfo]:
        """Return the runs of a session that are known, of every kind, oldest first."""
        ...

    async def get_exec(self, session_id: str, exec_id: str) -> ExecInfo:
        """Raises `ExecNotFound`, `ExecGone`."""
        ...

    async def read_output(
        self, session_id: str, exec_id: str, *, stream: Stream | None = None, offset: int = 0, limit: int = 1024 * 1024
    ) -> OutputSlice:
        """Return output from an offset on, of one stream or (None) of both in order of arrival. Never waits.

        Raises:
            ExecNotFound.
            ExecGone: the run, or the output at that offset, is not kept any more.
        """
        ...

    async def send_stdin(self, session_id: str, exec_id: str, data: bytes, *, close: bool = False) -> None:
        """Send input to a run with open stdin or a terminal, then end it with `close`. Waits while it does not read.

        Raises:
            ExecNotFound, ExecGone, ExecEnded, InvalidRequest.
            Capacity: too many callers wait for the run to read.
        """
        ...

    async def signal_exec(self, session_id: str, exec_id: str, number: int) -> None:
        """Send a signal (1 to 64) to what the run started. SIGINT makes a shell leave the command, like Ctrl-C."""
        ...

    async def cancel_exec(self, session_id: str, exec_id: str, *, now: bool = False) -> ExecInfo:
        """Walk the kill ladder on a run, from its last rung with `now`, and return it ended; an ended one as it is."""
        ...

    async def resize_exec(self, session_id: str, exec_id: str, size: TerminalSize) -> None:
        """Change the size of the terminal of a run."""
        ...

    # Shells

    async def open_shell(self, session_id: str, spec: ShellSpec) -> ShellInfo:
        """Start one more persistent shell. Raises `Conflict` (the name is taken), `Capacity`, `InvalidRequest`."""
        ...

    async def shells(self, session_id: str) -> Sequence[ShellInfo]:
        """Return the session's shells, the default one first."""
        ...

    async def close_shell(self, session_id: str, name: str) -> None:
        """End a shell and everything it started; its commands end as cancelled. Raises `ShellNotFound`, and
        `InvalidRequest` for the default shell."""
        ...

    # Processes

    async def start_process(self, session_id: str, spec: ProcessSpec) -> ExecInfo:
        """Start a background process; joins as `open_exec` does when its id is in use with the same spec."""
        ...

    async def wait_process(self, session_id: str, exec_id: str, condition: WaitFor, *, timeout_s: float) -> Waited:
        """Wait until a condition holds or the time is over; a process that ended ends the wait."""
        ...

    async def ports(self, session_id: str) -> Sequence[Port]:
        """Return the TCP ports that something inside listens on."""
        ...

    # Terminals

    def open_terminal(self, session_id: str, spec: TerminalSpec) -> AbstractAsyncContextManager[TerminalViewer]:
        """Open a terminal or join one as a viewer.

        Raises:
            SessionNotFound, SessionExpired, ShellNotFound, TerminalNotFound, Capacity, InvalidRequest.
        """
        ...

    # Events

    def events(
        self, *, session_id: str | None = None, after: str | None = None
    ) -> AbstractAsyncContextManager[EventStream]:
        """Follow events, of one session or of all: those behind the cursor `after`, from now on without one, and with
        `"0"` all that are kept.

        Raises:
            CursorGone, InvalidRequest (no cursor of ours), SessionNotFound.
        """
        ...

    # Files

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

    async def system(self) -> System:
        """Return versions, the machine's checks as they were at start, limits and protections in force."""
        ...

    async def capacity(self) -> NodeCapacity:
        """Return what this node has, may promise, has promised and uses now; cheap, and without asking whether all of
        it answers."""
        ...

    async def node(self) -> NodeInfo:
        """Return the same with the node's identity, and `not_ready` unless all of it answers."""
        ...

    async def drain(self) -> NodeInfo:
        """Take no new sessions until `undrain`, over restarts too; creates raise `Draining`, what runs goes on."""
        ...

    async def undrain(self) -> NodeInfo:
        """Take new sessions again."""
        ...

    async def diagnose(self, session_id: str) -> Diagnosis:
        """Return what is known of a session, living, hung or ended, and say of each part that can't be had why. Neither
        wakes it nor counts as activity. Raises `SessionNotFound`."""
        ...

    async def metrics(self) -> Sequence[Metric]:
        """Return what was counted since the start, and what can be seen now. Waits for no part of the tree."""
        ...
