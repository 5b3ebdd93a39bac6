"""Streams that take no messages: the events of the node or of a session, and the changes of files, as WebSockets: one
text message for each, `cursor` messages between events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import ClassVar

import attrs
import trio

from sandkasten.api.http.json import Body, to_plain
from sandkasten.api.http.key_scope import EventFilter
from sandkasten.api.http.websocket import CloseCode
from sandkasten.api.resources.events import EVENTS, EventsQuery, Follower, event_fields, to_json
from sandkasten.api.resources.fields import parse_known_query
from sandkasten.api.resources.file_watch import WatchQuery, changes
from sandkasten.api.websocket.handshake import WebSocketExchange
from sandkasten.api.websocket.messages import encode_message
from sandkasten.errors import SandkastenError
from sandkasten.model import Event

SUBPROTOCOL = "sandkasten.events.v1"
WATCH_SUBPROTOCOL = "sandkasten.watch.v1"


@attrs.frozen
class CursorMessage(Body):
    """The place from which a client can go on after a silence."""

    kind: ClassVar[str] = "cursor"
    cursor: str


EVENT_MESSAGES: Mapping[str, object] = {**EVENTS, CursorMessage.kind: CursorMessage}


async def events_ws(ws: WebSocketExchange) -> None:
    """Follow events: one text message for each, `cursor` messages between."""
    await ws.accept(SUBPROTOCOL)
    await _until_left(ws, _follow)


async def watch_ws(ws: WebSocketExchange) -> None:
    """Follow the changes of files: one text message for each, `ready` first."""
    await ws.accept(WATCH_SUBPROTOCOL)
    await _until_left(ws, _watch)


async def _until_left(ws: WebSocketExchange, tell: Callable[[WebSocketExchange], Awaitable[None]]) -> None:
    """Tell the client what there is until either side ends it."""
    failures: list[SandkastenError] = []

    async def follow(scope: trio.CancelScope) -> None:
        try:
            await tell(ws)
            await ws.close()
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


async def _watch(ws: WebSocketExchange) -> None:
    async with aclosing(changes(ws, parse_known_query(ws.query, WatchQuery))) as batches:
        async for batch in batches:
            for each in batch:
                await ws.send_text(to_json(to_plain(each)))


async def _follow(ws: WebSocketExchange) -> None:
    query = parse_known_query(ws.query, EventsQuery)
    async with ws.supervisor.events(session_id=ws.session_id or None, after=query.cursor) as events:
        shown = EventFilter(ws.key, ws.supervisor)
        follower = Follower(events, query.types, shown, silence_s=ws.settings.ping_interval_s)
        while True:
            item = await follower.next()
            if isinstance(item, Event):
                await ws.send_text(to_json(event_fields(item)))
            elif item.is_new:
                await ws.send_frames(encode_message(CursorMessage(item.cursor)))
