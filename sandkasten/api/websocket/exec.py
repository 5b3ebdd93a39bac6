"""GET /v1/sessions/{id}/exec/ws: one connection, many runs at once.

Owns the connection: takes messages, keeps the channels, and closes. Messages are spelled in `exec_messages.py`, a run
is followed in `channel.py`, outgoing frames are put in order in `outbox.py`. The task that receives never waits for
anything else, so pings and an end are always heard.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, assert_never

import trio

from sandkasten.api.http.connection import ClientGone
from sandkasten.api.http.websocket import CloseCode
from sandkasten.api.resources.fields import refuse_unknown
from sandkasten.api.websocket.channel import Channel, Opener, Order
from sandkasten.api.websocket.exec_messages import (
    LIMITS,
    MAX_CHANNELS,
    PROTOCOL,
    ChannelAttach,
    ChannelCancel,
    ChannelCredit,
    ChannelError,
    ChannelResize,
    ChannelSignal,
    ClientMessage,
    CloseStdin,
    Detach,
    ExecHello,
    Input,
    StartCommand,
    parse_message,
)
from sandkasten.api.websocket.handshake import WebSocketExchange
from sandkasten.api.websocket.messages import MessageRefused, Ping, Pong, encode_message, reason_of
from sandkasten.api.websocket.outbox import Outbox
from sandkasten.errors import Capacity, Conflict, ExecNotFound, SandkastenError, SessionExpired
from sandkasten.model import TerminalSize
from sandkasten.model.lifecycle import LIVE
from sandkasten.model.run import make_exec_id

log = logging.getLogger(__name__)

MAX_WAITING = 4
"""Tasks that stay when their run is over; more are started when needed."""

END_S = 1.0
"""Seconds for the runs of an ended session to end by themselves."""


async def exec_ws(ws: WebSocketExchange) -> None:
    """Run commands over one connection: output as bytes with credit, input, signals."""
    await ws.accept(PROTOCOL)
    refuse_unknown(ws.query, None)
    await _ExecSocket(ws).run()


class _ExecSocket:
    def __init__(self, ws: WebSocketExchange) -> None:
        self._ws = ws
        self._supervisor = ws.supervisor
        self._channels: dict[int, Channel] = {}
        self._outbox = Outbox(ws.send_frames, on_overflow=self._overflow)
        self._turn = trio.lowlevel.ParkingLot()
        self._waiting = 0
        """Tasks that wait for their turn at receiving."""
        self._unused = trio.lowlevel.ParkingLot()
        self._quit = trio.Event()
        self._reason: tuple[CloseCode, str] = (CloseCode.NORMAL, "")
        self._nursery: trio.Nursery

    async def run(self) -> None:
        """Take messages until either side ends the connection; every channel is left then."""
        limits = dict(LIMITS) | {"message_bytes": self._ws.settings.max_message_bytes}
        self._outbox.put(encode_message(ExecHello(PROTOCOL, self._ws.session_id, limits)))
        try:
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._outbox.run)
                self._nursery.start_soon(self._watch_session)
                self._nursery.start_soon(self._stay)
                self._nursery.start_soon(self._close_when_told)
                await self._take_turns()
        except* ClientGone:
            pass

    async def _take_turns(self) -> None:
        """Receive until a message begins a run, let another task receive, and follow the run to its end; then again.

        So a run begins in the task that received its message: a switch to another task costs as much as the parsing.
        """
        while (channel := await self._receive_until_start()) is not None:
            if self._waiting:
                self._waiting -= 1
                self._turn.unpark()
            else:
                self._nursery.start_soon(self._take_turns)
            await channel.run()
            if self._waiting == MAX_WAITING:
                return
            self._waiting += 1
            await self._turn.park()
        self._nursery.cancel_scope.cancel()

    async def _receive_until_start(self) -> Channel | None:
        """Take messages until one opens a channel; None when the connection is over."""
        while (message := await self._ws.receive()) is not None:
            try:
                channel = self._handle(parse_message(message))
            except MessageRefused as refused:
                self._refuse(refused)
                continue
            if channel is not None:
                return channel
        return None

    # Messages ---------------------------------------------------------------------------------------------------

    def _handle(self, message: ClientMessage) -> Channel | None:
        """Carry out a message; return the channel that it opened, whose `run` is still to be called."""
        match message:
            case StartCommand():
                return self._start(message)
            case ChannelAttach():
                return self._attach(message)
            case Input():
                if (channel := self._channels.get(message.id)) is not None:  # otherwise the message crossed the end
                    channel.add_input(message.data)
            case ChannelCredit():
                if (channel := self._channels.get(message.id)) is not None:
                    channel.add_credit(message.bytes)
            case CloseStdin():
                self._channel(message).close_input()
            case ChannelSignal():
                self._order(message, self._supervisor.signal_exec, number=message.signal)
            case ChannelResize():
                self._order(message, self._supervisor.resize_exec, size=TerminalSize(message.cols, message.rows))
            case ChannelCancel():
                channel = self._channel(message)
                channel.cancel(self._make_order(channel, self._supervisor.cancel_exec, now=bool(message.now)))
            case Detach():
                self._detach(message)
            case Ping():
                self._outbox.put(encode_message(Pong(message.data)))
            case _:
                assert_never(message)
        return None

    def _start(self, message: StartCommand) -> Channel:
        self._require_free(message)
        request = message.request
        exec_id = request.exec_id or make_exec_id()  # orders may name the run before it has begun
        on_disconnect = request.when_left(is_followed=True)
        try:
            spec = request.to_spec(self._ws.settings, exec_id=exec_id)
            opener = self._supervisor.open_exec(self._ws.session_id, spec, on_disconnect=on_disconnect)
        except SandkastenError as error:
            raise MessageRefused(error, channel=message.id, kind=message.kind) from None
        return self._open(message, exec_id, opener)

    def _attach(self, message: ChannelAttach) -> Channel:
        self._require_free(message)
        try:
            opener = self._supervisor.attach_exec(self._ws.session_id, message.exec_id, after=message.after or 0)
        except SandkastenError as error:
            raise MessageRefused(error, channel=message.id, kind=message.kind) from None
        return self._open(message, message.exec_id, opener)

    def _require_free(self, message: StartCommand | ChannelAttach) -> None:
        number = message.id
        if number in self._channels:
            raise MessageRefused(Conflict("the channel is in use", id=number), channel=number, kind=message.kind)
        if len(self._channels) >= MAX_CHANNELS:
            raise MessageRefused(
                Capacity("too many channels", max_channels=MAX_CHANNELS), channel=number, kind=message.kind
            )

    def _open(self, message: StartCommand | ChannelAttach, exec_id: str, opener: Opener) -> Channel:
        on_end = functools.partial(self._forget, message.id)
        channel = Channel(message, exec_id, opener, self._outbox, self._nursery, on_end=on_end)
        self._channels[message.id] = channel
        return channel

    def _forget(self, number: int) -> None:
        channel = self._channels.pop(number)
        if not self._channels:
            self._unused.unpark_all()
        if isinstance(channel.failure, SessionExpired):
            self._close(CloseCode.ENDED, channel.failure.message)

    def _channel(self, message: CloseStdin | ChannelSignal | ChannelResize | ChannelCancel | Detach) -> Channel:
        channel = self._channels.get(message.id)
        if channel is None or channel.is_over:
            error = ExecNotFound("no run is on this channel", id=message.id)
            raise MessageRefused(error, channel=message.id, kind=message.kind)
        return channel

    def _order(
        self, message: ChannelSignal | ChannelResize, method: Callable[..., Awaitable[object]], **details: Any
    ) -> None:
        """Order the supervisor to do something to a run; `details` are the arguments of `method` besides the run."""
        channel = self._channel(message)
        channel.order(message.kind, self._make_order(channel, method, **details))

    def _make_order(self, channel: Channel, method: Callable[..., Awaitable[object]], **details: Any) -> Order:
        return functools.partial(method, self._ws.session_id, channel.exec_id, **details)

    def _detach(self, message: Detach) -> None:
        try:
            self._channel(message).detach()
        except SandkastenError as error:
            raise MessageRefused(error, channel=message.id, kind=message.kind) from None

    def _refuse(self, refused: MessageRefused) -> None:
        """Answer a message that was not taken; a message that names no channel ends the connection."""
        if refused.channel is None:
            self._close(CloseCode.INVALID, reason_of(refused.error))
            return
        is_start = refused.kind in (StartCommand.kind, ChannelAttach.kind)
        channel = self._channels.get(refused.channel)
        final = is_start and channel is None
        sequence = 0 if channel is None else channel.sent_sequence
        error = ChannelError.of(refused.error, id=refused.channel, seq=sequence, final=final, refused=refused.kind)
        self._outbox.put(encode_message(error))

    # The end ----------------------------------------------------------------------------------------------------

    def _overflow(self) -> None:
        self._close(CloseCode.TOO_MANY, "too many messages whose answers are not read")

    def _close(self, code: CloseCode, reason: str) -> None:
        if not self._quit.is_set():
            self._reason = (code, reason)
            self._quit.set()

    async def _close_when_told(self) -> None:
        await self._quit.wait()
        if self._reason[0] is CloseCode.ENDED:
            with trio.move_on_after(END_S):
                await self._outbox.wait_until_empty()
        await self._ws.close(*self._reason)

    async def _stay(self) -> None:
        """Count the connection as activity of the session, also between commands."""
        try:
            async with self._supervisor.attend(self._ws.session_id):
                await trio.sleep_forever()
        except SandkastenError as failure:  # `_watch_session` notices an end
            log.info("not counted as activity: %s", failure)

    async def _watch_session(self) -> None:
        """When the session ends, wait for the ends of its runs, fail the channels that are left, and close."""
        try:
            session = await self._supervisor.wait_ended(self._ws.session_id)
        except SandkastenError as failure:
            log.warning("the end of the session can't be watched: %s", failure)
            return  # a channel that fails will tell
        if session.status in LIVE:
            return  # the daemon stops, the session stays
        await self._wait_until_unused()
        error = SessionExpired("the session has ended")
        for channel in list(self._channels.values()):
            channel.fail(error)
        await self._wait_until_unused()
        self._close(CloseCode.ENDED, error.message)

    async def _wait_until_unused(self) -> None:
        with trio.move_on_after(END_S):
            while self._channels:
                await self._unused.park()
