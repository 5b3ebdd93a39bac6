"""Run cgroups: one for each program or shell, inside the session's cgroup, so that every process it started is found
again.

Owns their making, their end, and the descriptor by which the session's PID 1 starts a process in one. A run cgroup is
in one hierarchy and has no limit: those of the session, above it, hold. No function waits in place.

Why handing the descriptor to PID 1, which lives next to hostile code, gives nothing away:
- In a v2 tree the descriptor is a read-only detached mount of the run cgroup's directory alone: `..` leads nowhere, and
  no file can be opened for writing. It serves CLONE_INTO_CGROUP, where the kernel asks who may write `cgroup.procs` of
  the run cgroup and of the ancestor it shares with the caller's cgroup, the session; these two files become PID 1's (a
  uid no command has). Nobody in the sandbox has a path to either, and the most that could be done with them is to move
  the session's own processes between the session's own directories.
- In v1 the descriptor is the run cgroup's `tasks`, where the credentials of the opener count. Pids written are looked
  up in the writer's pid namespace, so again only the session's own processes can be moved.

Sources: clone(2) CLONE_INTO_CGROUP; Documentation/admin-guide/cgroup-v2.rst, "Delegation"; open_tree(2).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from functools import partial
from typing import Literal

from nsinit.cgroup.session import MAX_RUN_CGROUPS, SessionCgroup, kill_listed, read_processes, was_removed
from nsinit.kernel import constants as k
from nsinit.kernel import mounts
from nsinit.kernel.capabilities import RUNNER_ID
from nsinit.kernel.files import write_file
from nsinit.scheduler import Wait

Membership = Literal["clone", "join"]

_REMOVAL_BACKOFF_S = (0.001, 0.002, 0.004, 0.01, 0.02, 0.05, 0.1, 0.2)
"""Pauses between attempts to remove a run cgroup: together less than a teardown, which waits for its turn, may be
delayed."""


def make(cgroup: SessionCgroup, name: str, base_uid: int) -> None:
    """Make a run cgroup for the PID 1 with ids from `base_uid`. Called by the cgroup maker.

    Raises:
        OSError: nothing of the run cgroup is left. FileExistsError: one of that name exists; BlockingIOError: the
            session
        has `MAX_RUN_CGROUPS`.
    """
    if len(cgroup.run_cgroup_directories()) >= MAX_RUN_CGROUPS:
        raise BlockingIOError(errno.EAGAIN, f"the session has {MAX_RUN_CGROUPS} run cgroups", cgroup.run_cgroup_parent)
    directory = f"{cgroup.run_cgroup_parent}/{name}"
    os.mkdir(directory, 0o755)
    try:
        if cgroup.tree.mode != "v1":
            # CLONE_INTO_CGROUP asks for write access to cgroup.procs of both (cgroup-v2.rst, "Delegation Containment").
            for each in (cgroup.run_cgroup_parent, directory):
                os.chown(f"{each}/cgroup.procs", base_uid + RUNNER_ID, -1)
    except OSError:
        os.rmdir(directory)
        raise


def unmake(cgroup: SessionCgroup, name: str) -> None:
    """Remove a run cgroup whose descriptor was not handed out yet, if it exists."""
    was_removed(f"{cgroup.run_cgroup_parent}/{name}")


def open_membership(cgroup: SessionCgroup, name: str) -> tuple[Membership, int]:
    """Return how the descriptor of a new run cgroup is used, and the descriptor, which the caller owns.

    Raises:
        OSError: the run cgroup is gone.
    """
    directory = f"{cgroup.run_cgroup_parent}/{name}"
    try:
        if cgroup.tree.mode == "v1":
            return "join", os.open(f"{directory}/tasks", os.O_WRONLY | os.O_CLOEXEC)
        return "clone", mounts.clone(k.AT_FDCWD, directory, k.MOUNT_ATTR_RDONLY | mounts.INERT)
    except OSError:
        os.rmdir(directory)
        raise


def remove(cgroup: SessionCgroup, name: str, *, kill: bool) -> Generator[Wait, bool, bool]:
    """Remove a run cgroup, killing its processes with `kill`; False if a process in it lives on.

    A run cgroup just emptied is busy for a moment, and so is one whose processes are on their way out of the kernel.
    """
    directory = f"{cgroup.run_cgroup_parent}/{name}"
    for pause_s in _REMOVAL_BACKOFF_S:
        if kill:
            _kill(cgroup, directory)
        if was_removed(directory):
            return True
        if not kill and read_processes(directory):
            return False
        yield Wait(timeout_s=pause_s)
    return was_removed(directory)


def _kill(cgroup: SessionCgroup, directory: str) -> None:
    """SIGKILL every process of a run cgroup. In v1, where that goes one by one, a limit of 0 keeps new ones from being
    born."""
    try:
        if cgroup.tree.mode != "v1":
            write_file(f"{directory}/cgroup.kill", "1")
            return
        write_file(f"{directory}/pids.max", "0")  # forks fail from here on (cgroup-v1/pids.rst)
    except FileNotFoundError:
        return  # removed before
    kill_listed(partial(read_processes, directory))
