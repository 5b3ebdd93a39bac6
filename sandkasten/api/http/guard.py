"""The ASGI wrapper between hypercorn and any application: corrects three faults of the server code from outside.

Per connection, not per request. Looks at no route, header or key.
- hypercorn's `send` returns without a checkpoint once the client is gone, so a loop of sends would freeze the event
  loop. Here the send of each piece is a checkpoint, by hypercorn's lock if something is sent, and every send raises
  once the connection is over (`websocket.py` does so for WebSockets). The end of an HTTP client's side alone does not
  end the connection here: a handler that is soon done still answers. A handler that waits is told by the connection's
  `Leave` (`Exchange.until_disconnect`), and by `http.disconnect`.
- hypercorn hands on bodies, and the end of answers, through a queue of a few pieces. An application that answers
  without reading would wait for itself for ever. Here the unread rest of a body is dropped meanwhile.
- hypercorn reports `http.disconnect` after each complete answer. quart-trio cancels itself on it, which also cancels
  hypercorn's keep-alive timer. Here `receive` stays silent after the final part of the answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import trio

from sandkasten.api.http.connection import ClientGone, GuardedStream

# ASGI scopes and messages are dicts of mixed values by specification (asgi.readthedocs.io, "Applications").
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


LEAVE_KEY = "sandkasten.leave"
"""Where the scope of a request has the `Leave` of its connection."""


class GuardedApp:
    """`app`, behind one connection."""

    def __init__(self, app: App, stream: GuardedStream) -> None:
        self._app = app
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_http = scope["type"] == "http"
        is_answered = False
        is_body_read = False

        async def guarded_receive() -> Message:
            nonlocal is_body_read
            message = await receive()
            if is_answered:
                await trio.sleep_forever()
            if message["type"] == "http.request" and not message.get("more_body", False):
                is_body_read = True
            return message

        async def guarded_send(message: Message) -> None:
            nonlocal is_answered
            if self._stream.is_broken or (self._stream.is_at_eof and not is_http):
                await trio.lowlevel.checkpoint()
                raise ClientGone
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                is_answered = True
                self._stream.has_unread_body = not is_body_read and has_body(scope)
            sent_bytes = self._stream.sent_bytes
            if is_answered and self._stream.has_unread_body:
                await _send_dropping(send, message, receive)
            else:
                await send(message)
            if is_http and message.get("more_body", False) and self._stream.sent_bytes == sent_bytes:
                await trio.lowlevel.checkpoint()

        self._stream.has_unread_body = False
        scope[LEAVE_KEY] = self._stream.leave
        try:
            with self._stream.serving():
                await self._app(scope, guarded_receive, guarded_send)
        except* ClientGone:
            pass


async def _send_dropping(send: Send, message: Message, receive: Receive) -> None:
    """Send the end of an answer, and drop the rest of the request until that is done."""
    failures: list[Exception] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_drop, receive)
        try:
            await send(message)
        except Exception as error:  # noqa: BLE001 - raised below: the nursery would wrap it
            failures.append(error)
        nursery.cancel_scope.cancel()
    for failure in failures:
        raise failure


async def _drop(receive: Receive) -> None:
    while True:
        await receive()


def has_body(scope: Scope) -> bool:
    """Return whether the request's head announces a body (RFC 9112 §6)."""
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0"))
        for name, value in scope["headers"]
    )
