"""The lease of one session: its end, the reason of the end, and the task that reports the end. All moments are
`trio.current_time()` seconds.

Activity renews the idle end by the session's own time to live; a running command holds the idle end off, and nothing
holds off the hard end. Either may be infinitely far away. While the session is paused nothing runs that could hold off
anything. The lease only knows the time: the mailbox of the session's actor decides.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

import trio

from sandkasten.model import EndReason

WARNING_S = 60.0
"""Time between the announcement of a session's expiry and its end."""


class Lease:
    """Idle end and hard end of a session, and how many activities hold the idle end off."""

    def __init__(self) -> None:
        self.active = 0
        self._is_paused = False
        self._is_stopped = False
        self._idle_end = math.inf
        self._hard_end = math.inf
        self._unannounced: set[EndReason] = set()
        self._alarm = math.inf
        self._scope: trio.CancelScope | None = None

    def begin_activity(self) -> None:
        """Hold the idle end off until `end_activity`."""
        self.active += 1

    def end_activity(self) -> None:
        """Hold the idle end off no longer for one activity; the owner renews the lease as well."""
        self.active -= 1

    @property
    def is_busy(self) -> bool:
        """Whether an activity holds the idle end off."""
        return self.active > 0 and not self._is_paused

    @property
    def is_held(self) -> bool:
        """Whether the idle end does not come nearer."""
        return self.is_busy or self._is_stopped

    @property
    def end(self) -> float:
        """When the session expires if nothing changes."""
        return min(self._ends.values())

    @property
    def has_ended(self) -> bool:
        return trio.current_time() >= self.end

    @property
    def reason(self) -> EndReason:
        """The reason of the end at `end`; the hard end, if both ends come at once."""
        return EndReason.MAX_LIFETIME if self._hard_end <= self.end else EndReason.IDLE

    @property
    def _ends(self) -> dict[EndReason, float]:
        idle_end = math.inf if self.is_held else self._idle_end
        return {EndReason.MAX_LIFETIME: self._hard_end, EndReason.IDLE: idle_end}

    def renew(self, *, ttl_s: float, hard_end: float) -> float:
        """Start the time to live anew; return the seconds that remain if nothing changes."""
        now = trio.current_time()
        if hard_end != self._hard_end:
            self._hard_end = hard_end
            self._announce_later(EndReason.MAX_LIFETIME, hard_end - now)
        self._idle_end = now + ttl_s
        self._announce_later(EndReason.IDLE, ttl_s)
        self._set_alarm()
        return min(ttl_s, hard_end - now)

    def announce_anew(self, *, ttl_s: float, max_lifetime_s: float) -> None:
        """Announce an end within `WARNING_S` as well, since the last daemon may have ended before it announced the end.
        A lease that is shorter in all is not announced."""
        spans = {EndReason.IDLE: ttl_s, EndReason.MAX_LIFETIME: max_lifetime_s}
        self._unannounced |= {reason for reason, span_s in spans.items() if span_s > WARNING_S}
        self._set_alarm()

    def pause(self, *, stop: bool) -> None:
        """Let no activity hold the idle end off: the session is frozen. With `stop` the idle end comes no nearer."""
        self._is_paused, self._is_stopped = True, stop
        self._set_alarm()

    def resume(self) -> None:
        """Let activities hold the idle end off again; the caller renews the lease as well."""
        self._is_paused = self._is_stopped = False

    async def watch(
        self, on_end: Callable[[], Awaitable[None]], on_warning: Callable[[EndReason, float], None]
    ) -> None:
        """Call `on_end` each time the end is reached, and `on_warning` `WARNING_S` before each of the two ends, with
        the kind of the end and the seconds that remain. An end that was set with less than `WARNING_S` left has no
        warning. Setting an end anew moves its warning."""
        while True:
            with trio.CancelScope(deadline=self._alarm) as self._scope:
                await trio.sleep_forever()
            now = trio.current_time()
            if now >= self.end:
                await on_end()
            else:
                for reason, end in self._ends.items():
                    if reason in self._unannounced and now >= end - WARNING_S:
                        self._unannounced.remove(reason)
                        on_warning(reason, end - now)
                self._set_alarm()

    def _announce_later(self, reason: EndReason, remaining_s: float) -> None:
        if remaining_s > WARNING_S:
            self._unannounced.add(reason)
        else:
            self._unannounced.discard(reason)

    def _set_alarm(self) -> None:
        idle_end, hard_end, unannounced = self._idle_end, self._hard_end, self._unannounced
        if self.is_held:
            idle_end = math.inf
        if EndReason.IDLE in unannounced:
            idle_end -= WARNING_S
        if EndReason.MAX_LIFETIME in unannounced:
            hard_end -= WARNING_S
        self._alarm = min(idle_end, hard_end)
        # An alarm that moves away, as with every command, is found out when the earlier one rings.
        if self._scope is not None and self._alarm < self._scope.deadline:
            self._scope.deadline = self._alarm
