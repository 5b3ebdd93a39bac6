"""The birth of a sandbox: a process with all its namespaces, in its session's cgroup, that waits for a builder.

Owns nsinit's half: cgroup, id slot, listening socket, clone; each step that shows on the machine has its undo. The
child's half is `sandbox/child.py`. Sources: clone(2) CLONE_INTO_CGROUP; unix(7); pidfd_open(2).
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
from nsinit.cgroup.tree import Tree, owner_of, restore
from nsinit.helpers.cgroup_maker import MakeCgroup
from nsinit.helpers.forker import Forker
from nsinit.helpers.pool import HelperPool
from nsinit.kernel import syscalls
from nsinit.kernel.slots import Slot, SlotTable
from nsinit.sandbox.builder_steps import BuildFacts
from nsinit.sandbox.crash_points import NSINIT
from nsinit.scheduler import JobEvent, Wait
from nsinit.steps import Steps
from nsinit.storage.paths import SOCKET_NAME, make_directory
from nsinit.wire.protocol import Identity, Limits, SandboxPlan

_BACKLOG = 64


@dataclass(slots=True)
class InitProcess:
    """PID 1 of a session that this nsinit made. `dead` happens after PID 1 was reaped. `pidfd` stays open until
    `released` happens, so that the number never names another descriptor while a job still holds it. `has_workspace`:
    files of the session may stay after it."""

    pid: int
    pidfd: int
    slot: Slot
    dead: JobEvent = field(default_factory=JobEvent)
    released: JobEvent = field(default_factory=JobEvent)
    has_workspace: bool = False

    def kill(self) -> None:
        """SIGKILL PID 1; the kernel then kills every process of the pid namespace (pid_namespaces(7))."""
        if not self.dead.is_set:
            try:
                syscalls.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass  # a zombie that was not reaped yet


@dataclass(slots=True)
class UnfinishedSandbox:
    """A sandbox that no runner serves yet: PID 1 and the socket to PID 1 (`wire/control.py`). `image_key` belongs to
    the plan whose image is mounted; None while no image is. `identity` is read when it is first needed.
    """

    session_id: str
    process: InitProcess
    cgroup: SessionCgroup
    control: socket.socket
    limits: Limits
    steps: Steps
    image_key: tuple[object, ...] | None = None
    identity: Identity | None = None

    def identify(self) -> Identity:
        """Return the identity of PID 1, which never changes."""
        if self.identity is None:
            self.identity = replace(read_identity(self.process.pid), base_uid=self.process.slot.base)
        return self.identity


@dataclass(frozen=True, slots=True)
class Births:
    """Makes sandboxes up to the clone of PID 1, with the id slots and helpers of this nsinit."""

    machine: BuildFacts
    tree: Tree
    slots: SlotTable
    forker: Forker
    cgroup_makers: HelperPool

    def make(self, session_id: str, limits: Limits) -> Generator[Wait, bool, UnfinishedSandbox]:
        """Clone PID 1 of a sandbox; the limits are in force before the process exists.

        Raises:
            StepFailed: nothing of the sandbox is left.
        """
        steps = Steps(NSINIT, self.machine.crash)
        cgroup = SessionCgroup(self.tree, session_id)
        with ExitStack() as undo:
            order = MakeCgroup(session_id, limits)
            made = yield from self.cgroup_makers.hand_over(order, [])
            undo.callback(cgroup.remove)
            # Slot and listener are made while the cgroup maker works: mkdir(2) of a cgroup takes milliseconds.
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
                # A cleaner of the machine may have removed the node's directory while no session was in it.
                if made.failure is not None and made.failure.errno == errno.ENOENT and not cgroup.exists():
                    restore(self.tree, owner_of(self.machine.layout.data_dir))
                    made = yield from self.cgroup_makers.hand_over(order, [])
                    yield Wait(event=made.done)
                steps.timings_us |= made.result()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(ours.close)
            with listener, theirs, steps.step("clone"):
                process = self._clone(cgroup, slot, listener, theirs)
            undo.pop_all()
        return UnfinishedSandbox(session_id, process, cgroup, ours, limits, steps)

    def builder_fds(self, sandbox: UnfinishedSandbox, plan: SandboxPlan | None) -> list[int]:
        """Return the descriptors that a builder gets along with an order, in the order that `builder.Order` says."""
        slot = sandbox.process.slot
        fds = [sandbox.process.pidfd, slot.userns_fd, slot.system_userns_fd, sandbox.control.fileno()]
        return fds if plan is None or plan.workspace_id is None else [*fds, self.slots.workspace_userns(slot)]

    def _listen(self, session_id: str, undo: ExitStack) -> socket.socket:
        """Bind the runner's socket in a directory of root and the daemon; inside the sandbox the socket has no name."""
        path = self.machine.layout.session_run(session_id)
        make_directory(path)
        undo.callback(os.rmdir, path)
        directory_fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            undo.callback(listener.close)
            # sun_path holds 108 bytes (unix(7)), and the data directory's path may be longer.
            listener.bind(f"/proc/self/fd/{directory_fd}/{SOCKET_NAME}")
            undo.callback(os.unlink, f"{path}/{SOCKET_NAME}")
            self.machine.layout.share_socket(session_id)
            listener.listen(_BACKLOG)
        finally:
            os.close(directory_fd)
        return listener

    def _clone(self, cgroup: SessionCgroup, slot: Slot, listener: socket.socket, control: socket.socket) -> InitProcess:
        fds = slot.userns_fd, listener.fileno(), control.fileno()
        cgroup_fd = -1 if cgroup.birth_directory is None else os.open(cgroup.birth_directory, os.O_PATH)
        try:
            pid = self.forker.clone(slot.base, cgroup.attach_files, fds, cgroup_fd)
            return InitProcess(pid, os.pidfd_open(pid), slot)
        finally:
            if cgroup_fd >= 0:
                os.close(cgroup_fd)


def _evict(cgroup: SessionCgroup) -> None:
    """Kill and reap a PID 1 that was cloned though the forker died before it could say so."""
    while pids := cgroup.processes():
        cgroup.kill()
        for pid in pids:
            os.waitpid(pid, 0)
