"""Watches the file of API keys and brings its changes to the ring, so that a revoked key is over within a second.

A file that can't be believed gives no key: what was made with the command line is refused until it is mended, and the
configured key goes on. The file is looked at by its name, once each half second, off the event loop: a disk that hangs
holds up nobody, and then changes come late.
"""

from __future__ import annotations

import logging
from pathlib import Path

import trio

from sandkasten.admission.keys import KeyFileError, KeyRing, Stamp, read_keys, stamp_of

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5


class KeyWatch:
    """Keeps `ring` as the file at `path` says."""

    def __init__(self, ring: KeyRing, path: Path) -> None:
        self._ring, self._path = ring, path
        self._seen: Stamp | None = None
        self._limiter = trio.CapacityLimiter(1)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Read the file, and again whenever it changes."""
        await self.look()
        task_status.started()
        while True:
            await trio.sleep(LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Bring the ring up to date."""
        try:
            stamp = await trio.to_thread.run_sync(stamp_of, self._path, limiter=self._limiter)
            if stamp != self._seen:
                await self._read(stamp)
        except (KeyFileError, OSError) as error:
            self._refuse(error)
        self._ring.end_uses()

    async def _read(self, stamp: Stamp) -> None:
        self._seen = stamp
        keys = await trio.to_thread.run_sync(read_keys, self._path, limiter=self._limiter)
        before = self._ring.keys.keys()
        after = {key.id for key in keys}
        if before != after:
            facts = {"added": sorted(after - before), "removed": sorted(before - after), "keys": len(keys)}
            log.info("keys_changed", extra=facts)
        self._ring.replace(keys)

    def _refuse(self, error: Exception) -> None:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        if self._ring.keys or self._ring.trouble != reason:
            log.error("keys_refused", extra={"file": self._path.name, "reason": reason})
        self._ring.replace([])
        self._ring.trouble = reason
        self._seen = None  # what could not be read once may be readable the next time, without having changed
