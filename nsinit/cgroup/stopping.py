"""Tells the processes of a session to end, and gives them time, before they are killed.

Every process but PID 1 gets SIGTERM, whatever group, terminal or run cgroup the process is in. The signals are sent
before a frozen session is thawed, and SIGCONT with them, so that no process does anything else first. Processes that
ignore SIGTERM, as interactive shells do, get SIGHUP when the others have ended: an earlier end of a shell would hang up
on what runs in its terminal. A process born later is not told: a program that ends in good order may need it.
Sources: signal(7); proc_pid_status(5) SigIgn; pidfd_open(2); bash(1) "SIGNALS".
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Generator

from nsinit.cgroup import freezer
from nsinit.cgroup.identity import find_identity
from nsinit.cgroup.session import SessionCgroup, act_on_listed, pidfd_of
from nsinit.kernel import syscalls
from nsinit.scheduler import JobEvent, Wait
from nsinit.steps import StepFailed

_LOOK_AGAIN_S = 0.5
"""Seconds after which `hurry` is looked at again."""


def stop_processes(cgroup: SessionCgroup, grace_s: float, hurry: JobEvent) -> Generator[Wait, bool, int]:
    """Tell the processes, and wait until each has ended, for `grace_s` at most and not beyond `hurry`. Return how many
    have not. Without a cgroup there is none."""
    give_up_at = time.monotonic() + grace_s
    identity = find_identity(cgroup)
    listening, deaf = set[int](), set[int]()

    def tell(pid: int, pidfd: int) -> None:
        if identity is None or pid != identity.pid:
            (deaf if _ignores(pid, signal.SIGTERM) else listening).add(pid)
            _signal(pidfd, signal.SIGTERM, signal.SIGCONT)

    def hang_up(pid: int, pidfd: int) -> None:
        if pid in deaf:
            _signal(pidfd, signal.SIGHUP)

    act_on_listed(cgroup.processes, pidfd_of, tell)
    try:
        yield from freezer.set_frozen(cgroup, frozen=False)
    except (OSError, StepFailed):
        return len(listening | deaf)  # the session is gone, or can't be thawed: nobody can act on what was told
    left = yield from _wait_all_ended(cgroup, listening, give_up_at, hurry)
    if not left and deaf:
        act_on_listed(cgroup.processes, pidfd_of, hang_up)
        left = yield from _wait_all_ended(cgroup, deaf, give_up_at, hurry)
    return left


def _wait_all_ended(
    cgroup: SessionCgroup, pids: set[int], give_up_at: float, hurry: JobEvent
) -> Generator[Wait, bool, int]:
    """Wait for the end of each process; return how many have not ended in time."""
    while pids := pids.intersection(cgroup.processes()):
        left_s = give_up_at - time.monotonic()
        if left_s <= 0 or hurry.is_set:
            break
        if (yield from _wait_ended(cgroup, pid := min(pids), min(left_s, _LOOK_AGAIN_S))):
            pids.discard(pid)
    return len(pids)


def _wait_ended(cgroup: SessionCgroup, pid: int, timeout_s: float) -> Generator[Wait, bool, bool]:
    """Wait for the end of a process of the session; return whether it has ended."""
    if (pidfd := pidfd_of(pid)) < 0:
        return True
    try:
        if pid not in cgroup.processes():  # the pid may be that of a process of somebody else by now
            return True
        return (yield Wait(fd=pidfd, timeout_s=timeout_s))
    finally:
        os.close(pidfd)


def _signal(pidfd: int, *numbers: int) -> None:
    try:
        for number in numbers:
            syscalls.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        pass  # it has ended


def _ignores(pid: int, number: int) -> bool:
    """Return whether a process ignores a signal; False if the process has ended."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            _, _, after = file.read().partition(b"\nSigIgn:")  # the name, in the first line, has no line break
    except (FileNotFoundError, ProcessLookupError):
        return False
    return bool(after) and bool(int(after.split(maxsplit=1)[0], 16) >> (number - 1) & 1)
