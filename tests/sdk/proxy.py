"""A proxy between a client and a server: it cuts connections at a chosen byte, or falls silent there, refuses
WebSockets, or holds event streams back until they end.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import trio


@attrs.define
class Cut:
    """The next connection is closed after `at` bytes of what the client (`of_request`) or the server sends.

    `is_reset`: with a reset (RST), so that bytes on their way are lost as well; else with an orderly end. `is_silent`:
    the connection stays, and what would follow never comes, as from a peer that vanished.
    """

    at: int
    of_request: bool
    is_reset: bool = False
    is_silent: bool = False


@attrs.define
class Proxy:
    """A proxy that runs. Of `cuts` each connection that is not refused takes the first; with none left,
    connections are kept."""

    url: str = ""
    cuts: list[Cut] = attrs.field(factory=list)
    connections: int = 0
    requested: int = 0
    """Bytes from clients so far."""
    answered: int = 0
    """Bytes from the server so far."""
    refuses_websockets: bool = False
    buffers: bool = False
    """Whether an event stream is sent on when it has ended."""
    requests: list[bytes] = attrs.field(factory=list)
    """First line of what each connection carried first."""


@asynccontextmanager
async def running_proxy(port: int) -> AsyncIterator[Proxy]:
    """Run a proxy before a server on a loopback port."""
    proxy = Proxy()
    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        proxy.url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"

        async def serve(client: trio.SocketStream) -> None:
            await _serve(proxy, port, client)

        nursery.start_soon(trio.serve_listeners, serve, [listener])
        yield proxy
        nursery.cancel_scope.cancel()


async def _serve(proxy: Proxy, port: int, client: trio.SocketStream) -> None:
    proxy.connections += 1
    cut = proxy.cuts.pop(0) if proxy.cuts else None
    async with client, await trio.open_tcp_stream("127.0.0.1", port) as server, trio.open_nursery() as nursery:

        def end() -> None:
            if cut is not None and cut.is_reset:  # socket(7): a linger of 0 s sends RST
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            nursery.cancel_scope.cancel()

        async def forward(source: trio.SocketStream, target: trio.SocketStream, *, is_request: bool) -> None:
            passed = 0
            held = b""
            is_first = True
            try:
                while data := await source.receive_some(64 * 1024):
                    if is_request and is_first:
                        is_first = False
                        proxy.requests.append(data.partition(b"\r\n")[0])
                    if is_request and proxy.refuses_websockets and b"upgrade: websocket" in data.lower():
                        proxy.cuts[:0] = [cut] if cut else []
                        await client.send_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\n\r\nno")
                        break
                    if is_request:
                        proxy.requested += len(data)
                    else:
                        proxy.answered += len(data)
                    if cut is not None and cut.of_request == is_request and passed + len(data) > cut.at:
                        await target.send_all(data[: cut.at - passed])
                        if cut.is_silent:
                            await trio.sleep_forever()
                        break
                    passed += len(data)
                    held += data
                    if not (proxy.buffers and b"text/event-stream" in held and not held.endswith(b"\r\n0\r\n\r\n")):
                        await target.send_all(held)
                        held = b""
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
            end()

        nursery.start_soon(lambda: forward(client, server, is_request=True))
        await forward(server, client, is_request=False)
