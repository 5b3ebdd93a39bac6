"""The images actor: resolves names and aliases of images, in worker threads of its own limiter."""

from __future__ import annotations

from typing import assert_never

import attrs
import trio

from sandkasten.actors.core import Actor, Ask, Deferred, Ref
from sandkasten.images.catalog import Catalog, Image, Stamp

_THREADS = 2
_MAX_KNOWN = 1000


@attrs.frozen
class Resolve(Ask[Image]):
    """Find the image of a name or alias; raises `InvalidImage`."""

    name: str


Message = Resolve


class Images(Actor):
    """The image catalogue, with the images that were resolved before."""

    def __init__(self, ref: Ref, catalog: Catalog) -> None:
        super().__init__(ref)
        self._catalog = catalog
        self._known: dict[str, tuple[Stamp, Image]] = {}
        self._limiter = trio.CapacityLimiter(_THREADS)

    async def handle(self, message: Message) -> Image | Deferred:
        match message:
            case Resolve(name):
                known = self._known.get(name)
                if known is not None and known[0] == self._catalog.stamp(name):
                    return known[1]
                return self.defer(self._resolve, name)
            case _:
                assert_never(message)

    async def _resolve(self, name: str) -> Image:
        stamp = self._catalog.stamp(name)
        image = await trio.to_thread.run_sync(self._catalog.get, name, limiter=self._limiter)
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[name] = stamp, image
        return image
