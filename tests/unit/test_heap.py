"""The keeper of the daemon's heap: no collection looks at much, and nothing that dies stays."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import trio
import trio.testing

from sandkasten.cli import heap as keeper
from sandkasten.cli.heap import DUE, FEW_TASKS, QUIET_S, Heap

QUIET_SHARE = 0.004
"""A fifth of the keeper's, so that a busy daemon has less to compute here."""


class Node:
    """An object in a cycle."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def heap() -> Iterator[Heap]:
    heap = Heap()
    with heap.kept():
        yield heap


def test_a_full_collection_looks_at_little_however_large_the_heap_is(heap: Heap) -> None:
    """Beside 200,000 objects that live, each full collection looks at what came since the last one."""
    looked_at = []

    def note(phase: str, info: Mapping[str, Any]) -> None:
        if phase == "start" and info["generation"] == 2:
            looked_at.append(sum(len(gc.get_objects(generation)) for generation in range(3)))

    gc.callbacks.append(note)
    try:
        kept = [Node() for _ in range(200_000)]
    finally:
        gc.callbacks.remove(note)
    assert len(looked_at) > 10
    assert max(looked_at) < 14_000
    assert gc.get_freeze_count() > len(kept)


def test_what_is_frozen_is_freed_with_its_last_reference_or_by_a_sweep(heap: Heap) -> None:
    """The sweep is for cycles."""
    plain, cycle = set[int](), Node()
    gone: list[weakref.ref[Any]] = [weakref.ref(plain), weakref.ref(cycle)]
    before = heap.frozen
    gc.collect()
    assert heap.frozen == before + 1
    del plain, cycle
    gc.collect()
    assert [each() is None for each in gone] == [True, False]
    heap.sweep()
    assert [each() is None for each in gone] == [True, True]
    assert heap.frozen == 0


async def test_a_sweep_waits_for_a_quiet_moment(
    heap: Heap, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep comes when the daemon does nothing, and when as much was frozen as the last one left."""
    monkeypatch.setattr(keeper, "QUIET_SHARE", QUIET_SHARE)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(heap.run)
        heap.frozen = DUE - 1
        await trio.sleep(2 * QUIET_S)
        assert heap.frozen == DUE - 1
        heap.frozen = DUE
        await trio.sleep(2 * QUIET_S)
        assert heap.frozen == 0
        with trio.CancelScope() as busy:
            nursery.start_soon(_compute, busy)
            await trio.lowlevel.checkpoint()
            heap.frozen = DUE
            await trio.sleep(3 * QUIET_S)
            assert heap.frozen == DUE
            heap.left = gc.get_freeze_count() // 2
            await trio.sleep(2 * QUIET_S)
            assert heap.frozen == 0
        nursery.cancel_scope.cancel()


async def test_sessions_that_ended_are_swept_without_more_work(
    heap: Heap, autojump_clock: trio.testing.MockClock
) -> None:
    """Tasks are gone: so are objects in cycles, though no collection begins for want of new objects."""
    async with trio.open_nursery() as nursery, trio.open_nursery() as sessions:
        for _ in range(2 * FEW_TASKS):
            sessions.start_soon(trio.sleep_forever)
        await trio.sleep(1)
        node = Node()
        cycle = weakref.ref(node)
        heap.sweep()
        del node
        nursery.start_soon(heap.run)
        await trio.sleep(2 * QUIET_S)
        assert cycle() is not None
        assert heap.frozen < DUE
        sessions.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await trio.sleep(2 * QUIET_S)
        nursery.cancel_scope.cancel()
    assert cycle() is None


async def _compute(_scope: trio.CancelScope) -> None:
    """Use a processor in each of the keeper's periods."""
    while True:
        until_s = time.thread_time() + QUIET_SHARE * QUIET_S / 2
        while time.thread_time() < until_s:
            pass
        await trio.sleep(QUIET_S / 3)


def test_afterwards_the_heap_is_as_it_was() -> None:
    """Thresholds and callbacks of a program that goes on are its own again."""
    before = gc.get_threshold(), len(gc.callbacks)
    with Heap().kept():
        assert gc.get_threshold() != before[0]
    assert (gc.get_threshold(), len(gc.callbacks)) == before
    assert gc.get_freeze_count() == 0
