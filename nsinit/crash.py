"""Ends a process at a named step, for tests of what the next start makes of it. Nowhere unless a start asks for it.

Who may ask is decided before: `start` refuses it from a daemon that is not root, and the daemon refuses it unless its
configuration has crash points switched on. The names are `crash_points`'. Knows nothing of what a step does.
Sources: kill(2) (a pid namespace's init ignores its own SIGKILL), _exit(2).
"""

from __future__ import annotations

import os
import signal

from nsinit.log import log

KILLED = 128 + signal.SIGKILL


class Crash:
    """Where to end: `name` or `name:N`, the N-th time this process comes there; a fork goes on counting for itself."""

    def __init__(self, at: str) -> None:
        self._name, _, count = at.partition(":")
        self._left = int(count or 1)

    @property
    def name(self) -> str:
        return self._name

    def passing(self, name: str) -> None:
        """The process is at this step, with its work done and nobody told."""
        if name == self._name:
            self._left -= 1
            if self._left == 0:
                log("error", "crash point", name=name)
                os.kill(os.getpid(), signal.SIGKILL)
                os._exit(KILLED)


def passing(crash: Crash | None, name: str) -> None:
    """As `Crash.passing`, where there may be none."""
    if crash is not None:
        crash.passing(name)
