"""A seccomp profile: a default action, and rules that name system calls and test their arguments.

Pure values that cross the wire from the daemon, for an operator's own profiles; `check` bounds them. Of several rules
that match, the strictest counts, whatever their order: a rule that refuses is never undone by one that allows.
Sources: seccomp(2); the OCI runtime specification, `linux.seccomp`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from nsinit.kernel.seccomp.table import FOREIGN_NAMES, NAMES, WIDTHS

Action = Literal["allow", "log", "ask", "errno", "trap", "kill_thread", "kill_process"]
Comparison = Literal["eq", "ne", "lt", "le", "gt", "ge", "masked_eq"]

STRICTNESS: Final[tuple[Action, ...]] = ("allow", "log", "ask", "errno", "trap", "kill_thread", "kill_process")
"""From the mildest to the strictest, as the kernel ranks them. `ask`: PID 1 decides (`runner.server.sockets`), in rules
of our own alone."""

PROFILE_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}\Z")
MAX_PROFILES: Final = 16
MAX_RULES: Final = 500
MAX_NAMES: Final = 1000
"""Names in one rule."""
MAX_ERRNO: Final = 4095
_ARGUMENTS = 6
_WORD = 2**32
_LONG = 2**64


class ProfileError(ValueError):
    """The profile can't be used; says where and why."""


@dataclass(frozen=True, slots=True)
class ArgTest:
    """A comparison of an argument with `value`; for `masked_eq`: `argument & mask == value`."""

    index: int
    op: Comparison
    value: int
    mask: int = 0


@dataclass(frozen=True, slots=True)
class Rule:
    """The action on calls of these names if all of `args` hold. `errno` goes with the action of that name."""

    names: tuple[str, ...]
    action: Action
    errno: int = 1
    args: tuple[ArgTest, ...] = ()


@dataclass(frozen=True, slots=True)
class Profile:
    """`default` is for known calls that no rule matches. What is unknown gets ENOSYS whatever it says."""

    name: str
    default: Action
    rules: tuple[Rule, ...]
    default_errno: int = 1


def check(profile: Profile) -> None:
    """Raise `ProfileError` unless every part of the profile has a meaning, and one that can't be evaded."""
    if PROFILE_NAME.match(profile.name) is None:
        raise ProfileError(f"malformed profile name {profile.name[:40]!r}")
    if len(profile.rules) > MAX_RULES:
        raise ProfileError(f"{profile.name}: more than {MAX_RULES} rules")
    _check_errno(profile.name, profile.default_errno)
    for number, rule in enumerate(profile.rules):
        where = f"{profile.name}: rule {number}"
        if not 0 < len(rule.names) <= MAX_NAMES:
            raise ProfileError(f"{where}: 1 to {MAX_NAMES} names, not {len(rule.names)}")
        _check_errno(where, rule.errno)
        _check_indexes(where, rule.args)
        for name in rule.names:
            _check_call(f"{where}: {name[:40]}", name, rule.args)


def _check_call(where: str, name: str, args: Iterable[ArgTest]) -> None:
    if name in FOREIGN_NAMES:
        return
    if name not in NAMES:
        raise ProfileError(f"{where}: there is no system call of that name")
    for test in args:
        width = WIDTHS.get(name, "")[test.index : test.index + 1]
        if not width:
            raise ProfileError(f"{where}: argument {test.index} can't be compared")
        bound = _WORD if width == "w" else _LONG
        if not (0 <= test.value < bound and 0 <= test.mask < bound):
            raise ProfileError(f"{where}: argument {test.index} can't have that value")


def _check_indexes(where: str, args: tuple[ArgTest, ...]) -> None:
    indexes = [test.index for test in args]
    if any(not 0 <= index < _ARGUMENTS for index in indexes):
        raise ProfileError(f"{where}: an argument's index is 0 to {_ARGUMENTS - 1}")
    if len(set(indexes)) != len(indexes):
        raise ProfileError(f"{where}: the same argument twice; write a rule for each")


def _check_errno(where: str, errno: int) -> None:
    if not 0 <= errno <= MAX_ERRNO:
        raise ProfileError(f"{where}: errno must be between 0 and {MAX_ERRNO}")
