"""Blank vessels: sandboxes without an image that nsinit has ready, so that a create has only the image left to do.

Owns which there are; makes them when nobody waits for a create, and without them a create is only slower. One that died
with the nsinit that made it is given to `reap`. Ids that belong to a vessel are reserved in the directory meanwhile.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import trio

from sandkasten.actors import zygote as zygote_actor
from sandkasten.actors.actor import Ref
from sandkasten.actors.directory import SessionDirectory
from sandkasten.errors import SandkastenError
from sandkasten.model import Limits
from sandkasten.runtime.plan import plan_disk, plan_limits

log = logging.getLogger(__name__)

_QUIET_S = 0.02


class Vessels:
    """See the module's docstring. `limits`: what the next session will probably be given."""

    def __init__(
        self,
        zygote: Ref,
        directory: SessionDirectory,
        *,
        wanted: int,
        limits: Limits,
        new_id: Callable[[], str],
        reap: Callable[[str], None],
    ) -> None:
        self._zygote, self._directory = zygote, directory
        self._wanted, self._limits = wanted, limits
        self._new_id, self._reap = new_id, reap
        self._ready: deque[tuple[str, int]] = deque()
        self._preparing = 0

    def __len__(self) -> int:
        return len(self._ready)

    def take(self) -> str | None:
        """Return the id of a vessel that lives, None if there is none."""
        while self._ready:
            session_id, incarnation = self._ready.popleft()
            if incarnation == self._zygote.incarnation:
                return session_id
            self._reap(session_id)  # it died with the nsinit that made it
        return None

    async def refill(self, is_quiet: Callable[[], bool]) -> None:
        """Have nsinit make as many as are wanted, for as long as `is_quiet`."""
        await trio.sleep(_QUIET_S)
        while is_quiet() and len(self._ready) + self._preparing < self._wanted:
            session_id, incarnation = self._new_id(), self._zygote.incarnation
            self._directory.reserved.add(session_id)
            self._preparing += 1
            try:
                await self._zygote.ask(
                    zygote_actor.Prepare(session_id, plan_limits(self._limits), plan_disk(self._limits))
                )
            except SandkastenError as error:
                log.warning("vessel_not_prepared", extra={"error": str(error)})
                self._reap(session_id)
                return
            finally:
                self._preparing -= 1
            self._ready.append((session_id, incarnation))
