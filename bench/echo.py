"""The WebSocket server to compare with: the daemon's own server code, and behind it nothing but an echo and a sender.

Run as a process of its own; prints its address. `/echo` sends each message back, `/send` sends as many bytes as its
first message says, in frames of 64 KiB.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from sandkasten.api.http.guard import Message, Receive, Scope, Send
from sandkasten.api.http.server import serve
from sandkasten.api.http.settings import ApiSettings
from sandkasten.api.http.websocket import Opcode, encode_frame

_FRAME = encode_frame(Opcode.BINARY, bytes(64 * 1024))
_PORT = re.compile(r":(\d+)")


@contextmanager
def running() -> Iterator[tuple[str, int]]:
    """Run the server in a process of its own; yield its address."""
    command = [sys.executable, "-m", "bench.echo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found = _PORT.search(process.stdout.readline().replace("127.0.0.1", ""))
            assert found is not None
            yield "127.0.0.1", int(found[1])
        finally:
            process.terminate()


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "websocket.accept", "subprotocol": None, "headers": []})
    while (message := await receive())["type"] == "websocket.receive":
        if scope["path"] == "/send":
            await _send(send, int(message["text"]))
        else:
            await _echo(send, message)


async def _echo(send: Send, message: Message) -> None:
    await send({"type": "websocket.send", "frames": encode_frame(Opcode.TEXT, message["text"].encode())})


async def _send(send: Send, size: int) -> None:
    for _ in range(size // (64 * 1024)):
        await send({"type": "websocket.send", "frames": _FRAME})


async def _main() -> None:
    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(serve, _app, ApiSettings(listen=("127.0.0.1:0",)))
        print(addresses[0], flush=True)


if __name__ == "__main__":
    trio.run(_main)
