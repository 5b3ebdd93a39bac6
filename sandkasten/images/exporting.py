"""Export of an image as an OCI image layout in a tar, which other tools read, and `image import`.

A jail of nsinit's writes each layer as a tar; here the bytes are compressed and hashed, and not read. The diff ids of
the exported configuration are those of the tars that were written: of a layer that our own packer made, the same as
before, and of another the digest of the same files in our order. An image that is no list of layers has one.
Blocking: call it from a thread.
Sources: the OCI image specification (image-layout.md, manifest.md, config.md, annotations.md).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tarfile
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, Protocol

import attrs
from backports import zstd

from sandkasten.errors import InvalidImage, InvalidReference, SandkastenError
from sandkasten.images.catalog import HOST, Catalog, Image
from sandkasten.images.layers import Layers, PackedLayer
from sandkasten.images.registry.blobs import Blobs, write_at
from sandkasten.images.registry.documents import Blob, Platform
from sandkasten.images.registry.reference import parse_reference
from sandkasten.model.image import Compression

_LAYER = "application/vnd.oci.image.layer.v1.tar"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_SUFFIXES = {"gzip": "+gzip", "zstd": "+zstd", "none": ""}
_PIECE_BYTES = 1 << 20
_LOOK_BYTES = 64 << 20
_GZIP_WINDOW = 31
"""zlib's sign for a gzip header, which has no time in it: the same content gives the same blob."""


@attrs.frozen
class Exported:
    """An export: the digest of the manifest, and whether a layer has another digest than in the store.
    `skipped`: files and attributes that no archive can hold."""

    digest: str
    is_repacked: bool
    skipped: int


def export_image(
    catalog: Catalog,
    store: Layers,
    blobs: Blobs,
    name: str,
    target: IO[bytes],
    compression: Compression,
    *,
    check: Callable[[], object] = object,
) -> Exported:
    """Write an image to a file, which may be a pipe. Each layer waits in a file of `blobs` until its size is known.
    `check` is called at each piece of a layer, and ends the export by what it raises.

    Raises:
        InvalidImage: there is no image of that name, or it is the machine's own.
        LayerRefused, DiskReserve, DiskFull, NsinitLost.
        OSError: the file can't be written.
    """
    image = catalog.get(name)
    if image.name == HOST or image.kind == "host":
        raise InvalidImage(f"image {name!r} is this machine's own /usr, which is no image's to give away", image=name)
    with tarfile.open(fileobj=target, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        writer = _Writer(archive)
        # First: of an image whose first layer can't be packed no byte is written, and HTTP has a status for that.
        found = [_add_layer(writer, store, blobs, each, compression, check) for each in image.layers or [image.name]]
        writer.add("oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        diff_ids = [packed.diff_id for packed, _ in found]
        config = writer.add_blob(_config(image, diff_ids))
        kind = _LAYER + _SUFFIXES[compression]
        manifest = writer.add_blob(
            _json(
                schemaVersion=2,
                mediaType=_MANIFEST,
                config=_descriptor(config, _CONFIG),
                layers=[_descriptor(blob, kind) for _, blob in found],
            )
        )
        if catalog.get(name) != image:  # a layer that was removed meanwhile was packed in part
            raise InvalidImage(f"image {name!r} was replaced while it was exported", image=name)
        entry = _descriptor(manifest, _MANIFEST) | {"annotations": _names(image)}
        writer.add("index.json", _json(schemaVersion=2, manifests=[entry]))
    is_repacked = bool(image.layers) and diff_ids != list(image.layers)
    return Exported(manifest.digest, is_repacked, sum(packed.skipped for packed, _ in found))


def _add_layer(
    writer: _Writer, store: Layers, blobs: Blobs, layer: str, compression: Compression, check: Callable[[], object]
) -> tuple[PackedLayer, Blob]:
    with blobs.unnamed() as file:
        digest, size = hashlib.sha256(), 0
        with _packed(store, layer) as (source, packing):
            for piece in _compressed(source, compression):
                check()
                if size // _LOOK_BYTES != (size + len(piece)) // _LOOK_BYTES:
                    blobs.require_room(_LOOK_BYTES)
                write_at(file.fileno(), piece, size)
                digest.update(piece)
                size += len(piece)
        file.seek(0)
        blob = Blob(f"sha256:{digest.hexdigest()}", size)
        writer.add_file(_path_of(blob), file, size)
        return packing.result(), blob


@attrs.define
class _Packing:
    """The work of a thread, in which nsinit has a layer packed."""

    packed: PackedLayer | None = None
    error: SandkastenError | None = None

    def run(self, store: Layers, layer: str, fd: int) -> None:
        try:
            self.packed = store.pack_layer(layer, fd)
        except SandkastenError as error:
            self.error = error
        finally:
            os.close(fd)

    def result(self) -> PackedLayer:
        if self.packed is None:
            raise self.error or SandkastenError("the layer was not packed")
        return self.packed


@contextlib.contextmanager
def _packed(store: Layers, layer: str) -> Iterator[tuple[IO[bytes], _Packing]]:
    """Have a layer packed into a pipe, and yield its other end; the packing has ended when the block is left."""
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    packing = _Packing()
    thread = threading.Thread(target=packing.run, args=(store, layer, write_fd))
    thread.start()
    try:
        with open(read_fd, "rb", buffering=0) as source:
            yield source, packing
    finally:
        thread.join()  # a packer that nobody reads from gets EPIPE
    packing.result()


class _Compressor(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...
    def flush(self) -> bytes: ...


def _compressed(source: IO[bytes], compression: Compression) -> Iterator[bytes]:
    if compression == "none":
        yield from iter(lambda: source.read(_PIECE_BYTES), b"")
        return
    compressor: _Compressor = zlib.compressobj(wbits=_GZIP_WINDOW) if compression == "gzip" else zstd.ZstdCompressor()
    while piece := source.read(_PIECE_BYTES):
        yield compressor.compress(piece)
    yield compressor.flush()


@attrs.define
class _Writer:
    """Members of the outer tar, of no time and no owner. A blob that is there already is not written again."""

    archive: tarfile.TarFile
    _there: set[str] = attrs.field(factory=set, init=False)

    def add(self, name: str, content: bytes) -> None:
        self.add_file(name, io.BytesIO(content), len(content))

    def add_blob(self, content: bytes) -> Blob:
        blob = Blob(f"sha256:{hashlib.sha256(content).hexdigest()}", len(content))
        self.add(_path_of(blob), content)
        return blob

    def add_file(self, name: str, file: IO[bytes], size: int) -> None:
        if name in self._there:
            return
        self._there.add(name)
        member = tarfile.TarInfo(name)
        member.size = size
        self.archive.addfile(member, file)


def _path_of(blob: Blob) -> str:
    return f"blobs/{blob.digest.replace(':', '/')}"


def _config(image: Image, diff_ids: list[str]) -> bytes:
    platform = Platform.parse(image.platform) if image.platform else Platform.own()
    said: dict[str, Any] = {name: value for name, value in attrs.asdict(platform).items() if value}
    said |= {"config": image.config.to_oci(), "rootfs": {"type": "layers", "diff_ids": diff_ids}}
    return _json(**said, created=image.created_at, history=_history(image, len(diff_ids)))


def _history(image: Image, count: int) -> list[dict[str, str]]:
    """Return an entry for each of the layers, empty where nobody knows what has made it."""
    made = image.config.history[-count:]
    return [{} for _ in range(count - len(made))] + [{"created_by": each} if each else {} for each in made]


def _names(image: Image) -> dict[str, str]:
    """Return the annotations with the image's name: the tag, by which tools choose it, and the whole of it."""
    tag = next(iter(image.tags), "") or "latest"
    names = {"org.opencontainers.image.ref.name": tag}
    with contextlib.suppress(InvalidReference):
        parse_reference(whole := f"{image.family}:{tag}")
        names["io.containerd.image.name"] = whole
    return names


def _descriptor(blob: Blob, kind: str) -> dict[str, Any]:
    return {"mediaType": kind, "digest": blob.digest, "size": blob.size}


def _json(**said: Any) -> bytes:  # JSON values
    return json.dumps(said, sort_keys=True).encode()
