"""Requests for files: served by file workers, forks of PID 1 that become the user of the request.

PID 1 looks at no file itself: that may block, or take long. It hands the whole connection over to a worker, which
answers the request and those that follow on the connection, with blocking calls. A worker that is asked nothing for
`IDLE_S` ends, and PID 1 has the connection back. A worker whose client has left is ended.

A worker runs this code and no other. It has the capabilities of its user (none, but for root) and one
descriptor, the connection.

Sources: fork(2); credentials(7); socket(7) SO_RCVTIMEO (read(2) of a blocking socket then fails with EAGAIN); epoll(7).
"""

from __future__ import annotations

import gc
import io
import os
import resource
import signal
import socket
import struct
from collections.abc import Callable
from typing import Any, NoReturn

from runner.files.operations import FileWork, perform
from runner.files.paths import Resolver, refusal
from runner.loop.context import Caller, Context, Refused
from runner.loop.identity import ROOT, UserAccount
from runner.loop.kernel import FD_MAX
from runner.loop.reaper import unblock_signals
from runner.process.spawn import change_user, fork
from runner.process.users import look_up
from runner.wire.protocol import (
    ANSWERS,
    FROM_DAEMON,
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    MAX_REQUEST_BYTES,
    MAX_WATCHES,
    REQUESTS,
    DropUpload,
    Error,
    FileRequest,
    FrameDecoder,
    GetFile,
    GlobFiles,
    Kind,
    ListFiles,
    LookUpload,
    Measure,
    Pack,
    ProtocolError,
    SearchFiles,
    StatFile,
    StatFiles,
    ViewFile,
    WatchFiles,
    encode_header,
)

MAX_WORKERS = 32 + 4 + MAX_WATCHES
"""At a time: for the 32 requests of one daemon, for those that wait for the next request of their connection, and for
what lasts."""

IDLE_S = 5.0
"""A worker costs a mebibyte while it waits; a new one costs the client a millisecond or two."""

_UNDO_S = 60.0
"""For so long a worker may undo what it has begun for a client that has left."""

_ONLY_LOOK = (
    *(GetFile, ListFiles, GlobFiles, SearchFiles, StatFile, StatFiles, ViewFile, WatchFiles, Measure, Pack, LookUpload),
)
"""Requests after which nothing is to be undone."""

_TIMEVAL = struct.Struct("ll")
_READ_BYTES = MAX_FRAME_BYTES + HEADER_BYTES
_AT_EASE, _BROKEN = 0, 1
"""Exit statuses of a worker: between two requests, or within one."""


class FileWorkers:
    """The file workers that live, at most `MAX_WORKERS`, of which `MAX_WATCHES` may serve watches."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._living: set[FileWorker] = set()

    def begin(self, request: FileRequest, caller: Caller) -> FileWorker:
        """Have a worker answer a request, and those that follow.

        Raises:
            Refused: TOO_MANY, NO_SUCH_USER.
        """
        account = self._account_of(request)
        if len(self._living) >= MAX_WORKERS:
            raise Refused("TOO_MANY", f"{MAX_WORKERS} requests for files are under way")
        if request.lasts and sum(each.lasts for each in self._living) >= MAX_WATCHES:
            raise Refused("TOO_MANY", f"{MAX_WATCHES} watches are under way")
        try:
            worker = FileWorker(self._context, request, account, caller, self._living.discard)
        except OSError as error:
            reason = os.strerror(error.errno or 0).lower()
            raise Refused("TOO_MANY", f"no process could be made: {reason}") from None
        self._living.add(worker)
        return worker

    def _account_of(self, request: FileRequest) -> UserAccount:
        if request.user is None:
            return self._context.as_user.account
        if not self._context.config.files_only:
            return look_up(self._context, request.user)
        if request.user == ROOT.name and isinstance(request, DropUpload):
            return ROOT  # to remove what a session's root has left in a directory of its own
        raise Refused("NO_SUCH_USER", "the files here have one user")


class FileWorker:
    """One worker, as PID 1 sees it: the job of the connection that was handed over, of which PID 1 reads nothing."""

    def __init__(
        self,
        context: Context,
        request: FileRequest,
        account: UserAccount,
        caller: Caller,
        on_death: Callable[[FileWorker], None],
    ) -> None:
        """Fork.

        Raises:
            OSError: no process could be made.
        """
        self.lasts = request.lasts
        self._context, self._caller, self._on_over = context, caller, on_death
        self._pid = fork(context.kernel)
        if self._pid == 0:
            _live(context, account, request, *caller.hand_over())
        caller.hand_over()  # what came with the request belongs to the worker
        context.reaper.watch(self._pid, self._on_death, on_stop=self._on_stop)

    def _on_death(self, status: int) -> None:
        self._pid = 0
        self._on_over(self)
        if os.waitstatus_to_exitcode(status) == _AT_EASE:
            self._caller.take_back()
        else:
            self._caller.close()

    def _on_stop(self) -> None:
        """Have the worker go on: a command of its user has stopped it, and a client waits."""
        self._kill(signal.SIGCONT)

    def on_close(self) -> None:
        """End the worker: the client has left."""
        self._kill(signal.SIGTERM)
        self._context.loop.call_later(_UNDO_S, self._kill, lambda _error: None)

    def _kill(self, number: int = signal.SIGKILL) -> None:
        if self._pid:
            os.kill(self._pid, number)

    @property
    def wants_input(self) -> bool:
        """Whether PID 1 reads from the connection."""
        return False

    def on_data(self, data: bytes) -> None:
        """Frames are read by the worker."""

    def on_end(self) -> None:
        """Frames are read by the worker."""

    def on_cancel(self) -> None:
        """Frames are read by the worker."""

    def on_drained(self) -> None:
        """PID 1 sends nothing."""


# In the fork ----------------------------------------------------------------------------------------------------------


class _Left(BaseException):
    """The client has left, or wants no more. No work goes on, and none takes this for an error of its own."""


def _live(context: Context, account: UserAccount, request: FileRequest, fd: int, received: bytes) -> NoReturn:
    """Answer requests until there are none, and exit. Nothing may unwind into PID 1's stack."""
    status = _BROKEN
    try:
        _become(account, context, fd)
        _Conversation(context, fd, received).go_on(request)
        status = _AT_EASE
    finally:
        os._exit(status)


def _become(account: UserAccount, context: Context, fd: int) -> None:
    rules_fd = context.settings.rules_fd
    kept = sorted((fd,) if rules_fd < 0 else (fd, rules_fd))
    for first, last in zip((3, *(each + 1 for each in kept)), (*(each - 1 for each in kept), FD_MAX), strict=True):
        if first <= last:
            context.kernel.close_range(first, last)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # a client that has left is an error of the write
    unblock_signals()
    context.kernel.keep_pages_apart()  # before foreign bytes are read: a fork has the marks of its parent's memory
    change_user(context.kernel, account, is_powerful=context.config.root_inside)
    if rules_fd >= 0:
        context.kernel.enter_file_rules(rules_fd)
        os.close(rules_fd)
    context.kernel.restrict_command()
    os.umask(0)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.enable()


class _Conversation:
    """The connection, in the worker: frames by read(2) and writev(2), which every filter of system calls passes."""

    def __init__(self, context: Context, fd: int, received: bytes) -> None:
        self._resolver = Resolver(context.config, context.kernel)
        self._kernel, self._passing = context.kernel, context.config.passing
        self._fd, self._decoder = fd, FrameDecoder(FROM_DAEMON, max_body_bytes=MAX_REQUEST_BYTES)
        self._decoder.feed(received)
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._is_live = False
        """Whether what there is to tell is told at once; else it goes out in large pieces."""
        self._undoes = False
        """Whether a request is under way that would leave something by halves."""
        self._has_left = False
        signal.signal(signal.SIGTERM, self._on_leaving)
        with socket.socket(fileno=os.dup(fd)) as sock:
            sock.setblocking(True)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(int(IDLE_S), 0))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_FRAME_BYTES)  # a whole frame wakes up once

    def go_on(self, request: FileRequest) -> None:
        """Answer a request and those that follow, all of one user, until none comes for a while. One that lasts has a
        worker of its own."""
        self._perform(request)
        if not request.lasts:
            while (following := self._next_request()) is not None:
                if following.user != request.user or following.lasts:
                    raise ProtocolError("a request that is for another worker")
                self._perform(following)

    def _perform(self, request: FileRequest) -> None:
        self._is_live = isinstance(request, SearchFiles | WatchFiles)
        self._undoes = not isinstance(request, _ONLY_LOOK)
        answer = self._answer(request)
        self.send(Kind.ERROR if isinstance(answer, Error) else Kind.REPLY, ANSWERS.encode(answer))
        self.flush()
        self._undoes = False

    def _answer(self, request: FileRequest) -> object:
        content, output = _Content(self), _Output(self)
        work = FileWork(
            self._resolver, self._kernel, self._start, content, output, self._passing, self._check, self.send_part
        )
        try:
            return perform(request, work)
        except Refused as refused:
            return refused.error
        except OSError as error:
            return refusal(error, os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else "").error
        except Exception as error:  # noqa: BLE001 - whatever failed, the client is told, and the next request is served
            return Error("IO_ERROR", f"the work failed ({type(error).__name__})")

    def _on_leaving(self, _number: int, _frame: object) -> None:
        """Handle SIGTERM, by which PID 1 says that the client has left."""
        self._has_left = True
        if not self._undoes:
            os._exit(_BROKEN)

    def _check(self) -> None:
        """End the work between two of its steps. Raises `_Left`."""
        if self._has_left:
            raise _Left

    def _next_request(self) -> FileRequest | None:
        """Return the next request, None if there is none for a while. Frames before it are of the one before, which was
        answered before all of its content had come."""
        while True:
            for kind, body in self._decoder:
                if kind is Kind.REQUEST:
                    request: Any = REQUESTS.decode(body)
                    if not isinstance(request, FileRequest):
                        raise ProtocolError("a request that is not for files")
                    return request
            if not self._receive() and not self._decoder.buffered_bytes:
                return None

    def content(self) -> bytes:
        """Return the next piece of the request's content, nothing at its end."""
        while True:
            for kind, body in self._decoder:
                if kind is Kind.END:
                    return b""
                if kind is not Kind.DATA:
                    raise _Left
                if body:
                    return body
            self._receive()

    def _receive(self) -> bool:
        """Wait for bytes; return False if none came for a while. Raises `_Left`."""
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return False
        except ConnectionError:
            data = b""
        if not data:
            raise _Left
        self._decoder.feed(data)
        return True

    def _start(self, head: object) -> None:
        self.send(Kind.STARTED, ANSWERS.encode(head))

    def send(self, kind: Kind, body: bytes) -> None:
        """Send one frame, soon. Raises `_Left`."""
        self._unsent += (encode_header(kind, len(body)), body)
        self._unsent_bytes += len(body)
        if self._is_live or self._unsent_bytes >= MAX_FRAME_BYTES:
            self.flush()

    def send_part(self, fd: int, offset: int, count: int) -> None:
        """Send a part of a file as one frame, now. sendfile(2) takes a quarter of the time of a read and a write.

        Raises:
            _Left: the client has left, or the file can't be read on: the frame can't be ended then.
        """
        self._unsent.append(encode_header(Kind.DATA, count))
        self.flush()
        try:
            while count:
                if not (sent := os.sendfile(self._fd, fd, offset, count)):
                    raise _Left
                offset, count = offset + sent, count - sent
        except OSError:
            raise _Left from None

    def flush(self) -> None:
        """Send what waits to be sent. Raises `_Left`."""
        parts, self._unsent, self._unsent_bytes = self._unsent, [], 0
        try:
            while parts:
                sent = os.writev(self._fd, parts)
                while parts and sent >= len(parts[0]):
                    sent -= len(parts.pop(0))
                if sent:
                    parts[0] = parts[0][sent:]
        except ConnectionError:
            raise _Left from None


class _Content(io.RawIOBase):
    """Content of a request: the DATA frames up to END."""

    def __init__(self, conversation: _Conversation) -> None:
        self._conversation = conversation
        self._rest = b""
        self._is_over = False

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """Return at most `size` bytes, of one frame; nothing at the end."""
        piece = self._rest
        if not piece and not self._is_over:
            piece = self._conversation.content()
            self._is_over = not piece
        self._rest = piece[size:]
        return piece[:size]

    def readinto(self, buffer: Any) -> int:  # a writable buffer
        piece = self.read(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)


class _Output(io.RawIOBase):
    """Output of a request: DATA frames."""

    def __init__(self, conversation: _Conversation) -> None:
        self._conversation = conversation

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:  # bytes, or a view of some
        piece = bytes(data[:MAX_FRAME_BYTES])
        if piece:
            self._conversation.send(Kind.DATA, piece)
        return len(piece)
