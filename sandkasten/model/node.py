"""What a machine can do and what is in force on it: the values behind `doctor`, `/v1/system` and `/v1/node`.

Owns the names of the protections and which of them may be given up. A check is something that was performed; a
protection is what a session gets, and rests on checks, configuration and what nsinit said. Frozen values, free of HTTP;
times are aware UTC datetimes. Performs nothing (`host/examine.py`) and decides nothing (`host/protections.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any

import attrs

from sandkasten.model.session import Session


class Verdict(enum.StrEnum):
    """What came of performing something. NOT_TRIED: whoever asked may not even try."""

    WORKS = "works"
    FALLS_BACK = "falls_back"
    MISSING = "missing"
    NOT_TRIED = "not_tried"


class State(enum.StrEnum):
    """What is in force. OFF: by configuration; UNKNOWN: nobody who may try has tried."""

    ON = "on"
    DEGRADED = "degraded"
    MISSING = "missing"
    OFF = "off"
    UNKNOWN = "unknown"


class Need(enum.StrEnum):
    """How a protection is needed if the configuration says nothing.

    ESSENTIAL: no sandbox can be made without it, whatever is configured. PROMISED: the start is refused without it,
    unless it is allowed to be missing. OPTIONAL: used where it is there, and its lack is reported.
    """

    ESSENTIAL = "essential"
    PROMISED = "promised"
    OPTIONAL = "optional"


PROTECTIONS: Mapping[str, Need] = MappingProxyType(
    {
        "privilege": Need.ESSENTIAL,
        "namespaces": Need.ESSENTIAL,
        "user_ids": Need.ESSENTIAL,
        "filesystem": Need.ESSENTIAL,
        "limits": Need.ESSENTIAL,
        "network": Need.ESSENTIAL,
        "capabilities": Need.ESSENTIAL,
        "swap": Need.PROMISED,
        "seccomp": Need.PROMISED,
        "landlock": Need.OPTIONAL,
        "disk": Need.OPTIONAL,
        "daemon_privilege": Need.OPTIONAL,
    }
)
"""Every protection there is, in the order in which they are shown."""


@attrs.frozen
class Check:
    """One thing that was performed. `seen` says what was done and what came of it; `fix` is what to type or to set.

    `protection` names the protection that rests on it, none for what only matters to the operator.
    """

    id: str
    title: str
    verdict: Verdict
    seen: str
    protection: str = ""
    required: bool = False
    consequence: str = ""
    fix: str = ""

    @property
    def is_fatal(self) -> bool:
        """Whether no sandbox may be made because of it."""
        return self.required and self.verdict in (Verdict.MISSING, Verdict.NOT_TRIED)


@attrs.frozen
class Machine:
    """All checks of one examination, and facts with the names the checks give them (`cgroup_mode`, `landlock_abi`)."""

    examined_at: datetime
    checks: Sequence[Check]
    facts: Mapping[str, Any] = attrs.field(factory=dict)  # JSON values

    def check(self, check_id: str) -> Check | None:
        """Return one check, None if it was not made."""
        return next((each for each in self.checks if each.id == check_id), None)


@attrs.frozen
class Protection:
    """One protection as it is in force. `required`: the daemon does not start without it."""

    name: str
    state: State
    detail: str
    required: bool = False
    fix: str = ""


@attrs.frozen
class System:
    """This installation: versions, what the kernel gives, defaults and bounds in force, protections in force.

    `defaults` and `limits` map names of the HTTP API to values; a limit with two ends is `{"min", "max"}`.
    """

    version: str
    python: str
    kernel: str
    architecture: str
    cgroup_mode: str
    features: Mapping[str, Any]
    defaults: Mapping[str, Any]
    limits: Mapping[str, Any]
    protections: Sequence[Protection]
    machine: Machine


@attrs.frozen
class Amounts:
    """Amounts of what sessions share; None: unknown. `cpu` is in cores."""

    sessions: int | None = None
    cpu: float | None = None
    memory_bytes: int | None = None
    pids: int | None = None
    disk_bytes: int | None = None


@attrs.frozen(kw_only=True)
class NodeCapacity:
    """What one node can take at one moment.

    `status` is `ready`, `not_ready` or `draining`. `budget` is how much may be promised to sessions (None: not
    counted), `committed` sums what live ones may use, `used` what they do use, `free` is what is left, whoever has the
    rest. `sessions` counts live ones by status; `vessels` are sandboxes made ahead; `queued` is how many creates wait
    for their turn to be built.
    """

    status: str
    totals: Amounts
    committed: Amounts
    used: Amounts
    budget: Amounts = Amounts()
    free: Amounts = Amounts()
    images: Sequence[str] = ()
    sessions: Mapping[str, int] = attrs.field(factory=dict)
    vessels: int = 0
    queued: int = 0


@attrs.frozen(kw_only=True)
class NodeInfo(NodeCapacity):
    """One node at one moment: its capacity, and which it is."""

    id: str
    incarnation: int
    time: datetime
    started_at: datetime


@attrs.frozen
class Readiness:
    """Whether the node can serve; each check maps to `ok` or a sentence."""

    ready: bool
    checks: Mapping[str, str]


@attrs.frozen
class Unavailable:
    """In place of a part that could not be had, and why."""

    reason: str


Part = Mapping[str, Any] | Unavailable
"""JSON values under names that say their units."""


@attrs.frozen
class Diagnosis:
    """A session as it was at one moment, part by part. Holds no command, no output and no environment."""

    time: datetime
    session: Session
    parts: Mapping[str, Part]
