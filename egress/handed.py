"""The egress process's side of the broker: connections to hosts of secrets, handed over and carried all the same.

The broker gets one end of a socket pair for the client and one for the server; the other ends are here, and so are the
sockets of the network. Four copies carry a connection, so that it is counted, limited and cut as any other is.

Sources: unix(7) (SCM_RIGHTS), socketpair(2).
"""

from __future__ import annotations

import select
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress

import attrs
import trio

from egress import relay
from egress.brokering import Carry, CarryEnded, decode_carried, encode
from egress.policy import Reason
from egress.protocol import ProtocolError

_SEND_S = 10.0
_TOLD_S = 5.0
"""Time for the broker to tell how a connection ended whose sockets it has closed."""


class BrokerAway(Exception):
    """The broker can't be reached."""


@attrs.define(eq=False)
class _Handed:
    told: trio.Event = attrs.field(factory=trio.Event)
    reason: str | None = None


class HandOverLink:
    """The socket to the broker. `serve` runs until the broker goes away, after which nothing is handed over."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._seq = 0
        self._handed: dict[int, _Handed] = {}
        self._sending = trio.Lock()

    async def serve(self) -> None:
        """Hear how connections end."""
        try:
            while True:
                await trio.lowlevel.wait_readable(self._sock)
                try:
                    if not (data := self._sock.recv(4096)):
                        return
                    carried: CarryEnded = decode_carried(data)
                except BlockingIOError:
                    continue
                if (handed := self._handed.get(carried.seq)) is not None:
                    handed.reason = carried.reason
                    handed.told.set()
        except (OSError, ProtocolError):
            return
        finally:
            self.close()

    def close(self) -> None:
        """Hand over nothing more. The connections of the broker end with the broker."""
        if self._sock.fileno() >= 0:
            trio.lowlevel.notify_closing(self._sock)
            self._sock.close()
        for handed in self._handed.values():
            handed.told.set()

    async def carry(
        self,
        order: Carry,
        first: bytes,
        client: socket.socket,
        server: socket.socket,
        *,
        count_up: Callable[[int], None],
        count_down: Callable[[int], None],
    ) -> Reason | None:
        """Hand a connection over and carry it to its end; `first` are bytes of the client that were read already.
        Return the reason of the broker's check that ended it, if one did.

        Raises:
            BrokerAway: nothing was handed over.
            OSError: one side broke off.
        """
        handed, self._seq = _Handed(), self._seq + 1
        seq = self._seq
        self._handed[seq] = handed
        try:
            with ExitStack() as ends:
                pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(2)]
                (client_end, their_client), (server_end, their_server) = pairs
                for each in (client_end, server_end):
                    each.setblocking(False)
                    ends.callback(relay.close, each, with_reset=False)
                with their_client, their_server:
                    await self._send(attrs.evolve(order, seq=seq), [their_client.fileno(), their_server.fileno()])
                await relay.send_all(client_end, first)
                await _carry(client, client_end, server, server_end, count_up, count_down)
            with trio.move_on_after(_TOLD_S):
                await handed.told.wait()
        finally:
            del self._handed[seq]
        return None if handed.reason is None else _reason(handed.reason)

    async def _send(self, order: Carry, fds: list[int]) -> None:
        with trio.move_on_after(_SEND_S), suppress(OSError, ProtocolError):
            async with self._sending:
                await relay.send_message(self._sock, encode(order), fds)
                return
        raise BrokerAway


def _reason(text: str) -> Reason:
    try:
        return Reason(text)
    except ValueError:
        return Reason.ERROR


async def _carry(
    client: socket.socket,
    client_end: socket.socket,
    server: socket.socket,
    server_end: socket.socket,
    count_up: Callable[[int], None],
    count_down: Callable[[int], None],
) -> None:
    """Carry bytes between the network and the broker until the broker has ended both streams. Raises `OSError`, and
    what a count raises."""
    failures: list[Exception] = []

    async def inward(source: socket.socket, end: socket.socket) -> None:
        try:
            await relay.copy(source, end, _count_nothing, _never)
        except OSError:
            if not _has_hung_up(end):  # the network's side broke off; else the broker's last bytes are still carried
                raise

    async def outward(end: socket.socket, target: socket.socket, count: Callable[[int], None]) -> None:
        try:
            await relay.copy(end, target, count, _never)
        except OSError:
            if not _has_hung_up(end):
                raise
            relay.shut(target)  # closed with bytes unread (unix(7)): all that it has said is there

    async def one(work: Callable[..., Awaitable[None]], *arguments: object) -> None:
        try:
            await work(*arguments)
        except Exception as error:  # noqa: BLE001 - raised below, where it is no group
            failures.append(error)
            inwards.cancel_scope.cancel()

    try:
        async with trio.open_nursery() as inwards:
            inwards.start_soon(one, inward, client, client_end)
            inwards.start_soon(one, inward, server, server_end)
            async with trio.open_nursery() as outwards:
                outwards.start_soon(one, outward, server_end, server, count_up)
                outwards.start_soon(one, outward, client_end, client, count_down)
            inwards.cancel_scope.cancel()
    finally:
        if failures:  # also instead of a cancellation: a count that refuses cuts the connection, too
            raise failures[0]


def _has_hung_up(end: socket.socket) -> bool:
    """Tell whether the other end of a pair is closed."""
    poller = select.poll()
    poller.register(end, 0)
    return any(events & (select.POLLHUP | select.POLLERR) for _, events in poller.poll(0))


def _never() -> bool:
    return False


def _count_nothing(_size: int) -> None:
    """Count no byte between the network and the broker: it is counted on its way out again."""
