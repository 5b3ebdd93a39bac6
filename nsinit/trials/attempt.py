"""How a trial is made: in a forked process of its own that may unshare, mount, be killed or hang, and then is gone.

Owns what a trial's answer looks like. A trial returns what it did and saw, raises `FallsBack` where the product then
works in another way, and raises anything else when the thing does not work.
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
_MAX_ANSWER_BYTES = 64 * 1024

Answer = dict[str, object]
"""`verdict` (works, falls_back, missing), `seen`, `errno` (0: no call failed) and `facts`."""


@dataclass(frozen=True, slots=True)
class Room:
    """Where trials may write, and whether there is time for those that take a while or write to the kernel's log."""

    directory: str
    is_thorough: bool


@dataclass(frozen=True, slots=True)
class Seen:
    """What a trial saw, with facts that others want to know by name."""

    text: str
    facts: dict[str, object] = field(default_factory=dict)


class FallsBack(Exception):
    """It does not work, and the product has another way."""

    def __init__(self, seen: str, **facts: object) -> None:
        super().__init__(seen)
        self.facts = facts


Trial = Callable[[Room], Seen | str]


def attempt(trial: Trial, room: Room) -> Answer:
    """Make a trial in a process of its own and return its answer."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        _live(trial, room, write_fd)
    os.close(write_fd)
    try:
        data = _read_all(read_fd)
    finally:
        os.close(read_fd)
    if data is None:
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if data is None:
        return _answer("missing", f"no answer within {TIMEOUT_S:g} s")
    if not data:
        reason = f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return _answer("missing", f"the trial's process was {reason}")
    answer: Answer = json.loads(data)
    return answer


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


def _live(trial: Trial, room: Room, write_fd: int) -> None:
    """The trial's process. Never returns."""
    try:
        data = json.dumps(answer_of(trial, room)).encode()[:_MAX_ANSWER_BYTES]
        os.write(write_fd, data)
    finally:
        os._exit(0)


def _read_all(fd: int) -> bytes | None:
    """Return what comes until the other end is closed, None if that takes too long."""
    data, deadline = b"", time.monotonic() + TIMEOUT_S
    while True:
        readable, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            return None
        piece = os.read(fd, _MAX_ANSWER_BYTES)
        if not piece:
            return data
        data += piece
