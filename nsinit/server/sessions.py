"""The operations on sessions: prepare, build, attach, scan, limit, tear down. Each is a job for the scheduler.

Owns the processes of the sessions that this nsinit made, and the sandboxes of the pool. A failed build leaves nothing;
a teardown is idempotent and right for half-built, foreign and already dead sessions. No function waits in place. About
a session of an earlier nsinit only the kernel and the disk are asked.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

from nsinit.cgroup import freezer, limits, run_cgroups
from nsinit.cgroup.identity import find_identity, open_network, open_root, open_verified, require_identity
from nsinit.cgroup.session import Counters, SessionCgroup
from nsinit.cgroup.stopping import stop_processes
from nsinit.cgroup.tree import Tree
from nsinit.helpers.builder import Order, Stage
from nsinit.helpers.cgroup_maker import AddRunCgroup, EmptyMemory, RaiseLimits
from nsinit.helpers.network_maker import MakeSockets, OpenWayOut
from nsinit.helpers.pool import HelperPool, OrderOutcome
from nsinit.kernel import syscalls
from nsinit.log import log
from nsinit.sandbox import network, rootfs, views
from nsinit.scheduler import Job, JobEvent, Scheduler, Wait
from nsinit.server.births import Births, InitProcess, UnfinishedSandbox
from nsinit.server.bridges import Bridges
from nsinit.server.disk_watch import DiskWatch
from nsinit.server.filling import Filling
from nsinit.server.kmsg import KernelLog, Kills
from nsinit.server.memory_watch import LockWatch, OomScores, Pace
from nsinit.server.processors import Processors, bind, bind_all
from nsinit.steps import StepFailed, failure_of, passing
from nsinit.storage import trash
from nsinit.storage.layers import LayerDirectory
from nsinit.storage.mechanism import CHANGE, DiskFacts, Usage
from nsinit.storage.paths import Layout
from nsinit.wire import control
from nsinit.wire.protocol import (
    FDS_OF_WAY_OUT,
    MAX_DATAGRAM_BYTES,
    NETWORK_STAGE,
    Adopted,
    Build,
    Built,
    DiskLimits,
    Found,
    Identity,
    Limits,
    OpenBridge,
    SandboxPlan,
)
from nsinit.wire.validate import is_session_id

BUILD_DEADLINE_S = 5.0
"""From the end of the builder's work until the runner serves."""
_DEATH_DEADLINE_S = 5.0
_EMPTY_BACKOFF_S = (0.001, 0.002, 0.004, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_EMPTY_MEMORY_S = 0.02
"""Seconds that the end of a session waits for its pages of files to be freed; more take place in the background."""
_EMPTY_AGAIN_S = (0.0, 0.5, 2.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0)
"""Pauses before each look whether pages of files can be freed, 43 seconds in all. The kernel writes them when they are
30 seconds old, and looks for such pages each 5 seconds (proc_sys_vm(5): dirty_expire_centisecs)."""
_EMPTIED_S = 10.0
"""Seconds that a new session waits for that, if the ended one had its id."""
_PORTS_PATIENCE_S, _PORTS_PAUSE_S = 2.0, 0.05
"""Seconds that a way out waits for the ports of an earlier one, and between two attempts."""
_DELETION_DELAY_S = 0.3
_AFTER_ERROR_S = 1.0
"""Seconds that the watch over memory and disk rests after an error of its own."""
_MAX_BUILDING = 2 * (os.cpu_count() or 1) + 2
"""Builds under way at once. More would only take turns on the processors, and each would be done later."""

Removal = Generator[Wait, bool, "Removed"]


@dataclass(frozen=True, slots=True)
class Removed:
    """The outcome of a teardown: the last readings of the cgroup, and a sentence for each thing that is left."""

    counters: Counters
    leftovers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Emptying:
    """An ended session whose memory is being freed. `hurry`: nsinit ends, or the id is wanted again;
    `gone`: its cgroup is removed."""

    hurry: JobEvent = field(default_factory=JobEvent)
    gone: JobEvent = field(default_factory=JobEvent)


@dataclass(slots=True)
class Sessions:
    """All sessions of one data directory."""

    births: Births
    builders: HelperPool
    cgroup_emptiers: HelperPool
    network_makers: HelperPool
    bridges: Bridges
    scheduler: Scheduler
    kernel_log: KernelLog
    locks: LockWatch
    oom_scores: OomScores
    disk_watch: DiskWatch
    layers: LayerDirectory
    find_mounts: Callable[[], list[str]]
    """Returns the points of mounts that a person made; trash below which there is one is not deleted."""
    processes: dict[str, InitProcess] = field(default_factory=dict)
    pool: dict[str, UnfinishedSandbox] = field(default_factory=dict)
    processors: Processors = field(default_factory=Processors)
    filling: dict[str, Filling] = field(default_factory=dict)
    _building: int = 0
    _queue: deque[JobEvent] = field(default_factory=deque)
    _emptying: dict[str, Emptying] = field(init=False, default_factory=dict)
    _deleting: bool = False
    _has_trash: bool = False
    """Trash has come since the last deletion began."""
    _hurry: JobEvent = field(default_factory=JobEvent)
    _watched: set[str] = field(default_factory=set)
    _over: set[str] = field(default_factory=set)
    """Sessions that hold too many locks and were not removed yet."""

    def prepare(self, session_id: str, limits: Limits, disk: DiskLimits) -> Generator[Wait, bool, None]:
        """Make a blank sandbox for the pool. Raises `StepFailed`, and then nothing is left."""
        yield from self._admit()
        try:
            sandbox = self.pool[session_id] = yield from self._begin(session_id, limits)
            try:
                outcome = yield from self._order(sandbox, None, disk, "born", "blank")
                with sandbox.steps.step("identity"):
                    sandbox.identify()
                yield Wait(event=outcome.done)
                outcome.result()
                if self._hurry.is_set:  # nobody would take it, and what is ready has been put away by now
                    raise _stopping()
            except StepFailed:
                yield from self.remove(session_id)
                raise
        finally:
            self._leave()

    def mount_image(self, plan: SandboxPlan) -> Generator[Wait, bool, None]:
        """Mount the image in a blank sandbox of the pool.

        Raises:
            StepFailed: no such sandbox (`ENOENT`), or nothing of the sandbox is left.
        """
        sandbox = self.pool.get(plan.session_id)
        if sandbox is None or sandbox.image_key is not None or plan.image_kind == "files":
            raise StepFailed("pool", "no blank sandbox of that id waits for an image", errno=errno.ENOENT)
        yield from self._admit()
        try:
            self._note_use(plan)
            outcome = yield from self._order(sandbox, plan, plan.disk, "blank", "imaged")
            yield Wait(event=outcome.done)
            outcome.result()
            sandbox.image_key = plan.image_key
        except StepFailed:
            yield from self.remove(plan.session_id)
            raise
        finally:
            self._leave()

    def build(self, request: Build) -> Generator[Wait, bool, tuple[Built, list[int]]]:
        """Build a sandbox; returns the answer and its descriptors. Raises `StepFailed`, and then nothing is left."""
        session_id = request.plan.session_id
        yield from self._admit()
        try:
            sandbox = self.pool.pop(session_id, None)
            done: Stage = "born" if sandbox is None else "blank" if sandbox.image_key is None else "imaged"
            if sandbox is None:
                sandbox = yield from self._begin(session_id, request.plan.limits)
            filling = self.filling[session_id] = Filling()
            if done != "born":
                filling.has_network.set()
            self.watch()
            try:
                if sandbox.image_key not in (None, request.plan.image_key):
                    raise StepFailed("pool", "another plan's image is mounted in it", errno=errno.EINVAL)
                if sandbox.limits != request.plan.limits:
                    with sandbox.steps.step("limits"):
                        yield from self._change_limits(sandbox.cgroup, request.plan.limits)
                self._note_use(request.plan)
                sandbox.process.has_workspace = request.plan.workspace_id is not None
                if request.plan.image_kind != "files":
                    bind(sandbox.process.pid, self.processors.take(session_id, request.plan.limits))
                outcome = yield from self._order(sandbox, request.plan, request.plan.disk, done, "whole")
                return (yield from self._fill(sandbox, request, outcome, filling))
            except StepFailed:
                yield from filling.end()
                del self.filling[session_id]
                yield from self.remove(session_id)
                raise
            finally:
                self.filling.pop(session_id, filling).has_network.set()
                sandbox.control.close()
        finally:
            self._leave()

    def finish(self) -> None:
        """Refuse further builds, and begin a deletion that is due now instead of after its delay."""
        self._hurry.set()
        for each in self._emptying.values():
            each.hurry.set()

    @property
    def is_deleting(self) -> bool:
        """Whether a deletion of the trash is due or under way, or memory of ended sessions is being freed."""
        return self._deleting or bool(self._emptying)

    def abort_build(self, session_id: str) -> None:
        """Make a build fail that is under way, if one is, by killing PID 1."""
        if session_id in self.filling:
            self.processes[session_id].kill()

    def attach(self, session_id: str) -> tuple[Adopted, list[int]]:
        """Return the identity of a running sandbox, with a pidfd and the out-of-memory event. Raises `StepFailed`."""
        cgroup = self._cgroup(session_id)
        try:
            identity = require_identity(cgroup, "attach")
            cgroup.set_share(1)  # an nsinit that died when the sandbox was all but built left the share of builds
            self.births.machine.layout.share_socket(session_id)  # the daemon may have changed its user since
            pidfd = open_verified(identity)
            try:
                kind, event_fd = cgroup.open_oom_event()
            except OSError:
                os.close(pidfd)
                raise
        except OSError as error:
            raise failure_of("attach", error) from error
        if session_id not in self.processes:
            self.processors.note(session_id, frozenset(os.sched_getaffinity(identity.pid)))
            self.births.slots.reserve(identity.base_uid)
            self.oom_scores.reset(session_id)  # an nsinit that ended while memory was scarce left it the highest scores
        self.watch()
        return Adopted(0, session_id, identity, kind, self.bridges.has(session_id)), [pidfd, event_fd]

    def scan(self, after: str, limit: int) -> tuple[list[Found], bool]:
        """List the first `limit` sessions after an id that have a cgroup or files; and whether there are more."""
        return scan(self.births.tree, self.births.machine.layout, after, limit)

    def set_limits(self, session_id: str, limits: Limits) -> Generator[Wait, bool, None]:
        """Change the limits of a session that has a cgroup, all or none. Raises `StepFailed`."""
        cgroup = self._cgroup(session_id)
        if not cgroup.exists():
            raise StepFailed("set limits", "the session has no cgroup", errno=errno.ENOENT)
        try:
            yield from self._change_limits(cgroup, limits)
        except OSError as error:
            raise failure_of("set limits", error) from error
        try:
            yield from self._show_limits(cgroup, limits)
        except (OSError, StepFailed) as error:  # they are in force all the same
            log("warning", "limits not shown", session_id, reason=str(error))

    def _show_limits(self, cgroup: SessionCgroup, limits: Limits) -> Generator[Wait, bool, None]:
        """Have programs see the limits of a running session. Raises `OSError`, `StepFailed`."""
        before, processors = self.processors.of(cgroup.session_id), self.processors.take(cgroup.session_id, limits)
        if processors != before:
            yield from bind_all(cgroup, processors)
        root_fd = open_root(require_identity(cgroup, "set limits"))
        try:
            views.rewrite(root_fd, self.births.machine.size.views(limits.memory_bytes, processors))
        finally:
            os.close(root_fd)

    def set_frozen(self, session_id: str, *, frozen: bool) -> Generator[Wait, bool, None]:
        """Freeze or thaw a session that has a cgroup. Raises `StepFailed`."""
        try:
            yield from freezer.set_frozen(self._cgroup(session_id), frozen=frozen)
        except OSError as error:
            raise failure_of("freeze", error) from error

    def disk_usage(self, session_id: str) -> Usage:
        """Return how full a running session's disk is. Raises `StepFailed` when nothing of the session runs."""
        machine = self.births.machine
        try:
            root_fd = open_root(require_identity(self._cgroup(session_id), "disk"))
            try:
                return machine.disk.usage(DiskFacts(machine.layout, session_id), root_fd)
            finally:
                os.close(root_fd)
        except OSError as error:
            raise failure_of("disk", error) from error

    def set_disk(self, session_id: str, limits: DiskLimits) -> None:
        """Change the limits of a session's disk. Raises `StepFailed`, and then the old ones hold."""
        machine = self.births.machine
        try:
            machine.disk.change(DiskFacts(machine.layout, session_id), limits)
        except OSError as error:
            raise failure_of(CHANGE, error) from error

    def find_oom_kills(self, session_id: str) -> Generator[Wait, bool, Kills]:
        """Return the processes of a session that the kernel killed for memory."""
        base: int | None = None
        if (process := self.processes.get(session_id)) is not None:
            base = process.slot.base
        elif (identity := find_identity(self._cgroup(session_id))) is not None:
            base = identity.base_uid
        return (yield from self.kernel_log.find_oom_kills(session_id, base))

    def make_run_cgroup(self, session_id: str, name: str) -> Generator[Wait, bool, tuple[run_cgroups.Membership, int]]:
        """Make a run cgroup in a running session; return the use of its descriptor, and that. Raises `StepFailed`."""
        cgroup, process = self._cgroup(session_id), self.processes.get(session_id)
        try:
            base = process.slot.base if process is not None else require_identity(cgroup, "group").base_uid
            yield from self._ordered_cgroup(AddRunCgroup(session_id, name, base))
            made = run_cgroups.open_membership(cgroup, name)
        except OSError as error:
            raise failure_of("group", error) from error
        passing(self.births.machine.crash, "nsinit.exec.group_made")
        return made

    def remove_run_cgroup(self, session_id: str, name: str, *, kill: bool) -> Generator[Wait, bool, bool]:
        """Remove a run cgroup, killing its processes with `kill`; False: it stays, at most as long as the session."""
        is_gone = yield from run_cgroups.remove(self._cgroup(session_id), name, kill=kill)
        passing(self.births.machine.crash, "nsinit.exec.group_removed")
        return is_gone

    def open_network(self, session_id: str, *, steers: bool) -> Generator[Wait, bool, list[int]]:
        """Open a way out of the network of a session that runs, or whose build was joined; return its descriptors.
        Raises `StepFailed`."""
        filling = self.filling.get(session_id)
        try:
            if filling is not None:
                yield Wait(event=filling.has_network)
            identity = self._with_network(session_id)
            yield from self.close_bridge(session_id)
            deadline_s = time.monotonic() + _PORTS_PATIENCE_S
            while True:
                try:
                    fds = yield from self._work_in_network(identity, OpenWayOut(steers), FDS_OF_WAY_OUT)
                    break
                except (OSError, StepFailed) as error:
                    if error.errno != errno.EADDRINUSE or time.monotonic() > deadline_s:
                        raise _of_network(error) from error
                yield Wait(timeout_s=_PORTS_PAUSE_S)
            if filling is None:
                self._name_servers(session_id, identity, network.ADDRESS)
            else:
                filling.has_way_out = True
            return fds
        finally:
            if filling is not None:
                filling.leave()

    def open_bridge(self, request: OpenBridge) -> Generator[Wait, bool, str]:
        """Give a running session a bridge, or its bridge other rules; return the link. Raises `StepFailed`."""
        identity = self._with_network(request.session_id)
        try:
            netns_fd = open_network(identity)
            try:
                link = yield from self.bridges.open(request.session_id, netns_fd, request.allow, request.deny)
            finally:
                os.close(netns_fd)
        except (OSError, StepFailed) as error:
            raise _of_network(error) from error
        if self.bridges.terms is not None:
            self._name_servers(request.session_id, identity, *self.bridges.terms.resolvers)
        return link

    def close_bridge(self, session_id: str) -> Generator[Wait, bool, None]:
        """Remove a running session's bridge, if it has one. Raises `StepFailed`."""
        if not self.bridges.has(session_id):
            return
        try:
            netns_fd = open_network(self._with_network(session_id))
            try:
                yield from self.bridges.close(session_id, netns_fd)
            finally:
                os.close(netns_fd)
        except (OSError, StepFailed) as error:
            raise _of_network(error) from error

    def _name_servers(self, session_id: str, identity: Identity, *addresses: str) -> None:
        try:
            root_fd = open_root(identity)
            try:
                rootfs.name_servers(root_fd, identity.base_uid, *addresses)
            finally:
                os.close(root_fd)
        except OSError as error:  # /etc is the session's own: what it made of that is no reason to have no way out
            log("warning", "name server not written", session_id, reason=str(error))

    def trust(self, session_id: str, certificate: str) -> None:
        """Have programs of a running session trust an authority. Raises `StepFailed`."""
        stage = f"{NETWORK_STAGE}trust"
        try:
            identity = require_identity(self._cgroup(session_id), stage)
            root_fd = open_root(identity)
            try:
                if problem := rootfs.trust(root_fd, identity.base_uid, certificate):
                    log("info", "bundle of authorities not written", session_id, reason=problem)
            finally:
                os.close(root_fd)
        except OSError as error:
            raise failure_of(stage, error) from error

    def open_sockets(self, session_id: str, count: int) -> Generator[Wait, bool, list[int]]:
        """Make sockets in a running session's network; return their descriptors. Raises `StepFailed`."""
        try:
            return (yield from self._work_in_network(self._with_network(session_id), MakeSockets(count), count))
        except (OSError, StepFailed) as error:
            raise _of_network(error) from error

    def _with_network(self, session_id: str) -> Identity:
        if session_id in self.pool:
            raise StepFailed(f"{NETWORK_STAGE}session", "the sandbox is not built yet", errno=errno.ENOENT)
        return require_identity(self._cgroup(session_id), f"{NETWORK_STAGE}session")

    def _work_in_network(
        self, identity: Identity, order: OpenWayOut | MakeSockets, count: int
    ) -> Generator[Wait, bool, list[int]]:
        """Have an order about a session's network carried out; return the descriptors that come of it, at most
        `count`."""
        self.network_makers.start_once()
        netns_fd = open_network(identity)
        # Descriptors that nobody takes are closed with this pair.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            try:
                outcome = yield from self.network_makers.hand_over(order, [netns_fd, theirs.fileno()])
            finally:
                os.close(netns_fd)
            yield Wait(event=outcome.done)
            outcome.result()
            _, fds, _, _ = socket.recv_fds(ours, 1, count, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
        return list(fds)

    def stop_processes(self, session_id: str, grace_s: float) -> Generator[Wait, bool, int]:
        """Tell the processes of a session to end and wait for that, unless nsinit ends; return how many are left."""
        return (yield from stop_processes(self._cgroup(session_id), grace_s, self._hurry))

    def remove(self, session_id: str) -> Removal:
        """Kill every process of a session and remove its cgroup and files, whatever state the session is in."""
        cgroup, leftovers = self._cgroup(session_id), []
        process = self.processes.get(session_id)
        sandbox = self.pool.pop(session_id, None)
        if sandbox is not None:
            sandbox.control.close()
        machine = self.births.machine
        try:
            machine.disk.abandon(DiskFacts(machine.layout, session_id))
        except OSError as error:  # then the last unmount writes to the disk, and the end takes longer
            log("warning", "disk not abandoned", session_id, reason=str(error))
        passing(machine.crash, "nsinit.destroy.abandoned")
        base = yield from self._kill(session_id, cgroup)
        passing(machine.crash, "nsinit.destroy.killed")
        # PID 1 took its pid namespace along. A process left was moved into the cgroup from outside, or is dying.
        for pause_s in _EMPTY_BACKOFF_S:
            if not cgroup.processes():
                break
            cgroup.kill()
            freezer.thaw_dying(cgroup)
            yield Wait(timeout_s=pause_s)
        passing(machine.crash, "nsinit.destroy.emptied")
        try:
            yield from self.bridges.close(session_id)
        except StepFailed as error:
            leftovers.append(f"network: {error}")
        counters = cgroup.counters()
        if session_id in self._over:
            self._over.discard(session_id)
            counters = replace(counters, oom_kills=max(counters.oom_kills, 0) + 1)
        kept = ""
        if process is None or process.has_workspace:
            kept = yield from self._empty_memory(cgroup)
        for pause_s in _EMPTY_BACKOFF_S:
            if not (left := cgroup.remove(but=kept)):
                break
            yield Wait(timeout_s=pause_s)
        leftovers += [f"{path}: still holds a process" for path in left]
        passing(machine.crash, "nsinit.destroy.cgroup_removed")
        self.processors.forget(session_id)
        if not left:
            yield from self._give_back_slot(session_id, base)
        try:
            if trash.discard_session(self.births.machine.layout, session_id, self.find_mounts()):
                self.delete_trash()
        except OSError as error:
            leftovers.append(f"{error.filename}: {error.strerror}")
        passing(machine.crash, "nsinit.destroy.discarded")
        return Removed(counters, tuple(leftovers))

    def _empty_memory(self, cgroup: SessionCgroup) -> Generator[Wait, bool, str]:
        """Have the pages of files freed that the kernel would keep the cgroup's memory for; return the directory that
        must stay until then, empty if none. A session with few such pages waits for it, no other does.

        For sessions whose files stay, in a workspace. Pages of deleted files go with them, and those of an image are
        better kept: the next session would read them from the disk again.
        """
        if cgroup.processes() or not cgroup.has_file_pages():
            return ""
        if cgroup.session_id in self._emptying:
            return cgroup.directory("memory")
        tried = JobEvent()
        self._emptying[cgroup.session_id] = Emptying()
        self.scheduler.spawn(self._empty_and_remove(cgroup, tried))
        yield Wait(event=tried, timeout_s=_EMPTY_MEMORY_S)
        return cgroup.directory("memory") if cgroup.session_id in self._emptying else ""

    def _empty_and_remove(self, cgroup: SessionCgroup, tried: JobEvent) -> Job:
        emptying = self._emptying[cgroup.session_id]
        for pause_s in _EMPTY_AGAIN_S:
            if pause_s and (yield Wait(event=emptying.hurry, timeout_s=pause_s)):
                break  # then the kernel frees the memory when it needs some
            if not cgroup.has_unwritten_pages():
                try:
                    outcome = yield from self.cgroup_emptiers.hand_over(EmptyMemory(cgroup.session_id), [])
                    yield Wait(event=outcome.done)
                    outcome.result()
                except StepFailed as error:  # the helper died over it
                    log("warning", "memory not emptied", cgroup.session_id, reason=str(error))
                    continue
                # The first time, pages that were written a moment ago may not be counted yet (v1: for 2 seconds).
                if not cgroup.has_file_pages() or (pause_s and not cgroup.has_unwritten_pages()):
                    break
            tried.set()
        for pause_s in _EMPTY_BACKOFF_S:
            if not cgroup.remove():
                break
            yield Wait(timeout_s=pause_s)
        self._emptying.pop(cgroup.session_id).gone.set()
        tried.set()

    def delete_trash(self) -> None:
        """Have the trash deleted by a process of its own; one that is at it is followed by another."""
        self._has_trash = True
        if not self._deleting:
            self._deleting = True
            self.scheduler.spawn(self._delete_trash())

    def _change_limits(self, cgroup: SessionCgroup, wanted: Limits) -> Generator[Wait, bool, None]:
        """Change all of the limits or none. Raises `OSError` or `StepFailed`."""
        if limits.is_lower(cgroup, wanted):
            yield from limits.lower(cgroup, wanted)
        else:
            yield from self._ordered_cgroup(RaiseLimits(cgroup.session_id, wanted))

    def _ordered_cgroup(self, order: RaiseLimits | AddRunCgroup) -> Generator[Wait, bool, None]:
        """Hand an order to the cgroup maker; a second one gets it if the first dies or hangs. Raises `StepFailed`."""
        for _ in range(2):
            outcome = yield from self.births.cgroup_makers.hand_over(order, [])
            yield Wait(event=outcome.done)
            if not outcome.has_died:
                break
            if isinstance(order, AddRunCgroup):
                run_cgroups.unmake(self._cgroup(order.session_id), order.name)
        outcome.result()

    def _begin(self, session_id: str, limits: Limits) -> Generator[Wait, bool, UnfinishedSandbox]:
        if (earlier := self._emptying.get(session_id)) is not None:
            earlier.hurry.set()
            yield Wait(event=earlier.gone, timeout_s=_EMPTIED_S)
        if session_id in self.processes or self._cgroup(session_id).exists():
            raise StepFailed("session", "the session exists", errno=errno.EEXIST)
        path = self.births.machine.layout.session(session_id)
        if os.path.lexists(path):
            raise StepFailed("session", "the session has files of an earlier life", path=path, errno=errno.EEXIST)
        sandbox = yield from self.births.make(session_id, limits)
        self.processes[session_id] = sandbox.process
        self.scheduler.spawn(self._reap(session_id, sandbox.process))
        return sandbox

    def _note_use(self, plan: SandboxPlan) -> None:
        """Keep a collection from the layers of a session. Raises `StepFailed`."""
        if plan.layers:
            try:
                self.layers.note_use(plan.session_id, plan.image, plan.layers)
            except OSError as error:
                raise failure_of("layers", error) from error

    def _order(
        self, sandbox: UnfinishedSandbox, plan: SandboxPlan | None, disk: DiskLimits, done: Stage, goal: Stage
    ) -> Generator[Wait, bool, OrderOutcome]:
        """Hand an order for a sandbox to a builder. Raises `StepFailed`."""
        processors = tuple(self.processors.of(sandbox.session_id))
        order = Order(sandbox.session_id, sandbox.process.slot.base, plan, done, goal, disk, processors)
        return (yield from self.builders.hand_over(order, self.births.builder_fds(sandbox, plan)))

    def _fill(
        self, sandbox: UnfinishedSandbox, request: Build, outcome: OrderOutcome, filling: Filling
    ) -> Generator[Wait, bool, tuple[Built, list[int]]]:
        """Wait for the builder, then until the runner serves; collect the parts of the answer meanwhile.

        Raises `StepFailed`, never before the builder is done: a builder must not work on a sandbox that is being
        removed.
        """
        process = sandbox.process
        with ExitStack() as undo:
            try:
                with sandbox.steps.step("identity"):
                    identity = sandbox.identify()
                    kind, event_fd = sandbox.cgroup.open_oom_event()
                    undo.callback(os.close, event_fd)
            finally:
                yield Wait(event=outcome.done)
            timings_us = sandbox.steps.timings_us | outcome.result()
            filling.has_network.set()
            if not (yield Wait(fd=sandbox.control.fileno(), timeout_s=BUILD_DEADLINE_S)):
                raise StepFailed("deadline", f"not ready after {BUILD_DEADLINE_S} s", errno=errno.ETIMEDOUT)
            timings_us |= _read_status(sandbox)
            yield from filling.end()
            if filling.has_way_out:
                self._name_servers(request.plan.session_id, identity, network.ADDRESS)
            with sandbox.steps.step("share"):
                sandbox.cgroup.set_share(1)
            pidfd = os.dup(process.pidfd)
            undo.pop_all()
        return Built(request.seq, request.plan.session_id, identity, kind, timings_us), [pidfd, event_fd]

    def _admit(self) -> Generator[Wait, bool, None]:
        """Wait, in order of arrival, until fewer than `_MAX_BUILDING` builds run. Raises `StepFailed`."""
        if self._building >= _MAX_BUILDING:
            turn = JobEvent()
            self._queue.append(turn)
            yield Wait(event=turn)
        else:
            self._building += 1
        if self._hurry.is_set:
            self._leave()
            raise _stopping()

    def _leave(self) -> None:
        """End a build; the next one in the queue begins."""
        if self._queue:
            self._queue.popleft().set()
        else:
            self._building -= 1

    def _kill(self, session_id: str, cgroup: SessionCgroup) -> Generator[Wait, bool, int | None]:
        """Kill PID 1 and wait for its end; return the base id of a session that an earlier nsinit made."""
        process = self.processes.get(session_id)
        if process is not None:
            process.kill()
            freezer.thaw_dying(cgroup)
            yield Wait(event=process.dead, timeout_s=_DEATH_DEADLINE_S)
            return None
        identity = find_identity(cgroup)
        if identity is None:
            return None
        try:
            pidfd = open_verified(identity)
        except ProcessLookupError:
            return identity.base_uid
        try:
            syscalls.pidfd_send_signal(pidfd, signal.SIGKILL)
            freezer.thaw_dying(cgroup)
            yield Wait(fd=pidfd, timeout_s=_DEATH_DEADLINE_S)
        except ProcessLookupError:
            pass
        finally:
            os.close(pidfd)
        return identity.base_uid

    def _give_back_slot(self, session_id: str, base: int | None) -> Generator[Wait, bool, None]:
        """Let the ids be used again. Called when the cgroup is gone: no process has ids of the slot any more.

        Kills in the kernel's log that have these ids are counted for this session before another one gets them."""
        process = self.processes.get(session_id)
        yield from self.kernel_log.find_oom_kills(session_id, base if process is None else process.slot.base)
        if process is not None:
            del self.processes[session_id]
            process.released.set()
            self.births.slots.free(process.slot)
        elif base is not None:
            self.births.slots.forget(base)

    def _reap(self, session_id: str, process: InitProcess) -> Job:
        """Reap a PID 1 when it ends, and close its pidfd when the session was removed."""
        yield Wait(fd=process.pidfd)
        result = os.waitid(os.P_PIDFD, process.pidfd, os.WEXITED)
        process.dead.set()
        log("info", "init ended", session_id, pid=process.pid, status=result.si_status if result else None)
        yield Wait(event=process.released)
        os.close(process.pidfd)

    def _delete_trash(self) -> Job:
        """Delete the trash after a delay: deletions keep the disk's journal busy, and one fork serves many sessions.
        So it is again while sessions go on ending."""
        try:
            while self._has_trash:
                yield Wait(event=self._hurry, timeout_s=_DELETION_DELAY_S)
                self._has_trash = False
                yield from self._run_deletion()
        finally:
            self._deleting = False

    def _run_deletion(self) -> Generator[Wait, bool, None]:
        machine = self.births.machine
        try:
            mounts = self.find_mounts()
        except OSError as error:  # nothing is deleted that a mount might be in
            log("error", "trash not deleted", reason=str(error))
            return
        pidfd = trash.start_deletion(machine.layout, machine.disk.remove, mounts)
        try:
            yield Wait(fd=pidfd)
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        finally:
            os.close(pidfd)

    def watch(self) -> None:
        """Watch memory and disk as long as there are sessions but those of the pool, where no foreign code runs."""
        self._watch("memory", partial(self._look_at_memory, Pace(self.births.tree)))
        self._watch("disk", self.disk_watch.look)

    def _watch(self, what: str, look: Callable[[], Generator[Wait, bool, float]]) -> None:
        if what not in self._watched:
            self._watched.add(what)
            self.scheduler.spawn(self._keep_looking(what, look))

    def _keep_looking(self, what: str, look: Callable[[], Generator[Wait, bool, float]]) -> Job:
        while self.births.slots.in_use > len(self.pool):
            try:
                pause_s = yield from look()
            except OSError as error:  # no descriptors are left, or the cgroups were removed
                log("error", f"{what} not watched", reason=str(error))
                pause_s = _AFTER_ERROR_S
            yield Wait(timeout_s=pause_s)
        self._watched.discard(what)

    def _look_at_memory(self, pace: Pace) -> Generator[Wait, bool, float]:
        if (over := (yield from self.locks.look(self.births.tree))) is not None:
            yield from self._end_for_locks(*over)
        yield from self.oom_scores.look()
        return pace.next_s()

    def _end_for_locks(self, session_id: str, locks: int) -> Generator[Wait, bool, None]:
        """Kill PID 1 of a session whose locks take memory that is charged to nobody. The teardown tells of it as of a
        kill for memory."""
        if (identity := find_identity(self._cgroup(session_id))) is None:
            return
        log("warning", "too many record locks", session_id, locks=locks)
        self._over.add(session_id)
        self.kernel_log.add(session_id, "record locks", identity.pid)
        yield from self._kill(session_id, self._cgroup(session_id))

    def _cgroup(self, session_id: str) -> SessionCgroup:
        return SessionCgroup(self.births.tree, session_id)


def _of_network(error: OSError | StepFailed) -> StepFailed:
    """Return the failure of a way out, with a stage that says so."""
    failed = error if isinstance(error, StepFailed) else failure_of("session", error)
    stage = failed.stage if failed.stage.startswith(NETWORK_STAGE) else NETWORK_STAGE + failed.stage
    return StepFailed(stage, str(failed), path=failed.path, errno=failed.errno)


def _stopping() -> StepFailed:
    return StepFailed("stop", "nsinit is stopping")


def scan(tree: Tree, layout: Layout, after: str = "", limit: int | None = None) -> tuple[list[Found], bool]:
    """List sessions that have a cgroup or files, in the order of their ids; of those only is `/proc` read."""
    with_files = {name for path in (layout.sessions, layout.run) for name in os.listdir(path)}
    with_cgroup = {name for path in tree.unique for name in _names_in(path)}
    names = sorted(name for name in with_files | with_cgroup if name > after and is_session_id(name))
    found = [
        Found(
            session_id,
            find_identity(SessionCgroup(tree, session_id)),
            has_cgroup=session_id in with_cgroup,
            has_files=session_id in with_files,
        )
        for session_id in names[:limit]
    ]
    return found, len(found) < len(names)


def _names_in(directory: str) -> list[str]:
    """Return the names in a cgroup directory; none if a cleaner of the machine removed the directory."""
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


def _read_status(sandbox: UnfinishedSandbox) -> dict[str, int]:
    """Return the timings of PID 1. Raises `StepFailed` with the failure that PID 1 reports, or that PID 1 died."""
    try:
        return control.read_status(sandbox.control.recv(MAX_DATAGRAM_BYTES, socket.MSG_DONTWAIT))
    except ConnectionResetError:
        return control.read_status(b"")
