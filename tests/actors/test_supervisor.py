"""Supervision: start order, reverse stop, restarts with back-off, and giving up."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import trio
import trio.testing

from sandkasten.actors.supervisor import ChildSpec, ChildSupervisor, RestartIntensityExceeded


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
    """What a bare nursery does not do."""
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
