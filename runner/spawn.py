"""Turning a fork of PID 1 into a program of the sandbox user. The order of the steps is the security of it.

It must not run between fork and execve anything that can block, import or raise past `_become`.

Sources: credentials(7), capabilities(7) "Effect of user ID changes on capabilities", PR_SET_DUMPABLE(2const),
proc_pid_oom_score_adj(5).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from runner.config import RunnerConfig
from runner.kernel import FD_MAX, Kernel
from runner.reaper import default_signals

EXEC_FAILED_STATUS = 127


def spawn(
    kernel: Kernel,
    config: RunnerConfig,
    argv: list[str],
    *,
    env: Mapping[str, str],
    cwds: Sequence[bytes],
) -> int:
    """Start `argv[0]` (an absolute path) as the sandbox user with only /dev/null open; return its pid.

    It leads a session of its own and adopts the orphans below it. Its directory is the first of `cwds` it may enter.
    """
    pid = os.fork()
    if pid == 0:
        try:
            _become(kernel, config, argv, env, cwds)
        finally:
            os._exit(EXEC_FAILED_STATUS)
    return pid


def _become(
    kernel: Kernel, config: RunnerConfig, argv: list[str], env: Mapping[str, str], cwds: Sequence[bytes]
) -> None:
    default_signals()
    os.setsid()
    kernel.prctl_set_child_subreaper()
    kernel.close_range(3, FD_MAX)  # 0, 1 and 2 are /dev/null in PID 1 too
    kernel.prctl_set_dumpable(True)  # while still PID 1's uid: afterwards it would bare /proc/<pid>/exe to the sandbox
    _write_oom_score_adj()
    os.setgroups([])
    os.setresgid(config.gid, config.gid, config.gid)
    os.setresuid(config.uid, config.uid, config.uid)
    kernel.clear_caps()  # non-zero to non-zero uid: the kernel keeps them unless told
    os.umask(0o022)
    _enter_first(cwds)
    os.execve(argv[0], argv, env)


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


def _enter_first(cwds: Sequence[bytes]) -> None:
    for cwd in (*cwds, b"/"):
        try:
            os.chdir(cwd)
        except OSError:
            continue
        return
