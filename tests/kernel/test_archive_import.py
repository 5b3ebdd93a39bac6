"""Archives of images that the command line and the daemon import, and sessions on them."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import trio

from sandkasten.actors.tree import LocalSupervisor
from sandkasten.config import Config
from sandkasten.errors import InvalidImage, InvalidRequest
from sandkasten.images.catalog import Catalog, Image, now
from sandkasten.images.exporting import Exported, export_image
from sandkasten.images.layers import open_store
from sandkasten.images.registry.blobs import Blobs
from sandkasten.model import ExecSpec, SessionSpec
from sandkasten.model.image import COMPRESSIONS, CommitSpec, Compression, ConfigChanges
from sandkasten.model.job import ImageJob, ImportSpec, JobKind, JobState, LayerPhase
from tests import debian
from tests.archives import Layout, docker_saved, tar_of
from tests.e2e.seed import SCRIPT, completed
from tests.kernel.test_images_foreign import busybox_tar, run
from tests.kernel.test_packing import tree_of as layer_tree
from tests.registry import digest_of, layer
from tests.waiting import patience

pytestmark = pytest.mark.usefixtures("command_seed")

ROOT = Path(__file__).parents[2]
WORD = layer({"etc/word": b"one"})


def image(*arguments: str | Path, ok: bool = True) -> str:
    """Run `sandkasten image`, and return what it prints, or its error."""
    done = completed("image", *arguments, given=b"", timeout_s=patience(60))
    assert (done.returncode == 0) is ok, done.stderr
    printed: bytes = done.stdout if ok else done.stderr
    return printed.decode()


def test_the_command_line_finds_out_what_a_file_is(data_dir: Path, tmp_path: Path) -> None:
    """A file, a directory, and standard input, as the documentation has it for machines apart; a root file system is
    judged, and an archive of layers is not; what an archive calls an image can't take the place of another."""
    base = busybox_tar(tmp_path / "base.tar").read_bytes()
    saved, where = tmp_path / "saved.tar", ("--data-dir", data_dir)
    saved.write_bytes(gzip.compress(tar_of(docker_saved({"team/tools:v2": [base, WORD]}))))
    layout = Layout()
    digest = layout.name(layout.image([base, WORD], is_packed=True), "v1")
    for name, content in layout.members():
        (tmp_path / "layout" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "layout" / name).write_bytes(content)
    assert image("import", saved, *where).startswith("tools: 2 layers, ")
    assert image("import", tmp_path / "layout", "--name=laid", *where).startswith("laid: 2 layers")
    assert "members" in image("import", tmp_path / "base.tar", "--name=root", *where)
    (recipe,) = re.findall(r"^sandkasten image export .*", (ROOT / "docs/images.md").read_text(), re.MULTILINE)[1:]
    here = f'sandkasten() {{ {SCRIPT} "$@" --data-dir {data_dir}; }}\n'
    script = here + recipe.replace("ssh other", "").replace("--name tools", "--name moved")
    subprocess.run(["bash", "-o", "pipefail", "-c", script], check=True, timeout=patience(60))
    catalog = Catalog(data_dir)
    layers = (digest_of(base), digest_of(WORD))
    assert {catalog.get(name).layers for name in ("tools", "laid")} == {layers}
    assert catalog.get("moved").tags == ("v2",)
    assert layer_tree(catalog.layer(catalog.get("moved").layers[1])) == layer_tree(catalog.layer(layers[1]))
    assert (catalog.get("laid").digest, catalog.get("tools").digest) == (digest, "")
    assert (catalog.get("tools").source, catalog.get("tools").tags) == ("saved.tar", ("v2",))
    assert catalog.get("root").layers == layers[:1]
    for arguments, words in (
        ((saved,), "there is an image of that name already"),
        ((saved, "--replace"), "give a --name"),
    ):
        assert words in image("import", *arguments, *where, ok=False)
    assert os.listdir(data_dir / "blobs") == []
    assert not [name for name in os.listdir(data_dir / "layers") if name.startswith("+")]


async def test_an_archive_by_http_is_a_job(supervisor: LocalSupervisor, config: Config, tmp_path: Path) -> None:
    """An archive of layers shows its progress; a root file system is one layer; both run. What is too large, or no
    archive at all, leaves nothing."""
    base = busybox_tar(tmp_path / "base.tar").read_bytes()
    saved = tar_of(docker_saved({"team/tools:v2": [base, WORD]}))
    job = await imported(supervisor, ImportSpec("tools", "team/tools:v2"), saved)
    assert (job.kind, job.state, job.error, job.digest) == (JobKind.IMPORT, JobState.DONE, None, None)
    assert [each.phase for each in job.progress] == [LayerPhase.DONE] * 2
    assert await run(supervisor, "tools", "cat /etc/word") == "one"
    assert (await imported(supervisor, ImportSpec("root"), base)).state is JobState.DONE
    assert await run(supervisor, "root", "cat /etc/word 2> /dev/null || echo none") == "none\n"
    refused = await imported(supervisor, ImportSpec("bad"), b"no archive" * 100)
    assert refused.error is not None
    assert refused.error.code == "LAYER_REFUSED"
    with pytest.raises(InvalidRequest):
        await imported(supervisor, ImportSpec("bad", platform="linux"), saved)
    assert [each.name for each in Catalog(config.data_dir).images()] == ["host", "root", "tools"]
    assert os.listdir(config.data_dir / "blobs") == []


async def imported(supervisor: LocalSupervisor, spec: ImportSpec, content: bytes) -> ImageJob:
    """Import, and return the job as it ended."""

    file = io.BytesIO(content)

    async def read() -> bytes:
        return file.read(100_000)

    job, seen = await supervisor.import_image(spec, read), 0
    with trio.fail_after(patience(60)):
        while not job.has_ended:
            seen, job = await supervisor.next_of_job(job.id, seen, 60)
    return job


# Exports --------------------------------------------------------------------------------------------------------------


def rich(base: bytes) -> list[bytes]:
    """Return the layers of an image with all that a layer may have: marks, links, set-id bits, attributes, holes."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as archive:

        def add(name: str, content: bytes = b"", **fields: Any) -> None:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            for field, value in fields.items():
                setattr(member, field, value)
            archive.addfile(member, io.BytesIO(content))

        add("data", type=tarfile.DIRTYPE, mode=0o750, uid=7, mtime=1_600_000_000)
        add("data/su", b"x", mode=0o4755, mtime=1.5)
        add("data/hard", type=tarfile.LNKTYPE, linkname="data/su")
        add("data/link", type=tarfile.SYMTYPE, linkname="../nowhere", uid=8)
        add("data/noted", b"y", pax_headers={"SCHILY.xattr.user.note": "n\0"})
        add(os.fsdecode(b"data/not-\xff-utf-8"), b"z")
        add("etc/.wh.word")
        add("srv/.wh..wh..opq")
    return [base, WORD, layer({"srv/old": b"o"}), target.getvalue()]


def tree_of(catalog: Catalog, name: str) -> list[object]:
    """Return what the layers of an image have, one after the other."""
    return [layer_tree(catalog.layer(each)) for each in catalog.get(name).layers]


def exported(config: Config, name: str, path: Path, compression: Compression = "gzip") -> Exported:
    """Export an image beside a daemon, as the command line does."""
    with path.open("wb") as file, open_store(config.data_dir) as store:
        blobs = Blobs(config.data_dir / "blobs")
        return export_image(Catalog(config.data_dir), store, blobs, name, file, compression)


async def test_an_export_comes_back_the_same(supervisor: LocalSupervisor, config: Config, tmp_path: Path) -> None:
    """The layers of another tool get other digests, of the same trees; from then on they are the same, whatever
    compresses them. Two exports of one image are the same bytes, also by the daemon, whose reader may leave. An image
    that is no list of layers comes back as one. The machine's own is refused, and so is one that goes meanwhile."""
    catalog = Catalog(config.data_dir)
    saved = tar_of(docker_saved({"team/tools:v2": rich(busybox_tar(tmp_path / "base.tar").read_bytes())}))
    assert (await imported(supervisor, ImportSpec("tools"), saved)).state is JobState.DONE
    done = await trio.to_thread.run_sync(exported, config, "tools", tmp_path / "first")
    assert (done.is_repacked, done.skipped) == (True, 0)
    assert (await imported(supervisor, ImportSpec("again"), (tmp_path / "first").read_bytes())).digest == done.digest
    first, again = catalog.get("tools"), catalog.get("again")
    assert again.layers != first.layers
    assert tree_of(catalog, "again") == tree_of(catalog, "tools")
    assert (again.config, again.tags, again.platform) == (first.config, first.tags, first.platform)
    for compression in COMPRESSIONS:
        done = await trio.to_thread.run_sync(exported, config, "again", tmp_path / compression, compression)
        assert (done.is_repacked, done.skipped) == (False, 0)
        back = await imported(supervisor, ImportSpec(compression), (tmp_path / compression).read_bytes())
        assert (back.digest, catalog.get(compression).layers) == (done.digest, again.layers)
    with catalog.building("old") as directory:
        with tarfile.open(tmp_path / "base.tar") as archive:
            archive.extractall(directory / "rootfs", filter="tar")
        catalog.publish(directory, Image("old", "rootfs", now(), "an archive"))
    done = await trio.to_thread.run_sync(exported, config, "old", tmp_path / "old")
    assert (done.is_repacked, done.skipped) == (False, 0)
    assert (await imported(supervisor, ImportSpec("new"), (tmp_path / "old").read_bytes())).digest == done.digest
    assert tree_of(catalog, "new") == [layer_tree(path) for path in catalog.trees("old")]
    pieces = []
    async with supervisor.export_image("again", "gzip") as read:
        while piece := await read():
            pieces.append(piece)
    assert b"".join(pieces) == (tmp_path / "gzip").read_bytes()
    with trio.fail_after(patience(60)):
        async with supervisor.export_image("again", "none") as read:
            await read()
        with trio.move_on_after(0):
            async with supervisor.export_image("again", "none") as read:
                await trio.sleep_forever()
    with pytest.raises(OSError, match="No space"):
        await trio.to_thread.run_sync(exported, config, "again", Path("/dev/full"))
    with pytest.raises(InvalidImage, match="this machine's own /usr"):
        await trio.to_thread.run_sync(exported, config, "host", tmp_path / "host")

    class Slow(io.BytesIO):
        """A file whose first piece arrives after the image has gone."""

        def write(self, data: Any, /) -> int:  # a buffer
            if not self.tell():
                trio.from_thread.run(supervisor.delete_image, "again")
            return super().write(data)

    def outlived() -> None:
        with open_store(config.data_dir) as store:
            export_image(catalog, store, Blobs(config.data_dir / "blobs"), "again", Slow(), "none")

    with pytest.raises(InvalidImage, match="there is no image 'again'"):
        await trio.to_thread.run_sync(outlived)
    (catalog.layer(first.layers[0]).parent / "opaque").unlink()  # as of a version that kept no such list
    with pytest.raises(InvalidImage, match="no such layer"):
        async with supervisor.export_image("tools", "gzip") as read:
            assert await read() == b""
    assert os.listdir(config.data_dir / "blobs") == []


async def test_other_tools_read_an_export_and_write_what_comes_in(
    supervisor: LocalSupervisor, config: Config, tmp_path: Path
) -> None:
    """skopeo makes an archive of `docker save` of an export, and umoci the same tree. Of a commit they tell
    configuration and history."""
    try:
        umoci, skopeo = debian.program("umoci", "usr/bin/umoci"), debian.program("skopeo", "usr/bin/skopeo")
        folder = f"usr/lib/{os.uname().machine}-linux-gnu"
        found = [str(debian.program(name, folder)) for name in ("libgpgme11", "libassuan0")]
    except debian.Unavailable as error:
        pytest.skip(str(error))

    def tool(*command: str | Path) -> str:
        environment = os.environ | {"LD_LIBRARY_PATH": ":".join(found), "TMPDIR": str(tmp_path)}
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, timeout=patience(60), check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.decode()

    saved = tar_of(docker_saved({"team/tools:v2": rich(busybox_tar(tmp_path / "base.tar").read_bytes())}))
    assert (await imported(supervisor, ImportSpec("tools"), saved)).state is JobState.DONE
    image("export", "tools", "-o", tmp_path / "out.tar", "--data-dir", config.data_dir)
    said = json.loads(tool(skopeo, "inspect", "oci-archive:out.tar:v2"))
    assert (len(said["Layers"]), said["Env"]) == (4, ["A=b=c"])
    session = await supervisor.create(SessionSpec(image="tools", user="root"))
    await supervisor.exec(session.id, ExecSpec("echo one > /made"))
    spec = CommitSpec("made", ConfigChanges(cmd=("sh",), user="7:8", working_dir="/etc"), created_by="RUN it")
    await supervisor.commit_session(session.id, spec)
    await supervisor.destroy(session.id)
    image("export", "made", "-o", tmp_path / "made.tar", "--data-dir", config.data_dir)
    made = json.loads(tool(skopeo, "inspect", "--config", "oci-archive:made.tar:latest"))
    assert made["config"] == {"Cmd": ["sh"], "Env": ["A=b=c"], "User": "7:8", "WorkingDir": "/etc"}
    assert [each.get("created_by") for each in made["history"]] == [None] * 4 + ["RUN it"]
    copy = (skopeo, "--insecure-policy", "copy")
    tool(*copy, "oci-archive:made.tar:latest", "oci:made:latest")
    tool(umoci, "unpack", "--image", "made:latest", "made-bundle")
    assert (tmp_path / "made-bundle/rootfs/made").read_text() == "one\n"
    tool(*copy, "oci-archive:out.tar:v2", "docker-archive:docker.tar:team/other:v3")
    tool(*copy, "oci-archive:out.tar:v2", "oci:layout:v2")
    back = await imported(supervisor, ImportSpec("other", "team/other:v3"), (tmp_path / "docker.tar").read_bytes())
    assert back.error is None
    catalog = Catalog(config.data_dir)
    assert tree_of(catalog, "other") == tree_of(catalog, "tools")
    tool(umoci, "unpack", "--image", "layout:v2", "bundle")
    tree = tmp_path / "bundle" / "rootfs"
    assert sorted(os.listdir(os.fsencode(tree / "data"))) == [b"hard", b"link", b"not-\xff-utf-8", b"noted", b"su"]
    su = (tree / "data" / "su").stat()
    assert (su.st_mode & 0o7777, su.st_nlink, os.getxattr(tree / "data" / "noted", "user.note")) == (0o4755, 2, b"n\0")
    assert not (tree / "etc" / "word").exists()
    assert os.listdir(tree / "srv") == []
