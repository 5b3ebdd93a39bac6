"""The API keys, without their secrets, and what each has: for administrators to look at. Keys are made elsewhere."""

from __future__ import annotations

from typing import Any

import attrs

from sandkasten.api.http.errors import Answer, json_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.log import rfc3339_or_none
from sandkasten.model.keys import CONFIGURED, ApiKey, KeyUsage


async def list_keys(exchange: Exchange) -> Answer:
    """GET /v1/keys; the configured one first."""
    shares = exchange.shares
    keys = [CONFIGURED, *shares.ring.keys.values()]
    body = {"keys": [key_view(key, shares.usage(key)) for key in keys]}
    return json_answer(body if shares.ring.trouble is None else body | {"trouble": shares.ring.trouble})


def key_view(key: ApiKey, usage: KeyUsage) -> dict[str, Any]:  # JSON values
    """Return a key as administrators see it."""
    return {
        "id": key.id,
        "name": key.name,
        "access": key.access.name.lower(),
        "label": None if key.label is None else attrs.asdict(key.label),
        "created_at": rfc3339_or_none(key.created_at),
        "expires_at": rfc3339_or_none(key.expires_at),
        "last_used_at": rfc3339_or_none(usage.last_used_at),
        "quota": attrs.asdict(key.quota),
        "usage": {name: value for name, value in attrs.asdict(usage).items() if name != "last_used_at"},
    }
