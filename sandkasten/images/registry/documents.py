"""Documents of a registry or an archive: indexes, manifests and configurations. Pure; every byte may be hostile.

A document is judged by its shape, and its media type is not asked: registries and tools disagree about it.

Sources: OCI image specification 1.1, `manifest.md`, `image-index.md`, `config.md`; Docker's "Image Manifest Version 2,
Schema 2", and its image specification 1.2 (`manifest.json`).
"""

from __future__ import annotations

import itertools
import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

import attrs
import orjson

from sandkasten.errors import InvalidImage, InvalidReference, InvalidRequest, TooLarge
from sandkasten.images.registry.reference import DIGEST, parse_reference
from sandkasten.model.image import ImageConfig

MEDIA_TYPES: Final = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
MAX_DOCUMENT_BYTES: Final = 4 << 20
MAX_CONFIG_BYTES: Final = 1 << 20
_MAX_INDEX_ENTRIES = 1000
_MAX_LISTED, _MAX_SHOWN_CHARS = 20, 200
_REF_NAMES = ("io.containerd.image.name", "org.opencontainers.image.ref.name")
"""Annotations of an entry of a layout's index: the whole name, and the name or a tag alone."""
_MAX_BLOB_BYTES = 1 << 40
_MAX_HISTORY_CHARS = 400
"""Of an entry; those of 127 layers, each character as 12 bytes of JSON, are half of what a description may have."""

_Json = Mapping[str, Any]
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "riscv64": "riscv64", "ppc64le": "ppc64le"}


@attrs.frozen
class Platform:
    """The system that an image is for, in the words of the specification."""

    os: str
    architecture: str
    variant: str = ""

    def __str__(self) -> str:
        return "/".join(filter(None, (self.os, self.architecture, self.variant)))

    @classmethod
    def parse(cls, text: str) -> Platform:
        """Take `OS/ARCHITECTURE` or `OS/ARCHITECTURE/VARIANT` apart. Raises `InvalidRequest`."""
        parts = text.split("/")
        if not 2 <= len(parts) <= 3 or not all(part.isascii() and part.isalnum() for part in parts):
            raise InvalidRequest("a platform is OS/ARCHITECTURE or OS/ARCHITECTURE/VARIANT, such as linux/arm64")
        return cls(*parts)

    @classmethod
    def own(cls) -> Platform:
        """Return that of this machine."""
        machine = os.uname().machine
        return cls("linux", _MACHINES.get(machine, machine))

    def fits(self, wanted: Platform) -> bool:
        """Whether an image for this platform is one for `wanted`; a variant that is not asked for may be any."""
        is_kind = (self.os, self.architecture) == (wanted.os, wanted.architecture)
        return is_kind and wanted.variant in ("", self.variant)


@attrs.frozen
class Blob:
    """A descriptor: a blob's digest and its size in bytes."""

    digest: str
    size: int


@attrs.frozen
class Manifest:
    """The parts of one image, its layers from the bottom."""

    config: Blob
    layers: Sequence[Blob]


@attrs.frozen
class IndexEntry:
    """A manifest of an index, or another index. `refs`: the names that the index of a layout gives it."""

    platform: Platform
    blob: Blob
    refs: Sequence[str] = ()


@attrs.frozen
class Index:
    """Manifests of one image for several platforms, or of several images."""

    entries: Sequence[IndexEntry]

    def choose(self, wanted: Platform) -> Blob:
        """Return the first manifest for a platform. Raises `InvalidImage`, which lists those that there are."""
        for entry in self.entries:
            if entry.platform.fits(wanted):
                return entry.blob
        there = ", ".join(sorted({str(entry.platform) for entry in self.entries})[:20])
        raise InvalidImage(f"the image is not there for {wanted}; there are: {there or 'none'}")


@attrs.frozen
class SavedImage:
    """An image of `docker save`: the files of its configuration and layers, and its names."""

    config: str
    layers: Sequence[str]
    refs: Sequence[str]


class _Named(Protocol):
    @property
    def refs(self) -> Sequence[str]: ...


N = TypeVar("N", bound=_Named)


def choose_ref(there: Sequence[N], ref: str | None) -> Sequence[N]:
    """Return what has a name, by default what has the only name. Raises `InvalidImage`, which lists the names."""
    if ref is not None and (found := [each for each in there if any(_is_same(ref, name) for name in each.refs)]):
        return found
    names = sorted({repr(name[:_MAX_SHOWN_CHARS]) for each in there for name in each.refs})
    if ref is None and len({tuple(each.refs) for each in there}) == 1:
        return there
    listed = ", ".join(names[:_MAX_LISTED]) or "none with a name"
    if ref is None:
        raise InvalidImage(f"the archive has several images; choose one by its name: {listed}")
    raise InvalidImage(f"the archive has no image {ref[:_MAX_SHOWN_CHARS]!r}; there are: {listed}")


def _is_same(ref: str, other: str) -> bool:
    if ref == other:
        return True
    try:
        return parse_reference(ref) == parse_reference(other)
    except InvalidReference:
        return False


@attrs.frozen
class Configuration:
    """The kept part of an image's configuration, its platform, and the digests of its unpacked layers."""

    platform: Platform
    config: ImageConfig
    diff_ids: Sequence[str]


def read_document(data: bytes, *, max_layers: int) -> Manifest | Index:
    """Return the manifest or index in a document.

    Raises:
        InvalidImage: the document is neither.
        TooLarge: an image of more layers, or an index of more entries, than are allowed.
    """
    value = _object(_parse(data), "the manifest")
    if isinstance(value.get("manifests"), list):
        return _index(value["manifests"])
    if "fsLayers" in value:
        raise InvalidImage("the manifest is of Docker's schema 1, which has no digest of a configuration; push it anew")
    layers = value.get("layers")
    if not isinstance(layers, list) or not layers:
        raise InvalidImage("the manifest has no layers")
    if len(layers) > max_layers:
        raise TooLarge(f"the image has {len(layers)} layers, more than {max_layers}", limit=max_layers)
    return Manifest(_blob(value.get("config"), "config"), tuple(_blob(layer, "layer") for layer in layers))


def read_configuration(data: bytes, manifest: Manifest) -> Configuration:
    """Return the configuration of a manifest's image.

    Raises:
        InvalidImage: it is none, does not fit the manifest, or is too large.
    """
    value = _object(_parse(data), "the configuration")
    diff_ids = _object(value.get("rootfs"), "rootfs").get("diff_ids")
    if not isinstance(diff_ids, list) or not all(isinstance(each, str) and DIGEST.match(each) for each in diff_ids):
        raise InvalidImage("the configuration has no list of diff_ids: this is no image of a file system")
    if len(diff_ids) != len(manifest.layers):
        raise InvalidImage(f"the configuration names {len(diff_ids)} layers, the manifest {len(manifest.layers)}")
    platform = Platform(*(_text(value, name) for name in ("os", "architecture", "variant")))
    try:
        config = ImageConfig.from_oci(_object(value.get("config") or {}, "config"))
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidImage(f"the configuration is malformed: {error}") from error
    history = _history(value.get("history"), len(diff_ids))
    return Configuration(platform, attrs.evolve(config, history=history), tuple(diff_ids))


def _history(said: object, layers: int) -> tuple[str, ...]:
    """Return what has made the topmost layers, up to the lowest of which that is said; nothing where the list is no
    list of the layers. Source: the OCI image specification (config.md, "history")."""
    entries = [each for each in said if isinstance(each, dict)] if isinstance(said, list) else []
    made = [each.get("created_by") or "" for each in entries if not each.get("empty_layer")]
    if len(made) != layers or not all(map(_is_text, made)):
        return ()
    return tuple(itertools.dropwhile(operator.not_, (each[:_MAX_HISTORY_CHARS] for each in made)))


def _index(entries: Sequence[object]) -> Index:
    if len(entries) > _MAX_INDEX_ENTRIES:
        raise TooLarge(f"the index has {len(entries)} entries", limit=_MAX_INDEX_ENTRIES)
    found = []
    for each in entries:
        entry = _object(each, "an entry of the index")
        platform = _object(entry.get("platform") or {}, "platform")
        names = [_text(platform, name) for name in ("os", "architecture", "variant")]
        notes = _object(entry.get("annotations") or {}, "annotations")
        refs = [_text(notes, name) for name in _REF_NAMES]
        found.append(IndexEntry(Platform(*names), _blob(entry, "entry"), tuple(filter(None, refs))))
    return Index(found)


def read_saved(data: bytes, *, max_layers: int) -> Sequence[SavedImage]:
    """Return the images that the `manifest.json` of `docker save` lists.

    Raises:
        InvalidImage: it lists none.
        TooLarge: more images, or an image of more layers, than are allowed.
    """
    entries = _parse(data)
    if not isinstance(entries, list) or not entries:
        raise InvalidImage("manifest.json lists no images")
    if len(entries) > _MAX_INDEX_ENTRIES:
        raise TooLarge(f"manifest.json has {len(entries)} entries", limit=_MAX_INDEX_ENTRIES)
    found = []
    for each in entries:
        entry = _object(each, "an entry of manifest.json")
        layers, refs = entry.get("Layers"), entry.get("RepoTags") or []
        if not isinstance(layers, list) or not layers or not isinstance(refs, list):
            raise InvalidImage("an entry of manifest.json has no layers")
        if not all(map(_is_text, (*layers, *refs))):
            raise InvalidImage("an entry of manifest.json has a name that is no text")
        if len(layers) > max_layers:
            raise TooLarge(f"the image has {len(layers)} layers, more than {max_layers}", limit=max_layers)
        found.append(SavedImage(_text(entry, "Config"), layers, refs))
    return found


def _blob(value: object, what: str) -> Blob:
    fields = _object(value, what)
    digest, size = fields.get("digest"), fields.get("size")
    if not isinstance(digest, str) or not DIGEST.match(digest):
        raise InvalidImage(f"a {what} has no digest by SHA-256")
    if type(size) is not int or not 0 <= size <= _MAX_BLOB_BYTES:
        raise InvalidImage(f"a {what} has no size between 0 and {_MAX_BLOB_BYTES}")
    return Blob(digest, size)


def _parse(data: bytes) -> object:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidImage("a document of the image is no JSON") from error


def _object(value: object, what: str) -> _Json:
    if not isinstance(value, dict):
        raise InvalidImage(f"{what} is no object")
    return value


def _text(fields: _Json, name: str) -> str:
    value = fields.get(name) or ""
    if not _is_text(value):
        raise InvalidImage(f"{name} is no text")
    return str(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value
