"""Descriptions of images for people and programs: what the catalogue, the layers and the uses of an image say together.
Blocking: call it from a thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from sandkasten.errors import InvalidImage
from sandkasten.images.catalog import Catalog, Image
from sandkasten.images.layers import find_layer
from sandkasten.model.image import ImageDescription, ImageLayer, ImageUses, Pruned


def describe(
    catalog: Catalog, images: Sequence[Image], uses: Mapping[str, ImageUses], *, judges: bool = False
) -> list[ImageDescription]:
    """Return the descriptions of images, with their `uses` by name. `judges`: with problems."""
    having = Counter(digest for image in catalog.images() for digest in set(image.layers))
    described = []
    for image in images:
        found = {digest: find_layer(catalog.data_dir, digest) for digest in image.layers}
        missing = [digest for digest, meta in found.items() if meta is None]
        layers = [ImageLayer(digest, meta.entries, meta.size_bytes) for digest, meta in found.items() if meta]
        described.append(
            ImageDescription(
                name=image.name,
                kind=image.kind,
                source=image.source,
                created_at=image.created_at,
                digest=image.digest,
                platform=image.platform,
                tags=image.tags,
                references=image.references,
                alias_names=catalog.aliases_of(image.name),
                size_bytes=image.size_bytes,
                shared_bytes=sum(each.size_bytes for each in layers if having[each.digest] > 1),
                config=image.config,
                layers=layers,
                in_use=uses.get(image.name, ImageUses()),
                problems=[f"layer {each} is missing, or its description is damaged" for each in missing]
                if judges
                else None,
            )
        )
    return described


def held_by(catalog: Catalog, images: Sequence[Image]) -> Pruned:
    """Return what a removal of images would free: them, and the layers that no other image has."""
    names = {image.name for image in images}
    others = {digest for image in catalog.images() if image.name not in names for digest in image.layers}
    digests = {digest for image in images for digest in image.layers} - others
    found = [meta for digest in digests if (meta := find_layer(catalog.data_dir, digest)) is not None]
    return Pruned(len(found), sum(meta.size_bytes for meta in found), images=len(images))


def uses_of(catalog: Catalog, sessions: Iterable[tuple[str, str]], pools: Iterable[str]) -> dict[str, ImageUses]:
    """Return by the names of images what names them: `sessions` are ids with the image as it was asked for."""
    names: dict[str, str | None] = {}
    found: dict[str, tuple[list[str], list[str]]] = {}

    def note(asked: str, what: str, place: int) -> None:
        if asked not in names:
            try:
                names[asked] = catalog.look_up(asked).name
            except InvalidImage:
                names[asked] = None
        if (name := names[asked]) is not None:
            found.setdefault(name, ([], []))[place].append(what)

    for session_id, asked in sessions:
        note(asked, session_id, 0)
    for pool in pools:
        note(pool, pool, 1)
    return {name: ImageUses(*lists) for name, lists in found.items()}
