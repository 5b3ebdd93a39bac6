"""Entry of PID 1 of a sandbox: takes the descriptors it was built with and serves until it is killed.

Nothing is imported once PID 1 runs, for the file system is the sandbox's by then; so every module is imported here.

Sources: pid_namespaces(7) "The namespace init process".
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from typing import Any, NoReturn

from runner.files.worker import FileWorkers
from runner.loop.config import RunnerConfig
from runner.loop.context import Caller, Context, Descriptor, Job, Reachable, Refused, refuse
from runner.loop.kernel import Kernel
from runner.loop.reaper import block_signals
from runner.process.process_set import hold_proc
from runner.programs.programs import Programs
from runner.server.kept import KeptRuns
from runner.server.ports import Ports
from runner.server.server import Connection, RunnerServer
from runner.server.sockets import Asked, SocketGate
from runner.shell.shells import Shells
from runner.streams import pty
from runner.wire.protocol import (
    MAX_REQUEST_BYTES,
    REQUESTS,
    AttachRun,
    Cancel,
    CloseShell,
    Done,
    Exec,
    FileRequest,
    ForgetRuns,
    Hello,
    Kind,
    ListRuns,
    OpenShell,
    Resize,
    RunProgram,
    SetEnv,
    Setup,
    Signal,
    Thawed,
    Watch,
    encode_frame,
)

_FOR_FILES = (Hello, Thawed, FileRequest)

_NO_VERSION = -1


class Service:
    """Pairs each kind of request with the object that serves it."""

    def __init__(self, context: Context, diag: socket.socket | None = None) -> None:
        self._context = context
        self._diag = diag
        self._shells = Shells(context)
        self._programs: Programs | None = None  # these two are made when first needed: an idle session is spared them
        self._ports: Ports | None = None
        self._runs = KeptRuns()
        self._files = FileWorkers(context)

    def dispatch(self, request: Any, sink: Caller, descriptor: Descriptor) -> Job | None:  # one of REQUESTS
        """Begin a request; return its job unless the request is answered."""
        try:
            return self._begin(request, sink, descriptor)
        except Refused as refused:
            sink.finish(refused.error)
            return None

    def _begin(self, request: Any, sink: Caller, descriptor: Descriptor) -> Job | None:
        if self._context.config.files_only and not isinstance(request, _FOR_FILES):
            raise Refused("BAD_REQUEST", "there are only files here")
        match request:
            case Hello():
                sink.finish(self._shells.hello())
            case Setup():
                sink.finish(self._shells.set_up(request))
            case SetEnv():
                refuse(self._context.settings.check(request.env))
                self._context.settings.change(request.env)
                sink.finish(Done())
            case Thawed(frozen_ms):
                self._context.loop.postpone(max(0, frozen_ms) / 1000)
                sink.finish(Done())
            case OpenShell():
                self._wake_ports()
                sink.finish(self._shells.open(request, descriptor))
            case CloseShell():
                self._shells.close(request, sink)
            case Signal() | Cancel() | Resize():
                self._reach(request)
                sink.finish(Done())
            case Exec():
                self._wake_ports()
                return self._runs.begin(request, sink, lambda to: self._shells.submit(request, to))
            case RunProgram():
                self._wake_ports()
                programs = self._programs = self._programs or Programs(self._context, shell_argv=self._shells.argv)
                return self._runs.begin(request, sink, lambda to: programs.run(request, to, descriptor))
            case AttachRun():
                return self._runs.attach(request, sink)
            case ListRuns():
                sink.finish(self._runs.list(request))
            case ForgetRuns():
                self._runs.forget(request)
                sink.finish(Done())
            case Watch():
                self._ports = self._ports or Ports(self._context, shell_pids=self._shells.pids, diag=self._diag)
                return self._ports.watch(sink)
            case FileRequest():
                return self._files.begin(request, sink)
            case _:
                raise Refused("BAD_REQUEST", "no request of this version")
        return None

    def _wake_ports(self) -> None:
        if self._ports is not None:
            self._ports.wake()

    def _reach(self, request: Signal | Cancel | Resize) -> None:
        """Signal, cancel or resize the run with an id.

        Raises:
            Refused
        """
        refuse(_check_reach(request))
        target = self._context.registry.get(request.exec_id)
        if target is None or not _act_on(target, request):
            raise Refused("NOT_RUNNING", f"nothing runs as {request.exec_id[:64]!r}")


def _check_reach(request: Signal | Cancel | Resize) -> str | None:
    match request:
        case Signal(number=number):
            return None if 0 < number < signal.NSIG else "no such signal"
        case Resize(size=size):
            return pty.check_size(size)
        case Cancel():
            return None


def _act_on(target: Reachable, request: Signal | Cancel | Resize) -> bool:
    match request:
        case Signal(number=number):
            return target.signal(number)
        case Resize(size=size):
            return target.resize(size)
        case Cancel(now=now):
            target.cancel(now=now)
            return True


def rehearse(kernel: Kernel, config: RunnerConfig) -> None:
    """Serve one request, which is refused, on a loop of its own; for a PID 1 that waits for its sandbox to be built.
    Signals are blocked afterwards, as the runner blocks them itself.

    PID 1 is a fork, and the kernel copies every page it writes to (fork(2), copy-on-write); in Python a write is the
    reference count of everything a piece of code names. The first request writes to hundreds of such pages. After a
    rehearsal most of them are PID 1's own before somebody waits for the session, and no more of them than without.

    The file system is not the sandbox's yet, and is not touched. Descriptors stay open: the sink closes all that are
    not its own.
    """
    block_signals()
    context = Context.open(config, kernel)
    ours, theirs = socket.socketpair()
    with ours:
        theirs.setblocking(False)
        connection = Connection(context.loop, theirs, Service(context).dispatch, lambda _connection: None)
        ours.sendall(encode_frame(Kind.REQUEST, REQUESTS.encode(Setup(version=_NO_VERSION))))
        context.loop.run_once()
        ours.recv(MAX_REQUEST_BYTES, socket.MSG_DONTWAIT)
        connection.close()
    signal.set_wakeup_fd(-1)
    context.loop.close()


def run(
    listener_fd: int,
    shells_fd: int,
    kernel: Kernel,
    *,
    on_ready: Callable[[], None],
    config: RunnerConfig | None = None,
    asked: Asked | None = None,
    diag_fd: int = -1,
) -> NoReturn:
    """Serve requests on the listening socket as PID 1, until the sandbox is killed.

    `on_ready` is called once, when the first connection would be served. `asked`: the kernel asks about sockets.
    `shells_fd`: the directory of shells that nobody can read, or -1. `diag_fd`: a socket of sock_diag(7), or -1.
    """
    config = config or RunnerConfig()
    block_signals()
    os.umask(0)  # modes of what is made here are meant as written; commands get 022
    hold_proc()
    context = Context.open(config, kernel, shells_fd=shells_fd)
    diag = socket.socket(fileno=diag_fd) if diag_fd >= 0 else None
    RunnerServer(context, listener_fd, Service(context, diag).dispatch)
    if asked is not None:
        SocketGate(context.loop, asked)
    on_ready()
    context.loop.run_forever()
