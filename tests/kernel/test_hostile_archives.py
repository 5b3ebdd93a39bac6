"""Archives with what no image needs: extended attributes, whiteouts, sparse and packed bombs, links at mount points."""

from __future__ import annotations

import base64
import gzip
import io
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandkasten.errors import InvalidImage
from sandkasten.images.catalog import Catalog
from sandkasten.images.importing import import_tar
from sandkasten.images.rootfs import MOUNT_POINTS
from tests import canary
from tests.kernel.test_images import assert_nothing_left

Entries = list[tuple[tarfile.TarInfo, bytes]]


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog(tmp_path / "data", aliases={})


@pytest.fixture(autouse=True)
def outside(tmp_path: Path) -> Iterator[Path]:
    with canary.untouched(tmp_path / "outside") as root:
        yield root


def entry(
    name: str, kind: bytes = tarfile.REGTYPE, content: bytes = b"", **fields: object
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.size = kind, 0o755, len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


SHELL: Entries = [entry("etc", tarfile.DIRTYPE), entry("bin/sh", content=b"#!\n")]


def write(path: Path, entries: Entries) -> Path:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for info, content in entries:
            archive.addfile(info, io.BytesIO(content))
    return path


ATTRIBUTES = (
    "trusted.overlay.redirect",
    "trusted.overlay.opaque",
    "trusted.overlay.metacopy",
    "trusted.overlay.origin",
    "user.overlay.redirect",
    "user.overlay.opaque",
    "user.overlay.whiteout",
    "security.capability",
    "security.selinux",
    "system.posix_acl_access",
    "user.anything",
)


@pytest.mark.parametrize("prefix", ["SCHILY.xattr.", "LIBARCHIVE.xattr."])
def test_attributes_of_users_alone_arrive(catalog: Catalog, tmp_path: Path, prefix: str, outside: Path) -> None:
    """No other extended attribute is imported, neither marks of overlayfs nor file capabilities, on files, directories
    or links, however it is spelled, in tar's form or in libarchive's; each is counted.
    """
    content, is_tars = str(outside).encode(), prefix == "SCHILY.xattr."
    said = content if is_tars else base64.b64encode(content).rstrip(b"=")
    headers = {f"{prefix}{name}": said.decode() for name in ATTRIBUTES} | {"LIBARCHIVE.xattr.user.no%20": said.decode()}
    headers["LIBARCHIVE.xattr.user.broken"] = "a"
    entries = [
        *SHELL,
        entry("srv", tarfile.DIRTYPE, pax_headers=headers),
        entry("srv/file", content=b"x", pax_headers=headers),
        entry("srv/link", tarfile.SYMTYPE, linkname="file", pax_headers=headers),
    ]
    _, layer = import_tar(catalog, "x", write(tmp_path / "x.tar", entries))
    srv, kept = catalog.trees("x")[0] / "srv", ["user.anything"]
    assert [os.listxattr(path, follow_symlinks=False) for path in (srv, srv / "file", srv / "link")] == [kept, kept, []]
    assert os.getxattr(srv / "file", "user.anything") == content
    assert layer.skipped == 3 * len(headers) - 2


def test_overlayfs_own_marks_are_no_members(catalog: Catalog, tmp_path: Path) -> None:
    """A device 0:0, overlayfs' own mark, is left out as any device is; a mark of layers hides nothing of its own
    layer."""
    entries = [
        *SHELL,
        entry("srv", tarfile.DIRTYPE),
        entry("srv/kept", content=b"kept"),
        entry("srv/whiteout", tarfile.CHRTYPE, devmajor=0, devminor=0),
        entry("srv/.wh.kept"),
        entry("srv/.wh..wh..opq"),
        entry(".wh.etc"),
    ]
    _, counts = import_tar(catalog, "x", write(tmp_path / "x.tar", entries))
    srv = catalog.trees("x")[0] / "srv"
    assert os.listdir(srv) == ["kept"]
    assert (srv / "kept").read_bytes() == b"kept"
    assert counts.skipped == 1


def _sparse(size: int) -> Entries:
    """A member that is a hole of `size` bytes, in a format of a few hundred bytes."""
    return [entry("hole", pax_headers={"GNU.sparse.map": f"0,0,{size},0", "GNU.sparse.size": str(size)})]


BOMBS: dict[str, tuple[Callable[[], Entries], str]] = {
    "a sparse file of a terabyte": (lambda: _sparse(1 << 40), "more than 1000000 bytes"),
    "a sparse file of all there is": (lambda: _sparse((1 << 63) - 1), "more than 1000000 bytes"),
    "more inodes than allowed": (lambda: [entry(f"f{number}") for number in range(200)], "more than 100 members"),
    "directories without end": (lambda: [entry("d/" * 2500, tarfile.DIRTYPE)], "File name too long"),
    "a name of a megabyte": (lambda: [entry("n" * 2**20)], "File name too long"),
    "a link target of a megabyte": (
        lambda: [entry("link", tarfile.SYMTYPE, linkname="t" * 2**20)],
        "File name too long",
    ),
    "a name with NUL": (lambda: [entry("x", pax_headers={"path": "a\0b"})], "its name is not a plain path"),
    "a PAX size of a terabyte": (lambda: [entry("x", pax_headers={"size": str(1 << 40)})], "more than 1000000 bytes"),
    "a PAX size below zero": (lambda: [entry("x", pax_headers={"size": "-1"})], "broken"),
    "a PAX owner of nobody here": (lambda: [entry("x", pax_headers={"uid": "70000"})], "its owner is 70000:0"),
    "a file that hides below a file": (lambda: [entry("a", content=b"x"), entry("a/b")], "Not a directory"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_in_words_and_leaves_nothing(catalog: Catalog, tmp_path: Path, name: str) -> None:
    """A bomb is refused before its import has used more than its share of the disk, the inodes or the memory."""
    make, words = BOMBS[name]
    tar = write(tmp_path / "x.tar", [*SHELL, *make()])
    with pytest.raises(InvalidImage, match=words):
        import_tar(catalog, "x", tar, max_members=100, max_bytes=1_000_000)
    assert_nothing_left(tmp_path / "data")


def test_what_is_small_and_unpacks_to_much_is_refused_early(catalog: Catalog, tmp_path: Path) -> None:
    """A file of 100 GB is refused by its header, and a stream that goes on behind the end of the archive at the bound,
    whatever is left of either."""
    header, _ = entry("zeros", size=100 * 10**9)
    for beginning, words in (
        (header.tobuf(tarfile.PAX_FORMAT), "more than 1000000 bytes of files"),
        (entry("x")[0].tobuf() + bytes(1024), "longer than what it may hold"),
    ):
        tar = tmp_path / "x.tar"
        tar.write_bytes(gzip.compress(beginning + bytes(50_000_000), 1))
        assert tar.stat().st_size < 1_000_000
        with pytest.raises(InvalidImage, match=words):
            import_tar(catalog, "x", tar, max_members=100, max_bytes=1_000_000)
    assert_nothing_left(tmp_path / "data")


def test_a_hundred_levels_of_directories_are_imported_and_removed(catalog: Catalog, tmp_path: Path) -> None:
    """Deeper than anything that recurses likes: made, and deleted again when the image is refused."""
    deep = [entry("/".join(["d" * 20] * depth), tarfile.DIRTYPE) for depth in range(1, 150)]
    with pytest.raises(InvalidImage, match="there is no shell"):
        import_tar(catalog, "x", write(tmp_path / "x.tar", [entry("etc", tarfile.DIRTYPE), *deep]))
    assert_nothing_left(tmp_path / "data")


@pytest.mark.parametrize("name", MOUNT_POINTS)
@pytest.mark.parametrize("kind", ["absolute link", "relative link", "chain", "file"])
def test_a_mount_point_that_is_none_is_refused_at_import(
    catalog: Catalog, tmp_path: Path, outside: Path, name: str, kind: str
) -> None:
    """An image whose mount point is no directory is refused at import, by its name, and not at the first session."""
    targets = {"absolute link": str(outside), "relative link": "../" * 20 + str(outside)[1:], "chain": "step"}
    lie = entry(name, content=b"x") if kind == "file" else entry(name, tarfile.SYMTYPE, linkname=targets[kind])
    steps = [entry("step", tarfile.SYMTYPE, linkname=str(outside))] if kind == "chain" else []
    with pytest.raises(InvalidImage, match=f"/{name} is no plain directory"):
        import_tar(catalog, "x", write(tmp_path / "x.tar", [*SHELL, *steps, lie]))
    assert_nothing_left(tmp_path / "data")
