"""Import an image from a tar archive: unpack it in a jail, look it over, give it its name.

Never parses the archive itself: nsinit has that done in a process that sees only the new image (`nsinit/tools/unpack.py`),
and bounds what that answers. A failed import leaves nothing. Blocking: call it from a thread.
"""

from __future__ import annotations

from pathlib import Path

from nsinit.wire.protocol import Unpacked
from sandkasten.crash import Crash, Point
from sandkasten.images import rootfs
from sandkasten.images.catalog import Catalog, Image, now
from sandkasten.images.unpacking import unpack
from sandkasten.model.errors import InvalidImage

MAX_MEMBERS = 2_000_000
MAX_BYTES = 64 * 1024**3


def import_tar(
    catalog: Catalog,
    name: str,
    tar: Path,
    *,
    max_members: int = MAX_MEMBERS,
    max_bytes: int = MAX_BYTES,
    crash: Crash | None = None,
) -> tuple[Image, Unpacked]:
    """Make image `name` of a tar file; return it and what nsinit counted.

    Raises:
        InvalidImage: the name is malformed or taken, the archive can't be unpacked, or it holds no usable root.
        ZygoteLost: nsinit died.
        OSError: the archive can't be opened.
    """
    crash = crash or Crash()
    with catalog.building(name) as directory:
        crash.passing(Point.IMPORT_BEGUN)
        if catalog.rootfs_path(name).exists():
            raise InvalidImage(f"there is an image {name!r} already", image=name)
        with tar.open("rb") as file:
            counts = unpack(directory, file.fileno(), max_members=max_members, max_bytes=max_bytes)
        crash.passing(Point.IMPORT_UNPACKED)
        problems = rootfs.find_problems(str(directory / "rootfs"))
        if problems:
            raise InvalidImage(f"{tar.name} holds no usable image: {'; '.join(problems)}", image=name)
        crash.passing(Point.IMPORT_CHECKED)
        image = Image(
            name=name,
            kind="rootfs",
            created_at=now(),
            source=tar.name,
            members=counts.members,
            size_bytes=counts.size_bytes,
        )
        published = catalog.publish(directory, image)
        crash.passing(Point.IMPORT_PUBLISHED)
        return published, counts
