"""A vessel: a process with all its namespaces, born in its session's cgroup, waiting for a plan.

Owns the parent's half of making one: cgroup, id slot, listening socket, clone; each host-visible step has its undo.
What the child does is `child` and `build`. Sources: clone(2) CLONE_INTO_CGROUP; unix(7); pidfd_open(2).
"""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from nsinit.cgroup.identity import read_identity
from nsinit.cgroup.session import SessionCgroup
from nsinit.cgroup.tree import Tree, mark_of, restore
from nsinit.helpers.cgroup_maker import MakeCgroup
from nsinit.helpers.forker import Forker
from nsinit.helpers.pool import Workers
from nsinit.kernel import syscalls
from nsinit.kernel.slots import Slot, SlotTable
from nsinit.sandbox.builder_steps import Machine
from nsinit.sandbox.crash_points import NSINIT
from nsinit.scheduler import Event, Wait
from nsinit.steps import Steps
from nsinit.storage.paths import SOCKET_NAME, make_directory
from nsinit.wire.protocol import Identity, Limits, SandboxPlan

_BACKLOG = 64


@dataclass(slots=True)
class Process:
    """PID 1 of a session that this nsinit made. `dead` happens after it was reaped; `pidfd` is its for good and stays
    open until `released` happens, so that whoever waited with the number never hands over somebody else's."""

    pid: int
    pidfd: int
    slot: Slot
    dead: Event = field(default_factory=Event)
    released: Event = field(default_factory=Event)

    def kill(self) -> None:
        """SIGKILL it, and with it everything in its pid namespace."""
        if not self.dead.is_set:
            try:
                syscalls.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass


@dataclass(slots=True)
class Vessel:
    """A process that waits to be furnished, or is, and the socket to it. `furnishing` says for what, `identity` is None
    until somebody needed it."""

    session_id: str
    process: Process
    cgroup: SessionCgroup
    control: socket.socket
    limits: Limits
    steps: Steps
    furnishing: tuple[object, ...] | None = None
    identity: Identity | None = None

    def identify(self) -> Identity:
        """Return who its process is, which never changes."""
        if self.identity is None:
            self.identity = replace(read_identity(self.process.pid), base_uid=self.process.slot.base)
        return self.identity


@dataclass(frozen=True, slots=True)
class Foundry:
    """What vessels are made from, and by whom."""

    machine: Machine
    tree: Tree
    slots: SlotTable
    forker: Forker
    cgroup_makers: Workers

    def make(self, session_id: str, limits: Limits) -> Generator[Wait, bool, Vessel]:
        """Make a vessel; the limits are in force before the process exists.

        Raises:
            StepFailed: nothing of it is left.
        """
        steps = Steps(NSINIT, self.machine.crash)
        cgroup = SessionCgroup(self.tree, session_id)
        with ExitStack() as undo:
            order = MakeCgroup(session_id, limits)
            made = yield from self.cgroup_makers.hand_over(order, [])
            undo.callback(cgroup.remove)
            try:
                with steps.step("slot"):
                    slot = self.slots.take()
                    undo.callback(self.slots.free, slot)
                    undo.callback(_evict, cgroup)
                with steps.step("listener"):
                    listener = self._listen(session_id, undo)
            finally:
                yield Wait(event=made.done)
            with steps.step("cgroup"):
                if made.failure is not None and made.failure.errno == errno.ENOENT and not cgroup.exists():
                    restore(self.tree, mark_of(self.machine.layout.data_dir))
                    made = yield from self.cgroup_makers.hand_over(order, [])
                    yield Wait(event=made.done)
                steps.timings_us |= made.result()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(ours.close)
            with listener, theirs, steps.step("clone"):
                process = self._clone(cgroup, slot, listener, theirs)
            undo.pop_all()
        return Vessel(session_id, process, cgroup, ours, limits, steps)

    def builder_fds(self, vessel: Vessel, plan: SandboxPlan | None) -> list[int]:
        """Return what a builder gets along with an order, in `builder.Order`'s order."""
        slot = vessel.process.slot
        fds = [vessel.process.pidfd, slot.userns_fd, slot.system_userns_fd, vessel.control.fileno()]
        return fds if plan is None or plan.workspace_id is None else [*fds, self.slots.workspace_userns(slot)]

    def _listen(self, session_id: str, undo: ExitStack) -> socket.socket:
        """Bind the runner's socket where only root and the daemon get; inside the sandbox it has no name at all."""
        path = self.machine.layout.session_run(session_id)
        make_directory(path)
        undo.callback(os.rmdir, path)
        directory_fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            undo.callback(listener.close)
            # sun_path holds 108 bytes; data_dir may not fit
            listener.bind(f"/proc/self/fd/{directory_fd}/{SOCKET_NAME}")
            undo.callback(os.unlink, f"{path}/{SOCKET_NAME}")
            self.machine.layout.share_socket(session_id)
            listener.listen(_BACKLOG)
        finally:
            os.close(directory_fd)
        return listener

    def _clone(self, cgroup: SessionCgroup, slot: Slot, listener: socket.socket, control: socket.socket) -> Process:
        fds = slot.userns_fd, listener.fileno(), control.fileno()
        cgroup_fd = -1 if cgroup.birth_directory is None else os.open(cgroup.birth_directory, os.O_PATH)
        try:
            pid = self.forker.clone(slot.base, cgroup.attach_files, fds, cgroup_fd)
            return Process(pid, os.pidfd_open(pid), slot)
        finally:
            if cgroup_fd >= 0:
                os.close(cgroup_fd)


def _evict(cgroup: SessionCgroup) -> None:
    """A clone that failed because the forker died may have happened nonetheless."""
    while pids := cgroup.processes():
        cgroup.kill()
        for pid in pids:
            os.waitpid(pid, 0)
