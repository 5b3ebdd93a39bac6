"""Ending a command against its will: abandon, interrupt, terminate, kill, and at last replace the shell.

It must not touch what earlier commands left running, nor decide what the result says.

Sources: signal(7); bash(1) "SIGNALS" (commands started with `&` ignore SIGINT, so SIGTERM must follow).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from runner import processes
from runner.context import Context
from runner.loop import Timer
from runner.shell import Shell

_FIRST_LOOK_S = 0.001
_LAST_LOOK_S = 0.05


class Ladder:
    """Climbs until nothing the command started is left and the shell is done with it, then calls `on_clear` once."""

    def __init__(
        self,
        context: Context,
        shell: Shell,
        *,
        began: processes.Moment,
        is_begun: Callable[[], bool],
        on_clear: Callable[[], None],
    ) -> None:
        self._loop = context.loop
        self._config = context.config
        self._shell = shell
        self._began = began
        self._is_begun = is_begun
        self._on_clear = on_clear
        self._start_s = time.monotonic()
        self._look_s = _FIRST_LOOK_S
        self._signalled: dict[processes.Process, int] = {}
        self._timer: Timer | None = None
        self.shell_is_busy = True
        """Until the shell has reported the command's end or died; the owner clears it."""

    def climb(self) -> None:
        """Take the step that is due and look again soon."""
        if self._timer is not None:
            self._timer.cancel()
        if self.shell_is_busy:
            self._push_shell()
        left = self._push_processes()
        if not left and not self.shell_is_busy:
            self._on_clear()
            return
        self._timer = self._loop.call_later(self._look_s, self.climb, self._on_error)
        self._look_s = min(_LAST_LOOK_S, self._look_s * 1.5)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _push_shell(self) -> None:
        kill_s = self._kill_after_s() + self._config.kill_grace_s
        if self._elapsed_s() >= kill_s + self._config.kill_grace_s:
            self._shell.signal(signal.SIGKILL)
        elif self._elapsed_s() >= kill_s:
            self._shell.signal(signal.SIGCONT)
            self._shell.signal(signal.SIGTERM)
        elif self._is_begun():  # a signal before would only disturb how the shell reads the command
            self._shell.abandon()

    def _push_processes(self) -> bool:
        """Signal what is left of the command; return whether there is anything."""
        roots = self._roots()
        found = processes.started_since(self._began, roots, processes.scan())
        if not found:
            return False
        if self._elapsed_s() >= self._kill_after_s():
            processes.kill_started_since(self._began, roots)
            return True
        number = signal.SIGTERM if self._elapsed_s() >= self._config.interrupt_grace_s else signal.SIGINT
        for process in found:
            if self._signalled.get(process) != number:
                self._signalled[process] = number
                processes.send_signal(process.pid, number)
                processes.send_signal(process.pid, signal.SIGCONT)
        return True

    def _roots(self) -> frozenset[int]:
        return frozenset({os.getpid(), self._shell.pid or os.getpid()})

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._start_s

    def _kill_after_s(self) -> float:
        return self._config.interrupt_grace_s + self._config.terminate_grace_s

    def _on_error(self, _error: Exception) -> None:
        self._timer = self._loop.call_later(_LAST_LOOK_S, self.climb, self._on_error)
