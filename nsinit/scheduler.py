"""Runs many waiting jobs in one thread: a job is a generator that yields what it waits for.

Owns the selector and the timers, and no part of the jobs' work. A job must never block; it yields `Wait` and is resumed
with True when the awaited event happened and with False when the time ran out.
"""

from __future__ import annotations

import heapq
import itertools
import selectors
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field


@dataclass(slots=True)
class JobEvent:
    """An event that happens once. Jobs wait for it with `Wait(event=...)`."""

    is_set: bool = False
    waiters: list[Callable[[], None]] = field(default_factory=list)

    def set(self) -> None:
        """Let the event happen: every job that waits for it goes on."""
        self.is_set = True
        for wake in self.waiters:
            wake()
        self.waiters.clear()


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait until `fd` is readable or `event` happened, at most `timeout_s` (alone: a pause)."""

    fd: int | None = None
    event: JobEvent | None = None
    timeout_s: float | None = None


Job = Generator[Wait, bool, None]


class Scheduler:
    """Jobs, descriptors with callbacks, timers."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._ready: deque[tuple[Job, bool | None]] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.jobs = 0
        """The number of jobs that have not ended."""

    def close(self) -> None:
        """Close the selector."""
        self._selector.close()

    def spawn(self, job: Job) -> None:
        """Start a job; its first part runs in the next round."""
        self.jobs += 1
        self._ready.append((job, None))

    def watch(self, fd: int, events: int, callback: Callable[[], None]) -> None:
        """Call `callback` whenever `fd` has one of `events` (selectors.EVENT_*); zero events: stop watching."""
        if fd in self._selector.get_map():
            self._selector.unregister(fd)
        if events:
            self._selector.register(fd, events, callback)

    def round(self, idle_s: float | None = None) -> bool:
        """Wait for descriptors, timers and jobs that can go on, at most `idle_s`, and handle them. False: there was
        none."""
        until = [timer[0] - time.monotonic() for timer in self._timers[:1]]
        limits = [0.0] if self._ready else [*until, *([] if idle_s is None else [idle_s])]
        happened = self._selector.select(max(0.0, min(limits)) if limits else None)
        for key, _ in happened:
            key.data()
        now, fired = time.monotonic(), False
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()
            fired = True
        ran = len(self._ready)
        for _ in range(ran):
            self._resume(*self._ready.popleft())
        return bool(happened or fired or ran)

    def _resume(self, job: Job, answer: bool | None) -> None:
        try:
            wait = next(job) if answer is None else job.send(answer)
        except StopIteration:
            self.jobs -= 1
            return
        self._arrange(job, wait)

    def _arrange(self, job: Job, wait: Wait) -> None:
        done = False

        def wake(*, happened: bool) -> None:
            nonlocal done
            if not done:
                done = True
                if wait.fd is not None:
                    self._selector.unregister(wait.fd)
                if wait.event is not None and not wait.event.is_set:  # or it would keep every wait that ended
                    wait.event.waiters.remove(hear)
                self._ready.append((job, happened))

        def hear() -> None:
            wake(happened=True)

        if wait.event is not None and wait.event.is_set:
            wake(happened=True)
            return
        if wait.event is not None:
            wait.event.waiters.append(hear)
        if wait.fd is not None:
            self._selector.register(wait.fd, selectors.EVENT_READ, lambda: wake(happened=True))
        if wait.timeout_s is not None:
            deadline = time.monotonic() + wait.timeout_s
            heapq.heappush(self._timers, (deadline, next(self._order), lambda: wake(happened=False)))
