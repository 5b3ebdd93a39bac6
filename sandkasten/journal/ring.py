"""The journal of events in memory: numbers them, keeps the newest, and says what is not written yet and who waits.

`emit` is called on the way of every command: it does a bounded, small amount of work, waits for nothing and never
refuses. What leaves memory must have been written by then (`actors/services/events.py` does that); if the database
refused for too long, the *floor* rises: nobody can read on from below it. Owns no task and does no I/O.

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
from sandkasten.journal.fields import EVENT_FIELDS, KEY_ID, TRACE_ID, bounded_data
from sandkasten.model import Event, EventType
from sandkasten.model.errors import Capacity, InvalidRequest

log = logging.getLogger(__name__)

MEMORY_EVENTS = 8192
"""Events kept in memory; of at most 4 KiB each."""

MAX_READERS = 256
CROWD_EVENTS = 512
"""So many unwritten events are written at once, not after the usual moment."""

OLDEST = "0"
"""The cursor of who wants everything that is kept."""

_CURSOR = re.compile(r"[0-9a-f]{12}-[0-9a-f]{12}\Z")
_NUMBER_START = 13


@attrs.define(eq=False)
class Listener:
    """A reader's place to wait: `woken` is set when there may be something for it."""

    session_id: str | None
    woken: trio.Event = attrs.field(factory=trio.Event)


@attrs.frozen
class Unwritten:
    """What the database has to be given: events in order, the number of the last, and the floor if that is new."""

    events: Sequence[Event]
    last: int
    floor: str | None


class Journal:
    """See the module's docstring. `open` comes before the first `emit`."""

    def __init__(self, *, memory_events: int = MEMORY_EVENTS) -> None:
        self._size = memory_events
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
        """What callers tried to tell that is in no list."""
        self.on_event: Callable[[EventType, Mapping[str, object]], None] | None = None
        """Told of each event, at once; must not block or fail."""
        self.is_closed = False
        self.to_write = trio.Event()
        """Set when something is not written yet."""
        self.is_crowded = trio.Event()
        """Set when so much is not written yet that it should be, at once."""
        self.has_news = trio.Event()
        """Set when listeners are to be told, by `announce`."""

    @property
    def is_open(self) -> bool:
        return self._epoch >= 0

    def open(self, epoch: int, floor: str | None, *, rows: int = 0) -> None:
        """Begin numbering; `floor` None: nothing was ever written. `rows` are in the database."""
        self._epoch, self.rows = epoch, rows
        if floor is None:
            self._raise_floor(self._cursor(0))
        else:
            self.floor = floor

    def close(self) -> None:
        """Nobody writes or reads any more: readers that wait are told."""
        self.is_closed = True
        for listener in self._listeners:
            listener.woken.set()

    def emit(self, type: EventType, session_id: str, **data: object) -> None:
        """Tell that something happened. `data` has JSON values in fields of `EVENT_FIELDS`; None leaves one out."""
        assert self.is_open, "an event came before the journal was opened"
        if not data.keys() <= EVENT_FIELDS[type]:
            data = self._without_unknown(type, data)
        number = self._last + 1
        if (key_id := logcontext.origin.get().key_id) is not None:
            data[KEY_ID] = key_id
        if (trace := logcontext.origin.get().trace) is not None:
            data[TRACE_ID] = trace.trace_id
        if number - self._written > self._size:
            self._written = number - self._size
            self._raise_floor(self._cursor(self._written))
        moment = datetime.fromtimestamp(time.time_ns() // 1_000_000 / 1000, UTC)
        if self.on_event is not None:
            self.on_event(type, data)
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
            InvalidRequest: this journal never gave that cursor to anyone.
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
        """Return what `limit` events behind `after`, which is not before `memory_start`, hold for one session or for
        all, and the cursor up to which that is everything."""
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
        """How many there are at the moment."""
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
        """Wake the readers that what came since the last time is for. Now and then all of them, so that one whose
        session is silent does not stay behind while others fill the journal."""
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
        """How many events the database does not have yet."""
        return self._last - self._written

    def unwritten(self, *, limit: int) -> Unwritten | None:
        """Return what is to be written next, or None."""
        last = min(self._last, self._written + limit)
        floor = self.floor if self._is_floor_new else None
        if last == self._written and floor is None:
            self.to_write = trio.Event()
            return None
        return Unwritten(self._events(self._written + 1, last), last, floor)

    def was_written(self, batch: Unwritten, *, rows: int) -> None:
        """Take note that the database has a batch, `rows` of it new."""
        self.rows += rows
        self._written = max(self._written, batch.last)
        if batch.floor == self.floor:
            self._is_floor_new = False
        if self._last - self._written < CROWD_EVENTS:
            self.is_crowded = trio.Event()

    def was_purged(self, floor: str, *, rows: int) -> None:
        """Take note that the database forgot `rows` events, all that are not behind `floor`."""
        self.rows = self.rows - rows if rows else 0  # none there: the count was wrong
        self.floor = max(self.floor, floor)

    def _without_unknown(self, type: EventType, data: Mapping[str, object]) -> dict[str, object]:
        """Leave out what nobody has decided to tell: it may be a secret. A bug of the caller, logged once each."""
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
