"""The contract between the daemon and nsinit: one datagram is one message, descriptors ride with it. Sans-I/O.

`AF_UNIX SOCK_SEQPACKET`. Every request carries `seq`, its answer the same `seq`; answers come in any order. A request's
class names the class of its answer, in place of which `Failed` may come. The daemon never sends a path: nsinit builds
every path from `data_dir` and a validated name (`validate.py`). No message carries a secret: session environment and
the API key never come this way.

Descriptors: `Built` and `Adopted` carry [pidfd of PID 1, out-of-memory event or none]; see `EventKind`.
`RunCgroupMade` carries one, for the sandbox's PID 1; `NetworkOpened` three; `SocketsOpened` as many as were asked for;
`UnpackLayer`, `PackLayer` and `PackSession` bring two, `PublishImage` one.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal, get_args

from nsinit.kernel.seccomp.profile import ArgTest as SeccompArgTest
from nsinit.kernel.seccomp.profile import Profile as SeccompProfile
from nsinit.kernel.seccomp.profile import Rule as SeccompRule
from nsinit.wire.store_protocol import (
    MAX_DESCRIPTION_BYTES,
    MAX_IMAGE_LAYERS,
    A,
    CollectLayers,
    DeleteImage,
    LayerPacked,
    LayersCollected,
    LayerUnpacked,
    Ok,
    PackLayer,
    PackSession,
    PublishImage,
    Request,
    UnpackLayer,
)
from runner.wire.codec import ProtocolError, Vocabulary, dataclass

__all__ = [
    "MAX_DESCRIPTION_BYTES",
    "MAX_IMAGE_LAYERS",
    "CollectLayers",
    "DeleteImage",
    "LayerPacked",
    "LayerUnpacked",
    "LayersCollected",
    "Ok",
    "PackLayer",
    "PackSession",
    "ProtocolError",
    "PublishImage",
    "Request",
    "SeccompArgTest",
    "SeccompProfile",
    "SeccompRule",
    "UnpackLayer",
]
"""Names of other modules that are part of the contract."""

MAX_DATAGRAM_BYTES = 64 * 1024
MAX_FDS = 16
FDS_OF_WAY_OUT = 3
MAX_SOCKETS = MAX_FDS
"""The most sockets that one request opens in a session's network."""

NETWORK_STAGE = "network: "
"""The beginning of `Failed.stage` where a session got no way out."""
MAX_TERMINALS = 16
"""The most terminals that one sandbox may have at once, those of the API and its programs' own."""

MAX_STOP_GRACE_MS = 10_000
"""The longest time that the processes of a session have to end by themselves."""

# Values -------------------------------------------------------------------------------------------------------------

ImageKind = Literal["host", "rootfs", "layers", "files"]
"""`host`: a made `/` with the machine's own `/usr` below a second overlay. `rootfs`: an unpacked root filesystem.
`layers`: a list of layers, one above the other. `files`: no image and no program, only a workspace and a PID 1 that
reads and writes files in it for the daemon."""

NetworkMode = Literal["none"]

EventKind = Literal["none", "eventfd", "memory_events"]
"""The second descriptor: none, a v1 eventfd (readable after an OOM kill), or an open v2 `memory.events` (POLLPRI after
a change, re-armed by reading it from the start)."""

CgroupMode = Literal["v2", "hybrid", "v1"]

DiskMode = Literal["project", "btrfs", "loop", "tmpfs", "none"]
"""The mechanism that limits a session's writable layer: a project quota (ext4, xfs), a subvolume's quota, an ext4 image
of its own behind a loop device, a tmpfs, or none."""

DiskSpec = Literal["auto", "project", "btrfs", "loop", "tmpfs", "none"]
"""`auto`: the first of the modes, in their order, that works on the data directory."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the session's cgroup. `cpu_quota_us` per `cpu_period_us`; swap is always 0."""

    memory_bytes: int
    pids: int
    cpu_quota_us: int
    cpu_period_us: int = 100_000


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """Limits of the session's writable layer. In `loop` mode they include the tables of the file system itself."""

    size_bytes: int
    inodes: int


DEFAULT_WEIGHT = 100


@dataclass(frozen=True, slots=True)
class IoLimits:
    """Each session's share of the disk: `weight` against other sessions, and maxima in a second; 0 is no limit."""

    weight: int = DEFAULT_WEIGHT
    read_bps: int = 0
    write_bps: int = 0
    read_iops: int = 0
    write_iops: int = 0


@dataclass(frozen=True, slots=True)
class BridgeTerms:
    """Terms of every session in the network mode `bridge`. `range`: the network that sessions have addresses of;
    `refused`: networks that no session reaches; `resolvers`: addresses whose port of DNS every session reaches. Other
    sessions and the host's own addresses are never reached. All are IPv4."""

    range: str
    refused: tuple[str, ...]
    resolvers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BridgeRule:
    """An IPv4 network: with `ports`, those of TCP and UDP in it, without, all that there is."""

    network: str
    ports: tuple[int, ...] = ()


BRIDGE_LINKS = "skb"
"""The beginning of the names of sessions' links in the machine's network."""

MAX_BRIDGE_RULES, MAX_BRIDGE_PORTS = 512, 512

DEFAULT_DISK = DiskLimits(size_bytes=2 << 30, inodes=200_000)


FILES_LIMITS = Limits(memory_bytes=512 << 20, pids=64, cpu_quota_us=100_000)
"""The limits of every sandbox that has files only."""


@dataclass(frozen=True, slots=True)
class SandboxPlan:
    """A sandbox to build. Names only; no path, no environment, no command.

    `/tmp` gets at most half of the memory and `/dev/shm` a quarter, whatever `tmp_bytes` and `shm_bytes` say; a disk in
    memory (mode `tmpfs`) gets at most half, too. `root_inside`: commands may run as the session's root; without it PID
    1 lacks the capabilities for that.
    """

    session_id: str
    image: str
    image_kind: ImageKind
    limits: Limits
    workspace_id: str | None = None
    workspace_draft: bool = False
    """The workspace is a draft (`MakeWorkspace`)."""
    readonly_rootfs: bool = False
    network: NetworkMode = "none"
    tmp_bytes: int = 256 * 1024 * 1024
    shm_bytes: int = 64 * 1024 * 1024
    tmp_inodes: int = 0
    shm_inodes: int = 0
    """0: one inode for each 4 KiB."""
    open_files: int = 65_536
    """The highest limit of open files that a process may set; each begins with 1024. Never beyond nsinit's own hard
    limit."""
    seccomp: str = "strict"
    """A built-in profile, one of `Start.seccomp_profiles`, or `off`."""
    disk: DiskLimits = DEFAULT_DISK
    root_inside: bool = False
    layers: tuple[str, ...] = ()
    """The layers of an image of that kind, the lowest first: those that the image has when the sandbox is built, or the
    build fails (`ESTALE`)."""
    account: str = ""
    """Name of the sandbox user's account, whose home is `/home/NAME`. Without one the image's own is left, if it has
    one, or is `sandbox`."""

    @property
    def image_key(self) -> tuple[object, ...]:
        """The fields that the steps to mount an image depend on. Plans with an equal key differ only in later steps."""
        sizes = self.tmp_bytes, self.tmp_inodes, self.shm_bytes, self.shm_inodes
        return self.image, self.image_kind, self.layers, self.disk, self.limits.memory_bytes, self.account, *sizes


# The first request --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start(Request["Ready"]):
    """Start nsinit. The first request, unless that is `OpenStore`.

    `cgroup_parent`: `auto`, or the directory below every hierarchy's mount point to build in. `seccomp_profiles`: an
    operator's own, beside the built-in ones. `crash_at`: end at this crash point; for tests, and only from a daemon
    that is root. `terminals`: the number that each sandbox may have. `own_filters`: nsinit and its helpers go under
    filters of their own; from a daemon that is not root nsinit does what its grant says. `merge_pages`: PID 1s offer
    their pages to the kernel for merging, where it can merge (`features` of `Ready` say so). `disk_floor_bytes`: with
    less free on the data directory's disk, images take no more blocks. `bridge`: sessions may be given the network mode
    `bridge`; from a daemon that is not root the grant says so. `Failed` is also the answer when the `disk` mode
    can't be had.
    """

    seq: int
    data_dir: str
    node_id: str
    cgroup_parent: str = "auto"
    disk: DiskSpec = "auto"
    io: IoLimits = IoLimits()
    terminals: int = MAX_TERMINALS
    seccomp_profiles: tuple[SeccompProfile, ...] = ()
    crash_at: str = ""
    own_filters: bool = True
    merge_pages: bool = False
    disk_floor_bytes: int = 0
    bridge: BridgeTerms | None = None


@dataclass(frozen=True, slots=True)
class OpenStore(Request["Ok"]):
    """Serve requests about layers and images alone, until the other end hangs up. The first request, unless that is
    `Start`. Not for a daemon that is not root. `crash_at`: as in `Start`."""

    seq: int
    data_dir: str
    crash_at: str = ""


# Requests: sandboxes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepare(Request["Ok"]):
    """Make a blank sandbox for the pool, for a session id to come: cloned, in its cgroup, no image mounted.

    A later `Build` of that id starts from it; a `Teardown` discards it. It dies with nsinit. `limits`, in force before
    the process exists, and `disk` are guesses; the build may ask for others.
    """

    seq: int
    session_id: str
    limits: Limits
    disk: DiskLimits = DEFAULT_DISK


@dataclass(frozen=True, slots=True)
class MountImage(Request["Ok"]):
    """Mount the image in a blank sandbox of the pool, on the guess that its session will have that image.

    The `Build` of that id must have the same `SandboxPlan.image_key`, or is refused. After `Failed` nothing of the
    sandbox is left.
    """

    seq: int
    plan: SandboxPlan


@dataclass(frozen=True, slots=True)
class Build(Request["Built"]):
    """Build a sandbox. After `Failed` nothing of it is left."""

    seq: int
    plan: SandboxPlan


@dataclass(frozen=True, slots=True)
class Adopt(Request["Adopted"]):
    """Find the running sandbox of a session again, after a restart."""

    seq: int
    session_id: str


@dataclass(frozen=True, slots=True)
class StopProcesses(Request["Ok"]):
    """Send SIGTERM to each process of a session but PID 1, thaw them, and wait until they have ended, at most so long.
    Right for sessions of which nothing is left."""

    seq: int
    session_id: str
    grace_ms: int


@dataclass(frozen=True, slots=True)
class Teardown(Request["TornDown"]):
    """Kill a sandbox and remove all of it. Idempotent, and right for half-built ones."""

    seq: int
    session_id: str


@dataclass(frozen=True, slots=True)
class Scan(Request["Scanned"]):
    """List sessions that have a cgroup, a run directory or a session directory, those after an id."""

    seq: int
    after: str = ""


# Requests: a running session ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SetLimits(Request["Ok"]):
    """Change the limits of a running sandbox's cgroup."""

    seq: int
    session_id: str
    limits: Limits


@dataclass(frozen=True, slots=True)
class SetFrozen(Request["Ok"]):
    """Freeze or thaw all processes of a session at once, PID 1 included. Idempotent; answered when it is so.

    `Failed` with `ETIMEDOUT`: not every process froze, and all run again; `ENOTSUP`: no freezer.
    """

    seq: int
    session_id: str
    frozen: bool


@dataclass(frozen=True, slots=True)
class SetDisk(Request["Ok"]):
    """Change the limits of a running sandbox's disk. `Failed` with `EOPNOTSUPP`: disks of this mode keep their size."""

    seq: int
    session_id: str
    disk: DiskLimits


@dataclass(frozen=True, slots=True)
class AskDisk(Request["DiskUse"]):
    """Ask how full the disk of a running sandbox is."""

    seq: int
    session_id: str


@dataclass(frozen=True, slots=True)
class MakeRunCgroup(Request["RunCgroupMade"]):
    """Make a run cgroup: one for a program or shell, inside the session's cgroup, whose limits it shares.

    `name`: 1 to 32 of a-z, 0-9 and `-`. The run cgroup goes with the session at the latest. `Failed` with `EEXIST`; or
    `EAGAIN`: the session has as many as it may have.
    """

    seq: int
    session_id: str
    name: str


@dataclass(frozen=True, slots=True)
class RemoveRunCgroup(Request["Ok"]):
    """Remove a run cgroup, and with `kill` its processes. Idempotent. `Failed` with `EBUSY`: a process in
    it lives on."""

    seq: int
    session_id: str
    name: str
    kill: bool = False


@dataclass(frozen=True, slots=True)
class OpenNetwork(Request["NetworkOpened"]):
    """Open a way out of a running session's network: whatever is sent to an address that is not the session's own comes
    to two sockets. They exist as long as a copy of their descriptors; a connection is refused without.

    With `steers` false, for a kernel that can't steer: nothing but the session's name server and the proxy at its own
    address is there, and two descriptors come without the link.

    `Failed`, with a stage that begins with `NETWORK_STAGE`: the session has no way out, or the one that it had. With
    `EADDRINUSE` somebody still has the sockets of an earlier one, or a program of the session has their ports.
    """

    seq: int
    session_id: str
    steers: bool = True


@dataclass(frozen=True, slots=True)
class OpenBridge(Request["BridgeOpened"]):
    """Give a running session a link into the host's network, or the one that it has other rules. It reaches what
    `BridgeTerms` leave, of that what `allow` has, or all if that is empty, and nothing that `deny` has. A way out that
    the session had carries nothing any more.

    `Failed`, with a stage that begins with `NETWORK_STAGE`: the session's network is as before. With `EPERM` the mode
    is not granted; with `EHOSTUNREACH`, `ENETUNREACH` or `EADDRINUSE` the sentence says what the host lacks.
    """

    seq: int
    session_id: str
    allow: tuple[BridgeRule, ...] = ()
    deny: tuple[BridgeRule, ...] = ()


@dataclass(frozen=True, slots=True)
class CloseBridge(Request["Ok"]):
    """Remove a running session's link into the host's network. Idempotent."""

    seq: int
    session_id: str


@dataclass(frozen=True, slots=True)
class TrustAuthority(Request["Ok"]):
    """Have programs of a running session trust an authority, whose certificate is in PEM: by a file of ours that its
    environment may name, and by the image's bundle, unless that can't be written.

    `Failed`, with a stage that begins with `NETWORK_STAGE`: there is no such file.
    """

    seq: int
    session_id: str
    certificate: str


@dataclass(frozen=True, slots=True)
class OpenSockets(Request["SocketsOpened"]):
    """Make `count` TCP sockets in a running session's network, for connections to its own servers. A socket keeps the
    namespace for as long as it is open, also after the end of the session.

    `Failed`, with a stage that begins with `NETWORK_STAGE`: none was made.
    """

    seq: int
    session_id: str
    count: int


@dataclass(frozen=True, slots=True)
class FindOomKills(Request["OomKills"]):
    """Ask which processes of a session the kernel's out-of-memory killer ended."""

    seq: int
    session_id: str


# Requests: workspaces -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MakeWorkspace(Request["Ok"]):
    """Make the directory of a persistent workspace if there is none, or with `draft` one beside it that becomes the
    workspace when it is published. With a `quota` no more can be written to it; a draft of a workspace that has a quota
    has the same.

    `Failed` with `EOPNOTSUPP`: no quota can be had here; `EXDEV`: the workspace exists without one.
    """

    seq: int
    workspace_id: str
    draft: bool = False
    quota: DiskLimits | None = None


@dataclass(frozen=True, slots=True)
class GrowWorkspace(Request["Ok"]):
    """Enlarge a workspace with a quota that no sandbox has mounted; the number of its files grows along.

    `Failed` with `EINVAL`: it is larger already; `EBUSY`: it is mounted; `ENOENT`: there is none with a quota.
    """

    seq: int
    workspace_id: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PublishWorkspace(Request["Ok"]):
    """Make a draft the workspace of its name, in one step, after all of it is on the disk. With `replace` it takes the
    place of the present one, which is deleted. `Failed` with `EEXIST`: there is one, and `replace` is false."""

    seq: int
    workspace_id: str
    replace: bool = False


@dataclass(frozen=True, slots=True)
class SyncWorkspace(Request["Ok"]):
    """Wait until everything that was written to a workspace is on the disk."""

    seq: int
    workspace_id: str


@dataclass(frozen=True, slots=True)
class DiscardWorkspace(Request["Ok"]):
    """Move a workspace (or draft) out of the way in one step, then delete it. Idempotent. A sandbox that has it mounted
    keeps the files that are not deleted yet, so none should."""

    seq: int
    workspace_id: str
    draft: bool = False


@dataclass(frozen=True, slots=True)
class AskQuota(Request["QuotaFound"]):
    """Ask for the quota of a workspace. `Failed` with `EUCLEAN`: its image is damaged."""

    seq: int
    workspace_id: str


@dataclass(frozen=True, slots=True)
class ListWorkspaces(Request["WorkspacesListed"]):
    """List the workspaces that have a directory, those after a name."""

    seq: int
    after: str = ""


# Requests: leftovers ------------------------------------------------------------------------------------------------

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
    """List the leftovers."""

    seq: int


@dataclass(frozen=True, slots=True)
class RemoveLeftover(Request["Ok"]):
    """Remove a leftover if it is found again. `Failed` with `EBUSY`: some of it is left, or its kind is one of
    `TOLD_ONLY`."""

    seq: int
    leftover: Leftover


# Answers ------------------------------------------------------------------------------------------------------------


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
    """Why each mode before `disk` can't be had here, one sentence each."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The process that is PID 1 of a sandbox. `start_ticks`: `/proc/<pid>/stat` field 22; `pid_ns`: namespace inode."""

    pid: int
    start_ticks: int
    pid_ns: int
    base_uid: int


@dataclass(frozen=True, slots=True)
class Built:
    """The sandbox is built and its runner listens. `timings_us`: from step names to microseconds, in order."""

    seq: int
    session_id: str
    identity: Identity
    oom_event: EventKind
    timings_us: dict[str, int]


@dataclass(frozen=True, slots=True)
class Adopted:
    seq: int
    session_id: str
    identity: Identity
    oom_event: EventKind
    bridged: bool = False
    """The session has a link into the host's network."""


@dataclass(frozen=True, slots=True)
class TornDown:
    """The session is removed. `leftovers`: one sentence for each thing that could not be removed.

    Counters are the last ones read before the cgroup went; -1 means unknown.
    """

    seq: int
    session_id: str
    oom_kills: int
    cpu_usec: int
    memory_peak_bytes: int
    leftovers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """A session as the kernel and the disk know it. `identity`: None when no process of it runs."""

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
class DiskUse:
    """Use and limits of the writable layer; -1 where the kernel does not count or limit."""

    seq: int
    used_bytes: int
    limit_bytes: int
    used_inodes: int
    limit_inodes: int


@dataclass(frozen=True, slots=True)
class RunCgroupMade:
    """The run cgroup exists. `membership`: the use of the descriptor. `clone`: the run cgroup's directory in a cgroup
    v2 tree, for CLONE_INTO_CGROUP by the session's PID 1; `join`: its v1 `tasks` file, open for writing."""

    seq: int
    membership: Literal["clone", "join"]


@dataclass(frozen=True, slots=True)
class NetworkOpened:
    """The way out is open. Descriptors: a TCP listener, a UDP socket for DNS, and the link of the program that steers
    to them; none of them blocks. The name of an accepted connection's own end is the address that was asked for; of a
    datagram, IP_PKTINFO tells it."""

    seq: int
    session_id: str


@dataclass(frozen=True, slots=True)
class BridgeOpened:
    """The link is up, and the rules hold. `link`: the name of the host's end, whose counters are the session's."""

    seq: int
    session_id: str
    link: str


@dataclass(frozen=True, slots=True)
class SocketsOpened:
    """The sockets come along: IPv4, neither bound nor connected, non-blocking. Connected, they reach what listens in
    the session's network and nothing else, whoever connects them."""

    seq: int
    session_id: str


@dataclass(frozen=True, slots=True)
class OomKills:
    """Processes of a session that the kernel killed for memory. `name`: of the newest, as the kernel logged it (chosen
    by the sandbox: at most 15 bytes of anything printable), empty when unknown; `age_s`: seconds since.

    `kills`: the number of kills in the log. `pids`: of the last ones, as this machine's processes count pids; 0 and
    none where the log has another namespace's pids.
    """

    seq: int
    name: str
    age_s: float = 0.0
    kills: int = 0
    pids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class QuotaFound:
    """The quota of a workspace; None without one, or without the workspace."""

    seq: int
    quota: DiskLimits | None = None


@dataclass(frozen=True, slots=True)
class WorkspacesListed:
    """Names in their order; `more`: ask again for those after the last one."""

    seq: int
    names: tuple[str, ...]
    more: bool = False


@dataclass(frozen=True, slots=True)
class LeftoversFound:
    seq: int
    leftovers: tuple[Leftover, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """A request failed at `stage` (the step's name) on `path` with `errno` (0: no system call failed)."""

    seq: int
    stage: str
    path: str
    errno: int
    message: str


REQUESTS = Vocabulary(
    *(Start, Prepare, MountImage, Build, Adopt, Scan, SetLimits, SetFrozen, StopProcesses, Teardown),
    *(MakeWorkspace, GrowWorkspace, AskQuota, ListWorkspaces, DiscardWorkspace, PublishWorkspace, SyncWorkspace),
    *(MakeRunCgroup, RemoveRunCgroup, OpenNetwork, OpenBridge, CloseBridge, TrustAuthority, OpenSockets),
    *(FindOomKills, AskDisk, SetDisk),
    *(FindLeftovers, RemoveLeftover, OpenStore, UnpackLayer, PackLayer, PublishImage, DeleteImage, CollectLayers),
    PackSession,
)

ANSWERS = Vocabulary(
    *(Ready, Built, Adopted, Scanned, TornDown, RunCgroupMade, NetworkOpened, BridgeOpened, SocketsOpened, OomKills),
    *(DiskUse, LeftoversFound, WorkspacesListed, QuotaFound, LayerUnpacked, LayerPacked, LayersCollected, Ok, Failed),
)

_ANSWER_CLASSES: dict[str, type] = {each.__name__: each for each in ANSWERS.classes}


def answer_class(request: type[Request[A]]) -> type[A]:
    """Return the class of the answer that a class of requests names."""
    (base,) = request.__orig_bases__  # type: ignore[attr-defined]  # set for every class with a generic base
    found: type[Any] = _ANSWER_CLASSES[get_args(base)[0].__forward_arg__]
    return found
