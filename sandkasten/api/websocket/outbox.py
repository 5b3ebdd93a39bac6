"""Frames that wait to be sent on one WebSocket, and their order: control messages first, then the channels in turn.

One task at a time writes. Each turn takes one frame of each channel, and small frames of a turn go out in one write.
Everything is bounded: a channel waits for room before it adds output, and too many control messages end the connection.
Knows no message.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable

import trio

MAX_CONTROL = 256
"""Control messages that a client has not read; one more ends the connection."""

QUEUE_BYTES = 256 * 1024
"""A channel may add output while less than this waits; so a channel holds one frame more at most."""

WRITE_BYTES = 200 * 1024
"""Bytes that are gathered into one write: three frames of the largest size."""

HOLD_S = 0.001
"""Seconds that the first frames of a channel wait for more to send in one write: many runs end at once."""

HOLD_BYTES = 4 * 1024
"""Bytes that do not wait for more."""


Parts = tuple[bytes | memoryview, ...]
"""A frame: these bytes in a row."""


class Lane:
    """The frames of one channel, in order."""

    def __init__(self, outbox: Outbox, *, on_end: Callable[[], None]) -> None:
        """`on_end` is called when the last frame has been taken."""
        self._outbox = outbox
        self._on_end = on_end
        self._changed = trio.lowlevel.ParkingLot()
        self.frames: deque[Parts] = deque()
        self._sequences: deque[int] = deque()
        self.taken_sequence = 0
        """The number of the last numbered frame that was taken."""
        self.queued_bytes = 0
        self.is_held = False
        self.is_in_turn = False
        self.is_ended = False

    @property
    def has_room(self) -> bool:
        return self.queued_bytes < QUEUE_BYTES

    async def wait_for_room(self) -> None:
        """Wait until output may be added."""
        while not self.has_room:
            await self._changed.park()

    def put(self, *parts: bytes | memoryview, sequence: int = 0, hold: bool = False) -> None:
        """Add a frame, given in parts that are copied only when they are written. With `hold` the frame may wait
        `HOLD_S` for the frames behind it, to go out in one write."""
        self.frames.append(parts)
        self._sequences.append(sequence)
        self.queued_bytes += sum(map(len, parts))
        if self.is_held and self.queued_bytes < HOLD_BYTES:
            return
        self._outbox.add(self, hold=hold)
        self._outbox.wake()

    async def end(self, frame: bytes) -> None:
        """Add the last frame and, unless another task writes, write the waiting frames."""
        self.is_ended = True
        self.frames.append((frame,))
        self._sequences.append(0)
        self.queued_bytes += len(frame)
        self._outbox.add(self, hold=False)
        await self._outbox.flush()

    def take(self) -> Parts:
        """Return the next frame."""
        parts = self.frames.popleft()
        self.taken_sequence = self._sequences.popleft() or self.taken_sequence
        self.queued_bytes -= sum(map(len, parts))
        self._changed.unpark()
        if self.is_ended and not self.frames:
            self._on_end()
        return parts


class Outbox:
    """All of a connection's lanes, and its control messages."""

    def __init__(self, write: Callable[[bytes], Awaitable[None]], *, on_overflow: Callable[[], None]) -> None:
        """`on_overflow` is called for every control message over the limit; that message is dropped."""
        self._write = write
        self._on_overflow = on_overflow
        self._control: deque[bytes] = deque()
        self._turns: deque[Lane] = deque()
        self._held: deque[tuple[float, Lane]] = deque()
        self._writer = trio.lowlevel.ParkingLot()
        self._nap: trio.CancelScope | None = None
        self._idle = trio.lowlevel.ParkingLot()
        self._is_writing = False

    @property
    def is_empty(self) -> bool:
        """Return whether every frame was written."""
        return not (self._control or self._turns or self._held or self._is_writing)

    def put(self, frame: bytes) -> None:
        """Add a control message."""
        if len(self._control) >= MAX_CONTROL:
            self._on_overflow()
            return
        self._control.append(frame)
        self.wake()

    def add(self, lane: Lane, *, hold: bool) -> None:
        """Note that a lane has one more frame."""
        if lane.is_in_turn:
            return
        if hold and not lane.is_held:
            deadline = trio.current_time() + HOLD_S
            self._held.append((deadline, lane))
            lane.is_held = True
            if self._nap is not None and not self._is_writing:
                self._nap.deadline = min(self._nap.deadline, deadline)
            return
        lane.is_held, lane.is_in_turn = False, True
        self._turns.append(lane)

    def wake(self) -> None:
        """Wake the writer; needed unless `flush` follows."""
        if self._turns or self._control:
            self._writer.unpark()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self.flush()
            is_due = self._held and not self._is_writing  # otherwise the writer wakes this task
            with trio.CancelScope(deadline=self._held[0][0] if is_due else math.inf) as self._nap:
                await self._writer.park()
            self._nap = None

    async def flush(self) -> None:
        """Write the waiting frames, unless another task does."""
        while not self._is_writing:
            self._release_held()
            if not (self._control or self._turns):
                break
            self._is_writing = True
            try:
                await self._write(self._gather())
            finally:
                self._is_writing = False
                if self._held:
                    self._writer.unpark()
        if self.is_empty:
            self._idle.unpark_all()

    async def wait_until_empty(self) -> None:
        """Wait until every frame was written."""
        while not self.is_empty:
            await self._idle.park()

    def _release_held(self) -> None:
        """Put lanes in turn whose frame has waited `HOLD_S`, and forget lanes that wait no more."""
        while self._held and (not self._held[0][1].is_held or self._held[0][0] <= trio.current_time()):
            _, lane = self._held.popleft()
            if lane.is_held:
                self.add(lane, hold=False)  # the flush that asks goes on

    def _gather(self) -> bytes:
        """Return the next write: all control messages, and one frame of each lane up to `WRITE_BYTES`."""
        gathered: list[bytes | memoryview] = list(self._control)
        self._control.clear()
        size = sum(map(len, gathered))
        while self._turns and (not gathered or size + sum(map(len, self._turns[0].frames[0])) <= WRITE_BYTES):
            lane = self._turns.popleft()
            parts = lane.take()
            gathered += parts
            size += sum(map(len, parts))
            if lane.frames:
                self._turns.append(lane)
            else:
                lane.is_in_turn = False
        return b"".join(gathered)
