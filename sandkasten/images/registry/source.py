"""Where the documents and blobs of an image come from, as a pull sees it; and the registry as such a place."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Protocol

import attrs
import trio

from sandkasten.errors import InvalidImage
from sandkasten.images.registry.blobs import Blobs, IsNeeded, OnBytes
from sandkasten.images.registry.documents import Blob, Index, Manifest, Platform, read_document
from sandkasten.images.registry.reference import Reference

if TYPE_CHECKING:
    from sandkasten.images.registry.client import RegistryClient


class PullSource(Protocol):
    """A place that has an image."""

    @property
    def title(self) -> str:
        """The image's source, as the catalogue has it."""
        ...

    @property
    def tags(self) -> Sequence[str]: ...

    @property
    def name(self) -> str:
        """The name that the source gives the image, empty without one; known once the image was resolved."""
        ...

    async def resolve(self, platform: Platform, max_layers: int) -> tuple[str, Manifest]:
        """Return the manifest for a platform, and the digest of what the source was asked for, empty where it has none.

        Raises:
            InvalidImage, TooLarge, RegistryRefused, RegistryUnauthorized, DigestMismatch.
        """
        ...

    async def small_blob(self, blob: Blob) -> bytes:
        """Return a blob whole. Raises `DigestMismatch`."""
        ...

    def require_room(self, size: int) -> None:
        """Raise `DiskReserve` unless there is room for so many bytes of blobs, as far as they are kept."""
        ...

    def loaded(self, blob: Blob, on_bytes: OnBytes, is_needed: IsNeeded) -> AbstractAsyncContextManager[int | None]:
        """Open a descriptor that has a blob, up to its end; None where another process had it in hand, and it is not
        needed by now. `on_bytes` is told how many bytes came, if that takes time.

        Raises:
            DigestMismatch: what came is not the blob. It may be raised behind the last byte.
        """
        ...

    def drop(self, blob: Blob) -> None:
        """Remove what is kept of a blob."""
        ...


@attrs.frozen
class RegistrySource:
    """A `PullSource` that is a registry. What comes is kept in `blobs`."""

    reference: Reference
    client: RegistryClient
    blobs: Blobs

    @property
    def title(self) -> str:
        return str(self.reference)

    @property
    def tags(self) -> Sequence[str]:
        return [self.reference.tag] if self.reference.tag else []

    @property
    def name(self) -> str:
        return self.reference.name

    async def resolve(self, platform: Platform, max_layers: int) -> tuple[str, Manifest]:
        """See `PullSource`."""
        digest, data = await self.client.manifest(self.reference, self.reference.target)
        document = await read_in_thread(data, max_layers)
        if isinstance(document, Index):
            _, data = await self.client.manifest(self.reference, document.choose(platform).digest)
            document = await read_in_thread(data, max_layers)
        return digest, require_manifest(document)

    async def small_blob(self, blob: Blob) -> bytes:
        """See `PullSource`."""
        return await self.client.small_blob(self.reference.repository, blob.digest, blob.size)

    def require_room(self, size: int) -> None:
        """See `PullSource`."""
        self.blobs.require_room(size)

    def loaded(self, blob: Blob, on_bytes: OnBytes, is_needed: IsNeeded) -> AbstractAsyncContextManager[int | None]:
        """See `PullSource`."""
        return self.blobs.loaded(self.client, self.reference.repository, blob, on_bytes, is_needed)

    def drop(self, blob: Blob) -> None:
        """See `PullSource`."""
        self.blobs.drop(blob)


async def read_in_thread(data: bytes, max_layers: int) -> Manifest | Index:
    """Read a document in a thread: one of some megabytes takes half a second."""
    return await trio.to_thread.run_sync(partial(read_document, data, max_layers=max_layers))


def require_manifest(document: Manifest | Index) -> Manifest:
    """Return what an index names. Raises `InvalidImage`: another index, so that no chain of them is followed."""
    if isinstance(document, Index):
        raise InvalidImage("the index names another index where an image should be")
    return document
