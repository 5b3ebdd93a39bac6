"""The sandbox pool: sandboxes that nsinit has prepared, so that a cold create has less left to do. Whole sessions made
ahead are in `session_pools.py`.

A pool sandbox has a process, cgroups and a disk. One of them, if there is another besides, has the image and the sizes
mounted that the last create asked for; the others are blank. The pool refills itself while no create is under way, and
without it a create is only slower. A pool sandbox that died with its nsinit, or whose image nobody asks for any more,
is reaped by the next refill. The ids of pool sandboxes are reserved in the directory.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import trio

from nsinit.wire.protocol import MountImage, Prepare, SandboxPlan
from sandkasten.actors.core import Ref
from sandkasten.actors.services.directory import SessionDirectory
from sandkasten.actors.services.nsinit import Call, call
from sandkasten.admission.plan import Resolved, plan_disk, plan_limits, plan_sandbox
from sandkasten.errors import SandkastenError
from sandkasten.images.catalog import Image
from sandkasten.model import Limits

log = logging.getLogger(__name__)

_QUIET_S = 0.02


@attrs.frozen
class MountedImage:
    """The image mounted in a pool sandbox, and the plan it is mounted for. Another image may take its name later."""

    image: Image
    plan: SandboxPlan

    @classmethod
    def of(cls, resolved: Resolved, image: Image) -> MountedImage:
        """Return the image and the plan that a create asks for."""
        plan = plan_sandbox(
            "", resolved, workspace_id=None, image=image.name, image_kind=image.kind, layers=image.layers
        )
        return cls(image, plan)

    def fits(self, other: MountedImage) -> bool:
        """Whether a sandbox with this one will do for a create that asks for the other."""
        return self.image == other.image and self.plan.image_key == other.plan.image_key


@attrs.frozen
class _PoolSandbox:
    """A prepared sandbox. `incarnation` counts the starts of nsinit: the sandbox dies with the nsinit that made it."""

    session_id: str
    incarnation: int
    mounted: MountedImage | None = None


class SandboxPool:
    """The pool sandboxes of the node. `limits` are those that the next session will probably be given. `reap` removes
    everything of an id, and never raises."""

    def __init__(
        self,
        nsinit: Ref,
        directory: SessionDirectory,
        *,
        wanted: int,
        limits: Limits,
        new_id: Callable[[], str],
        reap: Callable[[str], Awaitable[object]],
    ) -> None:
        self._nsinit, self._directory = nsinit, directory
        self._wanted, self._limits = wanted, limits
        self._new_id, self._reap = new_id, reap
        self._blank: deque[_PoolSandbox] = deque()
        self._with_image: _PoolSandbox | None = None
        self._guess: MountedImage | None = None
        self._under_way = 0
        self._stale: list[str] = []
        """Ids of those to be reaped."""
        self._mounting = trio.Lock()
        """Held while an image is mounted, or a sandbox reaped that may have one."""

    def __len__(self) -> int:
        return len(self._blank) + (self._with_image is not None)

    def take(self, wanted: MountedImage) -> str | None:
        """Return the id of a pool sandbox that will do, None if there is none. It belongs to the caller then."""
        self._guess = wanted
        with_image = self._with_image
        if with_image is not None and with_image.mounted is not None and with_image.mounted.fits(wanted):
            self._with_image = None
            if self._lives(with_image):
                return with_image.session_id
        while self._blank:
            if self._lives(sandbox := self._blank.popleft()):
                return sandbox.session_id
        return None

    async def refill(self, is_quiet: Callable[[], bool]) -> None:
        """Have nsinit prepare as many as are wanted, while `is_quiet`."""
        await trio.sleep(_QUIET_S)
        self._discard_misfit()
        while is_quiet() and len(self) + self._under_way < self._wanted:
            limits = self._limits
            sandbox = _PoolSandbox(self._new_id(), self._nsinit.incarnation)
            self._directory.reserved.add(sandbox.session_id)
            order = call(Prepare, sandbox.session_id, plan_limits(limits), plan_disk(limits))
            if not await self._have(sandbox, order):
                break
        async with self._mounting:
            await self._reap_stale()
            if is_quiet() and self._guess is not None and self._with_image is None and len(self._blank) > 1:
                guess, sandbox = self._guess, self._blank.popleft()
                plan = dataclasses.replace(guess.plan, session_id=sandbox.session_id)
                await self._have(attrs.evolve(sandbox, mounted=guess), call(MountImage, plan))

    async def forget(self, image: str) -> None:
        """Mount that image ahead no more until it is asked for, and reap the sandboxes that have it."""
        if self._guess is not None and self._guess.image.name == image:
            self._guess = None
        async with self._mounting:
            with_image = self._with_image
            if with_image is not None and with_image.mounted is not None and with_image.mounted.image.name == image:
                self._discard(with_image)
            await self._reap_stale()

    async def _have(self, sandbox: _PoolSandbox, order: Call[Any]) -> bool:
        """Have nsinit carry out the order and add the sandbox to the pool. Return False if nsinit could not."""
        self._under_way += 1
        try:
            await self._nsinit.ask(order)
        except SandkastenError as error:
            log.warning("pool_sandbox_not_prepared", extra={"error": str(error)})
            await self._reap(sandbox.session_id)
            return False
        finally:
            self._under_way -= 1
        if sandbox.mounted is None:
            self._blank.append(sandbox)
        else:
            self._with_image = sandbox
        return True

    def _discard_misfit(self) -> None:
        """Give up the sandbox whose image is not the one asked for last."""
        with_image = self._with_image
        if with_image is None or with_image.mounted is None or self._guess is None:
            return
        if not with_image.mounted.fits(self._guess):
            self._discard(with_image)

    def _discard(self, with_image: _PoolSandbox) -> None:
        self._with_image = None
        self._stale.append(with_image.session_id)

    async def _reap_stale(self) -> None:
        while self._stale:
            await self._reap(self._stale.pop())

    def _lives(self, sandbox: _PoolSandbox) -> bool:
        if sandbox.incarnation == self._nsinit.incarnation:
            return True
        self._stale.append(sandbox.session_id)  # it died with the nsinit that made it
        return False
