"""Identifies PID 1 of a session by the kernel alone. Reads `/proc`; changes nothing.

PID 1 of a session is the process in the session's cgroup whose innermost pid is 1. No pid namespace can be made inside,
so there is at most one. Sources: proc_pid_status(5) NSpid; proc_pid_stat(5); pidfd_open(2).
"""

from __future__ import annotations

import errno
import os

from nsinit.cgroup.session import SessionCgroup
from nsinit.steps import StepFailed
from nsinit.wire.protocol import Identity


def find_identity(cgroup: SessionCgroup) -> Identity | None:
    """Return the identity of the session's PID 1, or None when no process of the session runs."""
    for pid in cgroup.listed():
        try:
            if _innermost_pid(pid) == 1:
                return read_identity(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while being looked at
    return None


def require_identity(cgroup: SessionCgroup, stage: str) -> Identity:
    """Return the identity of the session's PID 1. Raises `StepFailed` at `stage` when the session has no process."""
    identity = find_identity(cgroup)
    if identity is None:
        raise StepFailed(stage, "nothing of the session runs", errno=errno.ESRCH)
    return identity


def read_identity(pid: int) -> Identity:
    """Return the identity of a process.

    Raises:
        FileNotFoundError, ProcessLookupError: the process has ended.
    """
    return Identity(
        pid=pid,
        start_ticks=_start_ticks(pid),
        pid_ns=os.stat(f"/proc/{pid}/ns/pid").st_ino,
        base_uid=_base_uid(pid),
    )


def open_verified(identity: Identity) -> int:
    """Return a pidfd of exactly this process. Raises `OSError`, `ProcessLookupError` when the pid is another process's
    now."""
    return _of_same_process(os.pidfd_open(identity.pid), identity)


def open_root(identity: Identity) -> int:
    """Return the root directory of exactly this process (O_PATH). PID 1 lacks CAP_SYS_CHROOT to change it."""
    path = f"/proc/{identity.pid}/root"
    return _of_same_process(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), identity)


def open_network(identity: Identity) -> int:
    """Return the network namespace of exactly this process."""
    return _of_same_process(os.open(f"/proc/{identity.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC), identity)


def open_mounts(identity: Identity) -> int:
    """Return the mount namespace of exactly this process."""
    return _of_same_process(os.open(f"/proc/{identity.pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC), identity)


def _of_same_process(fd: int, identity: Identity) -> int:
    """Return a descriptor that was opened by pid; close it and raise if the pid belongs to another process now."""
    try:
        if _start_ticks(identity.pid) != identity.start_ticks:
            raise ProcessLookupError(3, "process was replaced")
    except OSError:
        os.close(fd)
        raise
    return fd


def _innermost_pid(pid: int) -> int:
    for line in _read(pid, "status").splitlines():
        if line.startswith("NSpid:"):
            pids = line.split()[1:]
            return int(pids[-1]) if len(pids) > 1 else 0
    return 0


def _start_ticks(pid: int) -> int:
    after_name = _read(pid, "stat").rpartition(")")[2]
    return int(after_name.split()[19])


def _base_uid(pid: int) -> int:
    return int(_read(pid, "uid_map").split()[1])


def _read(pid: int, name: str) -> str:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read().decode("ascii", "replace")
