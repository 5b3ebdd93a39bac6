"""Ending a run against its will. `Interrupt` and `LineInterrupt` make a shell leave what it runs, as Ctrl-C would;
`Ladder` goes on until nothing of the run is left: interrupt, terminate, kill, and at last replace the shell.

Which processes belong to the run is the business of `runner.process.process_set`.

Sources: signal(7) (which signals end a process by default); bash(1) "SIGNALS" (commands started with `&` ignore SIGINT,
so SIGTERM must follow); `runner.shell.command_driver` (when the shell misses one request to leave).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from runner.loop.context import Context
from runner.loop.loop import EventLoop, OnError, Timer
from runner.process import process_set
from runner.process.process_set import Process, ProcessSet
from runner.shell.shell import Shell
from runner.shell.terminal_driver import LINE_SIGNAL

_FIRST_REPEAT_S = 0.001
_LAST_REPEAT_S = 0.5
_YOUNG_TICKS = 3
_LINE_DELAY_S = 0.005

_HARMLESS = frozenset(
    {
        signal.SIGCHLD,
        signal.SIGCONT,
        signal.SIGURG,
        signal.SIGWINCH,
        signal.SIGSTOP,
        signal.SIGTSTP,
        signal.SIGTTIN,
        signal.SIGTTOU,
    }
)


def ends_by_default(number: int) -> bool:
    """Return whether a process that does nothing about the signal is ended by it."""
    return number not in _HARMLESS


class Interrupt:
    """Asks the shell to leave the command, signals the processes that the command has started, and repeats both a few
    times. One request can be lost: the shell may be just before or after the command, or about to start a program, or
    that program about to begin. A program older than that gets the signal once."""

    def __init__(self, loop: EventLoop, shell: Shell, number: int, find: Callable[[], list[Process]]) -> None:
        self._loop = loop
        self._shell = shell
        self._number = number
        self._find = find
        self._since = process_set.now().tick - _YOUNG_TICKS
        self._signalled: set[Process] = set()
        self._repeat_s = _FIRST_REPEAT_S
        self._timer: Timer | None = None

    def ask(self) -> None:
        self._shell.abandon()  # first: the shell must not go on with the next program when this one ends
        for process in self._find():
            if process not in self._signalled or process.start_tick >= self._since:
                self._signalled.add(process)
                process_set.send_signal(process.pid, self._number)
        if self._repeat_s <= _LAST_REPEAT_S:
            self._timer = self._loop.call_later(self._repeat_s, self.ask, lambda _error: None)
            self._repeat_s *= 2

    def stop(self) -> None:
        """Ask no more: the shell has left the command."""
        if self._timer is not None:
            self._timer.cancel()


class LineInterrupt:
    """Asks a shell that reads lines to leave the line it runs, and asks again while the shell computes. The first time
    is a moment after the key, for bash can forget one of two traps that come together. With `is_raw` readline read when
    the key came, so the shell gets no request, and computes until the terminal is raw again. `on_over` is called when
    the shell computes no more, or has for too long: what was typed after the key may go to the shell then."""

    def __init__(
        self, loop: EventLoop, shell: Shell, on_over: Callable[[], None], is_raw: Callable[[], bool] | None
    ) -> None:
        self._loop = loop
        self._shell = shell
        self._on_over = on_over
        self._is_raw = is_raw
        self._repeat_s = _LINE_DELAY_S
        self._timer = loop.call_later(_LINE_DELAY_S, self._ask, lambda _error: on_over())

    def stop(self) -> None:
        """Ask no more: the shell reads no more lines, or another key was typed."""
        self._timer.cancel()

    def _ask(self) -> None:
        if self._is_raw is None:
            self._shell.signal(LINE_SIGNAL)
        self._timer = self._loop.call_later(self._repeat_s, self._look, lambda _error: self._on_over())
        self._repeat_s *= 4

    def _look(self) -> None:
        pid = self._shell.pid
        if (
            self._repeat_s <= _LAST_REPEAT_S
            and pid is not None
            and (process_set.is_computing(pid) or (self._is_raw is not None and not self._is_raw()))
        ):
            self._ask()
        else:
            self._on_over()


_FIRST_LOOK_S = 0.001
_LAST_LOOK_S = 0.05


class Ladder:
    """Climbs until no process of the set is left and the shell, if there is one, is done with the command; then calls
    `on_clear` once, and `on_error` if that raises. `is_begun` returns whether the shell runs the command yet. With
    `now` the first step is the kill."""

    def __init__(
        self,
        context: Context,
        processes: ProcessSet,
        *,
        on_clear: Callable[[], None],
        on_error: OnError,
        shell: Shell | None = None,
        is_begun: Callable[[], bool] = lambda: True,
        now: bool = False,
    ) -> None:
        self._loop = context.loop
        self._settings = context.settings
        self._processes = processes
        self._shell = shell
        self._is_begun = is_begun
        self._on_clear = on_clear
        self._on_clear_error = on_error
        self._start_s = time.monotonic()
        self._is_hurried = now
        self._look_s = _FIRST_LOOK_S
        self._signalled: dict[Process, int] = {}
        self._timer: Timer | None = None
        self.shell_is_busy = shell is not None
        """Whether the shell may still run the command. The owner clears it when the shell has reported or died."""

    def climb(self) -> None:
        """Take the step that is due, and the next one soon."""
        self.stop()
        if self.shell_is_busy:
            self._push_shell()
        try:
            left = self._push_processes()
        except OSError:  # PID 1 has no descriptor left to look with, say: nobody is known to be gone
            left = True
        if not left and not self.shell_is_busy:
            # An error is no reason to climb again, for nothing is left: it is the owner's.
            self._loop.guard(lambda _events: self._on_clear(), 0, self._on_clear_error)
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
        """Ask the shell to leave the command. End the shell when its grace is over, which follows that of its
        processes."""
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
        """Signal the processes that are left; return whether there are any."""
        found = self._processes.find()
        if not found:
            return False
        if self._elapsed_s() >= self._kill_after_s():
            self._processes.kill()
            return True
        number = signal.SIGTERM if self._elapsed_s() >= self._settings.interrupt_grace_s else signal.SIGINT
        for process in found:
            if self._signalled.get(process) != number:
                self._signalled[process] = number
                process_set.send_signal(process.pid, number)
                process_set.send_signal(process.pid, signal.SIGCONT)  # a stopped process would never take it
        return True

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._start_s

    def _kill_after_s(self) -> float:
        return 0.0 if self._is_hurried else self._settings.interrupt_grace_s + self._settings.terminate_grace_s

    def _on_error(self, _error: Exception) -> None:
        self._timer = self._loop.call_later(_LAST_LOOK_S, self.climb, self._on_error)
