"""The start of nsinit for a daemon that is not root: the grant, the launcher's argument, the words on its socket.

A daemon without privilege must not choose on what a process with all privileges works. Root says so, in the one
argument of each process: the launcher's (`tools/launcher.py`) is a `LaunchForParent` or a `LaunchForUser`, and nsinit's
is the `Grant` that the launcher makes of it. nsinit holds every request against its grant. Without an argument nsinit
is the child of a program that is root itself, and allows all. Values only; opens nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from nsinit.wire.protocol import (
    FILES_LIMITS,
    BridgeTerms,
    DeleteImage,
    DiskLimits,
    Limits,
    OpenBridge,
    OpenNetwork,
    PackLayer,
    PublishImage,
    SandboxPlan,
    SeccompProfile,
    TrustAuthority,
)
from nsinit.wire.validate import InvalidName, check_cgroup_parent, check_data_dir

START, KILL = b"start", b"kill"
START_EGRESS, KILL_EGRESS = b"start egress", b"kill egress"
START_GATEWAY, KILL_GATEWAY = b"start gateway", b"kill gateway"
START_BROKER, KILL_BROKER = b"start broker", b"kill broker"
"""The daemon's words to the launcher, about nsinit, the egress process, the preview gateway and the broker. The answer
to a start is the pid in decimal, with the pidfd, or `FAILED`."""

READY, FAILED = b"ready", b"-"
"""The launcher's words: its first one, and that a process could not be started."""

MAX_WORD_BYTES = 16
FDS_OF_START = 2
"""The socket of the process and the write end of its log."""

NOTIFY_FD = 4
"""The descriptor of the socket to the service manager, in a launcher that is a service."""

AUTO = "auto"
"""The cgroup parent that nsinit finds itself."""


class NotGranted(InvalidName):
    """The daemon asks for more than root allows it."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """The most that a daemon may ask for, as root's configuration says.

    `profiles`: names of seccomp profiles. `own_profiles`: the operator's own as `describe_profiles` returns them; the
    daemon sends them, too, and may send no others. `images`: names, empty for every image of the store. A cpu quota is
    per 100 ms. `way_out`: sessions may have a way out of their networks. `bridge`: what holds in the
    network mode `bridge`, None where no session may be in it.
    """

    profiles: tuple[str, ...]
    own_profiles: list[Any]  # JSON values
    images: tuple[str, ...]
    root_inside: bool
    memory_bytes: int
    pids: int
    cpu_quota_us: int
    disk: DiskLimits
    quota_bytes: int
    open_files: int
    tmp_bytes: int
    shm_bytes: int
    merge_pages: bool
    way_out: bool
    bridge: BridgeTerms | None = None

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> Allowance:  # JSON values
        """Return the allowance in an argument. Raises `KeyError`, `TypeError`, `ValueError`."""
        if said.keys() != {each.name for each in fields(cls)}:
            raise ValueError("not the allowance of this version")
        lists = {name: tuple(map(str, said[name])) for name in ("profiles", "images")}
        if (bridge := said["bridge"]) is not None:
            terms = {name: tuple(map(str, bridge[name])) for name in ("refused", "resolvers")}
            bridge = BridgeTerms(str(bridge["range"]), **terms)
        return cls(**{**said, **lists, "disk": DiskLimits(**said["disk"]), "bridge": bridge})

    def check_profiles(self, own: tuple[SeccompProfile, ...]) -> None:
        """Raise `NotGranted` unless these are the operator's own profiles."""
        if describe_profiles(own) != self.own_profiles:
            raise NotGranted("the operator's own seccomp profiles are not those that root has read; restart both parts")

    def check(self, request: object) -> None:
        """Raise `NotGranted` unless the allowance covers what the request asks for."""
        if isinstance(request, OpenNetwork | TrustAuthority) and not self.way_out:
            raise NotGranted("this daemon may not open a way out of a session's network")
        if isinstance(request, PublishImage | DeleteImage | PackLayer) and self.images:  # root chose what they are
            raise NotGranted("a daemon that may use some images only can't change any, nor read layers")
        if isinstance(request, OpenBridge) and self.bridge is None:
            raise NotGranted("this daemon may not give a session a bridge")
        plan, disk = getattr(request, "plan", None), getattr(request, "disk", None)
        if isinstance(plan, SandboxPlan):
            self._check_plan(plan)
        if isinstance(limits := getattr(request, "limits", None), Limits):
            self._check_limits(limits)
        if isinstance(disk, DiskLimits):
            self._check_disk(disk)
        quota = getattr(request, "quota", None)
        size_bytes = quota.size_bytes if isinstance(quota, DiskLimits) else getattr(request, "size_bytes", 0)
        _at_most("quota", size_bytes, self.quota_bytes)

    def _check_plan(self, plan: SandboxPlan) -> None:
        if plan.image_kind == "files":  # no program runs in it, and all about it is fixed
            usual = SandboxPlan(plan.session_id, plan.image, "files", FILES_LIMITS, plan.workspace_id)
            if plan != replace(usual, workspace_draft=plan.workspace_draft):
                raise NotGranted("a sandbox for files is always the same")
            return
        if plan.seccomp not in self.profiles:
            raise NotGranted(f"this daemon may not use the seccomp profile {plan.seccomp[:40]!r}")
        if self.images and plan.image not in self.images:
            raise NotGranted(f"this daemon may not use the image {plan.image[:80]!r}")
        if plan.root_inside and not self.root_inside:
            raise NotGranted("this daemon may not make a root inside")
        self._check_limits(plan.limits)
        self._check_disk(plan.disk)
        for name in ("open_files", "tmp_bytes", "shm_bytes"):
            _at_most(name, getattr(plan, name), getattr(self, name))

    def _check_limits(self, limits: Limits) -> None:
        _at_most("memory_bytes", limits.memory_bytes, self.memory_bytes)
        _at_most("pids", limits.pids, self.pids)
        _at_most("cpu quota", limits.cpu_quota_us * _PERIOD_US, self.cpu_quota_us * limits.cpu_period_us)

    def _check_disk(self, disk: DiskLimits) -> None:
        _at_most("disk size_bytes", disk.size_bytes, self.disk.size_bytes)
        _at_most("disk inodes", disk.inodes, self.disk.inodes)


_PERIOD_US = 100_000


def _at_most(name: str, asked: int, most: int) -> None:
    if asked > most:
        raise NotGranted(f"{name} is {asked}, more than this daemon may ask for ({most})")


def describe_profiles(profiles: Iterable[SeccompProfile]) -> list[Any]:
    """Return seccomp profiles as JSON values."""
    described: list[Any] = json.loads(json.dumps([asdict(each) for each in profiles]))
    return described


@dataclass(frozen=True, slots=True)
class Grant:
    """`gid`: the daemon's group, which may reach the sockets of sessions. `beside`: processes of the same service,
    which nsinit may move to another cgroup along with itself. `own_filters`: nsinit and its helpers are under system
    call filters of their own. `cgroup_parent`: as in `protocol.Start`, and in its place."""

    data_dir: str
    gid: int
    allowance: Allowance
    beside: tuple[int, ...] = ()
    own_filters: bool = True
    cgroup_parent: str = AUTO

    def encode(self) -> str:
        """Return the argument for nsinit."""
        return json.dumps(asdict(self))

    def check(self, data_dir: str, cgroup_parent: str) -> None:
        """Raise `NotGranted` unless the grant covers what the daemon asks for."""
        if data_dir != self.data_dir:
            raise NotGranted(f"this daemon may not use the data directory {data_dir[:80]!r}")
        if cgroup_parent != AUTO:
            raise NotGranted("this daemon may not choose a cgroup")


def parse_grant(arguments: list[str]) -> Grant | None:
    """Return the grant in the process's arguments, None when there is none. Raises `ValueError`, `KeyError`,
    `TypeError`."""
    if not arguments:
        return None
    said = json.loads(arguments[0])
    data_dir, gid, beside = said["data_dir"], said["gid"], said["beside"]
    check_data_dir(data_dir)
    if not isinstance(gid, int) or not 0 < gid < 2**32 - 1:
        raise ValueError(f"{gid!r} is no group for a daemon")
    allowance = Allowance.read(said["allowance"])
    check_cgroup_parent(parent := said["cgroup_parent"])
    return Grant(data_dir, gid, allowance, tuple(int(pid) for pid in beside), said["own_filters"] is not False, parent)


@dataclass(frozen=True, slots=True)
class LaunchForParent:
    """The launcher's argument from a daemon that is its parent. `pid`: the daemon. `sockets`: paths that root bound for
    the daemon; the launcher removes them when the daemon ends. `permit`: private networks that
    the kernel lets the egress process reach; `proxy`: the URL of the only address, if there is one. `ca_file`:
    authorities of servers besides the machine's, for the broker. Root says all three."""

    data_dir: str
    gid: int
    allowance: Allowance
    pid: int
    sockets: tuple[str, ...] = ()
    own_filters: bool = True
    permit: tuple[str, ...] = ()
    ca_file: str = ""
    proxy: str = ""

    def encode(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class LaunchForUser:
    """The launcher's argument as a service. `uid`: the one user besides root who may connect. `notify_fd`: a datagram
    socket to the service manager (sd_notify(3)), -1: none. `beat_s`: seconds between signs of life, 0: none.
    `cgroup_parent`: as in `Grant`. `permit`, `ca_file`, `proxy`: as in `LaunchForParent`."""

    data_dir: str
    gid: int
    allowance: Allowance
    uid: int
    notify_fd: int = -1
    beat_s: float = 0.0
    own_filters: bool = True
    cgroup_parent: str = AUTO
    permit: tuple[str, ...] = ()
    ca_file: str = ""
    proxy: str = ""

    def encode(self) -> str:
        return json.dumps(asdict(self))
