"""The input of one run: what a client has sent waits here, as much as was granted, until the run reads it.

Nothing of it outlives `stop`. Knows no message.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from sandkasten.api.websocket.exec_messages import STDIN_CREDIT_BYTES
from sandkasten.model.errors import ExecEnded, InvalidRequest, SandkastenError
from sandkasten.supervisor import ExecStream

PIECE_BYTES = 64 * 1024

GRANT_BYTES = STDIN_CREDIT_BYTES // 4
"""Input is granted anew in pieces of at least this size."""


class InputFeeder:
    """See the module's docstring."""

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
        """What was read and is not granted anew yet."""
        self._is_closed = False
        self._is_end_waiting = False
        self._is_feeding = False
        self._is_refused = False
        self._is_stopped = False
        self._scope = trio.CancelScope()

    def open(self, run: ExecStream) -> None:
        """Begin to hand on; what came before has waited."""
        self._run = run
        self._wake()

    def add(self, data: bytes) -> None:
        """Take bytes; those behind the end are refused. Raises `InvalidRequest` when it is more than was granted."""
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
        """End the run's input behind what was sent."""
        if not self._is_closed:
            self._is_closed = self._is_end_waiting = True
            self._wake()

    def stop(self) -> None:
        """Drop what waits: nothing is handed on, granted or refused any more."""
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
