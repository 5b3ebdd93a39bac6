"""What nsinit does to sessions: prepare, build, attach, scan, limit, tear down. Each is a job for the scheduler.

Owns which processes and vessels belong to which session. A failed build leaves nothing; a teardown is idempotent and
right for half-built, foreign and already dead sessions. It never waits in place and never believes anything but the
kernel and the disk about a session it did not make itself.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections import deque
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass, field

from nsinit.cgroup import freezer, groups, limits
from nsinit.cgroup.identity import find_identity, open_verified, require_identity
from nsinit.cgroup.session import Counters, SessionCgroup
from nsinit.cgroup.tree import Tree
from nsinit.helpers.builder import Order, Stage
from nsinit.helpers.cgroup_maker import MakeGroup, RaiseLimits
from nsinit.helpers.pool import Outcome, Workers
from nsinit.helpers.vessel import Foundry, Process, Vessel
from nsinit.kernel import syscalls
from nsinit.log import log
from nsinit.scheduler import Event, Job, Scheduler, Wait
from nsinit.server.kmsg import KernelLog, Kills
from nsinit.steps import StepFailed, failure_of, passing
from nsinit.storage import running, trash
from nsinit.storage.mechanism import Usage
from nsinit.storage.paths import Layout
from nsinit.wire import control
from nsinit.wire.protocol import MAX_DATAGRAM_BYTES, Attached, Build, Built, DiskLimits, Found, Limits, SandboxPlan
from nsinit.wire.validate import is_session_id

BUILD_DEADLINE_S = 5.0
_DEATH_DEADLINE_S = 5.0
_EMPTY_BACKOFF_S = (0.001, 0.002, 0.004, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_DELETION_DELAY_S = 0.3
_MAX_BUILDING = 2 * (os.cpu_count() or 1) + 2
"""Builds under way at once: more only makes each of them later."""

Removal = Generator[Wait, bool, "Removed"]


@dataclass(frozen=True, slots=True)
class Removed:
    """What a teardown found and left."""

    counters: Counters
    leftovers: tuple[str, ...]


@dataclass(slots=True)
class Sessions:
    """All sessions of one data directory."""

    foundry: Foundry
    builders: Workers
    scheduler: Scheduler
    kernel_log: KernelLog
    processes: dict[str, Process] = field(default_factory=dict)
    vessels: dict[str, Vessel] = field(default_factory=dict)
    _filling: set[str] = field(default_factory=set)
    _building: int = 0
    _queue: deque[Event] = field(default_factory=deque)
    _deleting: bool = False
    _hurry: Event = field(default_factory=Event)

    def prepare(self, session_id: str, limits: Limits, disk: DiskLimits) -> Generator[Wait, bool, None]:
        """Make a blank vessel. Raises `StepFailed`, and then nothing is left."""
        yield from self._admit()
        try:
            vessel = self.vessels[session_id] = yield from self._make_vessel(session_id, limits)
            try:
                outcome = yield from self._order(vessel, None, disk, "born", "blank")
                with vessel.steps.step("identity"):
                    vessel.identify()
                yield Wait(event=outcome.done)
                outcome.result()
            except StepFailed:
                yield from self.remove(session_id)
                raise
        finally:
            self._leave()

    def furnish(self, plan: SandboxPlan) -> Generator[Wait, bool, None]:
        """Mount the image in a blank vessel. Raises `StepFailed`, and then nothing is left of it, if it was one."""
        vessel = self.vessels.get(plan.session_id)
        if vessel is None or vessel.furnishing is not None or plan.image_kind == "files":
            raise StepFailed("vessel", "there is no blank one of that id for an image", errno=errno.ENOENT)
        yield from self._admit()
        try:
            outcome = yield from self._order(vessel, plan, plan.disk, "blank", "furnished")
            yield Wait(event=outcome.done)
            outcome.result()
            vessel.furnishing = plan.furnishing
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
            vessel = self.vessels.pop(session_id, None)
            done: Stage = "born" if vessel is None else "blank" if vessel.furnishing is None else "furnished"
            if vessel is None:
                vessel = yield from self._make_vessel(session_id, request.plan.limits)
            self._filling.add(session_id)
            try:
                if vessel.furnishing not in (None, request.plan.furnishing):
                    raise StepFailed("vessel", "it was furnished for another plan", errno=errno.EINVAL)
                if vessel.limits != request.plan.limits:
                    with vessel.steps.step("limits"):
                        yield from self._change_limits(vessel.cgroup, request.plan.limits)
                outcome = yield from self._order(vessel, request.plan, request.plan.disk, done, "whole")
                return (yield from self._fill(vessel, request, outcome))
            except StepFailed:
                yield from self.remove(session_id)
                raise
            finally:
                self._filling.discard(session_id)
                vessel.control.close()
        finally:
            self._leave()

    def finish(self) -> None:
        """Begin no build any more, and let what waits for a quiet moment happen now."""
        self._hurry.set()

    @property
    def is_deleting(self) -> bool:
        """Whether a process is deleting the trash."""
        return self._deleting

    def abort_build(self, session_id: str) -> None:
        """Let a build that is under way fail now."""
        if session_id in self._filling:
            self.processes[session_id].kill()

    def attach(self, session_id: str) -> tuple[Attached, list[int]]:
        """Find a running sandbox again. Raises `StepFailed`."""
        cgroup = self._cgroup(session_id)
        try:
            identity = require_identity(cgroup, "attach")
            cgroup.set_share(1)  # nsinit may have died when it was all but built
            self.foundry.machine.layout.share_socket(session_id)  # the daemon may have been another user then
            pidfd = open_verified(identity)
            try:
                kind, event_fd = cgroup.open_oom_event()
            except OSError:
                os.close(pidfd)
                raise
        except OSError as error:
            raise failure_of("attach", error) from error
        if session_id not in self.processes:
            self.foundry.slots.reserve(identity.base_uid)
        return Attached(0, session_id, identity, kind), [pidfd, event_fd]

    def scan(self, after: str, limit: int) -> tuple[list[Found], bool]:
        """List sessions that have a cgroup or files, with what runs of each; and whether there are more."""
        return scan(self.foundry.tree, self.foundry.machine.layout, after, limit)

    def set_limits(self, session_id: str, limits: Limits) -> Generator[Wait, bool, None]:
        """Change the limits of a session that has a cgroup, all or none. Raises `StepFailed`."""
        cgroup = self._cgroup(session_id)
        if not cgroup.exists():
            raise StepFailed("set limits", "the session has no cgroup", errno=errno.ENOENT)
        try:
            yield from self._change_limits(cgroup, limits)
        except OSError as error:
            raise failure_of("set limits", error) from error

    def set_frozen(self, session_id: str, *, frozen: bool) -> Generator[Wait, bool, None]:
        """Freeze or thaw a session that has a cgroup. Raises `StepFailed`."""
        try:
            yield from freezer.set_frozen(self._cgroup(session_id), frozen=frozen)
        except OSError as error:
            raise failure_of("freeze", error) from error

    def disk_usage(self, session_id: str) -> Usage:
        """Return how full a running session's disk is. Raises `StepFailed`."""
        machine = self.foundry.machine
        return running.usage(machine.disk, machine.layout, self._cgroup(session_id), session_id)

    def set_disk(self, session_id: str, limits: DiskLimits) -> None:
        """Change the limits of a session's disk. Raises `StepFailed`."""
        machine = self.foundry.machine
        running.change(machine.disk, machine.layout, session_id, limits)

    def find_kills(self, session_id: str) -> Generator[Wait, bool, Kills]:
        """Return whom of a session the kernel killed for memory."""
        base: int | None = None
        if (process := self.processes.get(session_id)) is not None:
            base = process.slot.base
        elif (identity := find_identity(self._cgroup(session_id))) is not None:
            base = identity.base_uid
        return (yield from self.kernel_log.find_kills(session_id, base))

    def make_group(self, session_id: str, name: str) -> Generator[Wait, bool, tuple[groups.Membership, int]]:
        """Make a group in a running session; returns what its descriptor is for, and that. Raises `StepFailed`."""
        cgroup, process = self._cgroup(session_id), self.processes.get(session_id)
        try:
            base = process.slot.base if process is not None else require_identity(cgroup, "group").base_uid
            yield from self._ordered_cgroup(MakeGroup(session_id, name, base))
            made = groups.open_membership(cgroup, name)
        except OSError as error:
            raise failure_of("group", error) from error
        passing(self.foundry.machine.crash, "nsinit.exec.group_made")
        return made

    def remove_group(self, session_id: str, name: str, *, kill: bool) -> Generator[Wait, bool, bool]:
        """Remove a group, with what is in it if so asked; False if it stays, at most as long as the session does."""
        is_gone = yield from groups.remove(self._cgroup(session_id), name, kill=kill)
        passing(self.foundry.machine.crash, "nsinit.exec.group_removed")
        return is_gone

    def remove(self, session_id: str) -> Removal:
        """Kill and remove all of a session, whatever state it is in."""
        cgroup, leftovers = self._cgroup(session_id), []
        vessel = self.vessels.pop(session_id, None)
        if vessel is not None:
            vessel.control.close()
        machine = self.foundry.machine
        running.abandon(machine.disk, machine.layout, session_id)
        passing(machine.crash, "nsinit.destroy.abandoned")
        base = yield from self._kill(session_id, cgroup)
        passing(machine.crash, "nsinit.destroy.killed")
        for pause_s in _EMPTY_BACKOFF_S:
            if not cgroup.processes():
                break
            cgroup.kill()
            freezer.thaw_dying(cgroup)
            yield Wait(timeout_s=pause_s)
        passing(machine.crash, "nsinit.destroy.emptied")
        counters = cgroup.counters()
        for pause_s in _EMPTY_BACKOFF_S:
            if not (left := cgroup.remove()):
                break
            yield Wait(timeout_s=pause_s)
        leftovers += [f"{path}: still holds a process" for path in left]
        passing(machine.crash, "nsinit.destroy.cgroup_removed")
        if not left:
            yield from self._give_back_slot(session_id, base)
        try:
            if trash.discard_session(self.foundry.machine.layout, session_id):
                self.delete_trash()
        except OSError as error:
            leftovers.append(f"{error.filename}: {error.strerror}")
        passing(machine.crash, "nsinit.destroy.discarded")
        return Removed(counters, tuple(leftovers))

    def delete_trash(self) -> None:
        """Delete what is in the trash, in a process of its own; one at a time."""
        if not self._deleting:
            self._deleting = True
            self.scheduler.spawn(self._delete_trash())

    def _change_limits(self, cgroup: SessionCgroup, wanted: Limits) -> Generator[Wait, bool, None]:
        """All of them or none. Raises `OSError` or `StepFailed`."""
        if limits.is_lower(cgroup, wanted):
            yield from limits.lower(cgroup, wanted)
        else:
            yield from self._ordered_cgroup(RaiseLimits(cgroup.session_id, wanted))

    def _ordered_cgroup(self, order: RaiseLimits | MakeGroup) -> Generator[Wait, bool, None]:
        """Have the cgroup maker do something; if it dies over it or hangs, the next one. Raises `StepFailed`."""
        for _ in range(2):
            outcome = yield from self.foundry.cgroup_makers.hand_over(order, [])
            yield Wait(event=outcome.done)
            if not outcome.has_died:
                break
            if isinstance(order, MakeGroup):
                groups.unmake(self._cgroup(order.session_id), order.name)
        outcome.result()

    def _make_vessel(self, session_id: str, limits: Limits) -> Generator[Wait, bool, Vessel]:
        if session_id in self.processes or self._cgroup(session_id).exists():
            raise StepFailed("session", "the session exists", errno=errno.EEXIST)
        path = self.foundry.machine.layout.session(session_id)
        if os.path.lexists(path):
            raise StepFailed("session", "the session has files of an earlier life", path=path, errno=errno.EEXIST)
        vessel = yield from self.foundry.make(session_id, limits)
        self.processes[session_id] = vessel.process
        self.scheduler.spawn(self._reap(session_id, vessel.process))
        return vessel

    def _order(
        self, vessel: Vessel, plan: SandboxPlan | None, disk: DiskLimits, done: Stage, goal: Stage
    ) -> Generator[Wait, bool, Outcome]:
        """Set a builder to work. Raises `StepFailed`."""
        order = Order(vessel.session_id, vessel.process.slot.base, plan, done, goal, disk)
        return (yield from self.builders.hand_over(order, self.foundry.builder_fds(vessel, plan)))

    def _fill(self, vessel: Vessel, request: Build, outcome: Outcome) -> Generator[Wait, bool, tuple[Built, list[int]]]:
        """Wait for the builder, then until the runner serves; what the answer needs is collected meanwhile.

        Raises `StepFailed`, never before the builder is done.
        """
        process = vessel.process
        with ExitStack() as undo:
            try:
                with vessel.steps.step("identity"):
                    identity = vessel.identify()
                    kind, event_fd = vessel.cgroup.open_oom_event()
                    undo.callback(os.close, event_fd)
            finally:
                yield Wait(event=outcome.done)
            timings_us = vessel.steps.timings_us | outcome.result()
            if not (yield Wait(fd=vessel.control.fileno(), timeout_s=BUILD_DEADLINE_S)):
                raise StepFailed("deadline", f"not ready after {BUILD_DEADLINE_S} s", errno=errno.ETIMEDOUT)
            timings_us |= _read_status(vessel)
            with vessel.steps.step("share"):
                vessel.cgroup.set_share(1)
            pidfd = os.dup(process.pidfd)
            undo.pop_all()
        return Built(request.seq, request.plan.session_id, identity, kind, timings_us), [pidfd, event_fd]

    def _admit(self) -> Generator[Wait, bool, None]:
        """Wait until fewer than `_MAX_BUILDING` builds are under way, in order of arrival. Raises `StepFailed`."""
        if self._building >= _MAX_BUILDING:
            turn = Event()
            self._queue.append(turn)
            yield Wait(event=turn)
        else:
            self._building += 1
        if self._hurry.is_set:
            self._leave()
            raise StepFailed("stop", "nsinit is stopping")

    def _leave(self) -> None:
        """End a build: its place goes to the next in the queue."""
        if self._queue:
            self._queue.popleft().set()
        else:
            self._building -= 1

    def _kill(self, session_id: str, cgroup: SessionCgroup) -> Generator[Wait, bool, int | None]:
        """Kill PID 1 and wait for its end; returns the base id of a session that another nsinit made."""
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
        """Only now, with the cgroup gone, is it sure that no process has ids of the slot. Victims that had them are
        this session's; later ones will be another's."""
        process = self.processes.get(session_id)
        yield from self.kernel_log.find_kills(session_id, base if process is None else process.slot.base)
        if process is not None:
            del self.processes[session_id]
            process.released.set()
            self.foundry.slots.free(process.slot)
        elif base is not None:
            self.foundry.slots.forget(base)

    def _reap(self, session_id: str, process: Process) -> Job:
        """Collect the exit of a PID 1 as soon as it ends."""
        yield Wait(fd=process.pidfd)
        result = os.waitid(os.P_PIDFD, process.pidfd, os.WEXITED)
        process.dead.set()
        log("info", "init ended", session_id, pid=process.pid, status=result.si_status if result else None)
        yield Wait(event=process.released)
        os.close(process.pidfd)

    def _delete_trash(self) -> Job:
        """Wait a little first: deleting keeps the disk's journal busy, and one fork does for many sessions."""
        try:
            yield Wait(event=self._hurry, timeout_s=_DELETION_DELAY_S)
            before: set[str] = set()
            while (names := set(os.listdir(self.foundry.machine.layout.trash))) - before:
                before = names
                yield from self._run_deletion()
        finally:
            self._deleting = False

    def _run_deletion(self) -> Generator[Wait, bool, None]:
        machine = self.foundry.machine
        pidfd = trash.start_deletion(machine.layout, machine.disk.remove)
        try:
            yield Wait(fd=pidfd)
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        finally:
            os.close(pidfd)

    def _cgroup(self, session_id: str) -> SessionCgroup:
        return SessionCgroup(self.foundry.tree, session_id)


def scan(tree: Tree, layout: Layout, after: str = "", limit: int | None = None) -> tuple[list[Found], bool]:
    """List sessions that have a cgroup or files, in the order of their ids; only those returned are looked at."""
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
    """Return what is in a cgroup directory; one without sessions may have been removed by a cleaner of the machine."""
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


def _read_status(vessel: Vessel) -> dict[str, int]:
    """Return the child's timings. Raises `StepFailed` with what the child says, or that it died."""
    try:
        return control.read_status(vessel.control.recv(MAX_DATAGRAM_BYTES, socket.MSG_DONTWAIT))
    except ConnectionResetError:
        return control.read_status(b"")
