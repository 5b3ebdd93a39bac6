"""Supervision: start order, reverse stop, restarts with back-off, and giving up."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import pytest
import trio
import trio.testing

from sandkasten.actors.supervision import ChildSpec, ChildSupervisor, GiveUp, RestartIntensityExceeded


class Journal:
    """Records what children do."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.breakages: dict[str, trio.Event] = {}

    def child(
        self, name: str, *, restart: Literal["permanent", "transient", "temporary"] = "permanent", ends: bool = False
    ) -> ChildSpec:
        async def start(*, task_status: trio.TaskStatus[Any]) -> None:
            self.lines.append(f"start {name}")
            breakage = self.breakages[name] = trio.Event()
            task_status.started()
            try:
                await breakage.wait()
            finally:
                self.lines.append(f"stop {name}")
            if not ends:
                raise RuntimeError(name)

        return ChildSpec(name, start, restart)


async def test_children_start_in_order_and_stop_in_reverse() -> None:
    """Children have an order, which a bare nursery does not give."""
    journal = Journal()
    tree = ChildSupervisor([journal.child(name) for name in "abc"])
    async with trio.open_nursery() as nursery:
        await nursery.start(tree.run)
        nursery.cancel_scope.cancel()
    assert journal.lines == ["start a", "start b", "start c", "stop c", "stop b", "stop a"]


async def test_a_permanent_child_is_restarted_alone(autojump_clock: trio.testing.MockClock) -> None:
    """One for one: the others don't notice."""
    journal = Journal()
    async with trio.open_nursery() as nursery:
        await nursery.start(ChildSupervisor([journal.child("a"), journal.child("b")]).run)
        journal.breakages["a"].set()
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert journal.lines == ["start a", "start b", "stop a", "start a", "stop b", "stop a"]


async def test_a_stop_does_not_wait_for_a_child_that_is_starting(autojump_clock: trio.testing.MockClock) -> None:
    """The starting child is cancelled at once; the children before it end in their order."""
    journal = Journal()

    async def start_for_ever(*, task_status: trio.TaskStatus[Any]) -> None:
        try:
            await trio.sleep_forever()
        finally:
            journal.lines.append("slow is cancelled")

    tree = ChildSupervisor([journal.child("a"), journal.child("b"), ChildSpec("slow", start_for_ever)])
    began = trio.current_time()
    with trio.move_on_after(5):
        async with trio.open_nursery() as nursery:
            await nursery.start(tree.run)
    assert trio.current_time() == began + 5
    assert journal.lines == ["start a", "start b", "slow is cancelled", "stop b", "stop a"]


async def test_a_child_that_says_started_after_the_stop_is_stopped(autojump_clock: trio.testing.MockClock) -> None:
    """The child was shielded while it was cancelled; its `started` comes too late."""
    journal = Journal()

    async def start_late(*, task_status: trio.TaskStatus[Any]) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(10)
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            journal.lines.append("late is cancelled")

    with trio.move_on_after(5):
        async with trio.open_nursery() as nursery:
            await nursery.start(ChildSupervisor([journal.child("a"), ChildSpec("late", start_late)]).run)
    assert journal.lines == ["start a", "late is cancelled", "stop a"]


@pytest.mark.parametrize(
    ("restart", "ends", "starts"),
    [("temporary", False, 1), ("transient", True, 1), ("transient", False, 2), ("permanent", True, 2)],
)
async def test_the_restart_type_decides(
    restart: Literal["permanent", "transient", "temporary"],
    ends: bool,
    starts: int,
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Temporary: never; transient: after a failure only; permanent: always."""
    journal = Journal()
    async with trio.open_nursery() as nursery:
        await nursery.start(ChildSupervisor([journal.child("a", restart=restart, ends=ends)]).run)
        journal.breakages["a"].set()
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert journal.lines.count("start a") == starts


async def test_too_many_restarts_give_up_and_stop_the_others(autojump_clock: trio.testing.MockClock) -> None:
    """Intensity and period bound a crash loop."""
    journal = Journal()
    tree = ChildSupervisor([journal.child("steady"), journal.child("loop")], intensity=3, period_s=60)
    with pytest.RaisesGroup(RestartIntensityExceeded, flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            await nursery.start(tree.run)
            for _ in range(4):
                journal.breakages["loop"].set()
                await trio.sleep(10)
    assert journal.lines.count("start loop") == 4
    assert journal.lines[-1] == "stop steady"


async def test_a_child_that_cannot_start_fails_the_start_and_stops_those_before_it() -> None:
    """A half-started tree is never handed out."""
    journal = Journal()

    async def refuse(*, task_status: trio.TaskStatus[Any]) -> None:
        raise OSError("no")

    tree = ChildSupervisor([journal.child("a"), ChildSpec("b", refuse), journal.child("c")])
    with pytest.RaisesGroup(OSError, flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            await nursery.start(tree.run)
    assert journal.lines == ["start a", "stop a"]


async def starts_of(tree: ChildSupervisor, starts: list[float], *, within_s: float) -> list[float]:
    """Run the tree for so long; return the pauses between the starts of a child."""
    async with trio.open_nursery() as nursery:
        await nursery.start(tree.run)
        await trio.sleep(within_s)
        nursery.cancel_scope.cancel()
    return [round(later - earlier, 3) for earlier, later in itertools.pairwise(starts)]


def failing_at_once(starts: list[float]) -> Any:
    """Return the start of a child that comes up and fails."""

    async def start(*, task_status: trio.TaskStatus[Any]) -> None:
        starts.append(trio.current_time())
        task_status.started()
        raise ExceptionGroup("a nursery's", [OSError("no")])

    return start


async def test_pauses_double_up_to_a_bound(autojump_clock: trio.testing.MockClock) -> None:
    """A child that may keep failing is tried for ever, the seldomer the longer it fails."""
    starts: list[float] = []
    tree = ChildSupervisor([ChildSpec("a", failing_at_once(starts), may_keep_failing=True)])
    pauses = await starts_of(tree, starts, within_s=60)
    assert pauses[:9] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert set(pauses[7:]) == {5.0}
    assert sum(pauses) > 50


async def test_a_child_that_ran_for_a_while_is_restarted_without_delay(autojump_clock: trio.testing.MockClock) -> None:
    """A failure once in a while is no crash loop."""
    starts: list[float] = []

    async def start(*, task_status: trio.TaskStatus[Any]) -> None:
        starts.append(trio.current_time())
        task_status.started()
        await trio.sleep(40)
        raise OSError("once in a while")

    pauses = await starts_of(ChildSupervisor([ChildSpec("a", start)]), starts, within_s=400)
    assert pauses == [40.05] * 9


async def test_a_child_may_say_that_to_restart_it_is_pointless(autojump_clock: trio.testing.MockClock) -> None:
    """The first time is the last: the others stop in order, and who runs the tree hears why."""
    journal = Journal()
    failing = trio.Event()

    async def start(*, task_status: trio.TaskStatus[Any]) -> None:
        journal.lines.append("start b")
        task_status.started()
        await failing.wait()
        raise ExceptionGroup("a nursery's", [GiveUp("the disk is gone")])

    tree = ChildSupervisor([journal.child("a"), ChildSpec("b", start), journal.child("c")])
    with pytest.RaisesGroup(pytest.RaisesExc(GiveUp, match="b: the disk is gone"), flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            await nursery.start(tree.run)
            failing.set()
    assert journal.lines == ["start a", "start b", "start c", "stop c", "stop a"]
