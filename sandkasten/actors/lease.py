"""The lease of one session: when it ends, and the task that says so. Clock values are `trio.current_time()` seconds.

Activity renews the idle end by the session's own time to live; a running command holds the idle end off, and nothing
holds off the hard end. While the session is paused nothing runs that could hold off anything. The owner's mailbox
decides; this only knows the time.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

import trio

WARNING_S = 60.0
"""How long before its end a session's expiry is announced."""


class Lease:
    """Idle end and hard end of a session, and how many activities hold the idle end off."""

    def __init__(self) -> None:
        self.active = 0
        self._is_paused = False
        self._is_stopped = False
        self._idle_end = math.inf
        self._hard_end = math.inf
        self._alarm = math.inf
        self._scope: trio.CancelScope | None = None

    @property
    def end(self) -> float:
        """When the session expires as things are."""
        idle_end = math.inf if self._is_stopped or (self.active and not self._is_paused) else self._idle_end
        return min(idle_end, self._hard_end)

    @property
    def has_ended(self) -> bool:
        return trio.current_time() >= self.end

    def renew(self, *, ttl_s: float, lifetime_left_s: float | None) -> float:
        """Start the time to live anew; return how many seconds remain when nothing else happens."""
        now = trio.current_time()
        self._idle_end = now + ttl_s
        if lifetime_left_s is not None:
            self._hard_end = now + lifetime_left_s
        self._set_alarm(now)
        return min(self._idle_end, self._hard_end) - now

    def restore(self, *, remaining_s: float, lifetime_left_s: float | None) -> None:
        """Take over a lease that began before this process: it ends when it would have ended."""
        now = trio.current_time()
        self._idle_end = now + remaining_s
        if lifetime_left_s is not None:
            self._hard_end = now + lifetime_left_s
        self._set_alarm(now)

    def pause(self, *, stop: bool) -> None:
        """The session stands still: no activity holds the idle end off, which with `stop` comes no nearer."""
        self._is_paused, self._is_stopped = True, stop
        self._set_alarm(trio.current_time())

    def resume(self) -> None:
        """It goes on; whoever says so renews the lease as well."""
        self._is_paused = self._is_stopped = False

    async def watch(self, on_end: Callable[[], Awaitable[None]], on_warning: Callable[[float], None]) -> None:
        """Call `on_end` each time the end is reached, and `on_warning` with the seconds that remain `WARNING_S` before
        it, unless less than that was left when the lease was renewed; a renewal before it moves the moment."""
        while True:
            with trio.CancelScope(deadline=self._alarm) as self._scope:
                await trio.sleep_forever()
            if self.has_ended:
                await on_end()
            else:
                on_warning(self.end - trio.current_time())
                self._alarm = self.end

    def _set_alarm(self, now: float) -> None:
        self._alarm = self.end - WARNING_S if self.end - WARNING_S > now else self.end
        if self._scope is not None:
            self._scope.deadline = self._alarm
