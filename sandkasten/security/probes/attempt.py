"""The shape of an attempt, and the one rule that makes a verdict of its answers. Shared by sessions and the daemon.

An attempt is held if every answer is among those expected. Any other answer counts as broken, an unknown error
included, so that an attempt which has gone stale can't pass. Standard library only: the module is sent into sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

HELD, BROKEN, NOT_APPLICABLE = "held", "BROKEN", "not applicable"

Answers = Mapping[str, str]
"""Steps of an attempt and their answers: the name of an errno, `ok`, or a few words."""


class NotApplicable(Exception):
    """Raised by an attempt that proves nothing here; the message says why."""


@dataclass(frozen=True)
class Outcome:
    """Observation of an attempt, and its verdict."""

    verdict: str
    seen: str


@dataclass(frozen=True)
class Attempt:
    """One line of the catalogue.

    `stands_for` is the attack class or the CVE. `run` makes the attempt and returns its answers. `users` are the users
    to attack as; "" means that no user of a session is involved. `layer` names the only protection that refuses the
    attempt: with that protection off, the attempt is expected to be BROKEN. `control` says where the attempt is shown
    to succeed unprotected: "neighbour" inside the neighbour's session, "host" outside as root in namespaces of its own.
    """

    id: str
    group: str
    what: str
    stands_for: str
    expected: tuple[str, ...]
    run: Callable[[Any], Any]  # a probe takes OutsideFacts, an attack a Field and is async
    users: tuple[str, ...] = ("sandbox", "root")
    layer: str = ""
    control: str = ""


@dataclass(frozen=True)
class OutsideFacts:
    """Facts of the outside for attempts inside. No secret is among them: leaks are found by their pattern."""

    outside_pid: int = 0
    outside_paths: tuple[str, ...] = ()
    neighbour_port: int = 0
    abstract_name: str = ""
    ipc_key: int = 0
    inherited: Mapping[str, str] = field(default_factory=dict)


CANARY = "sk-canary-"
"""Beginning of every secret that is laid out to be found; 32 hexadecimal digits follow."""


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
    """Return a decorator that makes an `Attempt` of a function; `name` is `GROUP.NAME`."""

    def wrap(run: Callable[[Any], Any]) -> Attempt:
        group = name.partition(".")[0]
        return Attempt(name, group, what, stands_for, expected, run, users, layer, control)

    return wrap


def collect(namespace: Mapping[str, object]) -> tuple[Attempt, ...]:
    """Return the attempts that a module defines, in order."""
    return tuple(value for value in namespace.values() if isinstance(value, Attempt))


def judge(expected: tuple[str, ...], answers: Answers) -> Outcome:
    """Return the verdict on the answers of an attempt; no answer at all is no hold."""
    wrong = {name: answer for name, answer in answers.items() if answer not in expected}
    shown = wrong or answers
    by_answer: dict[str, list[str]] = {}
    for name, answer in shown.items():
        by_answer.setdefault(answer, []).append(name)
    only_one = len(answers) == 1
    parts = [answer if only_one or (not wrong and len(by_answer) == 1) else f"{', '.join(names)}: {answer}"
             for answer, names in by_answer.items()]  # fmt: skip
    return Outcome(HELD if answers and not wrong else BROKEN, "; ".join(parts) or "no answer")
