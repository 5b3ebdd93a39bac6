"""Makes trials in forked processes that may unshare, mount, be killed or hang.

Owns the shape of an answer. A trial returns what it saw, raises `FallsBack` where the product then works in another
way, and raises any other exception when the feature does not work.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

TIMEOUT_S = 10.0
_PIECE_BYTES = 64 * 1024

Answer = dict[str, object]
"""`verdict` (works, falls_back, missing), `seen`, `errno` (0: no call failed) and `facts`."""


@dataclass(frozen=True, slots=True)
class Room:
    """The directory that trials may write to, and whether trials are wanted that take a while or write to the kernel's
    log."""

    directory: str
    is_thorough: bool


@dataclass(frozen=True, slots=True)
class Seen:
    """A trial's finding in words, with facts for programs."""

    text: str
    facts: dict[str, object] = field(default_factory=dict)


class FallsBack(Exception):
    """The feature does not work, and the product has another way."""

    def __init__(self, seen: str, **facts: object) -> None:
        super().__init__(seen)
        self.facts = facts


Trial = Callable[[Room], Seen | str]


def attempt(trials: dict[str, Trial], room: Room) -> dict[str, Answer]:
    """Make trials one after the other in one process of their own and return their answers.

    When a trial ends or blocks that process, it and those after it are made again, each in a process of its own, so
    that no trial answers for another. A fork costs more than most trials.
    """
    answers, _ = _run(trials, room)
    for name, trial in trials.items():
        if name not in answers:
            found, end = _run({name: trial}, room)
            answers[name] = found.get(name) or _answer("missing", end)
    return answers


def _run(trials: dict[str, Trial], room: Room) -> tuple[dict[str, Answer], str]:
    """Return the answers that came, and how the process ended."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        _live(trials, room, write_fd)
    os.close(write_fd)
    try:
        data, is_complete = _read_all(read_fd)
    finally:
        os.close(read_fd)
    if not is_complete:
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    reason = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    end = f"the trial's process {reason}" if is_complete else f"no answer within {TIMEOUT_S:g} s"
    answers: dict[str, Answer] = {}
    for line in data.splitlines(keepends=True):
        if line.endswith(b"\n"):
            name, answer = json.loads(line)
            answers[name] = answer
    return answers, end


def answer_of(trial: Trial, room: Room) -> Answer:
    """Make a trial in this process and return its answer."""
    try:
        seen = trial(room)
    except FallsBack as less:
        return _answer("falls_back", str(less), facts=less.facts)
    except OSError as error:
        return _answer("missing", str(error), errno=error.errno or 0)
    except Exception as error:  # noqa: BLE001  # whatever goes wrong is the finding
        return _answer("missing", str(error) or type(error).__name__)
    seen = seen if isinstance(seen, Seen) else Seen(seen)
    return _answer("works", seen.text, facts=seen.facts)


def _answer(verdict: str, seen: str, *, errno: int = 0, facts: dict[str, object] | None = None) -> Answer:
    return {"verdict": verdict, "seen": seen, "errno": errno, "facts": facts or {}}


def _live(trials: dict[str, Trial], room: Room, write_fd: int) -> None:
    """The trials' process. Never returns."""
    try:
        for name, trial in trials.items():
            os.write(write_fd, json.dumps([name, answer_of(trial, room)]).encode() + b"\n")
    finally:
        os._exit(0)


def _read_all(fd: int) -> tuple[bytes, bool]:
    """Return the data that comes, and whether the other end was closed within `TIMEOUT_S`."""
    data, deadline = b"", time.monotonic() + TIMEOUT_S
    while True:
        readable, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            return data, False
        piece = os.read(fd, _PIECE_BYTES)
        if not piece:
            return data, True
        data += piece
