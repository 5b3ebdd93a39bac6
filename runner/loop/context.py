"""What every part of the runner stands on, made once at start. Holds references only.

What runs under which id, so that another connection can reach it. Holds references only.

It must not decide which id a second command may have: several commands may carry one id, and the last one is reached.

Where the answer to a request goes, and where what else comes on its connection goes. Pure declarations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from runner.loop.config import RunnerConfig
from runner.loop.identity import UserIdentity, sandbox_user
from runner.loop.kernel import Kernel
from runner.loop.loop import Loop
from runner.loop.reaper import Reaper
from runner.loop.settings import Settings
from runner.wire.protocol import Kind, TerminalSize


class Reachable(Protocol):
    """A command or program as `Signal`, `Cancel` and `Resize` see it."""

    def signal(self, number: int) -> bool:
        """Send a signal; return whether there was anything to send it to."""

    def cancel(self, *, now: bool) -> None:
        """Begin to end it; `now`: by SIGKILL at once."""

    def resize(self, size: TerminalSize) -> bool:
        """Change the size of its terminal; return whether it has one."""


class Registry:
    """Owns nothing: whoever adds removes."""

    def __init__(self) -> None:
        self._reachable: dict[str, Reachable] = {}

    def add(self, exec_id: str, reachable: Reachable) -> None:
        self._reachable[exec_id] = reachable

    def remove(self, exec_id: str, reachable: Reachable) -> None:
        """Forget it; a later one of the same id stays."""
        if self._reachable.get(exec_id) is reachable:
            del self._reachable[exec_id]

    def get(self, exec_id: str) -> Reachable | None:
        return self._reachable.get(exec_id)

    @property
    def is_empty(self) -> bool:
        """Whether nothing runs or waits to run."""
        return not self._reachable


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


class Job(Protocol):
    """What a running request takes from its connection."""

    def on_data(self, data: bytes) -> None: ...

    def on_end(self) -> None: ...

    def on_cancel(self) -> None: ...

    def on_close(self) -> None: ...

    def on_drained(self) -> None: ...

    @property
    def wants_input(self) -> bool: ...


class Sink(Protocol):
    """Where the answer to a request goes: a connection, or what outlives it (`kept`). `finish` sends the one final
    frame; nothing may follow it."""

    def send(self, kind: Kind, body: bytes) -> None: ...

    def start(self, message: object) -> None: ...

    def finish(self, message: object) -> None: ...

    def refresh_input(self) -> None: ...

    @property
    def is_full(self) -> bool: ...
