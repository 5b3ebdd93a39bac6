"""Small ASGI applications to put behind the guard: a plain one, a Quart one, and ones that behave badly."""

from __future__ import annotations

from typing import cast

import trio
from quart import websocket
from quart_trio import QuartTrio

from sandkasten.api.http.guard import App, Receive, Scope, Send


async def plain(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer every request with 200 after reading it; echo on WebSockets."""
    if scope["type"] == "websocket":
        await _echo(receive, send)
        return
    while (await receive()).get("more_body", False):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def _echo(receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "bytes": message.get("bytes"), "text": message.get("text")})


def quart() -> App:
    """The same with Quart, unguarded by our own front."""
    app = QuartTrio(__name__, static_folder=None)

    @app.route("/healthz", methods=["GET", "POST"])
    async def healthz() -> str:
        return "ok"

    @app.websocket("/ws")
    async def echo() -> None:
        while True:
            await websocket.send(await websocket.receive())

    return cast(App, app)


class Endless:
    """An application that sends without ever listening. `ended` is set when it was stopped by whatever means."""

    def __init__(self, piece: bytes = bytes(64 * 1024)) -> None:
        self._piece = piece
        self.started = trio.Event()
        self.ended = trio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") == "/healthz":
            await plain(scope, receive, send)
            return
        message: dict[str, object] = {"type": "websocket.send", "bytes": self._piece}
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            message = {"type": "http.response.body", "body": self._piece, "more_body": True}
        else:
            await receive()
            await send({"type": "websocket.accept"})
        self.started.set()
        try:
            while True:
                await send(dict(message))
        finally:
            self.ended.set()
