"""A pull, step by step: documents, then each layer that the store lacks, then the name.

The image is in a registry or in an archive (`PullSource`). Who pulls reads bytes of strangers and has no root. The
store (`PullTarget`) is behind nsinit, which unpacks in a jail and names a layer by the digest that it saw itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

import attrs
import trio

from sandkasten.config import MIB, ImagesSettings
from sandkasten.crash import Crash, Point
from sandkasten.errors import DiskFull, DiskReserve, InvalidImage, NsinitLost, TooLarge
from sandkasten.images.registry.documents import (
    MAX_CONFIG_BYTES,
    Blob,
    Configuration,
    Manifest,
    Platform,
    read_configuration,
)
from sandkasten.images.registry.source import PullSource
from sandkasten.model import IMAGE_NAME
from sandkasten.model.image import ImageConfig
from sandkasten.model.job import LayerPhase, LayerProgress

DOWNLOADS = 3
UNPACKS = 2
_ROUNDS = 2
_PUBLISH_S = 30.0
"""Longer than the store takes for a name."""


@attrs.frozen
class NewImage:
    """An image whose layers are all in the store, from the bottom, and the name that it is to get."""

    name: str
    tags: Sequence[str]
    layers: Sequence[str]
    config: ImageConfig
    digest: str
    source: str
    platform: str
    replace: bool
    repository: str = ""
    base_layers: int = 0


class PullTarget(Protocol):
    """Part of the store of layers and images that a pull needs."""

    async def has_layer(self, diff_id: str) -> bool:
        """Whether a layer of that digest is there."""
        ...

    async def unpack_layer(self, blob_fd: int, diff_id: str) -> str:
        """Make a layer of a blob, of any digest if that is empty; return its digest. Raises `LayerRefused`,
        `DigestMismatch`, `DiskReserve`."""
        ...

    async def publish_image(self, image: NewImage) -> None:
        """Give an image its name. Raises `InvalidImage`: the name is taken, or a layer is missing."""
        ...


@attrs.frozen
class PullTurns:
    """Bounds of what all pulls of a process do at once, and who has which layer in hand. `wanted` counts the pulls that
    need a layer, from its name to the image's: collections keep such a layer (`kept`). `begun` has the times at which
    work began that makes a layer whose digest is known at its end: collections keep what is younger (`grace_s`)."""

    downloads: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(DOWNLOADS))
    unpacks: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(UNPACKS))
    layers: dict[str, trio.Lock] = attrs.field(factory=dict)
    begun: list[float] = attrs.field(factory=list)
    wanted: Counter[str] = attrs.field(factory=Counter)

    @property
    def kept(self) -> tuple[str, ...]:
        """The layers that running pulls need."""
        return tuple(self.wanted)

    @asynccontextmanager
    async def making(self) -> AsyncIterator[None]:
        """Have a turn for unpacking, and keep a layer that is made meanwhile from collections."""
        async with self.unpacks:
            self.begun.append(begun := trio.current_time())
            try:
                yield
            finally:
                self.begun.remove(begun)

    def grace_s(self, older_than_s: int) -> int:
        """Return the least age of what a collection takes that is to take layers of this age."""
        return max([older_than_s, *(math.ceil(trio.current_time() - begun) + 1 for begun in self.begun)])

    @contextmanager
    def keeping(self, diff_ids: Collection[str]) -> Iterator[None]:
        """Keep layers from collections."""
        self.wanted.update(set(diff_ids))
        try:
            yield
        finally:
            self.wanted.subtract(set(diff_ids))
            for each in [diff_id for diff_id, count in self.wanted.items() if not count]:
                del self.wanted[each]


@attrs.frozen
class PullTerms:
    """Terms of a pull, from whatever source. `name`: the image's, empty for the name that the source gives it.
    `on_progress` is called at each step of a layer, with the place of the layer from the bottom."""

    name: str
    platform: Platform
    store: PullTarget
    settings: ImagesSettings
    replace: bool = False
    turns: PullTurns = attrs.field(factory=PullTurns)
    on_progress: Callable[[Sequence[LayerProgress]], None] = attrs.field(default=lambda _: None)
    crash: Crash = attrs.field(factory=Crash)


@attrs.define
class Pull:
    """One pull of an image, from its source into the store."""

    source: PullSource
    terms: PullTerms
    progress: list[LayerProgress] = attrs.field(factory=list, init=False)

    async def run(self) -> NewImage:
        """Pull, and return the image as it was published. A pull that is cancelled while the store gives the name is
        done all the same.

        Raises:
            InvalidImage: there is no image of that platform, or the store does not take it.
            NsinitLost: the store did not say in time whether the image has its name.
            DigestMismatch, LayerRefused, TooLarge, DiskReserve, DiskFull, RegistryRefused, RegistryUnauthorized.
        """
        self.terms.crash.passing(Point.PULL_BEGUN)
        digest, manifest = await self.source.resolve(self.terms.platform, self.terms.settings.max_layers)
        if not IMAGE_NAME.match(name := self.terms.name or self.source.name):
            raise InvalidImage("the image has no name that it can have here; give one", image=name[:64])
        configuration = await self._configuration(manifest)
        total = sum(blob.size for blob in manifest.layers)
        if total > self.terms.settings.max_pull_mb * MIB:
            raise TooLarge(f"the layers have {total} bytes", limit=self.terms.settings.max_pull_mb * MIB)
        self.source.require_room(total)
        self.progress = [LayerProgress(blob.digest, 0, blob.size, LayerPhase.WAITING) for blob in manifest.layers]
        self.terms.on_progress(self.progress)
        with self.terms.turns.keeping(configuration.diff_ids):
            for _ in range(_ROUNDS):
                await self._bring(manifest, configuration.diff_ids)
                if all([await self.terms.store.has_layer(each) for each in configuration.diff_ids]):
                    break  # else a collection that began before, or of another process, has deleted one
            return await self._publish(digest, configuration)

    async def _publish(self, digest: str, configuration: Configuration) -> NewImage:
        image = NewImage(
            name=self.terms.name or self.source.name,
            tags=self.source.tags,
            layers=configuration.diff_ids,
            config=configuration.config,
            digest=digest,
            source=self.source.title,
            platform=str(configuration.platform),
            replace=self.terms.replace,
        )
        await publish(self.terms.store, image, self.terms.crash)
        return image

    async def _configuration(self, manifest: Manifest) -> Configuration:
        blob = manifest.config
        if blob.size > MAX_CONFIG_BYTES:
            raise TooLarge(f"the configuration has {blob.size} bytes", limit=MAX_CONFIG_BYTES)
        data = await self.source.small_blob(blob)
        found = await trio.to_thread.run_sync(read_configuration, data, manifest)
        if not found.platform.fits(attrs.evolve(self.terms.platform, variant="")):
            raise InvalidImage(f"the image is for {found.platform}, not {self.terms.platform}")
        return found

    async def _bring(self, manifest: Manifest, diff_ids: Sequence[str]) -> None:
        try:
            async with trio.open_nursery(strict_exception_groups=True) as nursery:
                for number, (blob, diff_id) in enumerate(zip(manifest.layers, diff_ids, strict=True)):
                    nursery.start_soon(self._layer, number, blob, diff_id)
        except BaseExceptionGroup as group:
            error = _first(group)
            if isinstance(error, DiskReserve | DiskFull):  # the disk needs the room more than the next pull does
                with trio.CancelScope(shield=True):
                    for blob in manifest.layers:
                        await trio.to_thread.run_sync(self.source.drop, blob)
            raise error from None

    async def _layer(self, number: int, blob: Blob, diff_id: str) -> None:
        """Bring one layer into the store; of two pulls that want it, the second waits for the first."""
        lock = self.terms.turns.layers.setdefault(diff_id, trio.Lock())
        try:
            async with lock:
                if await self.terms.store.has_layer(diff_id):
                    await trio.to_thread.run_sync(self.source.drop, blob)  # of a pull that was killed behind its use
                    self._note(number, blob.size, LayerPhase.PRESENT)
                    return
                await self._load(number, blob, diff_id)
        finally:
            if not lock.locked() and self.terms.turns.layers.get(diff_id) is lock:
                del self.terms.turns.layers[diff_id]

    async def _load(self, number: int, blob: Blob, diff_id: str) -> None:
        turn = object()  # a layer may be in an image twice
        await self.terms.turns.downloads.acquire_on_behalf_of(turn)
        is_loading = True
        try:

            def on_bytes(done: int) -> None:
                self._note(number, done, LayerPhase.DOWNLOADING)

            async def is_needed() -> bool:
                return not await self.terms.store.has_layer(diff_id)

            async with self.source.loaded(blob, on_bytes, is_needed) as fd:
                if fd is None:
                    self._note(number, blob.size, LayerPhase.PRESENT)
                    return
                self.terms.crash.passing(Point.PULL_BLOB)
                self.terms.turns.downloads.release_on_behalf_of(turn)
                is_loading = False
                async with self.terms.turns.unpacks:
                    self._note(number, blob.size, LayerPhase.UNPACKING)
                    await self.terms.store.unpack_layer(fd, diff_id)
                self.terms.crash.passing(Point.PULL_NAMED)
            self._note(number, blob.size, LayerPhase.DONE)
        finally:
            if is_loading:
                self.terms.turns.downloads.release_on_behalf_of(turn)

    def _note(self, number: int, done: int, phase: LayerPhase) -> None:
        digest, total = self.progress[number].layer, self.progress[number].total_bytes
        self.progress[number] = LayerProgress(digest, done, total, phase)
        self.terms.on_progress(self.progress)


async def publish(store: PullTarget, image: NewImage, crash: Crash) -> None:
    """Give an image its name, also where the caller is cancelled: half way the image may have it. Raises
    `InvalidImage`; `NsinitLost`: the store did not say in time."""
    with trio.move_on_after(_PUBLISH_S, shield=True):
        await store.publish_image(image)
        crash.passing(Point.PULL_PUBLISHED)
        return
    raise NsinitLost("the store did not say in time whether the image has its name")


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of a group that is no cancellation; the group itself where there is none."""
    for error in group.exceptions:
        leaf = _first(error) if isinstance(error, BaseExceptionGroup) else error
        if not isinstance(leaf, trio.Cancelled | BaseExceptionGroup):
            return leaf
    return group
