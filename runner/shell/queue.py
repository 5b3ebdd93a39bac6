"""The queue in front of one persistent shell: one command at a time, in order of arrival.

`CommandQueue` pairs commands with a waiting shell, and gives the command in the shell the news of that shell. What the
news means for the command is the business of `Execution`.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Callable

from runner.loop import settings
from runner.loop.context import Context, Sink
from runner.loop.identity import UserIdentity
from runner.process.process_set import RunCgroupSet, TreeSet
from runner.shell.ending import Ladder
from runner.shell.execution import Execution
from runner.shell.shell import Birth, Shell, ShellEvents
from runner.streams import pty
from runner.streams.flow import AbandonedPipes
from runner.wire.protocol import Exec

_MAX_BEGINNINGS = 2
_MAX_TIMEOUT_MS = 2**31
_REAP_S = 0.001


class CommandQueue:
    """Owns the shell and every command that waits, runs or ends."""

    def __init__(
        self,
        context: Context,
        leftovers: AbandonedPipes,
        *,
        directory: str,
        birth: Birth,
        unused_s: float | None = None,
    ) -> None:
        """Start the shell as soon as the answer to the request for it is out, and end it if no command has come within
        `unused_s`, None for never. With 0 the first command starts it.

        Raises:
            OSError: its files could not be made.
        """
        self._context = context
        self._leftovers = leftovers
        self._queue: deque[Execution] = deque()
        self._current: Execution | None = None
        self._beginnings = 0
        self._restarted = False
        self._closing: Ladder | None = None
        events = ShellEvents(
            on_ready=self._on_ready,
            on_begun=self._on_begun,
            on_status=self._on_status,
            on_unstarted=self._on_unstarted,
            on_death=self._on_death,
            on_failed=self._on_failed,
            on_rested=self._next,
            on_error=self._on_error,
        )
        self.shell = Shell(context, directory=directory, birth=birth, events=events)
        self._is_used = self._is_overdue = False
        if unused_s != 0:
            context.loop.call_later(0.0, self.shell.ensure_starting, self._on_error)
        if unused_s:
            context.loop.call_later(unused_s, self._on_overdue, self._on_error)

    def submit(self, request: Exec, sink: Sink) -> Execution:
        """Queue a valid request; the shell must not be closing."""
        execution = Execution(self._context, request, sink, self.shell, self._leftovers, on_over=self._on_over)
        self._queue.append(execution)
        self._is_used = True
        self._next()
        if request.queue_timeout_ms is not None and execution is not self._current:
            execution.limit_wait(request.queue_timeout_ms)
        return execution

    def close(self, on_closed: Callable[[], None]) -> None:
        """Kill the shell and all it has started; its commands end as cancelled. `on_closed` follows."""
        self.shell.retire()
        group = self.shell.group
        processes = TreeSet(lambda: self.shell.pid) if group is None else RunCgroupSet(group)
        self._closing = Ladder(
            self._context,
            processes,
            on_clear=lambda: self._on_clear(on_closed),
            on_error=lambda _error: on_closed(),
            now=True,
        )
        self._closing.climb()

    def _on_overdue(self) -> None:
        self._is_overdue = True
        self._rest()

    def _rest(self) -> None:
        """End a shell that no command came for in time. One that still starts then ends as soon as it is ready."""
        if self._is_overdue and not self._is_used:
            self.shell.rest()

    def _on_clear(self, on_closed: Callable[[], None]) -> None:
        if self.shell.pid is not None:  # dead, and about to be reaped
            assert self._closing is not None
            self._context.loop.call_later(_REAP_S, self._closing.climb, lambda _error: on_closed())
            return
        self._closing = None
        current, self._current = self._current, None
        for execution in (*([current] if current else ()), *self._queue):
            execution.on_shell_closed()
        self.shell.close()
        on_closed()

    def _next(self) -> None:
        while self._current is None and self._queue:
            if not self.shell.is_ready:
                self.shell.ensure_starting()
                return
            self._current = self._queue.popleft()
            self._beginnings = 0
            self._begin(self._current)

    def _begin(self, execution: Execution) -> None:
        execution.shell_restarted |= self._restarted
        self._restarted = False
        self._beginnings += 1
        if not may_enter(self._context, self.shell.identity, execution.request.cwd):
            execution.fail("FILE_NOT_FOUND", f"no directory to run in: {execution.request.cwd}")
            return
        try:
            execution.begin()
        except OSError as error:
            execution.fail("SHELL_FAILED", f"the shell cannot be handed a command: {os.strerror(error.errno or 0)}")

    # News of the shell ----------------------------------------------------------------------------------------------

    def _on_ready(self) -> None:
        if self._current is not None:
            if self._current.is_taken_back:
                self._begin(self._current)
            else:
                self._current.on_shell_ready()
        self._next()
        self._rest()

    def _on_begun(self) -> None:
        if self._current is not None:
            self._current.on_begun()

    def _on_status(self, status: int) -> None:
        if self._current is not None:
            self._current.on_status(status)

    def _on_death(self, wait_status: int) -> None:
        if self._current is not None and self._current.is_unstarted:
            self._on_unstarted()
        if self._current is None or self._current.is_taken_back or self._current.is_withdrawn:
            self._restarted = True
        else:
            self._current.on_shell_death(wait_status)

    def _on_unstarted(self) -> None:
        if self._current is not None:
            self._current.on_unstarted(may_retry=self._beginnings < _MAX_BEGINNINGS)

    def _on_failed(self) -> None:
        if self._current is not None:
            self._current.on_no_shell()
        while self._queue:
            self._queue.popleft().fail("SHELL_FAILED", self.shell.failure)

    def _on_error(self, _error: Exception) -> None:
        """A turn between the shell and its command was lost: the command pays, the queue goes on."""
        try:
            if self._current is not None:
                self._current.fail("IO_ERROR", "the command was lost")
        finally:
            self.shell.replace()

    def _on_over(self, execution: Execution) -> None:
        if execution is self._current:
            self._current = None
            self._context.loop.call_soon(self._next, lambda _error: None)
        elif execution in self._queue:
            self._queue.remove(execution)


def may_enter(context: Context, identity: UserIdentity, cwd: str | None) -> bool:
    """Return whether a user may enter a directory, given relative to the workspace."""
    if cwd is None:
        return True
    try:
        with identity:
            return stat.S_ISDIR(os.stat(os.path.join(context.config.workspace, cwd, ".")).st_mode)
    except OSError:
        return False


def check_request(request: Exec) -> str | None:
    """Return what is wrong with a command that no shell could be handed, or None."""
    if not all(settings.is_argument(text) for text in (request.command, request.cwd or "")):
        return "a command or directory cannot hold a NUL character or a lone surrogate"
    for limit_ms in (request.timeout_ms, request.queue_timeout_ms):
        if limit_ms is not None and not 0 < limit_ms <= _MAX_TIMEOUT_MS:
            return "a time limit is out of range"
    if request.terminal is not None:
        return pty.check_size(request.terminal) or settings.check_environment(request.env)
    if request.interactive:
        return "an interactive command needs a terminal"
    return settings.check_environment(request.env)
