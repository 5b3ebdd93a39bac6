"""Values of the node: checks and protections (`doctor`, `/v1/system`), capacity (`/v1/node`), diagnosis.

Owns the names of the protections and which of them may be given up. A check is one trial or reading on the machine. A
protection is a guarantee to sessions, and rests on checks, configuration and nsinit's features. Frozen values, free of
HTTP; times are aware UTC datetimes. The checks are made by `host/examine.py`, the protections by `host/protections.py`.
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
    """Outcome of a check. NOT_TRIED: this process lacks the privilege to try."""

    WORKS = "works"
    FALLS_BACK = "falls_back"
    MISSING = "missing"
    NOT_TRIED = "not_tried"


class ProtectionState(enum.StrEnum):
    """State of a protection. OFF: by configuration; UNKNOWN: no process with the privilege has tried."""

    ON = "on"
    DEGRADED = "degraded"
    MISSING = "missing"
    OFF = "off"
    UNKNOWN = "unknown"


class Need(enum.StrEnum):
    """Need of a protection unless the configuration says otherwise.

    ESSENTIAL: no sandbox can be made without it, whatever is configured. PROMISED: the start is refused without it,
    unless the configuration allows it to be missing. OPTIONAL: used where available, and its lack is reported.
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
        "own_filters": Need.OPTIONAL,
    }
)
"""All protections, in the order in which they are shown."""


@attrs.frozen
class Check:
    """One check. `seen` is the observation in words; `fix` is a line to type or to set.

    `protection` names the protection that rests on the check, empty for checks that matter to the operator only.
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
        """Whether the failure of this check forbids making sandboxes."""
        return self.required and self.verdict in (Verdict.MISSING, Verdict.NOT_TRIED)


@attrs.frozen
class Machine:
    """All checks of one examination, and facts under the names the trials give them (`cgroup_mode`, `landlock_abi`)."""

    examined_at: datetime
    checks: Sequence[Check]
    facts: Mapping[str, Any] = attrs.field(factory=dict)  # JSON values

    @property
    def steers(self) -> bool:
        """Whether the kernel can steer connections of a session to us."""
        steering = self.check("sk_lookup")
        return steering is not None and steering.verdict is Verdict.WORKS

    @property
    def bridges(self) -> bool:
        """Whether nothing says that the kernel can't give a session a link of its own."""
        bridge = self.check("bridge")
        return bridge is None or bridge.verdict is Verdict.WORKS

    def check(self, check_id: str) -> Check | None:
        """Return one check, None if it was not made."""
        return next((each for each in self.checks if each.id == check_id), None)


@attrs.frozen
class Protection:
    """One protection and its state. `required`: the daemon does not start without it."""

    name: str
    state: ProtectionState
    detail: str
    required: bool = False
    fix: str = ""


@attrs.frozen
class System:
    """The installation: versions, features of the kernel, defaults and bounds in force, protections in force.

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
    """Amounts of the resources that sessions share; None: unknown. `cpu` is in cores."""

    sessions: int | None = None
    cpu: float | None = None
    memory_bytes: int | None = None
    pids: int | None = None
    disk_bytes: int | None = None


@attrs.frozen(kw_only=True)
class NodeCapacity:
    """Capacity of one node at one moment.

    `status` is `ready`, `not_ready` or `draining`. `budget` is the most that may be promised to sessions (None: not
    counted), `committed` the sum of the limits of live sessions, `used` their present use, `free` the amounts free,
    whatever uses the rest. `sessions` counts live ones by status; `pool_sandboxes` are made ahead; `queued` is the
    number of creates that wait for a builder.
    """

    status: str
    totals: Amounts
    committed: Amounts
    used: Amounts
    budget: Amounts = Amounts()
    free: Amounts = Amounts()
    images: Sequence[str] = ()
    sessions: Mapping[str, int] = attrs.field(factory=dict)
    pool_sandboxes: int = 0
    queued: int = 0


@attrs.frozen(kw_only=True)
class NodeInfo(NodeCapacity):
    """One node at one moment: its capacity and its identity."""

    id: str
    incarnation: int
    time: datetime
    started_at: datetime


@attrs.frozen(kw_only=True)
class PoolInfo:
    """One session pool at one moment. `state` is `ready`, `filling` (fewer members than wanted), `failing` (members
    could not be made, `error` says why) or `draining`. `wanted` lies between `size` and `max` and follows the claims.
    `ready` members may be `frozen`. The counters are those since the start of the daemon; `misses` by the reason that
    a create got no member."""

    image: str
    state: str
    size: int
    max: int
    wanted: int
    ready: int
    frozen: int
    claims: int
    misses: Mapping[str, int]
    refills: int
    refill_failures: int
    error: str | None = None


@attrs.frozen
class Readiness:
    """Whether the node can serve; each check maps to `ok` or a sentence."""

    ready: bool
    checks: Mapping[str, str]


@attrs.frozen
class MissingPart:
    """The reason why a part of a diagnosis could not be had, in its place."""

    reason: str


Part = Mapping[str, Any] | MissingPart
"""JSON values under names that say their units."""


@attrs.frozen
class Diagnosis:
    """A session at one moment, part by part. Holds no command, no output and no environment."""

    time: datetime
    session: Session
    parts: Mapping[str, Part]
