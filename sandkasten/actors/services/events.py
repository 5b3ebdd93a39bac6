"""The events actor: writes the journal to the database and wakes its readers.

Events are written in groups, a moment after they happened, through the store. A database that refuses a write delays
nothing: readers are served from memory and the write is tried again. A reader pulls one page at a time and has no
queue, so a slow one costs nothing until it has fallen behind the oldest event that is kept.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import assert_never

import attrs
import trio

from sandkasten.actors.core import Actor, Ask, Deferred, Ref
from sandkasten.actors.services.store import do
from sandkasten.errors import CursorGone, SandkastenError, ShuttingDown, StoreFailed
from sandkasten.journal.ring import OLDEST, Journal
from sandkasten.model import Event
from sandkasten.store.events import append_events, open_journal, purge_events, read_events

log = logging.getLogger(__name__)

KEPT_EVENTS = 100_000
"""Default number of events that stay in the database."""

WRITE_AFTER_S = 0.05
STOP_S = 5.0
"""Time for the last write at a stop."""

_RETRY_S = 1.0
_BATCH_EVENTS = 1024
_PAGE_EVENTS = 256
_PURGE_ROWS = 1000


@attrs.frozen
class Flush(Ask[None]):
    """Write now; answered when all events emitted before are written. Raises `StoreFailed`."""


Message = Flush


class Events(Actor):
    """The writer of the journal. At most `kept` events, and a tenth of that or 1000 on top, stay in the database."""

    def __init__(self, ref: Ref, journal: Journal, *, store: Ref, kept: int = KEPT_EVENTS) -> None:
        super().__init__(ref)
        self._journal, self._store = journal, store
        self._kept = kept
        self._slack = min(max(kept // 10, 1), _PURGE_ROWS)
        self._is_refused = False
        self._turn = trio.Lock()

    async def on_start(self) -> None:
        if not self._journal.is_open:
            state = await self._store.ask_again(do(open_journal, now_ms=time.time_ns() // 1_000_000), on=(StoreFailed,))
            self._journal.open(state.epoch, state.floor, rows=state.rows)
        self._nursery.start_soon(self._write_forever)
        self._nursery.start_soon(self._announce_forever)

    async def on_stop(self) -> None:
        with trio.move_on_after(STOP_S) as patience:
            await self._try_write()
        if patience.cancelled_caught:
            log.error("events_not_written", extra={"waited_s": STOP_S})

    async def handle(self, message: Message) -> Deferred:
        match message:
            case Flush():
                return self.defer(self._write)
            case _:
                assert_never(message)

    async def _announce_forever(self) -> None:
        while True:
            await self._journal.has_news.wait()
            self._journal.announce()

    async def _write_forever(self) -> None:
        while True:
            await self._journal.to_write.wait()
            with trio.move_on_after(WRITE_AFTER_S):
                await self._journal.is_crowded.wait()
            if not await self._try_write():
                await trio.sleep(_RETRY_S)

    async def _try_write(self) -> bool:
        """Write all waiting events; return whether the database took them. A refusal is logged once until it is
        over."""
        try:
            await self._write()
        except SandkastenError as error:
            if not self._is_refused:
                log.error("events_not_written", extra={"error": str(error), "cause": repr(error.__cause__)})
            self._is_refused = True
            return False
        if self._is_refused:
            log.warning("events_written_again", extra={"floor": self._journal.floor})
        self._is_refused = False
        return True

    async def _write(self) -> None:
        async with self._turn:
            while (batch := self._journal.unwritten(limit=_BATCH_EVENTS)) is not None:
                rows = await self._store.ask(do(append_events, batch.events, floor=batch.floor))
                self._journal.was_written(batch, rows=rows)
                await self._purge()
                if len(batch.events) < _BATCH_EVENTS:
                    return  # later events wait for the next group

    async def _purge(self) -> None:
        while self._journal.rows >= self._kept + self._slack:
            oldest = min(self._journal.rows - self._kept, _PURGE_ROWS)
            purged = await self._store.ask(do(purge_events, oldest=oldest))
            self._journal.was_purged(purged.floor, rows=purged.rows)


class EventReader:
    """A reader of the journal; implements `supervisor.EventStream`. Made by `open_reader`.

    `cursor` is the place to go on from later: every event up to it was handed out or belongs to another session.
    """

    def __init__(self, journal: Journal, store: Ref, *, session_id: str | None, after: str | None) -> None:
        self._journal, self._store, self._session_id = journal, store, session_id
        self._is_from_oldest = after == OLDEST
        self._position = self._handed_out = journal.place(after)
        self._page: deque[Event] = deque()
        self._listener = journal.listen(session_id)

    @property
    def cursor(self) -> str:
        return self._handed_out if self._page else self._position

    def __aiter__(self) -> EventReader:
        return self

    async def __anext__(self) -> Event:
        """Return the next event. Cancelling it loses none.

        Raises:
            CursorGone: the journal has forgotten the events that come next.
            StoreFailed, ActorGone, Overloaded: the next events are in the database alone, and it can't be read.
            ShuttingDown: the journal was closed.
        """
        while not self._page:
            if self._journal.is_closed:
                raise ShuttingDown("the supervisor has ended")
            if not await self.catch_up():
                await self._read_memory()
        event = self._page.popleft()
        self._handed_out = event.cursor
        return event

    async def catch_up(self) -> bool:
        """Read a page from the database if memory does not reach back far enough; return whether it did not."""
        upto = self._journal.memory_start
        if self._position >= upto:
            return False
        if self._position < self._journal.floor:
            raise _gone(self._journal.floor)
        page = await self._store.ask_again(
            do(read_events, after=self._position, upto=upto, session_id=self._session_id, limit=_PAGE_EVENTS)
        )
        if self._position < page.floor and not self._is_from_oldest:
            raise _gone(page.floor)
        self._is_from_oldest = False
        self._take(page.events, page.events[-1].cursor if len(page.events) == _PAGE_EVENTS else upto)
        return True

    def close(self) -> None:
        """Stop reading; more than once is fine."""
        self._journal.leave(self._listener)

    async def _read_memory(self) -> None:
        await trio.lowlevel.checkpoint()
        if self._position < self._journal.memory_start:
            return
        woken = self._listener.rearm()
        events, position = self._journal.page(self._position, self._session_id, limit=_PAGE_EVENTS)
        if position == self._position:
            await woken.wait()
        self._take(events, position)

    def _take(self, events: Sequence[Event], position: str) -> None:
        self._handed_out, self._position = self._position, position
        self._page.extend(events)


@asynccontextmanager
async def open_reader(
    journal: Journal, store: Ref, *, session_id: str | None = None, after: str | None = None
) -> AsyncIterator[EventReader]:
    """Follow the journal from a cursor on, for one session or for all; `after` None is from now on.

    Raises:
        CursorGone: some of the events behind that cursor are not kept any more.
        InvalidRequest: it is no cursor of this journal.
        Capacity: too many readers.
    """
    reader = EventReader(journal, store, session_id=session_id, after=after)
    try:
        await reader.catch_up()
        yield reader
    finally:
        reader.close()


def _gone(floor: str) -> CursorGone:
    return CursorGone("the events behind that cursor are not kept any more", oldest_cursor=floor)
