"""nsinit's helper processes of one trade: forked once, replaced when they die, given one order at a time.

Owns which of them is free; what they do, and may do, is their trade's (`builder`, `cgroup_maker`). One that dies or
takes too long fails the order it had and nothing else.
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
from nsinit.scheduler import Event, Job, Scheduler, Wait
from nsinit.steps import StepFailed
from nsinit.wire import control
from nsinit.wire.protocol import MAX_DATAGRAM_BYTES
from runner.wire.codec import Vocabulary

ORDER_DEADLINE_S = 5.0
_PATIENCE = 1.5
"""Times that is how long an order waits for a worker: whoever waits behind one that hangs gets its successor."""
_RETRY_PAUSE_S = 0.1
_MAX_DOUBLINGS = 5
"""Of that pause, one for each worker in a row that can't work: some 3 s between attempts, and so in the log."""


@dataclass(frozen=True, slots=True)
class Trade:
    """What one kind of workers is: its name in errors and logs, how many there are, the orders it understands, and the
    life of one, which is given its end of a socket and nsinit's pid, and first of all says `control.READY` or why not.
    """

    name: str
    count: int
    orders: Vocabulary
    live: Callable[[socket.socket, int], NoReturn]


@dataclass(frozen=True, slots=True, eq=False)
class Worker:
    """One process; `started_s` is of the monotonic clock, `dead` happens when it was reaped."""

    pid: int
    pidfd: int
    channel: socket.socket
    started_s: float
    dead: Event = field(default_factory=Event)


@dataclass(slots=True)
class Outcome:
    """What became of an order, once `done` has happened; `has_died`: the worker did, over it, or was killed because it
    took too long. Then any part of the order may be done, but nobody is at it any more."""

    done: Event = field(default_factory=Event)
    timings_us: dict[str, int] = field(default_factory=dict)
    failure: StepFailed | None = None
    has_died: bool = False

    def result(self) -> dict[str, int]:
        """Return the timings. Raises `StepFailed`."""
        if self.failure is not None:
            raise self.failure
        return self.timings_us


class Workers:
    """The processes of one trade."""

    def __init__(self, trade: Trade, scheduler: Scheduler) -> None:
        self._trade = trade
        self._scheduler = scheduler
        self._workers: set[Worker] = set()
        self._idle: deque[Worker] = deque()
        self._waiting: deque[Event] = deque()
        self._failures = 0

    def start(self) -> None:
        """Start all of them and wait until they are ready. Raises `StepFailed`: one can't do its work here."""
        for worker in [self._fork() for _ in range(self._trade.count)]:
            worker.channel.settimeout(ORDER_DEADLINE_S)
            try:
                self._read(self._receive(worker))
            except TimeoutError:
                raise StepFailed(self._trade.name, f"not ready after {ORDER_DEADLINE_S} s") from None
            worker.channel.settimeout(None)
            self._give_back(worker)

    def stop(self) -> None:
        """End all of them, whatever they do, and wait until they are gone."""
        for worker in self._workers:
            syscalls.pidfd_send_signal(worker.pidfd, signal.SIGKILL)
            os.waitid(os.P_PIDFD, worker.pidfd, os.WEXITED)
            os.close(worker.pidfd)
            worker.channel.close()
        self._workers.clear()

    def hand_over(self, order: object, fds: list[int]) -> Generator[Wait, bool, Outcome]:
        """Give `order` to a worker as soon as one is free. Raises `StepFailed` when none gets free."""
        data = self._trade.orders.encode(order)
        while True:
            worker = yield from self._take()
            try:
                socket.send_fds(worker.channel, [data], fds)
            except ConnectionError:
                worker.channel.close()  # it died while it was idle; `_watch` starts another
                continue
            except OSError as error:  # not the worker's fault: a descriptor of a PID 1 that is gone
                self._give_back(worker)
                raise StepFailed("child", f"can't be handed over: {error.strerror}", errno=error.errno or 0) from error
            outcome = Outcome()
            self._scheduler.spawn(self._collect(worker, outcome))
            return outcome

    def _take(self) -> Generator[Wait, bool, Worker]:
        while not self._idle:
            freed, patience_s = Event(), _PATIENCE * ORDER_DEADLINE_S
            self._waiting.append(freed)
            if not (yield Wait(event=freed, timeout_s=patience_s)) and not freed.is_set:
                self._waiting.remove(freed)
                raise StepFailed(self._trade.name, f"no {self._trade.name} was free for {patience_s} s")
        return self._idle.popleft()

    def _give_back(self, worker: Worker) -> None:
        self._idle.append(worker)
        if self._waiting:
            self._waiting.popleft().set()

    def _collect(self, worker: Worker, outcome: Outcome) -> Job:
        """Wait for the answer to an order, however the one who gave it fares meanwhile."""
        if (yield Wait(fd=worker.channel.fileno(), timeout_s=ORDER_DEADLINE_S)):
            data = self._receive(worker)
            try:
                outcome.timings_us = self._read(data)
            except StepFailed as error:
                outcome.failure = error
        else:
            data = b""
            self._kill(worker)
            outcome.failure = StepFailed("deadline", f"not done after {ORDER_DEADLINE_S} s", errno=errno.ETIMEDOUT)
        outcome.has_died = not data
        if data:
            self._give_back(worker)
        else:
            worker.channel.close()
            if not (yield Wait(event=worker.dead, timeout_s=ORDER_DEADLINE_S)):
                log("error", f"a {self._trade.name} can't be killed", pid=worker.pid)
        outcome.done.set()

    def _receive(self, worker: Worker) -> bytes:
        """Return what a worker said; nothing if it died."""
        try:
            return worker.channel.recv(MAX_DATAGRAM_BYTES)
        except ConnectionResetError:
            return b""

    def _read(self, data: bytes) -> dict[str, int]:
        if not data:
            raise StepFailed(self._trade.name, f"the {self._trade.name} died")
        return control.read_status(data)

    def _kill(self, worker: Worker) -> None:
        if worker in self._workers:  # or it has died, and its descriptor may be another's by now
            syscalls.pidfd_send_signal(worker.pidfd, signal.SIGKILL)

    def _fork(self) -> Worker:
        parent_pid = os.getpid()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                pid = os.fork()
            except OSError:
                ours.close()
                raise
            if pid == 0:
                self._trade.live(theirs, parent_pid)
        worker = Worker(pid, os.pidfd_open(pid), ours, time.monotonic())
        self._workers.add(worker)
        self._scheduler.spawn(self._watch(worker))
        return worker

    def _admit(self, worker: Worker) -> Job:
        """Give a new worker its first order once it is ready; one that can't work is tried anew (`_watch`)."""
        if (yield Wait(fd=worker.channel.fileno(), timeout_s=ORDER_DEADLINE_S)):
            try:
                self._read(self._receive(worker))
            except StepFailed as error:
                log("error", f"a {self._trade.name} is not ready", path=error.path, reason=str(error))
            else:
                self._failures = 0
                self._give_back(worker)
                return
        self._failures += 1
        self._kill(worker)
        worker.channel.close()

    def _watch(self, worker: Worker) -> Job:
        """Wait until a worker dies, and start another: at once, unless it had hardly lived."""
        yield Wait(fd=worker.pidfd)
        os.waitid(os.P_PIDFD, worker.pidfd, os.WEXITED)
        self._workers.discard(worker)
        worker.dead.set()
        if worker in self._idle:
            self._idle.remove(worker)
            worker.channel.close()
        os.close(worker.pidfd)
        log("error", f"a {self._trade.name} ended", pid=worker.pid)
        if time.monotonic() - worker.started_s < _RETRY_PAUSE_S:
            yield Wait(timeout_s=_RETRY_PAUSE_S * 2 ** min(self._failures, _MAX_DOUBLINGS))
        while True:
            try:
                self._scheduler.spawn(self._admit(self._fork()))
                break
            except OSError as error:
                log("error", f"no {self._trade.name} could be started", reason=str(error))
                yield Wait(timeout_s=_RETRY_PAUSE_S)
