"""A session that behaves badly, and what others notice: the 99th percentile of a small command, beside and alone."""

from __future__ import annotations

import statistics

import attrs
import trio

from bench.soak.latency import open_session, p99, sample_ms
from bench.soak.ledger import Ledger
from bench.soak.site import Site, Unreachable

BAD_NEIGHBOURS = {
    "fork bomb": "b() { b | b & }; b; sleep 600",
    "disk filler": "while :; do dd if=/dev/zero of=/home/sandbox/full bs=1M status=none; rm /home/sandbox/full; done",
    "CPU burner": "for i in 1 2 3 4; do while :; do :; done & done; wait",
    "memory thrash": "while :; do python3 -c 'x = [bytearray(1 << 20) for _ in range(4000)]'; done",
}
_WORKERS = 4
_PAUSE_S = 0.01


@attrs.frozen
class Neighbourhood:
    """Milliseconds of a small command in other sessions, while `noise` goes on (None: nobody disturbs)."""

    noise: str | None
    count: int
    median_ms: float
    p99_ms: float


async def run(site: Site, ledger: Ledger, *, seconds: float) -> list[Neighbourhood]:
    """Measure alone, then beside each bad neighbour, each for so long."""
    async with site.client() as client:
        places = [await open_session(client) for _ in range(_WORKERS)]
        found = [await _measure(site, ledger, places, None, seconds)]
        for noise in BAD_NEIGHBOURS:
            found.append(await _measure(site, ledger, places, noise, seconds))
        for place in places:
            await client.call("DELETE", place)
    return found


async def _measure(site: Site, ledger: Ledger, places: list[str], noise: str | None, seconds: float) -> Neighbourhood:
    samples: list[float] = []
    async with site.client() as client, trio.open_nursery() as nursery:
        bad = await open_session(client) if noise else None
        if bad and noise:
            nursery.start_soon(_disturb, site, bad, BAD_NEIGHBOURS[noise])
            await trio.sleep(1.0)
        async with trio.open_nursery() as workers:
            for place in places:
                workers.start_soon(_ask, site, ledger, place, seconds, samples)
        if bad:
            gone = await client.call("DELETE", bad)
            if not gone.is_ok:
                ledger.violate(f"destroy of a bad neighbour ({noise}): {gone.status} {gone.body}")
        nursery.cancel_scope.cancel()
    return Neighbourhood(noise, len(samples), statistics.median(samples), p99(samples))


async def _disturb(site: Site, place: str, command: str) -> None:
    async with site.client() as client:
        try:
            await client.call("POST", f"{place}/exec", {"cmd": command, "timeout_ms": 120_000})
        except Unreachable:
            return


async def _ask(site: Site, ledger: Ledger, place: str, seconds: float, samples: list[float]) -> None:
    async with site.client() as client:
        samples += await sample_ms(client, ledger, place, seconds=seconds, pause_s=_PAUSE_S, beside="a bad neighbour")
