"""The HTTP front as one ASGI application: the way of every request from its head to its answer or error.

The order is: request id, size of the head, key, route, the key's rights, handler. `routes.py` says which handler; JSON
routes are handed to Quart, raw routes and WebSockets are served here. Every error becomes the body of `errors.py`.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable
from itertools import chain
from typing import cast

from quart import Response, request
from quart_trio import QuartTrio
from werkzeug.routing import PathConverter

from sandkasten import errors, logcontext
from sandkasten.admission.keys import KeyRing
from sandkasten.admission.quotas import KeyShares
from sandkasten.api.e2b.connect import spell_error
from sandkasten.api.e2b.front import E2bFront
from sandkasten.api.http.auth import Authenticator, Gate, Reach, admit
from sandkasten.api.http.connection import ClientGone
from sandkasten.api.http.errors import MAX_HEADERS, Answer, error_answer, head_too_large
from sandkasten.api.http.exchange import JSON, Exchange, one_header
from sandkasten.api.http.guard import App, Message, Receive, Scope, Send
from sandkasten.api.http.mcp import McpFront
from sandkasten.api.http.measured import NOWHERE, FrontMetrics
from sandkasten.api.http.routing import Route, RouteKind, RouteMatch, Target, parse_target
from sandkasten.api.http.settings import ApiSettings
from sandkasten.api.http.zstandard import Zstandard
from sandkasten.api.resources.fields import refuse_unknown
from sandkasten.api.routes import SESSIONS, TABLE, WORKSPACES
from sandkasten.api.websocket.handshake import ConnectionOver, WebSocketExchange
from sandkasten.errors import InvalidRequest
from sandkasten.model import SESSION_ID, WORKSPACE_ID
from sandkasten.model.keys import NOBODY
from sandkasten.supervisor import Supervisor

log = logging.getLogger(__name__)

_MAX_LOGGED_CHARS = 1024

EXCHANGE_KEY = "sandkasten.exchange"
"""Where a scope carries its exchange and route through Quart."""

PUBLIC_PATHS = frozenset(route.path for route in TABLE.routes if route.needs.reach is Reach.PUBLIC)
_REQUEST_ID = re.compile(rb"[\x20-\x7e]{1,128}\Z")


def make_app(
    supervisor: Supervisor,
    *,
    settings: ApiSettings,
    shares: KeyShares | None = None,
    mcp: McpFront | None = None,
    e2b: E2bFront | None = None,
) -> App:
    """Return the front of `supervisor`. `shares`: the keys besides the configured one, and what each has in use. `mcp`
    is run by the caller, and so are the watchers of `e2b`, without which E2B's API is not served.
    """
    return _Front(supervisor, settings, shares or KeyShares(KeyRing()), mcp or McpFront(), e2b)


class _Front:
    def __init__(
        self, supervisor: Supervisor, settings: ApiSettings, shares: KeyShares, mcp: McpFront, e2b: E2bFront | None
    ) -> None:
        self._e2b = e2b
        self._supervisor = supervisor
        self._settings = settings
        self._shares = shares
        self._authenticator = Authenticator(Gate(settings.api_key, shares.ring), shares)
        self._metrics = FrontMetrics()
        self._zstandard = Zstandard()
        self._mcp = mcp
        self._quart = make_quart()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        request_id = choose_request_id(scope)
        trace = logcontext.begin(one_header(scope, b"traceparent"))
        logcontext.origin.set(logcontext.Origin(request_id, trace))
        send = _with_ids(send, request_id, trace)
        if scope["type"] == "websocket":
            await self._serve_websocket(scope, receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"unknown ASGI scope {scope['type']!r}")
        target = read_target(scope)
        exchange = Exchange(
            scope,
            receive,
            send,
            supervisor=self._supervisor,
            settings=self._settings,
            shares=self._shares,
            metrics=self._metrics,
            zstandard=self._zstandard,
            mcp=self._mcp,
        )
        self._metrics.begin_request()
        claim = None if self._e2b is None else self._e2b.claim(scope, target)
        try:
            with exchange.use.running():
                if self._e2b is not None and claim is not None:
                    self._check_head(scope)
                    await self._e2b.serve(exchange, claim, self._authenticator)
                else:
                    await self._serve(exchange, target)
        except Exception as error:  # noqa: BLE001  # the edge: every error becomes one kind of answer
            await _answer_error(exchange, unwrap(error), error_answer if claim is None else spell_error)
        finally:
            self._metrics.end_request()
        elapsed_s = time.perf_counter() - started
        self._metrics.note_request(exchange.method, exchange.route, exchange.status, elapsed_s)
        level = logging.DEBUG if exchange.key is NOBODY else logging.INFO  # refusals are counted in the log instead
        facts = {"method": exchange.method, "path": scope["path"], "status": exchange.status, **_span(trace)}
        if exchange.ignored:
            facts["ignored"] = ", ".join(exchange.ignored)[:_MAX_LOGGED_CHARS]
        log.log(level, "request", extra=facts | {"duration_ms": round(elapsed_s * 1000, 1)})

    async def _authenticate(self, exchange: Exchange, target: Target | None) -> None:
        """Refuse a head that can't be served; find out whose request it is, unless its path is public."""
        scope = exchange.scope
        self._check_head(scope)
        if not is_public(target):
            exchange.key = await self._authenticator.identify(scope)
            exchange.use.bind(exchange.key)
            logcontext.set_key(exchange.key.id)
            self._shares.take_request(exchange.key)

    def _check_head(self, scope: Scope) -> None:
        if is_head_too_large(scope, self._settings.max_header_bytes):
            raise head_too_large(self._settings.max_header_bytes)
        if has_two_lengths(scope):
            raise InvalidRequest("the body's length is given twice", transfer_encoding="came with content-length")

    async def _serve(self, exchange: Exchange, target: Target | None) -> None:
        await self._authenticate(exchange, target)
        route = _find_route(exchange, target)
        await admit(exchange.key, route.needs, exchange.supervisor, session_id=exchange.session_id)
        if exchange.scope["query_string"] and route.needs.reach is not Reach.PUBLIC:
            refuse_unknown(exchange.query, route.query)
        if route.kind is RouteKind.JSON:
            exchange.scope[EXCHANGE_KEY] = (exchange, route)
            await exchange.hand_over(self._quart, limit_bytes=self._settings.max_request_bytes)
            return
        answer = await route.handler(exchange)
        if answer is not None:
            await exchange.answer(answer)

    async def _serve_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one WebSocket from its handshake to its end. Raises nothing but `Cancelled`."""
        started = time.perf_counter()
        target, status = read_target(scope), 101
        exchange = WebSocketExchange(
            scope,
            receive,
            send,
            supervisor=self._supervisor,
            settings=self._settings,
            authenticator=self._authenticator,
        )
        try:
            with exchange.use.running():
                await self._talk(exchange, target)
        except Exception as error:  # noqa: BLE001  # the edge: every error becomes one kind of answer
            status = await _end_websocket(exchange, send, unwrap(error))
        self._metrics.note_websocket(exchange.route, status, exchange.code)
        facts = {"path": scope["path"], "status": status, "close_code": exchange.code}
        facts |= _span(logcontext.origin.get().trace)
        level = logging.DEBUG if exchange.key is NOBODY else logging.INFO
        log.log(level, "websocket", extra=facts | {"duration_ms": round((time.perf_counter() - started) * 1000, 1)})

    async def _talk(self, exchange: WebSocketExchange, target: Target | None) -> None:
        if is_head_too_large(exchange.scope, self._settings.max_header_bytes):
            raise head_too_large(self._settings.max_header_bytes)
        found = None if target is None else TABLE.find(target.segments)
        route = None if found is None else found.websocket
        if target is not None and (beneath := _beneath(target, SESSIONS)) is not None:
            exchange.session_id = beneath
            logcontext.session_id.set(beneath if SESSION_ID.match(beneath) else "")
        if target is not None and (beneath := _beneath(target, WORKSPACES)) is not None:
            exchange.workspace_id = beneath
        if route is not None:
            exchange.route = route.path
            exchange.needs_live_session = route.needs_live_session
        await exchange.check(None if route is None else route.needs)
        if route is not None:
            with self._metrics.websocket(exchange.route or NOWHERE):
                await route.handler(exchange)


class _AnyPath(PathConverter):
    """A path as the table takes it: line breaks, which the parent's pattern lacks, are characters like others."""

    regex, part_isolating = "(?s:.+)", False  # over slashes


def make_quart() -> App:
    """Return the Quart application of the JSON routes, one view for all: the table has chosen the route before.

    Each request's scope must carry its exchange, with the body read, and its route under `EXCHANGE_KEY`.
    """
    app = QuartTrio("sandkasten.api", static_folder=None)
    methods = sorted({route.method for route in TABLE.routes if route.kind is RouteKind.JSON})
    app.url_map.converters["whole"] = _AnyPath
    app.add_url_rule("/<whole:_>", view_func=_serve_json, methods=methods, provide_automatic_options=False)
    app.url_map.merge_slashes = False
    app.register_error_handler(Exception, _on_exception)
    return cast(App, app)  # typed for hypercorn's own message types


async def _serve_json(**_path: str) -> Response:
    exchange, route = cast("dict[str, tuple[Exchange, Route]]", request.scope)[EXCHANGE_KEY]
    answer = await route.handler(exchange)
    exchange.use.leave()  # Quart sends the end of an answer when the client may already have all of it
    return _response(answer)


async def _on_exception(error: Exception) -> Response:
    return _response(error_answer(error))


def _response(answer: Answer) -> Response:
    return Response(answer.body, answer.status, dict(answer.headers), content_type="application/json")


def _find_route(exchange: Exchange, target: Target | None) -> Route:
    """Return the route of a request, and tell the exchange what the path names.

    Raises:
        SessionNotFound, WorkspaceNotFound: the id in the path has the wrong form.
        RouteNotFound: there is no such path.
        MethodNotAllowed: the path has no such method.
    """
    if target is None:
        raise errors.RouteNotFound("no such URL")
    if (session_id := _beneath(target, SESSIONS)) is not None:
        if not SESSION_ID.match(session_id):
            raise errors.SessionNotFound("no such session")
        exchange.session_id = session_id
        logcontext.session_id.set(session_id)
    elif (workspace_id := _beneath(target, WORKSPACES)) is not None:
        if not WORKSPACE_ID.match(workspace_id):
            raise errors.WorkspaceNotFound("no such workspace")
        exchange.workspace_id = workspace_id
    found: RouteMatch | None = TABLE.find(target.segments)
    if found is None or not found.methods:
        raise errors.RouteNotFound("no such URL")
    route = found.methods.get(exchange.method)
    if route is None:
        raise errors.MethodNotAllowed("no such method here", allow=found.allow)
    exchange.params, exchange.route = found.params, route.path
    return route


def _beneath(target: Target, path: str) -> str | None:
    """Return the segment behind `path`, None if the target is not beneath it."""
    above = path[1:].split("/")
    size = len(above)
    return target.segments[size] if len(target.segments) > size and list(target.segments[:size]) == above else None


def choose_request_id(scope: Scope) -> str:
    """Return the client's `X-Request-ID` if that is fit to be logged and sent back, else a new id."""
    given = [value for name, value in scope["headers"] if name == b"x-request-id"]
    if len(given) == 1 and _REQUEST_ID.match(given[0]):
        return bytes(given[0]).decode("ascii")
    return os.urandom(8).hex()


def is_head_too_large(scope: Scope, max_bytes: int) -> bool:
    """Return whether the head is over a limit: the server below bounds only heads that come in several reads."""
    headers = scope["headers"]
    size = len(scope["raw_path"]) + len(scope["query_string"]) + sum(map(len, chain.from_iterable(headers)))
    return size > max_bytes or len(headers) > MAX_HEADERS


def has_two_lengths(scope: Scope) -> bool:
    """Return whether a proxy could see the body end elsewhere; the connection then ends too (RFC 9112 §6.3)."""
    return {b"content-length", b"transfer-encoding"} <= {bytes(name) for name, _ in scope["headers"]}


def read_target(scope: Scope) -> Target | None:
    """Return the target of a request, None for a malformed one, and make the target's path the scope's."""
    target = parse_target(scope["raw_path"], host=one_header(scope, b"host"))
    path = None if target is None else target.path
    scope["path"] = bytes(scope["raw_path"]).decode("latin-1") if path is None else path
    return target


def is_public(target: Target | None) -> bool:
    """Return whether a target is answered without a key."""
    return target is not None and target.path in PUBLIC_PATHS


def unwrap(error: Exception) -> Exception:
    """Return the error inside groups; `ClientGone` if the end of the connection was all."""
    if isinstance(error, ExceptionGroup):
        _, rest = error.split((ClientGone, ConnectionOver))
        error = ClientGone() if rest is None else rest
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


async def _answer_error(exchange: Exchange, error: Exception, spell: Callable[[Exception], Answer]) -> None:
    """Answer with an error as `spell` says it. One after the answer began can only end it unfinished, and is logged."""
    if not isinstance(error, ClientGone):
        answer = spell(error)
        if exchange.is_started:
            return
        try:
            await exchange.answer(answer)
            return
        except ClientGone:
            pass
    log.debug("the client left")


async def _end_websocket(exchange: WebSocketExchange, send: Send, error: Exception) -> int:
    """Tell the client of an error, if the client is still there; return the handshake's status."""
    try:
        if isinstance(error, ClientGone | ConnectionOver):
            log.debug("the connection is over")
        elif exchange.is_accepted:
            await exchange.fail(error)
        else:
            return await _refuse_websocket(send, error)
    except ClientGone:
        log.debug("the client left before it was told")
    return 101


async def _refuse_websocket(send: Send, error: Exception) -> int:
    """Answer the handshake with an error instead; return its status."""
    answer = error_answer(error)
    fields = (JSON, ("content-length", str(len(answer.body))), ("connection", "close"), *answer.headers)
    headers = [(name.encode("ascii"), value.encode("latin-1")) for name, value in fields]
    await send({"type": "websocket.http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": answer.body})
    return answer.status


def _span(trace: logcontext.Trace | None) -> dict[str, str | None]:
    """Return the fields of a trace that only a request's own log line has."""
    return {} if trace is None else {"span_id": trace.span_id, "parent_id": trace.parent_id}


def _with_ids(send: Send, request_id: str, trace: logcontext.Trace) -> Send:
    headers = (
        (b"x-request-id", request_id.encode("ascii")),
        (b"traceresponse", trace.header.encode("ascii")),
        (b"x-content-type-options", b"nosniff"),
    )

    async def send_with_ids(message: Message) -> None:
        if message["type"].endswith((".start", ".accept")):
            message["headers"] = [*message["headers"], *headers]
        await send(message)

    return send_with_ids
