"""The system calls PID 1 of a sandbox needs beyond the standard library, as `runner.loop.kernel.Kernel` lists them.

The runner may not import ctypes bindings of its own; it gets this object. Everything is bound before `pivot_root`.
"""

from __future__ import annotations

import os
import signal

from nsinit.kernel import capabilities, landlock, syscalls
from nsinit.kernel import constants as k
from nsinit.kernel.seccomp.filters import command_filter

COMMAND_OOM_SCORE = 500
"""So that a memory hog does not end the sandbox: PID 1's own is 0 as a rule."""


class RunnerKernel:
    """Thin: each method is one system call, or a few. `filters_commands`: the session has a system call filter."""

    def __init__(self, *, filters_commands: bool) -> None:
        self._command_filter = command_filter() if filters_commands else None
        self._oom_fd = -1
        self._oom_scores = b"", b""

    def take_oom_file(self, fd: int, score: int) -> None:
        """Own PID 1's `oom_score_adj`, which says `score`. Without, forks keep the score of PID 1."""
        self._oom_fd = fd
        self._oom_scores = b"%d" % score, b"%d" % max(score, COMMAND_OOM_SCORE)

    def setfsuid(self, uid: int) -> None:
        syscalls.setfsuid(uid)

    def setfsgid(self, gid: int) -> None:
        syscalls.setfsgid(gid)

    def be_first_victim(self, first: bool) -> None:
        try:
            if self._oom_fd >= 0:
                os.write(self._oom_fd, self._oom_scores[first])
        except OSError:
            pass  # the score that it has is a fair one

    def prctl_set_pdeathsig(self) -> None:
        syscalls.prctl(k.PR_SET_PDEATHSIG, signal.SIGKILL)

    def prctl_set_child_subreaper(self) -> None:
        syscalls.prctl(k.PR_SET_CHILD_SUBREAPER, 1)

    def clear_caps(self) -> None:
        syscalls.capset(0)

    def keep_root_caps(self) -> None:
        capabilities.become_root()

    def make_file_rules(self, readable: list[tuple[int, bool]] | None, writable: list[tuple[int, bool]] | None) -> int:
        return landlock.make_file_rules(readable, writable)

    def enter_file_rules(self, rules_fd: int) -> None:
        syscalls.landlock_restrict_self(rules_fd)

    def restrict_command(self) -> None:
        if self._command_filter is not None:
            syscalls.set_filter(self._command_filter)

    def openat2(self, dirfd: int, path: bytes, flags: int, mode: int, resolve: int) -> int:
        return syscalls.openat2(dirfd, path, flags, mode=mode, resolve=resolve)

    def syncfs(self, fd: int) -> None:
        syscalls.syncfs(fd)

    def close_range(self, first: int, last: int) -> None:
        syscalls.close_range(first, last)

    def fork_into_cgroup(self, cgroup_fd: int) -> int:
        return syscalls.fork_into_cgroup(cgroup_fd)
