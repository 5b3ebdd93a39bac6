"""The opening of a WebSocket, and the connection as a handler sees it: origin, key, session, subprotocol, messages.

A client shows its key in the `Authorization` header before the connection is accepted. A browser can't set headers, so
it may send the key in a first message `{"type": "auth", "key": "…"}`; before that message nothing else is answered.
Connections that have not shown a key are counted and timed. Knows no message but this one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import ClassVar

import attrs
import orjson
import trio

from sandkasten import errors, logcontext
from sandkasten.api.http.auth import OPEN, Authenticator, Needs, admit
from sandkasten.api.http.errors import STATUS
from sandkasten.api.http.exchange import AsgiExchange
from sandkasten.api.http.guard import Message, Receive, Scope, Send
from sandkasten.api.http.settings import ApiSettings
from sandkasten.api.http.websocket import CloseCode, Opcode, encode_frame
from sandkasten.api.websocket.messages import ErrorMessage, encode_message, reason_of
from sandkasten.errors import SandkastenError
from sandkasten.model import SESSION_ID, WORKSPACE_ID
from sandkasten.model.keys import ApiKey
from sandkasten.model.lifecycle import LIVE, ended_error
from sandkasten.supervisor import Supervisor

MAX_UNPROVEN = 64
"""Connections that may wait for their key at the same time."""

MAX_AUTH_CHARS = 4096

MAX_UNPROVEN_BYTES = 8 * 1024
"""Bytes that a client may send before its key has come, pings and heads of frames included."""


@attrs.frozen
class Auth:
    """The key, in the first message of a client that sent no `Authorization`. No other message comes before it."""

    kind: ClassVar[str] = "auth"
    key: str


class ConnectionOver(Exception):
    """The end of a connection that the server closed with a reason. Raised into a handler, caught at the edge."""


class WebSocketExchange(AsgiExchange):
    """One WebSocket for a handler. `code` is set once the connection was closed."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        supervisor: Supervisor,
        settings: ApiSettings,
        authenticator: Authenticator,
    ) -> None:
        shares = authenticator.shares
        super().__init__(scope, receive, send, supervisor=supervisor, settings=settings, shares=shares)
        self.needs_live_session = True
        self._needs = OPEN
        self.is_accepted = False
        self.is_raw = False
        """Whether the client asked for bytes alone: no message is sent."""
        self.code = 0
        self._authenticator = authenticator
        self._is_proven = False
        self._may_prove = True
        self._is_over = False

    # The way in

    async def check(self, needs: Needs | None) -> None:
        """Check the handshake before the connection is accepted. `needs` is the route's; None: there is no such URL.

        Raises:
            PermissionDenied: the web page that asks has an origin that is not allowed.
            Unauthorized: a wrong key, or without a configured key no proof of being local.
            RouteNotFound: only after the key was shown, as with other requests.
            Capacity: too many connections wait for their key.
            Forbidden, SessionNotFound, SessionExpired: only after the key was shown.
        """
        self._authenticator.gate.check_origin(self.scope, allowed=self.settings.allowed_origins)
        if needs is not None and self._authenticator.gate.is_key_missing(self.scope):
            if self._authenticator.unproven >= MAX_UNPROVEN:
                raise errors.Capacity("too many connections wait for their first message")
            self._needs = needs
            return
        self._know(await self._authenticator.identify(self.scope))
        if needs is None:
            raise errors.RouteNotFound("no such URL")
        self._needs = needs
        await self._admit()

    async def accept(self, subprotocol: str, *, raw: str | None = None) -> None:
        """Accept the connection and, if the headers had no key, wait for the first message. `raw`: another subprotocol,
        without messages; of two that are offered the client's first counts.

        Raises:
            ConnectionOver: the connection was refused and closed, or the client left.
        """
        offered = self.scope["subprotocols"]
        chosen = next((each for each in offered if each in (subprotocol, raw)), None)
        self.is_raw = chosen is not None and chosen == raw
        await self._receive()  # ASGI: the first message is `websocket.connect`
        self.is_accepted = True
        accept: Message = {"type": "websocket.accept", "subprotocol": chosen, "headers": []}
        if not self._is_proven:
            accept["first_message_bytes"] = MAX_UNPROVEN_BYTES
        await self._send(accept)
        if offered and chosen is None:
            await self.close(CloseCode.SUBPROTOCOL, f"only {subprotocol} is spoken here")
            raise ConnectionOver
        if not self._is_proven:
            await self._wait_for_proof()
            await self._admit()

    async def _wait_for_proof(self) -> None:
        if self._authenticator.unproven >= MAX_UNPROVEN:
            raise errors.Capacity("too many connections wait for their first message")
        self._authenticator.unproven += 1
        try:
            with trio.move_on_after(self.settings.websocket_auth_s):
                message = await self._next()
                if message is None:
                    raise ConnectionOver
                token = (_auth_key(message) or "").encode()
                self._know(await self._authenticator.identify(self.scope, token))
                self._may_prove = False
        finally:
            self._authenticator.unproven -= 1
        if not self._is_proven:
            raise errors.Unauthorized("no key came in time")

    def _know(self, key: ApiKey) -> None:
        self.key, self._is_proven = key, True
        logcontext.set_key(key.id)
        self.use.bind(key)
        self.shares.take_request(key)

    async def _admit(self) -> None:
        await admit(self.key, self._needs, self.supervisor, session_id=self.session_id)
        if self.workspace_id and not WORKSPACE_ID.match(self.workspace_id):
            raise errors.WorkspaceNotFound("no such workspace")
        if not self.session_id:
            return
        if not SESSION_ID.match(self.session_id):
            raise errors.SessionNotFound("no such session")
        session = await self.supervisor.get(self.session_id)
        if self.needs_live_session and session.status not in LIVE:
            raise ended_error(session)

    # Messages

    async def receive(self) -> str | bytes | None:
        """Return the next message, None at the end. A key that was not asked for is skipped."""
        message = await self._next()
        if self._may_prove:
            self._may_prove = False
            if message is not None and _auth_key(message) is not None:
                return await self._next()
        return message

    async def send_text(self, text: str) -> None:
        """Send a text message; returns when the client's socket has taken it. Raises `ClientGone`."""
        await self.send_frames(encode_frame(Opcode.TEXT, text.encode()))

    async def send_frames(self, frames: bytes) -> None:
        """Send encoded messages at once; as `send_text`."""
        await self._send({"type": "websocket.send", "frames": frames})

    async def close(self, code: int = CloseCode.NORMAL, reason: str = "") -> None:
        """Close the connection; `receive` then returns None. The first close counts."""
        if self.code == 0:
            self.code = int(code)
            await self._send({"type": "websocket.close", "code": self.code, "reason": reason})

    async def fail(self, error: Exception) -> None:
        """Send an `error` message and close; a raw connection has the error's text in the close frame alone."""
        message = ErrorMessage.of(error)
        if not self.is_raw:
            await self.send_frames(encode_message(message))
        await self.close(close_code(error), reason_of(message) if self.is_raw else message.message)

    async def _next(self) -> str | bytes | None:
        if self._is_over:
            return None
        message = await self._receive()
        if message["type"] != "websocket.receive":
            self._is_over = True
            self.code = self.code or int(message.get("code") or CloseCode.ABNORMAL)
            return None
        text = message.get("text")
        return text if text is not None else bytes(message.get("bytes") or b"")


WebSocketHandler = Callable[[WebSocketExchange], Awaitable[None]]


def close_code(error: Exception) -> int:
    """Return the code a connection is closed with for an error: 4000 plus its HTTP status, with two exceptions."""
    if isinstance(error, errors.ShuttingDown):
        return int(CloseCode.GOING_AWAY)
    status = STATUS.get(type(error), 500) if isinstance(error, SandkastenError) else 500
    return int(CloseCode.INTERNAL_ERROR) if status == 500 else 4000 + status


def _auth_key(message: str | bytes) -> str | None:
    """Return the key in an `auth` message, None for any other message."""
    if not isinstance(message, str) or len(message) > MAX_AUTH_CHARS:
        return None
    try:
        value = orjson.loads(message)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(value, dict) or value.get("type") != Auth.kind:
        return None
    key = value.get("key")
    return key if isinstance(key, str) else ""
