"""Follow what happens, as server-sent events or over a WebSocket: `GET /v1/events` and beneath a session.

Both speak of cursors: where a client can go on after it lost the connection. It gets one at the start and one in times
of silence, so that it can go on even if nothing of what it follows has happened. What is kept is the supervisor's
decision; here one event at a time is taken and sent, so a client that does not read stops nothing else.

Source: HTML Living Standard §9.2.6 (a block with an `id` and no `data` sets the last event id and is not dispatched).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs
import trio

from sandkasten.api.http.errors import error_body
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.key_scope import EventFilter
from sandkasten.api.http.sse import SSE_HEADERS, event
from sandkasten.api.resources.fields import bad_query
from sandkasten.log import rfc3339
from sandkasten.model import Event, EventType
from sandkasten.model.errors import SandkastenError
from sandkasten.supervisor import EventStream


async def stream(exchange: Exchange) -> None:
    """GET /v1/events and /v1/sessions/{id}/events, `cursor=` (or `Last-Event-ID`), `types=`"""
    await exchange.until_disconnect(lambda: _stream(exchange))


async def _stream(exchange: Exchange) -> None:
    types = parse_types(exchange.query)
    after = exchange.header(b"last-event-id") or exchange.query.get("cursor")
    try:
        async with exchange.supervisor.events(session_id=exchange.session_id or None, after=after) as events:
            shown = EventFilter(exchange.key, exchange.supervisor)
            follower = Follower(events, types, shown, silence_s=exchange.settings.ping_interval_s)
            await exchange.start(200, SSE_HEADERS)
            if exchange.method == "HEAD":
                await exchange.finish()
                return
            while True:
                await exchange.write(block(await follower.next()))
    except SandkastenError as error:
        if not exchange.is_started:
            raise
        body = error_body(error)
        await exchange.write(event("error", body | {"error": body["message"]}))
        await exchange.finish()


@attrs.frozen
class Mark:
    """Everything up to `cursor` was sent or not asked for; `is_new`: the client does not know that cursor yet."""

    cursor: str
    is_new: bool


class Follower:
    """What one client is to be sent, one thing at a time: first a mark, then events, and marks in times of silence."""

    def __init__(
        self, events: EventStream, types: frozenset[EventType] | None, shown: EventFilter, *, silence_s: float
    ) -> None:
        self._events, self._types, self._shown, self._silence_s = events, types, shown, silence_s
        self._sent: str | None = None
        self._taken: Event | None = None

    async def next(self) -> Event | Mark:
        """Wait for the next event that was asked for, or until there was none for `silence_s`. Raises what reading
        the events raises."""
        if self._sent is not None:
            with trio.move_on_after(self._silence_s):
                return await self._next_wanted()
        mark = Mark(self._events.cursor, is_new=self._events.cursor != self._sent)
        self._sent = mark.cursor
        return mark

    async def _next_wanted(self) -> Event:
        while True:
            told = self._taken if self._taken is not None else await anext(self._events)
            self._taken = told  # a silence that ends while it is looked at must not lose it
            is_wanted = (self._types is None or told.type in self._types) and await self._shown.shows(told)
            self._taken = None
            if is_wanted:
                self._sent = told.cursor
                return told


def parse_types(query: Mapping[str, str]) -> frozenset[EventType] | None:
    """Return the types that are asked for, None for all. Raises `InvalidRequest`."""
    text = query.get("types")
    if text is None:
        return None
    try:
        return frozenset(EventType(name.strip()) for name in text.split(","))
    except ValueError:
        names = ", ".join(EventType)
        raise bad_query("types", f"must be a list, with commas, of {names}") from None


def block(item: Event | Mark) -> bytes:
    """Return one block of an event stream."""
    if isinstance(item, Event):
        return f"id: {item.cursor}\nevent: {item.type.value}\ndata: {to_json(event_view(item))}\n\n".encode("ascii")
    place = f"id: {item.cursor}\n" if item.is_new else ""
    return f": ping\n{place}\n".encode("ascii")


def event_view(told: Event) -> dict[str, Any]:  # JSON values
    """Return an event as clients see it."""
    return {
        "cursor": told.cursor,
        "time": rfc3339(told.time),
        "type": told.type.value,
        "session_id": told.session_id,
        "data": dict(told.data),
    }


def to_json(value: Mapping[str, object]) -> str:
    """Return one line of ASCII JSON."""
    return json.dumps(value, separators=(",", ":"))
