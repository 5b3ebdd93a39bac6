"""One run on an exec WebSocket: its output by credit, its input, the orders given to it, and its end.

A channel without credit stops reading its run, which stops the run's pipe and nothing else. Input waits, up to the
bytes granted, until the run reads it. Orders are carried out one after the other, cancellations beside them. Input and
orders are over when the channel is. Knows no other channel and no socket.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import trio

from sandkasten.api.http.json import to_plain
from sandkasten.api.resources.run_output import EndBody, timeout_error
from sandkasten.api.websocket.exec_messages import (
    DEFAULT_CREDIT_BYTES,
    DEFAULT_FRAME_BYTES,
    STDIN_CREDIT_BYTES,
    ChannelAttach,
    ChannelCancel,
    ChannelError,
    ChannelExit,
    ChannelStarted,
    Detached,
    Granted,
    Input,
    StartCommand,
    encode_output,
)
from sandkasten.api.websocket.messages import MAX_CREDIT_BYTES, encode_message
from sandkasten.api.websocket.outbox import Lane, Outbox
from sandkasten.errors import ExecEnded, ExecNotFound, InvalidRequest, Overloaded, SandkastenError
from sandkasten.model import Cause, Output
from sandkasten.supervisor import ExecStream

PIECE_BYTES = 64 * 1024

GRANT_BYTES = STDIN_CREDIT_BYTES // 4
"""Input is granted anew in pieces of at least this size."""


class InputFeeder:
    """The input of one run: holds the bytes a client has sent, as many as were granted, until the run reads them.

    Nothing outlives `stop`.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        *,
        grant: Callable[[int], None],
        refuse: Callable[[SandkastenError], None],
    ) -> None:
        """`grant` is told how many bytes more may come; `refuse`, once, why the run takes none."""
        self._nursery = nursery
        self._tell_grant = grant
        self._tell_refusal = refuse
        self._run: ExecStream | None = None
        self._waiting = bytearray()
        self._news = trio.lowlevel.ParkingLot()
        self._granted_bytes = STDIN_CREDIT_BYTES
        self._read_bytes = 0
        """Bytes that the run has read and that are not granted anew yet."""
        self._is_closed = False
        self._is_end_waiting = False
        self._is_feeding = False
        self._is_refused = False
        self._is_stopped = False
        self._scope = trio.CancelScope()

    def open(self, run: ExecStream) -> None:
        """Begin to hand input on to the run, the waiting bytes first."""
        self._run = run
        self._wake()

    def add(self, data: bytes) -> None:
        """Take bytes; bytes behind the end are refused. Raises `InvalidRequest` for more bytes than were granted."""
        if self._is_stopped:
            return
        if self._is_closed:
            self._refuse(InvalidRequest("the input was closed", stdin="was closed"))
            return
        if len(data) > self._granted_bytes:
            raise InvalidRequest("more input than was granted", granted_bytes=self._granted_bytes)
        self._granted_bytes -= len(data)
        self._waiting += data
        self._wake()

    def close(self) -> None:
        """End the run's input behind the bytes that were sent."""
        if not self._is_closed:
            self._is_closed = self._is_end_waiting = True
            self._wake()

    def stop(self) -> None:
        """Drop the waiting bytes; from now on nothing is handed on, granted or refused."""
        self._is_stopped = True
        self._waiting.clear()
        self._scope.cancel()

    def _wake(self) -> None:
        if self._run is None or self._is_stopped:
            return
        if not self._is_feeding and (self._waiting or self._is_end_waiting):
            self._is_feeding = True
            self._nursery.start_soon(self._feed, self._run)
        self._news.unpark()

    async def _feed(self, run: ExecStream) -> None:
        with self._scope:
            while not self._is_stopped:
                try:
                    if self._waiting:
                        await self._feed_piece(run)
                    elif self._is_end_waiting:
                        self._is_end_waiting = False
                        await run.close_stdin()
                    else:
                        await self._news.park()
                except ExecEnded:
                    return  # the end is on its way
                except SandkastenError as error:
                    self._refuse(error)

    async def _feed_piece(self, run: ExecStream) -> None:
        piece = bytes(self._waiting[:PIECE_BYTES])
        del self._waiting[:PIECE_BYTES]
        try:
            await run.send_stdin(piece)
        finally:
            self._grant(len(piece))

    def _grant(self, size: int) -> None:
        self._read_bytes += size
        if self._read_bytes >= GRANT_BYTES and not self._is_stopped:
            self._granted_bytes += self._read_bytes
            self._tell_grant(self._read_bytes)
            self._read_bytes = 0

    def _refuse(self, error: SandkastenError) -> None:
        if not self._is_refused and not self._is_stopped:
            self._is_refused = True
            self._tell_refusal(error)


MAX_ORDERS = 32
"""Orders to one run that are not carried out yet."""

UNKNOWN_S = 0.02
"""Seconds between two tries of an order for a run that is being started."""

LAST_ORDERS_S = 1.0
"""Seconds for orders that were given before the channel's end."""

Order = Callable[[], Awaitable[object]]
_Queue = deque[tuple[str, Order]]


class Orders:
    """The orders a client gives to one run. `known` is set once the supervisor knows the run, or never will.

    A cancellation lasts until the run has ended, so it holds up no other order: a second one (`now`) or a signal comes
    through while the first still gives the run time. Bounded; nothing outlives `settle`.
    """

    def __init__(
        self, nursery: trio.Nursery, known: trio.Event, *, refuse: Callable[[SandkastenError, str], None]
    ) -> None:
        """`refuse(error, kind)` is called for an order that was not carried out."""
        self._nursery = nursery
        self._known = known
        self._refuse = refuse
        self._queue: _Queue = deque()
        self._scopes: set[trio.CancelScope] = set()
        self._pending = 0
        self._done = trio.lowlevel.ParkingLot()
        self._is_stopped = False

    def add(self, kind: str, order: Order, *, lasts: bool = False) -> bool:
        """Carry out an order behind the earlier ones, or, if the order `lasts`, beside them.

        Never waits. Returns whether the order was taken.
        """
        if self._pending >= MAX_ORDERS:
            self._refuse(Overloaded("too many orders wait"), kind)
            return False
        self._pending += 1
        queue: _Queue = deque() if lasts else self._queue
        queue.append((kind, order))
        if len(queue) == 1:  # the order in work stays in the queue
            self._nursery.start_soon(self._obey_all, queue)
        return True

    async def settle(self) -> None:
        """Finish the orders within `LAST_ORDERS_S` and drop the rest; from now on nothing is refused."""
        with trio.move_on_after(LAST_ORDERS_S):
            while self._pending:
                await self._done.park()
        self._is_stopped = True
        for scope in self._scopes:
            scope.cancel()

    async def _obey_all(self, queue: _Queue) -> None:
        if self._is_stopped:
            return
        with trio.CancelScope() as scope:
            self._scopes.add(scope)
            while queue:
                kind, order = queue[0]
                try:
                    await self._obey(order)
                except SandkastenError as error:
                    self._tell(error, kind)
                queue.popleft()
                self._pending -= 1
                self._done.unpark_all()
        self._scopes.discard(scope)

    async def _obey(self, order: Order) -> None:
        """Carry out an order, which may come before the supervisor knows the run."""
        while True:
            try:
                await order()
                return
            except ExecNotFound:
                if self._known.is_set():
                    raise
            with trio.move_on_after(UNKNOWN_S):
                await self._known.wait()

    def _tell(self, error: SandkastenError, kind: str) -> None:
        if not self._is_stopped:
            self._refuse(error, kind)


Opener = AbstractAsyncContextManager[ExecStream]


class Channel:
    """One channel. `on_end` is called when the channel's last message has been taken for sending."""

    def __init__(
        self,
        message: StartCommand | ChannelAttach,
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
        self._sequence = message.after or 0 if isinstance(message, ChannelAttach) else 0
        self._max_frame_bytes = message.max_frame or DEFAULT_FRAME_BYTES
        self._credit_bytes = DEFAULT_CREDIT_BYTES if message.credit is None else message.credit
        self._outbox = outbox
        self._lane = Lane(outbox, on_end=on_end)
        self._scope = trio.CancelScope()
        self._credit = trio.lowlevel.ParkingLot()
        self._run: ExecStream | None = None
        self._is_cancelled = False
        self._omitted_bytes = 0
        """Bytes of output that were dropped; once some were, all that follow are, too."""
        self.failure: SandkastenError | None = None
        """The error that ended the channel, if one did."""
        self.is_over = False
        """Set when only the channel's last message is still to be sent."""
        self._connected = trio.Event()
        self._input = InputFeeder(nursery, grant=self._grant, refuse=self._refuse_input)
        self._orders = Orders(nursery, self._connected, refuse=self.refuse)

    # From beginning to end --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow the run to its end, and tell the client of the end. Raises nothing but bugs."""
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
            started = ChannelStarted(self.id, self._sequence, run.exec_id, run.is_joined)
            self._lane.put(encode_message(started), sequence=self._sequence, hold=True)
            async for output in run:
                await self._send(output)
            end = await run.wait_end()
            info = run.info
        if end.cause is Cause.TIMED_OUT and self._fails_on_timeout:
            raise timeout_error(end, to_plain(EndBody.of(end)))
        message = ChannelExit.of(
            end,
            id=self.id,
            seq=self._sequence,
            stdout_bytes=info.stdout_bytes,
            stderr_bytes=info.stderr_bytes,
            omitted_bytes=self._omitted_bytes or None,
        )
        return encode_message(message)

    def _farewell(self) -> ChannelError | Detached:
        """Return the last message of a channel that does not know its run's end."""
        if self.failure is None:
            return Detached(self.id, self._sequence)
        return ChannelError.of(self.failure, id=self.id, seq=self._sequence, final=True)

    def fail(self, error: SandkastenError) -> None:
        """End the channel with an error. The run goes on or ends as its start said (`on_disconnect`)."""
        if not self.is_over:
            self.failure = self.failure or error
            self._scope.cancel()

    def detach(self) -> None:
        """End the channel and let the run go on. Raises `InvalidRequest` when the run has not begun."""
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
            self._lane.put(*frame, sequence=0 if position < size else output.sequence)
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
        if self._orders.add(ChannelCancel.kind, order, lasts=True):
            self._is_cancelled = True
            self._credit.unpark_all()

    def _grant(self, size: int) -> None:
        self._outbox.put(encode_message(Granted(self.id, size)))

    def _refuse_input(self, error: SandkastenError) -> None:
        self.refuse(error, Input.kind)

    def refuse(self, error: SandkastenError, kind: str) -> None:
        """Tell the client that a message was not taken; the run goes on."""
        self._outbox.put(encode_message(ChannelError.of(error, id=self.id, seq=self.sent_sequence, refused=kind)))

    @property
    def sent_sequence(self) -> int:
        """The number of the last whole piece that goes out before a message that is sent now."""
        return self._lane.taken_sequence
