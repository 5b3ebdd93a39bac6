"""HTTP between a client and a server: `http.py` reads both sides, and this moves its bytes.

One task reads the client, one the server, and each of the two writers is a task of its own: an answer may come while
its request is still being sent, and a request that waited goes out when an answer ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import trio

from egress import relay
from egress.http import MAX_FEED_BYTES, HttpGuard, Step
from egress.policy import Reason

_READ_BYTES = 64 * 1024


class GuardedRelay:
    """One connection of HTTP. `count` is told of bytes up and down before they are sent, and may refuse them; `turn` is
    held while bytes are read, by one connection of the session at a time.

    `is_over`: nothing more is to be read, and what was to be sent is under way; `refused`: the cause, if a check ended
    the connection.
    """

    def __init__(
        self,
        http: HttpGuard,
        client: relay.ByteStream,
        server: relay.ByteStream,
        count: Callable[[int, int], None],
        turn: trio.Lock,
    ) -> None:
        self.is_over = False
        self.refused: Reason | None = None
        self._http = http
        self._client = client
        self._server = server
        self._count = count
        self._turn = turn
        self._to_server = relay.Writer(server)
        self._to_client = relay.Writer(client)
        self._reading_client = trio.CancelScope()
        self._is_client_waiting = False
        self._answered = trio.Event()

    @property
    def writers(self) -> tuple[relay.Writer, relay.Writer]:
        """Writers that somebody has to run."""
        return self._to_server, self._to_client

    async def requests(self, first: bytes) -> None:
        """Read the client, from its first bytes on, until its stream or the connection is over."""
        data = first
        with self._reading_client:
            while await self._feed(data, self._http.from_client, self._to_server):
                while self._is_client_waiting:
                    await self._answered.wait()
                data = await self._client.receive(_READ_BYTES)

    async def answers(self) -> None:
        """Read the server until its stream or the connection is over."""
        while await self._feed(await self._server.receive(_READ_BYTES), self._http.from_server, self._to_client):
            pass

    async def _feed(self, data: bytes, feed: Callable[[bytes], Step], writer: relay.Writer) -> bool:
        """Pass on what comes of these bytes; tell whether more are to be read."""
        for piece in _pieces(data):
            async with self._turn:  # a piece may take long: the connections of a session take their turns in one place
                step = feed(piece)
                self._pass_on(step)
                if self.is_over:
                    return False
            await writer.drained()
        if not data and step.wants_raw:
            writer.end()
        return bool(data)

    def _pass_on(self, step: Step) -> None:
        self._count(len(step.to_server), len(step.to_client))
        self._to_server.put(step.to_server)
        self._to_client.put(step.to_client)
        self._is_client_waiting = step.is_client_waiting
        if not step.is_client_waiting:
            self._answered.set()
            self._answered = trio.Event()
        if step.is_over:
            self.is_over = True
            self.refused = step.refused
            self._to_client.end()
            self._to_server.drop()
            self._reading_client.cancel()


def _pieces(data: bytes) -> Iterator[bytes]:
    """Yield bytes in the portions that the guard takes; one that is empty, for the end of a stream."""
    yield from (data[at : at + MAX_FEED_BYTES] for at in range(0, max(len(data), 1), MAX_FEED_BYTES))
