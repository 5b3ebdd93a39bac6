"""The part of `protocol` about what belongs to no session. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StrayKind = Literal[
    "cgroup", "other_cgroup", "session_directory", "run_directory", "trash", "loop", "mount", "place_mount"
]
"""`cgroup`: among the sessions' and not one of a session. `other_cgroup`: a whole directory of sessions' cgroups that
an earlier daemon made elsewhere. `loop`: a loop device with a file of a session that is no more. `mount`: made by hand
below one of nsinit's places; `place_mount`: on such a place itself, which is never removed."""


@dataclass(frozen=True, slots=True)
class Stray:
    """Something that is nobody's. `name` tells it from others of its kind and is no path to go by."""

    kind: StrayKind
    name: str


@dataclass(frozen=True, slots=True)
class Survey:
    """List what belongs to no session and lies where only sessions' things should. Answer: `Surveyed`."""

    seq: int


@dataclass(frozen=True, slots=True)
class RemoveStray:
    """Remove what a `Survey` found, if it is found again. Answer: `Ok` or `Failed` (`EBUSY`: some of it is left)."""

    seq: int
    stray: Stray


@dataclass(frozen=True, slots=True)
class Surveyed:
    seq: int
    strays: tuple[Stray, ...]
