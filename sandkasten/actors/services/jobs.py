"""The jobs actor: owner of the work on images that goes on after its request, and of its records.

A job has a record before its first byte, and a task of this actor. Credentials of a request are in that task alone.
Readers ask for the next change of a job and are answered when there is one, so a reader that is slow costs nothing.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, assert_never

import attrs
import trio

from sandkasten.actors.core import Actor, Ask, Ref
from sandkasten.actors.services.store import do
from sandkasten.config import ConfigError, ImagesSettings
from sandkasten.crash import Crash
from sandkasten.errors import Conflict, JobNotFound, Overloaded, SandkastenError
from sandkasten.images.catalog import Catalog, check_name
from sandkasten.images.registry.blobs import Blobs
from sandkasten.images.registry.credentials import Credentials, read_credentials
from sandkasten.images.registry.documents import Platform
from sandkasten.images.registry.pulling import NewImage, Pull, PullTarget, PullTerms, PullTurns
from sandkasten.images.registry.reference import Reference, parse_reference
from sandkasten.images.registry.source import RegistrySource
from sandkasten.model.job import (
    INTERRUPTED,
    JOB_ID,
    MAX_JOBS,
    ImageJob,
    ImportSpec,
    JobError,
    JobKind,
    JobState,
    LayerProgress,
    PullSpec,
)
from sandkasten.store.jobs import BegunJob, begin_job, change_job, get_job, interrupt_jobs, list_jobs

if TYPE_CHECKING:
    from sandkasten.images.registry.client import Patience

log = logging.getLogger(__name__)

_SWEEP_S = 3600.0
_AT_ONCE = 4
_FAILED = JobError("INTERNAL_ERROR", "the daemon failed to do this; its log says why under the id of the job")


@attrs.frozen
class BeginPull(Ask[ImageJob]):
    """Begin a pull, or return the job that its idempotency key began. Raises `InvalidReference`, `InvalidRequest`,
    `InvalidImage`, `Conflict`, `Overloaded`."""

    spec: PullSpec


@attrs.frozen
class BeginImport(Ask[ImageJob]):
    """Begin to import the archive in a file, which the job closes if it is begun. Raises `InvalidRequest`,
    `InvalidImage`, `Overloaded`."""

    spec: ImportSpec
    file: IO[bytes]


@attrs.frozen
class GetJob(Ask[ImageJob]):
    """Return a job. Raises `JobNotFound`."""

    job_id: str


@attrs.frozen
class ListJobs(Ask[Sequence[ImageJob]]):
    """Return jobs, newest first."""

    limit: int


@attrs.frozen
class CancelJob(Ask[ImageJob]):
    """End a job, and return it as it ended; no effect on one that has ended. Raises `JobNotFound`."""

    job_id: str


@attrs.frozen
class NextOfJob(Ask[tuple[int, ImageJob]]):
    """Return a job with the number of its last change, once that is another than `seen`, or after `wait_s`. Raises
    `JobNotFound`. An asker that is cancelled leaves its question behind for as long."""

    job_id: str
    seen: int
    wait_s: float


Message = BeginPull | BeginImport | GetJob | ListJobs | CancelJob | NextOfJob


@attrs.define(eq=False)
class _Running:
    """A job that has not ended. `changes` counts what happened to it, and `news` is set by the next change."""

    job: ImageJob
    on_end: Callable[[], None] = lambda: None
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    changes: int = 1
    news: trio.Event = attrs.field(factory=trio.Event)
    ended: trio.Event = attrs.field(factory=trio.Event)

    def change(self, job: ImageJob) -> None:
        self.job = job
        self.changes += 1
        self.news.set()
        self.news = trio.Event()


_Work = Callable[[_Running], Awaitable[NewImage]]


def check_import(spec: ImportSpec) -> None:
    """Raise `InvalidImage` or `InvalidRequest` for an import that can't begin, before its bytes come."""
    _job(JobKind.IMPORT, "", spec.name, spec.platform)


def _job(kind: JobKind, reference: str, name: str, platform: str | None) -> ImageJob:
    """Return a new job. Raises `InvalidImage`, `InvalidRequest`."""
    check_name(name)
    return ImageJob(
        id=secrets.token_hex(12),
        kind=kind,
        state=JobState.QUEUED,
        reference=reference,
        name=name,
        platform=str(Platform.own() if platform is None else Platform.parse(platform)),
        created_at=datetime.now(UTC),
    )


class Jobs(Actor):
    """See the module's docstring."""

    def __init__(
        self,
        ref: Ref,
        *,
        store: Ref,
        layers: PullTarget,
        catalog: Catalog,
        blobs: Blobs,
        settings: ImagesSettings,
        credentials_file: Path,
        crash: Crash,
        turns: PullTurns,
        patience: Patience | None = None,
    ) -> None:
        super().__init__(ref)
        self._store, self._layers, self._blobs, self._settings = store, layers, blobs, settings
        self._catalog = catalog
        self._credentials_file, self._crash, self._patience = credentials_file, crash, patience
        self._running: dict[str, _Running] = {}
        self._turns, self._at_once = turns, trio.CapacityLimiter(_AT_ONCE)

    async def on_start(self) -> None:
        """Tell jobs of an earlier daemon as failed, and begin to sweep broken downloads."""
        count = await self._store.ask_again(do(interrupt_jobs, datetime.now(UTC)))
        if count:
            log.warning("jobs_interrupted", extra={"count": count})
        self._nursery.start_soon(self._sweep)

    async def handle(self, message: Message) -> Any:  # each message names its answer
        match message:
            case BeginPull(spec):
                return await self._begin_pull(spec)
            case BeginImport(spec, file):
                return await self._begin_import(spec, file)
            case GetJob(job_id):
                return self.defer(self._get, job_id)
            case ListJobs(limit):
                return self.defer(self._list, limit)
            case CancelJob(job_id):
                return self.defer(self._cancel, job_id)
            case NextOfJob(job_id, seen, wait_s):
                return self.defer(self._next, job_id, seen, wait_s)
            case _:
                assert_never(message)

    async def on_stop(self) -> None:
        for each in self._running.values():
            each.ended.set()

    async def _begin_pull(self, spec: PullSpec) -> ImageJob:
        reference = parse_reference(spec.reference)
        self._catalog.require_changeable()
        running = (each.job for each in self._running.values() if each.job.kind is JobKind.PULL)
        under_way = {each.name: parse_reference(each.reference) for each in running}
        choose = partial(self._catalog.name_for, reference, spec.name, under_way=under_way)
        name = await trio.to_thread.run_sync(choose)
        job = _job(JobKind.PULL, str(reference), name, spec.platform)
        auth = None if spec.auth is None else Credentials(*spec.auth)
        work = partial(self._pull, reference=reference, auth=auth, replace=spec.replace)
        return await self._begin(job, work, spec.idempotency_key, replaces=spec.replace, is_named=spec.name is not None)

    async def _begin_import(self, spec: ImportSpec, file: IO[bytes]) -> ImageJob:
        self._catalog.require_changeable()
        job = _job(JobKind.IMPORT, spec.ref or "", spec.name, spec.platform)
        work = partial(self._import, spec=spec, file=file)
        return await self._begin(job, work, None, replaces=spec.replace, on_end=file.close)

    async def _begin(
        self,
        job: ImageJob,
        work: _Work,
        key: str | None,
        *,
        replaces: bool,
        is_named: bool = True,
        on_end: Callable[[], None] = lambda: None,
    ) -> ImageJob:
        begun = await self._store.ask_again(do(begin_job, job, key, replaces=replaces))
        if begun is False:
            raise Overloaded(f"{MAX_JOBS} jobs wait or run already")
        if isinstance(begun, BegunJob):
            return self._same(begun, job, replaces=replaces, is_named=is_named)
        running = self._running[job.id] = _Running(job, on_end)
        self._nursery.start_soon(self._run, running, work)
        return job

    def _same(self, begun: BegunJob, job: ImageJob, *, replaces: bool, is_named: bool) -> ImageJob:
        """Return the job that an idempotency key began, if it was begun by the same request. A name that was not asked
        for may be another by now."""
        asked = attrs.evolve(job, name=job.name if is_named else begun.job.name)
        pair = ((each.kind, each.reference, each.name, each.platform) for each in (asked, begun.job))
        if len(set(pair)) > 1 or replaces != begun.replaces:
            raise Conflict("the idempotency key was used with another request")
        running = self._running.get(begun.job.id)
        return begun.job if running is None else running.job

    async def _run(self, running: _Running, work: _Work) -> None:
        """Do a job to its end, whatever that is. The end of this actor leaves the record as it is: interrupted."""
        end: dict[str, Any] = {"state": JobState.CANCELLED}  # fields of ImageJob
        try:
            with running.scope:
                async with self._at_once:
                    await self._note(running, state=JobState.RUNNING)
                    end = await self._outcome(running, work)
            await self._note(running, **end, ended_at=datetime.now(UTC))
        finally:
            with trio.CancelScope(shield=True):  # blocks of a large file take their time to be freed
                await trio.to_thread.run_sync(running.on_end)
            self._running.pop(running.job.id, None)
            running.ended.set()

    async def _outcome(self, running: _Running, work: _Work) -> dict[str, Any]:
        """Return the fields of the job's end, unless it is cancelled."""
        job_id = running.job.id
        try:
            image = await work(running)
            return {"state": JobState.DONE, "digest": image.digest or None}
        except SandkastenError as error:
            found = JobError(error.code, error.message, error.details)
        except ConfigError as error:
            found = JobError(SandkastenError.code, str(error))
        except Exception as error:  # what a registry sent may have met a bug: other jobs go on
            log.error("job_failed_unexpectedly", extra={"job": job_id}, exc_info=error)
            found = _FAILED
        log.warning("job_failed", extra={"job": job_id, "code": found.code, "error": found.message})
        return {"state": JobState.FAILED, "error": found}

    async def _note(self, running: _Running, **fields: Any) -> None:  # of ImageJob
        """Change a job's record, and then the job: whoever is told of an end finds it recorded."""
        try:
            await self._store.ask_again(do(change_job, attrs.evolve(running.job, **fields)))
        except SandkastenError as error:  # the next start says that it was interrupted
            log.error("job_not_written", extra={"job": running.job.id, "error": str(error)})
        running.change(attrs.evolve(running.job, **fields))

    async def _pull(
        self, running: _Running, reference: Reference, auth: Credentials | None, *, replace: bool
    ) -> NewImage:
        from sandkasten.images.registry.client import RegistryClient

        if not replace:
            await trio.to_thread.run_sync(self._catalog.require_free, running.job.name)

        def credentials_of(registry: str) -> Credentials | None:
            if auth is not None and registry == reference.registry:
                return auth
            return read_credentials(self._credentials_file, registry)

        client = RegistryClient(
            reference.registry, self._settings, credentials_of=credentials_of, patience=self._patience
        )
        try:
            return await Pull(RegistrySource(reference, client, self._blobs), self._terms(running, replace)).run()
        finally:
            await client.aclose()

    async def _import(self, running: _Running, spec: ImportSpec, file: IO[bytes]) -> NewImage:
        from sandkasten.images.archive_source import ArchiveImport

        title = f"archive {spec.ref}" if spec.ref else "archive"
        terms = self._terms(running, spec.replace)
        return await ArchiveImport(file.fileno(), title, spec.ref, self._blobs, terms).run()

    def _terms(self, running: _Running, replace: bool) -> PullTerms:
        def on_progress(progress: Sequence[LayerProgress]) -> None:
            running.change(attrs.evolve(running.job, progress=tuple(progress)))

        return PullTerms(
            name=running.job.name,
            platform=Platform.parse(running.job.platform),
            store=self._layers,
            settings=self._settings,
            replace=replace,
            turns=self._turns,
            on_progress=on_progress,
            crash=self._crash,
        )

    # Readers ----------------------------------------------------------------------------------------------------

    async def _get(self, job_id: str) -> ImageJob:
        if (running := self._running.get(job_id)) is not None:
            return running.job
        found = await self._store.ask_again(do(get_job, job_id)) if JOB_ID.match(job_id) else None
        if found is None:
            raise JobNotFound("there is no such job", job_id=job_id[:64])
        return self._present(found)

    async def _list(self, limit: int) -> Sequence[ImageJob]:
        return [self._present(job) for job in await self._store.ask_again(do(list_jobs, limit))]

    def _present(self, job: ImageJob) -> ImageJob:
        """Return a job of a record as it is now: one whose end could not be written was interrupted."""
        if (running := self._running.get(job.id)) is not None:
            return running.job
        return job if job.has_ended else attrs.evolve(job, state=JobState.FAILED, error=INTERRUPTED)

    async def _cancel(self, job_id: str) -> ImageJob:
        if (running := self._running.get(job_id)) is None:
            return await self._get(job_id)
        running.scope.cancel()
        await running.ended.wait()
        return running.job

    async def _next(self, job_id: str, seen: int, wait_s: float) -> tuple[int, ImageJob]:
        if (running := self._running.get(job_id)) is None:
            return 0, await self._get(job_id)
        if running.changes == seen and not running.job.has_ended:
            with trio.move_on_after(wait_s):
                await running.news.wait()
        return running.changes, running.job

    async def _sweep(self) -> None:
        while True:
            try:
                await trio.to_thread.run_sync(self._blobs.sweep, self._settings.part_keep_hours * 3600)
            except OSError as error:
                log.warning("blobs_not_swept", extra={"error": str(error)})
            await trio.sleep(_SWEEP_S)
