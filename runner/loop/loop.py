"""The one event loop of PID 1: descriptors, timers, and the wall that no exception passes.

A callback that raises is reported to its owner's `on_error`, and the loop goes on: PID 1 is the sandbox, so nothing may
raise out of the loop.

A loop that slept much longer than it asked for was frozen with the sandbox, or starved. Timers then wait up to a second
for the daemon to say how long the sandbox was frozen (`postpone`): a run that stood still is not late.

Sources: epoll(7) (level-triggered), "Possible pitfalls" for events of descriptors closed within one batch.
"""

from __future__ import annotations

import heapq
import math
import select
import time
from collections import deque
from collections.abc import Callable
from typing import NoReturn

Callback = Callable[[int], None]
OnError = Callable[[Exception], None]

READ = select.EPOLLIN
WRITE = select.EPOLLOUT
HANG_UP = select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP


_MIN_SWEEP = 64
"""Timers, cancelled ones included, before the cancelled are thrown out."""
_MAX_PATIENCE_S = 3600.0
"""Longest sleep before a timer."""
_LATE_S = 1.0
"""Oversleeping that counts as a standstill."""
_NEWS_S = 1.0
"""Wait for `postpone` after a standstill."""


class Timer:
    """A call to make once, unless it is cancelled before."""

    __slots__ = ("callback", "deadline", "on_error", "planned_at")

    def __init__(
        self, deadline: float, callback: Callable[[], None], on_error: OnError, *, planned_at: float = 0.0
    ) -> None:
        self.deadline = deadline
        self.planned_at = planned_at
        self.callback: Callable[[], None] | None = callback
        self.on_error = on_error

    def cancel(self) -> None:
        """Make no call, and drop the references to the owner, who may hold this timer: PID 1 collects no cycles."""
        self.callback = None
        self.on_error = _nobody

    def __lt__(self, other: Timer) -> bool:
        return self.deadline < other.deadline


class _Watch:
    __slots__ = ("batch", "callback", "on_error")

    def __init__(self, callback: Callback, on_error: OnError, batch: int) -> None:
        self.callback = callback
        self.on_error = on_error
        self.batch = batch


class EventLoop:
    """Level-triggered epoll, a timer heap and a queue of calls to make soon."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watches: dict[int, _Watch] = {}
        self._timers: list[Timer] = []
        self._soon: deque[Timer] = deque()
        self._batch = 0
        self._sweep_at = _MIN_SWEEP
        self._timers_from = 0.0
        self._noticed_at = time.monotonic()

    def watch(self, fd: int, events: int, callback: Callback, on_error: OnError) -> None:
        """Call `callback(events)` whenever `fd` is ready, until `unwatch`. The descriptor stays the caller's."""
        self._epoll.register(fd, events)
        self._watches[fd] = _Watch(callback, on_error, self._batch)

    def change(self, fd: int, events: int) -> None:
        """Watch `fd` for other events; hang-up is always reported."""
        self._epoll.modify(fd, events)

    def unwatch(self, fd: int) -> None:
        """Forget `fd`; call it before closing the descriptor. Unknown descriptors are fine."""
        if self._watches.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def call_later(self, delay_s: float, callback: Callable[[], None], on_error: OnError) -> Timer:
        """Call `callback` once after `delay_s` seconds of monotonic time."""
        if len(self._timers) >= self._sweep_at:  # most timers are cancelled long before they are due
            self._timers = [timer for timer in self._timers if timer.callback is not None]
            heapq.heapify(self._timers)
            self._sweep_at = max(_MIN_SWEEP, 2 * len(self._timers))
        now = time.monotonic()
        timer = Timer(now + delay_s, callback, on_error, planned_at=now)
        heapq.heappush(self._timers, timer)
        return timer

    def postpone(self, seconds: float) -> None:
        """Move the timers that were set before a standstill of so many seconds, which has ended a moment ago."""
        began = time.monotonic() - seconds / 2  # some instant of the standstill: no timer was set then
        for timer in self._timers:
            if timer.planned_at < began:
                timer.deadline += seconds
        heapq.heapify(self._timers)
        self._timers_from = 0.0

    def call_soon(self, callback: Callable[[], None], on_error: OnError) -> Timer:
        """Call `callback` once, after the events that are ready now."""
        timer = Timer(0.0, callback, on_error)
        self._soon.append(timer)
        return timer

    def run_forever(self) -> NoReturn:
        """Serve for ever, whatever goes wrong in one turn."""
        while True:
            try:
                self.run_once()
            except Exception:  # noqa: BLE001 - the last wall: out of memory between two callbacks, say
                continue

    def run_once(self) -> None:
        """Wait for events or the next timer and make the calls that are due."""
        self._batch += 1
        self._notice_standstill(0.0)
        patience_s = self._patience_s()
        ready = self._epoll.poll(patience_s)
        self._notice_standstill(math.inf if patience_s < 0.0 else patience_s)
        for fd, events in ready:
            watch = self._watches.get(fd)
            if watch is not None and watch.batch < self._batch:  # otherwise: a new owner of a closed number
                self.guard(watch.callback, events, watch.on_error)
        self._run_due()

    @property
    def pending_timers(self) -> int:
        """Number of timers that are kept, the cancelled among them."""
        return len(self._timers)

    def close(self) -> None:
        """Give the epoll instance up; only for a loop that is no longer run."""
        self._epoll.close()

    @staticmethod
    def guard(callback: Callback, argument: int, on_error: OnError) -> None:
        """Make a call whose exception goes to `on_error` and no further."""
        try:
            callback(argument)
        except Exception as error:  # noqa: BLE001 - the wall: PID 1 must not die of a bug in one connection
            _report(error, on_error)

    def _notice_standstill(self, expected_s: float) -> None:
        """Notice that much more than `expected_s` has passed since the last call, work between the calls included."""
        now = time.monotonic()
        if now - self._noticed_at > expected_s + _LATE_S:
            self._timers_from = now + _NEWS_S
        self._noticed_at = now

    def _patience_s(self) -> float:
        if self._soon:
            return 0.0
        while self._timers and self._timers[0].callback is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return -1.0
        due = max(self._timers[0].deadline, self._timers_from)
        return min(_MAX_PATIENCE_S, max(0.0, due - time.monotonic()))

    def _run_due(self) -> None:
        due, self._soon = self._soon, deque()
        self._notice_standstill(0.0)
        now = self._noticed_at
        if now < self._timers_from:
            now = -math.inf
        while self._timers and self._timers[0].deadline <= now:
            due.append(heapq.heappop(self._timers))
        for timer in due:
            callback, on_error = timer.callback, timer.on_error
            timer.cancel()
            if callback is None:
                continue
            try:
                callback()
            except Exception as error:  # noqa: BLE001 - the wall
                _report(error, on_error)


def _nobody(_error: Exception) -> None:
    """Drop an error of a timer that is over."""


def _report(error: Exception, on_error: OnError) -> None:
    try:
        on_error(error)
    except Exception:  # noqa: BLE001, S110 - the owner's last resort failed too; the sandbox lives on
        pass
