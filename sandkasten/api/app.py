"""The HTTP front as one ASGI application: what holds for every request, then raw handlers or Quart.

Owns the order: request id, size of the head, key, route. Errors of both halves become the same body here and in
`jsonapp.py`, through `errors.py`. WebSockets take the same way; `websocket.py` lets them in.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Mapping
from typing import cast

from sandkasten import logcontext
from sandkasten import logcontext as tracing
from sandkasten.admission.keys import KeyRing
from sandkasten.admission.quotas import KeyShares
from sandkasten.api.http.auth import Gate, admit
from sandkasten.api.http.connection import ClientGone
from sandkasten.api.http.errors import MAX_HEADERS, error_answer, head_too_large
from sandkasten.api.http.exchange import JSON, Exchange, one_header
from sandkasten.api.http.guard import App, Message, Receive, Scope, Send
from sandkasten.api.http.measured import NOWHERE, FrontMetrics
from sandkasten.api.http.routing import Target, parse_target
from sandkasten.api.http.settings import ApiSettings
from sandkasten.api.http.zstandard import Zstandard
from sandkasten.api.jsonapp import EXCHANGE_KEY, make_json_app
from sandkasten.api.routes import (
    PUBLIC_PATHS,
    RAW_PATHS,
    RAW_ROUTES,
    SESSIONS,
    WORKSPACE_ROUTES,
    WORKSPACES,
    RawRoute,
    split_session,
    split_workspace,
)
from sandkasten.api.websocket.handshake import ConnectionOver, Doorman, WebSocketExchange
from sandkasten.api.ws_routes import SESSION_WEBSOCKETS, WEBSOCKETS
from sandkasten.model import SESSION_ID, WORKSPACE_ID, errors
from sandkasten.model.errors import InvalidRequest
from sandkasten.model.keys import NOBODY
from sandkasten.supervisor import Supervisor

log = logging.getLogger(__name__)

MAX_PUBLIC_BODY_BYTES = 1024
"""What is read of whoever has not shown a key."""

_REQUEST_ID = re.compile(rb"[\x20-\x7e]{1,128}\Z")


def make_app(supervisor: Supervisor, *, settings: ApiSettings, shares: KeyShares | None = None) -> App:
    """Return the front of `supervisor`. `shares`: the keys besides the configured one, and what each has."""
    return _Front(supervisor, settings, shares or KeyShares(KeyRing()))


class _Front:
    def __init__(self, supervisor: Supervisor, settings: ApiSettings, shares: KeyShares) -> None:
        self._supervisor = supervisor
        self._settings = settings
        self._shares = shares
        self._doorman = Doorman(Gate(settings.api_key, shares.ring), shares)
        self._metrics = FrontMetrics()
        self._zstandard = Zstandard()
        self._json_app = cast(App, make_json_app())  # typed for hypercorn's own message types

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        request_id = choose_request_id(scope)
        trace = tracing.begin(one_header(scope, b"traceparent"))
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
        )
        self._metrics.begin_request()
        try:
            with exchange.use.running():
                await self._serve(exchange, target)
        except Exception as error:  # noqa: BLE001  # the edge: whatever it is, the client gets one kind of answer
            await _answer_error(exchange, unwrap(error))
        finally:
            self._metrics.end_request()
        elapsed_s = time.perf_counter() - started
        self._metrics.note_request(exchange.method, exchange.route, exchange.status, elapsed_s)
        level = logging.DEBUG if exchange.key is NOBODY else logging.INFO  # of refusals the log has a count
        facts = {"method": exchange.method, "path": scope["path"], "status": exchange.status, **_span(trace)}
        log.log(level, "request", extra=facts | {"duration_ms": round(elapsed_s * 1000, 1)})

    async def _let_in(self, exchange: Exchange, target: Target | None) -> None:
        """Refuse a head that can't be served; know whose request it is, unless it is for everybody."""
        scope = exchange.scope
        if is_head_too_large(scope, self._settings.max_header_bytes):
            raise head_too_large(self._settings.max_header_bytes)
        if has_two_lengths(scope):
            raise InvalidRequest("the body's length is given twice", transfer_encoding="came with content-length")
        if not is_public(target):
            exchange.key = await self._doorman.identify(scope)
            exchange.use.bind(exchange.key)
            logcontext.set_key(exchange.key.id)
            self._shares.take_request(exchange.key)

    async def _serve(self, exchange: Exchange, target: Target | None) -> None:
        await self._let_in(exchange, target)
        if target is None:
            raise errors.RouteNotFound("no such URL")
        if (beneath := split_session(target.segments)) is not None:
            session_id, rest = beneath
            if not SESSION_ID.match(session_id):
                raise errors.SessionNotFound("no such session")
            exchange.session_id = session_id
            logcontext.session_id.set(session_id)
            if (found := RAW_ROUTES.locate(rest)) is not None:
                pattern, methods, exchange.params = found
                exchange.route = f"{SESSIONS}/{{id}}/{pattern}"
                await _serve_raw(exchange, methods)
                return
        if (beneath := split_workspace(target.segments)) is not None:
            workspace_id, rest = beneath
            if not WORKSPACE_ID.match(workspace_id):
                raise errors.WorkspaceNotFound("no such workspace")
            exchange.workspace_id = workspace_id
            if (located := WORKSPACE_ROUTES.locate(rest)) is not None:
                pattern, methods, exchange.params = located
                exchange.route = f"{WORKSPACES}/{{id}}/{pattern}"
                await _serve_raw(exchange, methods)
                return
        if target.path is None:
            raise errors.RouteNotFound("no such URL")
        if target.path in RAW_PATHS:
            exchange.route = target.path
            await _serve_raw(exchange, RAW_PATHS[target.path])
            return
        limit_bytes = MAX_PUBLIC_BODY_BYTES if is_public(target) else self._settings.max_request_bytes
        exchange.scope[EXCHANGE_KEY] = exchange
        await exchange.hand_over(self._json_app, limit_bytes=limit_bytes)

    async def _serve_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one WebSocket from its handshake to its end. Nothing but `Cancelled` gets out."""
        started = time.perf_counter()
        target = read_target(scope)
        doorman, status = self._doorman, 101
        exchange = WebSocketExchange(
            scope, receive, send, supervisor=self._supervisor, settings=self._settings, doorman=doorman
        )
        try:
            with exchange.use.running():
                await self._talk(exchange, target)
        except Exception as error:  # noqa: BLE001  # the edge: whatever it is, the client gets one kind of answer
            status = await _end_websocket(exchange, send, unwrap(error))
        self._metrics.note_websocket(exchange.route, status, exchange.code)
        facts = {"path": scope["path"], "status": status, "close_code": exchange.code}
        facts |= _span(logcontext.origin.get().trace)
        level = logging.DEBUG if exchange.key is NOBODY else logging.INFO
        log.log(level, "websocket", extra=facts | {"duration_ms": round((time.perf_counter() - started) * 1000, 1)})

    async def _talk(self, exchange: WebSocketExchange, target: Target | None) -> None:
        if is_head_too_large(exchange.scope, self._settings.max_header_bytes):
            raise head_too_large(self._settings.max_header_bytes)
        route = None
        if target is not None and (beneath := split_session(target.segments)) is not None:
            session_id, rest = beneath
            found = SESSION_WEBSOCKETS.locate(rest)
            if found is not None:
                route, exchange.route = found[1], f"{SESSIONS}/{{id}}/{found[0]}"
            exchange.session_id = session_id
            logcontext.session_id.set(session_id if SESSION_ID.match(session_id) else "")
        elif target is not None and target.path is not None:
            route = WEBSOCKETS.get(target.path)
            exchange.route = None if route is None else target.path
        exchange.needs_live_session = route is None or route.needs_live_session
        await exchange.check(None if route is None else route.needs)
        if route is not None:
            with self._metrics.websocket(exchange.route or NOWHERE):
                await route.handler(exchange)


def choose_request_id(scope: Scope) -> str:
    """Return the client's `X-Request-ID` if it is fit to be logged and sent back, else a new one."""
    given = [value for name, value in scope["headers"] if name == b"x-request-id"]
    if len(given) == 1 and _REQUEST_ID.match(given[0]):
        return bytes(given[0]).decode("ascii")
    return secrets.token_hex(8)


def is_head_too_large(scope: Scope, max_bytes: int) -> bool:
    """Whether the head is over a limit: the server below bounds only heads in several segments."""
    size = len(scope["raw_path"]) + len(scope["query_string"])
    size += sum(len(name) + len(value) for name, value in scope["headers"])
    return size > max_bytes or len(scope["headers"]) > MAX_HEADERS


def has_two_lengths(scope: Scope) -> bool:
    """Whether a proxy could have seen the body end elsewhere; the connection ends after the refusal (RFC 9112 §6.3)."""
    return {b"content-length", b"transfer-encoding"} <= {bytes(name) for name, _ in scope["headers"]}


def read_target(scope: Scope) -> Target | None:
    """Return where a request goes, None for nowhere, and make that the scope's path for whoever looks there."""
    target = parse_target(scope["raw_path"], host=one_header(scope, b"host"))
    path = None if target is None else target.path
    scope["path"] = bytes(scope["raw_path"]).decode("latin-1") if path is None else path
    return target


def is_public(target: Target | None) -> bool:
    """Whether it is answered without a key."""
    return target is not None and target.path in PUBLIC_PATHS


def unwrap(error: Exception) -> Exception:
    """Return what went wrong out of its groups; `ClientGone` if it was only that the connection ended."""
    if isinstance(error, ExceptionGroup):
        _, rest = error.split((ClientGone, ConnectionOver))
        error = ClientGone() if rest is None else rest
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


async def _serve_raw(exchange: Exchange, methods: Mapping[str, RawRoute]) -> None:
    route = methods.get(exchange.method)
    if route is None:
        raise errors.MethodNotAllowed("no such method here", allow=", ".join(methods))
    await admit(exchange.key, route.needs, exchange.supervisor, session_id=exchange.session_id)
    await route.handler(exchange)


async def _answer_error(exchange: Exchange, error: Exception) -> None:
    """Answer with an error. One that comes after the answer began can only end it unfinished; it is logged."""
    if not isinstance(error, ClientGone):
        answer = error_answer(error)
        if exchange.is_started:
            return
        try:
            await exchange.answer(answer)
            return
        except ClientGone:
            pass
    log.debug("the client left")


async def _end_websocket(exchange: WebSocketExchange, send: Send, error: Exception) -> int:
    """Tell the client what went wrong, if it is still there; return the handshake's status."""
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


def _span(trace: tracing.Trace | None) -> dict[str, str | None]:
    """Return what a request's own line has of its trace, besides the id that every line has."""
    return {} if trace is None else {"span_id": trace.span_id, "parent_id": trace.parent_id}


def _with_ids(send: Send, request_id: str, trace: tracing.Trace) -> Send:
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
