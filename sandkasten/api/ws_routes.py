"""The URLs that are WebSockets, and who serves them."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from sandkasten.api.http.auth import ACT, FIND, LOOK, Needs
from sandkasten.api.http.routing import RouteTable
from sandkasten.api.websocket.events import events_ws
from sandkasten.api.websocket.exec import exec_ws
from sandkasten.api.websocket.handshake import WebSocketHandler
from sandkasten.api.websocket.terminal import terminal_ws


@attrs.frozen
class WebSocketRoute:
    """`needs` of the caller's key (`access.py`). `needs_live_session`: an ended session is refused before the handler
    is asked."""

    handler: WebSocketHandler
    needs: Needs
    needs_live_session: bool = True


SESSION_WEBSOCKETS: RouteTable[WebSocketRoute] = RouteTable(
    {
        "exec/ws": WebSocketRoute(exec_ws, ACT),
        "terminal/ws": WebSocketRoute(terminal_ws, ACT),
        "events": WebSocketRoute(events_ws, LOOK, needs_live_session=False),
    }
)
"""What follows `/v1/sessions/{id}/`."""

WEBSOCKETS: Mapping[str, WebSocketRoute] = {"/v1/events": WebSocketRoute(events_ws, FIND)}
"""Whole paths."""
