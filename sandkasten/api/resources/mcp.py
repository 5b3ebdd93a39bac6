"""MCP at `/mcp`: the key is checked here, and the rest is the work of `sandkasten.mcp`, imported at the first request.

The official package (extra `[mcp]`) takes 0.6 s and 35 MB to import, which a daemon without such clients is spared. Its
own check of `Host` and `Origin` is off, since the front's is stricter.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

import attrs
import trio

from sandkasten.admission.keys import Access
from sandkasten.api.http.exchange import Exchange
from sandkasten.model.errors import InvalidRequest, NotInstalled, Overloaded

if TYPE_CHECKING:
    from sandkasten.mcp.server import Mounted

_IMPORT_S = 30.0
_CLOSE_S = 5.0
_MAX_BODY_BYTES = 4 * 1024 * 1024
_BEARER = "bearer "


@attrs.frozen
class McpQuery:
    """`sandbox`: the name of the sandbox that is meant; `tools`: names with commas between, by default the usual ones."""

    sandbox: str = "default"
    tools: str = ""


class McpFront:
    """The MCP server of this daemon, an actor of the tree. `url` is the daemon's own address, known once it listens."""

    def __init__(self) -> None:
        self.url = ""
        self._is_wanted = trio.Event()
        self._is_ready = trio.Event()
        self._mounted: Mounted | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Wait for the first client, then serve until cancelled."""
        task_status.started()
        await self._is_wanted.wait()
        server = await trio.to_thread.run_sync(import_module, "sandkasten.mcp.server")
        mounted: Mounted = server.Mounted(self.url)
        try:
            async with mounted.run():
                self._mounted = mounted
                self._is_ready.set()
                await trio.sleep_forever()
        finally:
            self._mounted, self._is_ready = None, trio.Event()
            with trio.move_on_after(_CLOSE_S, shield=True):
                await mounted.aclose()

    async def serve(self, exchange: Exchange, query: McpQuery) -> None:
        """Answer one request.

        Raises:
            NotInstalled: the extra is missing.
            InvalidRequest: there is no such tool, or the name of the sandbox is malformed.
            Overloaded: the server is not ready in time.
        """
        if find_spec("mcp") is None:
            raise NotInstalled("MCP needs the extra: pip install 'sandkasten-runtime[server,mcp]'", extra="mcp")
        self._is_wanted.set()
        with trio.move_on_after(_IMPORT_S):
            await self._is_ready.wait()
        if self._mounted is None:
            raise Overloaded("the MCP server is not ready")
        mounted, key = self._mounted, exchange.key
        try:
            await exchange.hand_over(
                lambda scope, receive, send: mounted.handle(
                    scope,
                    receive,
                    send,
                    key_id=key.id,
                    api_key=_token(exchange),
                    may_write=key.access >= Access.WRITE,
                    sandbox=query.sandbox,
                    tools=[name for name in query.tools.split(",") if name] or None,
                ),
                limit_bytes=_MAX_BODY_BYTES,
                tells_of_leaving=True,
            )
        except ValueError as error:
            raise InvalidRequest(str(error), query="malformed") from None


def _token(exchange: Exchange) -> str | None:
    """Return the key that the request came with, None if none is needed."""
    value = exchange.header(b"authorization") or ""
    return value[len(_BEARER) :].strip() if value.lower().startswith(_BEARER) else None


async def serve_mcp(exchange: Exchange) -> None:
    """Speak MCP over streamable HTTP."""
    query = exchange.query
    await exchange.mcp.serve(exchange, McpQuery(**{name: query[name] for name in ("sandbox", "tools") if name in query}))
