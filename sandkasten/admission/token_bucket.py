"""How often something may be done: so many times at once, then at a rate. Bookkeeping alone: nobody waits here."""

from __future__ import annotations

import math
from collections.abc import Callable


class TokenBucket:
    """`burst` may be taken at once, then `per_s`. `clock` in seconds; it is not looked at before the first is taken."""

    def __init__(self, *, per_s: float, burst: float, clock: Callable[[], float]) -> None:
        self.per_s, self.burst = per_s, burst
        self._clock = clock
        self._left = burst
        self._at: float | None = None

    def take(self) -> float:
        """Take one, and return 0; or take none, and return in how many seconds there is one."""
        now = self._clock()
        if self._at is not None:
            self._left = min(self.burst, self._left + (now - self._at) * self.per_s)
        self._at = now
        if self._left >= 1:
            self._left -= 1
            return 0
        return (1 - self._left) / self.per_s if self.per_s else math.inf
