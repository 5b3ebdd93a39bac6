"""Doing file system work as the sandbox user: only the uid and gid that file checks use change, and always back.

It must not be held across anything but the calls that need it.

Sources: setfsuid(2); credentials(7); PTRACE_MODE_READ_FSCREDS in ptrace(2) (links below /proc/<pid> check these ids).
"""

from __future__ import annotations

import os
from types import TracebackType

from runner.config import RunnerConfig
from runner.kernel import Kernel


class UserIdentity:
    """A context within which file system checks are those of the sandbox user. Not reentrant."""

    def __init__(self, config: RunnerConfig, kernel: Kernel) -> None:
        self._kernel = kernel
        self._user = (config.uid, config.gid)
        self._own = (os.geteuid(), os.getegid())

    def __enter__(self) -> None:
        try:
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
