"""Import an image from a tar archive: unpack it in a jail, check it, give it its name.

This process never reads a byte of the archive. An nsinit of its own, beside a running daemon's or without one, gets the
open archive and has it unpacked in a process that sees only the new layer (`nsinit/tools/unpack.py`). A failed import
leaves nothing; when it returns, with or without an error, no process that it started runs any more. Blocking: call it
from a thread.
"""

from __future__ import annotations

from pathlib import Path

from sandkasten.crash import Crash, Point
from sandkasten.errors import InvalidImage
from sandkasten.images import rootfs
from sandkasten.images.catalog import Catalog, Image, check_name
from sandkasten.images.layers import MAX_BYTES, MAX_ENTRIES, LayerMeta, Layers, open_store
from sandkasten.model.image import ImageConfig


def import_tar(
    catalog: Catalog,
    name: str,
    tar: Path,
    *,
    max_members: int = MAX_ENTRIES,
    max_bytes: int = MAX_BYTES,
    crash: Crash | None = None,
) -> tuple[Image, LayerMeta]:
    """Make image `name` of a tar file; return the image and its one layer.

    Raises:
        InvalidImage: the name is malformed or taken, the archive can't be unpacked, or it holds no usable root.
        NsinitLost: nsinit died.
        OSError: the archive can't be opened.
    """
    with tar.open("rb") as file:
        bounds = {"max_members": max_members, "max_bytes": max_bytes}
        return import_file(catalog, name, file.fileno(), tar.name, crash=crash, **bounds)


def import_file(
    catalog: Catalog,
    name: str,
    fd: int,
    title: str,
    *,
    max_members: int = MAX_ENTRIES,
    max_bytes: int = MAX_BYTES,
    reserve_bytes: int = 0,
    crash: Crash | None = None,
) -> tuple[Image, LayerMeta]:
    """Make image `name` of an open tar file, from its present place on; `title` is its source in the catalogue. See
    `import_tar`. `reserve_bytes`: the room that the disk keeps."""
    crash = crash or Crash()
    check_name(name)
    catalog.require_free(name)
    with open_store(catalog.data_dir, crash_at=crash.take_foreign()) as store:
        crash.passing(Point.IMPORT_BEGUN)
        layer = store.unpack_layer(fd, max_bytes=max_bytes, max_entries=max_members, reserve_bytes=reserve_bytes)
        crash.passing(Point.IMPORT_UNPACKED)
        return publish_layer(catalog, store, name, layer, source=title, crash=crash), layer


def publish_layer(
    catalog: Catalog,
    store: Layers,
    name: str,
    layer: LayerMeta,
    *,
    source: str,
    config: ImageConfig | None = None,
    platform: str = "",
    replace: bool = False,
    crash: Crash,
) -> Image:
    """Make an image of one layer, which goes if it is new and can't be one. Raises as `import_tar`."""
    try:
        if problems := rootfs.find_problems(str(catalog.layer(layer.diff_id))):
            raise InvalidImage(f"{source} holds no usable image: {'; '.join(problems)}", image=name)
        crash.passing(Point.IMPORT_CHECKED)
        store.publish_image(
            name,
            layers=[layer.diff_id],
            config=config or ImageConfig(),
            source=source,
            platform=platform,
            replace=replace,
        )
    except InvalidImage:
        if layer.is_new:
            store.collect(grace_s=0, only=[layer.diff_id])
        raise
    crash.passing(Point.IMPORT_PUBLISHED)
    return catalog.get(name)
