"""The MCP server of this daemon: an actor of the tree, and an ASGI application for requests whose key was checked.

The official package (extra `[mcp]`) takes 0.6 s and 35 MB to import, which a daemon without such clients is spared: the
first request imports it, in a thread.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

import attrs
import trio

from sandkasten.api.http.guard import Receive, Scope, Send
from sandkasten.errors import InvalidRequest, NotInstalled, Overloaded

if TYPE_CHECKING:
    from sandkasten.mcp.server import Mounted

CALL_KEY = "sandkasten.mcp"
"""Where a scope carries its `McpCall`."""

_IMPORT_S = 30.0
_CLOSE_S = 5.0


@attrs.frozen
class McpCall:
    """The sender of a request, and what its URL says. `tools` None: the usual ones."""

    key_id: str
    api_key: str | None
    may_write: bool
    sandbox: str
    tools: tuple[str, ...] | None


class McpFront:
    """The server behind `/mcp`. `url` is the daemon's own address, known once the daemon listens."""

    def __init__(self) -> None:
        self._url = ""
        self._is_run = False
        self._is_wanted = trio.Event()
        self._is_ready = trio.Event()
        self._mounted: Mounted | None = None

    def listens_on(self, address: str) -> None:
        """Tell an address of the daemon: tools reach the daemon there."""
        self._url = address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Wait for the first client, then serve until cancelled."""
        self._is_run = True
        task_status.started()
        await self._is_wanted.wait()
        server = await trio.to_thread.run_sync(import_module, "sandkasten.mcp.server")
        mounted: Mounted = server.Mounted(self._url)
        try:
            async with mounted.run():
                self._mounted = mounted
                self._is_ready.set()
                await trio.sleep_forever()
        finally:
            self._mounted, self._is_ready = None, trio.Event()
            with trio.move_on_after(_CLOSE_S, shield=True):
                await mounted.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request.

        Raises:
            NotInstalled: the extra is missing.
            InvalidRequest: there is no such tool, or the name of the sandbox is malformed.
            Overloaded: the server is not ready in time.
        """
        if find_spec("mcp") is None:
            raise NotInstalled("MCP needs an extra: pip install 'sandkasten-runtime[server,mcp]'", extra="mcp")
        self._is_wanted.set()
        with trio.move_on_after(_IMPORT_S if self._is_run else 0):
            await self._is_ready.wait()
        if self._mounted is None:
            raise Overloaded("the MCP server is not ready")
        call = scope[CALL_KEY]
        try:
            application = self._mounted.application(**attrs.asdict(call, recurse=False))
        except ValueError as error:
            raise InvalidRequest(str(error), query="malformed") from None
        await application(scope, receive, send)
