"""Vessels: sandboxes that nsinit has ready, so that a create has less left to do.

Blank ones have no image; one, if there is another besides, is furnished with the image and the sizes that the last
create asked for. Owns which there are; makes them when nobody waits for a create, and without them a create is only
slower. One that died with the nsinit that made it, or is furnished for what nobody asks for any more, is given to
`reap`. Ids that belong to a vessel are reserved in the directory meanwhile.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs
import trio

from nsinit.wire.protocol import MountImage, Prepare, SandboxPlan
from sandkasten.actors.core import Ref
from sandkasten.actors.services.directory import SessionDirectory
from sandkasten.actors.services.nsinit import Call, call
from sandkasten.admission.plan import Resolved, plan_disk, plan_limits, plan_sandbox
from sandkasten.images.catalog import Image
from sandkasten.model import Limits
from sandkasten.model.errors import SandkastenError

log = logging.getLogger(__name__)

_QUIET_S = 0.02


@attrs.frozen
class Furnishing:
    """What a vessel is furnished for. `image` is that of its name at the time: another may take the name."""

    image: Image
    plan: SandboxPlan

    @classmethod
    def of(cls, resolved: Resolved, image: Image) -> Furnishing:
        """Return what a create asks for."""
        return cls(image, plan_sandbox("", resolved, workspace_id=None, image=image.name, image_kind=image.kind))

    def fits(self, other: Furnishing) -> bool:
        """Return whether what was furnished for this will do for the other."""
        return self.image == other.image and self.plan.image_key == other.plan.image_key


@attrs.frozen
class _Vessel:
    """`incarnation` is that of the nsinit that has it."""

    session_id: str
    incarnation: int
    furnishing: Furnishing | None = None


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
        self._blank: deque[_Vessel] = deque()
        self._furnished: _Vessel | None = None
        self._guess: Furnishing | None = None
        self._under_way = 0

    def __len__(self) -> int:
        return len(self._blank) + (self._furnished is not None)

    def take(self, wanted: Furnishing) -> str | None:
        """Return the id of a vessel that lives and will do, None if there is none."""
        self._guess = wanted
        furnished = self._furnished
        if furnished is not None and furnished.furnishing is not None and furnished.furnishing.fits(wanted):
            self._furnished = None
            if self._lives(furnished):
                return furnished.session_id
        while self._blank:
            if self._lives(vessel := self._blank.popleft()):
                return vessel.session_id
        return None

    async def refill(self, is_quiet: Callable[[], bool]) -> None:
        """Have nsinit make as many as are wanted, for as long as `is_quiet`."""
        await trio.sleep(_QUIET_S)
        self._discard_misfit()
        while is_quiet() and len(self) + self._under_way < self._wanted:
            limits = self._limits
            vessel = _Vessel(self._new_id(), self._zygote.incarnation)
            self._directory.reserved.add(vessel.session_id)
            order = call(Prepare, vessel.session_id, plan_limits(limits), plan_disk(limits))
            if not await self._have(vessel, order):
                return
        if is_quiet() and self._guess is not None and self._furnished is None and len(self._blank) > 1:
            guess, vessel = self._guess, self._blank.popleft()
            plan = dataclasses.replace(guess.plan, session_id=vessel.session_id)
            await self._have(attrs.evolve(vessel, furnishing=guess), call(MountImage, plan))

    async def _have(self, vessel: _Vessel, order: Call[Any]) -> bool:
        """Have nsinit carry out the order, after which there is that vessel. False: it could not."""
        self._under_way += 1
        try:
            await self._zygote.ask(order)
        except SandkastenError as error:
            log.warning("vessel_not_prepared", extra={"error": str(error)})
            self._reap(vessel.session_id)
            return False
        finally:
            self._under_way -= 1
        if vessel.furnishing is None:
            self._blank.append(vessel)
        elif self._furnished is None:
            self._furnished = vessel
        else:
            self._reap(vessel.session_id)
        return True

    def _discard_misfit(self) -> None:
        """Let go what is furnished for something else than was asked for last."""
        furnished = self._furnished
        if furnished is None or furnished.furnishing is None or self._guess is None:
            return
        if not furnished.furnishing.fits(self._guess):
            self._furnished = None
            self._reap(furnished.session_id)

    def _lives(self, vessel: _Vessel) -> bool:
        if vessel.incarnation == self._zygote.incarnation:
            return True
        self._reap(vessel.session_id)  # it died with the nsinit that made it
        return False
