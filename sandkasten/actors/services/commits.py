"""Commits of sessions: what a session has changed becomes a layer, and that layer on those below an image. Of a session
that has changed nothing the image has those below alone.

With `squash`, or where an image can't have one layer more, what earlier commits have added becomes part of that layer,
above the layers that the first of them began with. So a chain of commits goes on for ever. An image that came with as
many layers as there may be becomes one layer.
nsinit packs the session and unpacks the layer, each in a jail; here are a pipe between the two, and the description.
A commit is whole with the image's name: what fails or is cancelled before leaves a layer that nobody has, which a
collection removes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager

import attrs
import trio

from nsinit.wire.protocol import MAX_IMAGE_LAYERS, LayerPacked, PackSession
from sandkasten.actors.core import Ref, unwrap
from sandkasten.actors.services.images import DescribeImages, Resolve
from sandkasten.actors.services.nsinit import ask_store
from sandkasten.crash import Crash, Point
from sandkasten.errors import Conflict, DigestMismatch, InvalidImage, SandkastenError
from sandkasten.images.catalog import Catalog, Image
from sandkasten.images.layers import MAX_BYTES, MAX_ENTRIES, asking
from sandkasten.images.registry.pulling import NewImage, PullTarget, PullTurns, publish
from sandkasten.links.fds import OwnedFd
from sandkasten.model.image import CommitSpec, ImageDescription

COPY_S = 900.0
"""The longest time for which a session stands still."""
_UNSENT = 0


class Commits:
    """Commits of the sessions of a node, one at a time: a commit has one of the store's turns for unpacking."""

    def __init__(
        self, nsinit: Ref, images: Ref, layers: PullTarget, turns: PullTurns, crash: Crash, catalog: Catalog
    ) -> None:
        self._nsinit, self._images, self._layers, self._crash = nsinit, images, layers, crash
        self._catalog = catalog
        self._turns, self._one = turns, trio.Lock()

    async def commit(
        self, session_id: str, image_name: str, spec: CommitSpec, still: Callable[[], AbstractAsyncContextManager[None]]
    ) -> ImageDescription:
        """Make an image of a session; `still` keeps the session's processes from running while it is entered.

        Raises:
            InvalidImage: the name is malformed or taken; the session's image is the machine's own, or another one by
                now.
            LayerRefused: the session has what no layer can have, or more than can be copied in `COPY_S`.
            Conflict: the session went on, or ended, before all was copied.
            DiskFull: the disk has no room for the layer.
            NsinitLost: the store did not say in time whether the image has its name.
        """
        self._catalog.require_changeable()
        below: Image = await self._images.ask_again(Resolve(image_name))
        if below.kind == "host":
            raise InvalidImage(f"image {below.name!r} is the machine's own /usr, of which no image can be made")
        config = spec.config.apply(below.config)
        kept = len(below.layers)
        if spec.squash or kept >= MAX_IMAGE_LAYERS:
            kept = below.base if below.base < MAX_IMAGE_LAYERS else 0
        async with self._one, self._turns.making():
            name, repository, tag = await trio.to_thread.run_sync(self._place, spec)
            async with still():
                packed = await self._take(session_id, kept)
            self._crash.passing(Point.COMMIT_PACKED)
            if packed.below != tuple(below.layers):
                raise InvalidImage(f"image {image_name!r} is another one than when the session was made")
            under = packed.below[:kept]
            changed = [packed.digest] if packed.entries or not under else []
            # It is that of the topmost layers, so those that became part of the new one are its last.
            history = config.history[: max(0, len(config.history) - len(packed.below) + kept)]
            image = NewImage(
                name=name,
                tags=[tag] if tag else [],
                repository=repository,
                layers=[*under, *changed],
                config=attrs.evolve(config, history=(*history, spec.created_by) if changed else history),
                digest="",
                source=below.source if below.is_cached_step else f"commit of a session of {below.name}",
                platform=below.platform,
                replace=spec.replace,
                base_layers=min(below.base, kept),
            )
            with self._turns.keeping(image.layers):
                await publish(self._layers, image, self._crash)
        (found,) = await self._images.ask_again(DescribeImages(name))
        return found

    def _place(self, spec: CommitSpec) -> tuple[str, str, str]:
        """Return `Catalog.place_for` of the new image. Raises `InvalidImage`: the name is malformed, or taken."""
        place = self._catalog.place_for(spec.name)
        if not spec.replace:
            self._catalog.require_free(place[0])
        return place

    async def _take(self, session_id: str, kept: int) -> LayerPacked:
        """Pack what the session has above the lowest `kept` layers, and unpack the archive, at the same time. Raises as
        `commit`."""
        unpacked: list[str] = []
        with trio.move_on_after(COPY_S):
            try:
                async with trio.open_nursery(strict_exception_groups=True) as nursery:
                    with _pipe() as (read_end, write_end):
                        await nursery.start(self._unpack, read_end, unpacked)
                        with write_end, asking() as asker_fd:
                            request = PackSession(_UNSENT, session_id, MAX_BYTES, MAX_ENTRIES, kept)
                            packed = await ask_store(self._nsinit, request, (write_end.fileno(), asker_fd))
            except* SandkastenError as group:
                raise unwrap(group) from None
            if unpacked != [packed.digest]:
                raise DigestMismatch("the layer is not what the session was packed into")
            return packed
        raise Conflict(f"the session has more than can be copied in {COPY_S:.0f} s")

    async def _unpack(self, read_end: OwnedFd, unpacked: list[str], *, task_status: trio.TaskStatus[None]) -> None:
        with read_end:
            task_status.started()
            unpacked.append(await self._layers.unpack_layer(read_end.fileno(), ""))


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[OwnedFd, OwnedFd]]:
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    with OwnedFd(read_fd) as read_end, OwnedFd(write_fd) as write_end:
        yield read_end, write_end
