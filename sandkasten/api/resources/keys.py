"""The API keys, without their secrets, and what each has in use. Keys are made elsewhere (`sandkasten key`)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import attrs

from sandkasten.api.http.errors import Answer, json_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.json import Body
from sandkasten.model.keys import CONFIGURED, ApiKey, KeyUsage, Label, Quota
from sandkasten.model.network import NetworkMode


@attrs.frozen
class KeyUsageBody(Body):
    """Amounts that a key has in use at one moment. `execs` counts runs."""

    sessions: int
    cpu: float
    memory_mb: int
    disk_mb: int
    execs: int


@attrs.frozen(kw_only=True)
class KeyBody(Body):
    """An API key. `label` null: the key reaches everything of its access. `max_network` null: as the server allows."""

    id: str
    name: str
    access: str
    label: Label | None
    created_at: datetime | None
    expires_at: datetime | None
    last_used_at: datetime | None
    quota: Quota
    usage: KeyUsageBody
    max_network: NetworkMode | None

    @classmethod
    def of(cls, key: ApiKey, usage: KeyUsage) -> KeyBody:
        """Return a key as administrators see it."""
        return cls.take(
            key, access=key.access.name.lower(), last_used_at=usage.last_used_at, usage=KeyUsageBody.take(usage)
        )


@attrs.frozen
class KeysBody(Body):
    """All API keys. `trouble` says why the file of keys could not be read, if so."""

    keys: Sequence[KeyBody]
    trouble: str | None = None


async def list_keys(exchange: Exchange) -> Answer:
    """List the API keys, the configured one first."""
    shares = exchange.shares
    keys = [CONFIGURED, *shares.ring.keys.values()]
    return json_answer(KeysBody([KeyBody.of(key, shares.usage(key)) for key in keys], shares.ring.trouble))
