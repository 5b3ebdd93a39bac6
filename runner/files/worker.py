"""PID 1's half of the requests for files: one offshoot each, its output and input pumped, its answer passed on.

It must not look at a file itself: that may block, or take long.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from runner.files.offshoot import Offshoot
from runner.files.operations import Request, perform
from runner.files.paths import Resolver
from runner.loop.config import STDIN_BUFFER_BYTES
from runner.loop.context import Context
from runner.loop.loop import READ
from runner.loop.sink import Sink
from runner.streams.flow import Inflow
from runner.wire.protocol import CHUNK_BYTES, Error, Kind, Pack, Unpack

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
