"""Who PID 1 of a session is, asked of the kernel alone. Reads `/proc`; changes nothing.

A process is PID 1 of a session when it is in the session's cgroup and its innermost pid is 1. Nested pid namespaces
can't be made inside, so there is at most one. Sources: proc_pid_status(5) NSpid; proc_pid_stat(5); pidfd_open(2).
"""

from __future__ import annotations

import errno
import os

from nsinit.cgroup.session import SessionCgroup
from nsinit.steps import StepFailed
from nsinit.wire.protocol import Identity


def find_identity(cgroup: SessionCgroup) -> Identity | None:
    """Return the session's PID 1, or None when nothing of it runs."""
    for pid in cgroup.processes():
        try:
            if _innermost_pid(pid) == 1:
                return read_identity(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while being looked at
    return None


def require_identity(cgroup: SessionCgroup, stage: str) -> Identity:
    """Return the session's PID 1. Raises `StepFailed` at `stage` when nothing of the session runs."""
    identity = find_identity(cgroup)
    if identity is None:
        raise StepFailed(stage, "nothing of the session runs", errno=errno.ESRCH)
    return identity


def read_identity(pid: int) -> Identity:
    """Return the identity of a process.

    Raises:
        FileNotFoundError, ProcessLookupError: it is gone.
    """
    return Identity(
        pid=pid,
        start_ticks=_start_ticks(pid),
        pid_ns=os.stat(f"/proc/{pid}/ns/pid").st_ino,
        base_uid=_base_uid(pid),
    )


def open_verified(identity: Identity) -> int:
    """Return a pidfd of exactly this process: the pid is checked again after opening, in case it was reused."""
    return _of_same_process(os.pidfd_open(identity.pid), identity)


def open_root(identity: Identity) -> int:
    """Return the root directory of exactly this process (O_PATH). Nobody inside can change which one that is."""
    path = f"/proc/{identity.pid}/root"
    return _of_same_process(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), identity)


def _of_same_process(fd: int, identity: Identity) -> int:
    """Return a descriptor that was opened by pid; close it and raise if the pid is another process's by now."""
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
