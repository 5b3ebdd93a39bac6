"""Doing file system work as the session's user: only the uid and gid that file checks use change, and always back.

It must not be held across anything but the calls that need it. Supplementary groups stay PID 1's: it has one that it
could not take again, so what only a group opens is the business of the process that has it.

Sources: setfsuid(2); credentials(7); PTRACE_MODE_READ_FSCREDS in ptrace(2) (links below /proc/<pid> check these ids).

A user of the image, as far as a process needs it. Values only.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import TracebackType

from runner.loop.config import RunnerConfig
from runner.loop.kernel import Kernel

ROOT_ID = 0


@dataclass(frozen=True, slots=True)
class Account:
    """What a process of a user has: ids, supplementary groups, name and home directory."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    name: str
    home: str

    @property
    def variables(self) -> dict[str, str]:
        """The variables that say who one is (environ(7))."""
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name}


def sandbox_user(config: RunnerConfig) -> Account:
    """Return the sandbox user's account, which is there whatever the image says."""
    return Account(config.uid, config.gid, (), config.user, config.home)


class UserIdentity:
    """A context within which file system checks are those of a user. Not reentrant.

    What is created meanwhile belongs to that user, pipes and terminals included: opening `/dev/stdout`, that is
    `/proc/self/fd/1`, checks the owner of the pipe behind it. With root's id come root's rights, on files of the
    sandbox's own ids, if PID 1 may give them at all.
    """

    def __init__(self, account: Account, kernel: Kernel, *, ends_with_parent: bool = False) -> None:
        self.account = account
        self._kernel, self._ends_with_parent = kernel, ends_with_parent
        self._own = (os.geteuid(), os.getegid())

    def of(self, account: Account) -> UserIdentity:
        """Return the same for another user."""
        return UserIdentity(account, self._kernel, ends_with_parent=self._ends_with_parent)

    def __enter__(self) -> None:
        try:
            self._kernel.setfsgid(self.account.gid)
            self._kernel.setfsuid(self.account.uid)
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
        if self._ends_with_parent:  # the kernel forgets that when ids change (prctl(2), PR_SET_PDEATHSIG)
            self._kernel.prctl_set_pdeathsig()
