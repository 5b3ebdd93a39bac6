"""Tells who watches when a port of the sandbox is opened or closed.

It must not run while nothing can change: no watcher, or no process but PID 1 and shells that wait. The kernel gives no
event for a new listener that PID 1 could have, so it looks: often while a command runs and right after, ever less often
while something from before lives on. One look takes 0.3 ms of CPU (measured, with waking up): 0.7 % of one CPU at its
most frequent, 0.02 % at its least.

What a watcher was told is kept per watcher, so one that reads slowly gets the difference later and no queue grows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from runner.loop.context import Context
from runner.loop.loop import Timer
from runner.process import process_set
from runner.server.listeners import Listener, read_listeners
from runner.shell.execution import Sink
from runner.wire.protocol import ANSWERS, Done, Kind, PortClosed, PortOpened, Started

_SHORTEST_PAUSE_S = 0.05
_LONGEST_BUSY_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 2.0
_BUSY_SHARE = 1 / 240
_IDLE_SHARE = 1 / 8
_GREATEST_SHARE = 1 / 50
"""Of one CPU, where looking is dear."""


def pause_s(*, is_busy: bool, since_s: float) -> float:
    """Return how long to wait for the next look: a share of the time since a command was last begun (`is_busy`: one
    still runs) or seen running."""
    share, longest = (_BUSY_SHARE, _LONGEST_BUSY_PAUSE_S) if is_busy else (_IDLE_SHARE, _LONGEST_PAUSE_S)
    return min(longest, max(_SHORTEST_PAUSE_S, since_s * share))


class Watcher:
    """The job of one `Watch`. `told` is what its peer believes to be open."""

    def __init__(self, sink: Sink, on_over: Callable[[Watcher], None]) -> None:
        self._sink = sink
        self._on_over = on_over
        self._told: frozenset[Listener] = frozenset()
        self._open: frozenset[Listener] = frozenset()

    def tell(self, listeners: frozenset[Listener]) -> None:
        """Say what has changed, now or when the peer has room."""
        self._open = listeners
        if listeners == self._told or self._sink.is_full:
            return
        for port, address in sorted(self._told - listeners):
            self._sink.send(Kind.EVENT, ANSWERS.encode(PortClosed(port, address)))
        for port, address in sorted(listeners - self._told):
            self._sink.send(Kind.EVENT, ANSWERS.encode(PortOpened(port, address)))
        self._told = listeners

    def on_data(self, data: bytes) -> None: ...

    def on_end(self) -> None: ...

    def on_cancel(self) -> None:
        self._on_over(self)
        self._sink.finish(Done())

    def on_close(self) -> None:
        self._on_over(self)

    def on_drained(self) -> None:
        self.tell(self._open)

    @property
    def wants_input(self) -> bool:
        return True


class Ports:
    """Owns the watchers and the one timer."""

    def __init__(self, context: Context, *, shell_pids: Callable[[], frozenset[int]]) -> None:
        self._context = context
        self._shell_pids = shell_pids
        self._watchers: set[Watcher] = set()
        self._timer: Timer | None = None
        self._pause_s = 0.0
        self._begun_s = self._busy_s = time.monotonic()

    def watch(self, sink: Sink) -> Watcher:
        """Begin to tell a peer, first what is open now."""
        sink.start(Started(""))
        watcher = Watcher(sink, self._forget)
        self._watchers.add(watcher)
        self._look()
        return watcher

    def wake(self) -> None:
        """A command begins: look often again."""
        self._begun_s = time.monotonic()
        if self._watchers and (self._timer is None or self._pause_s > _SHORTEST_PAUSE_S):
            self._set_timer(_SHORTEST_PAUSE_S)

    def _forget(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)
        if not self._watchers:
            self._cancel_timer()

    def _look(self) -> None:
        """Tell the watchers. Whether there will be a next look is decided before this one, so that what ends in between
        is seen."""
        began_s, now_s = time.process_time(), time.monotonic()
        is_busy = not self._context.registry.is_empty
        if is_busy:
            self._busy_s = now_s
        may_change = is_busy or self._is_inhabited()
        wanted_s = pause_s(is_busy=is_busy, since_s=now_s - (self._begun_s if is_busy else self._busy_s))
        self._tell()
        if may_change:
            self._set_timer(max(wanted_s, (time.process_time() - began_s) / _GREATEST_SHARE))
        else:
            self._cancel_timer()

    def _tell(self) -> None:
        try:
            listeners = read_listeners()
        except OSError:  # out of memory, say: the next look may succeed
            return
        for watcher in tuple(self._watchers):
            watcher.tell(listeners)

    def _is_inhabited(self) -> bool:
        """Whether anything lives that could open or close a port."""
        known = self._shell_pids() | {os.getpid()}
        return any(each.pid not in known and not each.is_dead for each in process_set.scan().values())

    def _set_timer(self, delay_s: float) -> None:
        self._cancel_timer()
        self._pause_s = delay_s
        self._timer = self._context.loop.call_later(delay_s, self._look, lambda _error: self._set_timer(delay_s))

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
