"""A storm of lease ends: the time until every session is gone, and the latency of a bystander's commands meanwhile."""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime
from functools import partial
from typing import Any

import attrs
import trio

from bench.soak.latency import open_session, p99, sample_ms
from bench.soak.ledger import Ledger
from bench.soak.site import Client, Site

_AT_ONCE = 4
_LEAD_S = 10
"""Seconds from the last change of a lease until the first lease ends."""

_ALONE_S = 5.0
_PATIENCE_S = 120.0
_PAUSE_S = 0.02
_LOOK_S = 0.1


@attrs.frozen
class Storm:
    """`gone_s`: from the moment the first lease ended until none of the sessions was left. Milliseconds are of a small
    command of a bystander, before and meanwhile."""

    sessions: int
    gone_s: float
    alone_p99_ms: float
    beside_p99_ms: float


async def run(site: Site, ledger: Ledger, *, sessions: int) -> Storm:
    """Make sessions, have their leases end in the same second, and look until the last is gone."""
    async with site.client() as client:
        bystander = await open_session(client)
        places = await _make(site, sessions)
        sample = partial(sample_ms, client, ledger, bystander, pause_s=_PAUSE_S, beside="a storm")
        alone = await sample(seconds=_ALONE_S)
        ends_at = await _shorten(client, ledger, places)
        await trio.sleep(max(0.0, ends_at - time.time()))
        beside: list[float] = []
        while await _some_are_left(site, set(places)):
            beside += await sample(seconds=_LOOK_S)
            if time.time() - ends_at > _PATIENCE_S:
                ledger.violate("sessions whose leases ended are still there")
                break
        gone_s = time.time() - ends_at
        for place in places:
            _judge(ledger, (await client.call("GET", place)).body)
        await client.call("DELETE", bystander)
    return Storm(sessions, gone_s, p99(alone), p99(beside))


async def _make(site: Site, sessions: int) -> list[str]:
    places: list[str] = []

    async def make(number: int) -> None:
        async with site.client() as client:
            for _ in range(number):
                places.append(await open_session(client))

    async with trio.open_nursery() as nursery:
        for worker in range(_AT_ONCE):
            nursery.start_soon(make, len(range(worker, sessions, _AT_ONCE)))
    return places


async def _shorten(client: Client, ledger: Ledger, places: list[str]) -> float:
    """Give each session the lifetime with which it ends in one second, whose begin is returned (Unix time)."""
    ends_at = math.ceil(time.time() + len(places) * _PAUSE_S) + _LEAD_S
    for place in places:
        made_at = datetime.fromisoformat((await client.call("GET", place)).body["created_at"]).astimezone(UTC)
        answer = await client.call("PATCH", place, {"max_lifetime_seconds": math.ceil(ends_at - made_at.timestamp())})
        if not answer.is_ok:
            ledger.violate(f"change of a lease: {answer.status} {answer.body}")
    if time.time() > ends_at:
        ledger.violate("the leases were changed too slowly to end in one second")
    return float(ends_at)


async def _some_are_left(site: Site, places: set[str]) -> bool:
    async with site.client() as looker:
        listed = (await looker.call("GET", "/v1/sessions?limit=1000")).body
    return any(f"/v1/sessions/{each['id']}" in places for each in listed)


def _judge(ledger: Ledger, session: dict[str, Any]) -> None:  # JSON
    if (session["status"], session.get("end_reason")) != ("expired", "max_lifetime"):
        ledger.violate(f"a lease that ended: {session['status']}, {session.get('end_reason')}")
    else:
        ledger.count("leases that ended in one second")
