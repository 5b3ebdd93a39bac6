"""A pool of nsinit's helper processes of one kind: forked once, replaced when they die, given one order at a time.

Owns which helpers are free. Work and rights of a helper are its kind's (`builder`, `cgroup_maker`). The death of a
helper, or its deadline, fails the order that it had and nothing else.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import NoReturn

from nsinit.kernel import syscalls
from nsinit.log import log
from nsinit.scheduler import Job, JobEvent, Scheduler, Wait
from nsinit.steps import StepFailed
from nsinit.wire import control
from nsinit.wire.protocol import MAX_DATAGRAM_BYTES
from runner.wire.codec import Vocabulary

ORDER_DEADLINE_S = 5.0
_PATIENCE = 1.5
"""An order waits this many order deadlines for a free helper: behind one that hangs it gets that one's successor."""
_RETRY_PAUSE_S = 0.1
_MAX_DOUBLINGS = 5
"""Of the pause, one for each helper in a row that can't work: at most some 3 s between two attempts."""


@dataclass(frozen=True, slots=True)
class HelperKind:
    """One kind of helper. `name`: in errors and logs; `count`: processes in a pool; `orders`: the messages that a
    helper takes; `live`: the life of a helper, called with its end of a socket and nsinit's pid. A helper first sends
    `control.READY`, or the failure that keeps it from working. `fork`: has another process forked that lives so, with
    that end, and returns its pid; raises `OSError`. Helpers are forks of nsinit without.
    """

    name: str
    count: int
    orders: Vocabulary
    live: Callable[[socket.socket, int], NoReturn]
    fork: Callable[[socket.socket], int] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Helper:
    """One process. `started_s`: of the monotonic clock; `dead` happens when the process was reaped."""

    pid: int
    pidfd: int
    channel: socket.socket
    started_s: float
    dead: JobEvent = field(default_factory=JobEvent)


@dataclass(slots=True)
class OrderOutcome:
    """The outcome of an order, valid once `done` has happened. `has_died`: the helper died over the order, or was
    killed at the deadline; then any part of the order may be done, and no process works on it any more."""

    done: JobEvent = field(default_factory=JobEvent)
    timings_us: dict[str, int] = field(default_factory=dict)
    failure: StepFailed | None = None
    has_died: bool = False

    def result(self) -> dict[str, int]:
        """Return the timings. Raises `StepFailed`."""
        if self.failure is not None:
            raise self.failure
        return self.timings_us


class HelperPool:
    """Helpers of one kind, those that are idle, and the jobs that wait for one."""

    def __init__(self, kind: HelperKind, scheduler: Scheduler) -> None:
        self._kind = kind
        self._scheduler = scheduler
        self._helpers: set[Helper] = set()
        self._idle: deque[Helper] = deque()
        self._waiting: deque[JobEvent] = deque()
        self._failures = 0
        self._is_started = False

    def start(self) -> None:
        """Start all helpers and wait until they are ready. Raises `StepFailed`: one can't do its work here."""
        for helper in [self._fork() for _ in range(self._kind.count)]:
            helper.channel.settimeout(ORDER_DEADLINE_S)
            try:
                self._read(self._receive(helper))
            except TimeoutError:
                raise StepFailed(self._kind.name, f"not ready after {ORDER_DEADLINE_S} s") from None
            helper.channel.settimeout(None)
            self._give_back(helper)

    def start_once(self) -> None:
        """Start the helpers unless that was done, and wait for none: orders do. Raises `OSError`."""
        if not self._is_started:
            for helper in [self._fork() for _ in range(self._kind.count)]:
                self._scheduler.spawn(self._admit(helper))
            self._is_started = True

    def stop(self) -> None:
        """Kill all helpers, busy or not, and reap them."""
        for helper in self._helpers:
            syscalls.pidfd_send_signal(helper.pidfd, signal.SIGKILL)
            os.waitid(os.P_PIDFD, helper.pidfd, os.WEXITED)
            os.close(helper.pidfd)
            helper.channel.close()
        self._helpers.clear()

    def hand_over(self, order: object, fds: list[int]) -> Generator[Wait, bool, OrderOutcome]:
        """Give `order` to a helper as soon as one is free. Raises `StepFailed` when none is free in time."""
        data = self._kind.orders.encode(order)
        while True:
            helper = yield from self._take()
            try:
                socket.send_fds(helper.channel, [data], fds)
            except ConnectionError:
                helper.channel.close()  # it died while it was idle; `_watch` starts another
                continue
            except OSError as error:  # not the helper's fault: a descriptor of a PID 1 that is gone
                self._give_back(helper)
                raise StepFailed("child", f"can't be handed over: {error.strerror}", errno=error.errno or 0) from error
            outcome = OrderOutcome()
            self._scheduler.spawn(self._collect(helper, outcome))
            return outcome

    def _take(self) -> Generator[Wait, bool, Helper]:
        while not self._idle:
            freed, patience_s = JobEvent(), _PATIENCE * ORDER_DEADLINE_S
            self._waiting.append(freed)
            if not (yield Wait(event=freed, timeout_s=patience_s)) and not freed.is_set:
                self._waiting.remove(freed)
                raise StepFailed(self._kind.name, f"no {self._kind.name} was free for {patience_s} s")
        return self._idle.popleft()

    def _give_back(self, helper: Helper) -> None:
        self._idle.append(helper)
        if self._waiting:
            self._waiting.popleft().set()

    def _collect(self, helper: Helper, outcome: OrderOutcome) -> Job:
        """Wait for the answer to an order; also when the job that gave the order ended meanwhile."""
        if (yield Wait(fd=helper.channel.fileno(), timeout_s=ORDER_DEADLINE_S)):
            data = self._receive(helper)
            try:
                outcome.timings_us = self._read(data)
            except StepFailed as error:
                outcome.failure = error
        else:
            data = b""
            self._kill(helper)
            outcome.failure = StepFailed("deadline", f"not done after {ORDER_DEADLINE_S} s", errno=errno.ETIMEDOUT)
        outcome.has_died = not data
        if data:
            self._give_back(helper)
        else:
            helper.channel.close()
            if not (yield Wait(event=helper.dead, timeout_s=ORDER_DEADLINE_S)):
                log("error", f"a {self._kind.name} can't be killed", pid=helper.pid)
        outcome.done.set()

    def _receive(self, helper: Helper) -> bytes:
        """Return the datagram that a helper sent, empty if the helper died."""
        try:
            return helper.channel.recv(MAX_DATAGRAM_BYTES)
        except ConnectionResetError:
            return b""

    def _read(self, data: bytes) -> dict[str, int]:
        if not data:
            raise StepFailed(self._kind.name, f"the {self._kind.name} died")
        return control.read_status(data)

    def _kill(self, helper: Helper) -> None:
        if helper in self._helpers:  # or it has died, and its descriptor may be another's by now
            syscalls.pidfd_send_signal(helper.pidfd, signal.SIGKILL)

    def _fork(self) -> Helper:
        parent_pid = os.getpid()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                pid = os.fork() if self._kind.fork is None else self._kind.fork(theirs)
            except OSError:
                ours.close()
                raise
            if pid == 0:
                self._kind.live(theirs, parent_pid)
        helper = Helper(pid, os.pidfd_open(pid), ours, time.monotonic())
        self._helpers.add(helper)
        self._scheduler.spawn(self._watch(helper))
        return helper

    def _admit(self, helper: Helper) -> Job:
        """Make a new helper free once it is ready. One that can't work is killed; `_watch` starts another."""
        if (yield Wait(fd=helper.channel.fileno(), timeout_s=ORDER_DEADLINE_S)):
            try:
                self._read(self._receive(helper))
            except StepFailed as error:
                log("error", f"a {self._kind.name} is not ready", path=error.path, reason=str(error))
            else:
                self._failures = 0
                self._give_back(helper)
                return
        self._failures += 1
        self._kill(helper)
        helper.channel.close()

    def _watch(self, helper: Helper) -> Job:
        """Wait until a helper dies, and start another: at once, or after a pause if the dead one had hardly lived."""
        yield Wait(fd=helper.pidfd)
        os.waitid(os.P_PIDFD, helper.pidfd, os.WEXITED)
        self._helpers.discard(helper)
        helper.dead.set()
        if helper in self._idle:
            self._idle.remove(helper)
            helper.channel.close()
        os.close(helper.pidfd)
        log("error", f"a {self._kind.name} ended", pid=helper.pid)
        if time.monotonic() - helper.started_s < _RETRY_PAUSE_S:
            yield Wait(timeout_s=_RETRY_PAUSE_S * 2 ** min(self._failures, _MAX_DOUBLINGS))
        while True:
            try:
                self._scheduler.spawn(self._admit(self._fork()))
                break
            except OSError as error:
                log("error", f"no {self._kind.name} could be started", reason=str(error))
                yield Wait(timeout_s=_RETRY_PAUSE_S)
