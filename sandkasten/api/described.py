"""Every route there is, of all tables, in one list: what a description of the interface has to have."""

from __future__ import annotations

from collections.abc import Iterator

from sandkasten.api.openapi import Route
from sandkasten.api.routes import JSON_ROUTES, RAW_PATHS, RAW_ROUTES, SESSIONS, WORKSPACE_ROUTES, WORKSPACES
from sandkasten.api.ws_routes import SESSION_WEBSOCKETS, WEBSOCKETS


def every_route() -> tuple[Route, ...]:
    """Return the methods of all paths; WebSockets last."""
    return (*_requests(), *_websockets())


def _requests() -> Iterator[Route]:
    for route in JSON_ROUTES:
        yield Route(route.method, route.template, route.handler, route.needs)
    for path, methods in RAW_PATHS.items():
        for method, raw in methods.items():
            yield Route(method, path, raw.handler, raw.needs)
    for above, table in ((SESSIONS, RAW_ROUTES), (WORKSPACES, WORKSPACE_ROUTES)):
        for pattern, methods in table.routes.items():
            for method, raw in methods.items():
                yield Route(method, f"{above}/{{id}}/{pattern}", raw.handler, raw.needs)


def _websockets() -> Iterator[Route]:
    for path, route in WEBSOCKETS.items():
        yield Route("GET", path, route.handler, route.needs, is_websocket=True)
    for pattern, route in SESSION_WEBSOCKETS.routes.items():
        yield Route("GET", f"{SESSIONS}/{{id}}/{pattern}", route.handler, route.needs, is_websocket=True)
