"""Kills by SIGKILL of PID 1s and shells of sessions, of the fork server, of its helpers, and of the daemon."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Awaitable, Callable

import trio

from bench.soak import machine
from bench.soak.ledger import Ledger
from bench.soak.site import Site

Kill = Callable[[], Awaitable[None]]


class Faults:
    """Kills every `every_s` seconds, of a kind chosen by chance; a killed daemon is started again at once."""

    def __init__(self, site: Site, ledger: Ledger, chance: random.Random, *, every_s: float) -> None:
        self._site, self._ledger, self._chance = site, ledger, chance
        self._every_s = every_s
        self._kinds: list[tuple[int, str, Kill]] = [
            (8, "PID 1 of a session", self._kill_init),
            (8, "a shell", self._kill_shell),
            (3, "the fork server", self._kill_fork_server),
            (2, "a builder", self._kill_builder),
            (2, "a cgroup maker", self._kill_cgroup_maker),
            (2, "a cgroup emptier", self._kill_cgroup_emptier),
            (2, "the daemon", self._kill_daemon),
        ]
        self.restarts_s: list[float] = []
        self.each_once = trio.Event()

    async def go_on(self) -> None:
        """Kill until cancelled; every kind once, then by weight."""
        first = list(self._kinds)
        self._chance.shuffle(first)
        while True:
            await trio.sleep(self._every_s)
            weights = [weight for weight, _, _ in self._kinds]
            _, name, kill = first.pop() if first else self._chance.choices(self._kinds, weights)[0]
            await kill()
            self._ledger.count(f"killed: {name}")
            if not first:
                self.each_once.set()

    async def _kill_init(self) -> None:
        self._kill_one_of(machine.named(machine.INIT))

    async def _kill_shell(self) -> None:
        inits = machine.named(machine.INIT)
        if inits:
            self._kill_one_of(list(machine.children_of(self._chance.choice(inits))))

    async def _kill_fork_server(self) -> None:
        self._kill_one_of(machine.fork_servers())

    async def _kill_builder(self) -> None:
        self._kill_one_of(machine.named(machine.BUILDER))

    async def _kill_cgroup_maker(self) -> None:
        self._kill_one_of(machine.named(machine.CGROUP_MAKER))

    async def _kill_cgroup_emptier(self) -> None:
        self._kill_one_of(machine.named(machine.CGROUP_EMPTIER))

    async def _kill_daemon(self) -> None:
        with trio.CancelScope(shield=True):  # a daemon that is dead when the run is over would end nothing
            began = trio.current_time()
            await self._site.kill()
            await self._site.start()
            self.restarts_s.append(trio.current_time() - began)

    def _kill_one_of(self, pids: list[int]) -> None:
        if pids:
            try:
                os.kill(self._chance.choice(pids), signal.SIGKILL)
            except ProcessLookupError:
                return
