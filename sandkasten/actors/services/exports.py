"""Exports of images by the daemon: a thread writes the archive into a pipe, and whoever asked for it reads that."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import trio

from sandkasten.actors.core import Ref, unwrap
from sandkasten.actors.services.nsinit import ThreadLink
from sandkasten.errors import SandkastenError
from sandkasten.images.catalog import Catalog
from sandkasten.images.exporting import export_image
from sandkasten.images.layers import Layers
from sandkasten.images.registry.blobs import Blobs
from sandkasten.links.fds import OwnedFd
from sandkasten.model.image import Compression

Export = AbstractAsyncContextManager[Callable[[], Awaitable[bytes]]]
_THREADS = 4
"""Exports at a time; others wait. A reader that is slow keeps a thread, and a layer on the disk."""


class Exports:
    """Exports of the images of a node."""

    def __init__(self, catalog: Catalog, nsinit: Ref, data_dir: Path, blobs: Blobs) -> None:
        self._catalog, self._nsinit, self._data_dir, self._blobs = catalog, nsinit, data_dir, blobs
        self._limiter = trio.CapacityLimiter(_THREADS)

    @contextlib.asynccontextmanager
    async def open(self, name: str, compression: Compression) -> AsyncIterator[Callable[[], Awaitable[bytes]]]:
        """Have an image exported, and yield what reads a piece of the archive: see `Supervisor.export_image`."""
        layers = Layers(self._data_dir, ThreadLink(self._nsinit, trio.lowlevel.current_trio_token()))
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        ours, theirs = trio.lowlevel.FdStream(read_fd), OwnedFd(write_fd)

        def write() -> None:
            # Nobody may read any more: then the pipe is broken, or the check raises what a cancelled task does.
            with contextlib.suppress(BrokenPipeError), open(theirs.fileno(), "wb", closefd=False) as target:
                check = trio.from_thread.check_cancelled
                export_image(self._catalog, layers, self._blobs, name, target, compression, check=check)

        async def run() -> None:
            with theirs:
                await trio.to_thread.run_sync(write, limiter=self._limiter)

        async def read() -> bytes:
            return bytes(await ours.receive_some())

        try:
            async with trio.open_nursery(strict_exception_groups=True) as nursery, ours:
                nursery.start_soon(run)
                yield read
        except* SandkastenError as group:
            raise unwrap(group) from None
