"""The order of a soak: cycles, a crowd with kills, a restart under all sessions, a storm of lease ends, bad neighbours,
and then the count.

Owns the daemon's life from the first start to the last stop. Whatever is there afterwards and was not before is a leak.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import attrs
import trio

from bench.soak import cycles, machine, neighbours, storm
from bench.soak.crowd import Crowd
from bench.soak.faults import Faults
from bench.soak.ledger import Ledger
from bench.soak.site import Site, count_tasks

_QUIET_S = 30.0
_LOOK_S = 0.25


@attrs.frozen
class Size:
    """Sizes of a soak's parts. Seconds are of wall clock."""

    cycles: int
    cycles_at_once: int
    sessions: int
    faults_s: float
    fault_every_s: float
    step_pause_s: float
    noise_s: float
    seed: int


@attrs.frozen
class Tasks:
    """Tasks of daemons without sessions: of the first as it has started and after all cycles, and of the last, which
    outlived the kills, after everything is gone.
    """

    at_start: int
    after_cycles: int
    at_end: int

    @property
    def growth(self) -> int:
        return max(self.after_cycles, self.at_end) - self.at_start


@attrs.frozen
class Phases:
    """Measurements of each part. `restarts_s`: from a daemon's death until its successor was ready; `adopted`: how many
    sessions answered with their shell state after the last restart, the last of them after `adoption_s`.
    """

    cycles: cycles.CycleReport
    opening_s: float
    restarts_s: list[float]
    adopted: int
    adoption_s: float
    storm: storm.Storm
    tasks: Tasks
    neighbours: list[neighbours.Neighbourhood]


@attrs.frozen
class Report:
    """Findings of a soak, which fails unless `left` and `ledger.violations` are empty."""

    size: Size
    seconds: float
    phases: Phases
    ledger: Ledger
    left: Mapping[str, int]
    left_names: Mapping[str, int]
    dying_cgroups: int
    log: list[str]

    @property
    def is_good(self) -> bool:
        is_whole = not self.ledger.violations and self.phases.adopted == self.size.sessions
        return is_whole and not self.left and self.phases.tasks.growth <= 0


async def soak(size: Size) -> Report:
    """Run all of it and return what was found; the machine is as it was, or the report says what is left."""
    began = time.monotonic()
    machine.adopt_orphans()
    before = machine.Inventory.take()
    ledger = Ledger()
    with tempfile.TemporaryDirectory(prefix=machine.SCRATCH) as scratch:
        site = Site(_data_dir(Path(scratch)), _settings(size))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(site.reap_for_ever)
            try:
                await site.start()
                found = await _phases(site, ledger, size)
                await site.stop()
                log = site.errors()
            except BaseException:
                site.destroy_leftovers()
                raise
            nursery.cancel_scope.cancel()
    after = await _quiet(before)
    left = after.more_than(before)
    return Report(
        size=size,
        seconds=time.monotonic() - began,
        phases=found,
        ledger=ledger,
        left=left,
        left_names=dict(machine.count_names()) if left else {},
        dying_cgroups=max(0, after.dying_cgroups - before.dying_cgroups),
        log=log,
    )


async def _phases(site: Site, ledger: Ledger, size: Size) -> Phases:
    tasks_at_start = await _count_tasks(site)
    cycled = await cycles.run(site, ledger, cycles=size.cycles, at_once=size.cycles_at_once)
    tasks_after_cycles = await _count_tasks(site, wanted=tasks_at_start)
    crowd = Crowd(site, ledger, random.Random(size.seed), size=size.sessions)
    faults = Faults(site, ledger, random.Random(size.seed + 1), every_s=size.fault_every_s)
    opening_s = await crowd.open_all()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(crowd.work, size.step_pause_s)
        nursery.start_soon(faults.go_on)
        await trio.sleep(size.faults_s)
        await faults.each_once.wait()
        nursery.cancel_scope.cancel()
    await crowd.settle()
    adoption_began = time.monotonic()
    await site.kill()
    await site.start()
    adopted = await crowd.count_answering()
    adoption_s = time.monotonic() - adoption_began
    await crowd.check_files()
    await crowd.close_all()
    stormed = await storm.run(site, ledger, sessions=size.sessions)
    noise = await neighbours.run(site, ledger, seconds=size.noise_s)
    tasks = Tasks(tasks_at_start, tasks_after_cycles, await _count_tasks(site, wanted=tasks_at_start))
    return Phases(cycled, opening_s, faults.restarts_s, adopted, adoption_s, stormed, tasks, noise)


async def _count_tasks(site: Site, *, wanted: int = 0) -> int:
    """Return how many tasks the daemon has when that stays the same, or as soon as there are no more than wanted."""
    end = time.monotonic() + _QUIET_S
    async with site.client() as client:
        before, now = -1, await count_tasks(client)
        while (now > wanted if wanted else now != before) and time.monotonic() < end:
            await trio.sleep(_LOOK_S)
            before, now = now, await count_tasks(client)
    return now


async def _quiet(before: machine.Inventory) -> machine.Inventory:
    """Look until nothing is left, or until so much time has passed that the rest is not going to vanish."""
    end = time.monotonic() + _QUIET_S
    while True:
        machine.reap_orphans(set())
        now = machine.Inventory.take()
        if not now.more_than(before) or time.monotonic() > end:
            return now
        await trio.sleep(_LOOK_S)


def _data_dir(scratch: Path) -> Path:
    """Make a data directory below a directory that the daemon's own user can pass through."""
    scratch.chmod(0o755)
    path = scratch / "data"
    path.mkdir()
    return path


def _settings(size: Size) -> dict[str, str]:
    """A pool is smaller than the demand, so that some sessions are claimed and some are made."""
    return {
        "SANDKASTEN_SERVER_MAX_SESSIONS": str(2 * size.sessions + 2 * size.cycles_at_once + 16),
        "SANDKASTEN_POOL_ENABLED": "true",
        "SANDKASTEN_POOL_IMAGES": f"python={size.cycles_at_once}",
    }
