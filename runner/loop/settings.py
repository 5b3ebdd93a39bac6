"""Settings that the daemon may change while the sandbox runs: the session's variables, the graces of the kill ladder,
the file rules. Every change of a variable has a number, so that a shell can ask for the changes it has missed.

Sources: execve(2) "Limits on size of arguments and environment".
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from runner.loop.config import MAX_ENVIRONMENT_BYTES, RunnerConfig
from runner.wire.protocol import Graces

Change = tuple[int, str, str | None]
"""The number of a change, the variable's name and its new value."""


class Settings:
    """`env` holds the variables of a new process of the session; `revision` counts the changes of `env`. Graces are in
    seconds."""

    def __init__(self, config: RunnerConfig) -> None:
        self.interrupt_grace_s = config.interrupt_grace_s
        self.terminate_grace_s = config.terminate_grace_s
        self.kill_grace_s = config.kill_grace_s
        self.env = config.base_environment()
        self.revision = 0
        self.rules_fd = -1
        """The ruleset of the session's file rules, -1 if it has none."""
        self.image_dir: str | None = None
        """The directory that the session's image says, in which programs start; None: it says none."""
        self._changes: dict[str, tuple[int, str | None]] = {}

    def set_graces(self, graces: Graces) -> None:
        self.interrupt_grace_s = max(0, graces.interrupt_ms) / 1000
        self.terminate_grace_s = max(0, graces.terminate_ms) / 1000
        self.kill_grace_s = max(0, graces.kill_ms) / 1000

    def change(self, env: Mapping[str, str | None]) -> None:
        """Set variables, or remove those that are None. `check` must have found nothing wrong with them."""
        self.revision += 1
        for name, value in env.items():
            self._changes[name] = (self.revision, value)
            if value is None:
                self.env.pop(name, None)
            else:
                self.env[name] = value

    @property
    def has_changes(self) -> bool:
        """Whether a variable was set or removed."""
        return bool(self._changes)

    def changes_since(self, revision: int) -> list[Change]:
        """Return the last change of each variable that changed after `revision`."""
        if revision == self.revision:
            return []
        return [(number, name, value) for name, (number, value) in self._changes.items() if number > revision]

    def check(self, env: Mapping[str, str | None]) -> str | None:
        """Return why a change is refused, or None."""
        problem = check_environment(env)
        if problem is None and self._size_with(env) > MAX_ENVIRONMENT_BYTES:
            problem = f"the environment would exceed {MAX_ENVIRONMENT_BYTES} bytes"
        return problem

    def _size_with(self, env: Mapping[str, str | None]) -> int:
        known = {name: value for name, (_, value) in self._changes.items()}
        return sum(len(name) + len(value or "") + 2 for name, value in {**known, **env}.items())


def check_environment(env: Mapping[str, str | None]) -> str | None:
    """Return what is wrong with names or values that no process could be given, or None."""
    for name, value in env.items():
        if not is_variable_name(name):
            return f"not a variable name: {name[:64]!r}"
        if value is not None and not is_argument(value):
            return f"not a value of a variable: {name[:64]!r}"
    return None


def is_argument(text: str) -> bool:
    """Return whether `text` can be handed to a program: no NUL character, no lone surrogate but a hidden byte."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return "\0" not in text


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def is_variable_name(name: str) -> bool:
    """Return whether a shell can assign to `name`; the driver's own names are refused."""
    return _NAME.match(name) is not None and not is_own(name)


def is_own(name: str) -> bool:
    """Return whether a variable or function of that name belongs to the driver."""
    return name.startswith("__sk_")
