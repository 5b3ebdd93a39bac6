"""nsinit's pool of helper processes: nobody is given an order before being ready, and why one can't be is told."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import pytest

from nsinit.helpers import pool as helpers
from nsinit.helpers.pool import HelperKind, HelperPool, OrderOutcome
from nsinit.scheduler import Job, Scheduler, Wait
from nsinit.steps import StepFailed
from nsinit.wire import control
from runner.wire.codec import Vocabulary
from tests.kernel.harness import PATIENCE_S
from tests.leaks import children
from tests.waiting import patience


@dataclass(frozen=True)
class Task:
    """An order for these helpers."""

    word: str


ORDERS = Vocabulary(Task)


def _die_of_it(_channel: socket.socket, _parent_pid: int) -> NoReturn:
    os._exit(1)


def _refuse(channel: socket.socket, _parent_pid: int) -> NoReturn:
    channel.sendall(control.describe(StepFailed("jail", "no room", path="/jail", errno=errno.ENOSPC)))
    os._exit(1)


def _say_nothing(channel: socket.socket, _parent_pid: int) -> NoReturn:
    channel.recv(1)
    os._exit(1)


def _obey(channel: socket.socket, _parent_pid: int) -> NoReturn:
    """Be done with anything at once, but for `hang`, and `die` of that."""
    try:
        channel.sendall(control.READY)
        while data := channel.recv(4096):
            word = ORDERS.decode(data).word
            if word == "die":
                break
            if word == "hang":
                time.sleep(PATIENCE_S)
            channel.sendall(control.STATUS.encode(control.StepsDone({word: 1})))
    finally:
        os._exit(1)


@contextmanager
def _pool(live: object, count: int = 2) -> Iterator[tuple[HelperPool, Scheduler]]:
    scheduler = Scheduler()
    pool = HelperPool(HelperKind("digger", count, ORDERS, live), scheduler)  # type: ignore[arg-type]
    try:
        yield pool, scheduler
    finally:
        pool.stop()
        scheduler.close()


def _outcomes(pool: HelperPool, scheduler: Scheduler, *words: str) -> dict[str, OrderOutcome]:
    """Have several things done at a time."""
    found: dict[str, OrderOutcome] = {}

    def job(word: str) -> Job:
        outcome = yield from pool.hand_over(Task(word), [])
        yield Wait(event=outcome.done)
        found[word] = outcome

    for word in words:
        scheduler.spawn(job(word))
    deadline = time.monotonic() + patience(PATIENCE_S)
    while len(found) < len(words):
        assert time.monotonic() < deadline
        scheduler.round(0.1)
    return found


def _outcome(pool: HelperPool, scheduler: Scheduler, word: str) -> OrderOutcome:
    """Have something done, as a job of nsinit's has."""
    return _outcomes(pool, scheduler, word)[word]


def test_a_start_says_why_a_helper_cannot_work() -> None:
    """A helper that can't work ends nsinit's start with the reason, rather than every session after it."""
    with _pool(_refuse) as (pool, _), pytest.raises(StepFailed, match="no room") as refused:
        pool.start()
    assert (refused.value.stage, refused.value.path, refused.value.errno) == ("jail", "/jail", errno.ENOSPC)
    with _pool(_die_of_it) as (pool, _), pytest.raises(StepFailed, match="the digger died"):
        pool.start()


def test_a_start_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start whose helper never says that it is ready fails after a while."""
    monkeypatch.setattr(helpers, "ORDER_DEADLINE_S", 0.05)
    with _pool(_say_nothing) as (pool, _), pytest.raises(StepFailed, match="not ready after"):
        pool.start()


def test_an_order_that_kills_or_takes_too_long_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The helper is replaced, and the next order is carried out."""
    with _pool(_obey) as (pool, scheduler):
        pool.start()
        assert _outcome(pool, scheduler, "well").result() == {"well": 1}
        with pytest.raises(StepFailed, match="the digger died"):
            _outcome(pool, scheduler, "die").result()
        monkeypatch.setattr(helpers, "ORDER_DEADLINE_S", patience(0.5))
        with pytest.raises(StepFailed, match="not done after"):
            _outcome(pool, scheduler, "hang").result()
        for _ in range(4):
            assert _outcome(pool, scheduler, "again").result() == {"again": 1}


def test_who_waits_behind_an_order_that_takes_too_long_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders behind one that hangs are carried out by the hung helper's successor, however long they have waited."""
    with _pool(_obey, count=1) as (pool, scheduler):
        pool.start()
        monkeypatch.setattr(helpers, "ORDER_DEADLINE_S", patience(1.0))
        found = _outcomes(pool, scheduler, "hang", "well", "again")
        assert {word: each.has_died for word, each in found.items()} == {"hang": True, "well": False, "again": False}
        assert (found["well"].result(), found["again"].result()) == ({"well": 1}, {"again": 1})


def test_helpers_that_cannot_work_are_tried_less_and_less_often() -> None:
    """The pauses between new helpers grow, so that a machine without room for one does not fill its log."""
    attempts = os.pipe()
    is_started = False

    def live(channel: socket.socket, parent_pid: int) -> NoReturn:
        os.write(attempts[1], b"x")
        (_refuse if is_started else _obey)(channel, parent_pid)

    try:
        with _pool(live, count=1) as (pool, scheduler):
            pool.start()
            is_started = True
            _outcome(pool, scheduler, "die")
            deadline = time.monotonic() + 1.5
            while time.monotonic() < deadline:
                scheduler.round(0.1)
        assert 2 <= len(os.read(attempts[0], 100)) < 8
    finally:
        for fd in attempts:
            os.close(fd)


def test_nobody_is_told_of_an_end_that_has_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """An order that took too long is answered only when its helper is gone: the work may be half done, and is undone
    then.
    """
    monkeypatch.setattr(helpers, "ORDER_DEADLINE_S", patience(0.5))
    before = children(os.getpid())
    with _pool(_obey, count=1) as (pool, scheduler):
        pool.start()
        (pid,) = set(children(os.getpid())) - set(before)
        is_gone: list[bool] = []

        def job() -> Job:
            outcome = yield from pool.hand_over(Task("hang"), [])
            yield Wait(event=outcome.done)
            is_gone.append(pid not in children(os.getpid()))

        scheduler.spawn(job())
        deadline = time.monotonic() + patience(PATIENCE_S)
        while not is_gone:
            assert time.monotonic() < deadline
            scheduler.round(0.1)
        assert is_gone == [True]


def test_a_helper_that_can_work_no_more_is_tried_anew() -> None:
    """The next helper may not be ready at once; orders wait for one that is."""
    attempts = os.pipe()

    def live(channel: socket.socket, parent_pid: int) -> NoReturn:
        if os.read(attempts[0], 1) == b"n":
            _refuse(channel, parent_pid)
        _obey(channel, parent_pid)

    os.write(attempts[1], b"yyny")  # two helpers at the start; then one that can't work, and one that can
    try:
        with _pool(live) as (pool, scheduler):
            pool.start()
            _outcome(pool, scheduler, "die")
            for _ in range(4):
                assert _outcome(pool, scheduler, "well").result() == {"well": 1}
    finally:
        for fd in attempts:
            os.close(fd)
