"""Shares of API keys: live sessions and their limits, running commands, and rates of requests, against quotas.

Sums count for the key that made a session, also when another key changes the session later; adopted sessions count
again after a restart. A request over a quota is refused with the time to wait. Sessions that exist stay, also when a
quota is made smaller. Bookkeeping alone: no I/O, no task. The node's own limits are `budget.py`'s.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable

import attrs

from sandkasten.admission.keys import KeyRing
from sandkasten.errors import QuotaExceeded
from sandkasten.model import Limits
from sandkasten.model.keys import ApiKey, KeyUsage, Quota

_WHEN_FULL_S = 5
"""Seconds to wait for a share that other sessions of the key hold: a guess, since their end is unknown."""

_NO_QUOTA = Quota()
_SUMMED = ("cpu", "memory_mb", "disk_mb")
"""Fields of a quota that bound the sum of the limits of that name."""


@attrs.frozen
class _Held:
    owner: str
    limits: Limits


class KeyShares:
    """The shares of all keys. `runs_of` counts the running commands, processes and terminals in some sessions."""

    def __init__(
        self,
        ring: KeyRing,
        *,
        runs_of: Callable[[Iterable[Hashable]], int] = lambda _sessions: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ring = ring
        self._runs_of, self._clock = runs_of, clock
        self._held: dict[Hashable, _Held] = {}
        self._of: dict[str, dict[Hashable, Limits]] = {}
        self._creates: dict[str, TokenBucket] = {}
        self._requests: dict[str, TokenBucket] = {}

    def usage(self, key: ApiKey) -> KeyUsage:
        """Return the present use of a key's quota."""
        held = self._of.get(key.id, {}).values()
        return KeyUsage(
            sessions=len(held),
            cpu=round(sum(each.cpu for each in held), 3),
            memory_mb=sum(each.memory_mb for each in held),
            disk_mb=sum(each.disk_mb for each in held),
            execs=self._runs_of(self._of.get(key.id, ())),
            last_used_at=self.ring.last_used.get(key.id),
        )

    # Sessions ---------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget all sessions, before the live ones are held anew."""
        self._held.clear()
        self._of.clear()

    def hold(self, session: Hashable, owner: str | None, limits: Limits) -> None:
        """Count a session that exists, whether it fits or not."""
        self.release(session)
        if owner is not None:
            self._held[session] = _Held(owner, limits)
            self._of.setdefault(owner, {})[session] = limits

    def owner_of(self, session: Hashable) -> str | None:
        """Return the key that made a counted session."""
        held = self._held.get(session)
        return None if held is None else held.owner

    def release(self, session: Hashable) -> None:
        """Stop counting a session against the key that made it."""
        held = self._held.pop(session, None)
        if held is not None:
            of_owner = self._of[held.owner]
            del of_owner[session]
            if not of_owner:
                del self._of[held.owner]

    def check_create(self, owner: str | None, limits: Limits) -> None:
        """Raise `QuotaExceeded` unless one more session of these limits fits."""
        quota = self._quota(owner)
        have = len(self._of.get(owner or "", ()))
        if quota.sessions is not None and have >= quota.sessions:
            message = "this API key has all the sessions it may have"
            raise _full("sessions", message, requested=1, used=have, total=quota.sessions)
        self._check_sums(owner, quota, limits, None)

    def check_change(self, session: Hashable, limits: Limits) -> None:
        """Raise `QuotaExceeded` unless the new limits fit; a limit that does not grow always fits."""
        held = self._held.get(session)
        if held is not None:
            self._check_sums(held.owner, self._quota(held.owner), limits, held.limits)

    def _check_sums(self, owner: str | None, quota: Quota, wanted: Limits, before: Limits | None) -> None:
        held = self._of.get(owner or "", {}).values()
        for name in _SUMMED:
            most = getattr(quota, name)
            if most is None:
                continue  # a sum takes as long as there are sessions
            new, old = getattr(wanted, name), 0 if before is None else getattr(before, name)
            used = sum(getattr(each, name) for each in held)
            if new > old and used - old + new > most:
                message = "the sessions of this API key have all that they may have together"
                raise _full(name, message, requested=new - old, used=used, total=most)

    # Rates and runs ---------------------------------------------------------------------------------------------

    def take_create(self, owner: str | None) -> None:
        """Count a create. Raises `QuotaExceeded` when the key creates faster than it may."""
        per_minute = self._quota(owner).creates_per_minute
        if owner is not None and per_minute is not None:
            bucket = self._bucket(self._creates, owner, per_s=per_minute / 60, burst=per_minute)
            _take(bucket, "creates_per_minute", per_minute)

    def take_request(self, key: ApiKey) -> None:
        """Count a request. Raises `QuotaExceeded` when the key asks faster than it may."""
        per_s = key.quota.requests_per_second
        if per_s is not None:
            bucket = self._bucket(self._requests, key.id, per_s=per_s, burst=per_s)
            _take(bucket, "requests_per_second", per_s)

    def check_run(self, owner: str | None) -> None:
        """Raise `QuotaExceeded` unless one more command, process or terminal may run in the key's sessions."""
        most = self._quota(owner).execs
        if owner is not None and most is not None and (running := self._runs_of(self._of.get(owner, ()))) >= most:
            message = "the sessions of this API key run all that they may at a time"
            raise _full("execs", message, requested=1, used=running, total=most)

    def _bucket(self, buckets: dict[str, TokenBucket], owner: str, *, per_s: float, burst: float) -> TokenBucket:
        bucket = buckets.get(owner)
        if bucket is None or (bucket.per_s, bucket.burst) != (per_s, burst):
            for gone in [key_id for key_id in buckets if key_id not in self.ring.keys]:
                del buckets[gone]
            bucket = buckets[owner] = TokenBucket(per_s=per_s, burst=burst, clock=self._clock)
        return bucket

    def _quota(self, owner: str | None) -> Quota:
        key = self.ring.keys.get(owner or "")
        return _NO_QUOTA if key is None else key.quota


def _full(name: str, message: str, **details: float) -> QuotaExceeded:
    return QuotaExceeded(message, retry_after_s=_WHEN_FULL_S, quota=name, **details)


# Rates


class TokenBucket:
    """A rate: `burst` may be taken at once, then `per_s`. `clock` gives seconds; first read when the first is taken."""

    def __init__(self, *, per_s: float, burst: float, clock: Callable[[], float]) -> None:
        self.per_s, self.burst = per_s, burst
        self._clock = clock
        self._left = burst
        self._at: float | None = None

    def take(self) -> float:
        """Take one and return 0, or take none and return the seconds until there is one."""
        now = self._clock()
        if self._at is not None:
            self._left = min(self.burst, self._left + (now - self._at) * self.per_s)
        self._at = now
        if self._left >= 1:
            self._left -= 1
            return 0
        return (1 - self._left) / self.per_s if self.per_s else math.inf


def _take(bucket: TokenBucket, name: str, total: float) -> None:
    wait_s = bucket.take()
    if wait_s:
        message = "this API key asks more often than it may"
        wait = math.ceil(wait_s) if math.isfinite(wait_s) else 3600
        raise QuotaExceeded(message, retry_after_s=wait, quota=name, total=total)
