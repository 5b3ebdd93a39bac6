"""A user of the image, as far as a process needs it. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from runner.loop.config import RunnerConfig

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
