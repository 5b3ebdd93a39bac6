"""Layers on the real kernel: what a session sees of a list of them, and which of them may go."""

from __future__ import annotations

import io
import json
import os
import socket
import stat
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nsinit.kernel.stage import MAX_LOWERS
from nsinit.wire.protocol import (
    MAX_IMAGE_LAYERS,
    REQUESTS,
    CollectLayers,
    DeleteImage,
    Failed,
    LayersCollected,
    LayerUnpacked,
    MountImage,
    Ok,
    Prepare,
    PublishImage,
    SandboxPlan,
    UnpackLayer,
)
from sandkasten.errors import ImageInUse, InvalidImage, LayerRefused
from sandkasten.images.catalog import Catalog
from sandkasten.images.layers import Layers, describe, description, open_store
from sandkasten.model.image import ImageConfig
from tests.allowance import ALLOWANCE
from tests.kernel.harness import ROOMY, Nsinit, data_directory, new_id, running, wait_until

pytestmark = [pytest.mark.kernel, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]

Content = bytes | str | None
"""Of a file, the target of a link, or a directory."""


def tar_of(entries: Mapping[str, Content], **fields: dict[str, Any]) -> bytes:
    """Return an archive; `fields` are of the header, for each name."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in entries.items():
            info = tarfile.TarInfo(name)
            info.mode = 0o755
            if content is None:
                info.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
            else:
                info.size = len(content)
            for field, value in fields.get(name, {}).items():
                setattr(info, field, value)
            archive.addfile(info, io.BytesIO(content if isinstance(content, bytes) else b""))
    return packed.getvalue()


def base_content() -> dict[str, Content]:
    """Return the entries of a layer from which a session can be made."""
    applets = ("sh", "cat", "echo", "id", "ls", "stat", "touch", "readlink", "find", "sort", "mv", "test")
    return {
        "bin": None,
        "bin/busybox": Path("/bin/busybox").read_bytes(),
        "etc": None,
        **{f"bin/{each}": "busybox" for each in applets},
    }


def base_layer() -> bytes:
    return tar_of(base_content())


def unpack(store: Layers, tar: bytes) -> str:
    with tempfile.TemporaryFile() as file:
        file.write(tar)
        file.seek(0)
        return store.unpack_layer(file.fileno()).diff_id


def publish(data_dir: Path, name: str, *tars: bytes, replace: bool = False) -> tuple[str, ...]:
    with open_store(data_dir) as store:
        layers = tuple(unpack(store, tar) for tar in tars)
        store.publish_image(name, layers=layers, config=ImageConfig(), replace=replace)
    return layers


def publish_on(data_dir: Path, name: str, layers: Sequence[str]) -> None:
    with open_store(data_dir) as store:
        store.publish_image(name, layers=layers, config=ImageConfig())


def plan_of(name: str, layers: Sequence[str]) -> SandboxPlan:
    return SandboxPlan(new_id(), name, "layers", ROOMY, layers=tuple(layers))


@pytest.fixture(scope="module")
def data_dir() -> Iterator[Path]:
    with data_directory() as path:
        yield path


@pytest.fixture(scope="module")
def server(data_dir: Path) -> Iterator[Nsinit]:
    with running(data_dir) as server:
        yield server


# What the jail makes of a layer -----------------------------------------------------------------------------------


def test_members_become_what_overlayfs_takes_them_for(tmp_path: Path) -> None:
    """Marks of deletion become whiteouts and opaque directories, whatever the order; what the same layer has stays.
    Attributes of users, holes and setgid of directories are kept; privilege of files is told and dropped."""
    xattr: dict[str, Any] = {
        "pax_headers": {"SCHILY.xattr.user.kept": "\udcff", "SCHILY.xattr.trusted.overlay.redirect": "/etc"}
    }
    tar = tar_of(
        {
            "d/.wh.gone": b"",
            "d/.wh.file": b"",
            "d/file": b"new",
            "d/.wh.new": b"",
            "d/new": None,
            "d/old": None,
            "d/.wh.old": b"",
            "d/.wh.deep": b"",
            "d/deep/below": b"",
            "all": None,
            "all/.wh..wh..opq": b"",
            "all/.wh..wh.plnk": b"",
            "run/su": b"",
            "run/spool": None,
            "x": b"",
        }
        | {"hole": b""},
        **{
            "run/su": {"mode": 0o6755},
            "run/spool": {"mode": 0o2775},
            "x": xattr,
            "hole": {"pax_headers": {"GNU.sparse.map": "0,0,1048576,0", "GNU.sparse.size": "1048576"}},
        },
    )
    with open_store(tmp_path) as store:
        digest = unpack(store, tar)
    layer = tmp_path / "layers" / digest.removeprefix("sha256:")
    files = layer / "fs"
    gone = (files / "d/gone").stat()
    assert (stat.S_ISCHR(gone.st_mode), gone.st_rdev) == (True, 0)
    assert sorted(os.listdir(files / "d")) == ["deep", "file", "gone", "new", "old"]
    opaque = {path for path in files.rglob("*") if path.is_dir() and "trusted.overlay.opaque" in os.listxattr(path)}
    assert {str(path.relative_to(files)) for path in opaque} == {"d/new", "d/old", "d/deep", "all"}
    assert os.listdir(files / "all") == []
    assert os.listxattr(files / "x") == ["user.kept"]
    assert os.getxattr(files / "x", "user.kept") == b"\xff"
    hole = (files / "hole").stat()
    assert (hole.st_size, hole.st_blocks) == (1 << 20, 0)
    assert [(files / name).stat().st_mode & 0o7777 for name in ("run/su", "run/spool")] == [0o755, 0o2775]
    assert (layer / "privileged").read_bytes() == b"6755 run/su\0"


def test_a_file_takes_the_place_of_a_directory_and_ids_end_at_65535(tmp_path: Path) -> None:
    """A later member replaces an earlier one of any kind. An owner that no session could map is named and refused."""
    with open_store(tmp_path) as store:
        entries: list[tuple[str, Content]] = [("d/a/b", b""), ("d", b"file"), ("e", b"file"), ("e", None), ("e/f", b"")]
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for name, content in entries:
                info = tarfile.TarInfo(name)
                info.type = tarfile.REGTYPE if content is not None else tarfile.DIRTYPE
                info.size = len(content) if isinstance(content, bytes) else 0
                archive.addfile(info, io.BytesIO(content if isinstance(content, bytes) else b""))
        digest = unpack(store, packed.getvalue())
        with pytest.raises(LayerRefused, match="'mine': its owner is 0:65536") as caught:
            unpack(store, tar_of({"mine": b""}, mine={"gid": 65536}))
        assert caught.value.details["member"] == "mine"
        with pytest.raises(LayerRefused, match="No such file"):
            unpack(store, tar_of({"link": b""}, link={"type": tarfile.LNKTYPE, "linkname": "of/another/layer"}))
    files = tmp_path / "layers" / digest.removeprefix("sha256:") / "fs"
    assert ((files / "d").read_bytes(), os.listdir(files / "e")) == (b"file", ["f"])
    assert len(list((tmp_path / "layers").iterdir())) == 1


def test_a_mark_is_that_of_the_directory_that_is_there_at_the_end(tmp_path: Path) -> None:
    """None of a directory that a later member has replaced, by a file, or by a link to another one; and one that was
    met through a link is the directory that the link leads to."""
    tar = tar_of(
        {
            "a/.wh..wh..opq": b"",
            "./a": b"file",
            "b/.wh..wh..opq": b"",
            "c": None,
            "./b": "c",
            "usr/lib": None,
            "lib": "/usr/lib",
            "lib/.wh.one": b"",
            "lib/one": None,
            "lib/.wh.two": b"",
            "lib/two/below": b"",
        }
    )
    with open_store(tmp_path) as store:
        digest = unpack(store, tar)
    listed = (tmp_path / "layers" / digest.removeprefix("sha256:") / "opaque").read_bytes()
    assert listed == b"usr/lib/one\0usr/lib/two\0"


def test_no_member_changes_the_top_of_a_layer(tmp_path: Path) -> None:
    """A link to the top, and a directory of the link's name: the top stays root's, closed and without attributes."""
    mine: dict[str, Any] = {"mode": 0o777, "uid": 1234, "gid": 1234, "pax_headers": {"SCHILY.xattr.user.mine": "1"}}
    with open_store(tmp_path) as store:
        digest = unpack(store, tar_of({"x": ".", "./x": None}, **{"./x": mine}))
    top = tmp_path / "layers" / digest.removeprefix("sha256:") / "fs"
    found = top.stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o7777, os.listxattr(top)) == (0, 0, 0o700, [])
    assert os.readlink(top / "x") == "."


# Sessions ---------------------------------------------------------------------------------------------------------


def lay(data_dir: Path, number: int) -> str:
    """Put a layer into the store that has one file for the number, and another that all such layers have."""
    digest = f"{number:064x}"
    files = data_dir / "layers" / digest / "fs"
    if not files.exists():
        (files / "n").mkdir(parents=True)
        (files / "n" / str(number)).touch()
        (files / "top").write_text(str(number))
        facts = {"entries": 3, "size_bytes": 1, "skipped": 0, "privileged": 0}
        (files.parent / "meta.json").write_text(json.dumps(facts))
    return f"sha256:{digest}"


@pytest.mark.parametrize("count", [1, 11, 51, MAX_IMAGE_LAYERS])
def test_a_session_sees_a_list_of_layers_as_one_tree(data_dir: Path, server: Nsinit, count: int) -> None:
    """The topmost layer is seen first; what it hides is hidden, and nothing else."""
    last = (
        tar_of({"d": None, "d/a": b"1", "d/b": b"1", "o": None, "o/below": b"", "k": None, "k/x": b"", "f": b""}),
        tar_of({"d": None, "d/.wh.a": b"", "o": None, "o/.wh..wh..opq": b"", "o/above": b"", "k": b"", "f/in": b""}),
        tar_of({"d/c": b"2", ".wh.gone": b""}),
    )
    with open_store(data_dir) as store:
        base, *top = (unpack(store, tar) for tar in (base_layer(), *(last if count > 1 else ())))
        layers = (base, *(lay(data_dir, number) for number in range(count - len(top) - 1)), *top)
        store.publish_image(f"count{count}", layers=layers, config=ImageConfig())
    assert len(layers) == count
    box = server.build(plan_of(f"count{count}", layers))
    assert box.run("id -u; readlink /bin/sh").out.split() == ["1000", "busybox"]
    if count > 1:
        expected = ["d", "d/b", "d/c", "f", "f/in", "k", "o", "o/above", "n", "top"]
        expected += [f"n/{each}" for each in range(count - 4)]
        assert box.run("cd /; find d o k f n top | sort; cat top").out.split() == [*sorted(expected), str(count - 5)]
    assert str(data_dir) not in Path(f"/proc/{box.pid}/mounts").read_text()
    box.teardown()


def test_a_layer_that_hides_everything_is_the_lowest_that_is_seen(data_dir: Path, server: Nsinit) -> None:
    """A mark at the top of a layer hides all layers below, which overlayfs alone would not do."""
    layers = publish(data_dir, "hides", tar_of({"hidden": b""}), base_layer(), tar_of({"seen": b""}))
    other = publish(data_dir, "hides2", tar_of({"hidden": b""}), tar_of({".wh..wh..opq": b""}), base_layer())
    for name, each, seen in (("hides", layers, "hidden\nseen\n"), ("hides2", other, "")):
        box = server.build(plan_of(name, each))
        assert box.run("cd /; ls -d hidden seen 2>/dev/null").out == seen
        box.teardown()


def test_a_build_has_the_layers_that_the_image_has(data_dir: Path, server: Nsinit) -> None:
    """A plan with other layers than the image's fails, also when the image is being replaced; nothing is left of it."""
    layers = publish(data_dir, "exact", base_layer(), tar_of({"first": b""}))
    others = publish(data_dir, "exact", base_layer(), tar_of({"second": b""}), replace=True)
    for wrong in (layers, others[:1], others[::-1]):
        plan = plan_of("exact", wrong)
        assert "was replaced just now" in server.refused(plan).message
        assert server.traces(plan.session_id) == []
    assert "malformed" not in server.refused(replace(plan_of("host", others), image_kind="host")).message


def ask(server: Nsinit, request: type[Any], *fds: int, **fields: Any) -> Any:
    seq = next(server._seq)
    socket.send_fds(server.channel, [REQUESTS.encode(request(seq, **fields))], fds)
    return server.receive()[0]


def test_a_started_nsinit_unpacks_beside_its_sessions(data_dir: Path, server: Nsinit) -> None:
    """The unpacker works under nsinit's own filter and ends when whoever asked for it hangs up; requests about sessions
    are answered meanwhile."""
    read_fd, write_fd = os.pipe()
    with tempfile.TemporaryFile() as file:
        file.write(tar_of({"started": b""}))
        file.seek(0)
        unpacked = ask(server, UnpackLayer, file.fileno(), read_fd, digest="", max_bytes=1 << 20, max_entries=10)
        assert isinstance(unpacked, LayerUnpacked), (unpacked, server.log)
        assert unpacked.is_new
    with description(describe([unpacked.digest], ImageConfig(), "", "", "", ())) as fd:
        published = ask(server, PublishImage, fd, name="started", layers=(unpacked.digest,))
    assert isinstance(published, Ok)
    assert Catalog(data_dir).get("started").layers == (unpacked.digest,)
    archive_fd, stuck_fd = os.pipe()
    os.write(stuck_fd, tar_of({"first": b""})[:512])
    seq = next(server._seq)
    request = UnpackLayer(seq, "", 1 << 20, 10)
    socket.send_fds(server.channel, [REQUESTS.encode(request)], [archive_fd, read_fd])
    wait_until(lambda: list(data_dir.glob("layers/+new-*/fs/first")), "the first member is there")
    assert isinstance(ask(server, DeleteImage, name="started"), Ok)
    os.close(write_fd)
    answer, _ = server.receive()
    assert (answer.seq, answer.stage, answer.message) == (seq, "unpack", "the process that works on it died")
    for each in (archive_fd, stuck_fd, read_fd):
        os.close(each)
    assert list(data_dir.glob("layers/+new-*")) == []
    collected = ask(server, CollectLayers, grace_s=0, only=(unpacked.digest,))
    assert (type(collected), collected.layers) == (LayersCollected, 1)


def test_a_daemon_that_may_use_some_images_changes_none(tmp_path: Path) -> None:
    """Such a daemon may add a layer, which has the name that its content gives it; what image names stand for is what
    root has said."""
    with data_directory() as data_dir, running(data_dir, allowance=ALLOWANCE) as server:
        read_fd, write_fd = os.pipe()
        with tempfile.TemporaryFile() as file:
            file.write(tar_of({"x": b""}))
            file.seek(0)
            unpacked = ask(server, UnpackLayer, file.fileno(), read_fd, digest="", max_bytes=1, max_entries=10)
        os.close(read_fd)
        os.close(write_fd)
        assert isinstance(unpacked, LayerUnpacked)
        with description(b"{}") as fd:
            answers = [
                ask(server, PublishImage, fd, name="host", layers=(unpacked.digest,), replace=True),
                ask(server, DeleteImage, name="host"),
            ]
        assert [(type(each), each.stage) for each in answers] == [(Failed, "grant")] * 2
        layer = data_dir / "layers" / unpacked.digest.removeprefix("sha256:")
        shared = [path.stat().st_mode & 0o777 for path in (layer.parent, layer, layer / "fs", layer / "meta.json")]
        assert shared == [0o710, 0o750, 0o700, 0o640]


def test_directories_of_an_image_are_renamed_and_redirects_of_others_mean_nothing(
    data_dir: Path, server: Nsinit
) -> None:
    """A session renames a directory that the image has. Marks of overlayfs that an archive brings along lead nowhere,
    and a program of the session can set none."""
    marks = {f"SCHILY.xattr.trusted.overlay.{each}": "/secret" for each in ("redirect", "metacopy", "origin")}
    marks |= {f"SCHILY.xattr.user.overlay.{each}": "/secret" for each in ("redirect", "metacopy", "opaque")}
    names = ("home/sandbox", "home/sandbox/old", "home/sandbox/old/file")
    lower = tar_of(
        {"secret": None, "secret/x": b"secret", names[0]: None, names[1]: None, names[2]: b""},
        **{each: {"uid": 1000, "gid": 1000} for each in names},
    )
    upper = tar_of({"evil": None, "file": b""}, evil={"pax_headers": marks}, file={"pax_headers": marks})
    layers = publish(data_dir, "renames", base_layer(), lower, upper)
    box = server.build(plan_of("renames", layers))
    assert box.run("cd /; ls -A /evil; cat /file").out == ""
    # mv(1) would copy where it can't rename, and the copy would be another file.
    numbers = box.run("cd /home/sandbox; stat -c %i old/file; mv old new; stat -c %i new/file; ls").out.split()
    assert (numbers[0], numbers[2:]) == (numbers[1], ["new"])
    box.teardown()


# Which may go -----------------------------------------------------------------------------------------------------


def test_what_an_image_or_a_session_has_is_not_collected(data_dir: Path, server: Nsinit) -> None:
    """Layers stay as long as an image, a session, a sandbox made ahead or whoever asks has them; then they go. An image
    that a session has is not deleted."""
    base, own, free = publish(data_dir, "used", base_layer(), tar_of({"own": b"1"}), tar_of({"free": b"22"}))
    publish(data_dir, "used", base_layer(), tar_of({"own": b"1"}), replace=True)
    only = {"grace_s": 0, "only": [base, own, free]}
    with open_store(data_dir) as store:
        assert store.collect(**only, kept=[free]).layers == 0  # type: ignore[arg-type]
        assert store.collect(grace_s=3600, only=[free]).layers == 0
        assert store.collect(**only, dry_run=True).layers == 1  # type: ignore[arg-type]
        found = store.collect(**only)  # type: ignore[arg-type]
        assert (found.layers, found.freed_bytes) == (1, 2)
        assert [store.has(each) for each in (base, own, free)] == [True, True, False]
        box = server.build(plan_of("used", (base, own)))
        ahead = plan_of("used", (base, own))
        assert isinstance(server.ask(Prepare, session_id=ahead.session_id, limits=ROOMY)[0], Ok)
        assert isinstance(server.ask(MountImage, plan=ahead)[0], Ok)
        with pytest.raises(ImageInUse):
            store.delete_image("used")
        publish(data_dir, "used", base_layer(), tar_of({"other": b""}), replace=True)
        assert store.collect(grace_s=0, only=[own]).layers == 0
        assert box.run("cat /own").out == "1"
        box.teardown()
        assert store.collect(grace_s=0, only=[own]).layers == 0
        server.teardown(ahead.session_id)
        assert store.collect(grace_s=0, only=[own]).layers == 1
        store.delete_image("used")
        with pytest.raises(InvalidImage, match="there is no such image"):
            store.delete_image("used")
        with pytest.raises(InvalidImage, match="a layer of the image is missing"):
            store.publish_image("used", layers=[base, own], config=ImageConfig())
    assert list((data_dir / "images").glob("*used*")) == []


def test_nothing_is_collected_while_it_is_not_known_what_is_used(data_dir: Path) -> None:
    """A record or a list that can't be read ends a collection before anything is moved."""
    (layer,) = publish(data_dir, "unknown", base_layer() + bytes(512))
    with open_store(data_dir) as store:
        store.delete_image("unknown")
        (data_dir / "images/damaged").mkdir()
        try:
            (data_dir / "images/damaged/layers").write_text("no digest\n")
            with pytest.raises(InvalidImage, match="the list of layers is none"):
                store.collect(grace_s=0, only=[layer])
            assert store.has(layer)
        finally:
            (data_dir / "images/damaged/layers").unlink()
            (data_dir / "images/damaged").rmdir()
        assert store.collect(grace_s=0, only=[layer]).layers == 1


def test_a_stage_has_room_for_all_layers_and_one_more() -> None:
    """Kernels before 6.13 take the layers by path: there is a mount point for each."""
    assert MAX_LOWERS > MAX_IMAGE_LAYERS
