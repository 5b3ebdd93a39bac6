"""GET /v1/sessions/{id}/terminal/ws: one viewer of a terminal, its bytes both ways and a few messages.

On a raw connection there are no messages: every frame of the client is typed, and the end is the close frame.
Input waits in a bounded buffer while the program does not read, so that the task that receives never waits: a size, a
ping and the end are always heard. Output keeps to the window the client asked for.
"""

from __future__ import annotations

from collections import deque
from typing import assert_never

import trio

from sandkasten.api.http.connection import ClientGone
from sandkasten.api.http.websocket import CloseCode, Opcode, encode_frame_head
from sandkasten.api.websocket.handshake import WebSocketExchange, close_code
from sandkasten.api.websocket.messages import (
    KIB,
    Credit,
    ErrorMessage,
    Exit,
    MessageRefused,
    Ping,
    Pong,
    Resize,
    encode_message,
    reason_of,
)
from sandkasten.api.websocket.outbox import Lane, Outbox
from sandkasten.api.websocket.terminal_messages import (
    INPUT,
    PROTOCOL,
    RAW_PROTOCOL,
    GiveBack,
    GivenBack,
    ServerMessage,
    Skipped,
    TakenOver,
    TakeOver,
    TerminalQuery,
    TerminalReady,
    parse_message,
    parse_query,
)
from sandkasten.errors import ExecEnded, SandkastenError
from sandkasten.model import TerminalSize
from sandkasten.supervisor import TerminalViewer

FRAME_BYTES = 32 * KIB
MAX_TYPED_BYTES = 1024 * KIB
"""Bytes of input that the terminal has not read; more of them end the connection."""

MAX_TYPED = 1024
PIECE_BYTES = 64 * KIB


async def terminal_ws(ws: WebSocketExchange) -> None:
    """View a terminal and type into it."""
    await ws.accept(PROTOCOL, raw=RAW_PROTOCOL)
    query = parse_query(ws.query, is_raw=ws.is_raw)
    async with ws.supervisor.open_terminal(ws.session_id, query.to_spec()) as viewer:
        await _Screen(ws, viewer, query).run()


class _Screen:
    def __init__(self, ws: WebSocketExchange, viewer: TerminalViewer, query: TerminalQuery) -> None:
        self._ws = ws
        self._viewer = viewer
        self._query = query
        self._outbox = Outbox(ws.send_frames, on_overflow=self._overflow)
        self._lane = Lane(self._outbox, on_end=lambda: None)
        self._window_bytes: int | None = query.window
        self._credit = trio.lowlevel.ParkingLot()
        self._typed: deque[bytes | TakeOver | GiveBack] = deque()
        self._typed_bytes = 0
        self._size: TerminalSize | None = None
        """The size that the terminal does not have yet; input that follows waits for it."""
        self._wanted = trio.lowlevel.ParkingLot()
        self._size_wanted = trio.lowlevel.ParkingLot()
        self._resized = trio.lowlevel.ParkingLot()
        self._is_taken_over = viewer.is_taken_over
        self._taking = trio.CancelScope()
        """The scope of a wait for the shell, which `give_back` ends."""
        self._skipped_bytes = 0
        self._is_input_refused = False
        self._quit = trio.Event()
        self._reason: tuple[int, str] = (CloseCode.NORMAL, "")

    async def run(self) -> None:
        """Send output and take input until the terminal or the connection ends."""
        info = self._viewer.info
        size = info.terminal or self._query.size
        self._tell(
            TerminalReady(self._viewer.terminal_id, size.cols, size.rows, self._is_taken_over, self._query.read_only)
        )
        if self._query.take_over:
            self._queue(TakeOver())
        try:
            async with trio.open_nursery() as nursery:
                for task in (self._outbox.run, self._show, self._type, self._resize, self._close_when_told):
                    nursery.start_soon(task)
                while (message := await self._ws.receive()) is not None:
                    self._take(message)
                nursery.cancel_scope.cancel()
        except* ClientGone:
            pass

    def _tell(self, message: ServerMessage) -> None:
        """Send a message ahead of the output."""
        if not self._ws.is_raw:
            self._outbox.put(encode_message(message))

    def _tell_in_order(self, message: ServerMessage) -> None:
        """Send a message behind the output."""
        if not self._ws.is_raw:
            self._lane.put(encode_message(message))

    # To the screen ----------------------------------------------------------------------------------------------

    async def _show(self) -> None:
        try:
            async for data in self._viewer:
                self._tell_changes()
                await self._send(data)
            self._tell_in_order(Exit.of(await self._viewer.wait_end()))
            self._close(CloseCode.NORMAL, "the terminal has ended")
        except SandkastenError as error:
            self._tell_in_order(ErrorMessage.of(error))
            self._close(close_code(error), error.message)

    async def _send(self, data: bytes) -> None:
        position, view = 0, memoryview(data)
        while position < len(data):
            await self._lane.wait_for_room()
            while self._window_bytes == 0:
                await self._credit.park()
            part = view[position : position + min(FRAME_BYTES, self._window_bytes or FRAME_BYTES)]
            position += len(part)
            if self._window_bytes is not None:
                self._window_bytes -= len(part)
            self._lane.put(encode_frame_head(Opcode.BINARY, len(part)), part)

    def _tell_changes(self) -> None:
        """Tell of changes since the last piece: lost output, and whether input reaches the shell."""
        if (skipped := self._viewer.skipped_bytes) > self._skipped_bytes:
            self._tell_in_order(Skipped(skipped - self._skipped_bytes))
            self._skipped_bytes = skipped
        self._tell_hands()

    def _tell_hands(self) -> None:
        if self._viewer.is_taken_over != self._is_taken_over:
            self._is_taken_over = self._viewer.is_taken_over
            self._is_input_refused = False
            self._tell_in_order(TakenOver() if self._is_taken_over else GivenBack())

    # From the keyboard ------------------------------------------------------------------------------------------

    def _take(self, message: str | bytes) -> None:
        if isinstance(message, bytes) or self._ws.is_raw:
            self._queue(message if isinstance(message, bytes) else message.encode())
            return
        try:
            self._handle(message)
        except MessageRefused as refused:
            if refused.kind is None:
                self._close(CloseCode.INVALID, reason_of(refused.error))
            else:
                self._refuse(refused.error, refused.kind)

    def _handle(self, message: str) -> None:
        match parse_message(message):
            case Resize(cols, rows):
                self._size = TerminalSize(cols, rows)
                self._size_wanted.unpark()
            case TakeOver() as order:
                self._queue(order)
            case GiveBack() as order:
                self._queue(order)
                self._taking.cancel()
            case Credit(size):
                if self._window_bytes is not None:
                    self._window_bytes = min(self._window_bytes + size, self._query.window or 0)
                    self._credit.unpark_all()
            case Ping(data):
                self._tell(Pong(data))
            case other:
                assert_never(other)

    def _queue(self, item: bytes | TakeOver | GiveBack) -> None:
        """Add to the input; orders about the shell keep their place among the bytes."""
        size = len(item) if isinstance(item, bytes) else 0
        if self._typed_bytes + size > MAX_TYPED_BYTES or len(self._typed) >= MAX_TYPED:
            self._close(CloseCode.TOO_MANY, "more is typed than is read")
            return
        self._typed_bytes += size
        self._typed.append(item)
        self._wanted.unpark()

    async def _type(self) -> None:
        while True:
            while not self._typed:
                await self._wanted.park()
            while self._size is not None:
                await self._resized.park()
            item = self._typed.popleft()
            if isinstance(item, bytes):
                await self._type_bytes(self._gather(item))
            else:
                await self._change_hands(item)

    def _gather(self, data: bytes) -> bytes:
        """Return `data` with the bytes that wait behind it."""
        pieces, size = [data], len(data)
        while self._typed and size < PIECE_BYTES and isinstance(item := self._typed[0], bytes):
            pieces.append(item)
            size += len(item)
            self._typed.popleft()
        self._typed_bytes -= size
        return b"".join(pieces)

    async def _type_bytes(self, data: bytes) -> None:
        try:
            await self._viewer.send(data)
        except ExecEnded:
            pass  # the run's end follows
        except SandkastenError as error:
            self._tell_hands()
            if not self._is_input_refused:  # told once, not for every key
                self._is_input_refused = True
                self._tell_in_order(ErrorMessage.of(error, refused=INPUT))  # behind `given_back`

    async def _change_hands(self, order: TakeOver | GiveBack) -> None:
        await self._lane.wait_for_room()  # bounds the answers to a client that reads none
        try:
            if isinstance(order, TakeOver):
                await self._take_over()
            else:
                await self._give_back()
        except SandkastenError as error:
            self._refuse(error, order.kind)

    async def _take_over(self) -> None:
        """Wait for the shell until input reaches it or the shell is given back."""
        if GiveBack() in self._typed:
            return
        with trio.CancelScope() as self._taking:
            await self._viewer.take_over()
        self._tell_hands()

    async def _give_back(self) -> None:
        """Leave the shell. The client gets one answer, also if the shell was not taken over, or not yet."""
        was_taken_over = self._is_taken_over
        await self._viewer.give_back()
        self._tell_hands()
        if not was_taken_over:
            self._tell_in_order(GivenBack())

    async def _resize(self) -> None:
        while True:
            while self._size is None:
                await self._size_wanted.park()
            size = self._size
            try:
                await self._viewer.resize(size)
            except ExecEnded:
                pass  # the run's end follows
            except SandkastenError as error:
                self._refuse(error, Resize.kind)
            if self._size is size:
                self._size = None
                self._resized.unpark_all()

    def _refuse(self, error: SandkastenError, kind: str) -> None:
        self._tell(ErrorMessage.of(error, refused=kind))

    # The end ----------------------------------------------------------------------------------------------------

    def _overflow(self) -> None:
        self._close(CloseCode.TOO_MANY, "too many messages whose answers are not read")

    def _close(self, code: int, reason: str) -> None:
        if not self._quit.is_set():
            self._reason = (code, reason)
            self._quit.set()

    async def _close_when_told(self) -> None:
        await self._quit.wait()
        if self._reason[0] != CloseCode.TOO_MANY:
            with trio.move_on_after(self._ws.settings.write_timeout_s):
                await self._outbox.wait_until_empty()
        await self._ws.close(*self._reason)
