"""Jobs on images: their records, ends and readers, over a registry on loopback and a store of layers in memory."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from sandkasten.actors.core import Ref
from sandkasten.actors.services.jobs import BeginPull, CancelJob, GetJob, Jobs, ListJobs, NextOfJob
from sandkasten.actors.services.store import Store
from sandkasten.config import ImagesSettings
from sandkasten.crash import Crash
from sandkasten.errors import Conflict, InvalidImage, InvalidReference, InvalidRequest, JobNotFound, Overloaded
from sandkasten.images.catalog import Catalog
from sandkasten.images.layers import describe
from sandkasten.images.registry.blobs import Blobs
from sandkasten.images.registry.client import Patience
from sandkasten.images.registry.credentials import Credentials, write_credentials
from sandkasten.images.registry.pulling import NewImage, PullTarget, PullTurns
from sandkasten.model.image import ImageConfig
from sandkasten.model.job import ENDED_JOBS, MAX_JOBS, ImageJob, JobKind, JobState, LayerPhase, PullSpec
from sandkasten.store.database import open_database
from sandkasten.store.jobs import begin_job, get_job, list_jobs
from tests.registry import MemoryStore, Registry, Said, digest_of, layer, serving
from tests.waiting import patience, until

TAR = layer({"file": b"content" * 1000})


@asynccontextmanager
async def working(tmp_path: Path, layers: PullTarget) -> AsyncIterator[Ref]:
    """Run the actor over a database."""
    store = Store(Ref("store"), tmp_path / "db")
    jobs = Jobs(
        Ref("jobs"),
        store=store.ref,
        layers=layers,
        catalog=Catalog(tmp_path),
        blobs=Blobs(tmp_path / "blobs"),
        settings=ImagesSettings(),
        credentials_file=tmp_path / "auth.json",
        crash=Crash(),
        turns=PullTurns(),
        patience=Patience(1, 0.001, 5),
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        await nursery.start(jobs.run)
        yield jobs.ref
        nursery.cancel_scope.cancel()


async def ended(jobs: Ref, job: ImageJob) -> ImageJob:
    """Follow a job to its end."""
    seen = 0
    with trio.fail_after(patience()):
        while not job.has_ended:
            seen, job = await jobs.ask(NextOfJob(job.id, seen, 60))
    return job


def silent(registry: Registry) -> trio.Event:
    """Have a registry never finish an answer; return what is set once it is asked."""
    asked = trio.Event()

    def answer(_: object) -> Said:
        asked.set()
        return Said(200, b"{", length=100, hold=True)

    registry.answer = answer
    return asked


async def test_a_pull_is_a_job_from_its_record_to_its_end(tmp_path: Path) -> None:
    """With the progress of each layer; the name and platform are said before the first byte."""
    store = MemoryStore()
    async with serving() as registry, working(tmp_path, store) as jobs:
        digest = registry.push([TAR])
        begun = await jobs.ask(BeginPull(PullSpec(registry.reference())))
        assert (begun.state, begun.name, begun.reference) == (JobState.QUEUED, "image", registry.reference())
        done = await ended(jobs, begun)
        assert (done.state, done.digest, done.error) == (JobState.DONE, digest, None)
        assert [(each.layer, each.done_bytes, each.phase) for each in done.progress] == [
            (digest_of(TAR), len(TAR), LayerPhase.DONE)
        ]

        async def is_let_go() -> bool:  # a moment behind its end
            return (await jobs.ask(GetJob(begun.id))).progress == ()

        await until(is_let_go)
        kept = await jobs.ask(GetJob(begun.id))
        assert (kept.state, kept.digest) == (JobState.DONE, digest)
        assert await jobs.ask(ListJobs(10)) == [kept]
        assert list(store.images) == ["image"]
        for unknown in ("0" * 24, "../x", ""):
            with pytest.raises(JobNotFound):
                await jobs.ask(GetJob(unknown))


async def test_a_request_that_cannot_be_is_refused_before_a_record(tmp_path: Path) -> None:
    """Each by its own error."""
    async with working(tmp_path, MemoryStore()) as jobs:
        for spec, error in (
            (PullSpec("http://x"), InvalidReference),
            (PullSpec("x", name="../x"), InvalidImage),
            (PullSpec("x", platform="linux"), InvalidRequest),
        ):
            with pytest.raises(error):
                await jobs.ask(BeginPull(spec))
        assert await jobs.ask(ListJobs(10)) == []


async def test_a_name_that_is_taken_is_refused_before_the_registry_is_asked(tmp_path: Path) -> None:
    """Unless the image is to be replaced. Another tag is named beside it, also while the first is on its way."""
    async with serving() as registry, working(tmp_path, MemoryStore()) as jobs:
        registry.push([TAR])
        (tmp_path / "images/image").mkdir(parents=True)
        said = describe([], ImageConfig(), digest_of(TAR), registry.reference(), "", ["latest"])
        (tmp_path / "images/image/meta.json").write_bytes(said)
        failed = await ended(jobs, await jobs.ask(BeginPull(PullSpec(registry.reference()))))
        assert failed.error is not None
        assert (failed.error.code, failed.error.message) == (*("INVALID_IMAGE", "there is an image 'image' already"),)
        assert registry.asked == []
        done = await ended(jobs, await jobs.ask(BeginPull(PullSpec(registry.reference(), replace=True))))
        assert done.state is JobState.DONE
        silent(registry)
        names = [
            (await jobs.ask(BeginPull(PullSpec(registry.reference(f":{tag}"))))).name for tag in ("v1", "v2", "v1")
        ]
        assert names == ["image-v1", "image-v2", "image-v1"]


async def test_a_key_begins_one_job(tmp_path: Path) -> None:
    """The same request gets it again, also after its end; another request is refused."""
    async with serving() as registry, working(tmp_path, MemoryStore()) as jobs:
        registry.push([TAR])
        spec = PullSpec(registry.reference(), idempotency_key="k")
        first = await jobs.ask(BeginPull(spec))
        assert (await jobs.ask(BeginPull(spec))).id == first.id
        done = await ended(jobs, first)
        assert (await jobs.ask(BeginPull(spec))).state is done.state
        with pytest.raises(Conflict):
            await jobs.ask(BeginPull(PullSpec(registry.reference(), name="other", idempotency_key="k")))
        with pytest.raises(Conflict):
            await jobs.ask(BeginPull(PullSpec(registry.reference(), replace=True, idempotency_key="k")))
        assert registry.count("manifests") == 1


async def test_a_job_that_is_cancelled_has_ended_when_that_is_answered(tmp_path: Path) -> None:
    """Readers of the job are told, it may be cancelled again, and the number of jobs is bounded meanwhile."""
    async with serving() as registry, working(tmp_path, MemoryStore()) as jobs:
        asked = silent(registry)
        all_jobs = [await jobs.ask(BeginPull(PullSpec(registry.reference()))) for _ in range(MAX_JOBS)]
        with pytest.raises(Overloaded):
            await jobs.ask(BeginPull(PullSpec(registry.reference())))
        await asked.wait()
        told: list[ImageJob] = []

        async def follow(job: ImageJob) -> None:
            told.append(await ended(jobs, job))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow, all_jobs[0])
            for job in all_jobs:  # those that run, and those that wait
                assert (await jobs.ask(CancelJob(job.id))).state is JobState.CANCELLED
        assert told[0].state is JobState.CANCELLED
        again = await jobs.ask(CancelJob(all_jobs[0].id))
        assert (again.state, again.has_ended) == (JobState.CANCELLED, True)
        await jobs.ask(BeginPull(PullSpec(registry.reference())))


async def test_a_job_that_is_cancelled_while_its_image_gets_the_name_is_done(tmp_path: Path) -> None:
    """The image is there, and the record says so."""
    publishing = trio.Event()

    class Slow(MemoryStore):
        async def publish_image(self, image: NewImage) -> None:
            publishing.set()
            await wait_all_tasks_blocked()
            await super().publish_image(image)

    store = Slow()
    async with serving() as registry, working(tmp_path, store) as jobs:
        digest = registry.push([TAR])
        job = await jobs.ask(BeginPull(PullSpec(registry.reference())))
        await publishing.wait()
        end = await jobs.ask(CancelJob(job.id))
        assert (end.state, end.digest, list(store.images)) == (JobState.DONE, digest, ["image"])
        assert (await jobs.ask(GetJob(job.id))).state is JobState.DONE


async def test_a_reader_is_answered_in_time_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """A job without news is answered as it was seen; so no question of a follower that pings, or left, stays."""
    async with serving() as registry, working(tmp_path, MemoryStore()) as jobs:
        asked = silent(registry)
        job = await jobs.ask(BeginPull(PullSpec(registry.reference())))
        await asked.wait()
        with trio.fail_after(patience()):
            seen, found = await jobs.ask(NextOfJob(job.id, 0, 60))
            assert await jobs.ask(NextOfJob(job.id, seen, 0.01)) == (seen, found)
        assert found.state is JobState.RUNNING


async def test_a_job_that_a_daemon_left_is_failed_for_the_next(tmp_path: Path) -> None:
    """As interrupted; others stay as they ended."""
    async with serving() as registry:
        silent(registry)
        async with working(tmp_path, MemoryStore()) as jobs:
            left = await jobs.ask(BeginPull(PullSpec(registry.reference())))
        async with working(tmp_path, MemoryStore()) as jobs:
            found = await jobs.ask(GetJob(left.id))
            assert found.state is JobState.FAILED
            assert found.error is not None
            assert found.error.code == "INTERRUPTED"
            assert found.ended_at is not None
        async with working(tmp_path, MemoryStore()) as jobs:
            assert await jobs.ask(GetJob(left.id)) == found


async def test_a_failure_is_told_by_code_and_a_bug_ends_no_other_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A store of layers may raise anything: the next job is served."""

    class Broken(MemoryStore):
        async def unpack_layer(self, blob_fd: int, diff_id: str) -> str:
            raise ZeroDivisionError("bug")

    async with serving() as registry, working(tmp_path, Broken()) as jobs:
        registry.push([TAR])
        with caplog.at_level(logging.CRITICAL, "sandkasten"):
            missing = await ended(jobs, await jobs.ask(BeginPull(PullSpec(registry.reference(":none")))))
            broken = await ended(jobs, await jobs.ask(BeginPull(PullSpec(registry.reference()))))
        assert missing.error is not None
        assert (missing.error.code, missing.error.details["status"]) == ("REGISTRY_REFUSED", 404)
        assert broken.error is not None
        assert (broken.error.code, "bug" in broken.error.message) == ("INTERNAL_ERROR", False)
        kept = await jobs.ask(GetJob(missing.id))
        assert kept.error == missing.error


async def test_a_password_is_in_no_record_and_no_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither that of a request nor that of the file: not in the database, its log, part files, or a line that is
    logged; it is sent, though."""
    file = tmp_path / "auth.json"
    async with serving() as registry:
        write_credentials(file, registry.name, Credentials("file", "file-secret"), owner=(os.getuid(), os.getgid()))
        registry.answer = lambda _: Said(401, headers={"www-authenticate": "Basic realm=x"})
        async with working(tmp_path, MemoryStore()) as jobs:
            with caplog.at_level(logging.DEBUG):
                for auth in (("me", "request-secret"), None):
                    job = await ended(jobs, await jobs.ask(BeginPull(PullSpec(registry.reference(), auth=auth))))
                    assert job.error is not None
                    assert job.error.code == "REGISTRY_UNAUTHORIZED"
        sent = {each.headers.get("authorization") for each in registry.asked}
    assert sent == {None, "Basic bWU6cmVxdWVzdC1zZWNyZXQ=", "Basic ZmlsZTpmaWxlLXNlY3JldA=="}
    kept = (
        b"".join(_contents(tmp_path, but=file)) + caplog.text.encode() + repr(PullSpec("x", auth=("a", "b-c"))).encode()
    )
    for secret in (b"request-secret", b"cmVxdWVzdC1zZWNyZXQ", b"file-secret", b"ZmlsZS1zZWNyZXQ", b"b-c"):
        assert secret not in kept
    assert registry.name.encode() in kept


def test_a_damaged_record_is_deleted_and_not_believed(tmp_path: Path) -> None:
    """One that this program did not write."""
    database = open_database(tmp_path / "db")
    job = ImageJob("a" * 24, JobKind.PULL, JobState.QUEUED, "x", "x", "linux/amd64", datetime.now(UTC))
    assert begin_job(database, job, None, replaces=False) is True
    assert get_job(database, job.id) == job
    database.execute("UPDATE image_jobs SET state = 'odd'")
    assert list_jobs(database, 10) == []
    assert get_job(database, job.id) is None
    assert {JobState.QUEUED, JobState.RUNNING} | ENDED_JOBS == set(JobState)
    database.close()


def _contents(directory: Path, *, but: Path) -> list[bytes]:
    return [path.read_bytes() for path in directory.rglob("*") if path.is_file() and path != but]
