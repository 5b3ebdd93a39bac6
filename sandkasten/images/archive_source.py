"""Imports from archives: the archive as the source of a pull, and a root file system as an image of one layer.

A layer goes to the jail through a pipe, since the jail reads up to the end of what it is given; on its way it is
hashed. Nothing of an archive is written anywhere but by the jail.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import IO

import attrs
import trio

from sandkasten.config import MIB
from sandkasten.errors import DigestMismatch, InvalidImage, InvalidReference
from sandkasten.images.archives import ArchiveKind, ImageArchive, MemberBytes, open_archive
from sandkasten.images.registry.blobs import Blobs, IsNeeded, OnBytes
from sandkasten.images.registry.documents import (
    MAX_CONFIG_BYTES,
    MAX_DOCUMENT_BYTES,
    Blob,
    Index,
    IndexEntry,
    Manifest,
    Platform,
    SavedImage,
    choose_ref,
    read_configuration,
    read_document,
    read_saved,
)
from sandkasten.images.registry.pulling import NewImage, Pull, PullTerms, publish
from sandkasten.images.registry.reference import parse_reference
from sandkasten.images.registry.source import require_manifest
from sandkasten.model.image import ImageConfig

_PIECE_BYTES = 1 << 20
_TURN_BYTES = 16 << 20
"""Bytes of a layer between two looks at whether somebody still wants it."""
_PIPE_BYTES = 1 << 20


@attrs.define
class ArchiveSource:
    """A `PullSource` that is an archive. `ref`: the name of the image in it, None for the only one."""

    archive: ImageArchive
    title: str
    ref: str | None = None
    tags: Sequence[str] = ()
    name: str = ""
    """The name that the archive gives the image, for this node; known once the image was resolved."""
    _files: dict[str, str] = attrs.field(factory=dict, init=False)
    """The member that has a blob, by its digest."""

    async def resolve(self, platform: Platform, max_layers: int) -> tuple[str, Manifest]:
        """See `PullSource`."""
        resolve = self._of_layout if self.archive.kind is ArchiveKind.OCI else self._of_docker
        return await trio.to_thread.run_sync(resolve, platform, max_layers)

    async def small_blob(self, blob: Blob) -> bytes:
        """See `PullSource`."""
        return await trio.to_thread.run_sync(self._read_blob, blob, MAX_CONFIG_BYTES)

    def require_room(self, size: int) -> None:
        """See `PullSource`: none is needed."""

    def drop(self, blob: Blob) -> None:
        """See `PullSource`: there is nothing."""

    @asynccontextmanager
    async def loaded(self, blob: Blob, on_bytes: OnBytes, is_needed: IsNeeded) -> AsyncIterator[int]:
        """See `PullSource`. Whoever reads may end before the layer does."""
        is_named = self.archive.kind is ArchiveKind.OCI
        with self.archive.opened(self._file_of(blob)) as part:
            _check(part.size == blob.size, blob)
            read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
            async with trio.open_nursery(strict_exception_groups=True) as nursery:
                nursery.start_soon(_feed, part, write_fd, blob if is_named else None)
                try:
                    yield read_fd
                finally:
                    os.close(read_fd)  # so a feeder that nobody reads from gets EPIPE

    # In a thread ------------------------------------------------------------------------------------------------

    def _of_layout(self, platform: Platform, max_layers: int) -> tuple[str, Manifest]:
        """Read the index of a layout, and one index that it may name."""
        top = read_document(self._read("index.json"), max_layers=max_layers)
        if not isinstance(top, Index):
            raise InvalidImage("index.json is no index")
        found: Sequence[IndexEntry] = choose_ref(top.entries, self.ref)
        blob = found[0].blob if len(found) == 1 else Index(found).choose(platform)
        self._name(next((each.refs for each in found if each.blob == blob), ()))
        document = read_document(self._read_blob(blob, MAX_DOCUMENT_BYTES), max_layers=max_layers)
        if isinstance(document, Index):
            data = self._read_blob(document.choose(platform), MAX_DOCUMENT_BYTES)
            document = read_document(data, max_layers=max_layers)
        return blob.digest, require_manifest(document)

    def _of_docker(self, platform: Platform, max_layers: int) -> tuple[str, Manifest]:
        """Make a manifest, since `docker save` writes none. The digests of its layers are those of their content, as
        the configuration has them."""
        there = read_saved(self._read("manifest.json"), max_layers=max_layers)
        found: Sequence[SavedImage] = choose_ref(there, self.ref)
        if len(found) != 1:
            raise InvalidImage(f"the archive has {len(found)} images of that name")
        (saved,) = found
        self._name(saved.refs if self.ref is None else (self.ref,))
        data = self._read(saved.config, MAX_CONFIG_BYTES)
        config = Blob(f"sha256:{hashlib.sha256(data).hexdigest()}", len(data))
        diff_ids = read_configuration(data, Manifest(config, [config] * len(saved.layers))).diff_ids
        self._files = {**dict(zip(diff_ids, saved.layers, strict=True)), config.digest: saved.config}
        return "", Manifest(config, [Blob(each, self._size(each)) for each in diff_ids])

    def _size(self, digest: str) -> int:
        with self.archive.opened(self._files[digest]) as part:
            return part.size

    def _name(self, refs: Sequence[str]) -> None:
        """Take name and tag from what the archive calls the image: a whole reference, or a tag alone."""
        for ref in refs:
            with suppress(InvalidReference):
                reference = parse_reference(ref)
                is_whole = "/" in ref or ":" in ref
                self.name = reference.name if is_whole else ""
                self.tags = [reference.tag or ""] if is_whole else [ref]
                return

    def _file_of(self, blob: Blob) -> str:
        if self.archive.kind is ArchiveKind.OCI:
            return f"blobs/{blob.digest.replace(':', '/')}"
        return self._files[blob.digest]

    def _read_blob(self, blob: Blob, most: int) -> bytes:
        data = self._read(self._file_of(blob), most)
        _check(f"sha256:{hashlib.sha256(data).hexdigest()}" == blob.digest and len(data) == blob.size, blob)
        return data

    def _read(self, name: str, most: int = MAX_DOCUMENT_BYTES) -> bytes:
        with self.archive.opened(name) as part:
            return part.read_all(most, name[:100])


def _check(is_right: bool, blob: Blob) -> None:
    if not is_right:
        raise DigestMismatch(f"the archive has another file as {blob.digest}", digest=blob.digest)


async def _feed(part: MemberBytes, fd: int, blob: Blob | None) -> None:
    """Write a part of a file into a pipe, and close that. Raises `DigestMismatch`: it is not `blob`."""
    digest = hashlib.sha256()
    try:
        with suppress(OSError):  # EPERM: a pipe of the usual size does, too (fcntl(2), F_SETPIPE_SZ)
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        limiter = trio.CapacityLimiter(1)  # a thread of its own: one that waits for its unpack keeps none from others
        for at in range(0, part.size, _TURN_BYTES):
            await trio.to_thread.run_sync(_feed_some, part, at, fd, None if blob is None else digest, limiter=limiter)
    except BrokenPipeError:
        return
    finally:
        os.close(fd)
    if blob is not None:
        _check(f"sha256:{digest.hexdigest()}" == blob.digest, blob)


def _feed_some(part: MemberBytes, at: int, fd: int, digest: hashlib._Hash | None) -> None:
    end = min(at + _TURN_BYTES, part.size)
    while at < end:
        data = part.read(at, min(_PIECE_BYTES, end - at))
        if digest is not None:
            digest.update(data)
        at += len(data)
        while data:
            data = data[os.write(fd, data) :]


@attrs.define
class ArchiveImport:
    """One import. The archive of `fd`, a file that can be sought in or a directory, is one of images, or the tar of a
    root file system, which is one layer. `ref`: the image's name in an archive of several."""

    fd: int
    title: str
    ref: str | None
    blobs: Blobs
    terms: PullTerms

    async def run(self) -> NewImage:
        """Import, and return the image as it was published.

        Raises:
            InvalidImage: the archive is broken, has no image of that name or platform, or the store does not take it.
            DigestMismatch, LayerRefused, TooLarge, DiskReserve, NsinitLost.
        """
        async with self.opened() as archive:
            if archive is None:
                return await self._run_rootfs()
            return await self.pull(archive).run()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[ImageArchive | None]:
        """Open the file as an archive of images; None: it is none."""
        stack = ExitStack()
        try:

            def make_spool() -> IO[bytes]:
                return stack.enter_context(self.blobs.unnamed())

            def check(size: int) -> None:
                trio.from_thread.check_cancelled()
                self.blobs.require_room(size)

            most = self.terms.settings.max_pull_mb * MIB
            yield await trio.to_thread.run_sync(open_archive, self.fd, make_spool, most, check)
        finally:
            with trio.CancelScope(shield=True):  # blocks of a large file take their time to be freed
                await trio.to_thread.run_sync(stack.close)

    def pull(self, archive: ImageArchive) -> Pull:
        """Return the pull from an archive. Without a name, the archive's is taken."""
        return Pull(ArchiveSource(archive, self.title, self.ref), self.terms)

    async def _run_rootfs(self) -> NewImage:
        if self.ref is not None:
            raise InvalidImage("the tar of a root file system has no images to choose from")
        os.lseek(self.fd, 0, os.SEEK_SET)  # `open_archive` has moved the offset
        terms = self.terms
        async with terms.turns.making():
            layers = [await terms.store.unpack_layer(self.fd, "")]
            image = NewImage(terms.name, [], layers, ImageConfig(), "", self.title, str(terms.platform), terms.replace)
            await publish(terms.store, image, terms.crash)
        return image
