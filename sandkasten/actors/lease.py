"""The lease of one session: when it ends, and the task that says so. Clock values are `trio.current_time()` seconds.

Activity renews the idle end by the session's own time to live; a running command holds the idle end off, and nothing
holds off the hard end. The owner's mailbox decides; this only knows the time.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

import trio


class Lease:
    """Idle end and hard end of a session, and how many activities hold the idle end off."""

    def __init__(self) -> None:
        self.active = 0
        self._idle_end = math.inf
        self._hard_end = math.inf
        self._scope: trio.CancelScope | None = None

    @property
    def end(self) -> float:
        """When the session expires as things are."""
        return self._hard_end if self.active else min(self._idle_end, self._hard_end)

    @property
    def has_ended(self) -> bool:
        return trio.current_time() >= self.end

    def renew(self, *, ttl_s: float, lifetime_left_s: float | None) -> float:
        """Start the time to live anew; return how many seconds remain when nothing else happens."""
        now = trio.current_time()
        self._idle_end = now + ttl_s
        if lifetime_left_s is not None:
            self._hard_end = now + lifetime_left_s
        if self._scope is not None:
            self._scope.deadline = self.end
        return min(self._idle_end, self._hard_end) - now

    def restore(self, *, remaining_s: float, lifetime_left_s: float | None) -> None:
        """Take over a lease that began before this process: it ends when it would have ended."""
        now = trio.current_time()
        self._idle_end = now + remaining_s
        if lifetime_left_s is not None:
            self._hard_end = now + lifetime_left_s

    async def watch(self, on_end: Callable[[], Awaitable[None]]) -> None:
        """Call `on_end` each time the end is reached; a renewal before it moves the moment."""
        while True:
            with trio.CancelScope(deadline=self.end) as self._scope:
                await trio.sleep_forever()
            await on_end()
