"""Latency of a small command, as seen by a client that asks over HTTP again and again."""

from __future__ import annotations

import math
import time

import trio

from bench.soak.ledger import Ledger
from bench.soak.site import Client


async def open_session(client: Client) -> str:
    """Make a session whose shell has run something already; return its path."""
    answer = await client.call("POST", "/v1/sessions", {})
    place = f"/v1/sessions/{answer.body['id']}"
    await client.call("POST", f"{place}/exec", {"cmd": ":"})
    return place


async def sample_ms(
    client: Client, ledger: Ledger, place: str, *, seconds: float, pause_s: float, beside: str
) -> list[float]:
    """Run `:` in the session at `place` for so long, with a pause after each command; return each latency in
    milliseconds.

    A command that fails is a violation, named with `beside`.
    """
    samples: list[float] = []
    end = trio.current_time() + seconds
    while trio.current_time() < end:
        began = time.perf_counter()
        answer = await client.call("POST", f"{place}/exec", {"cmd": ":"})
        samples.append((time.perf_counter() - began) * 1000)
        if not answer.is_ok:
            ledger.violate(f"exec beside {beside}: {answer.status} {answer.body}")
        await trio.sleep(pause_s)
    return samples


def p99(samples: list[float]) -> float:
    """Return the 99th percentile (nearest rank) of at least one sample."""
    return sorted(samples)[math.ceil(0.99 * len(samples)) - 1]
