"""The images actor: resolves names and aliases of images, and describes, deletes and collects them. Reading is done in
worker threads of its own limiter, changes by nsinit."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, assert_never

import attrs
import trio

from nsinit.wire import protocol
from sandkasten.actors.core import Actor, Ask, Ref
from sandkasten.actors.services.directory import SessionDirectory
from sandkasten.actors.services.nsinit import ask_store
from sandkasten.errors import ImageInUse, InvalidImage, SandboxError
from sandkasten.images.catalog import Catalog, Image, Stamp
from sandkasten.images.describing import describe, held_by, uses_of
from sandkasten.images.registry.blobs import Blobs
from sandkasten.images.registry.pulling import PullTurns
from sandkasten.model.image import ImageDescription, ImageUses, Pruned
from sandkasten.model.workspace import EVERYWHERE, Within, is_within

_THREADS = 2
_MAX_KNOWN = 1000
_MOST_TOLD = 100
_UNSENT = 0


@attrs.frozen
class Resolve(Ask[Image]):
    """Find the image of a name or alias; raises `InvalidImage`."""

    name: str


@attrs.frozen
class DescribeImages(Ask[Sequence[ImageDescription]]):
    """Return all images, by name, or that of one name or alias; raises `InvalidImage`. `is_bounded`: those alone that
    sessions may have. Of sessions that use an image, those within these labels are told, and pools everywhere alone."""

    name: str | None = None
    within: Within = EVERYWHERE
    is_bounded: bool = False


@attrs.frozen
class RemoveImage(Ask[None]):
    """Delete an image of layers, with the layers that nobody else has. Raises `InvalidImage`, `ImageInUse`, whose
    details are the sessions and pools that name it."""

    name: str


@attrs.frozen
class PruneLayers(Ask[Pruned]):
    """Remove the layers and broken downloads that nobody has had for `older_than_s`, and the steps of builds that have
    been kept for so long and have no session; with `dry_run` count them."""

    older_than_s: int
    dry_run: bool


Message = Resolve | DescribeImages | RemoveImage | PruneLayers


class Images(Actor):
    """The image catalogue, with the images that were resolved before."""

    def __init__(
        self,
        ref: Ref,
        catalog: Catalog,
        nsinit: Ref,
        *,
        pulls: PullTurns,
        blobs: Blobs,
        directory: SessionDirectory,
        pools: Sequence[str],
    ) -> None:
        super().__init__(ref)
        self._catalog, self._nsinit, self._pulls, self._blobs = catalog, nsinit, pulls, blobs
        self._directory, self._pools = directory, pools
        self._known: dict[str, tuple[Stamp, Image]] = {}
        self._limiter = trio.CapacityLimiter(_THREADS)

    def handle_at_once(self, message: Message) -> Any:  # each message names its answer
        match message:
            case Resolve(name):
                known = self._known.get(name)
                if known is not None and known[0] == self._catalog.stamp(name):
                    return known[1]
                return self.defer(self._resolve, name)
            case DescribeImages():
                return self.defer(self._describe, message)
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

    async def _describe(self, message: DescribeImages) -> Sequence[ImageDescription]:
        name, catalog = message.name, self._catalog
        sessions, pools = self._users(message.within)

        def read() -> Sequence[ImageDescription]:
            if name is None:
                found = catalog.allowed() if message.is_bounded else catalog.shown()
            else:
                found = [catalog.get(name) if message.is_bounded else catalog.look_up(name)]
            return describe(catalog, found, uses_of(catalog, sessions, pools), judges=name is not None)

        described: Sequence[ImageDescription] = await self._in_thread(read)
        return described

    def _users(self, within: Within) -> tuple[Sequence[tuple[str, str]], Sequence[str]]:
        """Return the live sessions, by id and image as it was asked for, and the pools, as far as these are told."""
        live = (entry.session for entry in self._directory)
        found = [(each.id, each.image) for each in live if is_within(each.labels, within)]
        return found, () if within else self._pools

    async def _remove(self, name: str) -> None:
        self._catalog.require_changeable()
        image: Image = await self._in_thread(self._catalog.get_own, name)
        if image.kind != "layers":
            raise InvalidImage(f"{name!r} is no image of layers: `sandkasten image rm` removes it", image=name)
        uses: Mapping[str, ImageUses] = await self._in_thread(uses_of, self._catalog, *self._users(EVERYWHERE))
        if used := uses.get(image.name):
            raise _in_use(used)
        await self._delete(image)

    async def _delete(self, image: Image) -> protocol.LayersCollected:
        await ask_store(self._nsinit, protocol.DeleteImage(_UNSENT, image.name))
        request = protocol.CollectLayers(_UNSENT, self._pulls.grace_s(0), self._pulls.kept, tuple(image.layers))
        return await ask_store(self._nsinit, request)

    async def _prune(self, older_than_s: int, dry_run: bool) -> Pruned:
        uses: Mapping[str, ImageUses] = await self._in_thread(uses_of, self._catalog, *self._users(EVERYWHERE))
        cached: Sequence[Image] = await self._in_thread(self._catalog.cached_steps, older_than_s)
        steps = [image for image in cached if not uses.get(image.name)]
        found = Pruned(0, 0)
        if dry_run:
            found = await self._in_thread(held_by, self._catalog, steps)
        for image in [] if dry_run else steps:
            with contextlib.suppress(ImageInUse, InvalidImage):  # it has a session, or is gone, by now
                gone = await self._delete(image)
                found = Pruned(
                    found.layers + gone.layers, found.freed_bytes + gone.freed_bytes, images=found.images + 1
                )
        request = protocol.CollectLayers(_UNSENT, self._pulls.grace_s(older_than_s), self._pulls.kept, dry_run=dry_run)
        left = await ask_store(self._nsinit, request)
        try:
            blobs, blob_bytes = await self._in_thread(partial(self._blobs.sweep, older_than_s, dry_run=dry_run))
        except OSError as error:
            raise SandboxError(f"the directory of downloads can't be read: {error}") from error
        freed_bytes = found.freed_bytes + left.freed_bytes + blob_bytes
        return Pruned(found.layers + left.layers, freed_bytes, blobs, found.images)


def _in_use(used: ImageUses) -> ImageInUse:
    what = [f"{len(named)} {kind}" for kind, named in (("sessions", used.sessions), ("pools", used.pools)) if named]
    return ImageInUse(
        f"the image is in use: {' and '.join(what)}",
        sessions=list(used.sessions[:_MOST_TOLD]),
        pools=list(used.pools[:_MOST_TOLD]),
    )
