"""Pulled images on the real kernel: layers unpacked by nsinit for a daemon, and sessions on them."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import attrs
import pytest
import trio

from nsinit.kernel import syscalls
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import open_supervisor
from sandkasten.config import Config, ServerSettings
from sandkasten.errors import DiskFull, ImageInUse, InvalidImage, SandboxError
from sandkasten.images.catalog import Catalog
from sandkasten.images.importing import import_tar
from sandkasten.model import SessionSpec
from sandkasten.model.job import ImageJob, JobState, LayerPhase, PullSpec
from tests.kernel.test_images_foreign import busybox_tar, run
from tests.registry import Asked, Said, digest_of, layer, serving
from tests.waiting import patience, until


async def pulled(supervisor: LocalSupervisor, spec: PullSpec) -> ImageJob:
    """Pull, and return the job as it ended."""
    job, seen = await supervisor.pull_image(spec), 0
    with trio.fail_after(patience(60)):
        while not job.has_ended:
            seen, job = await supervisor.next_of_job(job.id, seen, 60)
    return job


async def exported(supervisor: LocalSupervisor) -> None:
    """Read an export to its end."""
    async with supervisor.export_image("image", "none") as read:
        while await read():
            pass


async def test_an_image_from_a_registry_runs(supervisor: LocalSupervisor, config: Config, tmp_path: Path) -> None:
    """Layers are in order, compressed or not; the second image loads only what the store lacks, and the catalogue has
    source, digest and tag of both."""
    async with serving() as registry:
        base = busybox_tar(tmp_path / "x.tar").read_bytes()
        first = registry.push([base, layer({"etc/word": b"one"})])
        job = await pulled(supervisor, PullSpec(registry.reference(), name="one"))
        assert (job.state, job.digest, job.error) == (JobState.DONE, first, None)
        assert await run(supervisor, "one", "cat /etc/word") == "one"
        top = layer({"etc/word": b"two", "etc/more": b"x"})
        second = registry.push([base, gzip.compress(top)], contents=[base, top], tag="two")
        job = await pulled(supervisor, PullSpec(registry.reference(":two")))
        assert (job.state, job.digest, job.error) == (JobState.DONE, second, None)
        assert [each.phase for each in job.progress] == [LayerPhase.PRESENT, LayerPhase.DONE]
        assert await run(supervisor, "image", "cat /etc/word /etc/more") == "twox"
    image = Catalog(config.data_dir).get("image")
    assert (image.kind, image.source, image.digest) == ("layers", registry.reference(":two"), second)
    assert (tuple(image.tags), len(image.layers), image.size_bytes > 3) == (("two",), 2, True)
    assert os.listdir(config.data_dir / "blobs") == []


async def test_a_layer_that_is_another_is_not_in_the_store(supervisor: LocalSupervisor, config: Config) -> None:
    """A blob may be what the manifest says, and not what the configuration says, or no archive. Nothing is published,
    and no draft stays."""
    async with serving() as registry:
        said = layer({"etc/x": b"x"})
        for code, sent, content in (
            ("DIGEST_MISMATCH", layer({"etc/y": b"y"}), said),
            ("LAYER_REFUSED", (bad := b"no archive" * 1000), bad),
            ("LAYER_REFUSED", gzip.compress(said)[:-9], said),
        ):
            registry.push([sent], contents=[content])
            job = await pulled(supervisor, PullSpec(registry.reference()))
            assert job.error is not None
            assert job.error.code == code, job.error
    assert [each.name for each in Catalog(config.data_dir).images()] == ["host"]
    assert [name for name in os.listdir(config.data_dir / "layers") if name.startswith("+")] == []


async def test_a_taken_name_is_replaced_if_that_is_asked_for(supervisor: LocalSupervisor, tmp_path: Path) -> None:
    """A pull that does not ask is refused, with the image that is there left as it is."""
    async with serving() as registry:
        base = busybox_tar(tmp_path / "x.tar").read_bytes()
        registry.push([base, layer({"etc/word": b"one"})])
        assert (await pulled(supervisor, PullSpec(registry.reference()))).state is JobState.DONE
        registry.push([base, layer({"etc/word": b"two"})])
        refused = await pulled(supervisor, PullSpec(registry.reference()))
        assert refused.error is not None
        assert refused.error.code == "INVALID_IMAGE"
        assert await run(supervisor, "image", "cat /etc/word") == "one"
        done = await pulled(supervisor, PullSpec(registry.reference(), replace=True))
        assert done.state is JobState.DONE
        assert await run(supervisor, "image", "cat /etc/word") == "two"


async def test_a_collection_keeps_the_layers_of_a_pull_that_is_under_way(
    supervisor: LocalSupervisor, config: Config, tmp_path: Path
) -> None:
    """Whether by a prune, by the end of an image that has them, or by the reaper after an hour."""
    async with serving() as registry:
        base, top = busybox_tar(tmp_path / "x.tar").read_bytes(), layer({"etc/word": b"one"})
        registry.push([base], tag="old")
        assert (await pulled(supervisor, PullSpec(registry.reference(":old"), name="old"))).state is JobState.DONE
        registry.push([base, top])
        asked = trio.Event()

        def answer(request: Asked) -> Said | None:
            if digest_of(top) not in request.path:
                return None
            asked.set()
            return Said(200, top, cut=10, hold=True)

        registry.answer = answer
        job = await supervisor.pull_image(PullSpec(registry.reference()))
        await asked.wait()
        kept = config.data_dir / "layers" / digest_of(base).removeprefix("sha256:")
        await supervisor.delete_image("old")
        assert kept.is_dir()
        assert (await supervisor.prune_images(older_than_s=0)).layers == 0
        os.utime(kept, (0, 0))
        await supervisor.leftovers.collect_layers()
        assert kept.is_dir()
        await supervisor.cancel_job(job.id)
        assert (await supervisor.prune_images(older_than_s=0)).layers == 1


async def test_a_prune_outlives_what_is_no_download(supervisor: LocalSupervisor, config: Config) -> None:
    """A directory, such as `lost+found`, or a link among the downloads is left alone; a directory of downloads that
    can't be read is an error of that request alone."""
    blobs = config.data_dir / "blobs"
    (blobs / "lost+found").mkdir(parents=True)
    (blobs / "link").symlink_to("/nowhere")
    (part := blobs / f"{'0' * 64}.part").write_bytes(b"x")
    assert (await supervisor.prune_images(older_than_s=0)).blobs == 1
    assert (part.exists(), sorted(os.listdir(blobs))) == (False, ["link", "lost+found"])
    blobs.rename(blobs.with_name("elsewhere"))
    blobs.touch()
    with pytest.raises(SandboxError, match="downloads"):
        await supervisor.prune_images(older_than_s=0)
    blobs.unlink()
    assert (await supervisor.prune_images(older_than_s=0)).blobs == 0


async def test_a_disk_that_others_fill_ends_a_pull_and_an_export(config: Config, tmp_path: Path) -> None:
    """Both are told as DISK_FULL, and leave nothing: what came of a pull would keep the disk full."""
    disk, blobs = attrs.evolve(config.disk, reserve_percent=0, reserve_mb=0), config.data_dir / "blobs"
    async with serving() as registry, open_supervisor(attrs.evolve(config, disk=disk)) as supervisor:
        base, top = busybox_tar(tmp_path / "x.tar").read_bytes(), layer({"etc/large": os.urandom(4 << 20)})
        registry.push([base], tag="base")
        assert (await pulled(supervisor, PullSpec(registry.reference(":base")))).state is JobState.DONE
        registry.push([base, top], tag="large")
        syscalls.mount("small", str(blobs), "tmpfs", 0, "size=12m,mode=700")
        try:

            def fill(asked: Asked) -> None:
                if digest_of(top) in asked.path:
                    (blobs / "others").write_bytes(bytes(11 << 20))

            registry.answer = fill
            job = await pulled(supervisor, PullSpec(registry.reference(":large")))
            assert job.error is not None
            assert job.error.code == "DISK_FULL", job.error
            assert os.listdir(blobs) == ["others"]
            with pytest.raises(DiskFull):
                await exported(supervisor)
        finally:
            syscalls.umount2(str(blobs), 0)


async def test_an_image_is_described_deleted_and_its_layers_go(supervisor: LocalSupervisor, tmp_path: Path) -> None:
    """Not while a session has it, and not those of another image; a layer that is left over is pruned."""
    async with serving() as registry:
        base, top = busybox_tar(tmp_path / "x.tar").read_bytes(), layer({"etc/word": b"one"})
        registry.push([base, top], tag="one")
        registry.push([base], tag="two")
        for tag in ("one", "two"):
            assert (await pulled(supervisor, PullSpec(registry.reference(f":{tag}"), name=tag))).state is JobState.DONE
    found = {each.name: each for each in await supervisor.images()}
    assert [each.digest for each in found["one"].layers] == [digest_of(base), digest_of(top)]
    assert found["one"].layers[1].size_bytes == 3
    assert (list(found["host"].layers), list(found["host"].alias_names)) == ([], ["base", "python"])
    session = await supervisor.create(SessionSpec(image="one"))
    with pytest.raises(ImageInUse):
        await supervisor.delete_image("one")
    await supervisor.destroy(session.id)
    await supervisor.delete_image("one")
    assert (await supervisor.prune_images(older_than_s=0, dry_run=True)).layers == 0
    assert await run(supervisor, "two", "cat /etc/word 2> /dev/null || echo none") == "none\n"
    for name in ("one", "host", "../x"):
        with pytest.raises(InvalidImage):
            await supervisor.delete_image(name)


async def test_a_sandbox_made_ahead_keeps_no_image(config: Config, tmp_path: Path) -> None:
    """The image of the last session is mounted for the next one, and can be deleted all the same."""
    async with open_supervisor(attrs.evolve(config, server=ServerSettings(pool_sandboxes=2))) as supervisor:
        import_tar(Catalog(config.data_dir), "one", busybox_tar(tmp_path / "x.tar"))
        session = await supervisor.create(SessionSpec(image="one"))
        await supervisor.destroy(session.id)

        async def is_mounted_ahead() -> bool:
            uses = (config.data_dir / "run").glob("*/image")
            return any(path.parent.name != session.id for path in uses)

        await until(is_mounted_ahead)
        await supervisor.delete_image("one")
        assert (await supervisor.prune_images(older_than_s=0)).layers == 0
