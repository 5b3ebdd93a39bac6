"""Values of jobs: work on images that goes on after its request, such as a pull. Frozen, no I/O."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import attrs

JOB_ID = re.compile(r"[0-9a-f]{24}\Z")
MAX_JOBS = 16
"""Jobs that wait or run at a time."""

KEPT_JOBS = 200
"""Ended jobs that are kept, the newest."""


class JobKind(enum.StrEnum):
    """Kinds of work."""

    PULL = "pull"
    IMPORT = "import"


class JobState(enum.StrEnum):
    """Where a job is. The last three are ends."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED_JOBS = frozenset({JobState.DONE, JobState.FAILED, JobState.CANCELLED})


class LayerPhase(enum.StrEnum):
    """Where a layer of a pull is. `present`: the store had it before."""

    WAITING = "waiting"
    DOWNLOADING = "downloading"
    UNPACKING = "unpacking"
    DONE = "done"
    PRESENT = "present"


@attrs.frozen
class LayerProgress:
    """Progress of a layer: bytes of its blob, as the registry or the archive has it."""

    layer: str
    done_bytes: int
    total_bytes: int
    phase: LayerPhase


@attrs.frozen
class JobError:
    """Why a job failed: code, message and details, as of an error of the interface."""

    code: str
    message: str
    details: Mapping[str, Any] = attrs.field(factory=dict)  # JSON values


INTERRUPTED = JobError("INTERRUPTED", "the daemon ended while the job ran; the same request goes on where it was")


@attrs.frozen
class ImageJob:
    """A job. `reference` is what was asked for, empty for all of an archive; `digest` is the image's manifest's, None
    where there is no manifest; `progress` is in memory alone, and empty after a restart."""

    id: str
    kind: JobKind
    state: JobState
    reference: str
    name: str
    platform: str
    created_at: datetime
    ended_at: datetime | None = None
    digest: str | None = None
    error: JobError | None = None
    progress: Sequence[LayerProgress] = ()

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED_JOBS


@attrs.frozen
class PullSpec:
    """A pull that is asked for. `name` None: the last part of the reference; `platform` None: this machine's. `auth`,
    a user's name and password for the registry, is kept in memory alone, until the job ends."""

    reference: str
    name: str | None = None
    platform: str | None = None
    replace: bool = False
    auth: tuple[str, str] | None = attrs.field(default=None, repr=False, eq=False)
    idempotency_key: str | None = None


@attrs.frozen
class ImportSpec:
    """An import that is asked for. `ref`: the image's name in an archive of several; `platform` None: this
    machine's."""

    name: str
    ref: str | None = None
    platform: str | None = None
    replace: bool = False
