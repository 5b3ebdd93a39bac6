"""What there is on disk, in the kernel and in the store, looked at and compared; and what is told of it.

Looks and tells, decides nothing (`reconcile.py` does) and removes nothing. One for the tree: what a look leaves for the
next one is kept here, and how many leftovers of each kind were found and removed since the start.

Has leftovers removed: the spool's files here, everything else by nsinit. Decides nothing (`reconcile.py` does).

What can't be removed is told of in the log, and found again by the next look.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import trio

from nsinit.wire import protocol
from sandkasten.actors.node.reconcile import (
    SESSION,
    SPOOL_FILE,
    Leftover,
    Observed,
    Plan,
    Sightings,
    as_leftovers,
    plan_reconciliation,
)
from sandkasten.actors.services.nsinit import ask_patiently, call, scan
from sandkasten.actors.services.shared import Shared
from sandkasten.actors.services.store import do
from sandkasten.host.paths import DataPaths
from sandkasten.model import EventType
from sandkasten.model.errors import SandkastenError
from sandkasten.output.spool_files import SpoolFile, list_spool, remove_spool_files, session_of
from sandkasten.store.sessions import live_sessions

log = logging.getLogger(__name__)


class Inventory:
    """See the module's docstring. `found` and `removed` count by kind."""

    def __init__(self, data_dir: Path, boot_id: str, shared: Shared) -> None:
        self._data_dir, self._boot_id = data_dir, boot_id
        self._store, self._zygote, self._directory = shared.store, shared.zygote, shared.directory
        self._journal, self._spool = shared.journal, shared.spool
        self._seen: Sightings = frozenset()
        self.found: Counter[str] = Counter()
        self.removed: Counter[str] = Counter()

    @property
    def in_hand(self) -> int:
        """For how many ids without an actor something is under way: ends to be finished, vessels."""
        return len(self._directory.reserved)

    async def look(self, *, is_start: bool = False) -> Plan:
        """Return what is to be done now, and tell of what is new.

        Records come first and owners last: what begins or ends meanwhile has an owner or is only watched.
        """
        records = await self._store.ask_again(do(live_sessions))
        found = await scan(self._zygote)
        leftovers = await self._leftovers()
        files = await self._unused_files()
        seen = frozenset[str | Leftover]() if is_start else self._seen
        plan = plan_reconciliation(
            Observed(records, found, self._boot_id, leftovers, self._directory, seen, is_start, files)
        )
        self._seen = plan.seen
        for each in plan.news:
            self._tell(each)
        return plan

    async def _leftovers(self) -> Sequence[Leftover]:
        """Return what is no session's; nothing when it can't be looked for, which must not hold up the rest."""
        try:
            return as_leftovers((await ask_patiently(self._zygote, call(protocol.FindLeftovers))).leftovers)
        except SandkastenError as error:
            log.error("leftovers_not_looked_for", extra={"error": str(error)})
            return []

    async def _unused_files(self) -> Sequence[SpoolFile]:
        """Return the spool's files that it does not use. It is asked last: what it begins to use it says before."""
        try:
            files = await trio.to_thread.run_sync(list_spool, DataPaths(self._data_dir).spool)
        except OSError as error:
            log.error("leftovers_not_looked_for", extra={"error": str(error)})
            return []
        return [each for each in files if not self._spool.uses(each.name)]

    def _tell(self, leftover: Leftover) -> None:
        self.found[leftover.kind] += 1
        log.warning("leftover_found", extra={"kind": leftover.kind, "leftover": leftover.name})
        session_id = leftover.name if leftover.kind == SESSION else ""
        self._journal.emit(EventType.LEFTOVER_FOUND, session_id, kind=leftover.kind, name=leftover.name)

    def note_removed(self, leftover: Leftover) -> None:
        """Something that was told of is gone."""
        self.removed[leftover.kind] += 1
        log.warning("leftover_removed", extra={"kind": leftover.kind, "leftover": leftover.name})
        session_id = leftover.name if leftover.kind == SESSION else ""
        self._journal.emit(EventType.LEFTOVER_REMOVED, session_id, kind=leftover.kind, name=leftover.name)


class Removal:
    """See the module's docstring. One for the tree."""

    def __init__(self, spool_dir: Path, shared: Shared, inventory: Inventory) -> None:
        self._spool_dir = spool_dir
        self._zygote, self._directory = shared.zygote, shared.directory
        self._inventory = inventory

    async def remove(self, leftovers: Sequence[Leftover]) -> int:
        """Remove what a plan says; return how many are gone."""
        files = [each for each in leftovers if each.kind == SPOOL_FILE]
        removed = await self._remove_spool_files(files) if files else 0
        for leftover in leftovers:
            if leftover.kind != SPOOL_FILE:
                removed += await self._remove_stray(leftover)
        return removed

    async def _remove_stray(self, leftover: Leftover) -> bool:
        stray = protocol.Leftover(leftover.kind, leftover.name)  # type: ignore[arg-type]  # that is where its kind is from
        try:
            await self._zygote.ask(call(protocol.RemoveLeftover, stray))
        except SandkastenError as error:
            self._not_removed(leftover, str(error))
            return False
        self._inventory.note_removed(leftover)
        return True

    async def _remove_spool_files(self, files: Sequence[Leftover]) -> int:
        due = [each for each in files if session_of(each.name) not in self._directory]
        try:
            refused = await trio.to_thread.run_sync(
                remove_spool_files, self._spool_dir, frozenset(each.name for each in due)
            )
        except OSError as error:
            refused = dict.fromkeys((each.name for each in due), str(error))
        for each in due:
            if each.name in refused:
                self._not_removed(each, refused[each.name])
            else:
                self._inventory.note_removed(each)
        return len(due) - len(refused)

    def _not_removed(self, leftover: Leftover, reason: str) -> None:
        log.error("leftover_not_removed", extra={"kind": leftover.kind, "leftover": leftover.name, "error": reason})
