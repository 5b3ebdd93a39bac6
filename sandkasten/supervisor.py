"""The supervisor's interface: one typed async protocol with no HTTP type in it.

REST, WebSocket, command line and library users stand on `Supervisor`; `app.open_supervisor` gives the local
implementation (`actors/tree.py`). Every method raises members of `errors.SandkastenError` only. Cancelling a call drops
its answer.

Commands, processes and terminals are all runs: each has an id, a log of its output that is kept for a while after its
end, and at most one owner who may leave. A run that was detached, or never had an owner, goes on by itself.

Files of a workspace are reached without a session, in a sandbox of their own that holds nothing else, with the sandbox
user's rights. Paths are relative to the workspace or begin with `/workspace`; a path that leads outside is
`PathOutside`. Every method on a workspace that does not exist raises `WorkspaceNotFound`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeVar

from prometheus_client.metrics_core import Metric

from runner.wire.protocol import FileRequest, Packed
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
    UsageSample,
    Waited,
    WaitFor,
)
from sandkasten.model.image import CommitSpec, Compression, ImageDescription, Pruned
from sandkasten.model.job import ImageJob, ImportSpec, PullSpec
from sandkasten.model.listing import SessionPage, SessionQuery
from sandkasten.model.network import (
    EgressPage,
    EgressVerdict,
    NetworkInfo,
    NewSecret,
    Preview,
    PreviewSpec,
    SecretInfo,
    SignedPreview,
)
from sandkasten.model.node import Diagnosis, NodeCapacity, NodeInfo, PoolInfo, Readiness, System
from sandkasten.model.workspace import (
    EVERYWHERE,
    FileHead,
    Upload,
    UploadSpec,
    Within,
    Workspace,
    WorkspacePatch,
    WorkspaceSpec,
)

T = TypeVar("T")

# Handles: a run, a terminal, the journal, a file, an archive


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
        """Whether another request began the run; leaving it then never cancels it."""
        ...

    def __aiter__(self) -> AsyncIterator[Output]:
        """Yield output until the run has ended and all of it was handed out.

        Raises:
            ExecGone: the next piece is not kept any more (only for a reader that joined a run without a reader).
        """
        ...

    async def wait_end(self) -> ExecEnd:
        """Drop the output that is left, wait for the run's end and return it; at once after exhausted iteration."""
        ...

    async def cancel(self) -> None:
        """Walk the kill ladder on this run, whose end then says `cancelled`. Its shell lives on."""
        ...

    def detach(self) -> None:
        """Give up ownership: leaving does not cancel the run any more."""
        ...

    async def send_stdin(self, data: bytes) -> None:
        """Send input, waiting while the run does not read. Raises `ExecEnded`, `InvalidRequest` (no open stdin)."""
        ...

    async def close_stdin(self) -> None:
        """End the input."""
        ...


class TerminalViewer(Protocol):
    """One viewer of a terminal. Iterate for the bytes of its screen: first those kept of the past, then new ones.

    The terminal runs at the speed of its fastest viewer, or freely without one. A viewer that falls behind by more
    than is kept misses bytes in the middle, counted by `skipped_bytes`. Leaving the context leaves the terminal open,
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
        """Whether input of this viewer reaches a shell now; in a terminal of its own always, if the viewer may type."""
        ...

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the bytes of the screen, in pieces of at most 64 KiB, until the terminal has ended."""
        ...

    async def send(self, data: bytes) -> None:
        """Type into the terminal. Raises `PermissionDenied` (a read-only viewer, or a watched shell), `ExecEnded`."""
        ...

    async def resize(self, size: TerminalSize) -> None:
        """Change the size for all viewers. Raises as `send`."""
        ...

    async def take_over(self) -> None:
        """Take the watched shell over: behind the run that occupies it, a prompt comes.

        Further runs wait until `give_back`, or until the prompt is left with `exit`. Cancelling the wait withdraws it.

        Raises:
            PermissionDenied: the viewer is read-only.
            ExecEnded: the prompt was ended before it came.
            ShellBusy.
        """
        ...

    async def give_back(self) -> None:
        """Leave the prompt of a shell that was taken over, and end its processes. Otherwise no effect."""
        ...

    async def wait_end(self) -> ExecEnd:
        """Wait until the terminal has ended. A watched shell ends with its session or by `close_shell`."""
        ...


class EventStream(Protocol):
    """Events in order, from a cursor on.

    A slow reader costs a bounded amount of memory: the journal serves it, and raises `CursorGone` once it has moved
    past the reader. Cancelling a read loses no event.
    """

    @property
    def cursor(self) -> str:
        """The cursor to go on from later: every earlier event was read, or belongs to another session."""
        ...

    def __aiter__(self) -> AsyncIterator[Event]: ...

    async def __anext__(self) -> Event: ...


class FileReader(Protocol):
    """An open file in the sandbox; iterate for its bytes, in pieces."""

    @property
    def head(self) -> FileHead: ...

    def __aiter__(self) -> AsyncIterator[bytes]: ...


class FileWriter(Protocol):
    """A file being replaced. `send` pieces, then `commit`; leaving the context without `commit` keeps the old file."""

    async def send(self, data: bytes) -> bool:
        """Send a piece; false once the file is refused, which `commit` tells."""
        ...

    async def commit(self) -> str:
        """Put the new content in place atomically and return the resolved path."""
        ...


class FileStream(Protocol):
    """A request for files with content: `send` pieces if it takes any, then `end`; or iterate for the pieces of the
    answer. Leaving the context early ends the work in the sandbox."""

    async def head(self, expected: type[T] | tuple[type[T], ...]) -> T:
        """Return the message before the content, of a request that has one. Raises the refusal."""
        ...

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def __anext__(self) -> bytes: ...

    async def answer(self, expected: type[T] | tuple[type[T], ...]) -> T:
        """Return the message after the content. Raises the refusal."""
        ...

    async def send(self, data: bytes) -> bool:
        """Send a piece; false once the answer has come, which takes no more."""
        ...

    async def end(self, expected: type[T] | tuple[type[T], ...]) -> T:
        """Tell that all content was sent, and return the answer. Raises the refusal."""
        ...


class Files(Protocol):
    """Files of a session, or of a workspace without one. Requests and answers are those of the sandbox's PID 1.

    All methods raise SessionNotFound, SessionExpired or WorkspaceNotFound, Capacity, and the request's refusal.
    """

    async def ask(
        self, request: FileRequest, expected: type[T] | tuple[type[T], ...], *, patience_s: float = 60.0
    ) -> T:
        """Perform a request without content and return its answer."""
        ...

    def stream(self, request: FileRequest, *, patience_s: float = 60.0) -> AbstractAsyncContextManager[FileStream]:
        """Begin a request with content. `patience_s`: until the next piece or the answer. A request that lasts
        (`WatchFiles`) has all the time there is, and holds up neither a pause nor a stop of the daemon."""
        ...

    def open_read(
        self, path: str, *, max_bytes: int, user: str | None = None
    ) -> AbstractAsyncContextManager[FileReader]:
        """Open a regular file for reading, as `user` or the session's user; relative paths are under `/workspace`.

        Raises:
            FileNotFound, IsADirectory, NotAFile, PermissionDenied, PathOutside.
        """
        ...

    def open_write(
        self, path: str, *, mode: int | None = None, user: str | None = None
    ) -> AbstractAsyncContextManager[FileWriter]:
        """Replace a file, making its parents; users and errors as for `open_read`, and `DiskFull`. Without `mode` it
        keeps its mode, and a new one gets 0644. The file of a workspace is on the disk when `commit` returns."""
        ...

    async def begin_upload(self, spec: UploadSpec) -> Upload:
        """Begin a file that comes in several requests (`AppendUpload`, `CommitUpload`, `DropUpload`).

        Raises:
            Capacity: `MAX_UPLOADS` have begun.
        """
        ...

    async def upload(self, upload_id: str) -> Upload:
        """Return an upload that has not ended. Raises `FileNotFound`."""
        ...

    async def end_upload(self, upload_id: str) -> None:
        """Forget an upload, whose part file is gone."""
        ...


class ArchiveWriter(Protocol):
    """A tar archive being unpacked. `send` pieces, then `commit`; leaving the context without `commit` undoes all."""

    async def send(self, data: bytes) -> bool:
        """Send a piece; false once the archive is refused, which `commit` tells."""
        ...

    async def commit(self) -> Packed:
        """Make the unpacked tree the workspace. Raises `InvalidRequest` (a bad archive), `TooLarge`, `DiskFull`."""
        ...


class WorkspaceSupervisor(Protocol):
    """Persistent workspaces of one node, and their files."""

    def workspaces_within(self, within: Within) -> WorkspaceSupervisor:
        """Return the interface for a caller for whom only workspaces with these labels exist.

        A workspace that such a caller makes gets the labels; an id that others took is `WorkspaceNotFound`, and
        `Conflict` for `make_workspace`.
        """
        ...

    async def workspaces(self, *, after: str = "", limit: int = 1000, measure: bool = False) -> Sequence[Workspace]:
        """Return workspaces in the order of their ids, beginning behind `after`.

        With `measure`, as many of them have a `usage` as could be measured in a few seconds.
        """
        ...

    async def workspace(self, workspace_id: str, *, measure: bool = False) -> Workspace:
        """Return one workspace; with `measure` with its usage, which is at most half a minute old."""
        ...

    async def make_workspace(self, workspace_id: str, spec: WorkspaceSpec) -> Workspace:
        """Make a workspace. Raises `Conflict` (the id is taken), `InvalidRequest` (the id is malformed)."""
        ...

    async def update_workspace(self, workspace_id: str, patch: WorkspacePatch) -> Workspace: ...

    async def delete_workspace(self, workspace_id: str, *, force: bool = False) -> None:
        """Delete a workspace and all of its files; with `force` the sessions that hold it are ended first.

        Raises:
            WorkspaceBusy: a session holds the workspace, or its files are being transferred.
        """
        ...

    def workspace_files(self, workspace_id: str, *, make: bool = False) -> Files:
        """Return the files of a workspace; with `make` a request makes the workspace if there is none."""
        ...

    def open_unpack(self, workspace_id: str, *, replace: bool = False) -> AbstractAsyncContextManager[ArchiveWriter]:
        """Make a workspace of a tar archive.

        Raises:
            Conflict: the workspace exists, and `replace` is false.
            WorkspaceBusy: the workspace to be replaced is in use.
        """
        ...


class Supervisor(WorkspaceSupervisor, Protocol):
    """Sessions, runs, terminals, files and workspaces of one node, and the node itself."""

    # Sessions

    async def create(self, spec: SessionSpec) -> Session:
        """Make a session and return it running.

        Raises:
            InvalidImage, InvalidRequest, InvalidRule, Conflict, Capacity (BuildInterrupted and EgressUnavailable among
                it), NetworkNotSupported, PreviewsOff, BuildFailed.
        """
        ...

    async def get(self, session_id: str) -> Session:
        """Return a session in any state, ended ones included. Raises `SessionNotFound`."""
        ...

    async def list(self, *, status: Status | None = None, ended: bool = False, limit: int = 1000) -> Sequence[Session]:
        """Return sessions, newest first: the live ones, those of one status, or with `ended` all known ones."""
        ...

    async def find(self, query: SessionQuery) -> SessionPage:
        """Return one page of sessions, newest first, chosen by status and labels, behind a place in the list."""
        ...

    async def update(self, session_id: str, patch: SessionPatch) -> Session:
        """Change a live session: every field of the patch, or nothing.

        Raises:
            SessionNotFound, SessionExpired.
            InvalidRequest, InvalidRule: a value is out of range.
            LimitInUse: the session uses more memory than the new limit.
            Conflict: the network is not at the revision that the patch is for.
            EgressUnavailable, NetworkNotSupported: the session can't have that network now, or ever on this node.
        """
        ...

    async def pause(self, session_id: str, spec: PauseSpec | None = None) -> Session:
        """Freeze every process of a session, or change how a paused session is paused.

        A paused session uses no processor time and keeps its memory. Time limits of its runs stop, and go on from
        where they were when the session is resumed.

        Raises:
            Conflict: a file is being transferred.
            SessionNotFound, SessionExpired.
        """
        ...

    async def resume(self, session_id: str) -> Session:
        """Thaw a paused session; no effect on a running one. Raises `SessionNotFound`, `SessionExpired`."""
        ...

    async def destroy(self, session_id: str) -> Session:
        """End a session and return its final state; no effect on an ended one. Raises `SessionNotFound`."""
        ...

    async def wait_ended(self, session_id: str) -> Session:
        """Wait until a session has ended for any reason, or the supervisor stops, and return the session.

        Raises:
            SessionNotFound.
        """
        ...

    async def stats(self, session_id: str) -> SessionStats:
        """Return the counters of a session's cgroup. Raises `SessionNotFound`, `SessionExpired`."""
        ...

    async def usage(self, session_id: str, start: float, end: float) -> Sequence[UsageSample]:
        """Return samples of a live session's use between two times, in Unix seconds: one for each few seconds of the
        last hour. Raises `SessionNotFound`, `SessionExpired`."""
        ...

    async def network(self, session_id: str) -> NetworkInfo:
        """Return the network of a live session with its counters, all of them 0 for a session without a way out.

        Raises:
            SessionNotFound, SessionExpired, EgressUnavailable.
        """
        ...

    async def open_preview(self, session_id: str, spec: PreviewSpec) -> SignedPreview:
        """Open a preview of a port, in place of one that the port has, whose token is void from then on. Nothing needs
        to listen there yet.

        Raises:
            SessionNotFound, SessionExpired, PreviewsOff.
            Capacity: the session has too many.
        """
        ...

    async def find_preview(self, session_id: str, port: int) -> SignedPreview:
        """Return an open preview with what its opening told. Raises `PreviewNotFound`, `PreviewsOff`,
        `SessionNotFound`, `SessionExpired`."""
        ...

    async def previews(self, session_id: str) -> Sequence[Preview]:
        """Return the open previews of a live session. Raises `SessionNotFound`, `SessionExpired`."""
        ...

    async def close_preview(self, session_id: str, port: int) -> None:
        """Close a preview and end what is under way to it. Raises `PreviewNotFound`, `SessionNotFound`,
        `SessionExpired`."""
        ...

    async def put_secret(self, secret: NewSecret) -> None:
        """Keep a secret, in place of one of that name: connections that may use that one end.

        Raises:
            InvalidRequest: a field can't be that of a secret.
            SecretsOff, EgressUnavailable, Capacity, StoreFailed.
        """
        ...

    async def secrets(self) -> Sequence[SecretInfo]:
        """Return the kept secrets, without their values. Raises `SecretsOff`, `EgressUnavailable`."""
        ...

    async def delete_secret(self, name: str) -> None:
        """Forget a secret; connections that may use it end. Raises `SecretNotFound`, `SecretsOff`,
        `EgressUnavailable`, `StoreFailed`."""
        ...

    async def images(self, *, within: Within = EVERYWHERE, is_bounded: bool = False) -> Sequence[ImageDescription]:
        """Return all images, by name. `is_bounded`: those alone that sessions may have. Of the sessions that use them,
        those within these labels are told, and pools everywhere alone."""
        ...

    async def image(self, name: str, *, within: Within = EVERYWHERE, is_bounded: bool = False) -> ImageDescription:
        """Return the image of a name, a reference or an alias, as `images` does. Raises `InvalidImage`."""
        ...

    async def delete_image(self, name: str) -> None:
        """Delete an image of layers, with the layers that nobody else has.

        Raises:
            InvalidImage: there is none of that name, or it is none of layers.
            ImageInUse: sessions or pools name it, which the details have.
        """
        ...

    async def commit_session(self, session_id: str, spec: CommitSpec) -> ImageDescription:
        """Make an image of a session's root and return it. The session stands still while its changes are copied.

        Raises:
            InvalidImage: there can be no such image, or none of this session.
            LayerRefused: the session has what no layer can have.
            Conflict: a file is being transferred, or the session went on or ended meanwhile.
            DiskFull, SessionNotFound, SessionExpired.
        """
        ...

    def export_image(
        self, name: str, compression: Compression
    ) -> AbstractAsyncContextManager[Callable[[], Awaitable[bytes]]]:
        """Write an image as the tar of an OCI layout, which is read up to its end, an empty piece. The archive is whole
        if the context is left without an error then; leaving the context earlier ends the export.

        Raises:
            InvalidImage: there is no such image, or it is none of layers.
            LayerRefused: a layer has what no archive can hold.
            DiskReserve: the disk has no room for a layer of the archive.
        """
        ...

    async def prune_images(self, *, older_than_s: int, dry_run: bool = False) -> Pruned:
        """Remove the layers and broken downloads that nobody has had for so long; with `dry_run` count them."""
        ...

    async def pull_image(self, spec: PullSpec) -> ImageJob:
        """Begin to pull an image, and return the job of it.

        Raises:
            InvalidReference, InvalidRequest, InvalidImage: there can be no such pull.
            Conflict: the idempotency key was used with another request.
            Overloaded: too many jobs wait or run.
        """
        ...

    async def import_image(self, spec: ImportSpec, read: Callable[[], Awaitable[bytes]]) -> ImageJob:
        """Read an archive up to its end, an empty piece, begin to import it, and return the job of that.

        Raises:
            InvalidRequest, InvalidImage: there can be no such import.
            TooLarge: the archive has more than `images.max_pull_mb`.
            DiskReserve: the disk has no room for it.
            Overloaded: too many jobs wait or run.
        """
        ...

    async def jobs(self, *, limit: int = 100) -> Sequence[ImageJob]:
        """Return jobs, newest first."""
        ...

    async def job(self, job_id: str) -> ImageJob:
        """Return a job. Raises `JobNotFound`."""
        ...

    async def next_of_job(self, job_id: str, seen: int, wait_s: float) -> tuple[int, ImageJob]:
        """Return a job with the number of its last change, as soon as that is not `seen`, or after `wait_s`; 0 is none
        yet. Raises `JobNotFound`."""
        ...

    async def cancel_job(self, job_id: str) -> ImageJob:
        """End a job, and return it as it ended; no effect on one that has ended. Raises `JobNotFound`."""
        ...

    async def egress_log(
        self,
        session_id: str,
        *,
        after: str | None = None,
        verdict: EgressVerdict | None = None,
        host: str | None = None,
        limit: int = 1000,
    ) -> EgressPage:
        """Return entries of a session's log behind the cursor `after` (None: from the oldest that is kept), chosen by
        verdict and by host, which is equal to the entry's. A page with fewer than `limit` entries is the last for now.

        Raises:
            InvalidRequest: malformed cursor.
            SessionNotFound, SessionExpired, EgressUnavailable.
        """
        ...

    def attend(self, session_id: str) -> AbstractAsyncContextManager[None]:
        """Keep a session from ending for being idle while the context is entered. A pause goes on.

        Raises:
            SessionNotFound, SessionExpired, Capacity.
        """
        ...

    # Runs

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
        """Join a run of any kind behind the piece of output numbered `after`. Leaving never cancels the run.

        Raises:
            SessionNotFound, SessionExpired, ExecNotFound, ExecGone.
        """
        ...

    async def execs(self, session_id: str) -> Sequence[ExecInfo]:
        """Return the known runs of a session, of every kind, oldest first."""
        ...

    async def get_exec(self, session_id: str, exec_id: str) -> ExecInfo:
        """Return one run. Raises `ExecNotFound`, `ExecGone`."""
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
        """Send input to a run with open stdin or to a terminal, then with `close` end the input.

        Waits while the run does not read.

        Raises:
            ExecNotFound, ExecGone, ExecEnded, InvalidRequest.
            Capacity: too many callers wait for the run to read.
        """
        ...

    async def signal_exec(self, session_id: str, exec_id: str, number: int) -> None:
        """Send a signal (1 to 64) to the processes of a run. SIGINT makes a shell leave the command, like Ctrl-C."""
        ...

    async def cancel_exec(self, session_id: str, exec_id: str, *, now: bool = False) -> ExecInfo:
        """Walk the kill ladder on a run, with `now` from its last rung, and return the run as it ended."""
        ...

    async def resize_exec(self, session_id: str, exec_id: str, size: TerminalSize) -> None:
        """Change the size of the terminal of a run."""
        ...

    # Shells

    async def open_shell(self, session_id: str, spec: ShellSpec) -> ShellInfo:
        """Start a further persistent shell. Raises `Conflict` (the name is taken), `Capacity`, `InvalidRequest`."""
        ...

    async def shells(self, session_id: str) -> Sequence[ShellInfo]:
        """Return the session's shells, the default one first."""
        ...

    async def close_shell(self, session_id: str, name: str) -> None:
        """End a shell and every process it started; its commands end as cancelled.

        Raises:
            InvalidRequest: the default shell can't be closed.
            ShellNotFound.
        """
        ...

    # Processes

    async def start_process(self, session_id: str, spec: ProcessSpec) -> ExecInfo:
        """Start a background process; joins, as `open_exec` does, a run with the same id and spec."""
        ...

    async def wait_process(self, session_id: str, exec_id: str, condition: WaitFor, *, timeout_s: float) -> Waited:
        """Wait until a condition holds, the process ends, or `timeout_s` has passed."""
        ...

    async def ports(self, session_id: str) -> Sequence[Port]:
        """Return the TCP ports on which processes of the session listen."""
        ...

    # Terminals

    def open_terminal(self, session_id: str, spec: TerminalSpec) -> AbstractAsyncContextManager[TerminalViewer]:
        """Open a terminal or join one as a viewer.

        Raises:
            SessionNotFound, SessionExpired, ShellNotFound, TerminalNotFound, Capacity, InvalidRequest.
        """
        ...

    # Files

    def files(self, session_id: str) -> Files:
        """Return the interface to the files that the session's programs see."""
        ...

    # Events

    def events(
        self, *, session_id: str | None = None, after: str | None = None
    ) -> AbstractAsyncContextManager[EventStream]:
        """Follow events, of one session or of all, behind the cursor `after`.

        None: only new events. `"0"`: every event that is kept.

        Raises:
            InvalidRequest: malformed cursor.
            CursorGone, SessionNotFound.
        """
        ...

    # Node

    @property
    def node_id(self) -> str: ...

    async def readiness(self) -> Readiness:
        """Check store, fork server and disk."""
        ...

    async def system(self) -> System:
        """Return versions, the machine's checks as they were at start, limits and protections in force."""
        ...

    async def capacity(self) -> NodeCapacity:
        """Return totals, budget, promises and use of this node. Cheap: asks no part whether it answers."""
        ...

    async def node(self) -> NodeInfo:
        """Return the capacity with the node's identity; the status is `not_ready` unless every part answers."""
        ...

    async def drain(self) -> NodeInfo:
        """Admit no new sessions until `undrain`, restarts included; creates raise `Draining`, live sessions go on."""
        ...

    async def undrain(self) -> NodeInfo:
        """Admit new sessions again."""
        ...

    async def pools(self) -> Sequence[PoolInfo]:
        """Return the session pools, in the order of the configuration."""
        ...

    async def diagnose(self, session_id: str) -> Diagnosis:
        """Return all that is known of a session, live, hung or ended; a part that can't be had says why.

        Neither resumes the session nor counts as activity. Raises `SessionNotFound`.
        """
        ...

    async def metrics(self) -> Sequence[Metric]:
        """Return the counts since the start, and the present state of queues and memory. Waits for no part."""
        ...
