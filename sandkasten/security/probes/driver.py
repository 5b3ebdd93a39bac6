"""The driver of attempts inside a session: each runs in a fork of its own with a time limit; one line of JSON for each.

`python3 probes.zip TARGET NAME…`: TARGET is the JSON of `OutsideFacts`. A fork that dies without an answer gives one:
the name of the signal. The daemon trusts the lines no further than any output of a session.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace

from sandkasten.security.probes.attempt import (
    BROKEN,
    NOT_APPLICABLE,
    Attempt,
    NotApplicable,
    Outcome,
    OutsideFacts,
    judge,
)
from sandkasten.security.probes.inside import INSIDE
from sandkasten.security.probes.neighbour import plant

ATTEMPT_S = 5.0


def main(arguments: Sequence[str]) -> None:
    """Make the named attempts in the order given; the name `plant` alone is for the neighbour."""
    inherited = descriptors()
    target = replace(parse_target(arguments[0]), inherited=inherited)
    if arguments[1:] == ["plant"]:
        plant(target)
        return
    known = {each.id: each for each in INSIDE}
    for name in arguments[1:]:
        outcome = make(known[name], target)
        print(json.dumps({"id": name, **asdict(outcome)}), flush=True)


def parse_target(text: str) -> OutsideFacts:
    """Return the `OutsideFacts` that was sent as JSON."""
    fields = json.loads(text)
    return OutsideFacts(**{**fields, "outside_paths": tuple(fields["outside_paths"])})


def descriptors() -> dict[str, str]:
    """Return the targets of this process's descriptors, without the one that lists them."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
    return found


def make(attempt: Attempt, target: OutsideFacts) -> Outcome:
    """Make one attempt in a fork, bounded in time."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            os.close(reader)
            os.write(writer, json.dumps(asdict(_try(attempt, target))).encode()[:60_000])
        finally:
            os._exit(0)
    os.close(writer)
    text = _read(reader, time.monotonic() + ATTEMPT_S)
    os.close(reader)
    if not text:
        _kill(pid)
    _, status = os.waitpid(pid, 0)
    if text:
        return Outcome(**json.loads(text))
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL:
        return judge(attempt.expected, {"": signal.Signals(os.WTERMSIG(status)).name})
    return Outcome(BROKEN, f"no answer within {ATTEMPT_S:.0f} s")


def _try(attempt: Attempt, target: OutsideFacts) -> Outcome:
    try:
        return judge(attempt.expected, attempt.run(target))
    except NotApplicable as reason:
        return Outcome(NOT_APPLICABLE, str(reason))
    except Exception:  # noqa: BLE001 - whatever went wrong, it is no hold
        return Outcome(BROKEN, traceback.format_exc(limit=-1).strip().splitlines()[-1])


def _read(fd: int, deadline: float) -> bytes:
    text = b""
    while (left := deadline - time.monotonic()) > 0 and select.select([fd], [], [], left)[0]:
        piece = os.read(fd, 65536)
        if not piece:
            break
        text += piece
    return text


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


if __name__ == "__main__":
    main(sys.argv[1:])
