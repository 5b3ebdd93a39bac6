"""What becomes of those who don't know a key: told so at once, and slowly when there are many; the log hears of it now
and then.

A token has too many bits to be found by trying. What is bounded here is the work and the log lines that strangers
cause: each refusal over the rate waits, and holds nothing but its own connection, of which there are `max_connections`.
Whoever knows a key never waits. Knows no address to lock out: behind a proxy all have the same.
"""

from __future__ import annotations

import logging
import math

import trio

from sandkasten.admission.token_bucket import TokenBucket

log = logging.getLogger(__name__)

AT_ONCE = 50
PER_S = 20.0
PAUSE_S = 1.0
LOG_EVERY_S = 10.0


class Refusals:
    """Counts refusals of one front."""

    def __init__(self) -> None:
        self._bucket = TokenBucket(per_s=PER_S, burst=AT_ONCE, clock=trio.current_time)
        self._logged_at = -math.inf
        self._unlogged = 0

    async def note(self, peer: object) -> None:
        """Somebody is about to be refused; returns when that may be said. `peer` is for the log."""
        now = trio.current_time()
        self._unlogged += 1
        if now - self._logged_at >= LOG_EVERY_S:
            log.warning("auth_failed", extra={"count": self._unlogged, "last_peer": _text(peer)})
            self._logged_at, self._unlogged = now, 0
        if self._bucket.take():
            await trio.sleep(PAUSE_S)


def _text(peer: object) -> str:
    """Return the address of an ASGI scope's `client`, which a unix socket lacks."""
    return str(peer[0]) if isinstance(peer, list | tuple) and peer else "unix socket"
