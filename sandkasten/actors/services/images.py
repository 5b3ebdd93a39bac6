"""The images actor: resolves names and aliases of images, and describes, deletes and collects them. Reading is done in
worker threads of its own limiter, changes by nsinit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, assert_never

import attrs
import trio

from nsinit.wire import protocol
from sandkasten.actors.core import Actor, Ask, Ref
from sandkasten.actors.services.nsinit import ThreadLink, ask_store
from sandkasten.images.catalog import Catalog, Image, Stamp
from sandkasten.images.layers import Layers
from sandkasten.images.registry.pulling import PullTurns
from sandkasten.model.errors import InvalidImage
from sandkasten.model.image import ImageDescription, ImageLayer, Pruned

_THREADS = 2
_MAX_KNOWN = 1000
_UNSENT = 0


@attrs.frozen
class Resolve(Ask[Image]):
    """Find the image of a name or alias; raises `InvalidImage`."""

    name: str


@attrs.frozen
class DescribeImages(Ask[Sequence[ImageDescription]]):
    """Return all images, by name, or that of one name or alias; raises `InvalidImage`."""

    name: str | None = None


@attrs.frozen
class RemoveImage(Ask[None]):
    """Delete an image of layers, with the layers that nobody else has. Raises `InvalidImage`, `ImageInUse`."""

    name: str


@attrs.frozen
class PruneLayers(Ask[Pruned]):
    """Remove the layers that nobody has had for `older_than_s`; with `dry_run` count them."""

    older_than_s: int
    dry_run: bool


Message = Resolve | DescribeImages | RemoveImage | PruneLayers


class Images(Actor):
    """The image catalogue, with the images that were resolved before."""

    def __init__(self, ref: Ref, catalog: Catalog, nsinit: Ref, pulls: PullTurns) -> None:
        super().__init__(ref)
        self._catalog, self._nsinit, self._pulls = catalog, nsinit, pulls
        self._layers = Layers(catalog.data_dir, ThreadLink(nsinit))
        self._known: dict[str, tuple[Stamp, Image]] = {}
        self._limiter = trio.CapacityLimiter(_THREADS)

    async def handle(self, message: Message) -> Any:  # each message names its answer
        match message:
            case Resolve(name):
                known = self._known.get(name)
                if known is not None and known[0] == self._catalog.stamp(name):
                    return known[1]
                return self.defer(self._resolve, name)
            case DescribeImages(name):
                return self.defer(self._describe, name)
            case RemoveImage(name):
                return self.defer(self._remove, name)
            case PruneLayers(older_than_s, dry_run):
                return self.defer(self._prune, older_than_s, dry_run)
            case _:
                assert_never(message)

    async def _resolve(self, name: str) -> Image:
        stamp = self._catalog.stamp(name)
        image: Image = await self._in_thread(self._catalog.get, name)
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[name] = stamp, image
        return image

    async def _in_thread(self, function: Any, *args: Any) -> Any:  # of the catalogue
        return await trio.to_thread.run_sync(function, *args, limiter=self._limiter)

    async def _describe(self, name: str | None) -> Sequence[ImageDescription]:
        def read() -> Sequence[ImageDescription]:
            found = self._catalog.images() if name is None else [self._catalog.get(name)]
            return [self._info(image) for image in found]

        described: Sequence[ImageDescription] = await self._in_thread(read)
        return described

    def _info(self, image: Image) -> ImageDescription:
        found = [(digest, self._layers.find(digest)) for digest in image.layers]
        return ImageDescription(
            name=image.name,
            kind=image.kind,
            source=image.source,
            created_at=image.created_at,
            digest=image.digest,
            platform=image.platform,
            tags=image.tags,
            alias_names=self._catalog.aliases_of(image.name),
            size_bytes=image.size_bytes,
            config=image.config,
            layers=[ImageLayer(digest, meta.entries, meta.size_bytes) for digest, meta in found if meta is not None],
        )

    async def _remove(self, name: str) -> None:
        image: Image = await self._in_thread(self._catalog.get_own, name)
        if image.kind != "layers":
            raise InvalidImage(f"{name!r} is no image of layers: `sandkasten image rm` removes it", image=name)
        await ask_store(self._nsinit, protocol.DeleteImage(_UNSENT, name))
        await ask_store(self._nsinit, protocol.CollectLayers(_UNSENT, 0, self._pulls.kept, tuple(image.layers)))

    async def _prune(self, older_than_s: int, dry_run: bool) -> Pruned:
        request = protocol.CollectLayers(_UNSENT, older_than_s, self._pulls.kept, dry_run=dry_run)
        found = await ask_store(self._nsinit, request)
        return Pruned(found.layers, found.freed_bytes)
