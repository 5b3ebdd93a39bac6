"""What every part of the runner stands on, made once at start. Holds references only."""

from __future__ import annotations

from dataclasses import dataclass

from runner.loop.account import sandbox_user
from runner.loop.config import RunnerConfig
from runner.loop.identity import UserIdentity
from runner.loop.kernel import Kernel
from runner.loop.loop import Loop
from runner.loop.reaper import Reaper
from runner.loop.registry import Registry
from runner.loop.settings import Settings


@dataclass(frozen=True, slots=True)
class Context:
    """`as_user` is entered around file system work on behalf of the session's user, whose account it knows."""

    config: RunnerConfig
    kernel: Kernel
    loop: Loop
    reaper: Reaper
    as_user: UserIdentity
    settings: Settings
    registry: Registry

    @classmethod
    def open(cls, config: RunnerConfig, kernel: Kernel) -> Context:
        """Make the loop and begin to reap; signals must be blocked already."""
        loop = Loop()
        user = UserIdentity(sandbox_user(config), kernel, ends_with_parent=config.files_only)
        return cls(config, kernel, loop, Reaper(loop), user, Settings(config), Registry())

    def file(self, name: str) -> str:
        """Return the path of a file in the private directory."""
        return f"{self.config.private_dir}/{name}"
