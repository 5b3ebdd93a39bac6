"""Turning a fork of PID 1 into a program of the sandbox. The order of the steps is the security of it.

It must not run between fork and execve anything that can block, import or raise past `_become`. What goes wrong there
is told in one line on the program's own standard error, with the exit status that env(1) would have.

A program with a cgroup of its own is born in it (v2), or enters it before anything else (v1); it never runs outside.
In v2 writing to `cgroup.procs` would take a lock of the whole machine, and milliseconds; clone3 does not.

Sources: credentials(7), capabilities(7) "Effect of user ID changes on capabilities", PR_SET_DUMPABLE(2const),
proc_pid_oom_score_adj(5), clone(2) CLONE_INTO_CGROUP, cgroups(7), TIOCSCTTY(2const), exec(3) (the search in PATH),
POSIX.1-2024 XCU `env` (exit status).
"""

from __future__ import annotations

import errno
import fcntl
import os
import termios
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from runner.config import RunnerConfig
from runner.kernel import FD_MAX, Kernel
from runner.reaper import unblock_signals

START_FAILED_STATUS = 125
NOT_EXECUTABLE_STATUS = 126
NOT_FOUND_STATUS = 127
_NOT_FOUND = (errno.ENOENT, errno.ENOTDIR)

Membership = tuple[str, int]
"""How a program comes into its cgroup, and the descriptor for it: ("clone", a cgroup v2 directory) or ("join", a v1
`tasks` file open for writing)."""

User = tuple[int, int, Sequence[int]]
"""Uid, gid and supplementary groups."""


@dataclass(slots=True)
class _Launch:
    """What the child needs to know."""

    argv: list[str]
    file: str
    env: Mapping[str, str]
    cwds: Sequence[bytes]
    must_enter: bool
    stdio: tuple[int, int, int] | None
    user: User
    membership: Membership | None
    controlling_terminal: bool
    subreaper: bool


def spawn(
    kernel: Kernel,
    config: RunnerConfig,
    argv: list[str],
    *,
    env: Mapping[str, str],
    cwds: Sequence[bytes],
    file: str | None = None,
    must_enter: bool = False,
    stdio: tuple[int, int, int] | None = None,
    user: User | None = None,
    membership: Membership | None = None,
    controlling_terminal: bool = False,
    subreaper: bool = True,
) -> int:
    """Start a program as the sandbox user, or as `user`, with only `stdio` open (default /dev/null); return its pid.

    `file` (default `argv[0]`) is searched for in its PATH unless it holds a slash. Its directory is the first of `cwds`
    that the user may enter, the root if there is none; with `must_enter` it is `cwds[0]` or the start fails. It leads a
    session of its own; with `controlling_terminal` descriptor 0 is the terminal of that. With `subreaper` it adopts the
    orphans below it. All descriptors stay the caller's.

    Raises:
        OSError: no process could be made.
    """
    who = user or (config.uid, config.gid, ())
    launch = _Launch(
        *(argv, file or argv[0], env, cwds, must_enter, stdio, who, membership, controlling_terminal, subreaper)
    )
    kind, group_fd = membership or ("none", -1)
    pid = kernel.fork_into_cgroup(group_fd) if kind == "clone" else os.fork()
    if pid == 0:
        try:
            _become(kernel, launch)
        finally:
            os._exit(START_FAILED_STATUS)
    return pid


def _become(kernel: Kernel, launch: _Launch) -> None:
    try:
        _take_streams(launch.stdio)
        if launch.membership is not None and launch.membership[0] == "join":
            os.write(launch.membership[1], b"0")
        kernel.close_range(3, FD_MAX)
        unblock_signals()
        os.setsid()
        if launch.subreaper:
            kernel.prctl_set_child_subreaper()
        if launch.controlling_terminal:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        kernel.prctl_set_dumpable(True)  # while still PID 1's uid: later it would bare /proc/<pid>/exe to a command
        _write_oom_score_adj()
        uid, gid, groups = launch.user
        os.setgroups(groups)
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        kernel.clear_caps()  # non-zero to non-zero uid: the kernel keeps them unless told
        kernel.restrict_command()
        os.umask(0o022)
        _enter_directory(launch)
    except OSError as error:
        _fail(START_FAILED_STATUS, f"cannot start {launch.argv[0]}", error)
    _execute(launch.file, launch.argv, launch.env)


def _take_streams(stdio: tuple[int, int, int] | None) -> None:
    if stdio is not None:  # otherwise 0, 1 and 2 are /dev/null, as in PID 1
        for number, fd in enumerate(stdio):
            os.dup2(fd, number)


def _write_oom_score_adj() -> None:
    """Make the out-of-memory killer prefer commands over PID 1, so that a memory hog does not end the sandbox."""
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, b"500")
        finally:
            os.close(fd)
    except OSError:
        pass  # /proc may be masked further; the default score is a fair one


def _enter_directory(launch: _Launch) -> None:
    if launch.must_enter:
        os.chdir(launch.cwds[0])
        return
    for cwd in (*launch.cwds, b"/"):
        try:
            os.chdir(cwd)
        except OSError:
            continue
        return


def _execute(file: str, argv: list[str], env: Mapping[str, str]) -> NoReturn:
    """Become the program: the first that can be executed of those the search finds."""
    failure = OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    for path in _candidates(file, env):
        try:
            os.execve(path, argv, env)
        except OSError as error:
            if error.errno == errno.ENOEXEC:  # a script without `#!`
                failure = _run_script(path, argv, env)
                break
            if failure.errno in _NOT_FOUND:
                failure = error
            if error.errno not in (*_NOT_FOUND, errno.EACCES):
                break
    _fail(NOT_FOUND_STATUS if failure.errno in _NOT_FOUND else NOT_EXECUTABLE_STATUS, argv[0], failure)


def _candidates(file: str, env: Mapping[str, str]) -> list[str]:
    if "/" in file:
        return [file]
    return [os.path.join(directory or ".", file) for directory in env.get("PATH", os.defpath).split(":")]


def _run_script(path: str, argv: list[str], env: Mapping[str, str]) -> OSError:
    try:
        os.execve("/bin/sh", ["/bin/sh", path, *argv[1:]], env)
    except OSError as error:
        return error


def _fail(status: int, what: str, error: OSError) -> NoReturn:
    """Tell the user, who may have closed what it is written to, and end."""
    try:
        os.write(2, os.fsencode(f"sandkasten: {what}: {os.strerror(error.errno or 0)}\n"))
    finally:
        os._exit(status)
