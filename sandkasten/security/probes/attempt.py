"""What an attempt is, and how its answers become a verdict. Shared by what runs inside a session and by the daemon.

Owns the shape and the one rule of judging: an attempt is held if every answer it got is among those expected. Any other
answer counts as broken, an unknown error included, so that an attempt which has gone stale can't pass.
Standard library only: it is sent into sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

HELD, BROKEN, NOT_APPLICABLE = "held", "BROKEN", "not applicable"

Answers = Mapping[str, str]
"""What was tried, and what came of it: the name of an errno, `ok`, or a few words."""


class NotApplicable(Exception):
    """This attempt says nothing here; the message says why."""


@dataclass(frozen=True)
class Outcome:
    """What was seen, and what that means."""

    verdict: str
    seen: str


@dataclass(frozen=True)
class Attempt:
    """One line of the catalogue.

    `stands_for` is the attack class or the CVE. `run` makes the attempt and returns its answers. `users` are those it
    is made as; "" means that no user of a session matters. `layer` names the protection that alone refuses it: with
    that one off, it is expected to be BROKEN. `control` says how the same attempt is shown to succeed unprotected:
    "neighbour" inside the session that is looked for, "host" outside as root in namespaces of its own.
    """

    id: str
    group: str
    what: str
    stands_for: str
    expected: tuple[str, ...]
    run: Callable[[Any], Any]  # a probe takes a Target, an attack a Field and is async
    users: tuple[str, ...] = ("sandbox", "root")
    layer: str = ""
    control: str = ""


@dataclass(frozen=True)
class Target:
    """What an attempt inside has to know of the outside. No secret is among it: what leaks is found by its pattern."""

    outside_pid: int = 0
    outside_paths: tuple[str, ...] = ()
    neighbour_port: int = 0
    abstract_name: str = ""
    ipc_key: int = 0
    inherited: Mapping[str, str] = field(default_factory=dict)


CANARY = "sk-canary-"
"""How every secret begins that is laid out to be found; 32 hexadecimal digits follow."""


def attempt(
    name: str,
    what: str,
    stands_for: str,
    expected: tuple[str, ...],
    *,
    users: tuple[str, ...] = ("sandbox", "root"),
    layer: str = "",
    control: str = "",
) -> Callable[[Callable[[Any], Any]], Attempt]:
    """Make an `Attempt` of the function that makes it; `name` is `GROUP.NAME`."""

    def wrap(run: Callable[[Any], Any]) -> Attempt:
        group = name.partition(".")[0]
        return Attempt(name, group, what, stands_for, expected, run, users, layer, control)

    return wrap


def collect(namespace: Mapping[str, object]) -> tuple[Attempt, ...]:
    """Return the attempts that a module defines, in order."""
    return tuple(value for value in namespace.values() if isinstance(value, Attempt))


def judge(expected: tuple[str, ...], answers: Answers) -> Outcome:
    """Return the verdict on what came of an attempt; no answer at all is no hold."""
    wrong = {name: answer for name, answer in answers.items() if answer not in expected}
    shown = wrong or answers
    by_answer: dict[str, list[str]] = {}
    for name, answer in shown.items():
        by_answer.setdefault(answer, []).append(name)
    only_one = len(answers) == 1
    parts = [answer if only_one or (not wrong and len(by_answer) == 1) else f"{', '.join(names)}: {answer}"
             for answer, names in by_answer.items()]  # fmt: skip
    return Outcome(HELD if answers and not wrong else BROKEN, "; ".join(parts) or "no answer")
