"""The builder's steps in a sandbox's namespaces: network, mounts, `/etc`, the new root. `build` has their order.

Real root performs them, in namespaces that the initial user namespace owns; PID 1 joins the session's own user
namespace only after that, so no capability inside reaches a mount, the host name or the network set-up again. No
foreign code runs here, and no name in an image is followed or trusted.
Sources: pivot_root(2) NOTES, user_namespaces(7), proc(5) hidepid.
"""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass

from nsinit.cgroup.tree import Tree
from nsinit.kernel import capabilities, mounts, stage, syscalls
from nsinit.kernel import constants as k
from nsinit.kernel.seccomp.filters import Filters
from nsinit.own_filters import PartFilters
from nsinit.sandbox import rootfs, views
from nsinit.steps import Crash, StepFailed
from nsinit.storage import shells
from nsinit.storage.layers import OPAQUE, LayerDirectory
from nsinit.storage.mechanism import DiskFacts, Mechanism
from nsinit.storage.paths import Layout, open_directory, open_in_root
from nsinit.storage.volumes import Volumes
from nsinit.wire import control
from nsinit.wire.control import RootId
from nsinit.wire.protocol import DiskLimits, IoLimits, SandboxPlan

JOINED = k.CLONE_NEWNS | k.CLONE_NEWNET | k.CLONE_NEWUTS
"""The namespaces of a sandbox that the builder works in."""

MASKED = (
    *("acpi", "asound", "buddyinfo", "bus/input", "cmdline", "config.gz", "diskstats", "driver", "fs", "interrupts"),
    *("iomem", "ioports", "kallsyms", "kcore", "key-users", "keys", "kmsg", "kpagecgroup", "kpagecount", "kpageflags"),
    *("latency_stats", "locks", "modules", "pagetypeinfo", "partitions", "pressure", "sched_debug", "schedstat"),
    *("scsi", "slabinfo", "softirqs", "sysrq-trigger", "timer_list", "timer_stats", "tty/driver", "vmallocinfo"),
    "zoneinfo",
)
"""Files of /proc that tell about the host and the work of neighbours, or reach the host. Many are unreadable for
unmapped ids: this is the second layer."""

_MASKED_DIRECTORIES = frozenset({"acpi", "asound", "bus/input", "driver", "fs", "pressure", "scsi", "tty/driver"})

_INERT_FLAGS = k.MS_NOSUID | k.MS_NODEV | k.MS_NOEXEC

READ_ONLY = ("sys", "irq", "bus")

HOST_USR = "/usr"
PRIVATE_DIRECTORY = "run/sandkasten"
SHELLS_DIRECTORY = f"{PRIVATE_DIRECTORY}/shells"
_RUN_BYTES, _PRIVATE_BYTES = 16 << 20, 64 << 20
_BYTES_PER_INODE, _MIN_INODES = 4096, 1024
_EMPTY_BYTES, _EMPTY_INODES = 64 << 10, 64
_TTY_GROUP = 5
_POINT = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class BuildFacts:
    """The facts about machine and configuration that hold for every session of this nsinit."""

    layout: Layout
    features: mounts.Features
    last_capability: int
    landlock_abi: int
    filters: Filters
    disk: Mechanism
    volumes: Volumes
    io: IoLimits
    io_disk: str
    terminals: int
    size: views.MachineSize
    tree: Tree
    crash: Crash | None = None
    """The crash point, if a test asked for one."""
    parts: PartFilters | None = None
    """The filters of nsinit and its helpers; None: they have none."""
    merge_pages: bool = False
    """Whether PID 1s offer their pages for merging."""


@dataclass(slots=True)
class SandboxBuild:
    """A sandbox while the builder works on it. Its descriptors are closed when the builder leaves."""

    machine: BuildFacts
    session_id: str
    base: int
    pidfd: int
    userns_fd: int
    system_userns_fd: int
    control: socket.socket
    disk: DiskLimits
    """Limits of the disk, unless the plan says otherwise."""
    processors: frozenset[int] = frozenset()
    workspace_userns_fd: int = -1
    root_fd: int = -1
    usr_fd: int = -1
    root_id: RootId = (0, 0)

    @property
    def hostname(self) -> str:
        return f"sk-{self.session_id[:8]}"

    def place(self, plan: SandboxPlan | None = None) -> DiskFacts:
        """Return the place of the disk, with the memory that it may be charged to once a plan is known."""
        memory_bytes = None if plan is None else plan.limits.memory_bytes
        return DiskFacts(self.machine.layout, self.session_id, self.base, memory_bytes)


# Blank sandbox: nothing of an image is needed or touched ---------------------------------------------------------


def join_namespaces(build: SandboxBuild) -> None:
    # By the pidfd all three are joined in one call, or none of them (setns(2)).
    try:
        syscalls.setns(build.pidfd, JOINED)
    except ProcessLookupError as error:
        raise StepFailed("child", "the child died without a word", errno=errno.ESRCH) from error


def make_disk(build: SandboxBuild) -> None:
    build.machine.disk.make(build.place(), build.disk)


def stage_dev(build: SandboxBuild) -> None:
    """Put the session's `/dev` together on the stage, in its own mount namespace."""
    machine, target = build.machine, f"{build.machine.layout.stage}/{stage.OWN_DEV}"
    # Not NODEV: the device nodes must work. Read-only: nobody can make others, and mknod(2) takes CAP_MKNOD anyway.
    attributes = k.MOUNT_ATTR_RDONLY | k.MOUNT_ATTR_NOSUID | k.MOUNT_ATTR_NOEXEC
    template = f"{machine.layout.stage}/{stage.DEV}"
    if machine.features.idmapped_tmpfs:
        mount_fd = mounts.clone_idmapped(template, build.userns_fd, attributes)
    else:
        mount_fd = mounts.clone(-1, template, attributes)
    mounts.attach(mount_fd, os.open(target, _POINT))
    # Each mount of devpts is an instance of its own since Linux 4.7 (devpts.rst): no terminal of the host is in it.
    options: dict[str, str | int] = {"ptmxmode": "0666", "mode": "0620", "gid": build.base + _TTY_GROUP}
    options["max"] = machine.terminals
    pts_fd = mounts.filesystem("devpts", k.MOUNT_ATTR_NOSUID | k.MOUNT_ATTR_NOEXEC, **options)
    mounts.attach(pts_fd, os.open(f"{target}/pts", _POINT))


def await_proc(build: SandboxBuild) -> None:
    """Wait until PID 1 has mounted `proc` on the stage."""
    control.wait_proc(build.control)


def staged_proc(build: SandboxBuild) -> str:
    """Return the path of the sandbox's own `proc`, before it is protected."""
    return f"{build.machine.layout.stage}/{stage.PROC}"


def protect_proc(build: SandboxBuild) -> None:
    """Cover what tells about the host or reaches it in the `proc` that PID 1 mounted on the stage.

    Read-only first: a mask put below a later bind would be covered by it. The working directory is that mount, where
    no name is an image's, so paths are safe here and take a third of the calls. A bind keeps the attributes of its
    source: masks are read-only and inert like the stage.
    """
    stage_path = build.machine.layout.stage
    os.chdir(staged_proc(build))
    for name in READ_ONLY:
        if _bind_if_present(name, name):
            # A bind ignores MS_RDONLY; a remount of it sets the flag on this mount alone (mount(2)).
            syscalls.mount("", name, flags=k.MS_REMOUNT | k.MS_BIND | k.MS_RDONLY | _INERT_FLAGS)
    for name in MASKED:
        template = stage.EMPTY_DIRECTORY if name in _MASKED_DIRECTORIES else stage.EMPTY_FILE
        _bind_if_present(f"{stage_path}/{template}", name)
    for template, name in stage.REPLACED.items():
        _bind_if_present(f"{stage_path}/{template}", name)
    os.chdir("/")


# The image --------------------------------------------------------------------------------------------------------


def fit_disk(build: SandboxBuild, plan: SandboxPlan) -> None:
    build.machine.disk.fit(build.place(plan), plan.disk)


def mount_root(build: SandboxBuild, plan: SandboxPlan) -> None:
    mount_fd = _overlay(build, _lowers(build.machine.layout, plan), "root", build.userns_fd)
    point = f"{build.machine.layout.stage}/{stage.ROOT}"
    mounts.attach(mount_fd, os.open(point, _POINT))
    build.root_fd = os.open(point, _POINT)


def find_root(build: SandboxBuild, plan: SandboxPlan) -> None:
    """Find the root of an image that was mounted by an earlier order, in a sandbox of the pool."""
    if build.root_fd < 0:
        build.root_fd = os.open(f"{build.machine.layout.stage}/{stage.ROOT}", _POINT)
        if plan.image_kind == "host":
            build.usr_fd = open_in_root(build.root_fd, "usr", _POINT)


def mount_empty_root(build: SandboxBuild, plan: SandboxPlan) -> None:
    """Mount an empty root, with room for mount points only."""
    point = f"{build.machine.layout.stage}/{stage.ROOT}"
    mounts.attach(_tmpfs(build, _EMPTY_BYTES, mode="0755", inodes=_EMPTY_INODES), os.open(point, _POINT))
    build.root_fd = os.open(point, _POINT)


def close_root(build: SandboxBuild, plan: SandboxPlan) -> None:
    syscalls.mount_setattr(build.root_fd, attr_set=k.MOUNT_ATTR_RDONLY)


def mount_usr(build: SandboxBuild, plan: SandboxPlan) -> None:
    """Mount the machine's own `/usr` below the image's, with only system ids mapped: uid 1000 there is a person, not
    the sandbox user.

    An id without a mapping is nobody's, no capability reaches past its mode, and no file of such an owner can be copied
    up.
    """
    if plan.image_kind == "host":
        lowers = f"{build.machine.layout.image_rootfs(plan.image)}{HOST_USR}", HOST_USR
        mount_fd = _overlay(build, lowers, "usr", build.system_userns_fd)
        mounts.attach(mount_fd, open_directory(build.root_fd, "usr", owner=build.base))
        build.usr_fd = open_in_root(build.root_fd, "usr", _POINT)


def place_proc(build: SandboxBuild, plan: SandboxPlan) -> None:
    """Move the staged `/proc` onto the image, with everything that is mounted in it; `place_dev` does the same for
    `/dev`."""
    mounts.attach(os.open(f"{build.machine.layout.stage}/{stage.PROC}", _POINT), _target(build, "proc"))


def place_dev(build: SandboxBuild, plan: SandboxPlan) -> None:
    mounts.attach(os.open(f"{build.machine.layout.stage}/{stage.OWN_DEV}", _POINT), _target(build, "dev"))
    shm_bytes = min(plan.shm_bytes, plan.limits.memory_bytes // 4)
    mounts.attach(_tmpfs(build, shm_bytes, inodes=plan.shm_inodes), open_in_root(build.root_fd, "dev/shm", _POINT))


def mount_sys(build: SandboxBuild, plan: SandboxPlan) -> None:
    """Mount a `/sys` with nothing in it but the session's own cgroups, read-only: clones of their directories, so that
    neither a file system nor a path of the machine is added.

    v1's cpuset is the machine's: its mount shows in the table, which is what runtimes look for, and is covered by a
    directory with its values.
    """
    tree, stage_path = build.machine.tree, build.machine.layout.stage
    mounts.attach(mounts.clone(-1, f"{stage_path}/{stage.SYS}", 0), _target(build, "sys"))
    shown = [*tree.visible(build.session_id).items()]
    if tree.cpuset:
        shown += [(stage.CPUSET, tree.cpuset), (stage.CPUSET, f"{stage_path}/{stage.CPUSET}")]
    for name, directory in shown:
        mount_fd = mounts.clone(-1, directory, k.MOUNT_ATTR_RDONLY | mounts.INERT)
        mounts.attach(mount_fd, open_in_root(build.root_fd, f"sys/fs/cgroup/{name}", _POINT))


def mount_views(build: SandboxBuild, plan: SandboxPlan) -> None:
    """Mount the files that tell of the session's memory and processors."""
    os.close(open_directory(build.root_fd, views.DIRECTORY, owner=0))
    contents = {**build.machine.size.views(plan.limits.memory_bytes, build.processors)}
    places = {**views.PLACES}
    if plan.readonly_rootfs:
        places |= views.RESOLVER
        contents |= dict.fromkeys(views.RESOLVER, rootfs.NO_RESOLVER.encode())
    views.write(build.root_fd, contents)
    for name, place in places.items():
        source_fd = open_in_root(build.root_fd, f"{views.DIRECTORY}/{name}")
        mount_fd = mounts.clone(source_fd, "", k.MOUNT_ATTR_RDONLY)
        os.close(source_fd)
        mounts.attach(mount_fd, open_in_root(build.root_fd, place))


def mount_tmp(build: SandboxBuild, plan: SandboxPlan) -> None:
    """Mount `/tmp`, at most half of the memory large: its pages are the session's, and a full `/tmp` must be "no space
    left", not an out-of-memory kill of PID 1."""
    size_bytes = min(plan.tmp_bytes, plan.limits.memory_bytes // 2)
    mounts.attach(_tmpfs(build, size_bytes, inodes=plan.tmp_inodes), _target(build, "tmp"))


def mount_run(build: SandboxBuild, plan: SandboxPlan) -> None:
    """Mount `/run`, and on it the runner's private directory, which commands can pass through but not list."""
    base = build.base
    share_bytes = plan.limits.memory_bytes // 8
    mounts.attach(_tmpfs(build, min(_RUN_BYTES, share_bytes), mode="0755"), _target(build, "run"))
    owner = base + capabilities.RUNNER_ID
    options: dict[str, str | int] = {
        "size": min(_PRIVATE_BYTES, share_bytes),
        "nr_inodes": 4096,
        "mode": "0711",
        "uid": owner,
        "gid": owner,
    }
    private_fd = mounts.filesystem("tmpfs", mounts.INERT, **options)
    mounts.attach(private_fd, open_directory(build.root_fd, PRIVATE_DIRECTORY, owner=base))


def mount_shells(build: SandboxBuild, plan: SandboxPlan) -> None:
    """Mount the image's shells that nobody can read. PID 1 opens the directory and takes it out of the mount table
    again: no host path shows there."""
    path = build.machine.layout.image_shells(plan.image)
    shells.keep(build.root_fd, path)
    mount_fd = mounts.clone_idmapped(path, build.userns_fd, k.MOUNT_ATTR_RDONLY | mounts.NOSUID_NODEV)
    mounts.attach(mount_fd, open_directory(build.root_fd, SHELLS_DIRECTORY, owner=build.base))


def make_user_directories(build: SandboxBuild, plan: SandboxPlan) -> None:
    rootfs.make_user_directories(build.root_fd, build.base, plan.account)


def mount_workspace(build: SandboxBuild, plan: SandboxPlan) -> None:
    if plan.workspace_id is not None:
        layout, volumes, is_draft = build.machine.layout, build.machine.volumes, plan.workspace_draft
        if volumes.has(plan.workspace_id, draft=is_draft):
            path = volumes.mount(layout.volume(plan.workspace_id, draft=is_draft))
        else:
            path = layout.workspace(plan.workspace_id, draft=is_draft)
        # The map knows the sandbox user and the squashed system ids: a file of any other owner is nobody's inside.
        mount_fd = mounts.clone_idmapped(path, build.workspace_userns_fd, mounts.NOSUID_NODEV)
        mounts.attach(mount_fd, _target(build, rootfs.WORKSPACE))


def write_etc(build: SandboxBuild, plan: SandboxPlan) -> None:
    rootfs.write_etc(build.root_fd, build.base, build.hostname, plan.account)


def make_read_only(build: SandboxBuild, plan: SandboxPlan) -> None:
    """Make the root read-only, after all mount points exist. Workspace and home become mounts of their own first, and
    stay writable."""
    if not plan.readonly_rootfs:
        return
    for path in (*rootfs.homes(plan.account), *([rootfs.WORKSPACE] if plan.workspace_id is None else [])):
        mounts.attach(mounts.clone(build.root_fd, path, 0), _target(build, path))
    for fd in (build.root_fd, build.usr_fd):
        if fd >= 0:
            syscalls.mount_setattr(fd, attr_set=k.MOUNT_ATTR_RDONLY)


def pivot(build: SandboxBuild, plan: SandboxPlan) -> None:
    """Make the built root the root of the namespace. The old root needs no directory to be put in, and no name of it is
    left."""
    root_fd = os.open(f"{build.machine.layout.stage}/{stage.ROOT}", os.O_RDONLY | os.O_DIRECTORY)
    os.fchdir(root_fd)
    # pivot_root(2), NOTES: with "." twice the old root is stacked on the new one, and "." is the old one afterwards.
    syscalls.pivot_root(".", ".")
    syscalls.umount2(".", k.MNT_DETACH)
    os.chdir("/")
    status = os.fstat(root_fd)
    build.root_id = status.st_dev, status.st_ino
    os.close(root_fd)


def _bind_if_present(source: str, target: str) -> bool:
    try:
        syscalls.mount(source, target, flags=k.MS_BIND)
    except FileNotFoundError:
        return False  # this kernel has no such file
    return True


def _lowers(layout: Layout, plan: SandboxPlan) -> tuple[str, ...]:
    """Return the directories of an image's layers, the topmost first, down to the first one that hides those below.
    Raises `StepFailed`: the image was replaced."""
    if plan.image_kind != "layers":
        return (layout.image_rootfs(plan.image),)
    # The shells were copied from the plan's layers, and root may have replaced the image since.
    if LayerDirectory(layout).layers_of(plan.image) != plan.layers:
        raise StepFailed("overlay root", f"image {plan.image!r} was replaced just now", errno=errno.ESTALE)
    lowers: list[str] = []
    for digest in reversed(plan.layers):
        lowers.append(layout.layer_files(digest))
        try:
            # overlayfs does not ask the top directory of a layer whether it hides those below.
            if os.getxattr(lowers[-1], OPAQUE) == b"y":
                break
        except OSError as error:
            if error.errno != errno.ENODATA:
                raise
    return tuple(lowers)


def _overlay(build: SandboxBuild, lower_paths: tuple[str, ...], name: str, userns_fd: int) -> int:
    machine = build.machine
    layers = mounts.OverlayParts(lower_paths, machine.disk.layers(build.place()), name, userns_fd)
    return mounts.overlay(layers, features=machine.features, stage_path=machine.layout.stage)


def _target(build: SandboxBuild, path: str) -> int:
    return open_directory(build.root_fd, path, owner=build.base)


def _tmpfs(build: SandboxBuild, size_bytes: int, *, mode: str = "1777", inodes: int = 0) -> int:
    base, inodes = build.base, inodes or max(size_bytes // _BYTES_PER_INODE, _MIN_INODES)
    options: dict[str, str | int] = {"size": size_bytes, "nr_inodes": inodes, "mode": mode, "uid": base, "gid": base}
    return mounts.filesystem("tmpfs", mounts.NOSUID_NODEV, **options)
