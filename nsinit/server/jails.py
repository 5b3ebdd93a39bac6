"""The lives of programs that jail themselves (`tools/jail.py`): how many there are at once, their verdicts, their ends.

A jail ends with nsinit, when whoever asked for its work hangs up, and when it is told to. Sources: posix_spawn(3);
pidfd_open(2).
"""

from __future__ import annotations

import errno
import os
import signal
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field

from nsinit.kernel import syscalls
from nsinit.log import log
from nsinit.scheduler import Job, JobEvent, Scheduler, Wait
from nsinit.steps import StepFailed, failure_of
from nsinit.wire import verdict

_PIECE_BYTES = 64 * 1024


@dataclass(slots=True)
class Jails:
    """Jails of one kind. `stage`: that of their failures; `most`: how many there are at once, each of which has a
    processor to itself."""

    scheduler: Scheduler
    stage: str
    most: int
    _pidfds: dict[int, str] = field(default_factory=dict)
    """Pidfds of those at work, each with the name of its work."""
    _told: set[int] = field(default_factory=set)
    """Pidfds of those that were told to end."""
    _running: int = 0
    _queue: deque[JobEvent] = field(default_factory=deque)
    _is_ending: bool = False

    def admit(self) -> Generator[Wait, bool, None]:
        """Wait, in order of arrival, until there are fewer than `most`; `leave` belongs to it."""
        if self._running >= self.most:
            turn = JobEvent()
            self._queue.append(turn)
            yield Wait(event=turn)
        else:
            self._running += 1

    def leave(self) -> None:
        """Give the turn to the next."""
        if self._queue:
            self._queue.popleft().set()
        else:
            self._running -= 1

    def run(
        self, spawn: Callable[[int], int], asker_fd: int, bounds: tuple[int, int], name: str = ""
    ) -> Generator[Wait, bool, verdict.Unpacked]:
        """Start a jail and wait for its end; return its verdict. `spawn`: takes the descriptor for the verdict and
        returns a pid. `bounds`: the most entries and bytes. Raises `StepFailed`, `OSError`."""
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        try:
            try:
                pid = spawn(write_fd)
            finally:
                os.close(write_fd)
            pidfd = os.pidfd_open(pid)
            self._pidfds[pidfd] = name
            if self._is_ending:
                _kill(pidfd)
            done = JobEvent()
            self.scheduler.spawn(_end_with_asker(os.dup(asker_fd), pidfd, done, self.stage))
            said = b""
            # The end of this pipe is that of the jail, which has the other end, too.
            while (yield Wait(fd=read_fd)) and (piece := os.read(read_fd, _PIECE_BYTES)):
                said += piece[: verdict.MAX_VERDICT_BYTES + 1 - len(said)]
            yield Wait(fd=pidfd)
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
            del self._pidfds[pidfd]
            done.set()
            if pidfd in self._told:  # it may have said that it is done, and have read after it was told
                self._told.remove(pidfd)
                raise StepFailed(self.stage, "it was ended before its end", errno=errno.ECANCELED)
            try:
                return verdict.read(said, max_entries=bounds[0], max_bytes=bounds[1])
            except verdict.ArchiveRefused as error:
                raise StepFailed(self.stage, str(error), path=error.member) from error
            except OSError as error:
                raise failure_of(self.stage, error) from error
        finally:
            os.close(read_fd)

    def end(self, name: str) -> None:
        """End the jails at work of that name; their work has failed."""
        for pidfd, each in self._pidfds.items():
            if each == name:
                self._told.add(pidfd)
                _kill(pidfd)

    def finish(self) -> None:
        """End all jails, and begin no other."""
        self._is_ending = True
        for pidfd in self._pidfds:
            _kill(pidfd)


def _end_with_asker(asker_fd: int, pidfd: int, done: JobEvent, stage: str) -> Job:
    """Kill a jail when nobody waits for it any more, until `done`."""
    try:
        if not done.is_set:
            yield Wait(fd=asker_fd, event=done)
        if not done.is_set:
            log("info", "jail ended", stage=stage, reason="whoever asked for its work is gone")
            _kill(pidfd)
            yield Wait(event=done)
    finally:
        os.close(asker_fd)
        os.close(pidfd)


def _kill(pidfd: int) -> None:
    """SIGKILL a program; its jail goes with it."""
    with suppress(ProcessLookupError):  # a zombie that was not reaped yet
        syscalls.pidfd_send_signal(pidfd, signal.SIGKILL)
