"""The target of a request, and the table that leads from targets to routes. Knows no URL of ours.

A path is cut at its slashes before anything is decoded, so an id with an encoded slash in it stays one segment and
`fs%2Fread` is no other spelling of `fs/read` (RFC 3986 §2.4). Nothing is tidied up: neither `//` nor `..`.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import attrs

from sandkasten.api.http.auth import Needs
from sandkasten.errors import SandkastenError

_ABSOLUTE = re.compile(r"https?://([A-Za-z0-9._~:\[\]-]+)(/.*)?\Z", re.IGNORECASE)
"""Scheme, authority and path. No user (RFC 9110 §4.2.4) and nothing encoded in the authority."""


@attrs.frozen
class Target:
    """The decoded segments of a request's path. Every decision about a request is made from this one reading."""

    segments: tuple[str, ...]
    path: str | None
    """The whole path; None where other readers could see other segments in it: `/a%2Fb`, `//a`."""

    @classmethod
    def of(cls, segments: tuple[str, ...]) -> Target:
        path = "/" + "/".join(segments)
        is_clear = not path.startswith("//") and path.count("/") == len(segments)
        return cls(segments, path if is_clear else None)


def parse_target(raw_path: bytes, *, host: str | None) -> Target | None:
    """Return the target in a request line, without its query; None for a malformed one.

    A target is a path or the absolute form of one, whose authority must then be the `Host` (RFC 9112 §3.2). Segments
    that are not UTF-8 are malformed.
    """
    path = raw_path.decode("latin-1")
    if (absolute := _ABSOLUTE.match(path)) is not None:
        authority, path = absolute[1], absolute[2] or "/"
        if host is None or authority.lower() != host.lower():
            return None
    if not path.startswith("/") or not path.isascii():
        return None
    try:
        segments = path[1:].split("/")
        if "%" in path:
            segments = [unquote(segment, errors="strict") for segment in segments]
        return Target.of(tuple(segments))
    except UnicodeDecodeError:
        return None


class RouteKind(enum.Enum):
    """The way in which a route is served.

    JSON: by Quart; the handler returns an `Answer`. RAW: in front of Quart, by an ASGI handler that returns an
    `Answer` or has answered piece by piece. WEBSOCKET: by a handler of `websocket`.
    """

    JSON = enum.auto()
    RAW = enum.auto()
    WEBSOCKET = enum.auto()


@attrs.frozen(kw_only=True)
class Messages:
    """Messages of a stream, by their names: of the server and, over a WebSocket, of the client.

    A message is an attrs class or a type of event. `binary` says what binary frames are, where there are any.
    """

    server: Mapping[str, object]
    client: Mapping[str, object] = attrs.field(factory=dict)
    protocols: tuple[str, ...] = ()
    binary: str | None = None


def _types(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value


Handler = Callable[[Any], Awaitable[Any]]
"""Takes the exchange of its kind; `routes.py` checks the types of each handler."""


@attrs.frozen(kw_only=True)
class Route:
    """One method of one path: who answers, what that needs of the key, what is read and what is answered.

    `path` is a template: `{name}` is any one segment that is not empty. A GET route serves HEAD as well. `query`,
    `head` (headers) and `body` are the classes that read the request, `answer` is the class of the JSON body.
    `body_type` and `answer_type` are the media types of bodies that are not JSON. `errors` are those that other routes
    with the same needs don't answer with (`openapi.errors_of`), `gives` the headers of the answer.
    """

    kind: RouteKind
    method: str
    path: str
    handler: Handler
    needs: Needs
    query: type | None = None
    head: type | None = None
    body: type | None = None
    body_type: tuple[str, ...] = attrs.field(default=(), converter=_types)
    answer: object = None
    answer_type: tuple[str, ...] = attrs.field(default=(), converter=_types)
    statuses: tuple[int, ...] = (200,)
    gives: tuple[str, ...] = ()
    errors: tuple[type[SandkastenError], ...] = ()
    messages: Messages | None = None
    needs_live_session: bool = True
    """Of a WebSocket: an ended session is refused before the handler is asked."""


@attrs.define
class _Node:
    """The routes at one path and the paths beneath it: literal segments or one open segment. Both are beside each other
    where each request means one of them: at the end of paths, with other methods."""

    literals: dict[str, _Node] = attrs.field(factory=dict)
    open_name: str = ""
    opened: _Node | None = None
    methods: dict[str, Route] = attrs.field(factory=dict)
    websocket: Route | None = None

    def check(self, path: str) -> None:
        """Raise `ValueError` where a literal and an open segment beside each other leave a request two meanings."""
        for name, node in self.literals.items():
            if self.opened is not None:
                is_end = not (node.literals or node.opened or node.websocket or self.opened.websocket)
                if not is_end or self.opened.methods.keys() & node.methods.keys():
                    raise ValueError(f"another route could match the same path as '{path}/{name}'")
            node.check(f"{path}/{name}")
        if self.opened is not None:
            self.opened.check(f"{path}/{{{self.open_name}}}")


@attrs.frozen
class RouteMatch:
    """The routes at a path: by method, and the WebSocket. `params` are the open segments by name."""

    methods: dict[str, Route]
    websocket: Route | None
    params: dict[str, str]

    @property
    def allow(self) -> str:
        """The methods as the value of an `Allow` header."""
        return ", ".join(self.methods)


class RouteTable:
    """Every route, and the way from a path to its routes."""

    def __init__(self, routes: Iterable[Route]) -> None:
        """Raises `ValueError` when one request could mean two of the routes."""
        self.routes = tuple(routes)
        self._top = _Node()
        for route in self.routes:
            self._add(route)
        self._top.check("")

    def find(self, segments: Sequence[str]) -> RouteMatch | None:
        """Return the routes at a path, or None."""
        node, params, beside = self._top, {}, None
        for segment in segments:
            following = node.literals.get(segment)
            beside = None
            if node.opened is not None:
                if not segment:
                    return None
                params[node.open_name] = segment
                beside = following and node.opened
                following = following or node.opened
            if following is None:
                return None
            node = following
        methods = node.methods if beside is None else {**beside.methods, **node.methods}
        return RouteMatch(methods, node.websocket, params) if methods or node.websocket else None

    def _add(self, route: Route) -> None:
        node = self._top
        for segment in route.path[1:].split("/"):
            node = _beneath(node, segment, route.path)
        if route.kind is RouteKind.WEBSOCKET:
            if node.websocket is not None:
                raise ValueError(f"two WebSockets at {route.path!r}")
            node.websocket = route
            return
        methods = (route.method, "HEAD") if route.method == "GET" else (route.method,)
        for method in methods:
            if method in node.methods:
                raise ValueError(f"two routes for {method} {route.path!r}")
            node.methods[method] = route


def _beneath(node: _Node, segment: str, path: str) -> _Node:
    """Return the node of one more segment, made if it is missing."""
    if segment.startswith("{"):
        if node.opened is not None and node.open_name != segment[1:-1]:
            raise ValueError(f"another route could match the same path as {path!r}")
        node.open_name = segment[1:-1]
        node.opened = node.opened or _Node()
        return node.opened
    return node.literals.setdefault(segment, _Node())
