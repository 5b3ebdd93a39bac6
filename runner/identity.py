"""Doing file system work as the sandbox user: only the uid and gid that file checks use change, and always back.

It must not be held across anything but the calls that need it.

Sources: setfsuid(2); credentials(7); PTRACE_MODE_READ_FSCREDS in ptrace(2) (links below /proc/<pid> check these ids).
"""

from __future__ import annotations

import copy
import os
from types import TracebackType

from runner.config import RunnerConfig
from runner.kernel import Kernel


class UserIdentity:
    """A context within which file system checks are those of the sandbox user. Not reentrant.

    What is created meanwhile belongs to that user, pipes and terminals included: opening `/dev/stdout`, that is
    `/proc/self/fd/1`, checks the owner of the pipe behind it.
    """

    def __init__(self, config: RunnerConfig, kernel: Kernel) -> None:
        self._kernel = kernel
        self._user = (config.uid, config.gid)
        self._own = (os.geteuid(), os.getegid())
        self._groups: tuple[int, ...] = ()
        self._own_groups = tuple(os.getgroups())

    def of(self, uid: int, gid: int, groups: tuple[int, ...]) -> UserIdentity:
        """Return the same for another user."""
        other = copy.copy(self)
        other._user = (uid, gid)
        other._groups = groups
        return other

    def __enter__(self) -> None:
        try:
            if self._groups:
                os.setgroups(self._groups)
            self._kernel.setfsgid(self._user[1])
            self._kernel.setfsuid(self._user[0])
        except BaseException:
            self._restore()
            raise

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _where: TracebackType | None
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        self._kernel.setfsuid(self._own[0])
        self._kernel.setfsgid(self._own[1])
        if self._groups:
            os.setgroups(self._own_groups)
