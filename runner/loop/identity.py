"""Users of the image (`UserAccount`), and file system work of PID 1 with the rights of one (`UserIdentity`).

Only the uid and gid that file checks use change, and they always change back. Enter an identity for the calls that need
it and no others. Supplementary groups stay PID 1's, for it has one that it could not take again: a file that only a
group may open is refused to PID 1, and not to the program that is in the group.

Sources: setfsuid(2); credentials(7); PTRACE_MODE_READ_FSCREDS in ptrace(2) (links below /proc/<pid> check these ids).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import TracebackType

from runner.loop.config import RunnerConfig
from runner.loop.kernel import Kernel

ROOT_ID = 0


@dataclass(frozen=True, slots=True)
class UserAccount:
    """A user, as far as a process needs one: ids, supplementary groups, name and home directory."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    name: str
    home: str

    @property
    def variables(self) -> dict[str, str]:
        """Variables that name the user (environ(7))."""
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name}


ROOT = UserAccount(ROOT_ID, ROOT_ID, (), "root", "/root")
"""The sandbox's root, which may be no user of it."""


def sandbox_user(config: RunnerConfig) -> UserAccount:
    """Return the sandbox user's account. The image need not list it."""
    return UserAccount(config.uid, config.gid, (), config.user, config.home)


class UserIdentity:
    """A context within which file system checks are those of a user. Not reentrant.

    Files made within belong to the user, pipes and terminals included: opening `/dev/stdout`, that is
    `/proc/self/fd/1`, checks the owner of the pipe behind it. Root's id brings root's rights, on files of the sandbox's
    own ids, if PID 1 has them to give.
    """

    def __init__(self, account: UserAccount, kernel: Kernel) -> None:
        self.account = account
        self._kernel = kernel
        self._own = (os.geteuid(), os.getegid())

    def of(self, account: UserAccount) -> UserIdentity:
        """Return an identity of another user."""
        return UserIdentity(account, self._kernel)

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
