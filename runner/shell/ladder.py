"""Ending a command or program against its will: interrupt, terminate, kill, and at last replace the shell.

It must not know what belongs to the command (`scope`), nor decide what the result says.

Sources: signal(7); bash(1) "SIGNALS" (commands started with `&` ignore SIGINT, so SIGTERM must follow).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from runner.loop.context import Context
from runner.loop.loop import Timer
from runner.process import process_set
from runner.process.process_set import Scope
from runner.shell.shell import Shell

_FIRST_LOOK_S = 0.001
_LAST_LOOK_S = 0.05


class Ladder:
    """Climbs until nothing of the scope is left and the shell, if there is one, is done with the command; then calls
    `on_clear` once. `is_begun` tells whether the shell runs the command yet. `now` starts at the kill."""

    def __init__(
        self,
        context: Context,
        scope: Scope,
        *,
        on_clear: Callable[[], None],
        shell: Shell | None = None,
        is_begun: Callable[[], bool] = lambda: True,
        now: bool = False,
    ) -> None:
        self._loop = context.loop
        self._settings = context.settings
        self._scope = scope
        self._shell = shell
        self._is_begun = is_begun
        self._on_clear = on_clear
        self._start_s = time.monotonic()
        self._is_hurried = now
        self._look_s = _FIRST_LOOK_S
        self._signalled: dict[process_set.Process, int] = {}
        self._timer: Timer | None = None
        self.shell_is_busy = shell is not None
        """Until the shell has reported the command's end or died; the owner clears it."""

    def climb(self) -> None:
        """Take the step that is due and look again soon."""
        self.stop()
        if self.shell_is_busy:
            self._push_shell()
        left = self._push_processes()
        if not left and not self.shell_is_busy:
            self._on_clear()
            return
        self._timer = self._loop.call_later(self._look_s, self.climb, self._on_error)
        self._look_s = min(_LAST_LOOK_S, self._look_s * 1.5)

    def hurry(self) -> None:
        """Go on with the kill at once."""
        if not self._is_hurried:
            self._is_hurried = True
            self._start_s = time.monotonic()
            self._look_s = _FIRST_LOOK_S
            self.climb()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _push_shell(self) -> None:
        """Ask the shell to leave the command; end it when it had its time for that and for what else was killed."""
        if self._shell is None:
            return
        end_s = self._kill_after_s() + self._settings.kill_grace_s
        if self._elapsed_s() >= end_s + self._settings.kill_grace_s:
            self._shell.signal(signal.SIGKILL)
        elif self._elapsed_s() >= end_s:
            self._shell.signal(signal.SIGCONT)
            self._shell.signal(signal.SIGTERM)
        elif self._is_begun():  # a signal before would only disturb how the shell reads the command
            self._shell.abandon()

    def _push_processes(self) -> bool:
        """Signal what is left; return whether there is anything."""
        found = self._scope.find()
        if not found:
            return False
        if self._elapsed_s() >= self._kill_after_s():
            self._scope.kill()
            return True
        number = signal.SIGTERM if self._elapsed_s() >= self._settings.interrupt_grace_s else signal.SIGINT
        for process in found:
            if self._signalled.get(process) != number:
                self._signalled[process] = number
                process_set.send_signal(process.pid, number)
                process_set.send_signal(process.pid, signal.SIGCONT)
        return True

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._start_s

    def _kill_after_s(self) -> float:
        return 0.0 if self._is_hurried else self._settings.interrupt_grace_s + self._settings.terminate_grace_s

    def _on_error(self, _error: Exception) -> None:
        self._timer = self._loop.call_later(_LAST_LOOK_S, self.climb, self._on_error)
