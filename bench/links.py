"""Connections under trio, for load: many requests at once, over a few keep-alive connections."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from bench import daemon

AT_ONCE = 8
"""Connections for work that is not measured."""


class Link:
    """One keep-alive connection under trio, for load."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream

    async def call(self, method: str, path: str, body: object = None) -> Any:  # JSON
        await self._stream.send_all(daemon.encode(method, path, body))
        data = b""
        while (answer := daemon.decode(data)) is None:
            more = await self._stream.receive_some()
            if not more:
                raise ConnectionError("the daemon closed the connection")
            data += more
        return answer


@asynccontextmanager
async def links(address: tuple[str, int], count: int) -> AsyncIterator[Sequence[Link]]:
    streams = [await trio.open_tcp_stream(*address) for _ in range(count)]
    try:
        yield [Link(stream) for stream in streams]
    finally:
        for stream in streams:
            await trio.aclose_forcefully(stream)


async def for_each(
    address: tuple[str, int], count: int, at_once: int, work: Callable[[Link, int], Awaitable[None]]
) -> None:
    """Have `work` done for each number, over a few connections."""
    numbers = iter(range(count))

    async def worker(link: Link) -> None:
        for number in numbers:
            await work(link, number)

    async with links(address, min(at_once, count)) as opened, trio.open_nursery() as nursery:
        for link in opened:
            nursery.start_soon(worker, link)


async def make_many(address: tuple[str, int], count: int) -> list[str]:
    made: list[str] = []

    async def make(link: Link, _number: int) -> None:
        made.append((await link.call("POST", "/v1/sessions", {}))["id"])

    await for_each(address, count, AT_ONCE, make)
    return made


async def end_all(address: tuple[str, int], sessions: Sequence[str]) -> None:
    async def end(link: Link, number: int) -> None:
        await link.call("DELETE", f"/v1/sessions/{sessions[number]}")

    if sessions:
        await for_each(address, len(sessions), AT_ONCE, end)
