"""The journal as server-sent events, of the node or of one session, and the parts that its WebSocket shares.

A cursor is the place from which a client can go on after it lost the connection. A client gets one at the start and one
in times of silence, so that it can go on even if nothing it follows has happened. One event at a time is taken and
sent, so a client that does not read holds up nobody else.

Source: HTML Living Standard §9.2.6 (a block with an `id` and no `data` sets the last event id and is not dispatched).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import attrs
import trio

from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.json import Body, to_plain
from sandkasten.api.http.key_scope import EventFilter
from sandkasten.api.http.sse import SSE_HEADERS, error_event
from sandkasten.api.resources.fields import EventTypes, read_head, read_query
from sandkasten.api.resources.run_output import PreferredWait
from sandkasten.errors import SandkastenError
from sandkasten.model import Event, EventType
from sandkasten.supervisor import EventStream


@attrs.frozen
class EventsQuery:
    """The query of a stream of events: the cursor behind which it begins, and the types, by default all."""

    cursor: str | None = None
    types: EventTypes | None = None


@attrs.frozen
class EventsHead:
    """The cursor of the last event that a client has, which goes before that of the query, and in `prefer` a `wait` of
    some seconds (RFC 7240): the answer ends with the first events, or after that time."""

    last_event_id: str | None = None
    prefer: PreferredWait | None = None


@attrs.frozen
class EventBody(Body):
    """An event of the journal. `data` has fields of its type."""

    cursor: str
    time: datetime
    type: EventType
    session_id: str
    data: Mapping[str, Any]


EVENTS: Mapping[str, EventType] = {kind.value: kind for kind in EventType}
"""The messages of the journal: each is an `EventBody`, with `data` by its type."""


async def stream(exchange: Exchange) -> None:
    """Follow events as server-sent events, from the beginning, behind `cursor` or behind Last-Event-ID."""
    await exchange.until_disconnect(lambda: _stream(exchange))


async def _stream(exchange: Exchange) -> None:
    query = read_query(exchange, EventsQuery)
    head = read_head(exchange, EventsHead)
    after = head.last_event_id or query.cursor
    until = math.inf if head.prefer is None else trio.current_time() + head.prefer
    try:
        async with exchange.supervisor.events(session_id=exchange.session_id or None, after=after) as events:
            shown = EventFilter(exchange.key, exchange.supervisor)
            follower = Follower(events, query.types, shown, silence_s=exchange.settings.ping_interval_s)
            await exchange.start(200, SSE_HEADERS)
            if exchange.method == "HEAD":
                await exchange.finish()
                return
            while True:
                item: Event | Mark | None = None
                with trio.move_on_at(until):
                    item = await follower.next()
                if item is None:
                    await exchange.finish()
                    return
                await exchange.write(block(item))
                if head.prefer is not None and isinstance(item, Event):  # with what has happened by now, and no more
                    until = min(until, trio.current_time() + exchange.settings.coalesce_ms / 1000)
    except SandkastenError as error:
        if not exchange.is_started:
            raise
        await exchange.write(error_event(error))
        await exchange.finish()


@attrs.frozen
class Mark:
    """A cursor up to which everything was sent or not asked for; `is_new` if the client has not been told it."""

    cursor: str
    is_new: bool


class Follower:
    """The sequence that one client is sent: first a mark, then events, and marks in times of silence."""

    def __init__(
        self, events: EventStream, types: frozenset[EventType] | None, shown: EventFilter, *, silence_s: float
    ) -> None:
        self._events, self._types, self._shown, self._silence_s = events, types, shown, silence_s
        self._sent: str | None = None
        self._taken: Event | None = None

    async def next(self) -> Event | Mark:
        """Return the next event that was asked for, or a mark when there was none for `silence_s`. Raises as the
        stream of events does."""
        if self._sent is not None:
            with trio.move_on_after(self._silence_s):
                return await self._next_wanted()
        mark = Mark(self._events.cursor, is_new=self._events.cursor != self._sent)
        self._sent = mark.cursor
        return mark

    async def _next_wanted(self) -> Event:
        while True:
            told = self._taken if self._taken is not None else await anext(self._events)
            self._taken = told  # kept for the next call if the silence ends while the event is looked at
            is_wanted = (self._types is None or told.type in self._types) and await self._shown.shows(told)
            self._taken = None
            if is_wanted:
                self._sent = told.cursor
                return told


def block(item: Event | Mark) -> bytes:
    """Return one block of an event stream."""
    if isinstance(item, Event):
        return f"id: {item.cursor}\nevent: {item.type.value}\ndata: {to_json(event_fields(item))}\n\n".encode("ascii")
    place = f"id: {item.cursor}\n" if item.is_new else ""
    return f": ping\n{place}\n".encode("ascii")


def event_fields(told: Event) -> dict[str, Any]:  # JSON values
    """Return the fields of an event as clients see it."""
    fields: dict[str, Any] = to_plain(EventBody.take(told))
    return fields


def to_json(value: Mapping[str, object]) -> str:
    """Return one line of ASCII JSON."""
    return json.dumps(value, separators=(",", ":"))
