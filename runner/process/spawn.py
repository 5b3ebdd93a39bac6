"""Starting a program of the sandbox: a fork of PID 1 that becomes the program. The order of the steps in `_become` is
the security of it.

Between fork and execve nothing blocks, nothing is imported, and nothing raises past `_become`. An error there is told
in one line on the program's own standard error, with the exit status that env(1) would have.

A program with a cgroup of its own is born in the cgroup (v2), or enters it before anything else (v1); it never runs
outside. In v2 a write to `cgroup.procs` would take a lock of the whole machine, and milliseconds; clone3 does not.

When the sandbox has no memory left, the kernel is to kill programs first, then forks, and PID 1 last (`fork`,
`set_oom_score`).

Sources: credentials(7), capabilities(7) "Effect of user ID changes on capabilities", PR_SET_DUMPABLE(2const),
proc_pid_oom_score_adj(5), clone(2) CLONE_INTO_CGROUP, cgroups(7), TIOCSCTTY(2const), exec(3) (the search in PATH),
POSIX.1-2024 XCU `env` (exit status).
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import termios
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from runner.loop.context import Context, Descriptor, Refused
from runner.loop.identity import ROOT_ID, UserAccount, UserIdentity
from runner.loop.kernel import FD_MAX, Kernel
from runner.loop.reaper import unblock_signals
from runner.process.process_set import open_proc
from runner.wire.protocol import BirthCgroup

START_FAILED_STATUS = 125
NOT_EXECUTABLE_STATUS = 126
NOT_FOUND_STATUS = 127
_NOT_FOUND = (errno.ENOENT, errno.ENOTDIR)

Membership = tuple[str, int]
"""Way of a program into its cgroup, and the descriptor for that: ("clone", a cgroup v2 directory) or ("join", a v1
`tasks` file open for writing).
"""

_GROUP_NAME = re.compile(r"[a-z0-9-]{1,32}")


def check_group(group: BirthCgroup | None) -> str | None:
    """Return what is wrong with the cgroup that a request names, or None."""
    return None if group is None or _GROUP_NAME.fullmatch(group.name) else "not a name of a group"


def membership_of(group: BirthCgroup | None, descriptor: Descriptor) -> Membership | None:
    """Return how the cgroup of a request is entered, by the descriptor that came with the request.

    Raises:
        Refused: there came none.
    """
    if group is None or group.membership == "none":
        return None
    if descriptor.fd < 0:
        raise Refused("BAD_REQUEST", "the descriptor of the group is missing")
    return group.membership, descriptor.fd


@dataclass(slots=True)
class _Launch:
    """Arguments of `spawn`, for the child."""

    argv: list[str]
    file: str
    env: Mapping[str, str]
    cwds: Sequence[bytes]
    must_enter: bool
    stdio: tuple[int, int, int] | None
    account: UserAccount
    membership: Membership | None
    controlling_terminal: bool
    subreaper: bool
    rules_fd: int
    link: tuple[int, int] | None
    shells_fd: int


def spawn(
    kernel: Kernel,
    argv: list[str],
    *,
    env: Mapping[str, str],
    cwds: Sequence[bytes],
    account: UserAccount,
    file: str | None = None,
    must_enter: bool = False,
    stdio: tuple[int, int, int] | None = None,
    membership: Membership | None = None,
    controlling_terminal: bool = False,
    subreaper: bool = True,
    rules_fd: int = -1,
    link: tuple[int, int] | None = None,
    shells_fd: int = -1,
) -> int:
    """Start a program as a user, with only `stdio` open (default /dev/null); return its pid.

    `file` (default `argv[0]`) is searched for in the PATH of `env` unless it holds a slash. The working directory is
    the first of `cwds` that the user may enter, the root if there is none; with `must_enter` it is `cwds[0]`, or the
    start fails. The program leads a session of its own; with `controlling_terminal` descriptor 0 is the terminal of
    that session. With `subreaper` the program adopts the orphans below it. `rules_fd`: file rules, entered last.
    `link`: one more descriptor, and its number in the program. `shells_fd`: the directory of `file`, kept open until
    execve(2); the program is not dumpable (`find_unreadable_copy`). All descriptors stay the caller's.

    Raises:
        OSError: no process could be made.
    """
    launch = _Launch(
        *(argv, file or argv[0], env, cwds, must_enter, stdio, account, membership, controlling_terminal, subreaper),
        *(rules_fd, link, shells_fd),
    )
    pid = fork(kernel, membership)
    if pid == 0:
        try:
            _become(kernel, launch)
        finally:
            os._exit(START_FAILED_STATUS)  # whatever was raised: the child never goes on as a second PID 1
    return pid


def fork(kernel: Kernel, membership: Membership | None = None) -> int:
    """Fork PID 1; return the pid, 0 in the child. The child is killed before PID 1 when memory is short."""
    kind, group_fd = membership or ("none", -1)
    # A child inherits its parent's score, and could not raise it itself: /proc/self is closed to a process that is not
    # dumpable, and were a fork of PID 1 dumpable for a moment, the sandbox's root could read PID 1's memory in it.
    kernel.raise_oom_score(True)
    pid = -1
    try:
        pid = kernel.fork_into_cgroup(group_fd) if kind == "clone" else os.fork()
    finally:
        if pid:
            kernel.raise_oom_score(False)
    return pid


def _become(kernel: Kernel, launch: _Launch) -> None:
    try:
        _take_streams(launch.stdio)
        if launch.membership is not None and launch.membership[0] == "join":
            os.write(launch.membership[1], b"0")  # 0 is the writer; the cgroup is entered with PID 1's rights
        _take_link(launch)
        _close_others(kernel, launch)
        unblock_signals()
        os.setsid()  # out of PID 1's session and process group
        if launch.subreaper:
            kernel.prctl_set_child_subreaper()
        if launch.controlling_terminal:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # takes a session leader without a terminal: after setsid
        change_user(kernel, launch.account)
        kernel.restrict_command()  # after the change of ids, whose calls the filter may refuse
        os.umask(0o022)
        _enter_directory(launch)  # as the user: a directory that the user may not enter is not entered
        if launch.rules_fd >= 0:
            kernel.enter_file_rules(launch.rules_fd)  # last: the rules are for the program, not for these steps
        if launch.shells_fd >= 0 and launch.account.uid == ROOT_ID:
            kernel.clear_effective_caps()  # with CAP_DAC_OVERRIDE it could read the file, and so be dumpable
    except OSError as error:
        _fail(START_FAILED_STATUS, f"cannot start {launch.argv[0]}", error)
    _execute(launch.file, launch.argv, launch.env)


def _take_link(launch: _Launch) -> None:
    if launch.link is None:
        return
    fd, number = launch.link
    if launch.rules_fd == number:
        launch.rules_fd = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, number)
    os.dup2(fd, number)
    os.set_inheritable(number, True)  # dup2 leaves a descriptor that has the number already as it is


def _close_others(kernel: Kernel, launch: _Launch) -> None:
    """Close all but the three streams, the link, and the rules and the directory of shells, which close on
    execve(2)."""
    first = 3
    for kept_fd in sorted((launch.rules_fd, launch.shells_fd, -1 if launch.link is None else launch.link[1])):
        if kept_fd >= first:
            if kept_fd > first:
                kernel.close_range(first, kept_fd - 1)
            first = kept_fd + 1
    kernel.close_range(first, FD_MAX)


def _take_streams(stdio: tuple[int, int, int] | None) -> None:
    if stdio is not None:  # otherwise 0, 1 and 2 are /dev/null, as in PID 1
        for number, fd in enumerate(stdio):
            os.dup2(fd, number)


def change_user(kernel: Kernel, account: UserAccount, *, is_powerful: bool = True) -> None:
    """Give up PID 1's ids and capabilities. Root keeps the capabilities of the sandbox's root if it `is_powerful`, any
    other user none."""
    os.setgroups(account.groups)  # groups first, the uid last: with it goes the right to change the others
    os.setresgid(account.gid, account.gid, account.gid)
    os.setresuid(account.uid, account.uid, account.uid)
    if account.uid == ROOT_ID and is_powerful:
        kernel.keep_root_caps()
    else:
        kernel.clear_caps()  # from one non-zero uid to another the kernel clears nothing by itself


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
    """Become the program: of the files that the search finds, the first that can be executed."""
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
    """Tell the user, whose standard error may be closed, and exit."""
    try:
        os.write(2, os.fsencode(f"sandkasten: {what}: {os.strerror(error.errno or 0)}\n"))
    finally:
        os._exit(status)


def find_unreadable_copy(shells_fd: int, path: str) -> str | None:
    """Return the path of PID 1's copy of a shell, for a child of PID 1. None: there is no copy, or the session has
    changed its own file since.

    No user may read the copy, so the kernel makes a process that executes the copy not dumpable: to read its memory or
    open its descriptors by `/proc` takes CAP_SYS_PTRACE, and its files there are root's (execve(2),
    PR_SET_DUMPABLE(2const)).
    """
    name = os.path.basename(path)
    try:
        copy, original = os.stat(name, dir_fd=shells_fd), os.stat(path)
    except OSError:  # no directory, no copy
        return None
    is_same = (copy.st_size, int(copy.st_mtime)) == (original.st_size, int(original.st_mtime))
    # By /proc, since the directory is in no mount. After execveat(2) with "" the process would have no name.
    return f"/proc/self/fd/{shells_fd}/{name}" if is_same else None


# Out of memory ------------------------------------------------------------------------------------------------------

_SCORE = b"500"
"""`oom_score_adj` of a program; nsinit raises it while memory is scarce (`memory_watch`). A fork of PID 1 has a lower
score (`fork`): with this one a fork, which is as large as PID 1, would be killed before small programs."""
_FIRST_TRY_S = 0.001
_LAST_TRY_S = 2.0
_TRY_FACTOR = 1.5
"""Pauses between two tries: a fork takes a millisecond or two to become a program."""


def set_oom_score(identity: UserIdentity, pid: int) -> bool:
    """Have the out-of-memory killer end a user's program before PID 1. Return False for a fork that has not yet become
    a program, whose score nobody may write."""
    try:
        # Before execve(2) the fork is not dumpable, and its directory in /proc is root's; afterwards it is the user's.
        with identity:
            fd = open_proc(f"{pid}/oom_score_adj", os.O_WRONLY | os.O_NOFOLLOW)
    except PermissionError:
        return False
    except OSError:
        return True  # it ended this instant
    try:
        os.write(fd, _SCORE)
    except OSError:
        pass  # the score that it has is a fair one
    finally:
        os.close(fd)
    return True


def set_oom_score_soon(
    context: Context, identity: UserIdentity, find_pid: Callable[[], int | None], *, after_s: float = _FIRST_TRY_S
) -> None:
    """Call `set_oom_score` until it succeeds, first after `after_s` and at longer and longer intervals. `find_pid`
    returns None once the fork has ended."""

    def look() -> None:
        pid = find_pid()
        if pid is not None and not set_oom_score(identity, pid) and after_s < _LAST_TRY_S:
            set_oom_score_soon(context, identity, find_pid, after_s=after_s * _TRY_FACTOR)

    context.loop.call_later(after_s, look, lambda _error: None)
