"""Has leftovers removed: the spool's files here, everything else by nsinit. Decides nothing (`reconcile.py` does).

What can't be removed is told of in the log, and found again by the next look.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import trio

from nsinit.wire.protocol import Stray
from sandkasten.actors.node.inventory import Inventory
from sandkasten.actors.node.reconcile import SPOOL_FILE, Leftover
from sandkasten.actors.services import nsinit_messages as zygote_actor
from sandkasten.actors.services.shared import Shared
from sandkasten.model.errors import SandkastenError
from sandkasten.output.spool_files import remove_spool_files, session_of

log = logging.getLogger(__name__)


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
        stray = Stray(leftover.kind, leftover.name)  # type: ignore[arg-type]  # that is where its kind is from
        try:
            await self._zygote.ask(zygote_actor.RemoveStray(stray))
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
