"""Create, run, destroy, many thousand times: nothing may pile up, in the machine or in the daemon."""

from __future__ import annotations

import time
from collections.abc import Sequence

import attrs
import trio

from bench.measure import slope
from bench.soak import machine
from bench.soak.ledger import Ledger
from bench.soak.site import Client, Site

_SAMPLES = 20
_WARM_SHARE = 0.2


@attrs.frozen
class CycleReport:
    """`rss_slope_bytes`: growth of a process per cycle, after the first fifth, by process name."""

    cycles: int
    seconds: float
    rss_slope_bytes: dict[str, float]
    first: dict[str, machine.Usage]
    last: dict[str, machine.Usage]


async def run(site: Site, ledger: Ledger, *, cycles: int, at_once: int) -> CycleReport:
    """Do so many cycles, `at_once` of them beside each other."""
    left = iter(range(cycles))
    done = 0
    samples: list[tuple[int, dict[str, machine.Usage]]] = []
    began = time.monotonic()

    async def work() -> None:
        nonlocal done
        async with site.client() as client:
            for number in left:
                await _cycle(client, ledger, number)
                done += 1
                if done % max(1, cycles // _SAMPLES) == 0:
                    samples.append((done, _usage(site)))

    async with trio.open_nursery() as nursery:
        for _ in range(at_once):
            nursery.start_soon(work)
    ledger.count("cycles", done)
    kept = [each for each in samples if each[0] >= _WARM_SHARE * cycles] or samples
    return CycleReport(done, time.monotonic() - began, _slopes(kept), kept[0][1], kept[-1][1])


async def _cycle(client: Client, ledger: Ledger, number: int) -> None:
    made = await client.call("POST", "/v1/sessions", {})
    if not made.is_ok:
        ledger.violate(f"create: {made.status} {made.body}")
        return
    ledger.count(f"cycles of a session by {made.body['acquire_source']}")
    place = f"/v1/sessions/{made.body['id']}"
    ran = await client.call("POST", f"{place}/exec", {"cmd": f"echo {number} > n; cat n"})
    if not ran.is_ok or ran.body["output"] != f"{number}\n":
        ledger.violate(f"exec: {ran.status} {ran.body}")
    gone = await client.call("DELETE", place)
    if not gone.is_ok:
        ledger.violate(f"destroy: {gone.status} {gone.body}")


def _usage(site: Site) -> dict[str, machine.Usage]:
    found = {"daemon": machine.Usage.of(site.pid)}
    for pid in machine.fork_servers():
        found["fork server"] = machine.Usage.of(pid)
    return found


def _slopes(samples: Sequence[tuple[int, dict[str, machine.Usage]]]) -> dict[str, float]:
    names = set.intersection(*(set(each) for _, each in samples))
    if len(samples) < 2:
        return {}
    return {name: slope([(count, each[name].resident_bytes) for count, each in samples]) for name in sorted(names)}
