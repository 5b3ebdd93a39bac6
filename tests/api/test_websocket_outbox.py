"""Outbox of a WebSocket: frames go out in turn, control first, small ones together, and never more than a bound
waits.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
import trio.testing

from sandkasten.api.websocket.outbox import HOLD_S, MAX_CONTROL, QUEUE_BYTES, WRITE_BYTES, Lane, Outbox


class Wire:
    """Takes writes; with the gate shut, the first one does not return."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.gate = trio.Event()
        self.gate.set()

    async def write(self, data: bytes) -> None:
        self.writes.append(data)
        await self.gate.wait()


def nothing() -> None:
    """Nobody wants to know."""


def make(wire: Wire, on_overflow: Callable[[], None] = nothing) -> Outbox:
    return Outbox(wire.write, on_overflow=on_overflow)


async def test_lanes_take_turns_and_control_comes_first(nursery: trio.Nursery) -> None:
    """While somebody writes, one frame of each lane queues up for the next write, behind all control."""
    wire = Wire()
    outbox = make(wire)
    one, two = Lane(outbox, on_end=nothing), Lane(outbox, on_end=nothing)
    wire.gate = trio.Event()
    nursery.start_soon(outbox.run)
    one.put(b"1a")
    await trio.testing.wait_all_tasks_blocked()
    for frame in (b"1b", b"1c", b"1d"):
        one.put(frame)
    two.put(b"2a")
    two.put(b"2b")
    outbox.put(b"C")
    wire.gate.set()
    await outbox.wait_until_empty()
    assert wire.writes == [b"1a", b"C1b2a1c2b1d"]
    nursery.cancel_scope.cancel()


async def test_a_lane_with_large_frames_delays_others_by_one_write(nursery: trio.Nursery) -> None:
    """A write is bounded, and the next lane's frame is in the next one."""
    wire = Wire()
    outbox = make(wire)
    big, small = Lane(outbox, on_end=nothing), Lane(outbox, on_end=nothing)
    for _ in range(3):
        big.put(bytes(WRITE_BYTES))
    small.put(b"x")
    nursery.start_soon(outbox.run)
    await outbox.wait_until_empty()
    assert [len(write) for write in wire.writes] == [WRITE_BYTES, 1, WRITE_BYTES, WRITE_BYTES]
    nursery.cancel_scope.cancel()


async def test_held_frames_wait_for_what_follows(nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    """All of a quick run is one write; a slow one's first frame goes out after a moment, and then nothing is held."""
    wire = Wire()
    outbox = make(wire)
    nursery.start_soon(outbox.run)
    quick, slow = Lane(outbox, on_end=nothing), Lane(outbox, on_end=nothing)
    slow.put(b"started", hold=True)
    quick.put(b"a", hold=True)
    quick.put(b"b")
    await quick.end(b"c")
    assert wire.writes == [b"abc"]
    began = trio.current_time()
    await outbox.wait_until_empty()
    assert wire.writes == [b"abc", b"started"]
    assert trio.current_time() - began == pytest.approx(HOLD_S)
    slow.put(b"output")
    await outbox.wait_until_empty()
    assert wire.writes[-1] == b"output"
    assert trio.current_time() - began == pytest.approx(HOLD_S)
    nursery.cancel_scope.cancel()


class Steps(trio.abc.Instrument):
    """Number of steps that tasks took."""

    count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += 1


async def test_nobody_spins_behind_a_write_that_does_not_end(
    nursery: trio.Nursery, mock_clock: trio.testing.MockClock
) -> None:
    """Frames that were held and are due wait for the writer like all else, and go out once the client reads."""
    wire = Wire()
    outbox = make(wire)
    wire.gate = trio.Event()
    nursery.start_soon(outbox.run)
    await trio.testing.wait_all_tasks_blocked()
    one, two, three = (Lane(outbox, on_end=nothing) for _ in range(3))
    one.put(b"held before", hold=True)
    nursery.start_soon(two.end, b"exit")
    await trio.testing.wait_all_tasks_blocked()
    three.put(b"held behind", hold=True)
    mock_clock.jump(2 * HOLD_S)
    steps = Steps()
    trio.lowlevel.add_instrument(steps)
    for _ in range(100):
        await trio.lowlevel.checkpoint()
    trio.lowlevel.remove_instrument(steps)
    assert steps.count < 110
    wire.gate.set()
    await outbox.wait_until_empty()
    assert wire.writes == [b"exit", b"held beforeheld behind"]
    nursery.cancel_scope.cancel()


async def test_what_came_behind_a_write_is_held_no_longer_than_elsewhere(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """A frame that another task holds back during a write is left to `run`, which knows when the frame is due."""
    wire = Wire()
    outbox = make(wire)
    wire.gate = trio.Event()
    nursery.start_soon(outbox.run)
    await trio.testing.wait_all_tasks_blocked()
    one, two = Lane(outbox, on_end=nothing), Lane(outbox, on_end=nothing)
    nursery.start_soon(one.end, b"exit")
    await trio.testing.wait_all_tasks_blocked()
    two.put(b"started", hold=True)
    wire.gate.set()
    await outbox.wait_until_empty()
    assert wire.writes == [b"exit", b"started"]
    assert trio.current_time() == pytest.approx(HOLD_S)
    nursery.cancel_scope.cancel()


async def test_much_output_is_not_held(nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    """Waiting pays for small frames only."""
    wire = Wire()
    outbox = make(wire)
    nursery.start_soon(outbox.run)
    lane = Lane(outbox, on_end=nothing)
    lane.put(b"started", hold=True)
    lane.put(bytes(10_000))
    await outbox.wait_until_empty()
    assert (len(wire.writes), trio.current_time()) == (1, 0)
    nursery.cancel_scope.cancel()


async def test_a_lane_has_room_for_a_bounded_amount(nursery: trio.Nursery) -> None:
    """A task that adds output waits until some was taken."""
    wire = Wire()
    outbox = make(wire)
    lane = Lane(outbox, on_end=nothing)
    lane.put(bytes(QUEUE_BYTES))
    assert not lane.has_room
    with trio.move_on_after(0) as scope:
        await lane.wait_for_room()
    assert scope.cancelled_caught
    nursery.start_soon(outbox.run)
    await lane.wait_for_room()
    assert lane.has_room
    nursery.cancel_scope.cancel()


async def test_the_end_of_a_lane_is_told_once_it_was_taken(nursery: trio.Nursery) -> None:
    """Not while its frames wait behind another write."""
    wire = Wire()
    outbox = make(wire)
    wire.gate = trio.Event()
    ended: list[str] = []
    lane = Lane(outbox, on_end=lambda: ended.append("lane"))
    outbox.put(b"C")
    nursery.start_soon(outbox.run)
    await trio.testing.wait_all_tasks_blocked()
    lane.put(b"a")
    await lane.end(b"b")
    assert ended == []
    wire.gate.set()
    await outbox.wait_until_empty()
    assert (ended, wire.writes) == (["lane"], [b"C", b"ab"])
    nursery.cancel_scope.cancel()


async def test_control_messages_are_bounded() -> None:
    """One too many is dropped and told."""
    overflows: list[str] = []
    outbox = make(Wire(), lambda: overflows.append("one"))
    for _ in range(MAX_CONTROL + 2):
        outbox.put(b"C")
    assert overflows == ["one", "one"]
