"""Sweeps what no live session owns, and finishes teardowns that could not be finished when they were due.

Decides nothing about leases: a session's own actor does. Compares what nsinit finds in the kernel and on disk with the
directory; an id that nothing owns at two sweeps in a row is torn down. Old records of ended sessions are forgotten.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import assert_never

import attrs
import trio

from sandkasten.actors import sessions as sessions_actor
from sandkasten.actors import store as store_actor
from sandkasten.actors import zygote as zygote_actor
from sandkasten.actors.actor import Actor, Ask, Deferred, Ref
from sandkasten.actors.directory import SessionDirectory
from sandkasten.errors import SandkastenError
from sandkasten.lifecycle import WHOLE
from sandkasten.model import Status

log = logging.getLogger(__name__)

_EVERY_S = 60.0
_KEEP_RECORDS = timedelta(days=7)


@attrs.frozen
class Sweep(Ask[int]):
    """Sweep now; answers how many ids were torn down or finished."""


Message = Sweep


class Reaper(Actor):
    """See the module's docstring."""

    def __init__(self, ref: Ref, *, store: Ref, zygote: Ref, sessions: Ref, directory: SessionDirectory) -> None:
        super().__init__(ref)
        self._store, self._zygote, self._sessions = store, zygote, sessions
        self._directory = directory
        self._suspects: frozenset[str] = frozenset()
        self._orphans: frozenset[str] = frozenset()
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
                log.warning("sweep_failed", extra={"error": str(error)})

    async def _sweep(self) -> int:
        async with self._turn:
            await self._write_refused()
            done = await self._reap_unowned() + await self._finish_orphans()
            await self._store.ask(store_actor.ForgetEnded(datetime.now(UTC) - _KEEP_RECORDS))
            return done

    async def _reap_unowned(self) -> int:
        found = await self._zygote.ask(zygote_actor.Scan())
        runs = {each.session_id: each.identity is not None for each in found}
        unowned = frozenset(session_id for session_id in runs if not self._directory.owns(session_id))
        reaped = 0
        for session_id in unowned & self._suspects:
            record = await self._store.ask(store_actor.Get(session_id))
            if record is not None and record.session.status in WHOLE and runs[session_id]:
                log.warning("unowned_session_readopted", extra={"session_id": session_id})
                await self._sessions.ask(sessions_actor.Readopt(session_id))
            else:
                log.warning("unowned_session", extra={"session_id": session_id})
                await self._zygote.ask(zygote_actor.Teardown(session_id))
            reaped += 1
        self._suspects = unowned - self._suspects
        return reaped

    async def _write_refused(self) -> None:
        """Write the final records that the database refused before."""
        for session_id, record in list(self._directory.unwritten.items()):
            await self._store.ask(store_actor.Put(record))
            if self._directory.unwritten.get(session_id) is record:
                del self._directory.unwritten[session_id]

    async def _finish_orphans(self) -> int:
        """Finish sessions whose record says that they live though no actor works on them."""
        records = await self._store.ask(store_actor.LiveSessions())
        orphans = {each.session.id: each for each in records if not self._directory.owns(each.session.id)}
        due = [
            session_id
            for session_id, record in orphans.items()
            if record.session.status is Status.DESTROYING or session_id in self._orphans
        ]
        for session_id in due:
            await self._sessions.ask(sessions_actor.Forget(session_id))
        self._orphans = frozenset(orphans) - frozenset(due)
        return len(due)
