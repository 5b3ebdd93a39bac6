"""What the logs hold in memory and on disk, counted, and the signals between those who fill it and the one who empties.

Counters and events only: which log has to give way is decided in `spool_session.py` (a session's budget) and `spool.py`
(the daemon's memory and disk).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Final

import trio

from sandkasten.output.spool_segment import Segment

if TYPE_CHECKING:
    from sandkasten.output.spool_blocks import KeptOutput

log = logging.getLogger(__name__)

BLOCK_BYTES: Final = 256 * 1024
_READING_THREADS: Final = 4
_REPORT_EVERY_S: Final = 60.0


class Account:
    """What the logs of one session cost together. `make_room` is called when that is more than the limit.

    `block_bytes` is the cost at which a block takes no further piece: small beside the limit, which is kept in blocks.
    `unwritten` are the logs of ended runs of which something is in memory, in the order in which they ended.
    """

    __slots__ = ("block_bytes", "limit_bytes", "make_room", "unwritten", "used_bytes")

    def __init__(self, limit_bytes: int, make_room: Callable[[], None]) -> None:
        self.limit_bytes = limit_bytes
        self.block_bytes = min(BLOCK_BYTES, limit_bytes // 16)
        self.make_room = make_room
        self.unwritten: OrderedDict[KeptOutput, None] = OrderedDict()
        self.used_bytes = 0


class Ledger:
    """The counters of the whole spool.

    Writing to disk begins when `memory_bytes` passes the limit and goes down to three quarters of it. A quarter above
    the limit, writers whose log holds more than its share wait; all shares together are a quarter. So memory stays
    below one and a half of the limit, plus one piece for each log that is written to.
    """

    def __init__(self, memory_limit_bytes: int, disk_limit_bytes: int) -> None:
        self.memory_limit_bytes = memory_limit_bytes
        self.memory_low_bytes = memory_limit_bytes * 3 // 4
        self.disk_limit_bytes = disk_limit_bytes
        self.memory_bytes = 0
        self.disk_bytes = 0
        self.lost_bytes = 0
        self.is_closed = False
        self.running: dict[KeptOutput, None] = {}
        self.unwritten: OrderedDict[Account, None] = OrderedDict()
        """The sessions that have something unwritten of ended runs, in the order in which it is their turn."""
        self.doomed: list[Segment] = []
        """Files of which no block is live; counted as disk use until they are removed."""
        self.reading = trio.CapacityLimiter(_READING_THREADS)
        self.work = trio.Event()
        """Set when the background task has something to do."""
        self._writers: set[trio.Event] = set()
        self._next_report = -inf

    def take(self, cost_bytes: int) -> None:
        """Count what came into memory."""
        self.memory_bytes += cost_bytes
        if self.memory_bytes > self.memory_limit_bytes:
            self.work.set()

    def give_back(self, cost_bytes: int) -> None:
        """Count what left memory, and let the writers that wait look again."""
        self.memory_bytes -= cost_bytes
        self.wake_writers()

    def is_short_for(self, held_bytes: int) -> bool:
        """Whether a running log that holds `held_bytes` in memory has to wait until some of it is written."""
        quarter = self.memory_limit_bytes // 4
        if self.memory_bytes <= self.memory_limit_bytes + quarter or self.is_closed:
            return False
        return held_bytes > quarter // max(1, len(self.running))

    def add_unwritten(self, kept: KeptOutput) -> None:
        """Something of an ended run is in memory."""
        kept.account.unwritten[kept] = None
        self.unwritten.setdefault(kept.account)

    def remove_unwritten(self, kept: KeptOutput) -> None:
        """Nothing of an ended run is in memory any more."""
        kept.account.unwritten.pop(kept, None)
        if not kept.account.unwritten:
            self.unwritten.pop(kept.account, None)

    def release(self, segment: Segment) -> None:
        """One block less needs the file; without any it is to be removed."""
        segment.live_blocks -= 1
        if segment.live_blocks == 0:
            self.doomed.append(segment)
            self.work.set()

    async def wait_room(self, room: trio.Event) -> None:
        """Wait until `room` is set by a reader, or memory was given back."""
        self._writers.add(room)
        try:
            await room.wait()
        finally:
            self._writers.discard(room)

    def wake_writers(self) -> None:
        for room in self._writers:
            room.set()

    def report(self, error: Exception) -> None:
        """Log a failure of the disk, one a minute at most."""
        now = trio.current_time()
        if now >= self._next_report:
            self._next_report = now + _REPORT_EVERY_S
            log.error(
                "spool_failed", extra={"error": f"{type(error).__name__}: {error}", "lost_bytes": self.lost_bytes}
            )
