"""Output of runs over one WebSocket per session, with server-sent events where no WebSocket passes.

The first run that is followed opens the WebSocket (docs/websocket.md), further ones share it, and it stays open for the
next, also of another `Session` with that id. It has no task of its own: whoever waits for output reads for all. So an
unused one is closed by the server after two minutes, and by the client before its next WebSocket to any session. A
caller that takes no output gives no credit: its run is held up, and at most `CREDIT_BYTES` of it are in memory.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from sandkasten import errors
from sandkasten.sdk import waiting
from sandkasten.sdk.streams import EventFeed, Piece
from sandkasten.sdk.transport import Endpoint, Lost, Pump, SocketClosed, StreamRecovery, WebSocket
from sandkasten.sdk.types import RunEnd
from sandkasten.sdk.wire import EXEC_PROTOCOL, Frame, part, read_frame, read_message, run_end

log = logging.getLogger("sandkasten.sdk")

CREDIT_BYTES = 1024 * 1024
"""Output of one run that may be on its way or wait for its caller."""
GRANT_BYTES = CREDIT_BYTES // 8
"""Bytes that were taken for which credit is granted at once."""
FRAME_BYTES = 64 * 1024
CHANNELS = 60
"""Runs on one WebSocket; the server takes 64. Further ones are followed by events."""
_IDLE_S = 100.0
"""Age at which an unused WebSocket is not used again: the server closes it after 120 s."""
_UNUSED = 100
"""WebSockets that are kept for further runs, of all sessions of a client."""
_LEAVE_S = 2.0
"""Longest time for which a caller that gives up while a run begins waits for the run's end."""
_REFUSALS = 2
"""Handshakes that may fail before WebSockets count as impossible."""
_AGAIN_S = 60.0
"""Time after which that is tried again, where connections were lost and none was refused."""


@dataclass(frozen=True)
class OutputPlace:
    """A place in a run's output: whole pieces up to `after` were taken, and `cut` bytes of the next one."""

    after: int = 0
    cut: int = 0


@dataclass
class RunChannel:
    """State of one run on one WebSocket: what came, from `start` on, and was not taken."""

    number: int
    start: OutputPlace
    pieces: deque[tuple[Piece, OutputPlace]] = field(default_factory=deque)
    """Output, each piece with the position behind it."""
    exec_id: str = ""
    end: RunEnd | None = None
    error: errors.SandkastenError | None = None
    dropped: int = 0
    """Bytes that came twice: they took credit as well."""
    partial: tuple[int, int] = (0, 0)
    """The piece that came in part, and the size of the part."""
    is_known: bool = False
    """Whether the server has taken the request, so that other requests find the run."""
    is_left: bool = False
    """Whether nobody takes what still comes."""
    is_over: bool = False
    """Whether nothing more comes."""

    def has_news(self) -> bool:
        """Tell whether there is something to take."""
        return bool(self.pieces) or self.end is not None or self.error is not None or self.dropped >= GRANT_BYTES

    def add(self, frame: Frame) -> None:
        """Keep a frame's bytes, without those that the caller took from an earlier connection.

        The server sends from `start` on. After a restart it may send earlier pieces as well, which are dropped whole.
        """
        if self.is_left:
            return
        if frame.seq <= self.start.after:
            self.dropped += len(frame.data)
            return
        came = self.partial[1] if self.partial[0] == frame.seq else 0
        twice = max(self.start.cut - came, 0) if frame.seq == self.start.after + 1 else 0
        came += len(frame.data)
        self.partial = (frame.seq, came) if frame.more else (0, 0)
        if fresh := bytes(frame.data[twice:]):
            place = OutputPlace(frame.seq - 1, came) if frame.more else OutputPlace(frame.seq)
            self.pieces.append((Piece(frame.stream, fresh, frame.seq, int(time.time() * 1000)), place))

    def tell(self, value: Mapping[str, Any], message: str) -> None:
        """Keep what a text message says of the run."""
        match value["type"]:
            case "pong":
                self.is_known = True
            case "started":
                self.exec_id, self.is_known = value["exec_id"], True
            case "exit":
                self.end, self.is_over = run_end(value), True
            case "detached":
                self.is_over = True
            case "error" if value.get("final"):
                self.error, self.is_over = errors.api_error(message, None, streamed=True), True


class ExecSocket:
    """A WebSocket with the channels of runs."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self.pump = Pump(socket, self._take)
        self.channels: dict[int, RunChannel] = {}
        self._last = 0
        self.used_at = time.monotonic()

    @property
    def is_usable(self) -> bool:
        is_fresh = bool(self.channels) or time.monotonic() - self.used_at < _IDLE_S
        return self.pump.failure is None and is_fresh

    def _take(self, message: str | bytes) -> None:
        if isinstance(message, bytes):
            frame = read_frame(message)
            if (channel := self.channels.get(frame.channel)) is not None:
                channel.add(frame)
            return
        value = read_message(message)
        number = int(value["data"]) if value["type"] == "pong" else value.get("id", 0)
        if (channel := self.channels.get(number)) is not None:
            channel.tell(value, message)

    def open(self, start: OutputPlace) -> RunChannel:
        """Return a new channel for a run whose output was taken up to `start`."""
        self._last += 1
        channel = self.channels[self._last] = RunChannel(self._last, start)
        return channel

    def leave(self, channel: RunChannel) -> None:
        """Forget a channel; what still comes for it is dropped."""
        self.channels.pop(channel.number, None)
        self.used_at = time.monotonic()

    async def say(self, channel: RunChannel, **message: object) -> None:
        """Send a message of a channel. Raises `Lost`."""
        try:
            about = {} if message["type"] == "ping" else {"id": channel.number}
            await self._socket.send(json.dumps(about | message, separators=(",", ":")))
        except Lost as error:
            self.pump.failure = self.pump.failure or error
            raise

    async def close(self) -> None:
        """Close the connection; runs that use it go on, over another."""
        self.pump.failure = self.pump.failure or Lost("the connection is closed", was_sent=False)
        await self._socket.close()


class RunLink:
    """The way to the output of a session's runs. There is one for each session of a client (`of`)."""

    def __init__(self, session: Endpoint) -> None:
        self.session = session
        self.has_ids = True
        """Whether the session still takes ids from clients."""
        self._lock = waiting.Lock()
        self._socket: ExecSocket | None = None
        self._refusals = 0
        self._again_at = 0.0

    @classmethod
    def of(cls, session: Endpoint) -> RunLink:
        """Return the link of a session, which is kept for as long as it is in use or has a WebSocket."""
        links: MutableMapping[str, RunLink] = session.transport.links
        return links.get(session.path) or links.setdefault(session.path, cls(session))

    async def open(self, exec_id: str, begin: dict[str, Any] | None, *, has_own_id: bool = True) -> Feed:
        """Begin a run with the fields of `begin`, or follow the run of that id, and return its output.

        `has_own_id`: the id is the SDK's, so that the run may begin without it where the session takes no more ids.
        """
        feed: Feed
        if self._refusals < _REFUSALS or time.monotonic() > self._again_at:
            feed = ChannelFeed(self, exec_id, begin, has_own_id=has_own_id)
            try:
                await feed.join()
            except errors.SandkastenAPIError as error:
                if errors.leaf_of(error.code) not in (None, errors.RouteNotFound):
                    raise  # the server's own refusal, which it would repeat
                self._refusals, self._again_at = _REFUSALS, math.inf
            except Lost as lost:
                self._refusals += lost.was_sent
                self._again_at = time.monotonic() + _AGAIN_S
            except _Crowded:
                pass
            else:
                await feed.open()
                return feed
        feed = self._events(exec_id, begin)
        try:
            await feed.open()
        except errors.ExecIdsExhausted:
            if not has_own_id or begin is None:
                raise
            self.go_on_without_ids()
            feed = self._events(exec_id, without_id(begin))
            await feed.open()
        return feed

    def _events(self, exec_id: str, begin: dict[str, Any] | None) -> EventFeed:
        if begin is None:
            query = {"encoding": "base64", "on_timeout": "result"}
            request = self.session.call("GET", f"/execs/{part(exec_id)}/stream", query=query)
        else:
            body = begin | {"encoding": "base64"}
            request = self.session.call("POST", "/exec/stream", body, repeat="exec_id" in begin)
        return EventFeed(self.session.transport, request, exec_id)

    def go_on_without_ids(self) -> None:
        """Send no more ids: the session has reached the number that it keeps. Said once."""
        if self.has_ids:
            self.has_ids = False
            log.warning("%s takes no more ids: its commands are not repeated from now on", self.session.path)

    async def socket(self) -> ExecSocket:
        """Return the session's WebSocket, opened if there is none.

        Raises:
            _Crowded: it has all the channels that it may have.
            Others as of `Transport.websocket`.
        """
        async with self._lock:
            if self._socket is None or not self._socket.is_usable:
                await self.close()
                await self._close_others()
                request = self.session.call("GET", "/exec/ws")
                self._socket = ExecSocket(await self.session.transport.websocket(request, EXEC_PROTOCOL))
                self.session.transport.open_links.add(self)
                self._refusals = 0
            if len(self._socket.channels) >= CHANNELS:
                raise _Crowded
            return self._socket

    async def _close_others(self) -> None:
        """Close the WebSockets of the client's other sessions that are too old to be used again, or too many."""
        links = self.session.transport.open_links - {self}
        others = [(link, socket) for link in links if (socket := link._socket) is not None]
        unused = sorted(socket.used_at for _, socket in others if not socket.channels)
        kept_from = unused[-_UNUSED] if len(unused) > _UNUSED else 0.0
        for link, socket in others:
            is_surplus = not socket.channels and socket.used_at < kept_from
            if link._socket is socket and (is_surplus or not socket.is_usable):
                await link.close()

    async def close(self) -> None:
        """Close the WebSocket, if there is one."""
        self.session.transport.open_links.discard(self)
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()


class _Crowded(Exception):
    """The session's WebSocket has no channel left."""


class ChannelFeed:
    """Output of a run over the session's WebSocket, attached anew where a connection was lost."""

    def __init__(self, link: RunLink, exec_id: str, begin: dict[str, Any] | None, *, has_own_id: bool) -> None:
        self._link = link
        self._begin = begin
        self._has_own_id = has_own_id
        self._recovery = StreamRecovery(link.session.transport.timeout)
        self._joined: tuple[ExecSocket, RunChannel] | None = None
        self._has_begun = begin is None
        self._position = OutputPlace()
        self._taken = 0
        self.exec_id = exec_id

    async def join(self) -> tuple[ExecSocket, RunChannel]:
        """Ask for the run, if this was not done.

        Raises:
            Uncertain: the connection was lost, and the run must not be asked for again.
            Others as of `RunLink.socket`.
        """
        if self._joined is not None:
            return self._joined
        socket = await self._link.socket()
        channel = socket.open(self._position)
        try:
            if self._has_begun:
                join = {"type": "attach", "exec_id": self.exec_id, "after": self._position.after}
            else:
                join = {"type": "start", **(self._begin or {})}
            await socket.say(channel, **join, credit=CREDIT_BYTES, max_frame=FRAME_BYTES)
            if not self._has_begun:  # `started` would come with the command's turn in its shell
                await socket.say(channel, type="ping", data=str(channel.number))
        except BaseException as error:
            socket.leave(channel)
            if isinstance(error, Lost) and error.was_sent:
                self._require_id(error)
            raise
        self._joined = socket, channel
        return self._joined

    def _require_id(self, error: Exception) -> None:
        """Raise `Uncertain` if the command was lost on its way, and has no id to ask for it again."""
        if not self._has_begun and "exec_id" not in (self._begin or {}):
            raise errors.Uncertain(f"{error}; the command has no id, and may have run") from error

    async def open(self) -> None:
        """Begin or join the run, if this was not done; return once the server has the run. Errors as of `next`."""
        try:
            _, channel = await self._news(lambda channel: channel.is_known or channel.has_news())
        except BaseException:
            with waiting.shield(_LEAVE_S):
                await self.aclose(cancel=self._begin is not None)
            raise
        self.exec_id = channel.exec_id or self.exec_id

    async def next(self) -> Piece | RunEnd:
        """Return the next piece of output, or the end. A cancelled call loses no output.

        Raises:
            SandkastenStreamError: the run ended with an error, or can't be followed any more.
            ConnectionFailed: the connection was lost for longer than the client's timeout.
            Uncertain: the connection was lost, and the run must not be asked for again.
        """
        while True:
            socket, channel = await self._news(RunChannel.has_news)
            if channel.pieces:
                self._recovery.progress()
                piece, place = channel.pieces[0]
                await self._count(socket, channel, len(piece.data))  # first: a cancelled call leaves the piece
                channel.pieces.popleft()
                self._position = place
                return piece
            if channel.end is not None:
                self._leave()
                return channel.end
            await self._count(socket, channel, 0)

    async def _news(self, is_enough: Callable[[RunChannel], bool]) -> tuple[ExecSocket, RunChannel]:
        """Wait for what the server says of the run, and ask anew where a connection was lost. Errors as of `next`."""
        while True:
            try:
                socket, channel = await self.join()
                await socket.pump.until(functools.partial(is_enough, channel))
            except (Lost, SocketClosed, _Crowded) as error:
                if self._joined is not None:
                    self._leave()
                    self._require_id(error)
                await self._recovery.wait(error if isinstance(error, Lost) else Lost(str(error), was_sent=True))
                continue
            if channel.error is None or channel.pieces:
                return socket, channel
            self._leave()
            if not self._has_begun and isinstance(channel.error, errors.Capacity | errors.QuotaExceeded):
                await self._recovery.wait(channel.error)  # a refused command has not begun
                continue
            if not (isinstance(channel.error, errors.ExecIdsExhausted) and self._has_own_id and self._begin):
                raise channel.error
            self._link.go_on_without_ids()
            self._begin, self._has_own_id = without_id(self._begin), False

    async def _count(self, socket: ExecSocket, channel: RunChannel, size: int) -> None:
        """Count bytes as taken, with those that came twice, and grant credit for all once that is worth a message."""
        dropped = channel.dropped
        taken = self._taken + size + dropped
        if taken >= GRANT_BYTES:
            try:
                await socket.say(channel, type="credit", bytes=taken)
            except Lost:
                pass  # the next call finds the connection lost, and what has come is handed out before
            taken = 0
        self._taken = taken
        channel.dropped -= dropped

    def _leave(self) -> None:
        if self._joined is None:
            return
        (socket, channel), self._joined = self._joined, None
        self._taken = 0
        if channel.exec_id:
            self.exec_id, self._has_begun = channel.exec_id, True
        socket.leave(channel)

    async def aclose(self, *, cancel: bool = False) -> None:
        """Leave the run, which goes on unless it is to `cancel`; a further `next` goes on behind what was taken.

        The output that is on its way is read and dropped: the server sends its answer, and what other runs write,
        behind it.
        """
        if self._joined is None:
            return
        socket, channel = self._joined
        channel.is_left = True
        try:
            if not channel.is_over and (cancel or channel.exec_id):
                await socket.say(channel, type="cancel" if cancel else "detach")
                await socket.pump.until(lambda: channel.is_over)
        except (errors.ConnectionFailed, SocketClosed):
            pass
        finally:
            self._leave()
            if not channel.is_over:  # a run that has not begun can't be detached; the other runs are attached again
                await socket.close()


def without_id(begin: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a run for a session that takes no more ids: one that is lost is cancelled."""
    return {name: value for name, value in begin.items() if name != "exec_id"} | {"on_disconnect": "cancel"}


Feed = ChannelFeed | EventFeed
