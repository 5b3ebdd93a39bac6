"""The event loop: order, cancelled timers, and the wall no exception passes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from runner.loop.loop import READ, EventLoop


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    made = EventLoop()
    yield made
    made.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


def fail(*_arguments: object) -> None:
    raise RuntimeError("a bug")


def test_an_exception_goes_to_its_owner_and_no_further(loop: EventLoop, pipe: tuple[int, int]) -> None:
    """A callback that raises, and an error handler that raises too, leave the loop running."""
    errors: list[Exception] = []
    loop.watch(pipe[0], READ, fail, errors.append)
    loop.call_soon(fail, errors.append)
    loop.call_later(0.0, fail, fail)
    os.write(pipe[1], b"x")
    loop.run_once()
    loop.unwatch(pipe[0])
    assert [str(error) for error in errors] == ["a bug", "a bug"]


def test_timers_come_in_order_and_cancelled_ones_never(loop: EventLoop) -> None:
    """Deadlines decide, not the order of asking."""
    called: list[str] = []
    loop.call_later(0.002, lambda: called.append("second"), fail)
    loop.call_later(0.001, lambda: called.append("first"), fail)
    loop.call_later(0.0015, lambda: called.append("never"), fail).cancel()
    while len(called) < 2:
        loop.run_once()
    assert called == ["first", "second"]


def test_cancelled_timers_are_forgotten(loop: EventLoop) -> None:
    """A limit far away that is cancelled for each of many commands takes no memory for long."""
    for _ in range(10_000):
        loop.call_later(3600.0, fail, fail).cancel()
    assert loop.pending_timers < 200


def test_an_event_of_a_closed_descriptor_is_not_delivered(loop: EventLoop, pipe: tuple[int, int]) -> None:
    """A descriptor unwatched within a batch gets nothing more of that batch, nor does a new owner of its number."""
    other = os.pipe()
    heard: list[str] = []

    def replace(_events: int) -> None:
        for fd, name in ((pipe[0], "one"), (other[0], "two")):
            loop.unwatch(fd)
            loop.watch(fd, READ, lambda _events, name=name: heard.append(f"new {name}"), fail)  # type: ignore[misc]
        heard.append("replaced")

    loop.watch(pipe[0], READ, replace, fail)
    loop.watch(other[0], READ, replace, fail)
    os.write(pipe[1], b"x")
    os.write(other[1], b"x")
    loop.run_once()
    assert heard == ["replaced"]
    loop.run_once()
    assert sorted(heard) == ["new one", "new two", "replaced"]
    loop.unwatch(other[0])
    for fd in other:
        os.close(fd)


def test_what_was_planned_before_a_standstill_is_moved_by_it(loop: EventLoop) -> None:
    """Timers set after the standstill are not moved."""
    called: list[str] = []
    began = time.monotonic()
    loop.call_later(0.25, lambda: called.append("before"), fail)
    time.sleep(0.2)
    loop.call_later(0.1, lambda: called.append("after"), fail)
    loop.postpone(0.2)
    while len(called) < 2:
        loop.run_once()
    assert called == ["after", "before"]
    assert time.monotonic() - began >= 0.45  # however long the sleep above took


@pytest.mark.slow
def test_timers_wait_for_news_after_a_standstill(loop: EventLoop, pipe: tuple[int, int]) -> None:
    """Overdue timers are moved by the news, or called a moment later when there is none."""
    called: list[str] = []

    def take_news(_events: int) -> None:
        os.read(pipe[0], 1)
        loop.postpone(1.1)
        loop.call_later(0.001, lambda: called.append("new"), fail)

    loop.watch(pipe[0], READ, take_news, fail)
    loop.call_later(0.5, lambda: called.append("moved"), fail)
    os.write(pipe[1], b"x")
    time.sleep(1.1)  # as a process does that is frozen
    while len(called) < 2:
        loop.run_once()
    assert called == ["new", "moved"]
    loop.call_later(0.5, lambda: called.append("late"), fail)
    time.sleep(1.1)
    loop.run_once()
    assert called == ["new", "moved", "late"]
    loop.unwatch(pipe[0])


def test_a_rest_without_timers_is_no_standstill(
    loop: EventLoop, pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timer that is set after hours without any is in time."""
    called: list[str] = []
    clock = [time.monotonic()]

    def rest() -> float:
        clock[0] += 7200.0
        return -1.0

    loop.watch(pipe[0], READ, lambda _events: called.append(os.read(pipe[0], 1).decode()), fail)
    os.write(pipe[1], b"x")
    with monkeypatch.context() as patch:
        patch.setattr("runner.loop.loop.time", SimpleNamespace(monotonic=lambda: clock[0]))
        patch.setattr(loop, "_patience_s", rest)
        loop.run_once()
        loop.call_later(0.001, lambda: called.append("timer"), fail)
        clock[0] += 0.01
        patch.setattr(loop, "_patience_s", lambda: 0.0)
        loop.run_once()
    assert called == ["x", "timer"]
    loop.unwatch(pipe[0])
