"""The system calls PID 1 of a sandbox needs beyond the standard library, as `runner.kernel.Kernel` lists them.

The runner may not import ctypes bindings of its own; it gets this object. Everything is bound before `pivot_root`.
"""

from __future__ import annotations

from nsinit import constants as k
from nsinit import syscalls
from nsinit.seccomp.filters import command_filter


class RunnerKernel:
    """Thin: each method is one system call. `filters_commands`: the session has a system call filter."""

    def __init__(self, *, filters_commands: bool) -> None:
        self._command_filter = command_filter() if filters_commands else None

    def setfsuid(self, uid: int) -> None:
        syscalls.setfsuid(uid)

    def setfsgid(self, gid: int) -> None:
        syscalls.setfsgid(gid)

    def prctl_set_dumpable(self, dumpable: bool) -> None:
        syscalls.prctl(k.PR_SET_DUMPABLE, int(dumpable))

    def prctl_set_child_subreaper(self) -> None:
        syscalls.prctl(k.PR_SET_CHILD_SUBREAPER, 1)

    def clear_caps(self) -> None:
        syscalls.capset(0)

    def restrict_command(self) -> None:
        if self._command_filter is not None:
            syscalls.set_filter(self._command_filter)

    def openat2(self, dirfd: int, path: bytes, flags: int, mode: int, resolve: int) -> int:
        return syscalls.openat2(dirfd, path, flags, mode=mode, resolve=resolve)

    def close_range(self, first: int, last: int) -> None:
        syscalls.close_range(first, last)

    def fork_into_cgroup(self, cgroup_fd: int) -> int:
        return syscalls.fork_into_cgroup(cgroup_fd)
