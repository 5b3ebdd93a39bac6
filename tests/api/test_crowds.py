"""Clients that take connections and send nothing, or too slowly, keep nobody else out."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio
import trio.testing

from sandkasten.api.http.guard import App, Receive, Scope, Send
from tests.api import apps
from tests.api.harness import Running, read_to_end, read_until, running_app, running_front
from tests.api.test_guard import HEALTHZ, begin_request, connect_from, wait_for_leave
from tests.waiting import patience

SILENT = 1000
KEPT_OPEN = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


def answer_late(delay_s: float) -> App:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await trio.sleep(delay_s)
        await apps.plain(scope, receive, send)

    return app


async def status_over(stream: trio.SocketStream) -> bytes:
    """Ask for `/healthz` and return the status line."""
    await stream.send_all(HEALTHZ)
    return (await read_to_end(stream)).partition(b"\r\n")[0]


async def status_from(running: Running, host: str) -> bytes:
    async with await connect_from(running, host) as stream:
        return await status_over(stream)


async def test_a_thousand_silent_connections_keep_nobody_out(tmp_path: Path) -> None:
    """With as many silent connections from one address as there may be, the same address, another one and a unix
    socket are answered within a second each, again and again."""
    path = tmp_path / "api.sock"
    async with running_front(listen=("127.0.0.1:0", f"unix:{path}")) as running, AsyncExitStack() as silent:
        for _ in range(SILENT):
            await silent.enter_async_context(await running.connect())
        for _ in range(3):
            for host in ("127.0.0.1", "127.0.0.2"):
                with trio.fail_after(patience(1.0)):
                    assert b" 200 " in await status_from(running, host)
            with trio.fail_after(patience(1.0)):
                async with await trio.open_unix_socket(str(path)) as stream:
                    assert b" 200 " in await status_over(stream)


@pytest.mark.parametrize("head", [b"", b"GET /hea", KEPT_OPEN + b"GET /hea"])
async def test_a_head_has_its_time(head: bytes) -> None:
    """A head that does not come, or only in part, first or later, ends the connection, however slowly it drips."""
    limit_s = 0.4
    async with running_app(apps.plain, head_timeout_s=limit_s) as running, await running.connect() as stream:
        began = trio.current_time()
        await stream.send_all(head)
        async with trio.open_nursery() as nursery:
            if head:
                nursery.start_soon(drip, stream)
            await read_to_end(stream)
            nursery.cancel_scope.cancel()
        assert limit_s * 0.8 < trio.current_time() - began < limit_s + patience(2.0)


async def drip(stream: trio.SocketStream) -> None:
    """Send a byte of a head now and then, until the server has gone."""
    try:
        while True:
            await stream.send_all(b"x")
            await trio.sleep(0.05)
    except trio.BrokenResourceError:
        pass


async def test_a_request_in_service_and_an_idle_client_have_longer() -> None:
    """The time for a head bounds neither an answer that takes long nor the pause between two requests."""
    limit_s = 0.2
    app = answer_late(2 * limit_s)
    async with running_app(app, head_timeout_s=limit_s) as running, await running.connect() as stream:
        for _ in range(2):
            await stream.send_all(KEPT_OPEN)
            assert b" 200 " in await read_until(stream, b"\r\n\r\nok")
            await trio.sleep(2 * limit_s)


async def test_one_address_has_its_share() -> None:
    """Three quarters of the connections may be one address's, when all are busy; others are served then."""
    async with running_app(wait_for_leave, max_connections=4) as running, AsyncExitStack() as busy:
        for _ in range(3):
            await busy.enter_async_context(await begin_request(running))
        assert b" 503 " in await status_from(running, "127.0.0.1")
        assert b" 200 " in await status_from(running, "127.0.0.2")


async def test_room_is_kept_for_a_unix_socket(tmp_path: Path) -> None:
    """With the rest taken by busy clients of several addresses, a client of the unix socket is served."""
    path = tmp_path / "api.sock"
    listen = ("127.0.0.1:0", f"unix:{path}")
    async with running_app(wait_for_leave, listen=listen, max_connections=16) as running, AsyncExitStack() as busy:
        for number in range(15):
            await busy.enter_async_context(await begin_request(running, f"127.0.0.{1 + number // 8}"))
        assert b" 503 " in await status_from(running, "127.0.0.3")
        async with await trio.open_unix_socket(str(path)) as stream:
            assert b" 200 " in await status_over(stream)
        await trio.testing.wait_all_tasks_blocked()


async def test_the_oldest_idle_connection_gives_way() -> None:
    """A busy connection and a younger idle one stay; the client that was idle for longest is closed."""
    async with running_app(wait_for_leave, max_connections=4) as running, AsyncExitStack() as clients:
        busy = await clients.enter_async_context(await begin_request(running))
        idle = [await clients.enter_async_context(await running.connect()) for _ in range(2)]
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert b" 200 " in await status_from(running, "127.0.0.1")
        assert await read_to_end(idle[0]) == b""
        assert b" 200 " in await status_over(idle[1])
        with trio.move_on_after(0.1) as scope:
            await busy.receive_some(1)
        assert scope.cancelled_caught
