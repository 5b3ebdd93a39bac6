"""Ends of a handler's work when its client leaves, seen without a socket: whichever side notices first."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from sandkasten.api.http.connection import ClientGone
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.guard import Message
from sandkasten.api.http.mcp import McpFront
from sandkasten.api.http.measured import FrontMetrics
from sandkasten.api.http.zstandard import Zstandard
from sandkasten.errors import DiskFull
from tests.api.harness import make_settings
from tests.fakes.tree import open_scripted


@asynccontextmanager
async def open_exchange(*messages: Message) -> AsyncIterator[Exchange]:
    """Make an exchange whose client sends `messages` and then nothing."""
    waiting = list(messages)

    async def receive() -> Message:
        if not waiting:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        return waiting.pop(0)

    async def send(_message: Message) -> None:
        await trio.lowlevel.checkpoint()

    scope = {"type": "http", "method": "POST", "headers": [], "query_string": b""}
    async with open_scripted() as tree:
        yield Exchange(
            scope,
            receive,
            send,
            supervisor=tree.supervisor,
            settings=make_settings(),
            shares=tree.supervisor.shares,
            metrics=FrontMetrics(),
            zstandard=Zstandard(),
            mcp=McpFront(),
        )


async def test_work_that_ends_gives_its_value() -> None:
    """The watcher is stopped with it."""

    async def work() -> int:
        await trio.lowlevel.checkpoint()
        return 42

    async with open_exchange() as exchange:
        assert await exchange.until_disconnect(work) == 42


async def test_a_disconnect_cancels_the_work() -> None:
    """The work ends with one exception, not a group."""
    async with open_exchange({"type": "http.disconnect"}) as exchange:
        with pytest.raises(ClientGone):
            await exchange.until_disconnect(trio.sleep_forever)


@pytest.mark.parametrize("error", [ClientGone(), DiskFull("no space left")])
async def test_what_the_work_raises_comes_out_as_it_is(error: Exception) -> None:
    """A write that fails may notice the client's leaving first; a typed error keeps its type."""

    async def work() -> None:
        await trio.lowlevel.checkpoint()
        raise error

    async with open_exchange() as exchange:
        with pytest.raises(type(error)):
            await exchange.until_disconnect(work)


async def test_a_client_gone_from_within_a_nursery_comes_out_alone() -> None:
    """Handlers have nurseries of their own."""

    async def work() -> None:
        async with trio.open_nursery():
            raise ClientGone

    async with open_exchange() as exchange:
        with pytest.raises(ClientGone):
            await exchange.until_disconnect(work)


async def test_a_body_that_stops_in_the_middle_is_a_client_gone() -> None:
    """Half a body is never taken for a whole one."""
    half: Message = {"type": "http.request", "body": b"{", "more_body": True}
    async with open_exchange(half, {"type": "http.disconnect"}) as exchange:
        with pytest.raises(ClientGone):
            await exchange.read_body(limit_bytes=100)
