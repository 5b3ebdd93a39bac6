"""Settings of a runner: the shape of its sandbox, and limits. Values only.

The defaults describe the sandbox that `nsinit` builds. Tests build smaller ones and say so here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

OUT_BUFFER_BYTES: Final = 512 * 1024
"""Per connection. With more than this unsent, nothing more is read from the pipe or file that feeds it."""

STDIN_BUFFER_BYTES: Final = 1024 * 1024
"""Per run. With more than this not yet taken by the run, nothing more is read from its connection."""

MAX_CONNECTIONS: Final = 128
"""Connections beyond this are closed as they are accepted."""

MAX_LEFTOVER_PIPES: Final = 64
"""Pipes of ended runs that a background job still holds; the oldest beyond this is closed."""

MAX_ENVIRONMENT_BYTES: Final = 512 * 1024
"""All variables of a session together. execve(2) refuses more than a quarter of the stack limit."""


def _go_on(_step: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """`private_dir` is a tmpfs of PID 1's own, mode 0711: commands can open files there by name, and not list them."""

    private_dir: str = "/run/sandkasten"
    uid: int = 1000
    gid: int = 1000
    user: str = "sandbox"
    home: str = "/home/sandbox"
    root_inside: bool = False
    """Whether PID 1 can start programs as root."""
    files_only: bool = False
    """Whether no program runs here: files are read, written, listed and packed, and all else is refused."""
    workspace: str = "/workspace"
    outside_peers_only: bool = True
    """Whether to refuse peers that have a pid in this pid namespace (the daemon has none here)."""

    interrupt_grace_s: float = 0.2
    terminate_grace_s: float = 0.3
    kill_grace_s: float = 0.3
    pick_up_grace_s: float = 2.0
    """Seconds that a shell may leave a command unread before it is replaced."""

    start_grace_s: float = 5.0
    """Seconds that a new shell may take until it reports ready."""

    passing: Callable[[str], None] = _go_on
    """Called with the name of each step that was just done; a test may end the process in it."""

    def base_environment(self) -> dict[str, str]:
        """Return the documented environment every command starts from."""
        return {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": self.home,
            "USER": self.user,
            "LOGNAME": self.user,
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "PWD": self.workspace,
        }
