"""Jobs: work on images that goes on after its request. A password of a request is in no answer and no log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NewType

import attrs
import trio

from sandkasten.api.http.errors import Answer, json_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.json import Body, to_plain
from sandkasten.api.http.sse import PING, SSE_HEADERS, error_event, event
from sandkasten.api.resources.fields import ListLimit, Matching, Text, Token, add_kinds, read_head, read_query
from sandkasten.api.resources.fields import read_request as read_body
from sandkasten.api.resources.file_archives import check_type
from sandkasten.api.resources.file_contents import ANY_SIZE
from sandkasten.errors import SandkastenError
from sandkasten.model import IMAGE_NAME
from sandkasten.model.job import ImageJob, ImportSpec, JobKind, JobState, LayerPhase, PullSpec

ImageName = NewType("ImageName", str)
add_kinds({ImageName: Matching(IMAGE_NAME, "must be 1 to 64 of a-z, A-Z, 0-9, '.', '_', '-', no sign first")})

_USUAL_LIMIT = ListLimit(100)
_PAUSE_S = 0.25
"""Shortest time between two events of one stream."""


@attrs.frozen
class AuthRequest:
    """A user's name and password for a registry, or a token in the place of one."""

    username: Text
    password: Text = attrs.field(repr=False)


@attrs.frozen
class PullRequest:
    """A pull. Without `name` the last part of the reference is the image's."""

    reference: Text
    name: ImageName | None = None
    platform: Text | None = None
    replace: bool = False
    auth: AuthRequest | None = None

    def to_spec(self, key: str | None) -> PullSpec:
        """Return the model's spec."""
        auth = None if self.auth is None else (self.auth.username, self.auth.password)
        return PullSpec(self.reference, self.name, self.platform, self.replace, auth, key)


@attrs.frozen
class PullHead:
    """The idempotency key of a pull."""

    idempotency_key: Token | None = None


@attrs.frozen
class ImageImportQuery:
    """The query of an import. `ref`: the image's name in an archive of several."""

    name: ImageName
    ref: Text | None = None
    platform: Text | None = None
    replace: bool = False


@attrs.frozen
class JobsQuery:
    """The query of a list of jobs."""

    limit: ListLimit = _USUAL_LIMIT


@attrs.frozen(kw_only=True)
class LayerProgressBody(Body):
    """Progress of a layer, in bytes of its blob."""

    layer: str
    done_bytes: int
    total_bytes: int
    phase: LayerPhase


@attrs.frozen(kw_only=True)
class JobErrorBody(Body):
    """Why a job failed, as an error of a request would say it."""

    error_code: str
    message: str
    details: Mapping[str, Any] | None = None  # JSON values


@attrs.frozen(kw_only=True)
class JobBody(Body):
    """A job. `progress` is empty once the job is only in the records."""

    id: str
    kind: JobKind
    state: JobState
    reference: str
    name: str
    platform: str
    created_at: datetime
    ended_at: datetime | None
    digest: str | None
    error: JobErrorBody | None
    progress: Sequence[LayerProgressBody]

    @classmethod
    def of(cls, job: ImageJob) -> JobBody:
        """Return the body of a job."""
        error = job.error
        details = None if error is None else dict(error.details) or None
        said = None if error is None else JobErrorBody(error_code=error.code, message=error.message, details=details)
        return cls.take(job, error=said, progress=[LayerProgressBody.take(each) for each in job.progress])


@attrs.frozen(kw_only=True)
class JobsBody(Body):
    """Jobs, newest first."""

    jobs: Sequence[JobBody]


@attrs.frozen(kw_only=True)
class BegunBody(Body):
    """The id of a job that was begun."""

    job_id: str


JOB_EVENTS: Mapping[str, object] = {"job": JobBody}


async def pull(exchange: Exchange) -> Answer:
    """Begin to pull an image."""
    request = await read_body(exchange, PullRequest)
    job = await exchange.supervisor.pull_image(request.to_spec(read_head(exchange, PullHead).idempotency_key))
    return json_answer(BegunBody(job_id=job.id), status=202)


async def import_image(exchange: Exchange) -> Answer:
    """Take an archive, and begin to import it: of `docker save`, of an OCI layout, or of a root file system."""
    check_type(exchange)
    query = read_query(exchange, ImageImportQuery)
    spec = ImportSpec(query.name, query.ref, query.platform, query.replace)
    job = await exchange.supervisor.import_image(spec, partial(exchange.read_chunk, limit_bytes=ANY_SIZE))
    return json_answer(BegunBody(job_id=job.id), status=202)


async def list_jobs(exchange: Exchange) -> Answer:
    """List jobs, newest first."""
    found = await exchange.supervisor.jobs(limit=read_query(exchange, JobsQuery).limit)
    return json_answer(JobsBody(jobs=[JobBody.of(job) for job in found]))


async def get(exchange: Exchange) -> Answer:
    """Read a job."""
    return json_answer(JobBody.of(await exchange.supervisor.job(exchange.params["job_id"])))


async def cancel(exchange: Exchange) -> Answer:
    """Cancel a job, and read it as it ended."""
    return json_answer(JobBody.of(await exchange.supervisor.cancel_job(exchange.params["job_id"])))


async def follow(exchange: Exchange) -> None:
    """Follow a job as server-sent events, at most four a second, up to its end."""
    await exchange.until_disconnect(lambda: _follow(exchange))


async def _follow(exchange: Exchange) -> None:
    job_id = exchange.params["job_id"]
    seen, job = await exchange.supervisor.next_of_job(job_id, 0, 0)
    await exchange.start(200, SSE_HEADERS)
    if exchange.method == "HEAD":
        await exchange.finish()
        return
    try:
        while True:
            await exchange.write(event("job", to_plain(JobBody.of(job))))
            if job.has_ended:
                break
            await trio.sleep(_PAUSE_S)
            seen, job = await _next(exchange, job_id, seen)
    except SandkastenError as error:
        await exchange.write(error_event(error))
    await exchange.finish()


async def _next(exchange: Exchange, job_id: str, seen: int) -> tuple[int, ImageJob]:
    while True:
        now, job = await exchange.supervisor.next_of_job(job_id, seen, exchange.settings.ping_interval_s)
        if now != seen or job.has_ended:
            return now, job
        await exchange.write(PING)
