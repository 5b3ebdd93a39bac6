"""A vessel: a process with all its namespaces, born in its session's cgroup, waiting for a plan.

Owns the parent's half of making one: cgroup, id slot, listening socket, clone; each host-visible step has its undo.
What the child does is `child` and `build`. Sources: clone(2) CLONE_INTO_CGROUP; unix(7); pidfd_open(2).
"""

from __future__ import annotations

import os
import signal
import socket
from contextlib import ExitStack
from dataclasses import dataclass, field

from nsinit import build, child, syscalls
from nsinit import constants as k
from nsinit.cgroup_tree import Tree
from nsinit.cgroups import SessionCgroup
from nsinit.paths import SOCKET_NAME, make_directory
from nsinit.protocol import REQUESTS, Build
from nsinit.scheduler import Event
from nsinit.slots import Slot, SlotTable
from nsinit.steps import Steps

NAMESPACES = k.CLONE_NEWNS | k.CLONE_NEWPID | k.CLONE_NEWUTS | k.CLONE_NEWIPC | k.CLONE_NEWNET
_BACKLOG = 64


@dataclass(slots=True)
class Process:
    """PID 1 of a session that this nsinit made. `dead` happens after it was reaped."""

    pid: int
    pidfd: int
    slot: Slot
    dead: Event = field(default_factory=Event)

    def kill(self) -> None:
        """SIGKILL it, and with it everything in its pid namespace."""
        if not self.dead.is_set:
            try:
                syscalls.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass


@dataclass(slots=True)
class Vessel:
    """A waiting process and the socket its plan goes to."""

    session_id: str
    process: Process
    cgroup: SessionCgroup
    control: socket.socket
    steps: Steps


@dataclass(frozen=True, slots=True)
class Foundry:
    """What vessels are made from."""

    machine: build.Machine
    tree: Tree
    slots: SlotTable
    enter: child.Enter

    def make(self, session_id: str, request: Build | None) -> Vessel:
        """Make a vessel. With a request, its limits are in force before the process exists, and it starts on its plan.

        Raises:
            StepFailed: nothing of it is left.
        """
        steps = Steps()
        cgroup = SessionCgroup(self.tree, session_id)
        with ExitStack() as undo:
            with steps.step("cgroup"):
                cgroup.make()
                undo.callback(cgroup.remove)
                if request is not None:
                    cgroup.set_limits(request.plan.limits)
            with steps.step("slot"):
                slot = self.slots.take()
                undo.callback(self.slots.free, slot)
            with steps.step("listener"):
                listener = self._listen(session_id, undo)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(ours.close)
            with listener, theirs:
                box = build.Box(self.machine, session_id, slot, cgroup.attach_files, listener.fileno(), theirs.fileno())
                if request is not None:
                    box.plan, box.workspace_userns_fd = request.plan, self._workspace_userns(slot, request)
                with steps.step("clone"):
                    process = self._clone(cgroup, box, theirs)
            undo.pop_all()
        ours.setblocking(False)
        return Vessel(session_id, process, cgroup, ours, steps)

    def send_plan(self, control: socket.socket, slot: Slot, request: Build) -> None:
        """Hand over a plan, and the map of workspace files if it has a workspace."""
        userns_fd = self._workspace_userns(slot, request)
        socket.send_fds(control, [REQUESTS.encode(request)], [userns_fd] if userns_fd >= 0 else [])

    def _workspace_userns(self, slot: Slot, request: Build) -> int:
        return -1 if request.plan.workspace_id is None else self.slots.workspace_userns(slot)

    def _listen(self, session_id: str, undo: ExitStack) -> socket.socket:
        """Bind the runner's socket where only root gets; inside the sandbox it has no name at all."""
        path = self.machine.layout.session_run(session_id)
        make_directory(path)
        undo.callback(os.rmdir, path)
        directory_fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            undo.callback(listener.close)
            listener.bind(
                f"/proc/self/fd/{directory_fd}/{SOCKET_NAME}"
            )  # sun_path holds 108 bytes; data_dir may not fit
            undo.callback(os.unlink, f"{path}/{SOCKET_NAME}")
            listener.listen(_BACKLOG)
        finally:
            os.close(directory_fd)
        return listener

    def _clone(self, cgroup: SessionCgroup, box: build.Box, control: socket.socket) -> Process:
        cgroup_fd = -1 if cgroup.birth_directory is None else os.open(cgroup.birth_directory, os.O_PATH)
        try:
            pid, pidfd = syscalls.clone3(NAMESPACES, cgroup_fd=cgroup_fd)
            if pid == 0:
                child.live(box, control, self.enter)
        finally:
            if cgroup_fd >= 0:
                os.close(cgroup_fd)
        return Process(pid, pidfd, box.slot)
