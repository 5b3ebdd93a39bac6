"""What PID 1 does while it waits to be furnished: it serves one request, which is refused, on a loop of its own.

PID 1 is a fork, and what it writes to is copied for it alone, page by page; in Python that is the reference count of
everything a piece of code names. The first request writes to hundreds of such pages while somebody waits for a session.
After a rehearsal most of them are its own already, and no more of them than without.

It must not touch the file system, which is not the sandbox's yet, and keeps nothing but descriptors: whoever calls it
closes all that are not its own before it goes on.

Sources: fork(2) "copy-on-write".
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable

from runner.loop.config import RunnerConfig
from runner.loop.context import Context
from runner.loop.kernel import Kernel
from runner.loop.reaper import block_signals
from runner.server.server import Connection, Dispatch
from runner.wire.protocol import MAX_REQUEST_BYTES, REQUESTS, Kind, Setup, encode_frame

_NO_VERSION = -1


def rehearse(kernel: Kernel, config: RunnerConfig, serving: Callable[[Context], Dispatch]) -> None:
    """Go through a refused `Setup`. Signals are blocked afterwards, as the runner blocks them itself."""
    block_signals()
    context = Context.open(config, kernel)
    ours, theirs = socket.socketpair()
    with ours:
        theirs.setblocking(False)
        connection = Connection(context.loop, theirs, serving(context), _nobody)
        ours.sendall(encode_frame(Kind.REQUEST, REQUESTS.encode(Setup(version=_NO_VERSION))))
        context.loop.run_once()
        ours.recv(MAX_REQUEST_BYTES, socket.MSG_DONTWAIT)
        connection.close()
    signal.set_wakeup_fd(-1)
    context.loop.close()


def _nobody(_connection: Connection) -> None:
    """Who would be told that the connection is closed."""
