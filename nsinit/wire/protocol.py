"""The contract between the daemon and nsinit: one datagram is one message, descriptors ride with it. Sans-I/O.

`AF_UNIX SOCK_SEQPACKET`. Every request carries `seq`, its answer the same `seq`; answers come in any order. The daemon
never sends a path: nsinit builds every path from `data_dir` and a validated name (`validate.py`). No message carries a
secret: session environment and the API key never come this way.

Descriptors: `Built` and `Attached` carry [pidfd of PID 1, out-of-memory event fd or none]; see `EventKind`. `RunCgroupMade`
carries one, for the sandbox's PID 1; `UnpackImage` one, an archive.

The part of `protocol` about images that are made of an archive. Values only.

The part of `protocol` about what belongs to no session. Values only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar, get_args

from nsinit.kernel.seccomp.profile import ArgTest as SeccompArgTest
from nsinit.kernel.seccomp.profile import Profile as SeccompProfile
from nsinit.kernel.seccomp.profile import Rule as SeccompRule
from runner.wire.codec import ProtocolError, Vocabulary

A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)


class Request(Generic[A_co]):
    """A message to nsinit. Its class names the class of the answer, in place of which `Failed` may come."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class UnpackImage(Request["Unpacked"]):
    """First and only message to an nsinit that is not started: unpack the archive that comes along, a descriptor open
    for reading, into the empty draft of an image, and end. Not for a daemon that is not root.

    `draft_name`: the directory below `images` in which `rootfs` lies. More members, or bytes of files, than allowed end
    it. Answer: `Unpacked`, or `Failed`: at the stage `unpack` in words about the archive. Whoever hangs up before that
    ends it, too.
    """

    seq: int
    data_dir: str
    draft_name: str
    max_members: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class Unpacked:
    """How much came of it. `skipped`: members left out; `privileged`: files whose setuid or setgid bit was dropped."""

    seq: int
    members: int
    size_bytes: int
    skipped: int
    privileged: int


LeftoverKind = Literal["cgroup", "other_cgroup", "session_directory", "run_directory", "trash", "loop", "mount"]
"""`cgroup`: a cgroup among those of sessions that can't be one. `other_cgroup`: a node's directory that an earlier
nsinit of the data directory made in another part of the tree. `session_directory`, `run_directory`: an entry of
`sessions/` or `run/` that can't be a session's. `trash`: an entry of `trash/`. `loop`: a loop device with a file of a
session that is gone. `mount`: a mount that a person made on or below one of the places of sessions."""

TOLD_ONLY: frozenset[LeftoverKind] = frozenset({"mount", "other_cgroup"})
"""Kinds that are told of and never removed: a person may need them."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """A thing in nsinit's places that belongs to no session. `name` tells it from others of its kind; it is no path."""

    kind: LeftoverKind
    name: str


@dataclass(frozen=True, slots=True)
class FindLeftovers(Request["LeftoversFound"]):
    """List the leftovers. Answer: `LeftoversFound`."""

    seq: int


@dataclass(frozen=True, slots=True)
class RemoveLeftover(Request["Ok"]):
    """Remove a leftover if it is found again. Answer: `Ok` or `Failed` (`EBUSY`: some of it is left, or its kind is one
    of `TOLD_ONLY`)."""

    seq: int
    leftover: Leftover


@dataclass(frozen=True, slots=True)
class LeftoversFound:
    seq: int
    leftovers: tuple[Leftover, ...]


__all__ = [
    "ProtocolError",
    "SeccompArgTest",
    "SeccompProfile",
    "SeccompRule",
]
"""Names of other modules that are part of the contract."""

MAX_DATAGRAM_BYTES = 64 * 1024
MAX_FDS = 2

ImageKind = Literal["host", "rootfs", "files"]
"""`host`: a made `/` with the machine's own `/usr` below a second overlay. `rootfs`: an unpacked root filesystem.
`files`: no image and no program, only a workspace and a PID 1 that reads and writes files in it for the daemon."""

NetworkMode = Literal["none"]

EventKind = Literal["none", "eventfd", "memory_events"]
"""What the second descriptor is: nothing, a v1 eventfd (readable after an OOM kill), or an open v2 `memory.events`
(POLLPRI after a change, re-armed by reading it from the start)."""

CgroupMode = Literal["v2", "hybrid", "v1"]

DiskMode = Literal["project", "btrfs", "loop", "tmpfs", "none"]
"""How the writable layer of a session is kept to its size: a project quota (ext4, xfs), a subvolume's quota, an ext4
image of its own behind a loop device, a tmpfs, or not at all."""

DiskWish = Literal["auto", "project", "btrfs", "loop", "tmpfs", "none"]
"""`auto`: the first of the modes, in their order, that works on the data directory."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the session's cgroup enforces. `cpu_quota_us` per `cpu_period_us`; swap is always 0."""

    memory_bytes: int
    pids: int
    cpu_quota_us: int
    cpu_period_us: int = 100_000


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """What the session's writable layer may hold. What the file system needs for itself counts in `loop` mode."""

    size_bytes: int
    inodes: int


DEFAULT_DISK = DiskLimits(size_bytes=2 << 30, inodes=200_000)


@dataclass(frozen=True, slots=True)
class SandboxPlan:
    """Everything nsinit needs to build one sandbox. Names only; no path, no environment, no command.

    `/tmp` gets at most half of the memory and `/dev/shm` a quarter, whatever `tmp_bytes` and `shm_bytes` say; a disk in
    memory (mode `tmpfs`) gets at most half, too.
    `root_inside`: commands may run as the session's root; without it PID 1 itself lacks what that takes.
    """

    session_id: str
    image: str
    image_kind: ImageKind
    limits: Limits
    workspace_id: str | None = None
    workspace_draft: bool = False
    """The workspace is one that was begun and not published yet (`MakeWorkspace`)."""
    readonly_rootfs: bool = False
    network: NetworkMode = "none"
    tmp_bytes: int = 256 * 1024 * 1024
    shm_bytes: int = 64 * 1024 * 1024
    tmp_inodes: int = 0
    shm_inodes: int = 0
    """0: one for each 4 KiB."""
    open_files: int = 65_536
    """How far a process may raise its own limit of 1024; never beyond nsinit's own hard limit."""
    seccomp: str = "strict"
    """A profile that comes along, one of `Start.seccomp_profiles`, or `off`."""
    disk: DiskLimits = DEFAULT_DISK
    root_inside: bool = False

    @property
    def image_key(self) -> tuple[object, ...]:
        """What decides how an image is mounted. Plans in which that is the same differ only in what comes after it."""
        sizes = self.tmp_bytes, self.tmp_inodes, self.shm_bytes, self.shm_inodes
        return self.image, self.image_kind, self.disk, self.limits.memory_bytes, *sizes


# Requests ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start(Request["Ready"]):
    """First message, unless that is `UnpackImage`. `cgroup_parent`: `auto`, or the directory below every hierarchy's
    mount point to build in. `seccomp_profiles`: an operator's own, beside those that come along. `crash_at`: end at
    this point (`crash_points`); for tests, and only from a daemon that is root.

    Answer: `Ready` or `Failed` (a `disk` that can't be had is one).
    """

    seq: int
    data_dir: str
    node_id: str
    cgroup_parent: str = "auto"
    disk: DiskWish = "auto"
    seccomp_profiles: tuple[SeccompProfile, ...] = ()
    crash_at: str = ""


@dataclass(frozen=True, slots=True)
class Prepare(Request["Ok"]):
    """Make a blank vessel for a session id to come: cloned, in its cgroup, nothing of an image mounted yet.

    A later `Build` of that id starts from it; a `Teardown` discards it. It dies with nsinit. `limits`, in force before
    the process exists, and `disk` are what the build will probably ask for; it may ask for something else. Answer: `Ok`
    or `Failed`.
    """

    seq: int
    session_id: str
    limits: Limits
    disk: DiskLimits = DEFAULT_DISK


@dataclass(frozen=True, slots=True)
class MountImage(Request["Ok"]):
    """Mount the image in a blank vessel, on the guess that its session will have it.

    The `Build` of that id must have the same `SandboxPlan.image_key`, or it is refused. Answer: `Ok` or `Failed`;
    after `Failed` nothing of the vessel is left.
    """

    seq: int
    plan: SandboxPlan


@dataclass(frozen=True, slots=True)
class Build(Request["Built"]):
    """Build a sandbox. Answer: `Built` (2 descriptors) or `Failed`; after `Failed` nothing of it is left."""

    seq: int
    plan: SandboxPlan


@dataclass(frozen=True, slots=True)
class Attach(Request["Attached"]):
    """Find the running sandbox of a session again, after a restart. Answer: `Attached` or `Failed`."""

    seq: int
    session_id: str


@dataclass(frozen=True, slots=True)
class Scan(Request["Scanned"]):
    """List sessions that have a cgroup, a run or a session directory, those after an id. Answer: `Scanned`."""

    seq: int
    after: str = ""


@dataclass(frozen=True, slots=True)
class SetLimits(Request["Ok"]):
    """Change the limits of a running sandbox's cgroup. Answer: `Ok` or `Failed`."""

    seq: int
    session_id: str
    limits: Limits


@dataclass(frozen=True, slots=True)
class SetDisk(Request["Ok"]):
    """Change the limits of a running sandbox's disk. Answer: `Ok` or `Failed` (`EOPNOTSUPP`: disks of this mode keep
    their size)."""

    seq: int
    session_id: str
    disk: DiskLimits


@dataclass(frozen=True, slots=True)
class AskDisk(Request["DiskUse"]):
    """Ask how full the disk of a running sandbox is. Answer: `DiskUse` or `Failed`."""

    seq: int
    session_id: str


@dataclass(frozen=True, slots=True)
class SetFrozen(Request["Ok"]):
    """Stop, or let go on, all processes of a session at once, PID 1 included. Idempotent.

    Answer: `Ok`, when it is so, or `Failed` (`ETIMEDOUT`: not all would stop, and all go on; `ENOTSUP`: no freezer).
    """

    seq: int
    session_id: str
    frozen: bool


@dataclass(frozen=True, slots=True)
class Teardown(Request["TornDown"]):
    """Kill a sandbox and remove all of it; idempotent, and right for half-built ones. Answer: `TornDown`."""

    seq: int
    session_id: str


@dataclass(frozen=True, slots=True)
class MakeWorkspace(Request["Ok"]):
    """Make the directory of a persistent workspace if there is none, or with `draft` one beside it that becomes the
    workspace when it is published. With a `quota` it is made so that no more can be written to it; a draft of one that
    has a quota has it, too. Answer: `Ok` or `Failed` (`EOPNOTSUPP`: no quota can be had here; `EXDEV`: there is one
    without)."""

    seq: int
    workspace_id: str
    draft: bool = False
    quota: DiskLimits | None = None


@dataclass(frozen=True, slots=True)
class GrowWorkspace(Request["Ok"]):
    """Let a workspace with a quota that nobody has be this large; the number of its files grows along. Answer: `Ok` or
    `Failed` (`EINVAL`: it is larger; `EBUSY`: somebody has it; `ENOENT`: there is none with a quota)."""

    seq: int
    workspace_id: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class AskQuota(Request["QuotaFound"]):
    """Ask what a workspace may hold. Answer: `QuotaFound` or `Failed` (`EUCLEAN`: its image is damaged)."""

    seq: int
    workspace_id: str


@dataclass(frozen=True, slots=True)
class ListWorkspaces(Request["WorkspacesListed"]):
    """List the workspaces that have a directory, those after a name. Answer: `WorkspacesListed`."""

    seq: int
    after: str = ""


@dataclass(frozen=True, slots=True)
class DiscardWorkspace(Request["Ok"]):
    """Move a workspace (or draft) out of the way in one step, and delete it then; idempotent. Answer: `Ok` or
    `Failed`. Who has it mounted keeps what is not deleted yet, so nobody should."""

    seq: int
    workspace_id: str
    draft: bool = False


@dataclass(frozen=True, slots=True)
class PublishWorkspace(Request["Ok"]):
    """Make a draft the workspace of its name, in one step, after all of it is on the disk. With `replace` it takes the
    place of the one that is there, which is deleted. Answer: `Ok` or `Failed` (`EEXIST`: there is one)."""

    seq: int
    workspace_id: str
    replace: bool = False


@dataclass(frozen=True, slots=True)
class SyncWorkspace(Request["Ok"]):
    """Have everything that was written to a workspace on the disk. Answer: `Ok` or `Failed`."""

    seq: int
    workspace_id: str


@dataclass(frozen=True, slots=True)
class MakeRunCgroup(Request["RunCgroupMade"]):
    """Make a cgroup of its own for a program or shell inside a session's; it shares the session's limits.

    `name` is 1 to 32 of a-z, 0-9 and `-`. It goes with the session at the latest. Answer: `RunCgroupMade` (1 descriptor) or
    `Failed` (`EEXIST`; `EAGAIN` when the session has as many as it may have).
    """

    seq: int
    session_id: str
    name: str


@dataclass(frozen=True, slots=True)
class RemoveRunCgroup(Request["Ok"]):
    """Kill what is left in a group, if `kill`, and remove it. Idempotent.

    Answer: `Ok` (it is gone) or `Failed` (`EBUSY`: something in it lives on, so it stays).
    """

    seq: int
    session_id: str
    name: str
    kill: bool = False


@dataclass(frozen=True, slots=True)
class FindOomKills(Request["OomKills"]):
    """Ask whom the kernel's out-of-memory killer ended in a session. Answer: `OomKills`."""

    seq: int
    session_id: str


# Answers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """nsinit serves. `cgroup_dirs` maps a controller (and `unified`) to the directory that holds session cgroups."""

    seq: int
    pid: int
    cgroup_mode: CgroupMode
    cgroup_dirs: dict[str, str]
    features: dict[str, bool] = field(default_factory=dict)
    disk: DiskMode = "none"
    disk_refused: dict[str, str] = field(default_factory=dict)
    """Why a mode that comes before `disk` can't be had here, one sentence each."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Which process is PID 1 of a sandbox. `start_ticks`: `/proc/<pid>/stat` field 22; `pid_ns`: namespace inode."""

    pid: int
    start_ticks: int
    pid_ns: int
    base_uid: int


@dataclass(frozen=True, slots=True)
class Built:
    """The runner listens. `timings_us` maps step names to microseconds, in order."""

    seq: int
    session_id: str
    identity: Identity
    oom_event: EventKind
    timings_us: dict[str, int]


@dataclass(frozen=True, slots=True)
class Attached:
    seq: int
    session_id: str
    identity: Identity
    oom_event: EventKind


@dataclass(frozen=True, slots=True)
class Found:
    """One session as the kernel and the disk know it; `identity` is None when nothing of it runs."""

    session_id: str
    identity: Identity | None
    has_cgroup: bool
    has_files: bool


@dataclass(frozen=True, slots=True)
class Scanned:
    """Sessions in the order of their ids; `more`: ask again for those after the last one."""

    seq: int
    sessions: tuple[Found, ...]
    more: bool = False


@dataclass(frozen=True, slots=True)
class TornDown:
    """Nothing of the session is left but, perhaps, `leftovers` (what could not be removed, and why).

    Counters are the last ones read before the cgroup went; -1 means unknown.
    """

    seq: int
    session_id: str
    oom_kills: int
    cpu_usec: int
    memory_peak_bytes: int
    leftovers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunCgroupMade:
    """The group is there. `membership` says what the descriptor is: `clone`, the group's directory in a cgroup v2
    tree, for CLONE_INTO_CGROUP by the session's PID 1; `join`, its v1 `tasks` file open for writing."""

    seq: int
    membership: Literal["clone", "join"]


@dataclass(frozen=True, slots=True)
class OomKills:
    """The victim's name as the kernel logged it (chosen by the sandbox: at most 15 bytes of anything printable), empty
    when unknown, and how many seconds ago it was. `kills`: of how many the log tells, and `pids`: who the last of them
    were, as everybody here counts pids; 0 and none where the log has other pids than ours."""

    seq: int
    name: str
    age_s: float = 0.0
    kills: int = 0
    pids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DiskUse:
    """What the kernel counts for the writable layer; -1 where nobody counts or limits."""

    seq: int
    used_bytes: int
    limit_bytes: int
    used_inodes: int
    limit_inodes: int


@dataclass(frozen=True, slots=True)
class QuotaFound:
    """None: nothing limits it, or it is not there."""

    seq: int
    quota: DiskLimits | None = None


@dataclass(frozen=True, slots=True)
class WorkspacesListed:
    """Names in their order; `more`: ask again for those after the last one."""

    seq: int
    names: tuple[str, ...]
    more: bool = False


@dataclass(frozen=True, slots=True)
class Ok:
    seq: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A request failed at `stage` (the step's name) on `path` with `errno` (0: no system call failed)."""

    seq: int
    stage: str
    path: str
    errno: int
    message: str


REQUESTS = Vocabulary(
    *(Start, Prepare, MountImage, Build, Attach, Scan, SetLimits, SetFrozen, Teardown),
    *(MakeWorkspace, GrowWorkspace, AskQuota, ListWorkspaces, DiscardWorkspace, PublishWorkspace, SyncWorkspace),
    *(MakeRunCgroup, RemoveRunCgroup, FindOomKills, AskDisk, SetDisk, FindLeftovers, RemoveLeftover, UnpackImage),
)
ANSWERS = Vocabulary(
    *(
        Ready,
        Built,
        Attached,
        Scanned,
        TornDown,
        RunCgroupMade,
        OomKills,
        DiskUse,
        LeftoversFound,
        WorkspacesListed,
        QuotaFound,
    ),
    *(Unpacked, Ok, Failed),
)

_ANSWER_CLASSES: dict[str, type] = {each.__name__: each for each in ANSWERS.classes}


def answer_class(request: type[Request[A]]) -> type[A]:
    """Return the class of the answer that a class of requests names."""
    (base,) = request.__orig_bases__  # type: ignore[attr-defined]  # set for every class with a generic base
    found: type[Any] = _ANSWER_CLASSES[get_args(base)[0].__forward_arg__]
    return found
