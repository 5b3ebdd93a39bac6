"""Requests to the broker and its answers over one socket; see `egress/brokering.py`."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import TypeVar

import attrs
import trio

from egress import brokering
from sandkasten.errors import Capacity, EgressUnavailable, InvalidRequest, SecretNotFound, StoreFailed

A = TypeVar("A")


class BrokerLink:
    """Requests, one after the other. Nothing of a request is kept or told: it may hold a value."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._turn = trio.Lock()
        self._seq = 0

    async def request(self, request: brokering.BrokerRequest, answer: type[A], fds: Sequence[int] = ()) -> A:
        """Send a request, whose `seq` is set here, and return its answer of the class `answer`.

        Raises:
            EgressUnavailable: the broker has ended, or broke the protocol.
            SecretNotFound, InvalidRequest, Capacity, StoreFailed: it refused.
        """
        async with self._turn:
            self._seq += 1
            try:
                await self._send(brokering.encode(attrs.evolve(request, seq=self._seq)), fds)
                while (found := await self._receive()).seq != self._seq:
                    pass  # the answer to a request that did not wait so long
            except (OSError, trio.ClosedResourceError, brokering.ProtocolError):
                raise EgressUnavailable("the broker of secrets is gone") from None
        if isinstance(found, brokering.BrokerFailed):
            raise _refusal(found)
        if not isinstance(found, answer):
            raise EgressUnavailable("the broker of secrets is not understood")
        return found

    async def _send(self, data: bytes, fds: Sequence[int]) -> None:
        while True:
            try:
                socket.send_fds(self._sock, [data], fds)
                return
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._sock)

    async def _receive(self) -> brokering.BrokerAnswer:
        while True:
            try:
                return brokering.decode_broker_answer(self._sock.recv(brokering.MAX_DATAGRAM_BYTES))
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._sock)


def _refusal(
    failed: brokering.BrokerFailed,
) -> SecretNotFound | InvalidRequest | Capacity | StoreFailed:
    match failed.code:
        case "UNKNOWN":
            return SecretNotFound(failed.message)
        case "FULL":
            return Capacity(failed.message)
        case "STORAGE":
            return StoreFailed(failed.message)
    return InvalidRequest(failed.message)
