"""The front as a child of the tree: a listener that dies under it costs moments."""

from __future__ import annotations

import socket
from contextlib import closing

import httpx
import trio

from sandkasten.actors.supervision import ChildSpec, ChildSupervisor
from sandkasten.api.app import make_app
from sandkasten.api.http.listen import listen_early
from sandkasten.api.http.server import serve
from tests.api.harness import KEY, make_settings
from tests.fakes.tree import open_scripted
from tests.waiting import patience, until


def free_port() -> int:
    """Return a port that is free now. One that the kernel chooses at the bind is lost with the listener."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


async def test_a_listener_that_dies_is_listened_on_anew() -> None:
    """The front ends, is restarted alone, and has the port that it had, which it could not bind again itself."""
    settings, starts = make_settings(graceful_timeout_s=0.2), []
    with closing(listen_early([f"127.0.0.1:{free_port()}"], loopback_only=False)) as early:
        async with open_scripted() as tree:
            app = make_app(tree.supervisor, settings=settings, shares=tree.supervisor.shares)

            async def start_api(*, task_status: trio.TaskStatus[list[str]]) -> None:
                starts.append(trio.current_time())
                await serve(app, settings, early=early, task_status=task_status)

            async def answers() -> bool:
                headers = {"Authorization": f"Bearer {KEY}"}
                try:
                    async with httpx.AsyncClient(headers=headers, timeout=patience(1.0)) as client:
                        return (await client.get(f"{early.addresses[0]}/v1/sessions")).status_code == 200
                except httpx.HTTPError:
                    return False

            async with trio.open_nursery() as nursery:
                await nursery.start(ChildSupervisor([ChildSpec("api", start_api)]).run)
                assert await answers()
                early.listening[0].shutdown(socket.SHUT_RDWR)

                async def has_restarted() -> bool:
                    return len(starts) > 1

                await until(has_restarted)
                await until(answers)
                nursery.cancel_scope.cancel()
    assert len(starts) == 2
