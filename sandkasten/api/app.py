"""The HTTP front as one ASGI application: what holds for every request, then raw handlers or Quart.

Owns the order: request id, size of the head, key, route. Errors of both halves become the same body here and in
`jsonapp.py`, through `errors.py`.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from typing import cast
from urllib.parse import urlsplit

from sandkasten import errors, logcontext
from sandkasten.api.auth import Gate
from sandkasten.api.errors import MAX_HEADERS, error_answer, head_too_large
from sandkasten.api.exchange import Exchange
from sandkasten.api.guard import App, Message, Receive, Scope, Send
from sandkasten.api.jsonapp import EXCHANGE_KEY, make_json_app
from sandkasten.api.routes import PUBLIC_PATHS, RAW_ROUTES, RawHandler, split_session_path
from sandkasten.api.settings import ApiSettings
from sandkasten.api.stream import ClientGone
from sandkasten.errors import InvalidRequest
from sandkasten.model import SESSION_ID
from sandkasten.supervisor import Supervisor

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(rb"[\x20-\x7e]{1,128}\Z")


def make_app(supervisor: Supervisor, *, settings: ApiSettings) -> App:
    """Return the front of `supervisor`."""
    return _Front(supervisor, settings)


class _Front:
    def __init__(self, supervisor: Supervisor, settings: ApiSettings) -> None:
        self._supervisor = supervisor
        self._settings = settings
        self._gate = Gate(settings.api_key)
        self._json_app = cast(App, make_json_app())  # typed for hypercorn's own message types

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        request_id = choose_request_id(scope)
        logcontext.request_id.set(request_id)
        if scope["type"] == "websocket":
            await self._refuse_websocket(scope, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"unknown ASGI scope {scope['type']!r}")
        exchange = Exchange(
            scope, receive, _with_id(send, request_id), supervisor=self._supervisor, settings=self._settings
        )
        try:
            await self._serve(exchange)
        except ClientGone:
            log.debug("the client left")
        except Exception as error:  # noqa: BLE001  # the edge: whatever it is, the client gets one kind of answer
            await _answer_error(exchange, error)
        elapsed_ms = (time.perf_counter() - started) * 1000
        level = logging.DEBUG if scope["path"] in PUBLIC_PATHS else logging.INFO
        facts = {"method": exchange.method, "path": scope["path"], "status": exchange.status}
        log.log(level, "request", extra=facts | {"duration_ms": round(elapsed_ms, 1)})

    async def _serve(self, exchange: Exchange) -> None:
        scope = exchange.scope
        if is_head_too_large(scope, self._settings.max_header_bytes):
            raise head_too_large(self._settings.max_header_bytes)
        if has_two_lengths(scope):
            raise InvalidRequest("the body's length is given twice", transfer_encoding="came with content-length")
        scope["path"] = path = origin_path(scope["path"])
        if path not in PUBLIC_PATHS:
            self._gate.check(scope)
        if (beneath := split_session_path(path)) is not None:
            session_id, rest = beneath
            if not SESSION_ID.match(session_id):
                raise errors.SessionNotFound("no such session")
            exchange.session_id = session_id
            logcontext.session_id.set(session_id)
            if rest in RAW_ROUTES:
                await _raw_handler(exchange, rest)(exchange)
                return
        exchange.scope[EXCHANGE_KEY] = exchange
        await exchange.hand_over(self._json_app)

    async def _refuse_websocket(self, scope: Scope, send: Send) -> None:
        try:
            self._gate.check(scope)
            raise errors.RouteNotFound("no such URL")
        except errors.ClientError as error:
            answer = error_answer(error)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer.body))]
        guarded = _with_id(send, logcontext.request_id.get() or "")
        await guarded({"type": "websocket.http.response.start", "status": answer.status, "headers": headers})
        await guarded({"type": "websocket.http.response.body", "body": answer.body})


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


def origin_path(path: str) -> str:
    """Return the path of a request target in origin or absolute form (RFC 9112 §3.2)."""
    if path.startswith("/") and not path.startswith("//"):
        return path
    try:
        target = urlsplit(path)
    except ValueError:
        raise errors.RouteNotFound("no such URL") from None
    if target.scheme in ("http", "https") and target.path.startswith("/"):
        return target.path
    raise errors.RouteNotFound("no such URL")


def _raw_handler(exchange: Exchange, rest: str) -> RawHandler:
    methods = RAW_ROUTES[rest]
    if exchange.method not in methods:
        raise errors.MethodNotAllowed("no such method here", allow=", ".join(methods))
    return methods[exchange.method]


async def _answer_error(exchange: Exchange, error: Exception) -> None:
    """Answer with an error. One that comes after the answer began can only end it unfinished; it is logged."""
    answer = error_answer(error)
    if not exchange.is_started:
        await exchange.answer(answer)


def _with_id(send: Send, request_id: str) -> Send:
    header = (b"x-request-id", request_id.encode("ascii"))

    async def send_with_id(message: Message) -> None:
        if message["type"].endswith(".start"):
            message["headers"] = [*message["headers"], header, (b"x-content-type-options", b"nosniff")]
        await send(message)

    return send_with_id
