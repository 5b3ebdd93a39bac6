"""Whether the daemon lives (public) and whether it can serve (not public: it says what is broken)."""

from __future__ import annotations

from sandkasten.api.http.errors import Answer, json_answer
from sandkasten.api.http.exchange import Exchange


async def healthz(_exchange: Exchange) -> Answer:
    """GET /healthz; the event loop turns and both halves of the front answer."""
    return json_answer({"status": "ok"})


async def readyz(exchange: Exchange) -> Answer:
    """GET /readyz; 503 until every check is ok."""
    readiness = await exchange.supervisor.readiness()
    view = {"ready": readiness.ready, "checks": dict(readiness.checks)}
    return json_answer(view, status=200 if readiness.ready else 503)
