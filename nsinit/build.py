"""THE order in which a sandbox is built. Runs in the child, as its first and only program until the runner takes over.

Three lists of named steps: what needs no image (a blank vessel waits after it), what mounts the image, and what gives
power away. Real root does the mounting, in namespaces that the initial user namespace owns, and the session's own user
namespace is joined only after that: no capability inside reaches a mount, the host name or the network set-up again.
There is no "warn and continue" here: a step that fails ends the build, named with its path and errno.
Sources: clone(2), pivot_root(2) NOTES, user_namespaces(7), capabilities(7), proc(5) hidepid.
"""

from __future__ import annotations

import gc
import linecache
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from nsinit import capabilities, mounts, network, rootfs, stage, syscalls
from nsinit import constants as k
from nsinit.paths import Layout, open_directory, open_in_root
from nsinit.protocol import SandboxPlan
from nsinit.slots import Slot
from nsinit.steps import Steps

MASKED = (
    *("acpi", "asound", "bus/input", "cmdline", "config.gz", "driver", "fs/nfsd", "interrupts", "iomem", "ioports"),
    *("kallsyms", "kcore", "key-users", "keys", "kmsg", "kpagecgroup", "kpagecount", "kpageflags", "latency_stats"),
    *("modules", "pagetypeinfo", "sched_debug", "scsi", "slabinfo", "sysrq-trigger", "timer_list", "timer_stats"),
    *("tty/driver", "vmallocinfo", "zoneinfo"),
)
"""What of /proc tells about the host or reaches it. Most is unreadable for unmapped ids: this is the second layer."""

_MASKED_DIRECTORIES = frozenset({"acpi", "asound", "bus/input", "driver", "fs/nfsd", "scsi", "tty/driver"})

_INERT_FLAGS = k.MS_NOSUID | k.MS_NODEV | k.MS_NOEXEC

READ_ONLY = ("sys", "irq", "bus", "fs")

HOST_USR = "/usr"
PRIVATE_DIRECTORY = "run/sandkasten"
_RUN_BYTES, _PRIVATE_BYTES = 16 << 20, 64 << 20
_BYTES_PER_INODE, _MIN_INODES = 4096, 1024
_TTY_GROUP = 5

_LIMITS = (
    # CORE is 1: with a `|pipe` core_pattern the kernel ignores 0 and starts the host's handler as root; 1 means none.
    (resource.RLIMIT_CORE, 1, 1),
    (resource.RLIMIT_NOFILE, 1024, 65536),
    (resource.RLIMIT_MEMLOCK, 8 << 20, 8 << 20),
    (resource.RLIMIT_STACK, 8 << 20, resource.RLIM_INFINITY),
    (resource.RLIMIT_MSGQUEUE, 819200, 819200),
    (resource.RLIMIT_SIGPENDING, 4096, 4096),
)


@dataclass(frozen=True, slots=True)
class Machine:
    """What holds for every session of this nsinit."""

    layout: Layout
    features: mounts.Features
    last_capability: int


@dataclass(slots=True)
class Box:
    """One sandbox while it is being built."""

    machine: Machine
    session_id: str
    slot: Slot
    attach_files: tuple[str, ...]
    listener_fd: int
    control_fd: int
    plan: SandboxPlan | None = None
    """Known before the clone unless this is a prepared vessel; that one gets it over the control socket."""
    workspace_userns_fd: int = -1
    root_fd: int = -1
    usr_fd: int = -1
    steps: Steps = field(default_factory=Steps)

    @property
    def hostname(self) -> str:
        return f"sk-{self.session_id[:8]}"

    @property
    def kept_fds(self) -> set[int]:
        """What the child needs of nsinit's descriptors; the rest is closed first thing."""
        fds = {0, 1, 2, self.listener_fd, self.control_fd, self.slot.userns_fd}
        return fds | ({self.workspace_userns_fd} if self.workspace_userns_fd >= 0 else set())


# Blank vessel: nothing of an image is needed or touched ----------------------------------------------------------


def _arm_parent_death(box: Box) -> None:
    syscalls.prctl(k.PR_SET_PDEATHSIG, signal.SIGKILL)
    gc.disable()


def _close_inherited(box: Box) -> None:
    keep_only(box.kept_fds)


def _attach_cgroups(box: Box) -> None:
    """Before the cgroup namespace, so that the session sees itself at `/`."""
    for path in box.attach_files:
        network.write_file(path, "0")


def _set_oom_score(box: Box) -> None:
    """Don't inherit a protection the daemon may have; the runner raises it for commands."""
    with open("/proc/self/oom_score_adj", "r+b", buffering=0) as file:
        if int(file.read()) < 0:
            file.write(b"0")


def _set_limits(box: Box) -> None:
    for kind, soft, hard in _LIMITS:
        ceiling = resource.getrlimit(kind)[1]
        hard = hard if ceiling == resource.RLIM_INFINITY else ceiling if hard == -1 else min(hard, ceiling)
        resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


Step = tuple[str, Callable[[Box], object]]

BLANK_STEPS: tuple[Step, ...] = (
    ("parent death signal", _arm_parent_death),
    ("close inherited", _close_inherited),
    ("setsid", lambda box: os.setsid()),
    ("cgroup attach", _attach_cgroups),
    ("cgroup namespace", lambda box: syscalls.unshare(k.CLONE_NEWCGROUP)),
    ("hostname", lambda box: syscalls.sethostname(box.hostname)),
    ("private mounts", lambda box: syscalls.mount("", "/", flags=k.MS_REC | k.MS_PRIVATE)),
    ("network settings", lambda box: network.write_settings(box.slot.base)),
    ("loopback", lambda box: network.loopback_up()),
    ("oom score", _set_oom_score),
    ("rlimits", _set_limits),
)


# The image: real root, no foreign code in any of these namespaces -------------------------------------------------


def _make_session_directories(box: Box, plan: SandboxPlan) -> None:
    names = ("root", "usr") if plan.image_kind == "host" else ("root",)
    rootfs.make_session_directories(box.machine.layout.session(plan.session_id), names, box.slot.base)


def _mount_root(box: Box, plan: SandboxPlan) -> None:
    mount_fd = _overlay(box, plan, lower_path=box.machine.layout.image_rootfs(plan.image), name="root")
    point = f"{box.machine.layout.stage}/{stage.ROOT}"
    mounts.attach(mount_fd, os.open(point, os.O_PATH | os.O_DIRECTORY))
    box.root_fd = os.open(point, os.O_PATH | os.O_DIRECTORY)


def _mount_usr(box: Box, plan: SandboxPlan) -> None:
    if plan.image_kind == "host":
        mount_fd = _overlay(box, plan, lower_path=HOST_USR, name="usr")
        mounts.attach(mount_fd, open_directory(box.root_fd, "usr", owner=box.slot.base))
        box.usr_fd = open_in_root(box.root_fd, "usr", os.O_PATH | os.O_DIRECTORY)


def _overlay(box: Box, plan: SandboxPlan, *, lower_path: str, name: str) -> int:
    machine = box.machine
    layers = mounts.Layers(lower_path, machine.layout.session(plan.session_id), name, box.slot.userns_fd)
    return mounts.overlay(layers, features=machine.features, stage_path=machine.layout.stage)


def _mount_proc(box: Box, plan: SandboxPlan) -> None:
    """PID 1 is in the group that sees all processes; commands see their own uid's, so `/proc/1` isn't there."""
    group = box.slot.base + capabilities.RUNNER_ID
    mount_fd = mounts.filesystem("proc", mounts.INERT, hidepid="invisible", gid=group)
    mounts.attach(mount_fd, _target(box, "proc"))


def _mount_dev(box: Box, plan: SandboxPlan) -> None:
    base, machine = box.slot.base, box.machine
    path = f"{machine.layout.stage}/{stage.DEV}"
    attributes = k.MOUNT_ATTR_RDONLY | k.MOUNT_ATTR_NOSUID | k.MOUNT_ATTR_NOEXEC
    if machine.features.idmapped_tmpfs:
        mount_fd = mounts.clone_idmapped(path, box.slot.userns_fd, attributes)
    else:
        mount_fd = mounts.clone(-1, path, attributes)
    mounts.attach(mount_fd, _target(box, "dev"))
    options: dict[str, str | int] = {"ptmxmode": "0666", "mode": "0620", "gid": base + _TTY_GROUP, "max": 64}
    pts_fd = mounts.filesystem("devpts", k.MOUNT_ATTR_NOSUID | k.MOUNT_ATTR_NOEXEC, **options)
    mounts.attach(pts_fd, open_in_root(box.root_fd, "dev/pts", os.O_PATH | os.O_DIRECTORY))
    shm_bytes = min(plan.shm_bytes, plan.limits.memory_bytes // 4)
    mounts.attach(_tmpfs(box, shm_bytes), open_in_root(box.root_fd, "dev/shm", os.O_PATH | os.O_DIRECTORY))


def _mount_tmp(box: Box, plan: SandboxPlan) -> None:
    """Its pages are the session's memory: a full /tmp must be "no space left", not an out-of-memory kill of PID 1."""
    mounts.attach(_tmpfs(box, min(plan.tmp_bytes, plan.limits.memory_bytes // 2)), _target(box, "tmp"))


def _mount_run(box: Box, plan: SandboxPlan) -> None:
    """`/run`, and on it the runner's private directory, which commands can pass through but not list."""
    base = box.slot.base
    share_bytes = plan.limits.memory_bytes // 8
    mounts.attach(_tmpfs(box, min(_RUN_BYTES, share_bytes), mode="0755"), _target(box, "run"))
    owner = base + capabilities.RUNNER_ID
    options: dict[str, str | int] = {
        "size": min(_PRIVATE_BYTES, share_bytes),
        "nr_inodes": 4096,
        "mode": "0711",
        "uid": owner,
        "gid": owner,
    }
    private_fd = mounts.filesystem("tmpfs", mounts.INERT, **options)
    mounts.attach(private_fd, open_directory(box.root_fd, PRIVATE_DIRECTORY, owner=base))


def _make_user_directories(box: Box, plan: SandboxPlan) -> None:
    rootfs.make_user_directories(box.root_fd, box.slot.base)


def _mount_workspace(box: Box, plan: SandboxPlan) -> None:
    if plan.workspace_id is not None:
        path = box.machine.layout.workspace(plan.workspace_id)
        mount_fd = mounts.clone_idmapped(path, box.workspace_userns_fd, mounts.NOSUID_NODEV)
        mounts.attach(mount_fd, _target(box, rootfs.WORKSPACE))


def _protect_proc(box: Box, plan: SandboxPlan) -> None:
    """Read-only first: a mask put below a later bind would be covered by it.

    The working directory is the proc mount made above, where no name is an image's, so paths are safe here and take a
    third of the calls. A bind keeps the attributes of its source: masks are read-only and inert like the stage.
    """
    stage_path = box.machine.layout.stage
    os.chdir(f"{stage_path}/{stage.ROOT}/proc")
    for name in READ_ONLY:
        if _bind_if_present(name, name):
            syscalls.mount("", name, flags=k.MS_REMOUNT | k.MS_BIND | k.MS_RDONLY | _INERT_FLAGS)
    for name in MASKED:
        template = stage.EMPTY_DIRECTORY if name in _MASKED_DIRECTORIES else stage.EMPTY_FILE
        _bind_if_present(f"{stage_path}/{template}", name)
    os.chdir("/")


def _bind_if_present(source: str, target: str) -> bool:
    try:
        syscalls.mount(source, target, flags=k.MS_BIND)
    except FileNotFoundError:
        return False  # this kernel has no such file
    return True


def _write_etc(box: Box, plan: SandboxPlan) -> None:
    rootfs.write_etc(box.root_fd, box.slot.base, box.hostname)


def _make_read_only(box: Box, plan: SandboxPlan) -> None:
    """After all mount points exist. Workspace and home become mounts of their own first, and stay writable."""
    if not plan.readonly_rootfs:
        return
    for path in (rootfs.HOME, *([rootfs.WORKSPACE] if plan.workspace_id is None else [])):
        mounts.attach(mounts.clone(box.root_fd, path, 0), _target(box, path))
    for fd in (box.root_fd, box.usr_fd):
        if fd >= 0:
            syscalls.mount_setattr(fd, attr_set=k.MOUNT_ATTR_RDONLY)


def _pivot(box: Box, plan: SandboxPlan) -> None:
    """The old root goes below the new one on the same spot and is detached: no directory is needed, no name is left."""
    root_fd = os.open(f"{box.machine.layout.stage}/{stage.ROOT}", os.O_RDONLY | os.O_DIRECTORY)
    os.fchdir(root_fd)
    syscalls.pivot_root(".", ".")
    syscalls.umount2(".", k.MNT_DETACH)
    os.chdir("/")
    os.close(root_fd)


PlanStep = tuple[str, Callable[[Box, SandboxPlan], object]]

IMAGE_STEPS: tuple[PlanStep, ...] = (
    ("session directories", _make_session_directories),
    ("overlay root", _mount_root),
    ("overlay usr", _mount_usr),
    ("proc", _mount_proc),
    ("dev", _mount_dev),
    ("tmp", _mount_tmp),
    ("run", _mount_run),
    ("user directories", _make_user_directories),
    ("workspace", _mount_workspace),
    ("protect proc", _protect_proc),
    ("etc", _write_etc),
    ("read-only root", _make_read_only),
    ("pivot root", _pivot),
)


# Power: from joining the user namespace on, nothing of the above can be done or undone ---------------------------


def _close_for_runner(box: Box) -> None:
    """The last barrier for descriptors: with no exec, no close-on-exec flag ever acts (CVE-2024-21626)."""
    keep_only({0, 1, 2, box.listener_fd, box.control_fd, box.slot.userns_fd})


def _silence_standard_streams(box: Box) -> None:
    """`/dev` is ours, and this one shows as `/dev/null` in `/proc/self/fd`: no host path, no log pipe goes inside."""
    null_fd = os.open("/dev/null", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    for fd in (0, 1, 2):
        os.dup2(null_fd, fd)
    os.close(null_fd)


def _join_user_namespace(box: Box) -> None:
    syscalls.setns(box.slot.userns_fd, k.CLONE_NEWUSER)
    os.close(box.slot.userns_fd)


def lock_imports() -> None:
    """Make every import of a module that isn't loaded fail: after pivot_root it would read, and run, the image's files.

    nsinit does this to itself before it forks anything, so in a child it only makes sure (and costs nothing).
    """
    for entries in (sys.path, sys.meta_path, sys.path_hooks):
        entries.clear()
    sys.path_importer_cache.clear()
    linecache.getlines = lambda *_args, **_kwargs: []


POWER_STEPS: tuple[Step, ...] = (
    ("close descriptors", _close_for_runner),
    ("standard streams", _silence_standard_streams),
    ("user namespace", _join_user_namespace),
    ("bounding set", lambda box: capabilities.drop_bounding_set(box.machine.last_capability)),
    ("runner id", lambda box: capabilities.become_runner()),
    ("capabilities", lambda box: capabilities.keep_runner_capabilities()),
    ("keyring", lambda box: syscalls.join_session_keyring()),
    ("not dumpable", lambda box: syscalls.prctl(k.PR_SET_DUMPABLE, 0)),
    ("import lockdown", lambda box: lock_imports()),
)
"""The place of Landlock, then of the system call filter, is after the last of these: PID 1 lives under both, and no
step above must need a hole in them."""


def prepare(box: Box) -> None:
    """Do everything that needs no image. Raises `StepFailed`."""
    box.steps.run(BLANK_STEPS, box)


def furnish(box: Box, plan: SandboxPlan) -> None:
    """Mount the image and give power away. Afterwards only the runner may run. Raises `StepFailed`."""
    box.steps.run(IMAGE_STEPS, box, plan)
    box.steps.run(POWER_STEPS, box)


def keep_only(fds: set[int]) -> None:
    """Close every descriptor that is not in `fds`."""
    first = 0
    for fd in sorted(fds):
        if fd > first:
            syscalls.close_range(first, fd - 1)
        first = fd + 1
    syscalls.close_range(first)


def _target(box: Box, path: str) -> int:
    return open_directory(box.root_fd, path, owner=box.slot.base)


def _tmpfs(box: Box, size_bytes: int, mode: str = "1777") -> int:
    base, inodes = box.slot.base, max(size_bytes // _BYTES_PER_INODE, _MIN_INODES)
    options: dict[str, str | int] = {"size": size_bytes, "nr_inodes": inodes, "mode": mode, "uid": base, "gid": base}
    return mounts.filesystem("tmpfs", mounts.NOSUID_NODEV, **options)
