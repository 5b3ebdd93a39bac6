"""The cgroup maker: a process that makes sessions' cgroups and the run cgroups in them, and writes their limits.

A fork of nsinit that can do nothing else. Its root holds the cgroup file systems and nothing more; it has no network
and one capability, CAP_CHOWN, to give a run cgroup's file to PID 1. Orders are names and numbers: the maker builds each
path itself. A second reason: the kernel guards all cgroups of a machine by one lock, and nsinit's loop must not wait
for it. nsinit itself counts, empties and removes cgroups (`cgroup/session.py`, `cgroup/run_cgroups.py`) and lowers
limits (`limits.lower`). nsinit's side is `pool.HelperPool`. Sources: pivot_root(2); mount_namespaces(7);
capabilities(7).
"""

from __future__ import annotations

import gc
import os
import socket
from dataclasses import dataclass
from typing import NoReturn

from nsinit.cgroup import disk_io, limits, run_cgroups
from nsinit.cgroup.session import SessionCgroup
from nsinit.cgroup.tree import Located, Tree
from nsinit.helpers.pool import HelperKind
from nsinit.kernel import capabilities, stage, syscalls
from nsinit.kernel import constants as k
from nsinit.kernel.files import keep_only
from nsinit.kernel.mountinfo import is_below
from nsinit.own_filters import CGROUP_MAKER
from nsinit.sandbox import build
from nsinit.sandbox.builder_steps import BuildFacts
from nsinit.sandbox.crash_points import MAKER
from nsinit.steps import StepFailed, Steps
from nsinit.wire import control
from nsinit.wire.protocol import MAX_DATAGRAM_BYTES, Limits
from nsinit.wire.validate import InvalidName, check_limits, check_run_cgroup_name, check_session_id
from runner.wire.codec import Vocabulary

NAME = "nsinit-cgroups"
EMPTIER_NAME = "nsinit-emptier"
"""The names in `/proc/<pid>/comm`."""

_INERT = k.MS_NOSUID | k.MS_NODEV | k.MS_NOEXEC


@dataclass(frozen=True, slots=True)
class MakeCgroup:
    """Make a session's cgroup, with limits that hold before anything is in it."""

    session_id: str
    limits: Limits


@dataclass(frozen=True, slots=True)
class RaiseLimits:
    """Write limits that take nothing away, all or none."""

    session_id: str
    limits: Limits


@dataclass(frozen=True, slots=True)
class AddRunCgroup:
    """Make a run cgroup in a session's cgroup, for the PID 1 with ids from `base`."""

    session_id: str
    name: str
    base: int


@dataclass(frozen=True, slots=True)
class EmptyMemory:
    """Free the pages of files that are charged to the cgroup of a session that has ended."""

    session_id: str


Order = MakeCgroup | RaiseLimits | AddRunCgroup | EmptyMemory
ORDERS = Vocabulary(MakeCgroup, RaiseLimits, AddRunCgroup, EmptyMemory)
_LOWEST_PRIORITY = 19


def kind_of(machine: BuildFacts, tree: Tree, located: Located) -> HelperKind:
    """Return the kind of helper that the cgroup maker is. One is enough: the kernel makes one cgroup at a time."""

    def live(channel: socket.socket, parent_pid: int) -> NoReturn:
        _live(channel, machine, tree, mounts_of(tree, located), parent_pid, NAME)

    return HelperKind("cgroup maker", 1, ORDERS, live)


def emptier_kind_of(machine: BuildFacts, tree: Tree, located: Located) -> HelperKind:
    """Return the kind of helper that empties cgroups: the same, but of the lowest priority. The kernel may take seconds
    for it, and nobody who makes a session waits for them."""

    def live(channel: socket.socket, parent_pid: int) -> NoReturn:
        os.nice(_LOWEST_PRIORITY)
        _live(channel, machine, tree, mounts_of(tree, located), parent_pid, EMPTIER_NAME)

    return HelperKind("cgroup emptier", 1, ORDERS, live)


def mounts_of(tree: Tree, located: Located) -> tuple[str, ...]:
    """Return the mount points of the hierarchies that sessions have cgroups in."""
    points = {*located.v1_mounts.values(), located.unified_mount} - {None}
    return tuple(sorted(point for point in points if point and any(is_below(each, point) for each in tree.unique)))


def _live(
    channel: socket.socket, machine: BuildFacts, tree: Tree, mounts: tuple[str, ...], parent_pid: int, name: str
) -> NoReturn:
    """Serve until nsinit hangs up. Ends the process, always."""
    try:
        syscalls.end_with_parent(parent_pid)
        gc.freeze()  # a finalised object of nsinit's would close a descriptor number that is another file's here
        keep_only({0, 1, 2, channel.fileno()})
        syscalls.set_name(name)
        with Steps().step("jail of the cgroup maker"):
            _enter_jail(f"{machine.layout.stage}/{stage.ROOT}", mounts, machine.last_capability)
        if machine.parts is not None:
            machine.parts.enter(CGROUP_MAKER)
        channel.sendall(control.READY)
        while data := channel.recv(MAX_DATAGRAM_BYTES):
            channel.sendall(_serve(ORDERS.decode(data), tree, machine))
    except StepFailed as error:
        channel.sendall(control.describe(error))
    finally:
        os._exit(1)


def _enter_jail(root: str, mounts: tuple[str, ...], last_capability: int) -> None:
    """Change to a root that holds only the hierarchies, at their own paths. Every step must succeed."""
    syscalls.unshare(k.CLONE_NEWNS | k.CLONE_NEWNET | k.CLONE_NEWIPC | k.CLONE_NEWUTS)
    # Private: pivot_root(2) refuses a shared parent mount, and no mount made here may propagate to nsinit.
    syscalls.mount("", "/", flags=k.MS_REC | k.MS_PRIVATE)
    syscalls.mount("sandkasten", root, "tmpfs", _INERT, "mode=0555,size=64k,nr_inodes=64")
    for point in mounts:
        os.makedirs(f"{root}{point}")
        syscalls.mount(point, f"{root}{point}", flags=k.MS_BIND)
        # mount(2): MS_BIND ignores other flags, so a second call sets them.
        syscalls.mount("", f"{root}{point}", flags=k.MS_REMOUNT | k.MS_BIND | _INERT)
    syscalls.mount("", root, flags=k.MS_REMOUNT | k.MS_BIND | k.MS_RDONLY | _INERT)
    os.chdir(root)
    # pivot_root(2), NOTES: with the same directory twice the old root lies on top of the new one, to be detached there.
    syscalls.pivot_root(".", ".")
    syscalls.umount2(".", k.MNT_DETACH)
    os.chdir("/")
    # CAP_SETPCAP is what dropping the bounding set takes (prctl(2)); it goes with the next call.
    capabilities.keep_only(1 << k.CAP_CHOWN | 1 << k.CAP_SETPCAP, last_capability)
    syscalls.capset(1 << k.CAP_CHOWN)


def _serve(order: Order, tree: Tree, machine: BuildFacts) -> bytes:
    cgroup, steps = SessionCgroup(tree, order.session_id), Steps(MAKER, machine.crash)
    try:
        check_session_id(order.session_id)
        match order:
            case MakeCgroup():
                check_limits(order.limits)
                steps.run(build.CGROUP_STEPS, cgroup, order.limits)
                with steps.step("cgroup io"):
                    disk_io.write(cgroup, machine.io, machine.io_disk)
            case RaiseLimits():
                check_limits(order.limits)
                with steps.step("raise limits"):
                    limits.raise_to(cgroup, order.limits)
            case AddRunCgroup(_, name, base):
                check_run_cgroup_name(name)
                with steps.step("group"):
                    run_cgroups.make(cgroup, name, base)
            case EmptyMemory():
                with steps.step("empty memory"):
                    cgroup.empty_memory()
    except InvalidName as error:
        return control.describe(StepFailed("validate", str(error)))
    except StepFailed as error:
        return control.describe(error)
    return control.STATUS.encode(control.StepsDone(steps.timings_us))
