"""The mounts of the namespace that nsinit was started in, seen and undone after it has left that.

Owns two descriptors: its mount table, and itself. To undo a mount takes being there, so a short-lived process that
holds nothing else goes back; it is given up on after a while, for a file system whose server is gone can hold it.
Sources: mount_namespaces(7); setns(2); proc_pid_mountinfo(5); pidfd_open(2).
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from nsinit.kernel import constants as k
from nsinit.kernel import syscalls
from nsinit.kernel.files import keep_only
from nsinit.log import log
from nsinit.scheduler import Wait
from nsinit.server.hand_mounts import HandMount, detach_at, finder, open_table

DETACH_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class MachineMounts:
    """See the module's docstring. `data_dir` is the real path; `stuck`: pidfds of those that were given up on."""

    data_dir: str
    table_fd: int
    namespace_fd: int
    stuck: list[int] = field(default_factory=list)

    @classmethod
    def open(cls, data_dir: str) -> MachineMounts:
        """Open those of the namespace that this process is in now. Raises `OSError`."""
        table_fd = open_table()
        try:
            namespace_fd = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            os.close(table_fd)
            raise
        return cls(os.path.realpath(data_dir), table_fd, namespace_fd)

    def close(self) -> None:
        """Let go of the namespace."""
        for fd in (self.table_fd, self.namespace_fd, *self.stuck):
            os.close(fd)

    def find(self) -> Sequence[HandMount]:
        """Return what was made by hand, the last first. Raises `OSError`."""
        return finder(self.data_dir, self.table_fd)()

    def detach(self, point: str) -> Generator[Wait, bool, bool]:
        """Detach what is on a point below a place; False if something is left, and while somebody is stuck."""
        if self._is_stuck():
            return False
        parent_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._detach_and_exit(point, parent_pid)
        pidfd = os.pidfd_open(pid)
        if not (yield Wait(fd=pidfd, timeout_s=DETACH_DEADLINE_S)):
            syscalls.pidfd_send_signal(pidfd, signal.SIGKILL)
            if not (yield Wait(fd=pidfd, timeout_s=DETACH_DEADLINE_S)):
                self.stuck.append(pidfd)
                log("error", "a mount is left", path=point, reason="who was to detach it can't be killed")
                return False
        status = _reap(pidfd)
        if status:
            log("error", "a mount is left", path=point, reason=os.strerror(status))
        return not status

    def _is_stuck(self) -> bool:
        for pidfd in list(self.stuck):
            if os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG) is not None:
                self.stuck.remove(pidfd)
                os.close(pidfd)
        return bool(self.stuck)

    def _detach_and_exit(self, point: str, parent_pid: int) -> NoReturn:
        """The exit status is the errno."""
        status = errno.EIO
        try:
            syscalls.end_with_parent(parent_pid)
            keep_only({self.namespace_fd})
            syscalls.setns(self.namespace_fd, k.CLONE_NEWNS)
            detach_at(point, finder(self.data_dir, open_table()))  # in nsinit's table it would move the kernel's place
            status = 0
        except OSError as error:
            status = error.errno or errno.EIO
        finally:
            os._exit(status)


def _reap(pidfd: int) -> int:
    """Return the exit status of a process that has ended, EINTR if it was killed."""
    try:
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    finally:
        os.close(pidfd)
    return result.si_status if result and result.si_code == os.CLD_EXITED else errno.EINTR
