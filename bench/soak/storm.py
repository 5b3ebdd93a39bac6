"""All leases end within one second: how long until every session is gone, and what somebody else notices of it."""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime
from typing import Any

import attrs
import trio

from bench.soak.ledger import Ledger
from bench.soak.site import Client, Site

_AT_ONCE = 4
_LEAD_S = 10
"""From the last change of a lease until the first ends."""

_ALONE_S = 5.0
_PATIENCE_S = 120.0
_PAUSE_S = 0.02


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
        bystander = f"/v1/sessions/{(await client.call('POST', '/v1/sessions', {})).body['id']}"
        ids = await _make(site, sessions)
        alone = await _measure(client, ledger, bystander, until=trio.current_time() + _ALONE_S)
        ends_at = await _shorten(client, ledger, ids)
        await trio.sleep(max(0.0, ends_at - time.time()))
        beside: list[float] = []
        gone_s = await _wait_gone(site, ledger, set(ids), client, bystander, beside, ends_at)
        for session_id in ids:
            _judge(ledger, (await client.call("GET", f"/v1/sessions/{session_id}")).body)
        await client.call("DELETE", bystander)
    return Storm(sessions, gone_s, _p99(alone), _p99(beside))


async def _make(site: Site, sessions: int) -> list[str]:
    ids: list[str] = []

    async def make(number: int) -> None:
        async with site.client() as client:
            for _ in range(number):
                ids.append((await client.call("POST", "/v1/sessions", {})).body["id"])

    async with trio.open_nursery() as nursery:
        for worker in range(_AT_ONCE):
            nursery.start_soon(make, len(range(worker, sessions, _AT_ONCE)))
    return ids


async def _shorten(client: Client, ledger: Ledger, ids: list[str]) -> float:
    """Give each session the lifetime with which it ends in one second, whose begin is returned (Unix time)."""
    ends_at = math.ceil(time.time() + len(ids) * _PAUSE_S) + _LEAD_S
    for session_id in ids:
        place = f"/v1/sessions/{session_id}"
        made_at = datetime.fromisoformat((await client.call("GET", place)).body["created_at"]).astimezone(UTC)
        answer = await client.call("PATCH", place, {"max_lifetime_seconds": math.ceil(ends_at - made_at.timestamp())})
        if not answer.is_ok:
            ledger.violate(f"change of a lease: {answer.status} {answer.body}")
    if time.time() > ends_at:
        ledger.violate("the leases were changed too slowly to end in one second")
    return float(ends_at)


async def _wait_gone(
    site: Site,
    ledger: Ledger,
    ids: set[str],
    client: Client,
    bystander: str,
    samples: list[float],
    began: float,
) -> float:
    async with site.client() as looker:
        while time.time() - began < _PATIENCE_S:
            samples += await _measure(client, ledger, bystander, until=trio.current_time() + 5 * _PAUSE_S)
            listed = (await looker.call("GET", "/v1/sessions?limit=1000")).body
            if not ids & {each["id"] for each in listed}:
                return time.time() - began
    ledger.violate("sessions whose leases ended are still there")
    return math.inf


async def _measure(client: Client, ledger: Ledger, place: str, *, until: float) -> list[float]:
    samples: list[float] = []
    while trio.current_time() < until:
        began = time.perf_counter()
        answer = await client.call("POST", f"{place}/exec", {"cmd": ":"})
        samples.append((time.perf_counter() - began) * 1000)
        if not answer.is_ok:
            ledger.violate(f"exec beside a storm: {answer.status} {answer.body}")
        await trio.sleep(_PAUSE_S)
    return samples


def _judge(ledger: Ledger, session: dict[str, Any]) -> None:  # JSON
    if (session["status"], session.get("end_reason")) != ("expired", "max_lifetime"):
        ledger.violate(f"a lease that ended: {session['status']}, {session.get('end_reason')}")
    else:
        ledger.count("leases that ended in one second")


def _p99(samples: list[float]) -> float:
    return sorted(samples)[math.ceil(0.99 * len(samples)) - 1]
