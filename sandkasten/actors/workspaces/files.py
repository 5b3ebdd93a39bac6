"""Requests for files over a link to a sandbox's PID 1; and sandboxes for files without a session.

Leaving a context early closes the connection, which ends the work in the sandbox: a file written by halves never
replaces the old one. Paths are handed on as they are and resolved inside the sandbox only. Everything that comes back
is hostile and checked by `links/runner.py`.

A *file sandbox* has one workspace, a PID 1, and no program. `FileSandboxes` makes one for a workspace whose files are
wanted without a session, lends links to its PID 1, and ends the sandbox some seconds after the last loan. For nsinit it
is a sandbox like any other, with limits, a range of ids and a system call filter, so damage in a workspace can hurt
this sandbox only. One that a dead daemon left behind is an unknown session, and is removed as such.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import attrs
import trio

from nsinit.wire import protocol as nsinit_protocol
from runner.wire import protocol
from runner.wire.protocol import MAX_FRAME_BYTES, Kind
from sandkasten.actors.core import Ref
from sandkasten.actors.services.directory import SessionDirectory
from sandkasten.actors.services.nsinit import Sandbox, ask_patiently, ask_when_up, build, teardown
from sandkasten.actors.services.store import do
from sandkasten.actors.workspaces.records import not_found
from sandkasten.crash import Crash, Point
from sandkasten.errors import (
    BuildFailed,
    Capacity,
    Conflict,
    DiskFull,
    FileNotFound,
    InvalidRequest,
    IsADirectory,
    NotADirectory,
    NotAFile,
    NotEmpty,
    PathOutside,
    PermissionDenied,
    RunnerLost,
    RunnerProtocolError,
    SandboxError,
    SandkastenError,
    TooLarge,
    WorkInterrupted,
)
from sandkasten.host.paths import DataPaths
from sandkasten.links.fds import wait_ended
from sandkasten.links.runner import Pool, RunnerConnection, RunnerLink, check_piece, decode_answer
from sandkasten.model.workspace import (
    MAX_UPLOADS,
    UPLOAD_S,
    WRITE_S,
    FileHead,
    Upload,
    UploadSpec,
    WorkspaceUsage,
)
from sandkasten.store.uploads import begin_upload, change_upload, end_upload, get_upload

log = logging.getLogger(__name__)

T = TypeVar("T")

_ANSWER_S = 60.0
"""Time for a file worker to send the next piece of a file, or to take one."""

_PROBE_S = 5.0
_DURABLE = protocol.PutFile | protocol.CommitUpload | protocol.EditFiles

_MEASURE_ENTRIES = 1_000_000
_MEASURE_MS = 5_000

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
    "EXISTS": Conflict,
    "NO_SUCH_USER": InvalidRequest,
    "BAD_REQUEST": InvalidRequest,
}


class _Silence(RunnerLost):
    """A file worker, or PID 1, has sent or taken nothing in time. The message is for the client if PID 1 answers."""


class LocalFileStream:
    """Implements `supervisor.FileStream`. However long all of it takes, each piece of content goes within `piece_s`;
    what comes before the first one, or without any, has `patience_s`: a tree is copied, or a file brought to the
    disk."""

    def __init__(self, connection: RunnerConnection, patience_s: float, piece_s: float = _ANSWER_S) -> None:
        self._connection, self._patience_s, self._piece_s = connection, patience_s, piece_s
        self._answer: object = None

    async def head(self, expected: type[T] | tuple[type[T], ...]) -> T:
        return require(await self._in_time(self._connection.receive_answer), expected)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        kind, body = await self._in_time(self._connection.receive)
        if kind is Kind.DATA:
            check_piece(body, "a file")
            self._patience_s = self._piece_s
            return body
        self._answer = decode_answer(kind, body)
        raise StopAsyncIteration

    async def answer(self, expected: type[T] | tuple[type[T], ...]) -> T:
        if self._answer is None:
            async for _ in self:
                pass
        return require(self._answer, expected)

    async def send(self, data: bytes) -> bool:
        await trio.lowlevel.checkpoint()
        for start in range(0, len(data), MAX_FRAME_BYTES):
            if self._connection.has_arrived:
                return False
            await self._send(Kind.DATA, memoryview(data)[start : start + MAX_FRAME_BYTES])
        return True

    async def end(self, expected: type[T] | tuple[type[T], ...]) -> T:
        await self._send(Kind.END)
        return await self.answer(expected)

    async def _send(self, kind: Kind, body: bytes | memoryview = b"") -> None:
        """Send a frame. Raises `_Silence` when the worker does not take it."""
        if not await self._connection.send_piece(kind, body, within_s=self._piece_s):
            raise _Silence(f"the sandbox has taken nothing of the content for {self._piece_s:g} s")

    async def _in_time(self, receive: Callable[..., Awaitable[T]]) -> T:
        """Return what comes next. Raises `_Silence` when nothing does."""
        deadline = trio.current_time() + self._patience_s
        try:
            return await receive(deadline=deadline)
        except RunnerLost:
            if trio.current_time() < deadline:
                raise
        raise _Silence(f"nothing has come from the sandbox for {self._patience_s:g} s")


class LocalFileReader:
    """Implements `supervisor.FileReader`. Hands out at most `count` bytes, whatever the runner sends."""

    def __init__(self, stream: LocalFileStream, head: FileHead, count: int) -> None:
        self._stream, self._left_bytes = stream, count
        self.head = head

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        piece = await anext(self._stream, None)
        if piece is None:
            await self._stream.answer(protocol.Done)
            raise StopAsyncIteration
        self._left_bytes -= len(piece)
        if self._left_bytes < 0:
            raise RunnerProtocolError("more of a file than was asked for")
        return piece


class LocalFileWriter:
    """Implements `supervisor.FileWriter`."""

    def __init__(self, stream: LocalFileStream) -> None:
        self._stream = stream

    async def send(self, data: bytes) -> bool:
        return await self._stream.send(data)

    async def commit(self) -> str:
        done: protocol.FilePut | protocol.Done = await self._stream.end((protocol.FilePut, protocol.Done))
        return done.path


class LocalFiles:
    """Implements `supervisor.Files`. `lend` lends a link to the PID 1 that has the files; its argument tells whether
    the loan lasts. `place` names the session or the workspace in the records of uploads, and `workspace_of` returns the
    workspace of the session. `sync` brings all that was written to the disk; with it, what is written is there when
    that is answered."""

    def __init__(
        self,
        lend: Callable[[bool], AbstractAsyncContextManager[RunnerLink]],
        store: Ref,
        place: str,
        *,
        workspace_of: Callable[[], str | None] = lambda: None,
        sync: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self._lend, self._store, self._place, self._sync = lend, store, place, sync
        self._workspace_of = workspace_of

    async def ask(
        self,
        request: protocol.FileRequest,
        expected: type[T] | tuple[type[T], ...],
        *,
        patience_s: float = _ANSWER_S,
    ) -> T:
        async with self.stream(request, patience_s=patience_s) as stream:
            return await stream.answer(expected)

    def stream(
        self, request: protocol.FileRequest, *, patience_s: float = _ANSWER_S
    ) -> AbstractAsyncContextManager[LocalFileStream]:
        return self._open(request, patience_s)

    @asynccontextmanager
    async def _open(
        self,
        request: protocol.FileRequest,
        patience_s: float,
        older: protocol.ReadFile | protocol.WriteFile | None = None,
    ) -> AsyncIterator[LocalFileStream]:
        """Begin a request, or the one that means the same to a PID 1 from before `FILES_VERSION`."""
        if self._sync is not None and isinstance(request, _DURABLE):
            request = dataclasses.replace(request, sync=True)
        async with self._lend(request.lasts) as link:
            asked: object = request
            if link.version < protocol.FILES_VERSION:
                if older is None:
                    raise Conflict("this session began before an update of the daemon: it takes and gives whole files")
                asked = older
            is_alone = request.lasts or request.user is not None
            lost: RunnerLost | None = None
            try:
                async with link.connection(Pool.NONE if is_alone else Pool.FILES) as connection:
                    await connection.send_request(asked)
                    yield LocalFileStream(connection, *((math.inf, math.inf) if request.lasts else (patience_s,)))
                if self._sync is not None and isinstance(request, protocol.Unpack):
                    await self._sync()  # a worker may not: many files by one call
            except RunnerLost as error:
                lost = error
            if lost is not None:
                raise await _explain_loss(link, lost)

    def open_read(
        self, path: str, *, max_bytes: int, user: str | None = None
    ) -> AbstractAsyncContextManager[LocalFileReader]:
        return self._open_read(path, max_bytes, user)

    @asynccontextmanager
    async def _open_read(self, path: str, max_bytes: int, user: str | None) -> AsyncIterator[LocalFileReader]:
        request = protocol.GetFile(path, 0, max_bytes - 1, user=user)
        older = protocol.ReadFile(path, max_bytes) if user is None else None
        async with self._open(request, _ANSWER_S, older) as stream:
            head: protocol.FilePart | protocol.FileInfo = await stream.head((protocol.FilePart, protocol.FileInfo))
            yield LocalFileReader(stream, FileHead(head.path, head.size_bytes, head.size_bytes > max_bytes), max_bytes)

    def open_write(
        self, path: str, *, mode: int | None = None, user: str | None = None
    ) -> AbstractAsyncContextManager[LocalFileWriter]:
        return self._open_write(path, mode, user)

    @asynccontextmanager
    async def _open_write(self, path: str, mode: int | None, user: str | None) -> AsyncIterator[LocalFileWriter]:
        older = protocol.WriteFile(path, self._sync is not None) if mode is None and user is None else None
        async with self._open(protocol.PutFile(path, mode, user=user), WRITE_S, older) as stream:
            yield LocalFileWriter(stream)

    async def begin_upload(self, spec: UploadSpec) -> Upload:
        spec = attrs.evolve(spec, workspace_id=self._workspace_of())
        upload = Upload(secrets.token_hex(16), spec, datetime.now(UTC))
        if not await self._store.ask(do(begin_upload, self._place, upload)):
            raise Capacity("too many uploads have begun and not ended", limit=MAX_UPLOADS)
        try:
            begun = await self.ask(protocol.BeginUpload(spec.path, upload.id, user=spec.user), protocol.UploadState)
        except SandkastenError as error:
            refusal = error
        else:
            upload = attrs.evolve(upload, spec=attrs.evolve(spec, path=begun.path))
            await self._store.ask_again(do(change_upload, upload))
            return upload
        if not isinstance(refusal, RunnerLost | SandboxError):  # else there may be a part file, which is swept
            await self.end_upload(upload.id)
        raise refusal

    async def upload(self, upload_id: str) -> Upload:
        found = await self._store.ask_again(do(get_upload, self._place, upload_id))
        if found is None or is_old(found):
            async with self._lend(False):  # a place that is not there is told first
                raise FileNotFound("there is no such upload")
        return found

    async def end_upload(self, upload_id: str) -> None:
        await self._store.ask_again(do(end_upload, upload_id))

    async def measure(self) -> WorkspaceUsage:
        """Count files and bytes of the workspace, within bounds of entries and time."""
        request = protocol.Measure(".", _MEASURE_ENTRIES, _MEASURE_MS)
        found = await self.ask(request, protocol.Measured)
        return WorkspaceUsage(
            found.entries, found.files, found.size_bytes, found.disk_bytes, found.complete, datetime.now(UTC)
        )


def is_old(upload: Upload) -> bool:
    """Whether an upload has taken all the time that one may take."""
    return datetime.now(UTC) - upload.begun_at > timedelta(seconds=UPLOAD_S)


async def _explain_loss(link: RunnerLink, lost: RunnerLost) -> SandkastenError:
    """Return the error of a connection that was lost: a file worker may end alone, killed by a command of its user."""
    try:
        await _greet(link, within_s=_PROBE_S)
    except RunnerLost:
        return lost
    except SandkastenError as error:
        return error
    ended = "the process inside that worked on files was ended before it answered"
    return WorkInterrupted(lost.message if isinstance(lost, _Silence) else ended)


def require(answer: object, expected: type[T] | tuple[type[T], ...]) -> T:
    """Return the answer if it is of the expected class, or raise the refusal it is."""
    if isinstance(answer, expected):
        return answer
    if isinstance(answer, protocol.Error):
        raise _REFUSALS.get(answer.code, SandboxError)(answer.message)
    raise RunnerProtocolError(f"{type(answer).__name__} while a file is transferred")


# File sandboxes -------------------------------------------------------------------------------------------------------


MAX_FILE_SANDBOXES = 16
IDLE_S = 5.0
_HELLO_S = 10.0
_END_S = 5.0

Key = tuple[str, bool]
"""A workspace's id, and whether its draft is meant."""


@attrs.define(eq=False)
class _FileSandbox:
    """A file sandbox. `made` is set when `link` is there or `failure` says why not. `users` counts loans and
    requests for one; `loans` counts those that ended."""

    session_id: str
    made: trio.Event = attrs.field(factory=trio.Event)
    link: RunnerLink | None = None
    kernel_side: Sandbox | None = None
    failure: SandkastenError | None = None
    users: int = 0
    loans: int = 0

    def begin_use(self) -> None:
        """Count one more user."""
        self.users += 1

    def end_use(self, *, was_lent: bool) -> None:
        """Count one user less; `was_lent`: a loan ended."""
        self.users -= 1
        self.loans += was_lent

    def built(self, kernel_side: Sandbox) -> None:
        """Own what nsinit made."""
        self.kernel_side = kernel_side

    def opened(self, link: RunnerLink) -> None:
        """Own the link to PID 1."""
        self.link = link

    def failed(self, error: SandkastenError) -> None:
        """Remember why there is no link."""
        self.failure = error

    def give_up(self) -> Sandbox | None:
        """Return the kernel side, once: the caller closes it."""
        kernel_side, self.kernel_side = self.kernel_side, None
        return kernel_side


class FileSandboxes:
    """The file sandboxes of the node, a bounded number. `start_task` runs work in the actor's nursery."""

    def __init__(
        self,
        start_task: Callable[..., None],
        *,
        nsinit: Ref,
        directory: SessionDirectory,
        paths: DataPaths,
        new_id: Callable[[], str],
        crash: Crash,
        idle_s: float = IDLE_S,
    ) -> None:
        self._start_task, self._nsinit, self._directory = start_task, nsinit, directory
        self._paths, self._new_id, self._crash, self._idle_s = paths, new_id, crash, idle_s
        self._sandboxes: dict[Key, _FileSandbox] = {}

    async def lend(self, key: Key, done: trio.Event) -> RunnerLink:
        """Return a link that may be used until `done`, making the sandbox if there is none.

        Raises:
            WorkspaceNotFound, Capacity, BuildFailed, RunnerLost.
        """
        sandbox = self._sandboxes.get(key)
        if sandbox is None:
            sandbox = self._sandboxes[key] = await self._begin(key)
        sandbox.begin_use()
        try:
            await sandbox.made.wait()
            if sandbox.failure is not None:
                raise sandbox.failure
            assert sandbox.link is not None
        except BaseException:
            sandbox.end_use(was_lent=False)
            raise
        self._start_task(self._take_back, key, sandbox, done)
        return sandbox.link

    async def end(self, workspace_id: str) -> None:
        """End the file sandboxes of a workspace, in use or not; return when they are gone."""
        for key in [each for each in self._sandboxes if each[0] == workspace_id]:
            sandbox = self._sandboxes.get(key)
            if sandbox is None:  # another task has ended it meanwhile
                continue
            await sandbox.made.wait()
            await self._end(key, sandbox)

    async def end_all(self) -> None:
        """End all of them, as far as there is time; the next daemon removes the rest."""
        async with trio.open_nursery() as nursery:
            for key, sandbox in list(self._sandboxes.items()):
                nursery.start_soon(self._end, key, sandbox)

    async def _begin(self, key: Key) -> _FileSandbox:
        while len(self._sandboxes) >= MAX_FILE_SANDBOXES:
            idle = next(((each, sandbox) for each, sandbox in self._sandboxes.items() if not sandbox.users), None)
            if idle is None:
                many = "too many workspaces are being read or written without a session"
                raise Capacity(many, limit=MAX_FILE_SANDBOXES)
            await self._end(*idle)
        sandbox = self._sandboxes.get(key)
        if sandbox is None:
            sandbox = _FileSandbox(self._new_id())
            self._directory.reserved.add(sandbox.session_id)
            self._start_task(self._make, key, sandbox)
        return sandbox

    async def _make(self, key: Key, sandbox: _FileSandbox) -> None:
        workspace_id, is_draft = key
        plan = nsinit_protocol.SandboxPlan(
            session_id=sandbox.session_id,
            image="files",
            image_kind="files",
            limits=nsinit_protocol.FILES_LIMITS,
            workspace_id=workspace_id,
            workspace_draft=is_draft,
        )
        try:
            sandbox.built(await ask_when_up(self._nsinit, build(plan)))
            self._crash.passing(Point.FILES_BUILT)
            link = RunnerLink(self._paths.run_dir(sandbox.session_id))
            sandbox.opened(link)
            if (await _greet(link)).version != protocol.PROTOCOL_VERSION:
                raise SandboxError("the workspace's init speaks another protocol")
        except SandkastenError as error:
            sandbox.failed(_explain(error, workspace_id))
            await self._end(key, sandbox)
            return
        finally:
            if sandbox.failure is None and sandbox.link is None:
                sandbox.failed(SandboxError("the workspace could not be opened"))
            sandbox.made.set()
        self._start_task(self._watch, key, sandbox)

    async def _watch(self, key: Key, sandbox: _FileSandbox) -> None:
        """End a sandbox whose PID 1 died. Its loans fail, and the next request gets another sandbox."""
        assert sandbox.kernel_side is not None
        try:
            await wait_ended(sandbox.kernel_side.pidfd)
        except trio.ClosedResourceError:
            return
        if self._sandboxes.get(key) is sandbox:
            log.warning("workspace_helper_died", extra={"workspace_id": key[0], "session_id": sandbox.session_id})
            await self._end(key, sandbox)

    async def _take_back(self, key: Key, sandbox: _FileSandbox, done: trio.Event) -> None:
        try:
            await done.wait()
        finally:
            sandbox.end_use(was_lent=True)
        loans = sandbox.loans
        if not sandbox.users:
            await trio.sleep(self._idle_s)
            if not sandbox.users and sandbox.loans == loans:
                await self._end(key, sandbox)

    async def _end(self, key: Key, sandbox: _FileSandbox) -> None:
        """Close and tear down, within 5 s; the reaper removes the rest."""
        if self._sandboxes.get(key) is sandbox:
            del self._sandboxes[key]
        if sandbox.link is not None:
            sandbox.link.close()
        kernel_side = sandbox.give_up()
        if kernel_side is not None:
            trio.lowlevel.notify_closing(kernel_side.pidfd.fileno())
            kernel_side.close_unused()
        with trio.move_on_after(_END_S, shield=True):
            try:
                await ask_patiently(self._nsinit, teardown(sandbox.session_id))
                self._crash.passing(Point.FILES_TORN_DOWN)
            except SandkastenError as error:
                log.warning("workspace_helper_left", extra={"session_id": sandbox.session_id, "error": str(error)})
        self._directory.reserved.discard(sandbox.session_id)


async def _greet(link: RunnerLink, *, within_s: float = _HELLO_S) -> protocol.HelloReply:
    """Ask PID 1 for a sign of life. Raises `RunnerLost`: there is none in time."""
    with trio.move_on_after(within_s):
        async with link.connection() as connection:
            await connection.send_request(protocol.Hello())
            return require(await connection.receive_answer(), protocol.HelloReply)
    raise RunnerLost("the sandbox's init does not answer")


def _explain(error: SandkastenError, workspace_id: str) -> SandkastenError:
    """Translate the failed mount of a workspace that is not there."""
    if isinstance(error, BuildFailed) and (error.stage, error.errno) == ("workspace", errno.ENOENT):
        return not_found(workspace_id)
    return error
