"""What runs under which id, so that another connection can reach it. Holds references only.

It must not decide which id a second command may have: several commands may carry one id, and the last one is reached.
"""

from __future__ import annotations

from typing import Protocol

from runner.wire.protocol import TerminalSize


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
