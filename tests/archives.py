"""Archives of images for tests: what `docker save` writes, and tars of OCI layouts, honest and otherwise. A store of
images that is there at once."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from sandkasten.images.registry.documents import Platform
from tests.registry import digest_of

Member = tuple[str, bytes] | tuple[str, str]
"""Name and content of a file, or the target of a link."""


def tar_of(members: Sequence[Member]) -> bytes:
    """Return a tar of files and symbolic links."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
                archive.addfile(member)
            else:
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return target.getvalue()


def config_of(layers: Sequence[bytes], platform: Platform | None = None, word: str = "b=c") -> bytes:
    """Return the configuration of an image of uncompressed layers."""
    own = attrs.asdict(platform or Platform.own())
    said = {**own, "rootfs": {"diff_ids": [digest_of(each) for each in layers]}}
    return json.dumps({**said, "config": {"Env": [f"A={word}"], "WorkingDir": "/srv"}}).encode()


def docker_saved(images: Mapping[str, Sequence[bytes]], *, is_linked: bool = False) -> list[Member]:
    """Return what `docker save` writes of images by their names; with `is_linked`, as old versions did it: each layer
    in a directory, and a link where a layer is there already."""
    members: list[Member] = []
    said = []
    names: dict[bytes, str] = {}
    for number, (ref, layers) in enumerate(images.items()):
        config = config_of(layers)
        paths = []
        for place, each in enumerate(layers):
            path = f"{number:032x}{place:032x}/layer.tar" if is_linked else f"{digest_of(each)[7:]}.tar"
            if each not in names:
                names[each] = path
                members.append((path, each))
            elif is_linked:
                members.append((path, f"../{names[each]}"))
            paths.append(path)
        members.append((f"{digest_of(config)[7:]}.json", config))
        said.append({"Config": members[-1][0], "RepoTags": [ref] if ref else None, "Layers": paths})
    return [*members, ("repositories", b"{}"), ("manifest.json", json.dumps(said).encode())]


@attrs.define
class Layout:
    """An OCI layout in the making."""

    files: dict[str, bytes] = attrs.field(factory=lambda: {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}'})
    entries: list[dict[str, Any]] = attrs.field(factory=list)

    def add(self, data: bytes) -> dict[str, Any]:
        """Take a blob; return its descriptor."""
        digest = digest_of(data)
        self.files[f"blobs/sha256/{digest[7:]}"] = data
        return {"digest": digest, "size": len(data)}

    def image(self, layers: Sequence[bytes], *, platform: Platform | None = None, is_packed: bool = False) -> bytes:
        """Take an image; return its manifest."""
        blobs = [gzip.compress(each, mtime=0) if is_packed else each for each in layers]
        config = self.add(config_of(layers, platform))
        return json.dumps({"schemaVersion": 2, "config": config, "layers": [self.add(each) for each in blobs]}).encode()

    def name(self, document: bytes, ref: str | None, platform: Platform | None = None) -> str:
        """Put a manifest or an index into the index; return its digest."""
        entry = self.add(document)
        if ref is not None:
            entry["annotations"] = {"org.opencontainers.image.ref.name": ref}
        if platform is not None:
            entry["platform"] = attrs.asdict(platform)
        self.entries.append(entry)
        return str(entry["digest"])

    def members(self) -> list[tuple[str, bytes]]:
        """Return the files of the layout."""
        index = json.dumps({"schemaVersion": 2, "manifests": self.entries}).encode()
        return [*self.files.items(), ("index.json", index)]


@contextlib.contextmanager
def lent_tree(source: Path, target: Path) -> Iterator[None]:
    """Have the tree, of images for example, at `target` for a block: directories of its own, and links to the same
    files. The next block has the same copy, unless this one changed it: making one takes a tenth of a second."""
    copy = source.with_name(f"{source.name}-lent")
    if not copy.exists():
        _link_tree(source, copy)
    copy.rename(target)
    yield
    if _entries(target) == _entries(source) and not copy.exists():
        target.rename(copy)


@contextlib.contextmanager
def lent_data_dir(images: Path) -> Iterator[Path]:
    """A data directory that has the `host` image, which takes half of a first start to make."""
    with (
        tempfile.TemporaryDirectory(prefix="sandkasten-test-") as directory,
        lent_tree(images, Path(directory, "images")),
    ):
        yield Path(directory)


def _entries(top: Path) -> set[tuple[object, ...]]:
    """Return each directory with its mode and owner, and each other entry with its inode."""
    found: set[tuple[object, ...]] = set()
    queue = [""]
    while queue:
        place = queue.pop()
        with contextlib.suppress(FileNotFoundError), os.scandir(top / place) as entries:
            status = os.stat(top / place)
            found.add((place, status.st_mode, status.st_uid, status.st_gid))
            for entry in entries:
                name = f"{place}/{entry.name}".lstrip("/")
                if entry.is_dir(follow_symlinks=False):
                    queue.append(name)
                else:
                    found.add((name, entry.inode()))
    return found


def _link_tree(source: Path, target: Path) -> None:
    for place, directories, files in os.walk(source):
        there = target / os.path.relpath(place, source)
        there.mkdir()
        for name in [*files, *(each for each in directories if os.path.islink(f"{place}/{each}"))]:
            os.link(f"{place}/{name}", there / name, follow_symlinks=False)
        status = os.stat(place)
        os.chown(there, status.st_uid, status.st_gid)
        there.chmod(status.st_mode & 0o7777)
