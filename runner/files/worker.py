"""PID 1's half of the requests for files: one offshoot each, its output and input pumped, its answer passed on.

It must not look at a file itself: that may block, or take long.

Work of PID 1's own that may take long or meet something that blocks, in a fork of it that is the sandbox user.

The fork runs our code and no other: it has no capability, keeps only the descriptors it was given, and ends with one
answer, a message of `protocol.ANSWERS`. PID 1 never waits for it; whoever gives up kills it.

Sources: pipe(7); fork(2); credentials(7).
"""

from __future__ import annotations

import gc
import os
import resource
import signal
from collections.abc import Callable, Iterable
from typing import NoReturn

from runner.files.operations import Request, perform
from runner.files.paths import FileRefused, Resolver, refusal
from runner.loop.config import STDIN_BUFFER_BYTES
from runner.loop.context import Context, Sink
from runner.loop.kernel import FD_MAX, Kernel
from runner.loop.loop import READ
from runner.loop.reaper import unblock_signals
from runner.process.spawn import change_user, fork
from runner.streams.flow import Inflow
from runner.wire.protocol import ANSWERS, CHUNK_BYTES, MAX_FRAME_BYTES, Error, Kind, Pack, ProtocolError, Unpack

Work = Callable[[], object]
"""Runs in the fork and returns the answer. Raises `FileRefused` or `OSError` for what went wrong."""

_CUT_SHORT = Error("IO_ERROR", "the work was cut short")


class Offshoot:
    """One such fork. `on_answer` is called once, unless it is killed before."""

    def __init__(
        self, context: Context, work: Work, on_answer: Callable[[object], None], *, kept: Iterable[int] = ()
    ) -> None:
        """Raises `OSError`: no process could be made."""
        self._context = context
        self._on_answer = on_answer
        self._answer = bytearray()
        self._fd, answer_fd = os.pipe2(os.O_CLOEXEC)
        self._pid = 0
        try:
            pid = fork(context.kernel)
            if pid == 0:
                _live(context, work, answer_fd, (*kept, answer_fd))
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
        """End it, whatever it does; its answer is not wanted any more."""
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
    """Return the answer; of a fork that was killed there is none, or half of one."""
    try:
        return ANSWERS.decode(data)
    except ProtocolError:
        return _CUT_SHORT


def _live(context: Context, work: Work, answer_fd: int, kept: tuple[int, ...]) -> NoReturn:
    """The fork. Nothing may unwind into PID 1's stack."""
    try:
        try:
            _become_user(context, kept)
            answer = work()
        except FileRefused as refused:
            answer = Error(refused.code, str(refused))
        except OSError as error:
            failure = refusal(error, os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else "")
            answer = Error(failure.code, str(failure))
        except Exception as error:  # noqa: BLE001 - the last frame of the process
            answer = Error("IO_ERROR", f"the work failed ({type(error).__name__})")
        data = memoryview(ANSWERS.encode(answer))
        while data:
            data = data[os.write(answer_fd, data) :]
    finally:
        os._exit(0)


def _become_user(context: Context, kept: tuple[int, ...]) -> None:
    _close_others(context.kernel, kept)
    signal.set_wakeup_fd(-1)
    unblock_signals()
    change_user(context.kernel, context.as_user.account)
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


class FileJobs:
    """Which of them are under way."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._running: set[FileJob] = set()

    def begin(self, request: Request, sink: Sink) -> FileJob | None:
        """Begin a request; return its job unless it is answered."""
        if len(self._running) >= MAX_JOBS:
            sink.finish(Error("TOO_MANY", f"{MAX_JOBS} requests for files are under way"))
            return None
        job = FileJob(self._context, sink, self._running.discard)
        try:
            job.begin(request)
        except OSError as error:
            job.on_close()
            sink.finish(Error("TOO_MANY", f"no process could be made: {os.strerror(error.errno or 0).lower()}"))
            return None
        self._running.add(job)
        return job


class FileJob:
    """One request. It is over when the answer has come and all output was sent."""

    def __init__(self, context: Context, sink: Sink, on_over: Callable[[FileJob], None]) -> None:
        self._context = context
        self._sink: Sink | None = sink
        self._on_over = on_over
        self._offshoot: Offshoot | None = None
        self._inflow: Inflow | None = None
        self._output_fd = -1
        self._is_watched = False
        self._answer: object = None

    def begin(self, request: Request) -> None:
        """Start the work. Raises `OSError`: there is no process or descriptor left."""
        resolver = Resolver(self._context.config, self._context.kernel)
        input_fd = output_fd = -1
        try:
            if isinstance(request, Pack):
                self._output_fd, output_fd = os.pipe2(os.O_CLOEXEC)
                os.set_blocking(self._output_fd, False)
            if isinstance(request, Unpack):
                input_fd, write_fd = os.pipe2(os.O_CLOEXEC)
                os.set_blocking(write_fd, False)
                self._inflow = Inflow(self._context.loop, write_fd, self._on_room)
            self._offshoot = Offshoot(
                self._context,
                lambda: perform(request, resolver, self._context.kernel, input_fd=input_fd, output_fd=output_fd),
                self._on_answer,
                kept=[fd for fd in (input_fd, output_fd) if fd >= 0],
            )
        finally:
            for fd in (input_fd, output_fd):
                if fd >= 0:
                    os.close(fd)
        self._resume()

    # Output

    def _resume(self) -> None:
        if self._output_fd >= 0 and not self._is_watched and self._sink is not None and not self._sink.is_full:
            self._is_watched = True
            self._context.loop.watch(self._output_fd, READ, self._on_output, lambda _error: self.on_close())

    def _pause(self) -> None:
        if self._is_watched:
            self._is_watched = False
            self._context.loop.unwatch(self._output_fd)

    def _on_output(self, _events: int) -> None:
        try:
            chunk = os.read(self._output_fd, CHUNK_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            self._end_output()
            self._finish_if_done()
        elif self._sink is not None:
            self._sink.send(Kind.DATA, chunk)
            if self._sink.is_full:
                self._pause()

    def _end_output(self) -> None:
        self._pause()
        if self._output_fd >= 0:
            os.close(self._output_fd)
            self._output_fd = -1

    def _on_answer(self, answer: object) -> None:
        self._answer = answer
        self._finish_if_done()

    def _finish_if_done(self) -> None:
        if self._answer is not None and self._output_fd < 0:
            sink, answer = self._sink, self._answer
            self.on_close()
            if sink is not None:
                sink.finish(answer)

    # Job

    def on_data(self, data: bytes) -> None:
        if self._inflow is not None:
            self._inflow.feed(data)

    def on_end(self) -> None:
        if self._inflow is not None:
            self._inflow.end()

    def on_cancel(self) -> None:
        sink = self._sink
        self.on_close()
        if sink is not None:
            sink.finish(Error("IO_ERROR", "cancelled"))

    def on_close(self) -> None:
        """Nobody waits any more, or all is said."""
        self._sink = None
        if self._offshoot is not None:
            self._offshoot.kill()
            self._offshoot = None
        if self._inflow is not None:
            self._inflow.close()
            self._inflow = None
        self._end_output()
        self._on_over(self)

    def on_drained(self) -> None:
        self._resume()

    @property
    def wants_input(self) -> bool:
        return self._inflow is None or self._inflow.buffered_bytes < STDIN_BUFFER_BYTES

    def _on_room(self) -> None:
        if self._sink is not None:
            self._sink.refresh_input()
