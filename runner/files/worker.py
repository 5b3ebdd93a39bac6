"""Requests for files: each is done by a file worker, a fork of PID 1 that becomes the session's user.

PID 1 looks at no file itself: that may block, or take long. A file worker runs this code and no other. It has no
capability, keeps only the descriptors it was given, and ends with one answer, a message of `protocol.ANSWERS`. PID 1
never waits for it. A worker whose answer nobody wants any more is killed.

Sources: pipe(7); fork(2); credentials(7).
"""

from __future__ import annotations

import gc
import os
import resource
import signal
from collections.abc import Callable, Iterable
from typing import NoReturn

from runner.files.operations import FileWork, perform
from runner.files.paths import Resolver, refusal
from runner.loop.context import Context, Refused, Sink
from runner.loop.identity import UserAccount
from runner.loop.kernel import FD_MAX, Kernel
from runner.loop.loop import READ
from runner.loop.reaper import unblock_signals
from runner.process.spawn import change_user, fork
from runner.process.users import look_up
from runner.streams.flow import Inflow, Outflow
from runner.streams.streams import NO_STREAMS, ClientSide, Streams
from runner.wire.protocol import (
    ANSWERS,
    CHUNK_BYTES,
    MAX_FRAME_BYTES,
    Error,
    FileRequest,
    Kind,
    ProtocolError,
    WatchFiles,
)

Work = Callable[[Callable[[object], None]], object]
"""Runs in the worker and returns the answer. May give a head, once, to the function. Raises `Refused` or `OSError`."""

_END_OF_HEAD = b"\n"
"""Not part of any message, which is JSON without line breaks."""

_CUT_SHORT = Error("IO_ERROR", "the work was cut short")


class FileWorker:
    """One worker. `on_answer` is called once, unless the worker is killed before; `on_head` earlier, with a head."""

    def __init__(
        self,
        context: Context,
        work: Work,
        on_answer: Callable[[object], None],
        *,
        kept: Iterable[int] = (),
        account: UserAccount | None = None,
        on_head: Callable[[object], None] = lambda _head: None,
    ) -> None:
        """Fork. `kept` are the descriptors that the worker keeps; they stay the caller's. `account`: whom the worker
        becomes, by default the session's user.

        Raises:
            OSError: no process could be made.
        """
        self._context = context
        self._on_answer, self._on_head = on_answer, on_head
        self._answer = bytearray()
        self._fd, answer_fd = os.pipe2(os.O_CLOEXEC)
        self._pid = 0
        try:
            pid = fork(context.kernel)
            if pid == 0:
                _live(context, account or context.as_user.account, work, answer_fd, (*kept, answer_fd))
        except OSError:
            os.close(self._fd)
            raise
        finally:
            os.close(answer_fd)
        self._pid = pid
        context.reaper.watch(pid, self._on_death)
        os.set_blocking(self._fd, False)
        context.loop.watch(self._fd, READ, self._on_readable, lambda _error: self._finish(_CUT_SHORT))

    def kill(self) -> None:
        """Kill the worker, whatever it does; its answer is not wanted any more."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
        self._close()

    def _on_death(self, _status: int) -> None:
        self._pid = 0

    def _on_readable(self, _events: int) -> None:
        try:
            chunk = os.read(self._fd, CHUNK_BYTES)
        except BlockingIOError:
            return
        self._answer += chunk
        head, mark, rest = self._answer.partition(_END_OF_HEAD)
        if mark:
            self._answer = rest
            self._on_head(_decode(bytes(head)))
        if not chunk or len(self._answer) > MAX_FRAME_BYTES:
            self._finish(_decode(bytes(self._answer)))

    def _finish(self, answer: object) -> None:
        if self._fd >= 0:
            self._close()
            self._on_answer(answer)

    def _close(self) -> None:
        if self._fd >= 0:
            self._context.loop.unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1


def _decode(data: bytes) -> object:
    """Return the answer. A worker that was killed gave none, or half of one."""
    try:
        return ANSWERS.decode(data)
    except ProtocolError:
        return _CUT_SHORT


def _live(context: Context, account: UserAccount, work: Work, answer_fd: int, kept: tuple[int, ...]) -> NoReturn:
    """Do the work and exit, in the fork. Nothing may unwind into PID 1's stack."""
    try:
        try:
            _become(account, context, kept)
            answer = work(lambda head: _write(answer_fd, ANSWERS.encode(head) + _END_OF_HEAD))
        except Refused as refused:
            answer = refused.error
        except OSError as error:
            failure = refusal(error, os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else "")
            answer = failure.error
        except Exception as error:  # noqa: BLE001 - the last frame of the process
            answer = Error("IO_ERROR", f"the work failed ({type(error).__name__})")
        _write(answer_fd, ANSWERS.encode(answer))
    finally:
        os._exit(0)


def _write(fd: int, message: bytes) -> None:
    data = memoryview(message)
    while data:
        data = data[os.write(fd, data) :]


def _become(account: UserAccount, context: Context, kept: tuple[int, ...]) -> None:
    rules_fd = context.settings.rules_fd
    _close_others(context.kernel, kept if rules_fd < 0 else (*kept, rules_fd))
    signal.set_wakeup_fd(-1)
    unblock_signals()
    context.kernel.keep_pages_apart()  # before foreign bytes are read: a fork has the marks of its parent's memory
    change_user(context.kernel, account)
    if rules_fd >= 0:
        context.kernel.enter_file_rules(rules_fd)
        os.close(rules_fd)
    context.kernel.restrict_command()
    os.umask(0)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.enable()


def _close_others(kernel: Kernel, kept: tuple[int, ...]) -> None:
    first = 3
    for fd in sorted(kept):
        if fd > first:
            kernel.close_range(first, fd - 1)
        first = fd + 1
    kernel.close_range(first, FD_MAX)


MAX_JOBS = 16
"""At a time; each is a process."""

MAX_WATCHES = 8
"""Jobs that may watch files: they last, and others shall find room."""


class FileJobs:
    """The requests under way."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._running: set[FileJob] = set()

    def begin(self, request: FileRequest, sink: Sink) -> FileJob:
        """Begin a request.

        Raises:
            Refused: TOO_MANY, NO_SUCH_USER.
        """
        account = account_of(self._context, request.user)
        if len(self._running) >= MAX_JOBS:
            raise Refused("TOO_MANY", f"{MAX_JOBS} requests for files are under way")
        is_watch = isinstance(request, WatchFiles)
        if is_watch and sum(each.is_watch for each in self._running) >= MAX_WATCHES:
            raise Refused("TOO_MANY", f"{MAX_WATCHES} watches are under way")
        job = FileJob(self._context, sink, self._running.discard, is_watch=is_watch)
        try:
            job.begin(request, account)
        except OSError as error:
            job.on_close()
            reason = os.strerror(error.errno or 0).lower()
            raise Refused("TOO_MANY", f"no process could be made: {reason}") from None
        self._running.add(job)
        return job


def account_of(context: Context, user: str | None) -> UserAccount:
    """Return whom a request is performed as. Raises `Refused`: NO_SUCH_USER."""
    if user is None:
        return context.as_user.account
    if context.config.files_only:
        raise Refused("NO_SUCH_USER", "the files here have one user")
    return look_up(context, user)


class WorkerStreams(Streams):
    """The pipe that a worker reads content from, or the one it writes content to. `input_fd` and `output_fd` are
    the worker's ends, open until `close_worker_side`."""

    def __init__(self, job: FileJob, context: Context, request: FileRequest) -> None:
        super().__init__()
        self.input_fd = self.output_fd = -1
        if request.takes_input:
            self.input_fd, write_fd = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(write_fd, False)
            self._inflow = Inflow(context.loop, job, write_fd)
        if request.gives_output:
            read_fd, self.output_fd = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(read_fd, False)
            self._outflows.append(Outflow(context.loop, read_fd, Kind.DATA, job))

    @property
    def worker_side(self) -> list[int]:
        return [fd for fd in (self.input_fd, self.output_fd) if fd >= 0]

    def close_worker_side(self) -> None:
        for fd in self.worker_side:
            os.close(fd)
        self.input_fd = self.output_fd = -1


class FileJob(ClientSide):
    """One request. It is over when the worker's answer has come and all output was sent."""

    def __init__(
        self, context: Context, sink: Sink, on_over: Callable[[FileJob], None], *, is_watch: bool = False
    ) -> None:
        super().__init__(sink)
        self._context = context
        self.is_watch = is_watch
        self._on_over = on_over
        self._worker: FileWorker | None = None
        self._answer: object = None

    def begin(self, request: FileRequest, account: UserAccount) -> None:
        """Start the work.

        Raises:
            OSError: there is no process or descriptor left.
        """
        config, kernel = self._context.config, self._context.kernel
        resolver = Resolver(config, kernel, anywhere=not config.files_only)
        self._streams = streams = WorkerStreams(self, self._context, request)
        input_fd, output_fd = streams.input_fd, streams.output_fd
        try:
            self._worker = FileWorker(
                self._context,
                lambda start: perform(request, FileWork(resolver, kernel, start, input_fd, output_fd)),
                self._on_answer,
                kept=streams.worker_side,
                account=account,
                on_head=self._on_head,
            )
        finally:
            streams.close_worker_side()
        if not request.has_head:
            streams.resume()

    def _on_head(self, head: object) -> None:
        if self._sink is not None and not isinstance(head, Error):
            self._sink.start(head)
            self._streams.resume()

    def _on_answer(self, answer: object) -> None:
        self._answer = answer
        self._streams.finish(may_read=self._may_read)
        self.on_output_done()

    def on_output_done(self) -> None:
        if self._worker is not None and self._answer is not None and self._streams.is_done:
            self._finish(self._answer)

    def _finish(self, answer: object) -> None:
        sink = self._sink
        self.on_close()
        if sink is not None:
            sink.finish(answer)

    def on_cancel(self) -> None:
        self._finish(Error("IO_ERROR", "cancelled"))

    def on_close(self) -> None:
        """Give everything up: the client is gone, or the answer is known."""
        self._sink = None
        if self._worker is not None:
            self._worker.kill()
            self._worker = None
        self._streams.close(None)
        self._streams = NO_STREAMS
        self._on_over(self)
