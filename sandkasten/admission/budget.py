"""The node's budget: the one place that decides whether one more session, or a larger one, fits.

Each resource has two bounds. The sum of all limits may be a configured multiple of the node's total, since a limit is a
ceiling and not a reservation. And a reserve of the resource must be free at the moment, whatever uses the rest: a
machine that is out of memory is slow for everybody before it kills. Sessions that run already are never refused, only
counted (`hold`). Every check is one step without waiting, so that two creates never get the same remainder. Owns no
session.

`check` keeps a reserve of the data directory's disk free. Sessions' disks may promise more than there is, and where
a session's disk is an image file, a full host disk is an input/output error inside.

Sources: statvfs(3) (`f_bavail`, `f_favail`: free to processes other than root's).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import attrs

from sandkasten.admission.keys import KeyRing
from sandkasten.admission.quotas import KeyShares
from sandkasten.config import MIB, AdmissionSettings, Config, DiskSettings
from sandkasten.counters import node
from sandkasten.errors import Capacity, DiskReserve, InvalidRequest
from sandkasten.model import Limits
from sandkasten.model.node import Amounts

FIRST_MB = 16
"""Memory that a session admitted a moment ago is going to take, and that the kernel does not show yet."""

IDLE_MB, IDLE_PIDS = 8, 4
"""Memory and processes of a session that rests, the daemon's and the kernel's part included (`bench.thousand`: 6 MiB,
and 2 processes)."""

_MEMORY_RATIO, _PIDS_RATIO = 8.0, 10.0
_NOTHING = Limits(cpu=0.0, memory_mb=0, pids=0, disk_mb=0, disk_inodes=0)
_USUAL = Limits()

MAX_SESSIONS = "server.max_sessions"
FIXES = {
    MAX_SESSIONS: "raise server.max_sessions",
    "RLIMIT_NOFILE": "raise the daemon's limit of open files (LimitNOFILE= of its unit, or `ulimit -n`)",
    "kernel.pty.max": "raise kernel.pty.max",
    "memory": "add memory, or end sessions and other programs",
    "kernel.pid_max": "raise kernel.pid_max, kernel.threads-max, or pids.max of the cgroup above",
    "admission.memory_overcommit": "raise admission.memory_overcommit, or set lower memory limits",
    "admission.pids_overcommit": "raise admission.pids_overcommit, or set lower limits of processes",
    "admission.cpu_overcommit": "raise admission.cpu_overcommit, or set lower limits of cores",
    "admission.disk_overcommit": "raise admission.disk_overcommit, or set lower limits of disks",
}
"""The way to lift each limit, by the limit's name."""
FIXES |= {name: f"raise {name}" for name in node.NAMESPACES}
_RATIOS = {
    "cpu": "admission.cpu_overcommit",
    "memory_bytes": "admission.memory_overcommit",
    "pids": "admission.pids_overcommit",
    "disk_bytes": "admission.disk_overcommit",
}
_REAL = {"admission.memory_overcommit": "memory", "admission.pids_overcommit": "kernel.pid_max"}

_FIELDS = {"cpu": "cpu", "memory_bytes": "memory_mb", "pids": "pids", "disk_bytes": "disk_mb"}
_MAX_RETRY_S = 30
_LOOK_AGAIN_S = 5.0
_FEEL_AGAIN_S = 0.05
_FIND_AGAIN_S = 1.0
"""The next end of a lease is told in whole seconds, and takes 10 ms to find among a thousand busy sessions."""
_FDS_KEPT_FREE = 64
"""Descriptors that stay free for requests while no further session is admitted."""


class Budget:
    """The limits of live sessions, and their sums. Keys are session ids, or a stand-in before a session has its id."""

    def __init__(
        self,
        settings: AdmissionSettings,
        max_sessions: int,
        resources: Resources,
        shares: KeyShares | None = None,
        *,
        usual: Limits = _USUAL,
        bound: str = MAX_SESSIONS,
    ) -> None:
        """`usual`: the default limits; `bound`: the name of the limit behind `max_sessions`."""
        self._settings, self._resources, self._usual, self._bound = settings, resources, usual, bound
        self._shares = shares or KeyShares(KeyRing())
        self._held: dict[Hashable, Limits] = {}
        self._sums = dict.fromkeys(_FIELDS, 0.0)
        self.max_sessions = max_sessions

    @property
    def committed(self) -> Amounts:
        """The sum of the limits of live sessions."""
        cpu, memory, pids, disk = self._sums.values()
        return Amounts(
            sessions=len(self._held),
            cpu=round(cpu, 3),
            memory_bytes=int(memory),
            pids=int(pids),
            disk_bytes=int(disk),
        )

    def admit(self, key: Hashable, limits: Limits, *, under_way: int = 0, owner: str | None = None) -> None:
        """Count one more session in.

        `under_way`: the number of other sessions that were admitted and do not run yet. `owner`: the API key of the
        request.

        Raises:
            Capacity: the session does not fit now; `details` say why.
            InvalidRequest: the session would not fit on an empty node.
            QuotaExceeded: the owner has used up a quota.
        """
        self._shares.check_create(owner, limits)
        count, most = len(self._held), self.max_sessions
        if count >= most:
            message = "this node has all the sessions it may have"
            figures = {"requested": 1, "committed": count, "total": most, "max_sessions": most}
            raise self._full("sessions", message, **figures, bound=self._bound, fix=FIXES[self._bound])
        totals = self._resources.totals()
        self._check_promises(totals, limits, _NOTHING)
        self._check_free(totals, under_way)
        self._shares.take_create(owner)
        self.hold(key, limits, owner=owner)

    def hold(self, key: Hashable, limits: Limits, *, owner: str | None = None) -> None:
        """Count a session that exists, whether it fits or not. `owner`: None if already known."""
        owner = owner or self._shares.owner_of(key)
        self.release(key)
        self._shares.hold(key, owner, limits)
        self._held[key] = limits
        self._add(limits, 1)

    def take_over(self, key: Hashable, owner: str | None) -> None:
        """Count a session that had no owner as one of an API key. Raises `QuotaExceeded`."""
        limits = self._held[key]
        self._shares.check_create(owner, limits)
        self._shares.take_create(owner)
        self.hold(key, limits, owner=owner)

    def change(self, key: Hashable, limits: Limits) -> None:
        """Count new limits of a session; only those that grow are checked. Raises as `admit`."""
        self._shares.check_change(key, limits)
        self._check_promises(self._resources.totals(), limits, self._held.get(key, limits))
        self.hold(key, limits)

    def release(self, key: Hashable) -> None:
        """Forget a session."""
        self._shares.release(key)
        limits = self._held.pop(key, None)
        if limits is not None:
            self._add(limits, -1)

    def would_fit(self, refusal: Capacity, released: Iterable[Hashable]) -> bool:
        """Whether a refused create would fit without these sessions, as far as limits tell: how much memory and how
        many process ids their end frees is known only afterwards."""
        refused = refusal.details
        if "committed" not in refused:
            return True
        freed = node.committed([self._held[key] for key in released if key in self._held])
        left = refused["committed"] - getattr(freed, refused["resource"])
        return bool(left + refused["requested"] <= refused["total"])

    def _add(self, limits: Limits, sign: int) -> None:
        amounts = node.committed([limits])
        for name in _FIELDS:
            self._sums[name] += sign * getattr(amounts, name)

    def _check_promises(self, totals: Amounts, wanted: Limits, before: Limits) -> None:
        most = promisable(self._settings, totals, self.max_sessions, self._usual)
        committed, after, had = self.committed, node.committed([wanted]), node.committed([before])
        for name, field in _FIELDS.items():
            bound, now, new, old = (getattr(each, name) for each in (most, committed, after, had))
            if bound is None or new <= old:
                continue
            if new > bound:
                largest = bound if name == field else bound // MIB
                raise InvalidRequest("this node can't promise so much", limits=f"{field} can be at most {largest}")
            if now - old + new > bound:
                message = "live sessions take all that this node may promise"
                figures = {"requested": new - old, "committed": now, "total": bound}
                raise self._full(name, message, **figures, **_cause(self._settings, name))

    def _check_free(self, totals: Amounts, under_way: int) -> None:
        """Refuse while too little is free, counting admitted sessions that have not taken their part yet."""
        settings, reserve = self._settings, _FDS_KEPT_FREE
        descriptors = self._resources.free_descriptors()
        if descriptors is not None and descriptors - (under_way + 1) * node.FIRST_FDS < reserve:
            message = "this node has too few free descriptors"
            bound, figures = "RLIMIT_NOFILE", {"free": descriptors, "reserve": reserve}
            raise self._full("descriptors", message, **figures, bound=bound, fix=FIXES[bound])
        if not settings.reserve_percent and not settings.reserve_memory_mb:
            return
        free = self._resources.free()
        if free.memory_bytes is not None and totals.memory_bytes is not None:
            reserve = _memory_reserve(settings, totals.memory_bytes)
            if free.memory_bytes - (under_way + 1) * FIRST_MB * MIB < reserve:
                message = "this node has too little free memory"
                figures = {"free": free.memory_bytes, "reserve": reserve}
                raise self._full("memory_bytes", message, **figures, bound="memory", fix=FIXES["memory"])
        if free.pids is not None and totals.pids is not None:
            reserve = int(totals.pids * settings.reserve_percent / 100)
            if free.pids < reserve:
                message = "this node has too few free process ids"
                figures = {"free": free.pids, "reserve": reserve}
                raise self._full("pids", message, **figures, bound="kernel.pid_max", fix=FIXES["kernel.pid_max"])

    def _full(self, resource: str, message: str, **details: float | str) -> Capacity:
        return Capacity(message, retry_after_s=self._retry_after_s(), resource=resource, **details)

    def _retry_after_s(self) -> int:
        """Return the seconds until the next lease ends, at most half a minute; sessions may well end before."""
        end = self._resources.next_end()
        if end is None:
            return 1
        return max(1, min(math.ceil((end - datetime.now(UTC)).total_seconds()), _MAX_RETRY_S))


def promisable(settings: AdmissionSettings, totals: Amounts, most: int, usual: Limits) -> Amounts:
    """Return the budget of a node with these totals, at most so many sessions, and these default limits; None: not
    counted.

    A ratio that is not set is a fixed one, or as much more as the sessions need that the node has room for while they
    rest. Limits are ceilings: whether that much is there when it is used is not their matter but that of the reserve.
    """
    room = _room_at_rest(settings, totals)
    memory, pids = (min(room.get(name, most), most) for name in ("memory", "kernel.pid_max"))
    return Amounts(
        sessions=totals.sessions,
        cpu=_times(totals.cpu, settings.cpu_overcommit),
        memory_bytes=_whole(
            _promised(totals.memory_bytes, settings.memory_overcommit, _MEMORY_RATIO, memory * usual.memory_mb * MIB)
        ),
        pids=_whole(_promised(totals.pids, settings.pids_overcommit, _PIDS_RATIO, pids * usual.pids)),
        disk_bytes=_whole(_times(totals.disk_bytes, settings.disk_overcommit)),
    )


def _promised(total: float | None, ratio: float | None, usual_ratio: float, least: int) -> float | None:
    if ratio is not None:
        return _times(total, ratio)
    return None if total is None else max(total * usual_ratio, least)


def _room_at_rest(settings: AdmissionSettings, totals: Amounts) -> Mapping[str, int]:
    """Return the number of resting sessions that the node has memory and process ids for, besides the reserve."""
    kept = settings.reserve_percent / 100
    room = {}
    if totals.memory_bytes is not None:
        room["memory"] = (totals.memory_bytes - _memory_reserve(settings, totals.memory_bytes)) // (IDLE_MB * MIB)
    if totals.pids is not None:
        room["kernel.pid_max"] = int(totals.pids * (1 - kept)) // IDLE_PIDS
    return room


def _memory_reserve(settings: AdmissionSettings, total_bytes: int) -> int:
    """Return the bytes that must be free for a create."""
    share = int(total_bytes * settings.reserve_percent / 100)
    return min(max(share, settings.reserve_memory_mb * MIB), total_bytes // 2)


# The number of sessions


@attrs.frozen
class SessionRoom:
    """The number of sessions with default limits that the node admits, the name of the limit that bounds it, and the
    way to lift that limit."""

    sessions: int
    bound: str

    @property
    def fix(self) -> str:
        return FIXES[self.bound]


def find_room(config: Config, totals: Amounts, *, descriptors: int | None = None) -> SessionRoom:
    """Return the room of a node with these totals. `descriptors`: as in `node.session_bounds`."""
    bounds = dict(node.session_bounds(config.server.max_sessions, descriptors=descriptors))
    most = min(bounds.values())
    limits = config.defaults.limits
    budget, one = promisable(config.admission, totals, most, limits), node.committed([limits])
    for name in _RATIOS:
        promised, each = getattr(budget, name), getattr(one, name)
        if promised is not None and each:
            bounds[_cause(config.admission, name)["bound"]] = int(promised / each)
    for name, count in _room_at_rest(config.admission, totals).items():
        bounds[name] = min(count, bounds.get(name, count))
    bound = min(bounds, key=lambda name: bounds[name])
    return SessionRoom(bounds[bound], bound)


def _cause(settings: AdmissionSettings, resource: str) -> dict[str, str]:
    """Return the limit behind a full budget, and its fix: the ratio, if one is set, else the resource itself."""
    ratio = _RATIOS[resource]
    bound = _REAL[ratio] if getattr(settings, ratio.partition(".")[2]) is None else ratio
    return {"bound": bound, "fix": FIXES[bound]}


def _times(total: float | None, ratio: float) -> float | None:
    return None if total is None or not ratio else total * ratio


def _whole(amount: float | None) -> int | None:
    return None if amount is None else int(amount)


# The resources of the node


class Resources(Protocol):
    """The node's resources, as the budget asks for them."""

    def totals(self) -> Amounts:
        """Return the totals; `sessions` is not used."""
        ...

    def free(self) -> Amounts:
        """Return the amounts free at this moment."""
        ...

    def free_descriptors(self) -> int | None:
        """Return how many more files this process may open; None is unknown."""
        ...

    def next_end(self) -> datetime | None:
        """Return the earliest end of a lease."""
        ...


class MachineResources:
    """The machine that runs this process. Totals are cached for seconds, since they change rarely. Free amounts are
    cached for a moment: reading /proc/meminfo takes longer than the rest of an admission.
    """

    def __init__(self, data_dir: Path, cgroup_dirs: Mapping[str, str], next_end: Callable[[], datetime | None]) -> None:
        self._data_dir, self._cgroup_dirs = data_dir, cgroup_dirs
        self._find_next_end, self.free_descriptors = next_end, node.free_descriptors
        self._seen_at = self._felt_at = self._found_at = -math.inf

    def totals(self) -> Amounts:
        self._look()
        return self._totals

    def free(self) -> Amounts:
        self._look()
        now = time.monotonic()
        if now - self._felt_at > _FEEL_AGAIN_S:
            self._free = node.read_free(self._data_dir, self._bounds)
            self._felt_at = now
        return self._free

    def next_end(self) -> datetime | None:
        now = time.monotonic()
        if now - self._found_at > _FIND_AGAIN_S:
            self._next_end, self._found_at = self._find_next_end(), now
        return self._next_end

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._seen_at > _LOOK_AGAIN_S:
            self._bounds = node.read_bounds(self._cgroup_dirs)
            self._totals = node.read_totals(self._data_dir, self._bounds, max_sessions=0)
            self._seen_at = now


# The reserve of the disk


def check(data_dir: Path, disk: DiskSettings) -> None:
    """Raise `DiskReserve` while less disk is free than the reserve."""
    space = os.statvfs(data_dir)
    refuse_below(space, disk)


def disk_floor_bytes(data_dir: Path, disk: DiskSettings) -> int:
    """Return the free space below which no session's disk takes more: half of the reserve."""
    return _disk_reserve_mb(os.statvfs(data_dir), disk) * MIB // 2


def _disk_reserve_mb(space: os.statvfs_result, disk: DiskSettings) -> int:
    return max(disk.reserve_mb, int(space.f_blocks * space.f_frsize * disk.reserve_percent / 100) // MIB)


def refuse_below(space: os.statvfs_result, disk: DiskSettings) -> None:
    """Raise `DiskReserve` if these counters are below the reserve."""
    free_mb, needed_mb = space.f_bavail * space.f_frsize // MIB, _disk_reserve_mb(space, disk)
    if free_mb < needed_mb:
        raise DiskReserve("the disk of this node is too full for a new session", free_mb=free_mb, reserve_mb=needed_mb)
    needed_inodes = int(space.f_files * disk.reserve_percent / 100)  # 0 where inodes are made as needed
    if space.f_favail < needed_inodes:
        message = "the disk of this node has too few inodes left for a new session"
        raise DiskReserve(message, free_inodes=space.f_favail, reserve_inodes=needed_inodes)
