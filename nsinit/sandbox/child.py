"""The life of PID 1 from clone3 to the runner: its first steps, the builder's word, power away, the runner.

Never returns into nsinit's code. `control` has the messages on the control socket. `RunnerKernel` is the part of nsinit
that the runner, which may not import ctypes bindings, is given: everything in it is bound before `pivot_root`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import NoReturn, Protocol

from nsinit.kernel import capabilities, landlock, syscalls
from nsinit.kernel import constants as k
from nsinit.kernel.seccomp.filters import command_filter
from nsinit.sandbox import build, init_steps
from nsinit.sandbox.init_steps import Init
from nsinit.steps import StepFailed, failure_of
from nsinit.wire import control


class Runner(Protocol):
    """The program that PID 1 becomes."""

    def rehearse(self) -> None:
        """Touch the objects that serving will touch; no part of the sandbox exists yet."""

    def enter(self, init: Init, on_ready: Callable[[], None]) -> NoReturn:
        """Take the process over; `on_ready` is called when it is about to serve."""


def live(init: Init, runner: Runner) -> NoReturn:
    """Run PID 1. Ends the process, always."""
    try:
        init.steps.run(build.BIRTH_STEPS, init)
        with init.steps.step("rehearsal"):
            runner.rehearse()
        word = control.wait_begin(init.control_fd)
        if word is not None:
            init_steps.begin(init, word)
            init.steps.run(build.POWER_STEPS, init)
            runner.enter(init, lambda: _say_ready(init))
    except StepFailed as error:
        _report(init, error)
    except Exception as error:  # noqa: BLE001 - the last frame of the process: nothing may unwind into nsinit's stack
        _report(init, failure_of("child", error))
    finally:
        os._exit(1)


def _say_ready(init: Init) -> None:
    """Tell nsinit that the runner serves. From here on the sandbox outlives nsinit, unless it has files only.

    Raises `OSError`, and the sandbox dies, when nsinit is gone already.
    """
    syscalls.prctl(k.PR_SET_PDEATHSIG, signal.SIGKILL if init.files_only else 0)
    os.write(init.control_fd, control.STATUS.encode(control.StepsDone(init.steps.timings_us)))
    os.close(init.control_fd)
    os.sched_yield()


def _report(init: Init, error: StepFailed) -> None:
    try:
        os.write(init.control_fd, control.describe(error))
    except OSError:
        pass  # nsinit is gone, or the runner ended after it was ready: then the exit itself is the message


# The runner's system calls --------------------------------------------------------------------------------------------

COMMAND_OOM_SCORE = 250
"""The lowest `oom_score_adj` of commands: a memory hog must not end PID 1, whose own is 0 as a rule."""


class RunnerKernel:
    """The system calls of `runner.loop.kernel.Kernel`, each method one call or a few. `filters_commands`: the session
    has a system call filter."""

    def __init__(self, *, filters_commands: bool) -> None:
        self._command_filter = command_filter() if filters_commands else None
        self._merges_pages = False
        self._oom_fd = -1
        self._oom_scores = b"", b""

    def take_oom_file(self, fd: int, score: int) -> None:
        """Own PID 1's `oom_score_adj`, which says `score`. Without it forks keep the score of PID 1."""
        self._oom_fd = fd
        self._oom_scores = b"%d" % score, b"%d" % max(score, COMMAND_OOM_SCORE)

    def merge_pages(self) -> None:
        """Know that PID 1's pages are offered for merging."""
        self._merges_pages = True

    def keep_pages_apart(self) -> None:
        if self._merges_pages:
            syscalls.advise_all(k.MADV_UNMERGEABLE)

    def setfsuid(self, uid: int) -> None:
        syscalls.setfsuid(uid)

    def setfsgid(self, gid: int) -> None:
        syscalls.setfsgid(gid)

    def raise_oom_score(self, raised: bool) -> None:
        try:
            # A higher score is from nsinit, for as long as memory is scarce (`memory_watch`).
            if self._oom_fd >= 0 and int(os.pread(self._oom_fd, 16, 0)) <= int(self._oom_scores[True]):
                os.write(self._oom_fd, self._oom_scores[raised])
        except OSError:
            pass  # the score that it has is a fair one

    def prctl_set_child_subreaper(self) -> None:
        syscalls.prctl(k.PR_SET_CHILD_SUBREAPER, 1)

    def clear_caps(self) -> None:
        syscalls.capset(0)

    def keep_root_caps(self) -> None:
        capabilities.become_root()

    def clear_effective_caps(self) -> None:
        capabilities.clear_effective()

    def make_file_rules(self, readable: list[tuple[int, bool]] | None, writable: list[tuple[int, bool]] | None) -> int:
        return landlock.make_file_rules(readable, writable)

    def enter_file_rules(self, rules_fd: int) -> None:
        syscalls.landlock_restrict_self(rules_fd)

    def restrict_command(self) -> None:
        if self._command_filter is not None:
            syscalls.set_filter(self._command_filter)

    def openat2(self, dirfd: int, path: bytes, flags: int, mode: int, resolve: int) -> int:
        return syscalls.openat2(dirfd, path, flags, mode=mode, resolve=resolve)

    def inotify_init(self) -> int:
        return syscalls.inotify_init()

    def inotify_add_watch(self, fd: int, path: bytes, mask: int) -> int:
        return syscalls.inotify_add_watch(fd, path, mask)

    def inotify_rm_watch(self, fd: int, watch: int) -> None:
        syscalls.inotify_rm_watch(fd, watch)

    def rename_new(self, old_dir: int, old: bytes, new_dir: int, new: bytes) -> None:
        syscalls.renameat2(old, new, k.RENAME_NOREPLACE, old_dir=old_dir, new_dir=new_dir)

    def close_range(self, first: int, last: int) -> None:
        syscalls.close_range(first, last)

    def fork_into_cgroup(self, cgroup_fd: int) -> int:
        return syscalls.fork_into_cgroup(cgroup_fd)
