"""The journal of events in memory: numbers events, keeps the newest, tracks the unwritten ones and wakes readers.

`emit` runs on the way of every command: it does a bounded, small amount of work, never waits and never refuses. An
event must be written before it leaves memory (`actors/services/events.py` writes). If the database refuses for too
long, the *floor* rises: no reader can go on from a cursor below it. Owns no task and does no I/O.

A cursor is `EPOCH-NUMBER` in fixed-width hexadecimal, ordered as text. Each start of the daemon has an epoch of its
own, so a cursor never comes again, whatever was lost with the last process.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

import attrs
import trio

from sandkasten import logcontext
from sandkasten.errors import Capacity, InvalidRequest
from sandkasten.journal.fields import EVENT_FIELDS, KEY_ID, TRACE_ID, bounded_data
from sandkasten.model import Event, EventType

log = logging.getLogger(__name__)

MEMORY_EVENTS = 8192
"""Events kept in memory; of at most 4 KiB each."""

MAX_READERS = 256
CROWD_EVENTS = 512
"""Number of unwritten events that are written at once, without the usual pause."""

OLDEST = "0"
"""The cursor before every event that is kept."""

_CURSOR = re.compile(r"[0-9a-f]{12}-[0-9a-f]{12}\Z")
_NUMBER_START = 13


@attrs.define(eq=False)
class Listener:
    """A waiting reader: `woken` is set when there may be an event for it."""

    session_id: str | None
    woken: trio.Event = attrs.field(factory=trio.Event)

    def rearm(self) -> trio.Event:
        """Return a fresh `woken`. Call before the events are read, so that none comes unnoticed in between."""
        self.woken = trio.Event()
        return self.woken


@attrs.frozen
class Unwritten:
    """A batch for the database: events in order, the number of the last, and the floor if it has changed."""

    events: Sequence[Event]
    last: int
    floor: str | None


class Journal:
    """The journal of one daemon. `open` comes before the first `emit`.

    `on_event` is called with each event at once; it must not block or fail.
    """

    def __init__(
        self,
        *,
        memory_events: int = MEMORY_EVENTS,
        on_event: Callable[[EventType, Mapping[str, object]], None] | None = None,
    ) -> None:
        self._size, self._on_event = memory_events, on_event
        self._ring: list[Event | None] = [None] * memory_events  # the event of number n lies at n % size
        self._epoch = -1
        self._last = 0
        self._written = 0
        self._announced = 0
        self._is_floor_new = False
        self._listeners: set[Listener] = set()
        self.floor = ""
        self.rows = 0
        """Events in the database."""
        self.unknown_fields: set[tuple[EventType, str]] = set()
        """Fields that callers passed and that are in no list."""
        self.is_closed = False
        self.to_write = trio.Event()
        """Set while events are unwritten."""
        self.is_crowded = trio.Event()
        """Set when so many events are unwritten that they should be written at once."""
        self.has_news = trio.Event()
        """Set when listeners are to be woken, by `announce`."""

    @property
    def is_open(self) -> bool:
        return self._epoch >= 0

    def open(self, epoch: int, floor: str | None, *, rows: int = 0) -> None:
        """Begin numbering; `floor` None: nothing was ever written. `rows` is the number of events in the database."""
        self._epoch, self.rows = epoch, rows
        if floor is None:
            self._raise_floor(self._cursor(0))
        else:
            self.floor = floor

    def close(self) -> None:
        """End the journal and wake every waiting reader."""
        self.is_closed = True
        for listener in self._listeners:
            listener.woken.set()

    def emit(self, type: EventType, session_id: str, **data: object) -> None:
        """Record an event. `data` has JSON values in fields of `EVENT_FIELDS`; None leaves a field out."""
        assert self.is_open, "an event came before the journal was opened"
        if not data.keys() <= EVENT_FIELDS[type]:
            data = self._without_unknown(type, data)
        number = self._last + 1
        origin = logcontext.origin.get()
        if origin.key_id is not None:
            data[KEY_ID] = origin.key_id
        if origin.trace is not None:
            data[TRACE_ID] = origin.trace.trace_id
        if number - self._written > self._size:
            self._written = number - self._size
            self._raise_floor(self._cursor(self._written))
        moment = datetime.fromtimestamp(time.time_ns() // 1_000_000 / 1000, UTC)
        if self._on_event is not None:
            self._on_event(type, data)
        self._ring[number % self._size] = Event(self._cursor(number), moment, type, session_id, bounded_data(data))
        self._last = number
        self.to_write.set()
        if number - self._written >= CROWD_EVENTS:
            self.is_crowded.set()
        if self._listeners:
            self.has_news.set()

    # Reading

    @property
    def head(self) -> str:
        """The cursor of the newest event."""
        return self._cursor(self._last)

    @property
    def memory_start(self) -> str:
        """Every event behind this cursor is in memory."""
        return self._cursor(max(0, self._last - self._size))

    def place(self, after: str | None) -> str:
        """Return the cursor to read on from; None is the newest event, `OLDEST` the floor.

        Raises:
            InvalidRequest: the cursor is malformed, or ahead of every event.
        """
        if after is None:
            return self.head
        if after == OLDEST:
            return self.floor
        if not _CURSOR.match(after):
            raise InvalidRequest("the cursor is malformed", cursor=f"must be {OLDEST} or the cursor of an event")
        if after > self.head:
            raise InvalidRequest("the cursor is not of this journal", cursor="is ahead of every event")
        return after

    def page(self, after: str, session_id: str | None, *, limit: int) -> tuple[list[Event], str]:
        """Return events of one session or of all, from the `limit` events behind `after`, and the cursor to go on from.

        `after` must not be before `memory_start`.
        """
        first = int(after[_NUMBER_START:], 16) + 1
        events = self._events(first, min(self._last, first + limit - 1))
        wanted = [event for event in events if session_id is None or event.session_id == session_id]
        return wanted, events[-1].cursor if events else after

    def recent(self, session_id: str, *, limit: int) -> list[Event]:
        """Return the newest events of one session that memory has, newest first."""
        found: list[Event] = []
        for number in range(self._last, max(0, self._last - self._size), -1):
            event = self._ring[number % self._size]
            if event is not None and event.session_id == session_id:
                found.append(event)
                if len(found) == limit:
                    break
        return found

    @property
    def readers(self) -> int:
        """Number of readers."""
        return len(self._listeners)

    def listen(self, session_id: str | None) -> Listener:
        """Register a reader; `leave` undoes it. Raises `Capacity`."""
        if len(self._listeners) >= MAX_READERS:
            raise Capacity("too many readers of events", max_readers=MAX_READERS)
        listener = Listener(session_id)
        self._listeners.add(listener)
        return listener

    def leave(self, listener: Listener) -> None:
        self._listeners.discard(listener)

    def announce(self) -> None:
        """Wake the readers for which there are new events. Now and then wake all readers, so that a reader of a silent
        session does not stay behind while others fill the journal.
        """
        self.has_news = trio.Event()
        first = max(self._announced, self._last - self._size) + 1
        sessions = {event.session_id for event in self._events(first, self._last)}
        stride = max(self._size // 4, 1)
        is_for_all = self._last // stride != self._announced // stride
        self._announced = self._last
        for listener in self._listeners:
            if is_for_all or listener.session_id is None or listener.session_id in sessions:
                listener.woken.set()

    # Writing

    @property
    def unwritten_count(self) -> int:
        """Number of events that the database does not have yet."""
        return self._last - self._written

    def unwritten(self, *, limit: int) -> Unwritten | None:
        """Return the next batch to write, or None."""
        last = min(self._last, self._written + limit)
        floor = self.floor if self._is_floor_new else None
        if last == self._written and floor is None:
            self.to_write = trio.Event()
            return None
        return Unwritten(self._events(self._written + 1, last), last, floor)

    def was_written(self, batch: Unwritten, *, rows: int) -> None:
        """Note that a batch was written, `rows` of it new."""
        self.rows += rows
        self._written = max(self._written, batch.last)
        if batch.floor == self.floor:
            self._is_floor_new = False
        if self._last - self._written < CROWD_EVENTS:
            self.is_crowded = trio.Event()

    def was_purged(self, floor: str, *, rows: int) -> None:
        """Note that the database deleted `rows` events: all at or before `floor`."""
        self.rows = self.rows - rows if rows else 0  # none there: the count was wrong
        self.floor = max(self.floor, floor)

    def _without_unknown(self, type: EventType, data: Mapping[str, object]) -> dict[str, object]:
        """Drop fields that are in no list, since they may hold a secret. A bug of the caller, logged once each."""
        for name in data.keys() - EVENT_FIELDS[type]:
            if (type, name) not in self.unknown_fields:
                self.unknown_fields.add((type, name))
                log.error("event_field_unknown", extra={"event_type": type.value, "field": name})
        return {name: value for name, value in data.items() if name in EVENT_FIELDS[type]}

    def _raise_floor(self, floor: str) -> None:
        self.floor = max(self.floor, floor)
        self._is_floor_new = True
        self.to_write.set()

    def _events(self, first: int, last: int) -> list[Event]:
        found = [self._ring[number % self._size] for number in range(first, last + 1)]
        return [event for event in found if event is not None]

    def _cursor(self, number: int) -> str:
        return f"{self._epoch:012x}-{number:012x}"
