"""PID 1 of a sandbox: takes the descriptors it was built with and serves until it is killed.

It must not import anything once it runs (the file system is the sandbox's by then), and it never returns.

Sources: pid_namespaces(7) "The namespace init process".
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NoReturn

from runner.config import RunnerConfig
from runner.context import Context
from runner.engine import Engine, check_request
from runner.execution import Sink
from runner.files import FileReader, FileWriter
from runner.kernel import Kernel
from runner.protocol import PROTOCOL_VERSION, Error, Exec, Hello, HelloReply, ReadFile, Setup, WriteFile
from runner.reaper import block_signals
from runner.server import Job, Server


class Service:
    """Pairs each kind of request with what serves it."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._engine = Engine(context)
        self._writers = 0

    def dispatch(self, request: Any, sink: Sink) -> Job | None:  # one of REQUESTS, matched below
        """Begin a request; return its job unless it is answered."""
        match request:
            case Hello():
                sink.finish(self._hello())
            case Setup():
                self._set_up(request, sink)
            case Exec():
                return self._exec(request, sink)
            case ReadFile():
                reader = FileReader(self._context)
                reader.begin(request, sink)
                return reader
            case WriteFile():
                self._writers += 1
                writer = FileWriter(self._context, self._writers)
                writer.begin(request, sink)
                return writer
        return None

    def _hello(self) -> HelloReply:
        shell = self._engine.shell
        if shell is None:
            return HelloReply("", self._context.config.workspace)
        return HelloReply(shell.path, os.fsdecode(shell.cwd))

    def _set_up(self, request: Setup, sink: Sink) -> None:
        if request.version != PROTOCOL_VERSION:
            sink.finish(Error("BAD_REQUEST", f"protocol version {PROTOCOL_VERSION} is spoken here"))
        elif any(not name or "=" in name or "\0" in name + value for name, value in request.env.items()):
            sink.finish(Error("BAD_REQUEST", "env holds an impossible name or value"))
        elif self._engine.set_up(request.shell, request.env):
            sink.finish(self._hello())
        else:
            sink.finish(Error("NO_SHELL", "the image has no shell"))

    def _exec(self, request: Exec, sink: Sink) -> Job | None:
        problem = check_request(request) if self._engine.shell is not None else "no shell was set up"
        if problem is not None:
            sink.finish(Error("BAD_REQUEST", problem))
            return None
        return self._engine.submit(request, sink)


def run(
    listener_fd: int, kernel: Kernel, *, on_ready: Callable[[], None], config: RunnerConfig | None = None
) -> NoReturn:
    """Be PID 1: serve requests on the listening socket until the sandbox is killed.

    `on_ready` is called once, when the first connection would be served.
    """
    config = config or RunnerConfig()
    block_signals()
    os.umask(0)  # modes of what is made here are meant as written; commands get 022
    context = Context.open(config, kernel)
    Server(context, listener_fd, Service(context).dispatch)
    on_ready()
    context.loop.run_forever()
