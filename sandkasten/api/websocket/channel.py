"""One run on an exec WebSocket: its output by credit, and its end.

A channel that has no credit stops reading its run, which stops the run's pipe and nothing else. Input is fed in
`ws_input.py`, orders are carried out in `ws_orders.py`; both are over when the channel is. Knows no other channel and
no socket.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import trio

from sandkasten.api.http.errors import error_body
from sandkasten.api.resources.run_views import end_view, timeout_error
from sandkasten.api.websocket.exec_messages import (
    DEFAULT_CREDIT_BYTES,
    DEFAULT_FRAME_BYTES,
    Attach,
    Cancel,
    Detached,
    Error,
    Exit,
    Granted,
    Input,
    StartCommand,
    Started,
    encode_message,
    encode_output,
)
from sandkasten.api.websocket.fields import MAX_CREDIT_BYTES
from sandkasten.api.websocket.outbox import Lane, Outbox
from sandkasten.api.websocket.ws_input import InputFeeder
from sandkasten.api.websocket.ws_orders import Order, Orders
from sandkasten.model import Cause, Output
from sandkasten.model.errors import InvalidRequest, SandkastenError
from sandkasten.supervisor import ExecStream

Opener = AbstractAsyncContextManager[ExecStream]


class Channel:
    """See the module's docstring. `on_end` is called when its last message has been taken for sending."""

    def __init__(
        self,
        message: StartCommand | Attach,
        exec_id: str,
        opener: Opener,
        outbox: Outbox,
        nursery: trio.Nursery,
        *,
        on_end: Callable[[], None],
    ) -> None:
        self.id = message.id
        self.exec_id = exec_id
        self._opener = opener
        self._fails_on_timeout = isinstance(message, StartCommand) and message.request.on_timeout == "error"
        self._sequence = message.after or 0 if isinstance(message, Attach) else 0
        self._max_frame_bytes = message.max_frame or DEFAULT_FRAME_BYTES
        self._credit_bytes = DEFAULT_CREDIT_BYTES if message.credit is None else message.credit
        self._outbox = outbox
        self._lane = Lane(outbox, on_end=on_end)
        self._scope = trio.CancelScope()
        self._credit = trio.lowlevel.ParkingLot()
        self._run: ExecStream | None = None
        self._is_cancelled = False
        self._omitted_bytes = 0
        """Output that was dropped; what follows it is dropped, too."""
        self.failure: SandkastenError | None = None
        """Why it ended, if it did with an error."""
        self.is_over = False
        """Only its last message is still to be sent."""
        self._connected = trio.Event()
        self._input = InputFeeder(nursery, grant=self._grant, refuse=self._refuse_input)
        self._orders = Orders(nursery, self._connected, refuse=self.refuse)

    # From beginning to end --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow the run to its end, and say how it ended. Raises nothing but what is a bug."""
        frame = None
        with self._scope:
            try:
                frame = await self._follow()
            except SandkastenError as error:
                self.failure = error
        self._connected.set()
        self._input.stop()
        await self._orders.settle()
        self.is_over = True
        if frame is None:
            frame = encode_message(self._farewell())
        await self._lane.end(frame)

    async def _follow(self) -> bytes:
        async with self._opener as run:
            self._run = run
            self._connected.set()
            self._input.open(run)
            self._sequence = min(self._sequence, run.info.last_sequence)
            started = Started(self.id, self._sequence, run.exec_id, run.is_joined)
            self._lane.put(encode_message(started), sequence=self._sequence, hold=True)
            async for output in run:
                await self._send(output)
            end = await run.wait_end()
            info = run.info
        if end.cause is Cause.TIMED_OUT and self._fails_on_timeout:
            raise timeout_error(end, end_view(end))
        message = Exit(self.id, self._sequence, info.stdout_bytes, info.stderr_bytes, end, self._omitted_bytes)
        return encode_message(message)

    def _farewell(self) -> Error | Detached:
        """Return what is said last when the run's end is not known."""
        if self.failure is None:
            return Detached(self.id, self._sequence)
        return Error(**error_body(self.failure), id=self.id, seq=self._sequence, final=True)

    def fail(self, error: SandkastenError) -> None:
        """End the channel with an error; what becomes of the run was said when it was started."""
        if not self.is_over:
            self.failure = self.failure or error
            self._scope.cancel()

    def detach(self) -> None:
        """End the channel and leave the run to itself. Raises `InvalidRequest` when it has not begun."""
        if self._run is None:
            raise InvalidRequest("the run has not begun", detach="wait for started")
        self._run.detach()
        self._scope.cancel()

    # Output -----------------------------------------------------------------------------------------------------

    def add_credit(self, size: int) -> None:
        """The client can take `size` bytes more."""
        self._credit_bytes = min(self._credit_bytes + size, MAX_CREDIT_BYTES)
        self._credit.unpark_all()

    async def _send(self, output: Output) -> None:
        """Queue a piece of output, in parts as frames and credit allow; of a cancelled run, or drop it."""
        position, size = 0, len(output.data)
        view = memoryview(output.data)
        while position < size:
            await self._lane.wait_for_room()
            while not self._credit_bytes and not self._is_cancelled:
                await self._credit.park()
            if self._omitted_bytes or not self._credit_bytes:
                self._omitted_bytes += size - position
                return
            part = view[position : position + min(self._max_frame_bytes, self._credit_bytes)]
            position += len(part)
            self._credit_bytes -= len(part)
            frame = encode_output(self.id, output.stream, part, output.sequence, more=position < size)
            self._lane.put(frame, sequence=0 if position < size else output.sequence)
        self._sequence = output.sequence

    # Input and orders -------------------------------------------------------------------------------------------

    def add_input(self, data: bytes) -> None:
        """Take bytes for the run's standard input; more than was granted ends the channel."""
        try:
            self._input.add(data)
        except InvalidRequest as error:
            self.fail(error)

    def close_input(self) -> None:
        """End the run's standard input behind what was sent."""
        self._input.close()

    def order(self, kind: str, order: Order) -> None:
        """Have something done to the run, behind what was ordered before. Never waits."""
        self._orders.add(kind, order)

    def cancel(self, order: Order) -> None:
        """Have the run cancelled at once. What it writes beyond the credit is dropped: nothing holds up its end."""
        if self._orders.add(Cancel.kind, order, lasts=True):
            self._is_cancelled = True
            self._credit.unpark_all()

    def _grant(self, size: int) -> None:
        self._outbox.put(encode_message(Granted(self.id, size)))

    def _refuse_input(self, error: SandkastenError) -> None:
        self.refuse(error, Input.kind)

    def refuse(self, error: SandkastenError, kind: str) -> None:
        """Say that a message was not taken; the run goes on."""
        self._outbox.put(encode_message(Error(**error_body(error), id=self.id, seq=self.sent_sequence, refused=kind)))

    @property
    def sent_sequence(self) -> int:
        """The last piece that goes out whole before whatever is said now."""
        return self._lane.taken_sequence
