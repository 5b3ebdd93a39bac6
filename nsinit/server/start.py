"""The start of nsinit, on `Start`: claim cgroups and directories, leave the host's mount namespace, probe, fork
helpers.

Owns the lock that keeps two nsinits off one data directory. A failure names the step; directories made by then are
empty, or found again by the next start. nsinit mounts only in its own namespace, so no mount of its own is left.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from nsinit.cgroup import beside as beside_daemon
from nsinit.cgroup import disk_io
from nsinit.cgroup import tree as cgroup_tree
from nsinit.cgroup.tree import owner_of, read_owner, set_owner
from nsinit.helpers import bridge_maker, builder, cgroup_maker, network_maker
from nsinit.helpers.forker import Forker
from nsinit.helpers.pool import HelperPool
from nsinit.kernel import constants as k
from nsinit.kernel import landlock, mounts, slots, stage, syscalls
from nsinit.kernel.capabilities import NSINIT_CAPABILITIES, STORE_CAPABILITIES, keep_only, read_last_capability
from nsinit.kernel.seccomp.filters import prepare
from nsinit.log import log
from nsinit.own_filters import BRIDGE_MAKER, BUILDER, CGROUP_MAKER, NETWORK_MAKER, NSINIT, PartFilters
from nsinit.sandbox import builder_steps, child, views
from nsinit.sandbox.crash_points import all_points
from nsinit.scheduler import Scheduler
from nsinit.server import packing, unpacking
from nsinit.server.births import Births
from nsinit.server.bridges import Bridges, HostNetwork
from nsinit.server.disk_watch import DiskWatch
from nsinit.server.jails import Jails
from nsinit.server.kmsg import KernelLog
from nsinit.server.leftovers import HostView, Leftovers
from nsinit.server.memory_watch import LockWatch, OomScores
from nsinit.server.packing import Packing
from nsinit.server.sessions import Sessions, scan
from nsinit.server.unpacking import Unpacking
from nsinit.steps import Crash, StepFailed, Steps
from nsinit.storage import choose
from nsinit.storage.layers import LayerDirectory
from nsinit.storage.paths import Layout, check_owner_of
from nsinit.storage.volumes import Volumes
from nsinit.storage.workspaces import Workspaces
from nsinit.wire.launching import Grant
from nsinit.wire.protocol import BridgeTerms, OpenStore, Ready, Start
from nsinit.wire.validate import (
    InvalidName,
    check_bridge_terms,
    check_cgroup_parent,
    check_data_dir,
    check_disk_floor,
    check_io,
    check_node_id,
    check_terminals,
)

_LOCK_DEADLINE_S = 3.0
_LOCK_PAUSE_S = 0.02
_MERGING = "/sys/kernel/mm/ksm"
"""Is there where the kernel can merge pages (CONFIG_KSM)."""


@dataclass(frozen=True, slots=True)
class StartedNsinit:
    """The parts of nsinit that serve requests, and the lock on the data directory."""

    ready: Ready
    sessions: Sessions
    workspaces: Workspaces
    leftovers: Leftovers
    unpacking: Unpacking
    packing: Packing
    kernel_log: KernelLog
    lock_fd: int

    def stop(self) -> None:
        """End the helpers; remove the cgroup directories unless sessions live on in them."""
        births = self.sessions.births
        self.kernel_log.close()
        self.sessions.locks.close()
        self.sessions.oom_scores.close()
        self.sessions.disk_watch.close()
        self.sessions.builders.stop()
        births.cgroup_makers.stop()
        self.sessions.cgroup_emptiers.stop()
        self.sessions.network_makers.stop()
        self.sessions.bridges.stop()
        births.forker.stop()
        beside_daemon.sweep(self.leftovers.located, births.tree)
        cgroup_tree.release(births.tree, self.leftovers.located)
        births.slots.close()
        os.close(self.lock_fd)
        self.leftovers.host.close()


def start(request: Start, scheduler: Scheduler, runner: child.Runner, grant: Grant | None = None) -> StartedNsinit:
    """Do all of the start. Raises `StepFailed`."""
    with ExitStack() as undo:
        node = _start(request, scheduler, runner, grant, undo)
        undo.pop_all()
    return node


@dataclass(frozen=True, slots=True)
class _Terms:
    """The request of a start as checked, cut to what the grant allows."""

    layout: Layout
    crash: Crash | None
    bridge: BridgeTerms | None
    merges_pages: bool
    has_own_filters: bool
    cgroup_parent: str
    beside: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Host:
    """Views of the machine that are opened before nsinit leaves the host's mount namespace."""

    view: HostView
    network: HostNetwork
    io_disk: str
    merges_pages: bool
    locks: LockWatch
    disk_watch: DiskWatch


@dataclass(frozen=True, slots=True)
class _Cgroups:
    """The tree that nsinit has claimed for the sessions, and the place of this process."""

    located: cgroup_tree.Located
    name: str
    tree: cgroup_tree.Tree
    oom_scores: OomScores


@dataclass(frozen=True, slots=True)
class _Helpers:
    """The pools of helpers, those forked and those forked when they are first needed."""

    builders: HelperPool
    cgroup_makers: HelperPool
    cgroup_emptiers: HelperPool
    network_makers: HelperPool
    bridges: Bridges
    forker: Forker


def _start(
    request: Start, scheduler: Scheduler, runner: child.Runner, grant: Grant | None, undo: ExitStack
) -> StartedNsinit:
    steps = Steps()
    with steps.step("validate"):
        terms = _check(request, grant)
        layout = terms.layout
    with steps.step("seccomp profiles"):
        filters = prepare(request.seccomp_profiles)
    with steps.step("host view"):
        host = _open_host(request, terms, undo)
    disks, volumes = choose.candidates(layout, request.disk), Volumes(layout, host.view.blocks_fd)
    with steps.step("data directory"):
        layout.make()
        lock_fd = _lock(layout.run)
    with steps.step("lease of ids"):
        lease = slots.RangeLocks()
        undo.callback(lease.close)
    with steps.step("cgroups"):
        cgroups = _claim_cgroups(request, terms, host.io_disk, undo)
        tree = cgroups.tree
    kernel_log = KernelLog()
    undo.callback(kernel_log.close)
    with steps.step("capabilities"):
        last_capability = read_last_capability()
        keep_only(NSINIT_CAPABILITIES, last_capability)
    with steps.step("namespaces"):
        _leave_host(layout, host.view, tree)
    with steps.step("stage"):
        size = _make_stage(layout, tree)
    with steps.step("disk"):
        disk, refused = choose.choose(layout, request.disk, disks)
        volumes.open(disk.mode, refused)
    with steps.step("id slots"):
        # Sessions that an earlier nsinit built and that still run have their slots.
        living = {each.session_id: each.identity for each in scan(tree, layout)[0] if each.identity is not None}
        taken = frozenset(each.base_uid for each in living.values())
        table = slots.SlotTable(lease, reserved=slots.read_reserved_ranges(), taken=taken)
        slot = table.take()
    with steps.step("features"):
        features = mounts.probe_features(layout.stage, slot.userns_fd)
        own = NSINIT, BUILDER, CGROUP_MAKER, NETWORK_MAKER, BRIDGE_MAKER
        powers = last_capability, landlock.probe_abi(), filters
        shared = request.io, host.io_disk, request.terminals
        asked = terms.crash, PartFilters(*own) if terms.has_own_filters else None, host.merges_pages
        machine = builder_steps.BuildFacts(layout, features, *powers, disk, volumes, *shared, size, tree, *asked)
    table.free(slot)
    with steps.step("helpers"):
        helpers = _start_helpers(machine, cgroups, host, terms, scheduler, runner)
    if machine.parts is not None:
        with steps.step("own filter"):  # after the seed of the forkers, which what runs in sandboxes descends from
            machine.parts.enter(NSINIT)
    else:
        log("warning", "no filter of nsinit's own system calls")
    store = LayerDirectory(layout, terms.crash)
    births = Births(machine, tree, table, helpers.forker, helpers.cgroup_makers)
    makers = helpers.builders, helpers.cgroup_emptiers, helpers.network_makers, helpers.bridges
    watches = host.locks, cgroups.oom_scores, host.disk_watch
    find_mounts = partial(host.view.find_mounts, layout)
    sessions = Sessions(births, *makers, scheduler, kernel_log, *watches, store, find_mounts)
    sessions.watch()  # those that an earlier nsinit built
    scheduler.spawn(helpers.bridges.sweep(living))
    leftovers = Leftovers(tree, layout, cgroups.located, cgroups.name, host.view)
    workspaces = Workspaces(layout, volumes, terms.crash)
    ready = _ready(request, machine, host, refused)
    return StartedNsinit(ready, sessions, workspaces, leftovers, *_work_on(store, scheduler), kernel_log, lock_fd)


def _check(request: Start, grant: Grant | None) -> _Terms:
    """Check every field of the request, and what the grant allows of it. Raises `InvalidName`, `NotGranted`."""
    if grant is not None:
        grant.check(request.data_dir, request.cgroup_parent)
        grant.allowance.check_profiles(request.seccomp_profiles)
    check_data_dir(request.data_dir)
    # The real path: mount tables know no other, and points in them are compared with paths of the layout.
    layout = Layout(os.path.realpath(request.data_dir), grant.gid if grant else 0)
    check_node_id(request.node_id)
    check_cgroup_parent(request.cgroup_parent)
    check_io(request.io)
    check_terminals(request.terminals)
    check_disk_floor(request.disk_floor_bytes)
    bridge = request.bridge if grant is None else grant.allowance.bridge
    if bridge is not None:
        check_bridge_terms(bridge)
    crash = _crash(request.crash_at, grant)
    merges_pages = request.merge_pages and (grant is None or grant.allowance.merge_pages)
    has_own_filters = request.own_filters if grant is None else grant.own_filters
    beside, parent = (grant.beside, grant.cgroup_parent) if grant else ((), request.cgroup_parent)
    return _Terms(layout, crash, bridge, merges_pages, has_own_filters, parent, beside)


def _open_host(request: Start, terms: _Terms, undo: ExitStack) -> _Host:
    """Open what is to be read of the machine later. nsinit's own mounts show no `/sys`."""
    view = HostView.open()
    undo.callback(view.close)
    network = HostNetwork.open(request.node_id, terms.bridge)
    undo.callback(network.close)
    io_disk = disk_io.find_disk(terms.layout.data_dir)
    merges_pages = terms.merges_pages and os.path.exists(_MERGING)
    locks = LockWatch.open()
    undo.callback(locks.close)
    disk_watch = DiskWatch.open(terms.layout, view.blocks_fd, request.disk_floor_bytes)
    undo.callback(disk_watch.close)
    return _Host(view, network, io_disk, merges_pages, locks, disk_watch)


def _claim_cgroups(request: Start, terms: _Terms, io_disk: str, undo: ExitStack) -> _Cgroups:
    """Make the node's cgroups, and bound all sessions together. Raises `StepFailed`, `CgroupsUnusable`, `OSError`."""
    located = cgroup_tree.locate_process()
    name = cgroup_tree.name_of_node(request.node_id)
    tree = cgroup_tree.claim(located, name=name, parent=terms.cgroup_parent, beside=terms.beside)
    undo.callback(cgroup_tree.release, tree, located)
    beside_daemon.sweep(located, tree)
    disk_io.check(tree, request.io, io_disk)
    _own(tree, terms.layout)
    cgroup_tree.bound_pids(tree)
    oom_scores = OomScores.open(tree)
    undo.callback(oom_scores.close)
    return _Cgroups(located, name, tree, oom_scores)


def _leave_host(layout: Layout, view: HostView, tree: cgroup_tree.Tree) -> None:
    """Enter namespaces of nsinit's own, with the mounts alone that its work needs."""
    needed = layout.data_dir, builder_steps.HOST_USR, "/proc", *tree.unique, *([tree.cpuset] if tree.cpuset else [])
    needed += _program()
    # A mount on a place itself may be the disk for it, and stays.
    unwanted = {each for each in view.find_mounts(layout) if os.path.dirname(each) != layout.data_dir}
    stage.enter_own_namespaces(needed, unwanted)


def _make_stage(layout: Layout, tree: cgroup_tree.Tree) -> views.MachineSize:
    """Make the directory that roots of sandboxes are mounted in; return the machine's files that sandboxes see cut."""
    stage.make_stage(layout.stage, hierarchies=[name for name in tree.visible("") if name], cpuset=tree.cpuset)
    with open(f"{layout.stage}/stat", "rb") as file:
        return views.read_machine_size(file.read())


def _start_helpers(
    machine: builder_steps.BuildFacts,
    cgroups: _Cgroups,
    host: _Host,
    terms: _Terms,
    scheduler: Scheduler,
    runner: child.Runner,
) -> _Helpers:
    """Fork the helpers that every session needs, and the forker of the others. Raises `StepFailed`."""
    tree, located = cgroups.tree, cgroups.located
    builders = HelperPool(builder.kind_of(machine), scheduler)
    builders.start()
    cgroup_makers = HelperPool(cgroup_maker.kind_of(machine, tree, located), scheduler)
    cgroup_makers.start()
    cgroup_emptiers = HelperPool(cgroup_maker.emptier_kind_of(machine, tree, located), scheduler)
    cgroup_emptiers.start()
    forker = Forker(machine, runner)
    network_makers = HelperPool(network_maker.kind_of(machine, forker.fork_network_maker), scheduler)
    bridge_makers = HelperPool(bridge_maker.kind_of(machine, forker.fork_bridge_maker), scheduler)
    bridges = Bridges(bridge_makers, host.network, terms.bridge)
    return _Helpers(builders, cgroup_makers, cgroup_emptiers, network_makers, bridges, forker)


def _ready(request: Start, machine: builder_steps.BuildFacts, host: _Host, refused: dict[str, str]) -> Ready:
    """Return the answer to the request. `refused`: the disk mechanisms that were tried before, with reasons."""
    features = {
        "overlay_by_fd": machine.features.overlay_by_fd,
        "idmapped_tmpfs": machine.features.idmapped_tmpfs,
        "record_locks": host.locks.count_fd >= 0,
        "disk_floor": host.disk_watch.is_able,
        "merge_pages": host.merges_pages,
    }
    return Ready(
        seq=request.seq,
        pid=os.getpid(),
        cgroup_mode=machine.tree.mode,
        cgroup_dirs=machine.tree.dirs,
        features=features | landlock.features(machine.landlock_abi),
        disk=machine.disk.mode,
        disk_refused=refused,
    )


@dataclass(frozen=True, slots=True)
class OpenedStore:
    """An nsinit that serves layers and images alone."""

    unpacking: Unpacking
    packing: Packing


def open_store(request: OpenStore, scheduler: Scheduler, grant: Grant | None) -> OpenedStore:
    """Prepare for requests about layers and images; no session can be made. Raises `StepFailed`."""
    steps = Steps()
    with steps.step("validate"):
        if grant is not None:
            raise InvalidName("only root may open the store")
        check_data_dir(request.data_dir)
        layout, crash = Layout(request.data_dir), _crash(request.crash_at, None)
    with steps.step("data directory"):
        # No link is on the way there, and the directory is root's: no other user could have put another in its place.
        fd = syscalls.openat2(k.AT_FDCWD, request.data_dir, os.O_PATH | os.O_DIRECTORY, resolve=k.RESOLVE_NO_SYMLINKS)
        try:
            check_owner_of(fd, request.data_dir)
        finally:
            os.close(fd)
        layout.make_store()
    with steps.step("capabilities"):
        syscalls.unshare(k.CLONE_NEWNET | k.CLONE_NEWIPC | k.CLONE_NEWUTS)
        keep_only(STORE_CAPABILITIES, read_last_capability())
    store = LayerDirectory(layout, crash)
    with steps.step("sweep"):
        store.share()
        scheduler.spawn(store.empty_trash())
    return OpenedStore(*_work_on(store, scheduler))


def _work_on(store: LayerDirectory, scheduler: Scheduler) -> tuple[Unpacking, Packing]:
    return (
        Unpacking(store, Jails(scheduler, unpacking.STAGE, unpacking.MAX_JAILS)),
        Packing(store, *(Jails(scheduler, packing.STAGE, packing.MAX_JAILS) for _ in range(2))),
    )


def _program() -> tuple[str, ...]:
    """Return where this program, its interpreter and its libraries are: the unpacker is started from there."""
    return tuple({os.path.realpath(each) for each in (sys.executable, sys.prefix, sys.base_prefix, __file__)})


def _crash(at: str, grant: Grant | None) -> Crash | None:
    """Return the crash point of a request, None without. Raises `InvalidName`: not allowed, or there is none."""
    if not at:
        return None
    if grant is not None:
        raise InvalidName("only a daemon that is root may ask for a crash")
    if not re.fullmatch(r"[^:]+(:[1-9][0-9]{0,5})?", at) or at.partition(":")[0] not in all_points():
        raise InvalidName(f"there is no crash point {at[:80]!r}")
    return Crash(at)


def _own(tree: cgroup_tree.Tree, layout: Layout) -> None:
    """Make the cgroups known as this data directory's. Raises `StepFailed` if another one's sessions are in them."""
    owner = owner_of(layout.data_dir)
    for directory in tree.unique:
        if read_owner(directory) not in ("", owner) and cgroup_tree.has_sessions(directory):
            message = (
                "sessions of another data directory with the same node id run here; if this one is a copy, remove its "
                "`node-id` and its database"
            )
            raise StepFailed("cgroups", message, path=directory, errno=errno.EEXIST)
        set_owner(directory, owner)


def _lock(path: str) -> int:
    """Lock the data directory and return the descriptor that holds the lock. Waits for an nsinit that is just ending.

    Raises:
        StepFailed: another nsinit keeps the lock for longer than `_LOCK_DEADLINE_S`.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = time.monotonic() + _LOCK_DEADLINE_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise StepFailed("data directory", "another nsinit works on this data directory", path=path) from None
            time.sleep(_LOCK_PAUSE_S)
        else:
            return fd
