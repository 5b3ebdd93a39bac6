"""MCP at `/mcp`: whose request it is, and what its URL says of sandbox and tools. See `sandkasten.mcp`."""

from __future__ import annotations

import attrs

from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.mcp import CALL_KEY, McpCall
from sandkasten.api.resources.fields import read_query
from sandkasten.model.keys import Access

_MAX_BODY_BYTES = 4 * 1024 * 1024
_BEARER = "bearer "


@attrs.frozen
class McpQuery:
    """`sandbox`: the name of the sandbox that is meant; `tools`: names of tools with commas between, else the usual."""

    sandbox: str = "default"
    tools: str | None = None


async def serve_mcp(exchange: Exchange) -> None:
    """Speak MCP (streamable HTTP), in both eras of the protocol."""
    query = read_query(exchange, McpQuery)
    header = exchange.header(b"authorization") or ""
    exchange.scope[CALL_KEY] = McpCall(
        key_id=exchange.key.id,
        api_key=header[len(_BEARER) :].strip() if header.lower().startswith(_BEARER) else None,
        may_write=exchange.key.access >= Access.WRITE,
        sandbox=query.sandbox,
        tools=None if query.tools is None else tuple(query.tools.split(",")),
    )
    await exchange.hand_over(exchange.mcp, limit_bytes=_MAX_BODY_BYTES, tells_of_leaving=True)
