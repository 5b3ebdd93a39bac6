"""Making a shell leave the command it runs, as Ctrl-C would.

It must not end a shell that does not obey: that is the ladder's, when somebody wants the command ended.

Sources: signal(7) (which signals end a process by default); `runner.shell.command_driver` says when the shell misses one request.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from runner.loop.loop import Loop, Timer
from runner.process import process_set
from runner.process.process_set import Process
from runner.shell import repl
from runner.shell.shell import Shell

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
    """Asks the shell, then signals what the command started; and both a few times more. The shell may be just before or
    after the command and ignore it there; it may be about to start a program, or a program about to begin, which loses
    the signal. A program older than that gets it once."""

    def __init__(self, loop: Loop, shell: Shell, number: int, find: Callable[[], list[Process]]) -> None:
        self._loop = loop
        self._shell = shell
        self._number = number
        self._find = find
        self._since = process_set.now().tick - _YOUNG_TICKS
        self._signalled: set[Process] = set()
        self._repeat_s = _FIRST_REPEAT_S
        self._timer: Timer | None = None

    def ask(self) -> None:
        self._shell.abandon()  # first: it must not go on with the next program when this one ends
        for process in self._find():
            if process not in self._signalled or process.start_tick >= self._since:
                self._signalled.add(process)
                process_set.send_signal(process.pid, self._number)
        if self._repeat_s <= _LAST_REPEAT_S:
            self._timer = self._loop.call_later(self._repeat_s, self.ask, lambda _error: None)
            self._repeat_s *= 2

    def stop(self) -> None:
        """The shell has left the command."""
        if self._timer is not None:
            self._timer.cancel()


class LineInterrupt:
    """Asks a shell that reads lines to leave the one it runs: once the key that was typed has done its own work, for
    bash can forget one of two traps that come together; and again while the shell computes. `on_over` is called when it
    does not any more, or for too long: what was typed after the key is for the shell then, and no line of it is hit."""

    def __init__(self, loop: Loop, shell: Shell, on_over: Callable[[], None]) -> None:
        self._loop = loop
        self._shell = shell
        self._on_over = on_over
        self._repeat_s = _LINE_DELAY_S
        self._timer = loop.call_later(_LINE_DELAY_S, self._ask, lambda _error: on_over())

    def stop(self) -> None:
        """The shell reads no more lines, or another key was typed."""
        self._timer.cancel()

    def _ask(self) -> None:
        self._shell.signal(repl.LINE_SIGNAL)
        self._timer = self._loop.call_later(self._repeat_s, self._look, lambda _error: self._on_over())
        self._repeat_s *= 4

    def _look(self) -> None:
        if (
            self._repeat_s <= _LAST_REPEAT_S
            and self._shell.pid is not None
            and process_set.is_computing(self._shell.pid)
        ):
            self._ask()
        else:
            self._on_over()
