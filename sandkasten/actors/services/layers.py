"""The store of layers, as a pull of the daemon sees it: requests to nsinit, by the tree's one connection."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import trio

from nsinit.wire.protocol import PublishImage, UnpackLayer
from sandkasten.actors.core import Ref
from sandkasten.actors.services.nsinit import ThreadLink, ask_store
from sandkasten.images import layers
from sandkasten.images.registry.pulling import NewImage

_UNSENT = 0


class NsinitLayers:
    """A `pulling.PullTarget`. `reserve_bytes`: what the disk keeps."""

    def __init__(self, nsinit: Ref, data_dir: Path, reserve_bytes: int) -> None:
        self._nsinit, self._reserve_bytes = nsinit, reserve_bytes
        self._layers = layers.Layers(data_dir, ThreadLink(nsinit))

    async def has_layer(self, diff_id: str) -> bool:
        """See `PullTarget`."""
        return await trio.to_thread.run_sync(self._layers.has, diff_id)

    async def unpack_layer(self, blob_fd: int, diff_id: str) -> None:
        """See `PullTarget`. A cancelled call ends the unpacking."""
        with layers.asking() as asker_fd:
            request = UnpackLayer(_UNSENT, diff_id, layers.MAX_BYTES, layers.MAX_ENTRIES, self._reserve_bytes)
            await ask_store(self._nsinit, request, (blob_fd, asker_fd))

    async def publish_image(self, image: NewImage) -> None:
        """See `PullTarget`."""
        members, size_bytes = await trio.to_thread.run_sync(_sums, self._layers, image.layers)
        described = layers.describe(
            *(image.layers, image.config, image.digest, image.source, image.platform, image.tags, members, size_bytes)
        )
        with layers.description(described) as fd:
            request = PublishImage(_UNSENT, image.name, tuple(image.layers), image.replace)
            await ask_store(self._nsinit, request, (fd,))


def _sums(store: layers.Layers, digests: Sequence[str]) -> tuple[int, int]:
    """Return the entries and the bytes of all layers together."""
    found = [meta for each in set(digests) if (meta := store.find(each)) is not None]
    return sum(meta.entries for meta in found), sum(meta.size_bytes for meta in found)
