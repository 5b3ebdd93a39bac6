"""Named persistent shells of a session: open, list, close."""

from __future__ import annotations

from sandkasten.api.http.errors import json_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.resources.run_views import shell_view
from sandkasten.api.resources.runschemas import ShellRequest
from sandkasten.api.resources.schemas import parse


async def open_shell(exchange: Exchange) -> None:
    """POST /v1/sessions/{id}/shells"""
    request = parse(await exchange.read_json_body(), ShellRequest)
    shell = await exchange.supervisor.open_shell(exchange.session_id, request.to_spec())
    await exchange.answer(json_answer(shell_view(shell), status=201))


async def list_shells(exchange: Exchange) -> None:
    """GET /v1/sessions/{id}/shells; the default one first."""
    shells = await exchange.supervisor.shells(exchange.session_id)
    await exchange.answer(json_answer({"shells": [shell_view(shell) for shell in shells]}))


async def close_shell(exchange: Exchange) -> None:
    """DELETE /v1/sessions/{id}/shells/{name}"""
    await exchange.supervisor.close_shell(exchange.session_id, exchange.params["name"])
    await exchange.answer(json_answer({"ok": True}))
