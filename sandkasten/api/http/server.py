"""The accept loop: hypercorn's connection code behind a wall per connection, with a limit and a stop that ends.

Owns sockets and connections. Knows no route and no session. hypercorn 0.18's own `serve` lets a connection's exception
end the whole process and never returns while a client has stopped reading. Here an exception ends its own connection,
and after `graceful_timeout_s` all connections that are left are aborted.

`TCPServer`, `WorkerContext` and `ASGIWrapper` are importable but not documented. tests/api/test_hypercorn_parts.py
names the parts that are relied upon.
"""

from __future__ import annotations

import logging
import math
import socket
from typing import cast

import orjson
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer
from hypercorn.trio.worker_context import TrioSingleTask, WorkerContext
from hypercorn.typing import AppWrapper, ConnectionState

from sandkasten.api.http.connection import GuardedStream
from sandkasten.api.http.guard import App
from sandkasten.api.http.http1 import Http1
from sandkasten.api.http.listen import EarlySockets, open_listeners
from sandkasten.api.http.settings import ApiSettings

log = logging.getLogger(__name__)

REFUSALS = 32
"""Connections over the limit that are answered with 503 at the same time; further ones are just closed."""

REFUSAL_S = 1.0
ADDRESS_SHARE, UNIX_SHARE = 3 / 4, 1 / 16
"""Parts of `max_connections`: the most of one address, and those kept for clients of unix sockets."""

KEEPALIVE_IDLE_S = 60

_LOOK_EVERY_S = 1.0
"""Longest time by which a connection ends later than it should."""


async def serve(
    app: App,
    settings: ApiSettings,
    *,
    early: EarlySockets | None = None,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve `app` until cancelled, then stop within `graceful_timeout_s`. Starts with the bound addresses.

    `early`: sockets that listen already; `settings.listen` is then ignored.

    Raises:
        ListenError: an address can't be served, or needs a key that is not set.
    """
    if early is not None:
        bound = early.bound()
        try:
            await _Server(app, settings).run(bound.listeners, bound.addresses, task_status)
        finally:
            for listener in bound.listeners:
                listener.socket.close()
        return
    async with open_listeners(settings.listen, loopback_only=settings.api_key is None) as bound:
        await _Server(app, settings).run(bound.listeners, bound.addresses, task_status)


def hypercorn_config(settings: ApiSettings) -> Config:
    """Return hypercorn's settings: ours, no access log, and keep-alive without a request count."""
    config = Config()
    config.accesslog = None
    config.errorlog = logging.getLogger("sandkasten.api.hypercorn")
    config.include_server_header = False
    config.keep_alive_timeout = settings.keep_alive_timeout_s
    config.keep_alive_max_requests = 2**62
    config.h11_max_incomplete_size = settings.max_header_bytes
    config.websocket_max_message_size = settings.max_message_bytes
    config.websocket_ping_interval = settings.websocket_ping_s
    return config


class _IdleTimer:
    """In place of hypercorn's task that waits while a connection is idle: a deadline of the connection, at which the
    server looks now and then."""

    def __init__(self, stream: GuardedStream, timeout_s: float, stopping: trio.Event) -> None:
        self._stream, self._timeout_s, self._stopping = stream, timeout_s, stopping

    async def restart(self, _task_group: object, _action: object) -> None:
        """No request is being served any more. Ends the connection now if the server stops."""
        left_s = -math.inf if self._stopping.is_set() else self._timeout_s
        self._stream.set_idle_deadline(trio.current_time() + left_s)

    async def stop(self) -> None:
        """A request is being served, or the connection ends."""
        self._stream.set_idle_deadline(math.inf)


class _TcpConnection(TCPServer):
    """hypercorn's connection, which ends with the client's side: the original then waits for its keep-alive timer."""

    async def _read_data(self) -> None:
        """As the original, without its deadline for each read: the stream has that."""
        Http1.install(self, cast(GuardedStream, self.stream))
        data = b"-"
        try:
            while data:
                data = bytes(await self.stream.receive_some(MAX_RECV))
                await self.protocol.handle(RawData(data))
        except (trio.ClosedResourceError, trio.BrokenResourceError):
            pass
        await self.protocol.handle(Closed())
        await self.idle_task.stop()

    async def protocol_send(self, event: Event) -> None:
        """As the original, without its lock and its cancel scope for bytes that the socket takes at once."""
        if isinstance(event, RawData) and not self.send_lock.locked():
            rest = memoryview(event.data)[cast(GuardedStream, self.stream).send_nowait(event.data) :]
            if not rest:
                return
            event = RawData(data=bytes(rest))  # goes first: the lock is free, and taken without a switch of tasks
        await super().protocol_send(event)


class _Server:
    def __init__(self, app: App, settings: ApiSettings) -> None:
        self._app = app
        self._settings = settings
        self._config = hypercorn_config(settings)
        self._context = WorkerContext(None)
        self._streams: set[GuardedStream] = set()
        self._refusing = 0
        self._stopping = trio.Event()
        self._all_gone = trio.Event()

    async def run(
        self, listeners: list[trio.SocketListener], addresses: list[str], task_status: trio.TaskStatus[list[str]]
    ) -> None:
        async with trio.open_nursery() as nursery:
            connections = await nursery.start(self._hold_connections)
            task_status.started(addresses)
            try:
                await trio.serve_listeners(self._handle, listeners, handler_nursery=connections)
            finally:
                self._stopping.set()

    async def _hold_connections(self, *, task_status: trio.TaskStatus[trio.Nursery]) -> None:
        """Own the connections' tasks past the cancellation of `run`, for the graceful timeout at most."""
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as connections:
                task_status.started(connections)
                connections.start_soon(self._end_late)
                await self._stopping.wait()
                await self._context.terminated.set()  # busy connections close after their answer
                for stream in self._streams:
                    stream.end_if_idle()
                with trio.move_on_after(self._settings.graceful_timeout_s):
                    if self._streams:
                        await self._all_gone.wait()
                for stream in self._streams:
                    stream.abort()  # hypercorn shields its writes: cancelling alone would wait for the client
                connections.cancel_scope.cancel()

    async def _end_late(self) -> None:
        """End connections that are late. To look at all of them costs less than a cancel scope for each read."""
        settings = self._settings
        pause_s = min(_LOOK_EVERY_S, settings.head_timeout_s / 4, settings.keep_alive_timeout_s / 4)
        while True:
            await trio.sleep(pause_s)
            now = trio.current_time()
            for stream in self._streams:
                stream.end_if_late(now)

    async def _handle(self, stream: trio.SocketStream) -> None:
        """Serve one connection and raise nothing; trio closes the socket afterwards."""
        settings = self._settings
        guarded = GuardedStream(
            stream, write_timeout_s=settings.write_timeout_s, head_timeout_s=settings.head_timeout_s
        )
        if not self._make_room(guarded.peer):
            await self._refuse(stream)
            return
        _probe_silent_peers(stream)
        self._streams.add(guarded)
        try:
            await self._speak_http(guarded)
            await guarded.linger()
        except* Exception as group:
            log.warning("a connection was dropped: %s", "; ".join(_leaves(group)))
            log.debug("the dropped connection's error", exc_info=group)
        finally:
            self._streams.discard(guarded)
            if self._stopping.is_set() and not self._streams:
                self._all_gone.set()

    def _make_room(self, peer: str) -> bool:
        """Return whether one more connection of a peer fits, after the oldest idle one has given way if need be.

        Each address has a share, so that one alone can't keep out the others, and a part is kept for unix sockets.
        """
        most = self._settings.max_connections
        if peer:
            most_of_peer = math.ceil(most * ADDRESS_SHARE)
            if not self._cut_down([each for each in self._streams if each.peer == peer], most_of_peer):
                return False
            if not self._cut_down([each for each in self._streams if each.peer], most - int(most * UNIX_SHARE)):
                return False
        return self._cut_down(list(self._streams), most)

    def _cut_down(self, streams: list[GuardedStream], most: int) -> bool:
        """Return whether fewer than `most` of these are left, after the oldest idle one was closed if need be."""
        if len(streams) < most:
            return True
        idle = [each for each in streams if each.idle_since is not None]
        if not idle:
            return False
        oldest = min(idle, key=lambda each: each.idle_since or 0.0)
        oldest.abort()
        self._streams.discard(oldest)
        return True

    async def _speak_http(self, stream: GuardedStream) -> None:
        app = cast(AppWrapper, self._app)  # passed on to the streams of `Http1`, which are typed for it
        # TCPServer is typed for a TLS stream and uses the methods that GuardedStream has.
        transport = cast("trio.SSLStream[trio.SocketStream]", stream)
        state = ConnectionState({"stopping": self._stopping})
        connection = _TcpConnection(app, self._config, self._context, state, transport)
        timer = _IdleTimer(stream, self._config.keep_alive_timeout, self._stopping)
        connection.idle_task = cast(TrioSingleTask, timer)  # it has the methods that are used
        await connection.run()

    async def _refuse(self, stream: trio.SocketStream) -> None:
        if self._refusing >= REFUSALS:
            return
        self._refusing += 1
        try:
            with trio.move_on_after(REFUSAL_S):
                await stream.receive_some(64 * 1024)  # a close with unread bytes would send a reset
                await stream.send_all(_REFUSAL)
                await stream.send_eof()
                while await stream.receive_some(64 * 1024):
                    pass
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            self._refusing -= 1


def _probe_silent_peers(stream: trio.SocketStream) -> None:
    """Have the kernel notice a peer that vanished while a long command runs (tcp(7), TCP_KEEPIDLE)."""
    if stream.socket.family != socket.AF_UNIX:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)


def _leaves(error: BaseException) -> list[str]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for member in error.exceptions for leaf in _leaves(member)]
    return [f"{type(error).__name__}: {error}"]


def _refusal() -> bytes:
    body = orjson.dumps(
        {"error_code": "CAPACITY", "message": "too many connections", "retryable": True, "request_id": "refused"}
    )
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
        f"X-Request-ID: refused\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode("ascii") + body


_REFUSAL = _refusal()
