"""Child deaths: signals blocked, SIGCHLD as an event, one `wait4(-1)` for everything PID 1 inherits.

The reaper decides nothing: it tells the watcher of a pid how that process ended, and which resources it used.

Sources: pid_namespaces(7) "The namespace init process", signal(7), wait4(2), getrusage(2), proc_pid_status(5),
signal.set_wakeup_fd.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable

from runner.loop.loop import READ, EventLoop

OnDeath = Callable[[int], None]
OnEnd = Callable[[int, resource.struct_rusage], None]

_STATUS_BYTES = 8192
_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}


def block_signals() -> None:
    """Block every signal but SIGCHLD and the process's own faults, and stop ignoring any.

    Done once and not in each child, for it takes long.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals() - _FAULTS - {signal.SIGCHLD})
    # An ignored signal survives execve(2): a daemon started by nohup(1) would hand its SIGHUP down to every command.
    for number in _ignored_signals():
        try:
            signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):  # SIGKILL, SIGSTOP and the two the C library keeps
            continue
    signal.signal(signal.SIGCHLD, _ignore)


def _ignored_signals() -> list[int]:
    """Return the signals that are ignored, or all if /proc cannot tell. Resetting all of them dirties memory."""
    try:
        fd = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _, _, rest = os.read(fd, _STATUS_BYTES).partition(b"\nSigIgn:\t")
        finally:
            os.close(fd)
        mask = int(rest[:16], 16)
    except (OSError, ValueError):
        mask = -1
    return [number for number in range(1, signal.NSIG) if mask >> (number - 1) & 1]


def _ignore(_number: int, _frame: object) -> None:
    """Handle SIGCHLD by doing nothing: without a handler nothing is written to the wake-up descriptor."""


def unblock_signals() -> None:
    """Unblock all, in a forked child: a blocked signal would stay blocked in the program that the child executes."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


class ChildReaper:
    """Reaps every child and calls its watcher with the wait status, before the pid can be used again."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._watched: dict[int, OnEnd] = {}
        self._on_stop: dict[int, Callable[[], None]] = {}
        self._wake_up_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        loop.watch(self._wake_up_fd, READ, self._on_wake_up, _cannot_fail)

    def watch(self, pid: int, on_death: OnDeath, *, on_stop: Callable[[], None] | None = None) -> None:
        """Call `on_death(wait status)` once, when the child `pid` has ended, and `on_stop` each time it is stopped."""
        self._watched[pid] = lambda status, _usage: on_death(status)
        if on_stop is not None:
            self._on_stop[pid] = on_stop

    def watch_usage(self, pid: int, on_end: OnEnd) -> None:
        """Call `on_end(wait status, usage)` once; the usage is of the child `pid` and of all it has waited for."""
        self._watched[pid] = on_end

    @property
    def watched(self) -> frozenset[int]:
        """Children with a watcher: the shells, the programs and the file workers."""
        return frozenset(self._watched)

    def _on_wake_up(self, _events: int) -> None:
        try:
            os.read(self._wake_up_fd, 4096)
        except BlockingIOError:
            pass
        self.reap()

    def reap(self) -> None:
        """Collect every child that has ended, and look at those that were stopped."""
        while True:  # SIGCHLD coalesces: one signal may stand for many
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if os.WIFSTOPPED(status):
                self._on_stop.get(pid, _do_nothing)()
                continue
            self._on_stop.pop(pid, None)
            on_end = self._watched.pop(pid, None)
            if on_end is not None:
                self._tell(on_end, status, usage)

    def _tell(self, on_end: OnEnd, status: int, usage: resource.struct_rusage) -> None:
        self._loop.guard(lambda each: on_end(each, usage), status, _cannot_fail)


def _do_nothing() -> None:
    """Leave a child stopped that is no business of anyone here."""


def _cannot_fail(_error: Exception) -> None:
    """Drop an error of a watcher: only its own clean-up is lost, and reaping goes on."""
