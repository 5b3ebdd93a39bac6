"""Layers written as archives: the round trip through the store, and what a tree may hold that no archive can."""

from __future__ import annotations

import hashlib
import os
import stat
import tarfile
import tempfile
import threading
from io import BytesIO
from pathlib import Path

import pytest

from nsinit.tools.pack import privileged_of
from sandkasten.errors import InvalidImage, LayerRefused
from sandkasten.images.layers import Layers, PackedLayer, open_store
from tests import canary
from tests.kernel.test_layers import tar_of, unpack

pytestmark = [pytest.mark.kernel, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]

UNIT = 256 * 1024
NAME = os.fsdecode(b"d/not-\xff-utf-8")


def pack(store: Layers, digest: str) -> tuple[bytes, PackedLayer]:
    with tempfile.TemporaryFile() as file:
        packed = store.pack_layer(digest, file.fileno())
        file.seek(0)
        return file.read(), packed


def tree_of(files: Path) -> dict[str, object]:
    """Return what a layer has under each name: all that a session could tell apart."""
    found: dict[str, object] = {}
    first: dict[int, str] = {}
    for path in sorted(files.rglob("*")):
        status, name = path.lstat(), str(path.relative_to(files))
        content: object = None
        if stat.S_ISREG(status.st_mode):
            has_hole = status.st_blocks * 512 < status.st_size
            content = path.read_bytes(), has_hole, first.setdefault(status.st_ino, name)
        elif stat.S_ISLNK(status.st_mode):
            content = os.readlink(path)
        names = os.listxattr(path, follow_symlinks=False)
        attributes = {each: os.getxattr(path, each, follow_symlinks=False) for each in names}
        time_ns = 0 if stat.S_ISCHR(status.st_mode) else status.st_mtime_ns  # a mark has no time
        found[name] = status.st_mode, status.st_uid, status.st_gid, time_ns, status.st_rdev, attributes, content
    return found


def layer_files(data_dir: Path, digest: str) -> Path:
    return data_dir / "layers" / digest.removeprefix("sha256:") / "fs"


def rich_tar() -> bytes:
    """Return an archive of another program with all that a layer can hold."""
    half = b"\0" * UNIT + b"x" * UNIT + b"\0" * (3 * UNIT) + b"end"
    return tar_of(
        {
            "a": None,
            "a-b": b"between a and a/c",
            "a/c": b"c",
            "a/.wh.gone": b"",
            "all": None,
            "all/.wh..wh..opq": b"",
            "d": None,
            NAME: b"\xff",
            "d/long" + "g" * 200: b"",
            "link": "d/nowhere",
            "name": b"",
            "run/su": b"su",
            "sparse": half,
            "tied": b"",
            "zero": b"",
        },
        name={"pax_headers": {"SCHILY.xattr.user.kept": "\udcff\0=", "mtime": "1700000000.123456789"}},
        link={"mtime": 1_600_000_000},
        tied={"type": tarfile.LNKTYPE, "linkname": "run/su", "size": 0},
        sparse={"pax_headers": {"GNU.sparse.map": f"0,{len(half)}", "GNU.sparse.size": str(len(half))}},
        **{"a": {"uid": 65535, "mtime": 5}, "run/su": {"mode": 0o6755, "gid": 42}},
    )


def test_a_layer_becomes_an_archive_and_the_same_layer_again(tmp_path: Path) -> None:
    """A layer is the same tree after a way through an archive: whiteouts, opaque directories, hard links, setuid,
    attributes, holes, names that are no UTF-8, times to the nanosecond. The archive of that is the same bytes, and has
    the digest that was said. Its members are in the order of their bytes."""
    with open_store(tmp_path) as store:
        first = unpack(store, rich_tar())
        archive, packed = pack(store, first)
        assert packed.diff_id == f"sha256:{hashlib.sha256(archive).hexdigest()}" != first
        again, _ = pack(store, first)
        assert again == archive
        second = unpack(store, archive)
        assert second == packed.diff_id
        assert pack(store, second)[0] == archive
    before, after = tree_of(layer_files(tmp_path, first)), tree_of(layer_files(tmp_path, second))
    for name in before:
        assert after[name] == before[name], name
    assert after.keys() == before.keys()
    assert [(tmp_path / "layers" / each[7:] / "privileged").read_bytes() for each in (first, second)] == [
        b"6755 run/su\x006755 tied\0"
    ] * 2
    with tarfile.open(fileobj=BytesIO(archive)) as read:
        names = [os.fsencode(each.name) for each in read]
    assert names == sorted(names)
    assert (len(names), packed.size_bytes, packed.skipped) == (packed.entries, len(archive), 0)
    assert {b"a/.wh.gone", b"all/.wh..wh..opq"} < set(names)


def test_what_no_archive_can_hold_is_left_out_or_refused(tmp_path: Path) -> None:
    """Left out and counted: FIFOs, sockets, and names that a reader would take for marks of deletion, with what is
    below them. Refused with its name: more content than allowed, even in a hole; a layer that is not there. Nothing
    outside of the layer is read or changed, whatever links lead there."""
    with canary.untouched(tmp_path / "outside") as outside, open_store(tmp_path / "data") as store:
        digest = unpack(store, tar_of({"d": None, "d/file": b"kept"}))
        files = layer_files(tmp_path / "data", digest)
        os.mkfifo(files / "d/fifo")
        (files / "d/.wh.directory").mkdir()
        (files / "d/.wh.directory/file").write_bytes(b"hidden")
        (files / "d/out").symlink_to(outside)
        (files / "file").symlink_to(outside / "root/key")
        archive, packed = pack(store, digest)
        with tarfile.open(fileobj=BytesIO(archive)) as read:
            assert [each.name for each in read] == ["d", "d/file", "d/out", "file"]
        assert (packed.skipped, b"kept: root/key" in archive) == (2, False)
        os.truncate(files / "d/file", 1 << 40)
        with pytest.raises(LayerRefused, match="'d/file': more bytes of files than allowed"):
            pack(store, digest)
        with pytest.raises(LayerRefused, match="more than 1 entries"), tempfile.TemporaryFile() as file:
            store.pack_layer(digest, file.fileno(), max_entries=1)
        with pytest.raises(InvalidImage, match="no such layer"):
            pack(store, f"sha256:{'0' * 64}")


def test_privilege_is_that_of_the_file_that_is_there_at_the_end(tmp_path: Path) -> None:
    """A later member takes it from a name, whatever that member is, and no other file gets it. A further name keeps it,
    and so does a file that was met through a link, even an absolute one: its list has the place without links."""
    tied, su = {"type": tarfile.LNKTYPE, "linkname": "su", "size": 0}, {"mode": 0o4755}
    over = {**tied, "linkname": "other"}
    with open_store(tmp_path) as store:
        for tar, privileged in (
            (tar_of({"su": b"1", "./su": b"2"}, su=su), []),
            (tar_of({"d": None, "d/su": b"1", "e": None, "e/su": b"2", "./d": "e"}, **{"d/su": su}), []),
            (tar_of({"su": b"1", "also": b"", "./su": b"2"}, su=su, also=tied), ["also"]),
            (tar_of({"other": b"1", "su": b"2", "./su": b""}, su=su, **{"./su": over}), []),
            (tar_of({"etc": None, "lib": "/etc", "lib/passwd": b"x"}, **{"lib/passwd": su}), ["etc/passwd"]),
        ):
            digest = unpack(store, tar)
            listed = (layer_files(tmp_path, digest).parent / "privileged").read_bytes()
            assert listed == b"".join(b"4755 %b\0" % each.encode() for each in privileged)
            with tarfile.open(fileobj=BytesIO(pack(store, digest)[0])) as read:
                assert [each.name for each in read if each.mode & 0o6000] == privileged


def test_nothing_outside_of_a_layer_is_looked_at_for_its_list(tmp_path: Path) -> None:
    """A list of an older version may lead through a link of the layer, which is absolute or has `..`."""
    files = tmp_path / "layer" / "fs"
    files.mkdir(parents=True)
    (files / "file").touch()
    (files / "absolute").symlink_to("/etc")
    (files / "relative").symlink_to("../..")
    (tmp_path / "outside").touch()
    names = ("file", "absolute/passwd", "relative/outside", "../../outside", "/etc/passwd")
    (tmp_path / "layer" / "privileged").write_bytes(b"".join(b"4755 %b\0" % each.encode() for each in names))
    assert list(privileged_of([str(files)])) == [b"4755 file"]


def test_a_reader_that_leaves_ends_the_packing(tmp_path: Path) -> None:
    """The end of the reader is the end of the jail, and the next layer is packed."""
    with open_store(tmp_path) as store:
        digest = unpack(store, tar_of({"file": b"x" * (4 << 20)}))
        read_fd, write_fd = os.pipe()

        def leave() -> None:
            os.read(read_fd, 1)
            os.close(read_fd)

        leaving = threading.Thread(target=leave)
        leaving.start()
        try:
            with pytest.raises(LayerRefused, match="Broken pipe"):
                store.pack_layer(digest, write_fd)
        finally:
            os.close(write_fd)
            leaving.join()
        assert pack(store, digest)[1].entries == 1
