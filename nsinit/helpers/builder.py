"""The builder process: does the builder's steps of `sandbox/build.py` for one sandbox after the other.

A fork of nsinit in nsinit's namespaces. For each order the builder joins the namespaces of a PID 1, works there, goes
back and closes every descriptor that came with the order; only then may that PID 1 go on. So the builder is never in a
namespace in which foreign code runs. A builder that can't go back ends, and the build fails.
nsinit's side is `pool.HelperPool`. Sources: setns(2) (several namespaces by one pidfd); unix(7) SCM_RIGHTS.
"""

from __future__ import annotations

import errno
import gc
import os
import socket
from dataclasses import dataclass
from typing import Literal, NoReturn

from nsinit.helpers.pool import HelperKind
from nsinit.kernel import capabilities, syscalls
from nsinit.kernel import constants as k
from nsinit.kernel.files import keep_only
from nsinit.kernel.seccomp.profile import ProfileError
from nsinit.own_filters import BUILDER as BUILDER_CALLS
from nsinit.sandbox import build
from nsinit.sandbox.builder_steps import JOINED, BuildFacts, SandboxBuild
from nsinit.sandbox.crash_points import BUILDER, FILES
from nsinit.steps import StepFailed, Steps
from nsinit.wire import control
from nsinit.wire.protocol import MAX_DATAGRAM_BYTES, DiskLimits, SandboxPlan
from runner.wire.codec import Vocabulary

NAME = "nsinit-builder"
"""The name in `/proc/<pid>/comm`."""
COUNT = 2
"""Builders in the pool. One works while another waits for the disk; more would only take turns on the processors."""
_MAX_FDS = 5

Stage = Literal["born", "blank", "imaged", "whole"]
"""Progress of a sandbox: PID 1 alone; after `build.BLANK_STEPS`; after `build.IMAGE_STEPS`; after all steps."""


LEAST_SOCKETS = 32
_MEMORY_OF_A_SOCKET = 2 << 20
"""Bytes of a session's memory for each datagram or netlink socket; such a socket can hold some 300 KiB uncharged."""


@dataclass(frozen=True, slots=True)
class Order:
    """Work on one sandbox, from stage `done` to stage `goal` (without a plan: blank). `disk`: limits of its disk.
    `processors`: those that its programs run on.

    Descriptors that come along: pidfd of PID 1, user namespace, map of the machine's files, control socket, and the
    map of the workspace's files if the plan has a workspace.
    """

    session_id: str
    base: int
    plan: SandboxPlan | None
    done: Stage
    goal: Stage
    disk: DiskLimits
    processors: tuple[int, ...] = ()


ORDERS = Vocabulary(Order)


def kind_of(machine: BuildFacts) -> HelperKind:
    """Return the kind of helper that builders are."""

    def live(channel: socket.socket, parent_pid: int) -> NoReturn:
        _live(channel, machine, parent_pid)

    return HelperKind("builder", COUNT, ORDERS, live)


def _live(channel: socket.socket, machine: BuildFacts, parent_pid: int) -> NoReturn:
    """Run the builder until nsinit hangs up. Ends the process, always."""
    try:
        syscalls.end_with_parent(parent_pid)
        # An overlay writes with the credentials of its maker (overlayfs.rst, "Permission model"), and CAP_SYS_RESOURCE
        # exempts from quotas (quotactl(2)): with it no sandbox's disk would have a limit.
        capabilities.give_up(k.CAP_SYS_RESOURCE)
        gc.freeze()  # a finalised object of nsinit's would close a descriptor number that is another file's here
        keep_only({0, 1, 2, channel.fileno(), *machine.volumes.kept_fds})
        os.chdir("/")  # setns(2) into a mount namespace sets the working directory to its root: the same on each way
        home_fd = os.pidfd_open(parent_pid)
        kept = {0, 1, 2, channel.fileno(), home_fd, *machine.volumes.kept_fds}
        syscalls.set_name(NAME)
        if machine.parts is not None:
            machine.parts.enter(BUILDER_CALLS)
        channel.sendall(control.READY)
        while True:
            data, fds, _, _ = socket.recv_fds(channel, MAX_DATAGRAM_BYTES, _MAX_FDS)
            if not data:
                break
            channel.sendall(_serve(ORDERS.decode(data), fds, machine, kept, home_fd))
    finally:
        os._exit(1)


def _serve(order: Order, fds: list[int], machine: BuildFacts, kept: set[int], home_fd: int) -> bytes:
    """Do the work of an order; let PID 1 go on if the sandbox is whole then. Return the answer."""
    pidfd, userns_fd, system_userns_fd, control_fd, *workspace = fds
    is_files = order.plan is not None and order.plan.image_kind == "files"
    steps = Steps(FILES if is_files else BUILDER, machine.crash)
    with socket.socket(fileno=control_fd) as connection:
        of_session = pidfd, userns_fd, system_userns_fd
        sandbox = SandboxBuild(machine, order.session_id, order.base, *of_session, connection, order.disk)
        sandbox.processors = frozenset(order.processors)
        if workspace:
            (sandbox.workspace_userns_fd,) = workspace
        try:
            filter_number = _filter_number(order, machine)
            try:
                _work(order, sandbox, steps)
            finally:
                # Before PID 1 may go on, and also after a failure: nothing of this sandbox is at hand for the next.
                syscalls.setns(home_fd, JOINED)
                keep_only(kept | {control_fd})
            plan = order.plan
            if plan is not None and order.goal == "whole":
                powers = plan.root_inside, plan.open_files, is_files, sockets_in(plan.limits.memory_bytes)
                begin = control.Begin(*sandbox.root_id, filter_number, *powers)
                control.say_begin(connection, begin)
        except StepFailed as error:
            return control.describe(error)
    return control.STATUS.encode(control.StepsDone(steps.timings_us))


def sockets_in(memory_bytes: int) -> int:
    """Return how many datagram and netlink sockets a session of so much memory may have: what they can hold of the
    kernel's memory, uncharged, is about a sixth of that."""
    return max(LEAST_SOCKETS, memory_bytes // _MEMORY_OF_A_SOCKET)


def _filter_number(order: Order, machine: BuildFacts) -> int:
    try:
        return machine.filters.number(order.plan.seccomp) if order.plan is not None else 0
    except ProfileError as error:
        raise StepFailed("seccomp profile", str(error), errno=errno.ENOENT) from None


def _work(order: Order, sandbox: SandboxBuild, steps: Steps) -> None:
    plan, is_born = order.plan, order.done == "born"
    if plan is not None and plan.image_kind == "files":
        steps.run(build.BARE_STEPS if is_born else build.JOIN_STEPS, sandbox)
        steps.run(build.FILES_STEPS, sandbox, plan)
        return
    steps.run(build.BLANK_STEPS if is_born else build.JOIN_STEPS, sandbox)
    if plan is not None:
        if order.done != "imaged":
            steps.run(build.IMAGE_STEPS, sandbox, plan)
        if order.goal == "whole":
            steps.run(build.LAST_STEPS, sandbox, plan)
