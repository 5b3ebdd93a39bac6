"""Named, timed steps: a failure inside one becomes a `StepFailed` with the step's name, the path and the errno.

A process can be made to end at a named step (`Crash`), so that tests see what the next start makes of it: nowhere
unless a start asks for it. `start` refuses that from a daemon that is not root, and the daemon refuses it unless its
configuration has crash points switched on. The names are in `sandbox/crash_points.py`.
Sources: kill(2) (a pid namespace's init ignores its own SIGKILL), _exit(2).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from nsinit.log import log

KILLED = 128 + signal.SIGKILL


class Crash:
    """A crash point: `name` or `name:N`, the N-th time that this process comes there. A fork goes on counting for
    itself."""

    def __init__(self, at: str) -> None:
        self._name, _, count = at.partition(":")
        self._left = int(count or 1)

    @property
    def name(self) -> str:
        return self._name

    def passing(self, name: str) -> None:
        """End the process if `name` is the point: the step's work is done, and no other process was told."""
        if name == self._name:
            self._left -= 1
            if self._left == 0:
                log("error", "crash point", name=name)
                signal.raise_signal(signal.SIGKILL)  # tgkill(2), which every part may call
                os._exit(KILLED)


def passing(crash: Crash | None, name: str) -> None:
    """Pass a crash point, if there is a crash at all."""
    if crash is not None:
        crash.passing(name)


class StepFailed(Exception):
    """A step failed. `path` and `errno`: of the system call that failed, empty and 0 without one."""

    def __init__(self, stage: str, message: str, *, path: str = "", errno: int = 0) -> None:
        super().__init__(message)
        self.stage, self.path, self.errno = stage, path, errno


class Steps:
    """The steps of one task; `timings_us` has their times in order. `crash`: where the process may have to end; a
    step's point is `prefix` and its name."""

    def __init__(self, prefix: str = "", crash: Crash | None = None) -> None:
        self.timings_us: dict[str, int] = {}
        self._prefix, self._crash = prefix, crash

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time the block; turn any exception but `StepFailed` into a `StepFailed` of the step `name`."""
        start = time.perf_counter_ns()
        try:
            yield
        except StepFailed:
            raise
        except Exception as error:
            raise failure_of(name, error) from error
        self._passing(name)
        self.timings_us[name] = (time.perf_counter_ns() - start) // 1000

    def run(self, steps: Iterable[tuple[str, Callable[..., object]]], *arguments: object) -> None:
        """Do a list of named steps, each called with `arguments`, as `step` does one. In a loop of its own: in PID 1
        every page that a context manager would touch counts."""
        name, start = "", time.perf_counter_ns()
        try:
            for name, step in steps:
                step(*arguments)
                if self._crash is not None:
                    self._passing(name)
                now = time.perf_counter_ns()
                self.timings_us[name] = (now - start) // 1000
                start = now
        except StepFailed:
            raise
        except Exception as error:
            raise failure_of(name, error) from error

    def _passing(self, name: str) -> None:
        if self._crash is not None:
            self._crash.passing(self._prefix + name.replace(" ", "_"))


def failure_of(stage: str, error: Exception) -> StepFailed:
    """Describe `error` as the failure of `stage`."""
    errno = error.errno if isinstance(error, OSError) and error.errno else 0
    path = os.fsdecode(getattr(error, "filename", None) or "")
    return StepFailed(stage, str(error) or type(error).__name__, path=path, errno=errno)
