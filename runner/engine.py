"""The queue in front of the persistent shell: one command at a time, in order of arrival.

It must not touch a command's streams; it pairs commands with a waiting shell and passes on what the shell reports.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Mapping

from runner import driver
from runner.context import Context
from runner.execution import Execution, Sink
from runner.output import Leftovers
from runner.protocol import Exec
from runner.shell import Shell, ShellEvents, find_shell

_MAX_BEGINNINGS = 2
_MAX_TIMEOUT_MS = 2**31


class Engine:
    """Owns the shell and every command that waits, runs or ends."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._leftovers = Leftovers(context.loop)
        self._queue: deque[Execution] = deque()
        self._current: Execution | None = None
        self._beginnings = 0
        self._restarted = False
        self.shell: Shell | None = None

    def set_up(self, preferred: str, env: Mapping[str, str]) -> bool:
        """Have the shell started once the answer is out; return whether the image has one. A second call changes
        nothing."""
        if self.shell is not None:
            return True
        argv = find_shell(preferred)
        if argv is None:
            return False
        events = ShellEvents(
            on_ready=self._on_ready,
            on_status=self._on_status,
            on_death=self._on_death,
            is_begun=self._is_begun,
            on_unstarted=self._on_unstarted,
            on_failed=self._on_failed,
            on_error=self._on_error,
        )
        self.shell = Shell(self._context, argv=argv, env=env, events=events)
        self._context.loop.call_later(0.0, self.shell.ensure_starting, self._on_error)
        return True

    def submit(self, request: Exec, sink: Sink) -> Execution:
        """Queue a valid request; the shell must have been set up."""
        assert self.shell is not None
        execution = Execution(self._context, request, sink, self.shell, self._leftovers, on_over=self._on_over)
        self._queue.append(execution)
        self._next()
        return execution

    def _next(self) -> None:
        if self.shell is None:
            return
        while self._current is None and self._queue:
            if not self.shell.is_ready:
                self.shell.ensure_starting()
                return
            self._current = self._queue.popleft()
            self._beginnings = 0
            self._begin(self._current)

    def _begin(self, execution: Execution) -> None:
        assert self.shell is not None
        execution.shell_restarted |= self._restarted
        self._restarted = False
        self._beginnings += 1
        if not self._may_enter(execution.request.cwd):
            execution.fail("FILE_NOT_FOUND", f"no directory to run in: {execution.request.cwd}")
            return
        try:
            execution.begin(_new_number())
        except OSError as error:
            execution.fail("IO_ERROR", f"cannot prepare the command: {os.strerror(error.errno or 0)}")

    def _may_enter(self, cwd: str | None) -> bool:
        if cwd is None:
            return True
        try:
            with self._context.as_user:
                return stat.S_ISDIR(os.stat(os.path.join(self._context.config.workspace, cwd, ".")).st_mode)
        except OSError:
            return False

    # What the shell tells ------------------------------------------------------------------------------------------

    def _on_ready(self) -> None:
        assert self.shell is not None
        if self._current is not None:
            if self._current.has_ended:
                self._current.conclude(self.shell.cwd)
            elif self._current.is_taken_back:
                self._begin(self._current)
        self._next()

    def _on_status(self, status: int | None) -> None:
        if self._current is not None:
            self._current.on_status(status)

    def _on_death(self, wait_status: int) -> None:
        if self._current is not None and not self._current.is_taken_back and self._current.can_be_retried:
            self._on_unstarted()
        if self._current is None or self._current.is_taken_back:
            self._restarted = True
        else:
            self._current.on_shell_death(wait_status)

    def _is_begun(self) -> bool:
        return self._current is None or self._current.is_begun

    def _on_unstarted(self) -> None:
        if self._current is None:
            return
        if self._beginnings < _MAX_BEGINNINGS:
            self._current.take_back()
        else:
            self._current.fail("SHELL_FAILED", "the shell does not take commands")

    def _on_failed(self) -> None:
        assert self.shell is not None
        if self._current is not None and self._current.has_ended:
            self._current.conclude(self.shell.cwd)
        elif self._current is not None:
            self._current.fail("SHELL_FAILED", "the shell cannot be started")
        while self._queue:
            self._queue.popleft().fail("SHELL_FAILED", "the shell cannot be started")

    def _on_error(self, _error: Exception) -> None:
        """Something went wrong between the shell and its command: the command pays, the queue goes on."""
        if self._current is not None:
            self._current.fail("IO_ERROR", "the command was lost")
        if self.shell is not None:
            self.shell.replace()

    def _on_over(self, execution: Execution) -> None:
        if execution is self._current:
            self._current = None
            self._context.loop.call_soon(self._next, lambda _error: None)
        elif execution in self._queue:
            self._queue.remove(execution)


def check_request(request: Exec) -> str | None:
    """Return what is wrong with a command no shell could be handed, or None."""
    texts = (request.command, request.cwd or "", *request.env.values())
    if any("\0" in text for text in texts):
        return "a command, directory or variable cannot hold a NUL character"
    for name in request.env:
        if not driver.is_variable_name(name):
            return f"not a variable name: {name[:64]!r}"
    if request.timeout_ms is not None and not 0 < request.timeout_ms <= _MAX_TIMEOUT_MS:
        return "timeout_ms is out of range"
    try:
        for text in texts:
            os.fsencode(text)
    except UnicodeEncodeError:
        return "a command, directory or variable holds a lone surrogate"
    return None


def _new_number() -> int:
    """Return the number that a command's status must carry: one that no other process of the sandbox can foresee, so
    that a job of an earlier command can't end a later one by writing to the status FIFO."""
    return 1 + int.from_bytes(os.urandom(7), "big")
