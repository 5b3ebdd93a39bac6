"""Pulls from the distribution's own registry of images that its tools made and pushed, compared with what they make of
them."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import attrs
import httpx
import pytest

from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import open_supervisor
from sandkasten.config import Config
from sandkasten.images.catalog import Catalog
from sandkasten.images.registry.documents import Platform
from sandkasten.model.job import JobState, LayerPhase, PullSpec
from tests import debian, image_tools
from tests.image_tools import Tools
from tests.kernel.test_images_foreign import busybox_tar, run
from tests.kernel.test_pulls import pulled
from tests.waiting import until

_PROGRAMS = ("bin/sh", "bin/find", "bin/sha256sum", "bin/sort", "bin/xargs", "bin/readlink", "bin/cat", "bin/stat")
_LIST = (
    "cd /data; find . -type f -print0 | sort -z | xargs -0 sha256sum; find . ! -type f | sort; readlink link; "
    "find . ! -type l -print0 | sort -z | xargs -0 stat -c '%n %a %u:%g'; stat -c %h kept"
)
OCI = "application/vnd.oci.image.manifest.v1+json"
USERS = "me:$2b$04$6s3aFbHzzjvePdoelElKM.0RNLs/hCA7lR4I0YYLhdJy6a7BKXqoC\n"
"""The name `me` with the password `hunter2-secret`."""


@pytest.fixture
def tools(tmp_path: Path) -> Iterator[Tools]:
    """A registry that runs on loopback, and the tools."""
    with ExitStack() as stack:
        try:
            found = stack.enter_context(image_tools.running(tmp_path))
        except debian.Unavailable as error:
            pytest.skip(str(error))
        yield found


def make_image(tools: Tools) -> Path:
    """Make an image of three layers, with whiteouts, an opaque directory, and changes of kind; return its tree."""
    image, bundle = f"{tools.directory}/layout:v1", tools.directory / "bundle"
    tools.make("init", "--layout", tools.directory / "layout")
    tools.make("new", "--image", image)
    tools.make("unpack", "--image", image, bundle)
    tree = bundle / "rootfs"
    with tarfile.open(busybox_tar(tools.directory / "x.tar", links=_PROGRAMS)) as archive:
        archive.extractall(tree, filter="tar")
    data = tree / "data"
    for name in ("kept", "gone", "directory/old", "turns/into/file", "plain", "dropped/below/x"):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_text(name)
    os.link(data / "kept", data / "hard")
    (data / "link").symlink_to("kept")
    (data / "kept").chmod(0o604)
    os.chown(data / "kept", 1, 2)
    (data / "directory").chmod(0o2755)
    tools.make("repack", "--image", image, "--refresh-bundle", bundle)
    (data / "gone").unlink()
    _remove(data / "turns")
    _remove(data / "dropped")
    (data / "turns").write_text("a file")
    (data / "plain").unlink()
    (data / "plain").mkdir()
    (data / "plain" / "new").write_text("below")
    tools.make("repack", "--image", image, "--refresh-bundle", bundle)
    _remove(data / "directory")
    (data / "directory").mkdir()
    (data / "directory" / "new").write_text("new")
    (data / "name with space é").write_text("x")
    tools.make("repack", "--image", image, "--refresh-bundle", bundle)
    tools.make("config", "--image", image, "--config.env", "A=b", "--config.workingdir", "/data")
    return data


def _remove(directory: Path) -> None:
    for path in sorted(directory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    directory.rmdir()


def listing(data: Path) -> str:
    """Return what `_LIST` prints of a tree."""
    files, others = [], ["."]
    for path in data.rglob("*"):
        name = f"./{path.relative_to(data)}"
        if path.is_file() and not path.is_symlink():
            files.append((name, hashlib.sha256(path.read_bytes()).hexdigest()))
        else:
            others.append(name)
    key = str.encode
    lines = [f"{digest}  {name}" for name, digest in sorted(files, key=lambda each: key(each[0]))]
    status = [(each, (data / each).lstat()) for each in sorted([*(name for name, _ in files), *others], key=key)]
    marks = [
        f"{name} {each.st_mode & 0o7777:o} {each.st_uid}:{each.st_gid}"
        for name, each in status
        if not (data / name).is_symlink()
    ]
    return "\n".join(
        [*lines, *sorted(others, key=key), os.readlink(data / "link"), *marks, f"{(data / 'kept').stat().st_nlink}", ""]
    )


async def test_an_image_of_other_tools_has_the_same_tree_here(
    supervisor: LocalSupervisor, config: Config, tools: Tools
) -> None:
    """By tag and by digest, with manifests of OCI's form and of Docker's; the later pulls have all layers."""
    await until(tools.answers)
    data = make_image(tools)
    digest = tools.push("v1")
    reference = f"{tools.place}/team/image"
    job = await pulled(supervisor, PullSpec(f"{reference}:v1"))
    assert (job.state, job.error, job.digest) == (JobState.DONE, None, digest)
    assert await run(supervisor, "image", _LIST) == listing(data)
    found = Catalog(config.data_dir).get("image")
    assert (found.config.env["A"], found.config.working_dir, len(found.layers)) == ("b", "/data", 3)
    again = await pulled(supervisor, PullSpec(f"{reference}@{digest}", name="again"))
    assert [each.phase for each in again.progress] == [LayerPhase.PRESENT] * 3
    docker = tools.push("v1", "--format=v2s2")
    assert docker != digest
    other = await pulled(supervisor, PullSpec(f"{reference}@{docker}", name="docker"))
    assert (other.state, other.error) == (JobState.DONE, None)
    missing = await pulled(supervisor, PullSpec(f"{reference}:none"))
    assert missing.error is not None
    assert missing.error.details["codes"] == ["MANIFEST_UNKNOWN"]


async def test_platforms_other_compression_and_a_mirror(config: Config, tools: Tools) -> None:
    """An index is resolved, layers come by zstd, and a mirror has an image of a registry that is not there. A layer
    that is compressed in another way is the same layer."""
    await until(tools.answers)
    make_image(tools)
    own = Platform.own().architecture
    entries = []
    for architecture in (own, "riscv64"):
        tools.make("config", "--image", f"{tools.directory}/layout:v1", "--architecture", architecture)
        digest = tools.push("v1", "--dest-compress-format=zstd")
        async with httpx.AsyncClient() as client:
            manifest = await client.get(
                f"http://{tools.place}/v2/team/image/manifests/{digest}", headers={"accept": OCI}
            )
        assert {each["mediaType"].rpartition("+")[2] for each in manifest.json()["layers"]} == {"zstd"}
        platform = {"os": "linux", "architecture": architecture}
        entries.append({"mediaType": OCI, "digest": digest, "size": len(manifest.content), "platform": platform})
    kind = OCI.replace("manifest", "index")
    index = {"schemaVersion": 2, "mediaType": kind, "manifests": entries}
    async with httpx.AsyncClient() as client:
        put = await client.put(
            f"http://{tools.place}/v2/team/image/manifests/all",
            content=json.dumps(index),
            headers={"content-type": kind},
        )
    assert put.status_code == 201, put.text
    mirrored = attrs.evolve(config.images, mirrors={"registry.invalid": (f"http://{tools.place}",)})
    async with open_supervisor(attrs.evolve(config, images=mirrored)) as supervisor:
        job = await pulled(supervisor, PullSpec("registry.invalid/team/image:all"))
        assert (job.state, job.error) == (JobState.DONE, None)
        assert Catalog(config.data_dir).get("image").platform == str(Platform.own())
        other = await pulled(supervisor, PullSpec(f"{tools.place}/team/image:all", name="x", platform="linux/riscv64"))
        assert [each.phase for each in other.progress] == [LayerPhase.PRESENT] * 3
        tools.push("v1", "--dest-compress-format=gzip")
        same = await pulled(supervisor, PullSpec(f"{tools.place}/team/image:v1", name="y", platform="linux/riscv64"))
        assert [each.phase for each in same.progress] == [LayerPhase.PRESENT] * 3


async def test_a_registry_that_wants_a_password_gets_that_of_the_request(
    supervisor: LocalSupervisor, tmp_path: Path
) -> None:
    """Without one, or with a wrong one, it refuses; with it it says that there is no such image."""
    with ExitStack() as stack:
        try:
            tools = stack.enter_context(image_tools.running(tmp_path, users=USERS))
        except debian.Unavailable as error:
            pytest.skip(str(error))
        await until(tools.answers)
        for auth, code in (
            (None, "REGISTRY_UNAUTHORIZED"),
            (("me", "wrong"), "REGISTRY_UNAUTHORIZED"),
            (("me", "hunter2-secret"), "REGISTRY_REFUSED"),
        ):
            job = await pulled(supervisor, PullSpec(f"{tools.place}/team/image:v1", auth=auth))
            assert job.error is not None
            assert job.error.code == code, job.error
            assert ("MANIFEST_UNKNOWN" in str(job.error.details)) == (code == "REGISTRY_REFUSED")
