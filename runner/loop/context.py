"""Parts that every request meets: the context in which PID 1 serves it, the sink for its answer, the job that takes the
further frames of its connection, the descriptor that came with it, its refusal, and the registry of runs by their ids.

Sources: unix(7) SCM_RIGHTS.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol

from runner.loop.config import RunnerConfig
from runner.loop.identity import UserIdentity, sandbox_user
from runner.loop.kernel import Kernel
from runner.loop.loop import EventLoop
from runner.loop.reaper import ChildReaper
from runner.loop.settings import Settings
from runner.wire.protocol import Error, ErrorCode, Kind, TerminalSize


class Refused(Exception):
    """A request is answered with an error."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.error = Error(code, message)


def refuse(problem: str | None) -> None:
    """Raise `Refused` with BAD_REQUEST unless the check of a request has found no problem."""
    if problem is not None:
        raise Refused("BAD_REQUEST", problem)


class Descriptor:
    """At most one descriptor that came with a request, closed unless the request takes it."""

    def __init__(self, fd: int = -1) -> None:
        self.fd = fd
        """-1 if there is none."""

    def take(self) -> int:
        """Return the descriptor, which is the caller's from now on."""
        fd, self.fd = self.fd, -1
        return fd

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.take())


class Reachable(Protocol):
    """A run as `Signal`, `Cancel` and `Resize` see it."""

    def signal(self, number: int) -> bool:
        """Send a signal; return whether there was anything to send it to."""

    def cancel(self, *, now: bool) -> None:
        """Begin to end it; `now`: by SIGKILL at once."""

    def resize(self, size: TerminalSize) -> bool:
        """Change the size of its terminal; return whether it has one."""


class Registry:
    """Runs by their ids, so that another connection can reach them. Several runs may carry one id; the last is reached.
    Owns nothing: a run adds and removes itself."""

    def __init__(self) -> None:
        self._reachable: dict[str, Reachable] = {}

    def add(self, exec_id: str, reachable: Reachable) -> None:
        self._reachable[exec_id] = reachable

    def remove(self, exec_id: str, reachable: Reachable) -> None:
        """Forget a run; a later one of the same id stays."""
        if self._reachable.get(exec_id) is reachable:
            del self._reachable[exec_id]

    def get(self, exec_id: str) -> Reachable | None:
        return self._reachable.get(exec_id)

    @property
    def is_empty(self) -> bool:
        """Whether nothing runs or waits to run."""
        return not self._reachable


@dataclass(frozen=True, slots=True)
class Context:
    """Objects that live as long as PID 1, made once at start. `as_user` is entered around file system work on behalf of
    the session's user, whose account it knows."""

    config: RunnerConfig
    kernel: Kernel
    loop: EventLoop
    reaper: ChildReaper
    as_user: UserIdentity
    settings: Settings
    registry: Registry
    shells_fd: int = -1
    """A directory with copies of the image's shells that can be executed and not read, -1 if there is none."""

    @classmethod
    def open(cls, config: RunnerConfig, kernel: Kernel, *, shells_fd: int = -1) -> Context:
        """Make the loop and begin to reap; signals must be blocked already."""
        loop = EventLoop()
        user = UserIdentity(sandbox_user(config), kernel)
        return cls(config, kernel, loop, ChildReaper(loop), user, Settings(config), Registry(), shells_fd)

    def file(self, name: str) -> str:
        """Return the path of a file in the private directory."""
        return f"{self.config.private_dir}/{name}"


class Job(Protocol):
    """A request under way, as its connection sees it."""

    def on_data(self, data: bytes) -> None:
        """Take a DATA frame."""

    def on_end(self) -> None:
        """Take an END frame: no DATA follows."""

    def on_cancel(self) -> None:
        """Take a CANCEL frame."""

    def on_close(self) -> None:
        """The connection is gone; no answer is wanted."""

    def on_drained(self) -> None:
        """The sink was full, and has room again."""

    @property
    def wants_input(self) -> bool:
        """Whether more frames are read from the connection."""


class Sink(Protocol):
    """The way of an answer: a connection, or a kept run, which outlives its connections."""

    def send(self, kind: Kind, body: bytes) -> None: ...

    def start(self, message: object) -> None:
        """Send STARTED, at most once and before any output."""

    def finish(self, message: object) -> None:
        """Send the final frame, an answer or an `Error`. Nothing may follow."""

    def refresh_input(self) -> None:
        """Ask the job again whether it wants input."""

    @property
    def piece_bytes(self) -> int:
        """Largest piece of output to send."""

    @property
    def is_full(self) -> bool:
        """Whether to wait for `Job.on_drained` before sending more."""


class Caller(Sink, Protocol):
    """A connection whose requests another process may serve for a while."""

    def hand_over(self) -> tuple[int, bytes]:
        """Return the descriptor, which stays the connection's, and what was received behind the request. Nothing is
        read or sent here until `take_back`."""

    def take_back(self) -> None:
        """Serve the next request here: the other process has answered all that it has read."""

    def close(self) -> None:
        """Close the connection."""
