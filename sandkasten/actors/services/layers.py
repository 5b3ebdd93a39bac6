"""The store of layers, as a pull of the daemon sees it: requests to nsinit, by the tree's one connection."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import trio

from nsinit.wire.protocol import UnpackLayer
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

    async def unpack_layer(self, blob_fd: int, diff_id: str) -> str:
        """See `PullTarget`. A cancelled call ends the unpacking."""
        with layers.asking() as asker_fd:
            request = UnpackLayer(_UNSENT, diff_id, layers.MAX_BYTES, layers.MAX_ENTRIES, self._reserve_bytes)
            return (await ask_store(self._nsinit, request, (blob_fd, asker_fd))).digest

    async def publish_image(self, image: NewImage) -> None:
        """See `PullTarget`."""
        publish = partial(
            self._layers.publish_image,
            image.name,
            layers=image.layers,
            config=image.config,
            digest=image.digest,
            source=image.source,
            platform=image.platform,
            tags=image.tags,
            repository=image.repository,
            replace=image.replace,
            base_layers=image.base_layers,
        )
        await trio.to_thread.run_sync(publish)  # it reads and writes files
