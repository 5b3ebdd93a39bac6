"""Archives of images that the command line and the daemon import, and sessions on them."""

from __future__ import annotations

import gzip
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from sandkasten.actors.tree import LocalSupervisor
from sandkasten.config import Config
from sandkasten.images.catalog import Catalog
from sandkasten.model.errors import InvalidRequest
from sandkasten.model.job import ImageJob, ImportSpec, JobKind, JobState, LayerPhase
from tests.archives import Layout, docker_saved, tar_of
from tests.e2e.daemon import SCRIPT
from tests.kernel.test_images_foreign import busybox_tar, run
from tests.registry import digest_of, layer
from tests.waiting import patience

pytestmark = [pytest.mark.kernel, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]

WORD = layer({"etc/word": b"one"})


def image(*arguments: str | Path, stdin: bytes | None = None, ok: bool = True) -> str:
    """Run `sandkasten image`, and return what it prints, or its error."""
    command = [SCRIPT, "image", *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, timeout=patience(60), check=False)
    assert (done.returncode == 0) is ok, done.stderr
    return (done.stdout if ok else done.stderr).decode()


def test_the_command_line_finds_out_what_a_file_is(data_dir: Path, tmp_path: Path) -> None:
    """A file, standard input, and a directory; a root file system is judged, and an archive of layers is not; what an
    archive calls an image can't take the place of another."""
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
    assert "members" in image("import", "-", "--name=root", *where, stdin=gzip.compress(base))
    catalog = Catalog(data_dir)
    layers = (digest_of(base), digest_of(WORD))
    assert {catalog.get(name).layers for name in ("tools", "laid")} == {layers}
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

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(content), 100_000):
            yield content[at : at + 100_000]

    job, seen = await supervisor.import_image(spec, pieces()), 0
    with trio.fail_after(patience(60)):
        while not job.has_ended:
            seen, job = await supervisor.next_of_job(job.id, seen, 60)
    return job
