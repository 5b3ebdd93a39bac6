"""Forgets sessions that ended long ago, each with its idempotency key; a few at a time, so that others get a turn.

Looks every minute at what there is, and has done what must be: see `reconcile.py` for what that is.

Decides nothing about leases: a session's own actor does. Sessions are adopted, finished and removed by the `sessions`
actor, leftovers by `Removal`. Final records that the database refused are written, old ones of ended sessions
forgotten.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TypeVarTuple, assert_never

import attrs
import trio

from sandkasten.actors.core import Actor, Ask, Deferred, Ref
from sandkasten.actors.node import sessions as sessions_actor
from sandkasten.actors.node.inventory import Inventory, Removal
from sandkasten.actors.node.reconcile import Action
from sandkasten.actors.services.shared import Shared
from sandkasten.actors.services.store import do
from sandkasten.model.errors import SandkastenError
from sandkasten.store.sessions import forget_ended, put_session

log = logging.getLogger(__name__)

BATCH = 500
"""Records that one transaction deletes; some milliseconds, in which nothing else is written."""


async def forget_old(store: Ref, *, keep_s: float) -> int:
    """Delete the records of sessions that ended longer ago than that; return how many. Raises `StoreFailed`."""
    before = datetime.now(UTC) - timedelta(seconds=keep_s)
    forgotten = 0
    while True:
        count = await store.ask(do(forget_ended, before=before, limit=BATCH))
        forgotten += count
        if count < BATCH:
            break
    if forgotten:
        log.info("records_forgotten", extra={"count": forgotten})
    return forgotten


Ts = TypeVarTuple("Ts")

_EVERY_S = 60.0


@attrs.frozen
class Sweep(Ask[int]):
    """Sweep now; answers how many ids were adopted, finished or removed, and how many leftovers removed."""


Message = Sweep


class Reaper(Actor):
    """See the module's docstring."""

    def __init__(
        self,
        ref: Ref,
        shared: Shared,
        *,
        sessions: Ref,
        inventory: Inventory,
        removal: Removal,
        keep_records_s: float,
    ) -> None:
        super().__init__(ref)
        self._store, self._directory, self._metrics = shared.store, shared.directory, shared.metrics
        self._sessions = sessions
        self._inventory, self._removal = inventory, removal
        self._keep_records_s = keep_records_s
        self._turn = trio.Lock()

    async def on_start(self) -> None:
        self._nursery.start_soon(self._sweep_forever)

    async def handle(self, message: Message) -> Deferred:
        match message:
            case Sweep():
                return self.defer(self._sweep)
            case _:
                assert_never(message)

    async def _sweep_forever(self) -> None:
        while True:
            await trio.sleep(_EVERY_S)
            try:
                await self._sweep()
            except SandkastenError as error:
                self._metrics.sweeps("failed").inc()
                log.warning("sweep_failed", extra={"error": str(error)})

    async def _sweep(self) -> int:
        """Do all of it, whatever part fails: a database that takes no writes is no reason to leave things lying on its
        disk. Raises the first failure in the end."""
        async with self._turn:
            failures = [*await _failure_of(self._write_refused)]
            plan = await self._inventory.look()
            due = plan.of(Action.ADOPT, Action.FINISH, Action.CLEAN)
            for decision in due:
                failures += await _failure_of(self._sessions.ask, sessions_actor.Settle(decision))
            removed = await self._removal.remove(plan.remove)
            failures += await _failure_of(self._forget)
            self._metrics.swept.inc(len(due) + removed)
            if failures:
                raise failures[0]
            self._metrics.sweeps("ok").inc()
            return len(due) + removed

    async def _forget(self) -> None:
        await forget_old(self._store, keep_s=self._keep_records_s)

    async def _write_refused(self) -> None:
        """Write the final records that the database refused before."""
        for session_id, record in list(self._directory.unwritten.items()):
            await self._store.ask(do(put_session, record))
            if self._directory.unwritten.get(session_id) is record:
                del self._directory.unwritten[session_id]


async def _failure_of(work: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> Sequence[SandkastenError]:
    """Do something; return why it failed, if it did."""
    try:
        await work(*args)
    except SandkastenError as error:
        return (error,)
    return ()
