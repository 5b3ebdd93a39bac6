"""The daemon's heap: collections of garbage that hold up no request for long, however many sessions there are.

A full collection looks at every object that may be part of a cycle, and nothing else runs meanwhile: 100 to 300 ms at
1000 sessions. So objects that have survived a full collection are taken out of what later ones look at
(`gc.freeze`), and a full collection looks at no more than came since the last one. What is frozen is still freed with
its last reference. Cycles that die after that are found by a *sweep*, which looks at everything: at a moment when the
daemon does nothing, or when as much was frozen since the last sweep as that one left. A daemon that is never quiet
would grow otherwise: the cycles of a session that lives for a moment are frozen if a collection falls into it.

The generations and their thresholds are CPython's; see the documentation of the module gc. Only `serve` uses this: the
heap of a program that embeds the supervisor is that program's own.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NoReturn

import trio

THRESHOLDS: Final = 500, 5, 2
"""A collection of the youngest objects begins when there are so many, one of the next generation after more than so
many of the younger. So a full one looks at some 11,000 objects."""

QUIET_S: Final = 5.0
QUIET_SHARE: Final = 0.03
"""The daemon is quiet when it has used less than this share of a processor for `QUIET_S`. A thousand idle sessions take
1.2 % in the first 10 s behind a command, and the reading of their counters another 1 % of such a time."""

DUE: Final = 4
"""Full collections after which a sweep is made, at a quiet moment."""
SHRUNK: Final = 0.9
FEW_TASKS: Final = 100
"""A sweep is made, too, at a quiet moment when so small a share of the tasks since the last one is left, less a few, as
connections have. A session has tasks of its own, and six hundred objects that hold each other: those of ended sessions
would stay, since no collection begins without new objects."""
OVERDUE: Final = 2
"""Growth of what is frozen since the last sweep, as a factor, at which a sweep waits for no quiet moment."""


class Heap:
    """Keeper of the heap, from `kept` on."""

    def __init__(self) -> None:
        self.frozen = 0
        """Full collections since the last sweep, each with what it froze."""
        self.left = 0
        """Objects that the last sweep left."""

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Freeze what there is, modules and classes first of all, and what survives from here on. Undone afterwards."""
        thresholds = gc.get_threshold()
        gc.freeze()  # no sweep, which would hold up the first answer by 0.1 s: what was imported lives on
        gc.collect()  # as behind a sweep
        self.frozen, self.left = DUE, gc.get_freeze_count()
        gc.set_threshold(*THRESHOLDS)
        gc.enable()
        gc.callbacks.append(self._note)
        try:
            yield
        finally:
            gc.callbacks.remove(self._note)
            gc.set_threshold(*thresholds)
            gc.unfreeze()

    def sweep(self) -> None:
        """Look at all objects."""
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        # A full one is put off until a quarter as much is new as the last one left: let that be nothing.
        gc.collect()
        self.frozen, self.left = 0, gc.get_freeze_count()

    async def run(self) -> NoReturn:
        """Make each sweep that is due."""
        most_tasks = 0
        while True:
            used_s = time.thread_time()
            await trio.sleep(QUIET_S)
            is_quiet = time.thread_time() - used_s < QUIET_SHARE * QUIET_S
            tasks = trio.lowlevel.current_statistics().tasks_living
            most_tasks = max(most_tasks, tasks)
            is_due = self.frozen >= DUE or tasks < SHRUNK * most_tasks - FEW_TASKS
            is_overdue = self.frozen >= DUE and gc.get_freeze_count() >= OVERDUE * self.left
            if is_overdue or (is_due and is_quiet):
                self.sweep()
                most_tasks = tasks

    def _note(self, phase: str, info: Mapping[str, Any]) -> None:  # the module gc's own
        if phase == "stop" and info["generation"] == 2:
            gc.freeze()
            self.frozen += 1
