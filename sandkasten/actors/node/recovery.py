"""Forgets sessions that ended long ago, each with its idempotency key; a few at a time, so that others get a turn."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta

from sandkasten.actors.core import Ref
from sandkasten.actors.services import store as store_actor

log = logging.getLogger(__name__)

BATCH = 500
"""Records that one transaction deletes; some milliseconds, in which nothing else is written."""


async def forget_ended(store: Ref, *, keep_s: float) -> int:
    """Delete the records of sessions that ended longer ago than that; return how many. Raises `StoreFailed`."""
    before = datetime.now(UTC) - timedelta(seconds=keep_s)
    forgotten = 0
    while True:
        count = await store.ask(store_actor.ForgetEnded(before, BATCH))
        forgotten += count
        if count < BATCH:
            break
    if forgotten:
        log.info("records_forgotten", extra={"count": forgotten})
    return forgotten
