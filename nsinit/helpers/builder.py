"""The builder process: does the builder's steps of `build` for one sandbox after the other, and keeps nothing of any.

A fork of nsinit in nsinit's namespaces. For each order it joins the namespaces of a PID 1, works, goes back, and closes
every descriptor that came with the order, before it lets that PID 1 go on: it never is in a namespace in which foreign
code runs. If it can't go back it ends, and so does the build. Its other half in nsinit is `workers`.
Sources: setns(2) (several namespaces by one pidfd), unix(7) SCM_RIGHTS.
"""

from __future__ import annotations

import errno
import gc
import os
import socket
from dataclasses import dataclass
from typing import Literal, NoReturn

from nsinit.helpers.pool import Trade
from nsinit.kernel import capabilities, syscalls
from nsinit.kernel import constants as k
from nsinit.kernel.files import keep_only
from nsinit.kernel.seccomp.profile import ProfileError
from nsinit.sandbox import build
from nsinit.sandbox.builder_steps import JOINED, Box, Machine
from nsinit.sandbox.crash_points import BUILDER, FILES
from nsinit.steps import StepFailed, Steps
from nsinit.wire import control
from nsinit.wire.protocol import MAX_DATAGRAM_BYTES, DiskLimits, SandboxPlan
from runner.wire.codec import Vocabulary

NAME = "nsinit-builder"
"""What `/proc/<pid>/comm` says."""
COUNT = 2
"""One works while another waits for the disk; more would only take turns on the processors."""
_MAX_FDS = 5


Stage = Literal["born", "blank", "furnished", "whole"]
"""How far a sandbox is: PID 1 alone, `build.BLANK_STEPS`, `build.IMAGE_STEPS`, all."""


@dataclass(frozen=True, slots=True)
class Order:
    """Work on one sandbox: pidfd, user namespace, map of the machine's files and control socket come along; the
    workspace's map, too, if it has one.

    `done` is how far it is, `goal` how far it is to be; without a plan that is blank, and `disk` is what the disk is
    made for then.
    """

    session_id: str
    base: int
    plan: SandboxPlan | None
    done: Stage
    goal: Stage
    disk: DiskLimits


ORDERS = Vocabulary(Order)


def trade(machine: Machine) -> Trade:
    """Return what `workers` needs."""

    def life(channel: socket.socket, parent_pid: int) -> NoReturn:
        live(channel, machine, parent_pid)

    return Trade("builder", COUNT, ORDERS, life)


def live(channel: socket.socket, machine: Machine, parent_pid: int) -> NoReturn:
    """Run the builder until nsinit hangs up. Ends the process, always."""
    try:
        syscalls.end_with_parent(parent_pid)
        capabilities.give_up(k.CAP_SYS_RESOURCE)  # an overlay writes with its maker's rights: no quota would bind it
        gc.freeze()  # nothing of nsinit's objects may be finalised here: their descriptor numbers are others' now
        keep_only({0, 1, 2, channel.fileno(), *machine.volumes.kept_fds})
        os.chdir("/")  # where setns leads, too
        home_fd = os.pidfd_open(parent_pid)
        kept = {0, 1, 2, channel.fileno(), home_fd, *machine.volumes.kept_fds}
        syscalls.set_name(NAME)
        channel.sendall(control.READY)
        while True:
            data, fds, _, _ = socket.recv_fds(channel, MAX_DATAGRAM_BYTES, _MAX_FDS)
            if not data:
                break
            channel.sendall(_serve(ORDERS.decode(data), fds, machine, kept, home_fd))
    finally:
        os._exit(1)


def _serve(order: Order, fds: list[int], machine: Machine, kept: set[int], home_fd: int) -> bytes:
    """Do the work and, if that is all of it, let PID 1 go on; return the answer."""
    pidfd, userns_fd, system_userns_fd, control_fd, *workspace = fds
    is_files = order.plan is not None and order.plan.image_kind == "files"
    steps = Steps(FILES if is_files else BUILDER, machine.crash)
    with socket.socket(fileno=control_fd) as connection:
        box = Box(machine, order.session_id, order.base, pidfd, userns_fd, system_userns_fd, connection, order.disk)
        if workspace:
            (box.workspace_userns_fd,) = workspace
        try:
            filter_number = _filter_number(order, machine)
            try:
                _work(order, box, steps)
            finally:
                syscalls.setns(home_fd, JOINED)
                keep_only(kept | {control_fd})
            plan = order.plan
            if plan is not None and order.goal == "whole":
                begin = control.Begin(*box.root_id, filter_number, plan.root_inside, plan.open_files, is_files)
                control.say_begin(connection, begin)
        except StepFailed as error:
            return control.describe(error)
    return control.STATUS.encode(control.Furnished(steps.timings_us))


def _filter_number(order: Order, machine: Machine) -> int:
    try:
        return machine.filters.number(order.plan.seccomp) if order.plan is not None else 0
    except ProfileError as error:
        raise StepFailed("seccomp profile", str(error), errno=errno.ENOENT) from None


def _work(order: Order, box: Box, steps: Steps) -> None:
    plan, is_born = order.plan, order.done == "born"
    if plan is not None and plan.image_kind == "files":
        steps.run(build.BARE_STEPS if is_born else build.JOIN_STEPS, box)
        steps.run(build.FILES_STEPS, box, plan)
        return
    steps.run(build.BLANK_STEPS if is_born else build.JOIN_STEPS, box)
    if plan is not None:
        if order.done != "furnished":
            steps.run(build.IMAGE_STEPS, box, plan)
        if order.goal == "whole":
            steps.run(build.LAST_STEPS, box, plan)
