"""The image store as an actor: resolves names and aliases; file access runs in worker threads of its own limiter.

Import, pull and build jobs join it here; what an image is lies in `images/catalog.py`.
"""

from __future__ import annotations

from typing import assert_never

import attrs
import trio

from sandkasten.actors.actor import Actor, Ask, Deferred, Ref
from sandkasten.images.catalog import Catalog, Image

_THREADS = 2


@attrs.frozen
class Resolve(Ask[Image]):
    """Find the image of a name or alias; raises `InvalidImage`."""

    name: str


Message = Resolve


class Images(Actor):
    """See the module's docstring."""

    def __init__(self, ref: Ref, catalog: Catalog) -> None:
        super().__init__(ref)
        self._catalog = catalog
        self._limiter = trio.CapacityLimiter(_THREADS)

    async def handle(self, message: Message) -> Deferred:
        match message:
            case Resolve(name):
                return self.defer(self._resolve, name)
            case _:
                assert_never(message)

    async def _resolve(self, name: str) -> Image:
        return await trio.to_thread.run_sync(self._catalog.get, name, limiter=self._limiter)
