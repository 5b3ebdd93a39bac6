"""Imports of archives of images into a store in memory: honest ones of every form, and what lies."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from backports import zstd

from sandkasten.errors import DigestMismatch, DiskReserve, InvalidImage, SandkastenError, TooLarge
from sandkasten.images.archive_source import ArchiveImport
from sandkasten.images.archives import MAX_MEMBERS, LayoutDirectory, MemberBytes, OuterTar, open_archive
from sandkasten.images.registry.blobs import Blobs
from sandkasten.images.registry.documents import Platform
from sandkasten.images.registry.pulling import NewImage, PullTerms
from tests.archives import Layout, Member, config_of, docker_saved, tar_of
from tests.registry import MemoryStore, digest_of, layer, settings_of
from tests.waiting import patience

BASE = layer({"file": bytes(range(256)) * 4000})
TOP = layer({"other": b"x"})
SAVED = docker_saved({"team/tools:v2": [BASE, TOP]})
ROOTFS = layer({"etc/passwd": b"", "bin/sh": b""})


async def imported(
    tmp_path: Path, content: bytes | Path, *, name: str = "", ref: str | None = None, floor_bytes: int = 0, **given: Any
) -> tuple[NewImage, MemoryStore]:
    """Import a file of that content, or a directory; return the image and the store."""
    path = content
    if isinstance(content, bytes):
        path = tmp_path / "archive"
        path.write_bytes(content)
    platform = Platform.parse(given.pop("platform", str(Platform.own())))
    blobs, store = Blobs(tmp_path / "blobs", floor_bytes=floor_bytes), MemoryStore()
    fd = os.open(path, os.O_RDONLY)
    before = os.listdir("/proc/self/fd")
    try:
        with trio.fail_after(patience(20)):
            terms = PullTerms(name, platform, store, settings_of(**given))
            work = ArchiveImport(fd, "archive", ref, blobs, terms)
            try:
                return await work.run(), store
            except BaseExceptionGroup as group:
                raise AssertionError("an error is one in a group") from group
    finally:
        assert os.listdir("/proc/self/fd") == before
        os.close(fd)
        assert not (tmp_path / "blobs").exists() or os.listdir(tmp_path / "blobs") == []


# What works ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd.compress])
async def test_what_docker_saves_is_an_image(tmp_path: Path, pack: Any) -> None:
    """The whole archive may be compressed. Name and tag are the archive's unless a name is given; the image has no
    manifest, and so no digest."""
    image, store = await imported(tmp_path, pack(tar_of(SAVED)))
    assert image.layers == (digest_of(BASE), digest_of(TOP))
    assert (image.name, image.tags, image.digest, image.platform) == ("tools", ["v2"], "", str(Platform.own()))
    assert (image.config.env, image.config.working_dir) == ({"A": "b=c"}, "/srv")
    assert (await imported(tmp_path, pack(tar_of(SAVED)), name="mine"))[0].name == "mine"
    assert store.images == {"tools": image}


async def test_a_layer_that_is_there_twice_may_be_a_link_within_the_archive(tmp_path: Path) -> None:
    """Old versions of `docker save` write such; one link is followed, to a name of the archive and nowhere else."""
    members = docker_saved({"a:1": [BASE, TOP], "b:1": [BASE]}, is_linked=True)
    image, _ = await imported(tmp_path, tar_of(members), ref="b:1")
    assert image.layers == (digest_of(BASE),)
    assert any(isinstance(content, str) for _, content in members)
    for target in ("../manifest.json/..", "/etc/passwd", "../../../../etc/passwd", "layer.tar"):
        linked: list[Any] = [(name, target if isinstance(content, str) else content) for name, content in members]
        with pytest.raises(InvalidImage, match="has no file"):
            await imported(tmp_path, tar_of(linked), ref="b:1")


async def test_a_layout_is_an_image_as_a_tar_and_as_a_directory(tmp_path: Path) -> None:
    """A tag alone is no name of an image, and a digest is that of the manifest."""
    layout = Layout()
    digest = layout.name(layout.image([BASE, TOP]), "v1")
    directory = tmp_path / "layout"
    for name, content in layout.members():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    dotted = [(f"./{name}", content) for name, content in layout.members()]
    whole: list[Any] = [tar_of(layout.members()), gzip.compress(tar_of(dotted)), directory]
    for content in whole:
        image, store = await imported(tmp_path, content, name="x")
        assert (image.layers, image.digest) == ((digest_of(BASE), digest_of(TOP)), digest)
        assert (image.tags, len(store.layers)) == (["v1"], 2)
        with pytest.raises(InvalidImage, match="no name that it can have"):
            await imported(tmp_path, content)
    (directory / "index.json").unlink()
    (directory / "index.json").symlink_to("oci-layout")
    with pytest.raises(InvalidImage, match=r"index\.json can't be read"):
        await imported(tmp_path, directory, name="x")


async def test_one_of_several_images_is_chosen_by_its_name(tmp_path: Path) -> None:
    """Without a name the error lists those that there are, and what can't be printed in them is escaped."""
    members = docker_saved({"docker.io/library/a:1": [BASE], "team/b:\x1b2": [TOP]})
    with pytest.raises(InvalidImage, match=r"several images.*'docker\.io/library/a:1', 'team/b:\\x1b2'"):
        await imported(tmp_path, tar_of(members))
    with pytest.raises(InvalidImage, match="no image 'c'"):
        await imported(tmp_path, tar_of(members), ref="c")
    image, _ = await imported(tmp_path, tar_of(members), ref="a:1")
    assert (image.name, image.layers) == ("a", (digest_of(BASE),))
    layout = Layout()
    layout.name(layout.image([BASE]), "one")
    layout.name(layout.image([TOP]), "docker.io/team/two:3")
    with pytest.raises(InvalidImage, match="several images"):
        await imported(tmp_path, tar_of(layout.members()))
    image, _ = await imported(tmp_path, tar_of(layout.members()), ref="team/two:3")
    assert (image.name, image.tags, image.layers) == ("two", ["3"], (digest_of(TOP),))


async def test_an_index_in_a_layout_is_resolved_by_platform_and_no_chain_of_them(tmp_path: Path) -> None:
    """The platforms may be in the layout's own index, too."""
    arm, own = Platform("linux", "arm", "v7"), Platform.own()
    layout, flat = Layout(), Layout()
    entries = []
    for platform, tar in ((arm, TOP), (own, BASE)):
        document = layout.image([tar], platform=platform)
        entries.append({**layout.add(document), "platform": {"os": platform.os, "architecture": platform.architecture}})
        flat.name(flat.image([tar], platform=platform), "v1", platform)
    index = json.dumps({"manifests": entries}).encode()
    layout.name(index, "v1")
    for each in (layout, flat):
        assert (await imported(tmp_path, tar_of(each.members()), name="x"))[0].layers == (digest_of(BASE),)
        image, _ = await imported(tmp_path, tar_of(each.members()), name="x", platform="linux/arm")
        assert image.layers == (digest_of(TOP),)
        with pytest.raises(InvalidImage, match="not there for linux/s390x"):
            await imported(tmp_path, tar_of(each.members()), name="x", platform="linux/s390x")
    own_entry = {"os": own.os, "architecture": own.architecture}
    outer = json.dumps({"manifests": [{**layout.add(index), "platform": own_entry}]}).encode()
    layout.entries.clear()
    layout.name(outer, "v1")
    with pytest.raises(InvalidImage, match="another index"):
        await imported(tmp_path, tar_of(layout.members()), name="x")


async def test_anything_else_is_a_root_file_system(tmp_path: Path) -> None:
    """The whole file is one layer, whatever compresses it, and the judge of it is the unpacker."""
    for content in (ROOTFS, gzip.compress(ROOTFS), b"no tar at all", b"", gzip.compress(b"x"), b"\x1f\x8b broken"):
        image, store = await imported(tmp_path, content, name="x")
        assert (image.layers, store.layers) == ([digest_of(content)], {digest_of(content): content})
    with pytest.raises(InvalidImage, match="no images to choose from"):
        await imported(tmp_path, ROOTFS, name="x", ref="x")
    with_bundle = tar_of([*SAVED, ("./usr/bin/x", b"")])
    assert len((await imported(tmp_path, with_bundle, name="x"))[1].layers) == 1


def test_members_are_where_tarfile_finds_them(tmp_path: Path) -> None:
    """Also with names, sizes and targets of links in extended headers of both kinds, and holes."""
    long = "d/" * 150 + "é" * 60
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT):
        path = tmp_path / "x.tar"
        with tarfile.open(path, "w", format=form) as archive:
            for name in ("manifest.json", "empty", *([] if form == tarfile.USTAR_FORMAT else [long])):
                member = tarfile.TarInfo(name)
                content = name.encode() * (0 if name == "empty" else 300)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
                link = tarfile.TarInfo(f"{name}.link")
                link.type, link.linkname, link.size = tarfile.LNKTYPE, name, 0
                archive.addfile(link)
            for kind in (tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE):
                member = tarfile.TarInfo("of another kind")
                member.type = kind
                archive.addfile(member)
        with path.open("rb") as file, tarfile.open(path) as archive:
            found = _look(file.fileno())
            assert isinstance(found, OuterTar)
            for member in archive.getmembers():
                if member.isreg():
                    with found.opened(member.name) as part:
                        assert part == MemberBytes(file.fileno(), member.offset_data, member.size)
                elif member.islnk():
                    assert found.members[member.name] == member.linkname
                else:
                    assert member.name not in found.members


def _look(fd: int) -> OuterTar | LayoutDirectory | None:
    found = open_archive(fd, lambda: pytest.fail("no file is needed"), 1 << 30, lambda _: None)
    assert found is None or isinstance(found, OuterTar | LayoutDirectory)
    return found


# What lies ----------------------------------------------------------------------------------------------------------


def _header(kind: bytes, size: int, name: str = "x") -> bytes:
    member = tarfile.TarInfo(name)
    member.type, member.size = kind, size
    return member.tobuf(tarfile.GNU_FORMAT)


def _pax(**records: str) -> bytes:
    member = tarfile.TarInfo("x")
    member.pax_headers = records
    return member.tobuf(tarfile.PAX_FORMAT)[:-512]


def _layout(change: Any) -> list[tuple[str, bytes]]:
    layout = Layout()
    layout.name(layout.image([BASE, TOP]), "v1")
    change(layout)
    return layout.members()


def _swapped(layout: Layout) -> None:
    layout.files[f"blobs/sha256/{digest_of(TOP)[7:]}"] = layer({"other": b"y"})


def _with_config(config: bytes, layers: Sequence[str] = ("l",), extra: Sequence[Member] = ()) -> list[Member]:
    said = [{"Config": "c", "RepoTags": ["a:1"], "Layers": list(layers)}]
    return [("c", config), ("l", TOP), *extra, ("manifest.json", json.dumps(said).encode())]


_MARKED = tar_of([("manifest.json", b"[]")])[:1024]
"""The beginning of an archive of images: one member, and no end."""


def _of_many_members() -> bytes:
    """Return an archive of too many members, which takes longer to make than this file to import."""
    return tar_of([SAVED[-1], *((f"{each}", b"") for each in range(MAX_MEMBERS))])


_LIES: dict[str, tuple[bytes | Callable[[], bytes], type[SandkastenError], str]] = {
    "another blob": (tar_of(_layout(_swapped)), DigestMismatch, "another file as"),
    "another layer": (tar_of(_with_config(config_of([BASE]))), DigestMismatch, "the layer is another"),
    "no layers": (tar_of(_with_config(config_of([]), ())), InvalidImage, "no layers"),
    "other layers": (tar_of(_with_config(config_of([BASE, TOP]))), InvalidImage, "names 2 layers"),
    "10^4 layers": (tar_of(_with_config(config_of([TOP]), ["l"] * 10_000)), TooLarge, "10000 layers"),
    "a layer above": (tar_of(_with_config(config_of([TOP]), ["../l"])), InvalidImage, "has no file '../l'"),
    "no configuration": (tar_of(_with_config(b"x")), InvalidImage, "no JSON"),
    "a deep document": (tar_of([("manifest.json", b"[" * (1 << 20))]), InvalidImage, "no JSON"),
    "a document of another form": (tar_of([("manifest.json", b'{"a": 1}')]), InvalidImage, "lists no images"),
    "a large configuration": (tar_of(_with_config(b" " * (2 << 20))), TooLarge, "has 2097152 bytes"),
    "a manifest of 1 GB": (_header(b"0", 1 << 30, "manifest.json") + bytes(4096), InvalidImage, "broken"),
    "two manifests": (tar_of([*SAVED, SAVED[-1]]), InvalidImage, "two members 'manifest.json'"),
    "another platform": (tar_of(_with_config(config_of([TOP], Platform("plan9", "mips")))), InvalidImage, "plan9"),
    "half an archive": (tar_of(SAVED[::-1])[:-200_000], InvalidImage, "archive"),
    "half a blob": (gzip.compress(tar_of(SAVED[::-1]))[:-100], InvalidImage, "broken"),
    "a negative size": (_MARKED + _header(b"0", -512), InvalidImage, "broken"),
    "a header of 1 GB": (_MARKED + _header(b"L", 1 << 30), InvalidImage, "a header is too large"),
    "a number of a million digits": (
        _MARKED + _pax(size="9" * 50_000) + _header(b"0", 0),
        InvalidImage,
        "a number is malformed",
    ),
    "a size past the end": (_MARKED + _pax(size="9" * 15) + _header(b"0", 0), InvalidImage, "broken"),
    "a map of holes": (_MARKED + _header(b"S", 1 << 20), InvalidImage, "a size or a kind"),
    "a record that ends before its end": (
        _MARKED + _header(b"x", 8) + b"99 a=b\n\0" + bytes(504),
        InvalidImage,
        "broken",
    ),
    "a name of 64 KB": (_MARKED + _pax(path="n" * 60_000) + _header(b"0", 0), InvalidImage, "a name is too long"),
    "many members": (_of_many_members, TooLarge, "many members"),
    "a link to itself": (tar_of([("manifest.json", "manifest.json")]), InvalidImage, "has no file"),
}


@pytest.mark.parametrize("lie", _LIES)
async def test_an_archive_that_lies_gives_nothing_a_name(tmp_path: Path, lie: str) -> None:
    """The error says what is wrong, and neither a file nor a descriptor is left."""
    content, error, words = _LIES[lie]
    with pytest.raises(error) as refused:
        await imported(tmp_path, content if isinstance(content, bytes) else content(), name="x")
    assert words in refused.value.message


async def test_what_a_compressed_archive_grows_to_is_bounded(tmp_path: Path) -> None:
    """By a number of bytes, and by the room on the disk."""
    bomb = gzip.compress(tar_of([SAVED[-1], ("big", bytes(70 << 20))]))
    with pytest.raises(TooLarge):
        await imported(tmp_path, bomb, max_pull_mb=5)
    with pytest.raises(DiskReserve):
        await imported(tmp_path, bomb, floor_bytes=1 << 60)
    assert len(bomb) < 1 << 20


async def test_an_import_that_is_cancelled_ends_with_its_feeder(tmp_path: Path) -> None:
    """The thread that writes into the pipe ends once nobody reads from it."""
    began = trio.Event()

    class Slow(MemoryStore):
        async def unpack_layer(self, blob_fd: int, diff_id: str) -> str:
            await trio.lowlevel.wait_readable(blob_fd)
            began.set()
            await trio.sleep_forever()
            raise AssertionError

    path = tmp_path / "archive"
    path.write_bytes(tar_of(docker_saved({"a:1": [layer({"file": bytes(4 << 20)})]})))
    before = os.listdir("/proc/self/fd")
    with path.open("rb") as file, trio.fail_after(patience(20)):
        terms = PullTerms("x", Platform.own(), Slow(), settings_of())
        work = ArchiveImport(file.fileno(), "", None, Blobs(tmp_path / "blobs"), terms)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(work.run)
            await began.wait()
            nursery.cancel_scope.cancel()
    assert os.listdir("/proc/self/fd") == before
