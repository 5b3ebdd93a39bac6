"""Work that may wait for the disk, in a process of its own, whose exit status is the errno of its failure.

A chore is a fork of nsinit that keeps few descriptors and ends with nsinit. Sources: pidfd_open(2); waitid(2).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Generator

from nsinit.kernel import syscalls
from nsinit.kernel.files import keep_only
from nsinit.scheduler import Wait
from nsinit.steps import StepFailed

CHORE_S = 25.0
"""Less than the daemon waits for an answer."""

Chore = Generator[Wait, bool, None]


def run_chore(
    stage: str,
    path: str,
    work: Callable[[], None],
    kept_fds: frozenset[int] = frozenset(),
    *,
    most_s: float = CHORE_S,
) -> Chore:
    """Do work that may take long in a process of its own, for `most_s` seconds at most.

    Raises:
        StepFailed: of `stage`, with the errno that the process ended with, and `path`.
    """
    parent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        _end_with(work, kept_fds, parent_pid)
    pidfd = os.pidfd_open(pid)
    try:
        in_time = yield Wait(fd=pidfd, timeout_s=most_s)
        if not in_time:
            syscalls.pidfd_send_signal(pidfd, 9)
            yield Wait(fd=pidfd)
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    finally:
        os.close(pidfd)
    status = result.si_status if result is not None and result.si_code == os.CLD_EXITED else errno.ETIMEDOUT
    if status:
        raise StepFailed(stage, os.strerror(status).lower(), path=path, errno=status)


def _end_with(work: Callable[[], None], kept_fds: frozenset[int], parent_pid: int) -> None:
    status = errno.EIO
    try:
        syscalls.end_with_parent(parent_pid)  # the next nsinit must not meet work of this one
        keep_only({0, 1, 2, *kept_fds})
        work()
        status = 0
    except (OSError, StepFailed) as error:
        status = error.errno or errno.EIO
    finally:
        os._exit(status)
