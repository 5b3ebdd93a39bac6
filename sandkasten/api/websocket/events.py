"""GET /v1/events and beneath a session, as a WebSocket: one text message for each event, `cursor` messages between."""

from __future__ import annotations

import trio

from sandkasten.api.http.key_scope import EventFilter
from sandkasten.api.http.websocket import CloseCode
from sandkasten.api.resources.events import EventsQuery, Follower, event_fields, to_json
from sandkasten.api.resources.fields import refuse_unknown
from sandkasten.api.websocket.handshake import WebSocketExchange
from sandkasten.model import Event
from sandkasten.model.errors import SandkastenError

SUBPROTOCOL = "sandkasten.events.v1"


async def events_ws(ws: WebSocketExchange) -> None:
    """Follow events: one text message for each, `cursor` messages between."""
    await ws.accept(SUBPROTOCOL)
    failures: list[SandkastenError] = []

    async def follow(scope: trio.CancelScope) -> None:
        try:
            await _follow(ws)
        except SandkastenError as error:  # not through the nursery, which would wrap it into a group
            failures.append(error)
            scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow, nursery.cancel_scope)
        if await ws.receive() is not None:
            await ws.close(CloseCode.INVALID, "this connection takes no messages")
        nursery.cancel_scope.cancel()
    if failures:
        raise failures[0]


async def _follow(ws: WebSocketExchange) -> None:
    refuse_unknown(ws.query, EventsQuery)
    query = EventsQuery(ws.query.get("cursor"), ws.query.get("types"))
    types = query.wanted
    async with ws.supervisor.events(session_id=ws.session_id or None, after=query.cursor) as events:
        shown = EventFilter(ws.key, ws.supervisor)
        follower = Follower(events, types, shown, silence_s=ws.settings.ping_interval_s)
        while True:
            item = await follower.next()
            if isinstance(item, Event):
                await ws.send_text(to_json(event_fields(item)))
            elif item.is_new:
                await ws.send_text(to_json({"type": "cursor", "cursor": item.cursor}))
