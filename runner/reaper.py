"""Child deaths: signals blocked, SIGCHLD as an event, one `waitpid(-1)` for everything PID 1 inherits.

It must not decide anything: it tells whoever watches a pid how that process ended.

Sources: pid_namespaces(7) "The namespace init process", signal(7), waitpid(2), signal.set_wakeup_fd.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from runner.loop import READ, Loop

OnDeath = Callable[[int], None]

_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}


def block_signals() -> None:
    """Block what a process could be asked by signal; only SIGCHLD and the process's own faults get through."""
    signal.signal(signal.SIGCHLD, _ignore)
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals() - _FAULTS - {signal.SIGCHLD})


def _ignore(_number: int, _frame: object) -> None:
    """A handler must exist for the wake-up descriptor to be written."""


def default_signals() -> None:
    """In a forked child: every disposition to its default and nothing blocked, whatever was inherited.

    Ignored signals survive execve(2): a daemon started by nohup(1) would otherwise hand its SIGHUP down.
    """
    for number in range(1, signal.NSIG):
        try:
            signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):  # SIGKILL, SIGSTOP and the two the C library keeps
            continue
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


class Reaper:
    """Reap every child and call who watches it with the wait status, before its pid can be used again."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._watched: dict[int, OnDeath] = {}
        self._wake_up_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        loop.watch(self._wake_up_fd, READ, self._on_wake_up, _cannot_fail)

    def watch(self, pid: int, on_death: OnDeath) -> None:
        """Call `on_death(wait status)` once, when the child `pid` has ended."""
        self._watched[pid] = on_death

    def _on_wake_up(self, _events: int) -> None:
        try:
            os.read(self._wake_up_fd, 4096)
        except BlockingIOError:
            pass
        self.reap()

    def reap(self) -> None:
        """Collect every child that has ended: SIGCHLD coalesces, so one signal may stand for many."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            on_death = self._watched.pop(pid, None)
            if on_death is not None:
                self._loop.guard(on_death, status, _cannot_fail)


def _cannot_fail(_error: Exception) -> None:
    """Nobody to tell: the loss is the watcher's own clean-up, and reaping goes on."""
