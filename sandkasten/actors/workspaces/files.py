"""Files of a sandbox over a link to its PID 1: one file, lists, archives; and sandboxes for files without a session.

Leaving a context early closes the connection, which ends the work in the sandbox: a file written by halves never
replaces the old one. Paths are handed on as they are and resolved inside the sandbox only. Everything that comes back
is hostile and checked by `links/runner.py`.

A *file sandbox* has one workspace, a PID 1, and no program. `FileSandboxes` makes one for a workspace whose files are
wanted without a session, lends links to its PID 1, and ends the sandbox some seconds after the last loan. For nsinit it
is a sandbox like any other, with limits, a range of ids and a system call filter, so damage in a workspace can hurt
this sandbox only. One that a dead daemon left behind is an unknown session, and is removed as such.
"""

from __future__ import annotations

import errno
import logging
import math
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import attrs
import trio

from nsinit.wire import protocol as nsinit_protocol
from runner.wire import protocol
from runner.wire.protocol import CHUNK_BYTES, Kind
from sandkasten.actors.core import Ref
from sandkasten.actors.services.directory import SessionDirectory
from sandkasten.actors.services.nsinit import Sandbox, ask_patiently, ask_when_up, build, teardown
from sandkasten.actors.services.store import do
from sandkasten.actors.workspaces.records import not_found
from sandkasten.crash import Crash, Point
from sandkasten.host.paths import DataPaths
from sandkasten.links.fds import wait_ended
from sandkasten.links.runner import RunnerConnection, RunnerLink, check_piece, decode_answer
from sandkasten.model.errors import (
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
)
from sandkasten.model.workspace import (
    MAX_UPLOADS,
    UPLOAD_S,
    FileHead,
    FileInfo,
    FileListing,
    Packed,
    Upload,
    UploadSpec,
    WorkspaceUsage,
)
from sandkasten.store.uploads import begin_upload, change_upload, end_upload, get_upload

log = logging.getLogger(__name__)

T = TypeVar("T")

_ANSWER_S = 60.0
"""Time for PID 1 to send the next piece of a file."""

_SYNCED_S = 1800.0
"""Time until a file is on the disk."""

_TREE_S = 1800.0
"""Until the first byte or the end of a request that walks a whole tree."""

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


class LocalFileReader:
    """Implements `supervisor.FileReader`. Hands out at most `max_bytes`, whatever the runner sends."""

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
    """Implements `supervisor.FileWriter`."""

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
    """Open `path` for reading. Raises as `Supervisor.open_read`."""
    check_path(path)
    async with link.connection() as connection:
        await connection.send_request(protocol.ReadFile(path=path, max_bytes=max_bytes))
        answer = await connection.receive_answer(deadline=trio.current_time() + _ANSWER_S)
        info = require(answer, protocol.FileInfo)
        yield LocalFileReader(connection, info, max_bytes)


@asynccontextmanager
async def open_writer(link: RunnerLink, path: str, *, sync: bool = False) -> AsyncIterator[LocalFileWriter]:
    """Start replacing `path`. A refusal may come as late as `commit`, which with `sync` returns when all is on the
    disk."""
    check_path(path)
    async with link.connection() as connection:
        await connection.send_request(protocol.WriteFile(path=path, sync=sync))
        yield LocalFileWriter(connection, patience_s=_SYNCED_S if sync else _ANSWER_S)


class LocalFileStream:
    """Implements `supervisor.FileStream`."""

    def __init__(self, connection: RunnerConnection, patience_s: float) -> None:
        self._connection, self._patience_s = connection, patience_s
        self._answer: object = None

    async def head(self, expected: type[T]) -> T:
        return require(await self._connection.receive_answer(deadline=self._deadline), expected)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        kind, body = await self._connection.receive(deadline=self._deadline)
        if kind is Kind.DATA:
            check_piece(body, "a file")
            return body
        self._answer = decode_answer(kind, body)
        raise StopAsyncIteration

    async def answer(self, expected: type[T] | tuple[type[T], ...]) -> T:
        if self._answer is None:
            async for _ in self:
                pass
        return require(self._answer, expected)

    async def send(self, data: bytes) -> bool:
        for start in range(0, len(data), CHUNK_BYTES):
            if self._connection.has_arrived:
                return False
            await self._connection.send(Kind.DATA, data[start : start + CHUNK_BYTES])
        return True

    async def end(self, expected: type[T] | tuple[type[T], ...]) -> T:
        await self._connection.send(Kind.END)
        return await self.answer(expected)

    @property
    def _deadline(self) -> float:
        return trio.current_time() + self._patience_s


class LocalFiles:
    """Implements `supervisor.Files`. `lend` lends a link to the PID 1 that has the files; its argument tells whether
    the loan lasts. `place` names the session or the workspace in the records of uploads."""

    def __init__(self, lend: Callable[[bool], AbstractAsyncContextManager[RunnerLink]], store: Ref, place: str) -> None:
        self._lend, self._store, self._place = lend, store, place

    async def ask(
        self,
        request: protocol.FileRequest,
        expected: type[T] | tuple[type[T], ...],
        *,
        patience_s: float = _ANSWER_S,
    ) -> T:
        async with self._lend(False) as link:
            _check_version(link)
            return await _ask(link, request, expected, patience_s=patience_s)

    @asynccontextmanager
    async def stream(
        self, request: protocol.FileRequest, *, patience_s: float = _ANSWER_S
    ) -> AsyncIterator[LocalFileStream]:
        async with self._lend(patience_s == math.inf) as link, link.connection() as connection:
            _check_version(link)
            await connection.send_request(request)
            yield LocalFileStream(connection, patience_s)

    async def begin_upload(self, spec: UploadSpec) -> Upload:
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


def is_old(upload: Upload) -> bool:
    """Whether an upload has taken all the time that one may take."""
    return datetime.now(UTC) - upload.begun_at > timedelta(seconds=UPLOAD_S)


def _check_version(link: RunnerLink) -> None:
    if link.version < protocol.FILES_VERSION:
        raise Conflict("this session began before an update of the daemon: it only reads and writes whole files")


# Lists and archives ---------------------------------------------------------------------------------------------------


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
    return (await _ask(link, protocol.RemoveFile(path, recursive), protocol.Done, patience_s=_TREE_S)).path


async def measure(link: RunnerLink) -> WorkspaceUsage:
    """Count files and bytes of the workspace, within bounds of entries and time."""
    request = protocol.Measure(".", _MEASURE_ENTRIES, _MEASURE_MS)
    found = await _ask(link, request, protocol.Measured)
    return WorkspaceUsage(
        found.entries, found.files, found.size_bytes, found.disk_bytes, found.complete, datetime.now(UTC)
    )


async def _ask(
    link: RunnerLink, request: object, answer: type[T] | tuple[type[T], ...], *, patience_s: float = _ANSWER_S
) -> T:
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
    """Implements `supervisor.ArchiveReader`. `first` was received already."""

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
        kind, body = await self._connection.receive(deadline=trio.current_time() + _TREE_S)
        if kind is Kind.DATA:
            check_piece(body, "an archive")
            return body
        self.packed = _packed(require(decode_answer(kind, body), protocol.Packed))
        raise StopAsyncIteration


@asynccontextmanager
async def open_pack(link: RunnerLink, path: str) -> AsyncIterator[LocalArchiveReader]:
    """Begin to pack a directory. Raises if it can't be packed."""
    check_path(path)
    async with link.connection() as connection:
        await connection.send_request(protocol.Pack(path))
        kind, body = await connection.receive(deadline=trio.current_time() + _TREE_S)
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
        """Tell PID 1 that the archive is complete, and wait until it is unpacked."""
        await self._connection.send(Kind.END)
        answer = await self._connection.receive_answer(deadline=trio.current_time() + _TREE_S)
        return _packed(require(answer, protocol.Packed))


@asynccontextmanager
async def open_unpack(link: RunnerLink, *, max_entries: int, max_bytes: int) -> AsyncIterator[Unpacking]:
    """Begin to unpack an archive. A bad archive is refused at its end."""
    async with link.connection() as connection:
        await connection.send_request(protocol.Unpack(max_entries, max_bytes, sync=True))
        yield Unpacking(connection)


def _packed(answer: protocol.Packed) -> Packed:
    return Packed(answer.entries, answer.size_bytes, answer.skipped)


def check_path(path: str) -> None:
    """Refuse a string that is no path. Raises `InvalidRequest`."""
    if not path or "\0" in path:
        raise InvalidRequest("malformed path", path="empty" if not path else "NUL character")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise InvalidRequest("malformed path", path="lone surrogate") from None


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
            sandbox = self._sandboxes[key]
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
            await _greet(link)
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


async def _greet(link: RunnerLink) -> None:
    with trio.move_on_after(_HELLO_S):
        async with link.connection() as connection:
            await connection.send_request(protocol.Hello())
            answer = await connection.receive_answer()
        match answer:
            case protocol.HelloReply(version=protocol.PROTOCOL_VERSION):
                return
            case _:
                raise SandboxError("the workspace's init speaks another protocol")
    raise RunnerLost("the workspace's init does not answer")


def _explain(error: SandkastenError, workspace_id: str) -> SandkastenError:
    """Translate the failed mount of a workspace that is not there."""
    if isinstance(error, BuildFailed) and (error.stage, error.errno) == ("workspace", errno.ENOENT):
        return not_found(workspace_id)
    return error
